// The likeliest token of each row of scores.
//
// Macro of a variant: NUMBER, one of F16, BF16, F32, the dtype of scores.

#include "numbers.cuh"
#include "vectors.cuh"
#include "scores.cuh"

// scores:   [rows, vocab]; the stride is bytes from row to row
// tokens:   [rows], the first of a row's largest scores, or its first NaN
// best:     [rows], its score
// of_parts: [rows, MOST_PARTS], for the kernel alone
// arrived:  [rows], zeros, before and after
// grid:     parts of a row, at most MOST_PARTS, and rows; blocks of up to MOST_THREADS, whole warps
extern "C" __global__ void __launch_bounds__(MOST_THREADS) likeliest(
    const char* scores, int* tokens, float* best, Mass* of_parts, unsigned* arrived, long long row_stride, int vocab)
{
    const int row = blockIdx.y;
    const Scores logits = scores_of_row(scores + row * row_stride, 0.0f, vocab);
    const Mass first = first_of_row<2>(logits, of_parts + row * MOST_PARTS, arrived + row);
    if (first && threadIdx.x == 0) tokens[row] = place_of_rank(first), best[row] = logits.logit_of(first >> 32);
}
