// What lies around attention to latents (MLA), or to a KV head, that ranks keep together, each its own tokens: queries on
// their way to all ranks, sequences as one rank has them, and what was seen on each rank as one.
//
// Macro of a variant: NUMBER, one of F16, BF16, F32, the dtype of queries.

#include "numbers.cuh"
#include "sequences.cuh"
#include "vectors.cuh"
#include "shares.cuh"

constexpr int NUMBER_BYTES = 4 / WORD_ELEMENTS;
constexpr float LOWEST = -3.0e38f;  // below any logarithm of what was seen, and no infinity, which cannot be subtracted
constexpr float LOG2E = 1.4426950408889634f;

// Puts the rotated part of queries behind the absorbed one, and counts the rank's own tokens of sequences.
// query:   [tokens, heads, head_dim], `query_stride` bytes from token to token, of whose heads the last `rotated` go
// packed:  [tokens, heads, rank + rotated]; without a rank, heads that are rotated as a whole, side by side
// seq_lens, own_lens: [batch]; not read where there are no sequences
// grid:    the tokens
extern "C" __global__ void pack_queries(
    const char* query, char* packed, const int* seq_lens, int* own_lens, long long query_stride,
    int batch, int heads, int head_dim, int rank, int rotated, int part, int parts)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < batch; i += gridDim.x * blockDim.x)
        own_lens[i] = count_of(seq_lens[i], part, parts);
    const int vectors = rotated / ELEMENTS, width = rank + rotated;
    const char* from = query + blockIdx.x * query_stride + (head_dim - rotated) * NUMBER_BYTES;
    char* to = packed + (static_cast<long long>(blockIdx.x) * heads * width + rank) * NUMBER_BYTES;
    for (int i = threadIdx.x; i < heads * vectors; i += blockDim.x) {
        const int head = i / vectors, at = i % vectors * VECTOR;
        *reinterpret_cast<uint4*>(to + head * width * NUMBER_BYTES + at) = load(from + head * head_dim * NUMBER_BYTES + at);
    }
}

// Makes of query rows sequences of one query each, of the rank's own tokens.
// cu_seqlens_q, ...: of the step, see AttentionBatch; table_stride is from row to row of block_tables
// rows:              [all rows + 1], as cu_seqlens_q
// own_lens, tables:  [all rows] and [all rows * groups, columns]
// first, at:         the first row, in the step and among those that are cut
// grid:              the rows that are cut
extern "C" __global__ void cut_rows(
    const int* cu_seqlens_q, const int* seq_lens, const int* block_tables, int* rows, int* own_lens, int* tables,
    int first, int at, int batch, int groups, int table_stride, int columns, int part, int parts)
{
    const int token = first + blockIdx.x, row = at + blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (threadIdx.x == 0) {
        if (row == 0) rows[0] = 0;
        rows[row + 1] = row + 1;
        own_lens[row] = count_of(seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token + 1, part, parts);
    }
    const int* from = block_tables + static_cast<long long>(sequence) * groups * table_stride;
    int* to = tables + static_cast<long long>(row) * groups * columns;
    for (int group = 0; group < groups; group++)
        for (int i = threadIdx.x; i < columns; i += blockDim.x) to[group * columns + i] = from[group * table_stride + i];
}

// The mean over all tokens, of means over each rank's by their shares of the softmax; 0 where nothing was seen on any.
// seen:  [parts, tokens, heads, width], each a mean of `rank` numbers and the logarithm to base 2 of its sum of weights;
//        parts are `apart` numbers from each other
// mixed: [tokens, heads, rank], tokens `step` bytes from each other
// sink_logits: [heads], of one more key whose value is 0; or null
// grid:  the tokens' heads
extern "C" __global__ void merge_seen(
    const float* seen, char* mixed, const float* sink_logits, long long apart, long long step, int parts, int heads,
    int width, int rank)
{
    const int token = blockIdx.x / heads, head = blockIdx.x % heads;
    const float* row = seen + static_cast<long long>(blockIdx.x) * width;
    char* to = mixed + token * step + static_cast<long long>(head) * rank * NUMBER_BYTES;
    float highest = LOWEST, total = 0.0f;
    if (sink_logits) highest = fmaxf(highest, sink_logits[head] * LOG2E);
    for (int part = 0; part < parts; part++) highest = fmaxf(highest, row[part * apart + rank]);
    if (sink_logits) total = exp2f(sink_logits[head] * LOG2E - highest);
    for (int part = 0; part < parts; part++) total += exp2f(row[part * apart + rank] - highest);
    const float least = total == 0.0f ? 1.0f : total;  // NaN stays NaN
    for (int i = threadIdx.x; i < rank / ELEMENTS; i += blockDim.x) {
        Floats sum = {};
        for (int part = 0; part < parts; part++) {
            const float weight = exp2f(row[part * apart + rank] - highest);
            const Floats mean = load_floats(row + part * apart + i * ELEMENTS);
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) sum.at[e] += weight * mean.at[e];
        }
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) sum.at[e] /= least;
        store(to + i * VECTOR, sum);
    }
}
