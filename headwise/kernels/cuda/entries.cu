// Makes entries of several tokens each (DeepSeek-V4) of rows in the blocks of the cache, and stores them there: see
// kernels/compressed_base.py, whose words these are.
//
// A block of threads makes an entry, or an indexer's key for it: a run of threads has a row of vectors of 16 bytes, and
// each run some of the tokens, whose weighted sums are then added up. Arithmetic is in float32.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of rows; CACHE, of entries: the same, or INT8 or E4M3, as of
// turned.cu.

#include "numbers.cuh"
#include "e4m3.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "quantised.cuh"

static_assert(QUANTISED || int(CACHE) == int(NUMBER), "only quantised caches differ from rows");

constexpr int NUMBER_BYTES = 4 / WORD_ELEMENTS;
constexpr int THREADS = 256;
constexpr unsigned MINUS_INFINITY = 0xff800000u;

// rows:  [tokens, ...], row_stride bytes apart: what entries are made of, then what keys for an indexer are, each in its
//        pieces
// ...:   as of make_entries; row_bytes and index_row_bytes are of a piece, pieces and index_pieces how many there are
// grid:  the tokens; threads: any number of warps
extern "C" __global__ void write_pieces(
    const char* rows, char* arena, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* row_groups, const int* row_slots, const int* index_row_groups, const int* index_row_slots,
    long long row_stride, long long block_bytes,
    long long row_slot_bytes, long long row_at, long long row_bytes,
    long long index_row_slot_bytes, long long index_row_at, long long index_row_bytes,
    int batch, int groups, int table_stride, int block_size, int pieces, int index_pieces)
{
    const int token = blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (sequence == batch) return;  // padding
    const int position = seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token;
    const int* column = block_tables + static_cast<long long>(sequence) * groups * table_stride + position / block_size;
    const int own = pieces * static_cast<int>(row_bytes / VECTOR);
    const int all = own + index_pieces * static_cast<int>(index_row_bytes / VECTOR);
    rows += token * row_stride;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const bool is_index = i >= own;
        const long long bytes = is_index ? index_row_bytes : row_bytes;
        const int within = is_index ? i - own : i, vectors = static_cast<int>(bytes / VECTOR), piece = within / vectors;
        const int group = is_index ? index_row_groups[piece] : row_groups[piece];
        const int block = column[static_cast<long long>(group) * table_stride];
        if (block < 0) continue;
        char* to = arena + block * block_bytes + within % vectors * VECTOR + position % block_size * bytes;
        to += is_index ? index_row_slots[piece] * index_row_slot_bytes + index_row_at : row_slots[piece] * row_slot_bytes + row_at;
        *reinterpret_cast<uint4*>(to) = load(rows + i * VECTOR);
    }
}

// Of the numbers of one vector, what tokens make so far: their highest gates, and sums by weights relative to these.
struct Mixed {
    float highest[ELEMENTS], total[ELEMENTS], sum[ELEMENTS];
};

__device__ __forceinline__ void add_token(Mixed& mixed, const Floats& keys, const Floats& gates, const Floats& bias)
{
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const float gate = gates.at[i] + bias.at[i], highest = larger(mixed.highest[i], gate);
        const float fading = expf(mixed.highest[i] - highest), weight = expf(gate - highest);
        mixed.highest[i] = highest;
        mixed.total[i] = mixed.total[i] * fading + weight;
        mixed.sum[i] = mixed.sum[i] * fading + weight * keys.at[i];
    }
}

// Of `value` over the block, all of whose threads take part.
__device__ __forceinline__ float sum_of_block(float value)
{
    __shared__ float of_warps[WARP];
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    if (lane == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = lane < blockDim.x / WARP ? of_warps[lane] : 0.0f;
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    return value;
}

__device__ __forceinline__ void store_number(char* to, float value)
{
    if constexpr (NUMBER == F32) *reinterpret_cast<float*>(to) = value;
    else *reinterpret_cast<unsigned short*>(to) = from_f32<NUMBER>(value);
}

// Of the sequences' entries whose last token may be of the step, as many as there is room for before a sequence's.
__device__ __forceinline__ int room_before(const int* cu_seqlens_q, int sequence, int rate)
{
    return cu_seqlens_q[sequence] / rate + sequence;
}

// arena, batch, tables, ...: as of write_latents; rows and entries lie in blocks of their own, of the same bytes
// bias:        [rate, keys * size], a token's by its place; keys: 2 where entries overlap, else 1
// norm:        [size]; inverse: [size / 2]
// index_...:   the same of keys for an indexer
// row_bytes:   of a token's piece of a row, [keys | gates] of `piece` numbers each; row_groups, row_slots: of each piece
// row_at, entry_at, index_at: where the first row, entry and key is in a slot, in bytes; entry_bytes, index_bytes: from
//              one to the next. entry_at is of the layer's own part of an entry
// ..._scale_at: likewise where their first scale is; entry_scales: of an entry, which may be several layers'
// turning:     of each half of an entry the first numbers, that turn and take two bytes; none of an indexer's key
// block_size:  tokens of a block; block_entries: entries of one
// grid:        room for all entries, tokens / rate + batch; and 2 with an indexer, else 1. threads: THREADS
extern "C" __global__ void __launch_bounds__(THREADS) make_entries(
    char* arena, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* entry_groups, const int* entry_slots,
    const float* bias, const float* norm, const float* inverse, const int* row_groups, const int* row_slots,
    const float* index_bias, const float* index_norm, const float* index_inverse,
    const int* index_row_groups, const int* index_row_slots,
    long long block_bytes, long long entry_slot_bytes, long long row_slot_bytes, long long row_at, long long row_bytes,
    long long index_row_slot_bytes, long long index_row_at, long long index_row_bytes,
    long long entry_at, long long entry_bytes, long long index_at, long long index_bytes,
    long long entry_scale_at, long long index_scale_at, int entry_scales, int turning,
    int batch, int groups, int table_stride, int block_size, int block_entries, int rate, int keys,
    int size, int index_size, int piece, int index_piece, float eps, float index_eps)
{
    __shared__ float highest[THREADS * ELEMENTS], total[THREADS * ELEMENTS], sum[THREADS * ELEMENTS];
    int sequence = 0;
    for (int begin = 0; begin < batch; begin += WARP) {
        const int i = begin + threadIdx.x % WARP;
        int before = i < batch && room_before(cu_seqlens_q, i + 1, rate) <= static_cast<int>(blockIdx.x);
#pragma unroll
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) before += __shfl_xor_sync(ALL_LANES, before, lanes);
        sequence += before;
    }
    if (sequence == batch) return;
    const int length = seq_lens[sequence], count = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence];
    const int entry = (length - count) / rate + blockIdx.x - room_before(cu_seqlens_q, sequence, rate);
    if (entry >= length / rate) return;

    if (blockIdx.y) {
        bias = index_bias, norm = index_norm, inverse = index_inverse, eps = index_eps;
        size = index_size, piece = index_piece;
        row_groups = index_row_groups, row_slots = index_row_slots;
        row_slot_bytes = index_row_slot_bytes, row_at = index_row_at, row_bytes = index_row_bytes;
    }
    const int* tables = block_tables + static_cast<long long>(sequence) * groups * table_stride;
    const int* entry_table = tables + static_cast<long long>(entry_groups[0]) * table_stride;
    const int to_block = entry_table[((entry + 1) * rate - 1) / block_size];
    if (to_block < 0) return;

    const int vectors = size / ELEMENTS, runs = blockDim.x / vectors;
    const int run = threadIdx.x / vectors, column = threadIdx.x % vectors * ELEMENTS;
    Mixed mixed;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) mixed.highest[i] = __uint_as_float(MINUS_INFINITY), mixed.total[i] = mixed.sum[i] = 0.0f;
    const int own = run < runs ? column / piece : 0;
    const int* row_table = tables + static_cast<long long>(row_groups[own]) * table_stride;
    const char* rows = arena + row_slots[own] * row_slot_bytes + row_at + (column - own * piece) * NUMBER_BYTES;
    const int begin = (entry + 1 - keys) * rate;
    for (int i = run; run < runs && i < keys * rate; i += runs) {
        const int token = begin + i, part = i / rate;
        const int block = token < 0 ? -1 : row_table[token / block_size];
        if (block < 0) continue;
        const char* row = rows + block * block_bytes + token % block_size * row_bytes + part * piece * NUMBER_BYTES;
        const Floats gates = widened(load(row + keys * piece * NUMBER_BYTES));
        add_token(mixed, widened(load(row)), gates, load_floats(bias + (i % rate * keys + part) * size + column));
    }
    if (run < runs) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            const int at = run * size + column + i;
            highest[at] = mixed.highest[i], total[at] = mixed.total[i], sum[at] = mixed.sum[i];
        }
    }
    __syncthreads();
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        float most = highest[i];
        for (int other = 1; other < runs; other++) most = larger(most, highest[other * size + i]);
        float all = 0.0f, value = 0.0f;
        for (int other = 0; other < runs; other++) {
            const float fading = expf(highest[other * size + i] - most);
            all += total[other * size + i] * fading, value += sum[other * size + i] * fading;
        }
        value /= all;
        sum[i] = value, squares += value * value;
    }
    const float scale = sqrtf(sum_of_block(squares) / size + eps);  // behind its barrier all sums are there

    if (blockIdx.y) {  // not before: what sums are made of takes the registers
        entry_at = index_at, entry_bytes = index_bytes;
        entry_scale_at = index_scale_at, entry_scales = 1, turning = 0;
    }
    const int half = size / 2, at = entry % block_entries;
    char* slot = arena + to_block * block_bytes + entry_slots[0] * entry_slot_bytes;
    char* to = slot + entry_at + at * entry_bytes;
    float largest = 0.0f, turned_largest = 0.0f;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float angle = static_cast<float>(entry * rate) * inverse[i], cosine = cosf(angle), sine = sinf(angle);
        const float before = sum[i] / scale * norm[i], behind = sum[half + i] / scale * norm[half + i];
        const float low = before * cosine - behind * sine, high = behind * cosine + before * sine;
        if constexpr (QUANTISED) {
            sum[i] = low, sum[half + i] = high;  // this thread's again
            const float most = larger(fabsf(low), fabsf(high));
            if (i < turning) turned_largest = larger(turned_largest, most);
            else largest = larger(largest, most);
        } else {
            store_number(to + i * NUMBER_BYTES, low), store_number(to + (half + i) * NUMBER_BYTES, high);
        }
    }
    if constexpr (QUANTISED) {
        const float unit = scale_of(largest_of_block(larger(largest, turned_largest / TURNED)));
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
            const float low = rounded(sum[i], unit), high = rounded(sum[half + i], unit);
            to[i] = byte_of(i < turning ? coarse_of(low) : low), to[half + i] = byte_of(i < turning ? coarse_of(high) : high);
            if (i < turning) to[size + i] = byte_of(fine_of(low)), to[size + turning + i] = byte_of(fine_of(high));
        }
        if (threadIdx.x == 0) reinterpret_cast<float*>(slot + entry_scale_at)[at * entry_scales] = unit;
    }
}
