// Products of few rows with weights of 4 and 8 bits, and of 16, which are numbers. Macros of a variant: NUMBER, F16 or BF16,
// the dtype of x and out; those that `packed.cuh` wants; LEAST_BLOCKS, of which a multiprocessor has room at once.
//
// What comes first of the weight is on its way to registers, and of numbers the rest to the second-level cache, before x is
// there: see `overlap.cuh`.

#include "overlap.cuh"
#include "numbers.cuh"
#include "matrix.cuh"
#include "codes.cuh"
#include "packed.cuh"

// out [rows, width] = x [rows, depth] @ weight.T, of rows `x_stride` bytes apart.
//
// codes:          [width, depth * BITS / 8]
// scale, minimum: [groups, width]; a group is `group_steps` steps of one half of a row
// grid:           (rows of x, TOKENS each; rows of the weight, 16 * TILES each): blocks that read the same codes are
//                 neighbours, and all but one find them in the cache; threads: up to MOST_WARPS warps
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, LEAST_BLOCKS) multiply_packed(
    const char* x, const char* codes, const float* scale, const float* minimum, char* out,
    long long x_stride, int rows, int width, int depth, int group_steps)
{
    __shared__ Shared shared;
    let_next_begin();
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, of_row = threadIdx.x % WARP / 4;
    const int first_row = blockIdx.y * BLOCK_ROWS, first_token = blockIdx.x * TOKENS;
    Weight weight = {codes, scale, minimum, depth * BITS / 8, width, group_steps};
    Rows tokens = {x};
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) weight.rows[i][j] = min(first_row + i * TILE + j * EIGHT + of_row, width - 1);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) tokens.at[i] = min(first_token + i * EIGHT + of_row, rows - 1) * x_stride;

    const int steps = weight.row_bytes / STEP, each = (steps + warps - 1) / warps;
    const int first = warp * each, last = min((warp + 1) * each, steps);
    Sums sums = {};
    if (PLAIN) prefetch_steps(weight, first_row, first + AHEAD, last);
    add_steps(sums, weight, tokens, first, last, steps, [] { wait_for_earlier(); });
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        share(shared, sums, eight);
        for (int at = threadIdx.x; at < BLOCK_ROWS * EIGHT; at += blockDim.x) {
            const int row = first_row + at % BLOCK_ROWS, token = first_token + eight * EIGHT + at / BLOCK_ROWS;
            if (row >= width || token >= rows) continue;
            const float sum = sum_of(shared, at % BLOCK_ROWS, at / BLOCK_ROWS);
            reinterpret_cast<unsigned short*>(out)[static_cast<long long>(token) * width + row] = from_f32<NUMBER>(sum);
        }
    }
}
