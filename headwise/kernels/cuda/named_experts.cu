// Logits of the experts that a token is looked up in a table for, as if it preferred no others: the rest is as of a router.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of logits.

#include "overlap.cuh"
#include "numbers.cuh"

// logits:  [tokens, experts]; the stride is numbers from token to token
// table:   [vocabulary, named], of experts; ids: [tokens], which the table has
// out:     [tokens, experts], `never` of experts that are not a token's
// grid:    `count` threads, tokens * experts
extern "C" __global__ void keep_named(
    const char* logits, const long long* table, const int* ids, char* out, long long logit_stride, int count,
    int experts, int named, float never)
{
    let_next_begin();
    wait_for_earlier();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const int token = index / experts, expert = index % experts;
    const long long* row = table + static_cast<long long>(ids[token]) * named;
    bool is_named = false;
    for (int i = 0; i < named; i++) is_named |= row[i] == expert;
    const long long from = token * logit_stride + expert;
    if constexpr (NUMBER == F32) {
        const float logit = reinterpret_cast<const float*>(logits)[from];
        reinterpret_cast<float*>(out)[index] = is_named ? logit : never;
    } else {
        const unsigned short logit = reinterpret_cast<const unsigned short*>(logits)[from];
        reinterpret_cast<unsigned short*>(out)[index] = is_named ? logit : from_f32<NUMBER>(never);
    }
}
