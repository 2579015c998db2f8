// Turns some elements of each head in place, and writes a step's keys, which all heads share and which are values, too, to
// the blocks of the cache, turned likewise (DeepSeek-V4): of a head's halves, the first numbers turn with each other.
//
// One block of threads a token. Rows are read and written in vectors of 16 bytes; a pair of vectors, half a head apart, is
// one thread's.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of all that is given, and of the cache.

#include "numbers.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "rotation.cuh"

// rows:           [tokens, heads, size]; row_stride is bytes from token to token. Heads lie side by side
// key:            [tokens, size], or null: nothing is written
// cosines, sines: [tokens, angles], of which the first `turning` count; the others are of elements that stay
// arena, ...:     as of write_latents; key_at is where the first key is in a slot, in bytes
// grid:           the tokens; threads: any number of warps
extern "C" __global__ void turn_rows(
    char* rows, const char* key, const float* cosines, const float* sines, char* arena, const int* cu_seqlens_q,
    const int* seq_lens, const int* block_tables, const int* head_groups, const int* head_slots,
    long long row_stride, long long key_stride, long long block_bytes, long long slot_bytes, long long key_at,
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
    char* to = arena + block * block_bytes + head_slots[0] * slot_bytes + key_at;
    to += static_cast<long long>(position % block_size) * 2 * half_bytes;
    key += token * key_stride;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const Pair turned = rotated(key, i, half_bytes, i < turning_pairs ? cosines : nullptr, sines);
        store(to + i * VECTOR, turned.low), store(to + half_bytes + i * VECTOR, turned.high);
    }
}
