// Hyper-connections: a residual stream of several streams, mixed before and behind each part of a layer. See
// runtime/models/hyper.py, whose formulas these are.
//
// Rows are read and written in vectors of 16 bytes; arithmetic is in float32.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of streams; STREAMS, how many there are: 1, 2 or 4.

#include "overlap.cuh"
#include "numbers.cuh"
#include "vectors.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int PAIRS = STREAMS * STREAMS;

static_assert(PAIRS <= WARP && (STREAMS & (STREAMS - 1)) == 0, "a lane has a number of the matrix");

// Of lanes `step` apart, as many as there are streams: of a row with a step of 1, of a column with STREAMS.
__device__ __forceinline__ float sum_over(float value, int step)
{
#pragma unroll
    for (int across = step; across < STREAMS * step; across *= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    return value;
}

__device__ __forceinline__ float largest_over(float value, int step)
{
#pragma unroll
    for (int across = step; across < STREAMS * step; across *= 2)
        value = larger(value, __shfl_xor_sync(ALL_LANES, value, across));
    return value;
}

// Of a warp whose lane i * STREAMS + j has number (i, j), and whose lanes behind these do as others: rows' softmaxes, whose
// columns and rows are divided by their sums in turn (Sinkhorn-Knopp).
__device__ __forceinline__ float doubly_stochastic(float logit, int iterations, float eps)
{
    const float power = expf(logit - largest_over(logit, 1));
    float number = power / sum_over(power, 1) + eps;
    number /= sum_over(number, STREAMS) + eps;
    for (int i = 1; i < iterations; i++) {
        number /= sum_over(number, 1) + eps;
        number /= sum_over(number, STREAMS) + eps;
    }
    return number;
}

__device__ __forceinline__ float sigmoid(float x) { return 0.5f * tanhf(0.5f * x) + 0.5f; }

// streams:     [tokens, STREAMS, vectors]
// made:        [tokens, (2 + STREAMS) * STREAMS], of streams as they are, not normed; or [tokens, STREAMS], where they join
// base, scale: of as many; [3], or [1]
// mixed:       [tokens, vectors]; given: [tokens, STREAMS]; between: [tokens, STREAMS, STREAMS], from and to
//              given and between are null where streams join
// grid:        the tokens; threads: several warps, of which the first makes the matrix while the others mix
extern "C" __global__ void mix_streams(
    const char* streams, const float* made, const float* base, const float* scale, char* mixed, float* given,
    float* between, int vectors, int iterations, float eps, float norm_eps)
{
    let_next_begin();
    wait_for_earlier();
    __shared__ float of_warps[WARP], shares[STREAMS];
    const long long token = blockIdx.x;
    const int numbers = between ? (2 + STREAMS) * STREAMS : STREAMS, lane = threadIdx.x % WARP;
    streams += token * STREAMS * vectors * VECTOR;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < STREAMS * vectors; i += blockDim.x) {
        const Floats floats = widened(load(streams + i * VECTOR));
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++) squares += floats.at[j] * floats.at[j];
    }
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, across);
    if (lane == 0) of_warps[threadIdx.x / WARP] = squares;
    __syncthreads();
    squares = lane < blockDim.x / WARP ? of_warps[lane] : 0.0f;
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, across);
    const float norm = 1.0f / sqrtf(squares / (STREAMS * vectors * ELEMENTS) + norm_eps);

    made += token * numbers;
    if (threadIdx.x < STREAMS) {
        const int i = threadIdx.x;
        shares[i] = sigmoid(made[i] * norm * scale[0] + base[i]) + eps;
        if (given) {
            const int at = STREAMS + i;
            given[token * STREAMS + i] = 2.0f * sigmoid(made[at] * norm * scale[1] + base[at]);
        }
    }
    __syncthreads();
    if (between && threadIdx.x < WARP) {
        const int at = 2 * STREAMS + lane % PAIRS;
        const float number = doubly_stochastic(made[at] * norm * scale[2] + base[at], iterations, eps);
        if (lane < PAIRS) between[token * PAIRS + lane] = number;
        return;
    }
    const int first = between ? WARP : 0;
    for (int i = threadIdx.x - first; i < vectors; i += blockDim.x - first) {
        Floats sum = {};
#pragma unroll
        for (int stream = 0; stream < STREAMS; stream++) {
            const Floats floats = widened(load(streams + (stream * vectors + i) * VECTOR));
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++) sum.at[j] += shares[stream] * floats.at[j];
        }
        store(mixed + (token * vectors + i) * VECTOR, sum);
    }
}

// Behind a part of a layer: each of a token's streams becomes a mixture of them all, and its share of what the part made.
//
// streams:         [tokens, STREAMS, vectors], in place
// made:            [tokens, vectors]; its stride is bytes from token to token
// given, between:  as of mix_streams
// grid:            `count` threads, tokens * vectors
extern "C" __global__ void add_to_streams(
    char* streams, const char* made, const float* given, const float* between, long long made_stride, int count,
    int vectors)
{
    let_next_begin();
    wait_for_earlier();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const long long token = index / vectors;
    const int at = index % vectors;
    const Floats part = widened(load(made + token * made_stride + at * VECTOR));
    streams += (token * STREAMS * vectors + at) * VECTOR;
    Floats before[STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS; i++) before[i] = widened(load(streams + static_cast<long long>(i) * vectors * VECTOR));
#pragma unroll
    for (int to = 0; to < STREAMS; to++) {
        const float share = given[token * STREAMS + to];
        Floats sum;
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++) sum.at[j] = share * part.at[j];
#pragma unroll
        for (int from = 0; from < STREAMS; from++) {
            const float weight = between[token * PAIRS + from * STREAMS + to];
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++) sum.at[j] += weight * before[from].at[j];
        }
        store(streams + static_cast<long long>(to) * vectors * VECTOR, sum);
    }
}
