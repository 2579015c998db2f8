// The indexer of latent attention (DSA): writes its keys, and chooses the tokens of highest score for each query. Where
// ranks keep tokens together, each chooses of its own, and then of these the ones that are among the best of all ranks'.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of queries and keys; CACHE, the same, or INT8 or E4M3,
// which store a byte a number and a scale per key.

#include "numbers.cuh"
#include "e4m3.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "rotation.cuh"
#include "quantised.cuh"
#include "shares.cuh"

static_assert(QUANTISED || int(CACHE) == int(NUMBER), "only int8 and E4M3 differ from what is given");

// ---- keys ----

__device__ __forceinline__ float sum_of_warp(float value)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    return value;
}

// A vector of the row [count], which a warp holds, through a layer norm. Lanes behind the last vector hold zeros.
__device__ __forceinline__ Floats normed(
    Floats own, bool here, int at, int count, const float* weight, const float* bias, float eps)
{
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sum += own.at[i];
    const float mean = sum_of_warp(sum) / count;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        own.at[i] = here ? own.at[i] - mean : 0.0f;
        squares += own.at[i] * own.at[i];
    }
    const float scale = sqrtf(sum_of_warp(squares) / count + eps);
    if (!here) return own;
    const Floats weights = load_floats(weight + at * ELEMENTS), biases = load_floats(bias + at * ELEMENTS);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) own.at[i] = own.at[i] / scale * weights.at[i] + biases.at[i];
    return own;
}

// query:            [tokens, heads, dim], whose first `rotated_dim` numbers are rotated in place; heads may be 0
// key:              [tokens, dim]; strides are bytes from token to token. At most a warp's vectors
// weight, bias:     of the keys' layer norm, or null: there is none
// cosines, sines:   [tokens, rotated_dim / 2], or null: nothing is rotated
// arena, ...:       as of write_latents; key_at and scale_at are the byte offsets of keys and their scales within a slot
// part, parts:      of the tokens whose keys are stored, see TokenShare; block_size is of these
// grid:             the tokens; threads: any number of warps
extern "C" __global__ void write_index(
    char* query, const char* key, const float* weight, const float* bias, const float* cosines, const float* sines,
    char* arena, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* head_groups, const int* head_slots,
    long long query_stride, long long key_stride, long long block_bytes, long long slot_bytes,
    long long key_at, long long scale_at,
    int batch, int groups, int table_stride, int block_size, int heads, int dim, int rotated_dim, float eps,
    int part, int parts)
{
    const int token = blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (sequence == batch) return;  // padding
    const int half = rotated_dim / 2;
    if (cosines) {
        cosines += static_cast<long long>(token) * half, sines += static_cast<long long>(token) * half;
        const long long head_bytes = static_cast<long long>(dim) * NUMBER_BYTES;
        rotate_heads(query + token * query_stride, heads, head_bytes, rotated_dim, cosines, sines);
    }
    const int of_all = seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token, position = of_all / parts;
    if (threadIdx.x >= WARP || of_all % parts != part) return;  // the first warp has the key

    const int at = threadIdx.x, vectors = dim / ELEMENTS, half_vectors = half / ELEMENTS;
    const bool here = at < vectors;
    Floats own = {};
    if (here) own = widened(load(key + token * key_stride + at * VECTOR));
    if (weight) own = normed(own, here, at, dim, weight, bias, eps);
    if (cosines) {
        const bool is_low = at < half_vectors, turns = at < 2 * half_vectors;
        Floats other;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++)
            other.at[i] = __shfl_sync(ALL_LANES, own.at[i], (is_low ? at + half_vectors : at - half_vectors) & 31);
        const int angle = is_low ? at : at - half_vectors;
        if (turns) {
            const Floats cosine = load_floats(cosines + angle * ELEMENTS), sine = load_floats(sines + angle * ELEMENTS);
#pragma unroll
            for (int i = 0; i < ELEMENTS; i++) {
                const float across = other.at[i] * sine.at[i], along = own.at[i] * cosine.at[i];
                own.at[i] = is_low ? along - across : along + across;
            }
        }
    }
    const long long row = static_cast<long long>(sequence) * groups + head_groups[0];
    const int block = block_tables[row * table_stride + position / block_size];
    float scale = 1.0f;
    if constexpr (QUANTISED) scale = scale_of(largest_of_warp(here ? largest_of(own, 0.0f) : 0.0f));
    if (block < 0 || !here) return;
    char* slot = arena + block * block_bytes + head_slots[0] * slot_bytes;
    char* to = slot + key_at + (static_cast<long long>(position % block_size) * dim + at * ELEMENTS) * CACHE_BYTES;
    if constexpr (QUANTISED) {
        store_bytes(to, rounded(own, scale));
        if (at == 0) reinterpret_cast<float*>(slot + scale_at)[position % block_size] = scale;
    } else {
        store(to, own);
    }
}

// ---- choice ----

constexpr int BINS = 2048, LANE_BINS = BINS / WARP;
constexpr unsigned NAN_KEY = 0xffffffffu, MINUS_INFINITY_KEY = 0x007fffffu;  // whose tokens are not seen
constexpr unsigned MINUS_INFINITY = 0xff800000u;
constexpr int BROKEN = -2;

// In the order of scores, by their bits, NaN above all; there is one zero.
__device__ __forceinline__ unsigned key_of(unsigned score)
{
    if ((score & 0x7fffffffu) > 0x7f800000u) return NAN_KEY;
    if (score == 0x80000000u) return score;
    return score >> 31 ? ~score : score | 0x80000000u;
}

__device__ __forceinline__ int smaller(int left, int right) { return left < right ? left : right; }

// The inclusive sum over the lanes up to this one.
__device__ __forceinline__ unsigned scanned(unsigned value)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int lanes = 1; lanes < WARP; lanes *= 2) {
        const unsigned before = __shfl_sync(ALL_LANES, value, (lane - lanes) & 31);
        if (lane >= lanes) value += before;
    }
    return value;
}

struct Digit {
    int value;  // -1: there are fewer than `room` in all bins
    int room;   // what is left for those that have it
    int count;  // those that have it
};

// What a block's threads tell each other.
struct Told {
    int bins[BINS];
    Digit digit;
    unsigned of_warps[WARP];
};

// The bin in which the `room` highest end, found by the first warp.
__device__ __forceinline__ void find_digit(const int* bins, int room, Digit* found)
{
    const int lane = threadIdx.x, first = BINS - LANE_BINS * (lane + 1);
    int own = 0;
    for (int i = 0; i < LANE_BINS; i++) own += bins[first + i];
    const int upto = scanned(own), all = __shfl_sync(ALL_LANES, upto, WARP - 1);
    int above = upto - own;
    if (all < room) {
        if (lane == 0) *found = {-1, 0, 0};
        return;
    }
    if (above >= room || upto < room) return;
    int bin = first + LANE_BINS - 1;
    while (above + bins[bin] < room) above += bins[bin--];
    *found = {bin, room - above, bins[bin]};
}

// The key that the last chosen ones have, of which `room` are chosen of `count` that have it.
struct Least {
    unsigned key;
    int room, count;
};

// That of the `room` highest of `count` keys, found by its digits from the highest on; all that are seen, where those are
// fewer. key_at(i) is number i.
template <class KeyAt>
__device__ __forceinline__ Least least_of(Told& told, int count, int room, const KeyAt& key_at)
{
    Least least = {0, room, 0};
    for (int shift = 21, bits = 11; shift >= 0; bits = shift == 10 ? 10 : 11, shift -= bits) {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) told.bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const unsigned key = key_at(i);
            const bool is_among = shift == 21 ? key != MINUS_INFINITY_KEY : key >> (shift + bits) == least.key;
            if (is_among) atomicAdd(&told.bins[key >> shift & ((1u << bits) - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x < WARP) find_digit(told.bins, least.room, &told.digit);
        __syncthreads();
        const Digit digit = told.digit;
        __syncthreads();
        if (digit.value < 0) return {MINUS_INFINITY_KEY, 0, 0};  // which the first digit tells
        least = {least.key << bits | static_cast<unsigned>(digit.value), digit.room, digit.count};
    }
    return least;
}

// Calls take(at, i, key) for each of `count` keys that is chosen, of equal ones for the first; `at` counts them, in their
// order. Returns how many are.
template <class KeyAt, class Take>
__device__ __forceinline__ int list_chosen(
    Told& told, int count, const Least& least, const KeyAt& key_at, const Take& take)
{
    int above_before = 0, equal_before = 0;
    for (int begin = 0; begin < count; begin += blockDim.x) {
        const int i = begin + threadIdx.x;
        const unsigned key = i < count ? key_at(i) : MINUS_INFINITY_KEY;
        const bool is_above = key > least.key, is_equal = key == least.key;
        const unsigned own = is_above | is_equal << 16, upto = scanned(own);
        if (threadIdx.x % WARP == WARP - 1) told.of_warps[threadIdx.x / WARP] = upto;
        __syncthreads();
        unsigned before = upto - own, all = 0;
        for (int warp = 0; warp < blockDim.x / WARP; warp++) {
            if (warp < threadIdx.x / WARP) before += told.of_warps[warp];
            all += told.of_warps[warp];
        }
        __syncthreads();
        const int equal = equal_before + (before >> 16);
        if (is_above || (is_equal && equal < least.room))
            take(above_before + (before & 0xffff) + smaller(equal, least.room), i, key);
        above_before += all & 0xffff, equal_before += all >> 16;
    }
    return above_before + smaller(equal_before, least.room);
}

// The `top` tokens of highest score for a query each, of equal ones the first, in their order: where their latents lie,
// in tokens of the arena; BROKEN for a score of NaN.
//
// scores:  bits of [rows], score_stride numbers apart; of tokens that are not seen, minus infinity
// places:  [rows, top]; counts: [rows]. Of padding, 0 are chosen
// best:    [rows, 2, top], or null: bits of the scores that are chosen, minus infinity behind them, and positions
// first:   the first row's query. Its last token is the last one that is looked at
// part, parts: of the tokens that there are scores of, see TokenShare; block_size is of these
// grid:    the rows; threads: any number of warps
extern "C" __global__ void choose_tokens(
    const unsigned* scores, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* head_groups, int* places, int* counts, unsigned* best, long long score_stride,
    int first, int batch, int groups, int table_stride, int block_size, int top, int part, int parts)
{
    __shared__ Told told;
    const int token = first + blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    const bool is_padding = sequence == batch;
    const int position = is_padding ? -1 : seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token;
    const unsigned* row = scores + blockIdx.x * score_stride;
    const auto key_at = [&](int i) { return key_of(row[i]); };
    const int seen = is_padding ? 0 : count_of(position + 1, part, parts);
    const Least least = least_of(told, seen, top, key_at);

    const int* table = block_tables + (static_cast<long long>(sequence) * groups + head_groups[0]) * table_stride;
    int* chosen = places + static_cast<long long>(blockIdx.x) * top;
    if (best) best += 2LL * blockIdx.x * top;
    const int count = list_chosen(told, seen, least, key_at, [&](int at, int i, unsigned key) {
        chosen[at] = key == NAN_KEY ? BROKEN : table[i / block_size] * block_size + i % block_size;
        if (best) best[at] = row[i], best[top + at] = i * parts + part;
    });
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
    for (int i = count + threadIdx.x; best && i < top; i += blockDim.x) best[i] = MINUS_INFINITY;
}

// Of what choose_tokens chose on one of the ranks, what is among the `top` best of all of them, of equal scores the
// earlier tokens.
//
// best:    [parts, rows, 2, top], of all ranks
// found:   [rows, top], the places of this one's; its part of what was found is `part`
// places:  [rows, top]; counts: [rows]
// grid:    the rows; threads: any number of warps
extern "C" __global__ void choose_of_all(
    const unsigned* best, const int* found, int* places, int* counts, int top, int part, int parts)
{
    __shared__ Told told;
    const long long row = blockIdx.x, apart = 2LL * gridDim.x * top;
    best += 2 * row * top, found += row * top, places += row * top;
    const auto number = [&](int i) { return best + i / top * apart + i % top; };
    const auto key_at = [&](int i) { return key_of(*number(i)); };
    const Least least = least_of(told, parts * top, top, key_at);

    // Of those that have the least key, the ones with the highest complement of their position.
    const auto earliness = [&](int i) { return key_at(i) == least.key ? ~number(i)[top] : MINUS_INFINITY_KEY; };
    Least last = {0, 0, 0};
    if (least.room < least.count) last = least_of(told, parts * top, least.room, earliness);

    const auto chosen_at = [&](int i) {
        const int own = part * top + i;
        const unsigned key = key_at(own);
        const bool is_last = key == least.key && least.room && earliness(own) >= last.key;
        return key > least.key || is_last ? NAN_KEY : MINUS_INFINITY_KEY;
    };
    const int count = list_chosen(
        told, top, {MINUS_INFINITY_KEY, 0, 0}, chosen_at, [&](int at, int i, unsigned) { places[at] = found[i]; });
    if (threadIdx.x == 0) counts[row] = count;
}
