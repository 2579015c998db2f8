// Norms, activations and embedding rows: each reads its input once, and writes its output once.
//
// Device memory is read and written in whole vectors of 16 bytes (but for token ids), so a row is a whole number of
// vectors and begins on one. Rows of the input may have gaps between them; outputs have none. Arithmetic is in float32.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of input and output; HELD, the vectors of a row that a
// thread keeps while the row is normed.

#include "overlap.cuh"
#include "numbers.cuh"
#include "vectors.cuh"
#include "norms.cuh"
#include "activations.cuh"

// ---- RMS norm ----

// x:       [tokens, heads, vectors]; its strides are bytes from token to token and from head to head
// weight:  of one row, or of each head: its stride is floats from head to head, 0 where they share one
// out:     [tokens, heads, vectors]; may be x, if that has no gaps
// group:   threads of a row, a power of two: at most a warp, or the whole block. HELD * group >= vectors.
// grid:    the rows, tokens * heads, by blockDim.x / group of them
extern "C" __global__ void rms_norm(
    const char* x, const float* __restrict__ weight, char* out, long long token_stride, long long head_stride,
    int weight_stride, int rows, int heads, int vectors, int group, float eps)
{
    let_next_begin();
    wait_for_earlier();
    const int row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group, at = threadIdx.x % group;
    const bool here = row < rows;  // threads without a row go along: a sum needs all of them
    const char* from = x + row / heads * token_stride + row % heads * head_stride;
    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int vector = i * group + at;
        if (here && vector < vectors) held[i] = load(from + vector * VECTOR);
    }
    const float* its_weight = weight + row % heads * weight_stride;
    norm_row(held, its_weight, out + static_cast<long long>(row) * vectors * VECTOR, here, vectors, group, eps);
}

// As rms_norm, of sum = x + addend, or of x + (addend + bias), each sum rounded.
//
// x, addend, sum, out:  [rows, vectors]; sum may be x or addend
// bias:                 [vectors], or null
extern "C" __global__ void add_rms_norm(
    const char* x, const char* addend, const char* bias, const float* __restrict__ weight, char* sum, char* out,
    int rows, int vectors, int group, float eps)
{
    let_next_begin();
    wait_for_earlier();
    const int row = blockIdx.x * (blockDim.x / group) + threadIdx.x / group, at = threadIdx.x % group;
    const bool here = row < rows;
    const long long begin = static_cast<long long>(row) * vectors * VECTOR;
    uint4 held[HELD], more[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int vector = i * group + at;
        if (!here || vector >= vectors) continue;
        held[i] = load(x + begin + vector * VECTOR);
        more[i] = load(addend + begin + vector * VECTOR);
    }
    if (bias) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int vector = i * group + at;
            if (here && vector < vectors) more[i] = added(more[i], load(bias + vector * VECTOR));
        }
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int vector = i * group + at;
        if (!here || vector >= vectors) continue;
        held[i] = added(held[i], more[i]);
        *reinterpret_cast<uint4*>(sum + begin + vector * VECTOR) = held[i];
    }
    norm_row(held, weight, out + begin, here, vectors, group, eps);
}

// ---- activations ----

// A thread, a vector of the output. Without a gate, x is what an activation has of it.
template <class Activation>
__device__ __forceinline__ void activated(
    const char* x, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const char* from = x + index / vectors * token_stride + index % vectors * VECTOR;
    uint4 left = load(from), right = {};
    if (Activation::IS_GATED) right = load(from + static_cast<long long>(vectors) * VECTOR);
    if (bias) {
        left = added(left, load(bias + index % vectors * VECTOR));
        if (Activation::IS_GATED) right = added(right, load(bias + (vectors + index % vectors) * VECTOR));
    }
    Floats floats = widened(left);
    const Floats up = widened(right);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++)
        floats.at[i] = Activation::of(floats.at[i], up.at[i]);
    store(out + static_cast<long long>(index) * VECTOR, floats);
}

// gate_up:  [tokens, 2 * vectors], gate before up; its stride is bytes from token to token
// out:      [tokens, vectors]
// bias:     [2 * vectors], which is added before, or null
// grid:     `count` threads, tokens * vectors
extern "C" __global__ void silu_mul(
    const char* gate_up, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<Silu>(gate_up, out, bias, token_stride, count, vectors);
}

extern "C" __global__ void gelu_tanh_mul(
    const char* gate_up, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<GeluTanh>(gate_up, out, bias, token_stride, count, vectors);
}

extern "C" __global__ void clamped_mul(
    const char* gate_up, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<Clamped>(gate_up, out, bias, token_stride, count, vectors);
}

extern "C" __global__ void limited_silu_mul(
    const char* gate_up, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<LimitedSilu>(gate_up, out, bias, token_stride, count, vectors);
}

extern "C" __global__ void clipped_silu_mul(
    const char* gate_up, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<ClippedSilu>(gate_up, out, bias, token_stride, count, vectors);
}

// As those, of x [tokens, vectors] and bias [vectors].
extern "C" __global__ void relu2(
    const char* x, char* out, const char* bias, long long token_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    activated<Relu2>(x, out, bias, token_stride, count, vectors);
}

// x, out:  [rows, vectors]
// gate:    a number for each of x, or one for a row; its stride is bytes from row to row
// grid:    `count` threads, rows * vectors
template <bool WHOLE_ROW>
__device__ __forceinline__ void times_sigmoid(
    const char* x, const char* gate, char* out, long long gate_stride, int count, int vectors)
{
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const char* from = gate + index / vectors * gate_stride;
    Floats gates;
    if (WHOLE_ROW) {
        const unsigned bits = WORD_ELEMENTS == 1 ? *reinterpret_cast<const unsigned*>(from)
                                                 : *reinterpret_cast<const unsigned short*>(from);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) gates.at[i] = to_f32<NUMBER>(bits);
    } else {
        gates = widened(load(from + index % vectors * VECTOR));
    }
    const long long at = static_cast<long long>(index) * VECTOR;
    Floats floats = widened(load(x + at));
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) floats.at[i] = floats.at[i] / (1.0f + expf(-gates.at[i]));
    store(out + at, floats);
}

extern "C" __global__ void sigmoid_mul(
    const char* x, const char* gate, char* out, long long gate_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    times_sigmoid<false>(x, gate, out, gate_stride, count, vectors);
}

extern "C" __global__ void sigmoid_mul_rows(
    const char* x, const char* gate, char* out, long long gate_stride, int count, int vectors)
{
    let_next_begin();
    wait_for_earlier();
    times_sigmoid<true>(x, gate, out, gate_stride, count, vectors);
}

// ---- embedding ----

// table:  rows of `vectors`; its stride is bytes from row to row
// ids:    rows of the table, which has them all
// out:    [tokens, vectors]
// grid:   `count` threads, tokens * vectors
extern "C" __global__ void gather_rows(
    const char* table, const int* ids, char* out, long long row_stride, int count, int vectors, float scale)
{
    let_next_begin();
    wait_for_earlier();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    Floats floats = widened(load(table + ids[index / vectors] * row_stride + index % vectors * VECTOR));
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) floats.at[i] *= scale;
    store(out + static_cast<long long>(index) * VECTOR, floats);
}
