// Draws a token for each row of scores: temperature, top-k, min-p and top-p, then one number of a counter-based
// generator, all as `headwise/runtime/worker/sampler.py` has it. A block, a row.
//
// Weights are integers, in units of 2^-44 of the likeliest token's, so their sums do not depend on the order in which
// they are added up. Nothing is sorted: a threshold is found two bits at a time, by sums over the tokens above it.
//
// Macro of a variant: NUMBER, one of F16, BF16, F32, the dtype of scores.

#include "numbers.cuh"

typedef unsigned long long Mass;  // of tokens: how many they are, or what they weigh

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr float UNITS = 0x1p44f;  // of the likeliest token's weight; 2^19 tokens of it are less than 2^64
constexpr unsigned NAN_KEY = 0xffffffffu, INFINITY_KEY = 0xff800000u, MINUS_INFINITY_KEY = 0x007fffffu;

// How a row draws.
struct Row {
    double top_p;
    unsigned long long seed, position;
    float inverse_temperature;
    float log_min_p;  // -inf: no min-p
    int top_k;        // 0: all
    int unused;
};

// ---- scores ----

struct Scores {
    const char* row;
    float cap;  // 0: none
    int vocab, shift;

    __device__ __forceinline__ float operator[](int token) const
    {
        const float score = NUMBER == F32 ? reinterpret_cast<const float*>(row)[token]
                                          : to_f32<NUMBER>(reinterpret_cast<const unsigned short*>(row)[token]);
        return (cap == 0.0f ? score : cap * tanhf(score / cap)) + 0.0f;  // there is one zero only
    }

    // In the order of logits, NaN above all. What is equal for all numbers of the dtype is cut off.
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
    return Scores{row, cap, vocab, cap != 0.0f || NUMBER == F32 ? 0 : NUMBER == BF16 ? 16 : 13};
}

// ---- sums over the block ----

__device__ __forceinline__ Mass sum_over_warp(Mass mass)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        const unsigned low = __shfl_xor_sync(ALL_LANES, static_cast<unsigned>(mass), across);
        const unsigned high = __shfl_xor_sync(ALL_LANES, static_cast<unsigned>(mass >> 32), across);
        mass += static_cast<Mass>(high) << 32 | low;
    }
    return mass;
}

template <int COUNT>
__device__ __forceinline__ void sum_over_block(Mass (&sums)[COUNT])
{
    __shared__ Mass of_warps[COUNT][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    __syncthreads();  // all have read what was here before
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const Mass sum = sum_over_warp(sums[i]);
        if (lane == 0) of_warps[i][warp] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = sum_over_warp(lane < warps ? of_warps[i][lane] : 0);
}

// ---- the likeliest token ----

// A key and a token as one number: the first of the tokens with the largest key has the largest.
__device__ __forceinline__ Mass ranked(unsigned key, int token)
{
    return static_cast<Mass>(key) << 32 | (0xffffffffu - token);
}

__device__ __forceinline__ int token_of(Mass rank) { return 0xffffffffu - static_cast<unsigned>(rank); }

__device__ __forceinline__ Mass largest_of_warp(Mass rank)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        const unsigned low = __shfl_xor_sync(ALL_LANES, static_cast<unsigned>(rank), across);
        const unsigned high = __shfl_xor_sync(ALL_LANES, static_cast<unsigned>(rank >> 32), across);
        const Mass other = static_cast<Mass>(high) << 32 | low;
        rank = rank < other ? other : rank;
    }
    return rank;
}

__device__ __forceinline__ Mass first_of_row(const Scores& scores)
{
    __shared__ Mass of_warps[WARP];
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    Mass largest = 0;
#pragma unroll 4
    for (int token = threadIdx.x; token < scores.vocab; token += blockDim.x) {
        const Mass rank = ranked(scores.key(scores[token]), token);
        largest = largest < rank ? rank : largest;
    }
    largest = largest_of_warp(largest);
    if (lane == 0) of_warps[threadIdx.x / WARP] = largest;
    __syncthreads();
    return largest_of_warp(lane < warps ? of_warps[lane] : 0);
}

// ---- filters ----

// The tokens that are left: those above a key, and the first of those that have it.
struct Kept {
    unsigned key;
    Mass tied;
};

struct Weights {
    float largest, inverse_temperature, log_min_p;

    __device__ __forceinline__ Mass operator()(float logit) const
    {
        const float scaled = (logit - largest) * inverse_temperature;
        return scaled >= log_min_p ? static_cast<Mass>(expf(scaled) * UNITS) : 0;
    }
};

struct Ones {
    __device__ __forceinline__ Mass operator()(float) const { return 1; }
};

// Keeps the fewest of the likeliest tokens that have the mass `wanted` together, of those in `kept`, which have it.
// A token's mass is what `measure` says of its logit. Returns the mass of those above the new key.
template <class Measure>
__device__ __forceinline__ Mass narrow(const Scores& scores, const Measure& measure, Mass wanted, Kept& kept)
{
    const Mass tied = kept.tied ? kept.tied * measure(scores.logit_of(kept.key)) : 0;
    unsigned found = 0;  // the largest key so far which tokens of that mass have, or are above
    Mass above = 0;
    for (int digit = (31 - scores.shift) & ~1; digit >= 0; digit -= 2) {
        const unsigned step = 1u << digit;
        Mass reached[3] = {0, 0, 0};  // by the keys from found + step, 2 * step, 3 * step on
#pragma unroll 4
        for (int token = threadIdx.x; token < scores.vocab; token += blockDim.x) {
            const float logit = scores[token];
            const unsigned key = scores.key(logit);
            if (key < found + step || key <= kept.key) continue;
            const Mass mass = measure(logit);
            reached[0] += mass;
            if (key >= found + 2 * step) reached[1] += mass;
            if (key >= found + 3 * step) reached[2] += mass;
        }
        sum_over_block(reached);
        unsigned steps = 0;
#pragma unroll
        for (int i = 2; i >= 0; i--) {
            if (found + (i + 1) * step <= kept.key) reached[i] += tied;
            if (reached[i] < wanted) above = reached[i];
            else steps++;
        }
        found += steps * step;
    }
    const Mass each = measure(scores.logit_of(found));
    kept = {found, (wanted - above + each - 1) / each};
    return above;
}

// ---- the draw ----

// The 53 bits of Philox 4x64-10 (Salmon, Moraes, Dror, Shaw, SC 2011) with the seed as its key and the position as the
// second word of its counter, in the upper bits of the word.
__device__ __forceinline__ unsigned long long number_of(unsigned long long seed, unsigned long long position)
{
    unsigned long long counter[4] = {1, position, 0, 0}, key[2] = {seed, 0};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned long long first = counter[0], third = counter[2];
        counter[0] = __umul64hi(0xca5a826395121157ull, third) ^ counter[1] ^ key[0];
        counter[1] = 0xca5a826395121157ull * third;
        counter[2] = __umul64hi(0xd2e7470ee14c6c93ull, first) ^ counter[3] ^ key[1];
        counter[3] = 0xd2e7470ee14c6c93ull * first;
        key[0] += 0x9e3779b97f4a7c15ull, key[1] += 0xbb67ae8584caa73bull;
    }
    return counter[0] & ~0x7ffull;
}

// The first token at which the weights of those kept, added up in the order of tokens, are more than `target`.
__device__ __forceinline__ int token_at(const Scores& scores, const Weights& weights, Kept kept, Mass target)
{
    __shared__ Mass of_warps[2][WARP];  // what tokens above the key weigh, and how many have it
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const Mass each = kept.tied ? weights(scores.logit_of(kept.key)) : 0;
    int begin = 0, end = scores.vocab;
    while (end - begin > WARP) {  // a part for each warp; on with the one in which it is
        const int part = ((end - begin + warps - 1) / warps + WARP - 1) / WARP * WARP;
        const int from = begin + warp * part, to = from + part < end ? from + part : end;
        Mass above = 0, ties = 0;
#pragma unroll 4
        for (int token = from + lane; token < to; token += WARP) {
            const float logit = scores[token];
            const unsigned key = scores.key(logit);
            if (key > kept.key) above += weights(logit);
            if (key == kept.key) ties++;
        }
        above = sum_over_warp(above), ties = sum_over_warp(ties);
        __syncthreads();  // all have read what was here before
        if (lane == 0) of_warps[0][warp] = above, of_warps[1][warp] = ties;
        __syncthreads();
        for (int i = 0; i < warps; i++) {
            const Mass tied = of_warps[1][i] < kept.tied ? of_warps[1][i] : kept.tied;
            const Mass mass = of_warps[0][i] + tied * each;
            if (target < mass) break;
            target -= mass, kept.tied -= tied, begin += part;
        }
        end = begin + part < end ? begin + part : end;
    }
    for (int token = begin; token < end; token++) {
        const float logit = scores[token];
        const unsigned key = scores.key(logit);
        const bool is_tied = key == kept.key && kept.tied > 0;
        const Mass mass = key > kept.key ? weights(logit) : is_tied ? each : 0;
        if (target < mass) return token;
        target -= mass, kept.tied -= is_tied;
    }
    return end - 1;  // not reached: the target is less than all weights
}

// scores:  [rows, vocab], at most 2^19 tokens; the stride is bytes from row to row
// cap:     of logits, cap * tanh(score / cap); 0 for none
// tokens:  [rows]
// best:    [rows], the largest logit, or NaN where there is one; if it is not finite, the token is the likeliest
// grid:    the rows, by blocks of 2 to 32 warps
extern "C" __global__ void __launch_bounds__(WARP * WARP, 1) draw(
    const char* scores, const Row* rows, int* tokens, float* best, long long row_stride, int vocab, float cap)
{
    const Row row = rows[blockIdx.x];
    const Scores logits = scores_of_row(scores + blockIdx.x * row_stride, cap, vocab);
    const Mass first = first_of_row(logits);
    const unsigned largest = first >> 32;
    const bool is_finite = MINUS_INFINITY_KEY >> logits.shift < largest && largest < INFINITY_KEY >> logits.shift;
    int token = token_of(first);
    if (is_finite && row.top_k != 1) {
        const Weights weights{logits.logit_of(largest), row.inverse_temperature, row.log_min_p};
        Kept kept{0, 0};
        if (0 < row.top_k && row.top_k < vocab) narrow(logits, Ones{}, row.top_k, kept);
        Mass total[1] = {0};
#pragma unroll 4
        for (int at = threadIdx.x; at < vocab; at += blockDim.x) {
            const float logit = logits[at];
            if (logits.key(logit) > kept.key) total[0] += weights(logit);
        }
        sum_over_block(total);
        if (kept.tied) total[0] += kept.tied * weights(logits.logit_of(kept.key));
        if (row.top_p < 1.0) {
            const Mass wanted = static_cast<Mass>(ceil(row.top_p * static_cast<double>(total[0])));
            const Mass above = narrow(logits, weights, wanted < total[0] ? wanted : total[0], kept);
            total[0] = above + kept.tied * weights(logits.logit_of(kept.key));
        }
        token = token_at(logits, weights, kept, __umul64hi(number_of(row.seed, row.position), total[0]));
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token, best[blockIdx.x] = logits.logit_of(largest);
}

// As draw, of the likeliest tokens.
extern "C" __global__ void __launch_bounds__(WARP * WARP, 1) likeliest(
    const char* scores, int* tokens, float* best, long long row_stride, int vocab)
{
    const Scores logits = scores_of_row(scores + blockIdx.x * row_stride, 0.0f, vocab);
    const Mass first = first_of_row(logits);
    if (threadIdx.x == 0) tokens[blockIdx.x] = token_of(first), best[blockIdx.x] = logits.logit_of(first >> 32);
}
