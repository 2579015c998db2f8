// Rows of scores, [rows, vocab]: their logits by 16 bytes a load, the order of these, and the first of the largest.
// Several blocks, its parts, share a row: blockIdx.x of the row blockIdx.y. Wants vectors.cuh.

typedef unsigned long long Mass;  // of tokens: how many they are, or what they weigh

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int MOST_THREADS = 512;
constexpr int MOST_PARTS = 32;
constexpr unsigned NAN_KEY = 0xffffffffu, INFINITY_KEY = 0xff800000u, MINUS_INFINITY_KEY = 0x007fffffu;

__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

__device__ __forceinline__ Mass smaller(Mass a, Mass b) { return a < b ? a : b; }

// ---- logits, and keys in their order ----

// Few models have caps: called, it takes none of the others' registers or instructions.
__device__ __noinline__ static float capped(float score, float cap) { return cap * tanhf(score / cap); }

struct Scores {
    const char* first;  // the vector in which the row begins
    float cap;          // of logits, cap * tanh(score / cap); 0 for none
    int lead;           // elements of that vector before the row
    int vocab, shift;

    __device__ __forceinline__ int vectors() const { return (lead + vocab + ELEMENTS - 1) / ELEMENTS; }

    // Calls `see(token, logit)` for the tokens of a vector, in their order.
    template <class See>
    __device__ __forceinline__ void visit(int vector, const See& see) const
    {
        const int token = vector * ELEMENTS - lead;
        const char* from = first + static_cast<long long>(vector) * VECTOR;
        if (token < 0 || token + ELEMENTS > vocab) {  // of which other rows have a part
#pragma unroll 1
            for (int i = 0; i < ELEMENTS; i++) {
                if (token + i < 0 || token + i >= vocab) continue;
                const float score = NUMBER == F32 ? reinterpret_cast<const float*>(from)[i]
                                                  : to_f32<NUMBER>(reinterpret_cast<const unsigned short*>(from)[i]);
                see(token + i, (cap == 0.0f ? score : capped(score, cap)) + 0.0f);
            }
            return;
        }
        Floats scores = widened(load(from));
        if (cap != 0.0f) {
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) scores.at[i] = capped(scores.at[i], cap);
        }
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) see(token + i, scores.at[i] + 0.0f);  // there is one zero only
    }

    // NaN is above all. What is equal for all numbers of the dtype is cut off.
    __device__ __forceinline__ unsigned key(float logit) const
    {
        if (logit != logit) return NAN_KEY >> shift;
        const unsigned bits = __float_as_uint(logit);
        return (bits >> 31 ? ~bits : bits | 0x80000000u) >> shift;
    }

    __device__ __forceinline__ float logit_of(unsigned key) const
    {
        if (key == NAN_KEY >> shift) return __uint_as_float(0x7fc00000u);
        const unsigned whole = key << shift;
        return __uint_as_float(whole >> 31 ? whole & 0x7fffffffu : ~(whole | ((1u << shift) - 1)));
    }
};

__device__ __forceinline__ Scores scores_of_row(const char* row, float cap, int vocab)
{
    const int beyond = reinterpret_cast<unsigned long long>(row) % VECTOR;
    const int shift = cap != 0.0f || NUMBER == F32 ? 0 : NUMBER == BF16 ? 16 : 13;
    return Scores{row - beyond, cap, beyond * ELEMENTS / VECTOR, vocab, shift};
}

// ---- the parts of a row ----

// Vectors of a row.
struct Span {
    int begin, end;
};

// Of a warp: so many vectors, but for the last ones.
__device__ __forceinline__ int chunk_size(const Scores& scores)
{
    const int chunks = gridDim.x * (blockDim.x / WARP);
    return (scores.vectors() + chunks - 1) / chunks;
}

// What warp `chunk % warps` of the part `chunk / warps` has of the row.
__device__ __forceinline__ Span span_of(const Scores& scores, int chunk)
{
    const int vectors = scores.vectors(), size = chunk_size(scores);
    return Span{smaller(chunk * size, vectors), smaller(chunk * size + size, vectors)};
}

// Calls `see(token, logit)` for all tokens of the calling warp; each lane sees its own in their order.
template <class See>
__device__ __forceinline__ void walk(const Scores& scores, const See& see)
{
    const Span span = span_of(scores, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    for (int vector = span.begin + threadIdx.x % WARP; vector < span.end; vector += WARP) scores.visit(vector, see);
}

// Counts a part, by one of its threads, behind a barrier; whether it is the last of the row. Then what all parts wrote
// before can be read past the first cache. `arrived` is 0 before and after.
__device__ __forceinline__ bool arrives_last(unsigned* arrived)
{
    __threadfence();
    const bool is_last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
    return is_last;
}

// ---- the likeliest token ----

// A key and a token as one number: the first of the tokens with the largest key has the largest.
__device__ __forceinline__ Mass ranked(unsigned key, int token)
{
    return static_cast<Mass>(key) << 32 | (0xffffffffu - token);
}

__device__ __forceinline__ int token_of(Mass rank) { return 0xffffffffu - static_cast<unsigned>(rank); }

__device__ __forceinline__ Mass shuffled(Mass mass, int from)
{
    const unsigned low = __shfl_sync(ALL_LANES, static_cast<unsigned>(mass), from);
    const unsigned high = __shfl_sync(ALL_LANES, static_cast<unsigned>(mass >> 32), from);
    return static_cast<Mass>(high) << 32 | low;
}

__device__ __forceinline__ Mass largest_of_warp(Mass rank)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        const Mass other = shuffled(rank, threadIdx.x % WARP ^ across);
        rank = rank < other ? other : rank;
    }
    return rank;
}

// The largest rank of the row, for the first warp of the part that is done last; for all other threads 0.
//
// of_parts:  [parts], of the row; arrived: the row's, see `arrives_last`
// of_chunks: [chunks], the largest key that each warp has, for that last one to read; or null
__device__ __forceinline__ Mass first_of_row(
    const Scores& scores, Mass* of_parts, unsigned* arrived, unsigned* of_chunks = nullptr)
{
    __shared__ Mass of_warps[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    unsigned best = 0;  // less than any key
    int first = 0;
    walk(scores, [&](int token, float logit) {
        const unsigned key = scores.key(logit);
        if (key > best) best = key, first = token;
    });
    Mass largest = largest_of_warp(best ? ranked(best, first) : 0);
    if (lane == 0) {
        of_warps[warp] = largest;
        if (of_chunks) of_chunks[blockIdx.x * warps + warp] = largest >> 32;
    }
    __syncthreads();
    if (warp > 0) return 0;
    largest = largest_of_warp(lane < warps ? of_warps[lane] : 0);
    bool is_last = false;
    if (lane == 0) {
        of_parts[blockIdx.x] = largest;
        is_last = arrives_last(arrived);
    }
    if (!__shfl_sync(ALL_LANES, static_cast<int>(is_last), 0)) return 0;
    return largest_of_warp(lane < gridDim.x ? __ldcg(of_parts + lane) : 0);
}
