// Makes logits out of scores, and edits them before tokens are drawn from them: masks, biases, penalties, all as
// `headwise/runtime/worker/logit_edits.py` has it. A block, a row.
//
// Macro of a variant: NUMBER, one of F16, BF16, F32, the dtype of scores.

#include "numbers.cuh"

struct Penalties {
    float repetition, frequency, presence;
};

// scores:    [rows, vocab]; the stride is bytes from row to row
// cap:       of logits, cap * tanh(score / cap); 0 for none
// logits:    [rows, vocab]
// mask_of:   [rows], the row of `masks`, -1 for none
// masks:     [masks, words], a bit a token
// biases:    of row i from bias_begins[i] to bias_begins[i + 1], for bias_tokens
// counts:    likewise, for seen_tokens; no token twice in a row
// penalties: [rows]
// grid:      the rows
extern "C" __global__ void __launch_bounds__(1024, 1) edit(
    const char* scores, float* logits, const int* mask_of, const unsigned* masks, const int* bias_begins,
    const int* bias_tokens, const float* biases, const int* seen_begins, const int* seen_tokens, const int* counts,
    const Penalties* penalties, long long row_stride, int vocab, int words, float cap)
{
    const int row = blockIdx.x;
    const char* from = scores + row * row_stride;
    float* to = logits + static_cast<long long>(row) * vocab;
    const unsigned* mask = mask_of[row] < 0 ? nullptr : masks + static_cast<long long>(mask_of[row]) * words;
#pragma unroll 4
    for (int token = threadIdx.x; token < vocab; token += blockDim.x) {
        const float score = NUMBER == F32 ? reinterpret_cast<const float*>(from)[token]
                                          : to_f32<NUMBER>(reinterpret_cast<const unsigned short*>(from)[token]);
        const bool is_allowed = mask == nullptr || mask[token / 32] >> token % 32 & 1;
        const float logit = cap == 0.0f ? score : cap * tanhf(score / cap);
        to[token] = is_allowed ? logit : __uint_as_float(0xff800000u);
    }
    __syncthreads();
    for (int i = bias_begins[row] + threadIdx.x; i < bias_begins[row + 1]; i += blockDim.x) {
        to[bias_tokens[i]] += biases[i];
    }
    __syncthreads();
    const Penalties by = penalties[row];
    for (int i = seen_begins[row] + threadIdx.x; i < seen_begins[row + 1]; i += blockDim.x) {
        const float logit = to[seen_tokens[i]];
        const float repeated = logit > 0.0f ? logit / by.repetition : logit * by.repetition;
        to[seen_tokens[i]] = repeated - by.frequency * counts[i] - (counts[i] > 0 ? by.presence : 0.0f);
    }
}
