// Turns some elements of each head in place, and writes a step's keys, which all heads share and which are values, too, to
// the blocks of the cache, turned likewise (DeepSeek-V4): of a head's halves, the first numbers turn with each other.
//
// One block of threads a token. Rows are read and written in vectors of 16 bytes; a pair of vectors, half a head apart, is
// one thread's.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of all that is given; CACHE, the same, or INT8 or E4M3, which
// store codes with a scale a token, and the bytes of rotated ones that are left behind them: see kernels/compressed_rows.py.

#include "numbers.cuh"
#include "e4m3.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "rotation.cuh"
#include "quantised.cuh"

static_assert(QUANTISED || int(CACHE) == int(NUMBER), "only quantised caches differ from what is given");

// rows:           [tokens, heads, size]; row_stride is bytes from token to token. Heads lie side by side
// key:            [tokens, size], or null: nothing is written
// cosines, sines: [tokens, angles], of which the first `turning` count; the others are of elements that stay
// arena, ...:     as of write_latents; key_at and scale_at are where the first key and scale are in a slot, in bytes
// grid:           the tokens; threads: any number of warps
extern "C" __global__ void turn_rows(
    char* rows, const char* key, const float* cosines, const float* sines, char* arena, const int* cu_seqlens_q,
    const int* seq_lens, const int* block_tables, const int* head_groups, const int* head_slots,
    long long row_stride, long long key_stride, long long block_bytes, long long slot_bytes, long long key_at,
    long long scale_at,
    int batch, int groups, int table_stride, int block_size, int heads, int size, int angles, int turning)
{
    const int token = blockIdx.x;
    const int half_bytes = size / 2 * NUMBER_BYTES, pairs = size / 2 / ELEMENTS, turning_pairs = turning / ELEMENTS;
    cosines += static_cast<long long>(token) * angles, sines += static_cast<long long>(token) * angles;
    rows += token * row_stride;
    for (int i = threadIdx.x; i < heads * turning_pairs; i += blockDim.x) {
        char* low = rows + static_cast<long long>(i / turning_pairs) * 2 * half_bytes;
        const int at = i % turning_pairs;
        const Pair turned = rotated(low, at, half_bytes, cosines, sines);
        store(low + at * VECTOR, turned.low), store(low + half_bytes + at * VECTOR, turned.high);
    }
    if (!key) return;

    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (sequence == batch) return;  // padding
    const int position = seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token;
    const long long row = static_cast<long long>(sequence) * groups + head_groups[0];
    const int block = block_tables[row * table_stride + position / block_size];
    if (block < 0) return;
    char* slot = arena + block * block_bytes + head_slots[0] * slot_bytes;
    const long long row_bytes = QUANTISED ? size + 2 * turning : 2 * half_bytes;
    char* to = slot + key_at + position % block_size * row_bytes;
    key += token * key_stride;
    if constexpr (QUANTISED) {
        float largest = 0.0f, turned_largest = 0.0f;
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const bool turns = i < turning_pairs;
            const Pair turned = rotated(key, i, half_bytes, turns ? cosines : nullptr, sines);
            const float most = largest_of(turned.high, largest_of(turned.low, turns ? turned_largest : largest));
            if (turns) turned_largest = most;
            else largest = most;
        }
        const float scale = scale_of(largest_of_block(larger(largest, turned_largest / TURNED)));
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const bool turns = i < turning_pairs;
            const Pair turned = rotated(key, i, half_bytes, turns ? cosines : nullptr, sines);
            char *low = to + i * ELEMENTS, *high = low + size / 2, *fine = to + size + i * ELEMENTS;
            if (turns) {
                store_coarse_and_fine(low, fine, turned.low, scale);
                store_coarse_and_fine(high, fine + turning, turned.high, scale);
            } else {
                store_bytes(low, rounded(turned.low, scale)), store_bytes(high, rounded(turned.high, scale));
            }
        }
        if (threadIdx.x == 0) reinterpret_cast<float*>(slot + scale_at)[position % block_size] = scale;
    } else {
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const Pair turned = rotated(key, i, half_bytes, i < turning_pairs ? cosines : nullptr, sines);
            store(to + i * VECTOR, turned.low), store(to + half_bytes + i * VECTOR, turned.high);
        }
    }
}
