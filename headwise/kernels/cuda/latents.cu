// Writes a step's latents (MLA) to the blocks of the cache, rotating their last part and queries on the way if asked to.
//
// One block of threads a token. Rows are read and written in vectors of 16 bytes; what is rotated is a pair of vectors,
// half the rotated part apart, which one thread has.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of what is given; CACHE, the same, or INT8 or E4M3, which store
// `compressed | coarse | fine` and a scale per token: see kernels/mla_quantised.py; or INT4, which stores the same in
// groups of 32 with a scale and a minimum each: see kernels/mla_nibbles.py. Both parts of a latent must be whole groups.

#include "numbers.cuh"
#include "e4m3.cuh"
#include "nibbles.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "rotation.cuh"
#include "quantised.cuh"

constexpr bool PACKED = CACHE == INT4;

static_assert(QUANTISED || PACKED || int(CACHE) == int(NUMBER), "only quantised caches differ from what is given");
static_assert(SCALED == WARP, "a warp has a group");

// ---- int4 ----

__device__ __forceinline__ float number_of(const char* row, int at)
{
    return to_f32<NUMBER>(NUMBER == F32 ? reinterpret_cast<const unsigned*>(row)[at]
                                        : reinterpret_cast<const unsigned short*>(row)[at]);
}

// Number `at` of a row of 2 * half, rotated as `rotated` does.
__device__ __forceinline__ float turned_number(const char* row, int at, int half, const float* cosines, const float* sines)
{
    const float own = number_of(row, at);
    if (!cosines) return own;
    const bool is_low = at < half;
    const int angle = is_low ? at : at - half;
    const float other = number_of(row, is_low ? at + half : at - half);
    const float along = own * cosines[angle], across = other * sines[angle];
    return to_f32<NUMBER>(from_f32<NUMBER>(is_low ? along - across : across + along));
}

// Stores a group, of which each lane of a warp has a number, and returns what is read of it.
__device__ __forceinline__ float store_group(char* codes, unsigned* scales, float value)
{
    const int lane = threadIdx.x % WARP;
    value = clipped(value);
    float lowest = value, highest = value;
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        lowest = lower(lowest, __shfl_xor_sync(ALL_LANES, lowest, across));
        highest = larger(highest, __shfl_xor_sync(ALL_LANES, highest, across));
    }
    const Steps steps = steps_of(lowest, highest);
    const unsigned code = code_of(value, steps), behind = __shfl_sync(ALL_LANES, code, (lane + HALF) % WARP);
    if (lane < HALF) codes[lane] = code | behind << 4;
    if (lane == 0) *scales = steps.word();
    return read_of(code, steps);
}

// query:              [tokens, heads, head_dim], whose last `rotated_dim` numbers are rotated in place
// compressed, shared: [tokens, rank] and [tokens, rotated_dim]; strides are bytes from token to token
// cosines, sines:     [tokens, rotated_dim / 2], or null: nothing is rotated
// arena, layout:      see BlockLayout; *_at are byte offsets of the roles within a slot
// batch, tables, ...: see AttentionBatch and HeadTable; table_stride is from row to row of block_tables
// part, parts:        of the tokens that are stored, see TokenShare; block_size is of these
// grid:               the tokens; threads: any number of warps
extern "C" __global__ void write_latents(
    char* query, const char* compressed, const char* shared, const float* cosines, const float* sines,
    char* arena, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* head_groups, const int* head_slots,
    long long query_stride, long long compressed_stride, long long shared_stride,
    long long block_bytes, long long slot_bytes, long long latent_at, long long scale_at,
    int batch, int groups, int table_stride, int block_size, int heads, int head_dim, int rank, int rotated_dim,
    int part, int parts)
{
    const int token = blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (sequence == batch) return;  // padding
    const int half = rotated_dim / 2, pairs = half / ELEMENTS, half_bytes = half * NUMBER_BYTES;
    if (cosines) cosines += static_cast<long long>(token) * half, sines += static_cast<long long>(token) * half;

    char* turning = query + token * query_stride + (head_dim - rotated_dim) * NUMBER_BYTES;
    rotate_heads(turning, heads, static_cast<long long>(head_dim) * NUMBER_BYTES, rotated_dim, cosines, sines);

    const int of_all = seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token, position = of_all / parts;
    if (of_all % parts != part) return;
    const long long row = static_cast<long long>(sequence) * groups + head_groups[0];
    const int block = block_tables[row * table_stride + position / block_size];
    if (block < 0) return;
    char* slot = arena + block * block_bytes + head_slots[0] * slot_bytes;
    const int width = QUANTISED || PACKED ? rank + 2 * rotated_dim : rank + rotated_dim;
    const int row_bytes = PACKED ? width / 2 : width * CACHE_BYTES;
    char* to = slot + latent_at + static_cast<long long>(position % block_size) * row_bytes;
    const char* plain = compressed + token * compressed_stride;
    const char* carrying = shared + token * shared_stride;
    const int vectors = rank / ELEMENTS;

    if constexpr (QUANTISED) {
        float largest = 0.0f;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x)
            largest = largest_of(widened(load(plain + i * VECTOR)), largest);
        float turned_largest = 0.0f;
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const Pair turned = rotated(carrying, i, half_bytes, cosines, sines);
            turned_largest = largest_of(turned.high, largest_of(turned.low, turned_largest));
        }
        const float scale = scale_of(largest_of_block(larger(largest, turned_largest / TURNED)));
        for (int i = threadIdx.x; i < vectors; i += blockDim.x)
            store_bytes(to + i * ELEMENTS, rounded(widened(load(plain + i * VECTOR)), scale));
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const Pair turned = rotated(carrying, i, half_bytes, cosines, sines);
            char* coarse = to + rank + i * ELEMENTS;
            store_coarse_and_fine(coarse, coarse + rotated_dim, turned.low, scale);
            store_coarse_and_fine(coarse + half, coarse + half + rotated_dim, turned.high, scale);
        }
        if (threadIdx.x == 0) reinterpret_cast<float*>(slot + scale_at)[position % block_size] = scale;
    } else if constexpr (PACKED) {
        const int lane = threadIdx.x % WARP, before = rank / SCALED, turning_groups = rotated_dim / SCALED;
        unsigned* scales = reinterpret_cast<unsigned*>(slot + scale_at) + position % block_size * (width / SCALED);
        for (int group = threadIdx.x / WARP; group < before + turning_groups; group += blockDim.x / WARP) {
            const bool turns = group >= before;
            const int at = group * SCALED + lane;
            const float value = turns ? turned_number(carrying, at - rank, half, cosines, sines) : number_of(plain, at);
            const float coarse = store_group(to + group * HALF, scales + group, value);
            const int second = group + turning_groups;  // what is left of rotated numbers
            if (turns) store_group(to + second * HALF, scales + second, value - coarse);
        }
    } else {
        for (int i = threadIdx.x; i < vectors; i += blockDim.x)
            *reinterpret_cast<uint4*>(to + i * VECTOR) = load(plain + i * VECTOR);
        char* turned_to = to + rank * NUMBER_BYTES;
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const Pair turned = rotated(carrying, i, half_bytes, cosines, sines);
            store(turned_to + i * VECTOR, turned.low), store(turned_to + half_bytes + i * VECTOR, turned.high);
        }
    }
}
