// The sum of a small tensor over the ranks of one node in one launch, with the residual stream and its norm or without.
//
// Each rank has memory that the others have mapped: PART bytes for even steps, as many for odd ones, then FLAGS and STATE.
// A block copies its rows into its own rank's part, tells every other rank's same block by a flag that lies with that
// rank, waits for theirs, and reads what they have. Sums are in rank order, in float32: all ranks get the same bits.
//
// A step is one launch; ranks launch the same ones in the same order. Nobody writes to a part that another rank reads
// still: whoever is in step n + 2 has seen some flag of n + 1 of each rank, which that rank's launch n + 1 wrote, and
// its launch n, which read the part, was over then. So two parts and one wait a step are enough. The step's number lies
// in STATE and is counted by the block that ends last, so a graph that is launched again goes on where the last one was.
//
// All blocks must run side by side, as they wait: there are at most BLOCKS.
//
// Macros of a variant: NUMBER, the dtype; HELD, vectors of a row that a thread keeps; RANKS; PART, in bytes; BLOCKS.

#include "numbers.cuh"
#include "vectors.cuh"
#include "norms.cuh"

constexpr int MOST_RANKS = 8;
constexpr int FLAGS = 2 * PART;                    // Step [RANKS][BLOCKS]: the last one that a rank's block told of
constexpr int STATE = FLAGS + RANKS * BLOCKS * 8;  // Step: the last that is over; then unsigned: its blocks that are

typedef unsigned long long Step;  // in 32 bits, a block that was not needed for two days would take an old flag for a new one

#ifdef __CUDACC__
// What this block wrote before, behind a barrier, is seen by whoever sees the value.
__device__ __forceinline__ void tell(Step* flag, Step value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ Step told(const Step* flag)
{
    Step value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// Past the SM's own cache, which may have what lay there two steps ago.
__device__ __forceinline__ uint4 load_fresh(const char* from)
{
    uint4 vector;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w) : "l"(from) : "memory");
    return vector;
}
#endif

// Publishes this block's rows of x and waits for those of all ranks; the number of the step. All threads take part.
__device__ __forceinline__ Step exchange(
    char* const (&ranks)[MOST_RANKS], char* own, const char* x, int rank, int rows, int vectors)
{
    const Step step = *reinterpret_cast<const Step*>(own + STATE) + 1;
    char* part = own + step % 2 * PART;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const int begin = row * vectors;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int vector = i * blockDim.x + threadIdx.x;
            if (vector >= vectors) continue;
            *reinterpret_cast<uint4*>(part + (begin + vector) * VECTOR) = load(x + (begin + vector) * VECTOR);
        }
    }
    __syncthreads();
    const int other = threadIdx.x;
    char* there = ranks[0];
#pragma unroll
    for (int i = 1; i < RANKS; i++) there = other == i ? ranks[i] : there;
    if (other < RANKS && other != rank) {
        tell(reinterpret_cast<Step*>(there + FLAGS) + rank * BLOCKS + blockIdx.x, step);
        const Step* flag = reinterpret_cast<const Step*>(own + FLAGS) + other * BLOCKS + blockIdx.x;
        while (told(flag) < step) {}  // that rank may be a step ahead
    }
    __syncthreads();
    return step;
}

__device__ __forceinline__ void add(Floats& sum, const uint4& vector)
{
    const Floats floats = widened(vector);
#pragma unroll
    for (int j = 0; j < ELEMENTS; j++) sum.at[j] += floats.at[j];
}

// The vectors of a row that this thread keeps, summed over the ranks; then of a row's `bias`, unless null, and of
// `residual`, if ADDS.
template <bool ADDS>
__device__ __forceinline__ void sum_ranks(
    uint4 (&sums)[HELD], char* const (&ranks)[MOST_RANKS], Step step, int row, int vectors, const char* residual,
    const char* bias)
{
    const int begin = row * vectors * VECTOR, part = step % 2 * PART;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int vector = i * blockDim.x + threadIdx.x, at = begin + vector * VECTOR;
        uint4 parts[RANKS], before, more = {};
        if (vector < vectors) {
#pragma unroll
            for (int rank = 0; rank < RANKS; rank++) parts[rank] = load_fresh(ranks[rank] + part + at);
            if (ADDS) before = load(residual + at);
            if (ADDS && bias) more = load(bias + vector * VECTOR);
        }
        __syncwarp();  // else the assembler saves registers: it loads some, adds them up, and only then loads the others
        if (vector >= vectors) continue;
        Floats sum = widened(parts[0]);
#pragma unroll
        for (int rank = 1; rank < RANKS; rank++) add(sum, parts[rank]);
        if (ADDS && bias) add(sum, more);
        if (ADDS) add(sum, before);
        sums[i] = narrowed(sum);
    }
}

// Counts the step, once all blocks have read its number.
__device__ __forceinline__ void count_step(char* own, Step step)
{
    unsigned* ended = reinterpret_cast<unsigned*>(own + STATE + 8);
    if (threadIdx.x == 0 && atomicInc(ended, gridDim.x - 1) == gridDim.x - 1) *reinterpret_cast<Step*>(own + STATE) = step;
}

// r0 ... r7:  the ranks' memory, as this one has it mapped; null from RANKS on
// own:        that of `rank`, this one
// x, out:     [rows, vectors], at most PART bytes; out may be x
// grid:       min(rows, BLOCKS) blocks, the same on all ranks; HELD * blockDim.x >= vectors
extern "C" __global__ void __launch_bounds__(512, 1) all_reduce(
    char* r0, char* r1, char* r2, char* r3, char* r4, char* r5, char* r6, char* r7, char* own, int rank,
    const char* x, char* out, int rows, int vectors)
{
    char* const ranks[MOST_RANKS] = {r0, r1, r2, r3, r4, r5, r6, r7};
    const Step step = exchange(ranks, own, x, rank, rows, vectors);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        uint4 sums[HELD];
        sum_ranks<false>(sums, ranks, step, row, vectors, nullptr, nullptr);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int vector = i * blockDim.x + threadIdx.x;
            if (vector < vectors) *reinterpret_cast<uint4*>(out + (row * vectors + vector) * VECTOR) = sums[i];
        }
    }
    count_step(own, step);
}

// As all_reduce, of sum = residual + bias + the ranks' x, rounded once; and out, its norm with the weight of one row.
//
// residual, sum, out:  [rows, vectors]; sum may be residual
// bias:                [vectors], or null; the same on all ranks
extern "C" __global__ void __launch_bounds__(512, 1) all_reduce_norm(
    char* r0, char* r1, char* r2, char* r3, char* r4, char* r5, char* r6, char* r7, char* own, int rank,
    const char* x, const char* residual, const char* bias, const float* __restrict__ weight, char* sum, char* out,
    int rows, int vectors, float eps)
{
    char* const ranks[MOST_RANKS] = {r0, r1, r2, r3, r4, r5, r6, r7};
    const Step step = exchange(ranks, own, x, rank, rows, vectors);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const int begin = row * vectors * VECTOR;
        uint4 sums[HELD];
        sum_ranks<true>(sums, ranks, step, row, vectors, residual, bias);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int vector = i * blockDim.x + threadIdx.x;
            if (vector < vectors) *reinterpret_cast<uint4*>(sum + begin + vector * VECTOR) = sums[i];
        }
        norm_row(sums, weight, out + begin, true, vectors, blockDim.x, eps);
        __syncthreads();  // before the next row's sums over warps
    }
    count_step(own, step);
}
