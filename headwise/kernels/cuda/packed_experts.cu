// Products of few tokens with experts whose weights are codes: `experts_jit.py` has those of other weights.
//
// Macros of a variant: NUMBER, F16 or BF16, the dtype of x and out; those that `packed.cuh` wants, with TILES 2; ACTIVATION,
// None, Silu, GeluTanh, Clamped, LimitedSilu, ClippedSilu or Relu2; BIAS, if there are any; WEIGHS, if rows are multiplied by the shares of assignments.

#include "numbers.cuh"
#include "matrix.cuh"
#include "codes.cuh"
#include "packed.cuh"
#include "activations.cuh"

struct None {
    static constexpr bool IS_GATED = false;
    static __device__ __forceinline__ float of(float gate, float) { return gate; }
};

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

constexpr bool IS_GATED = ACTIVATION::IS_GATED, IS_ACTIVATED = !same<ACTIVATION, None>;
static_assert(TILES == 2, "a gate and what it lets through; without, twice as many columns");
constexpr int COLUMNS = IS_GATED ? TILE : 2 * TILE;  // of out, that a block computes

// A tile of out [assignments, width]: rows of x [rows, depth] times the weights of the tile's expert. Assignment i reads row
// i / per_row. With an ACTIVATION of gates, weights are gate | up, twice as wide as out, which is made of both.
//
// codes:          [experts, width or twice that, depth * BITS / 8]
// scale, minimum: [experts, groups, the same]; a group is `group_steps` steps of one half of a row
// bias:           [experts, the same], of the dtype of x
// shares:         [assignments]: before an activation and its biases, which is as if the token were multiplied, else at
//                 the end
// order:          [tiles, TOKENS], assignments, or -1; tile_expert: [tiles], or -1
// grid:           tiles times columns of out, COLUMNS each; threads: up to MOST_WARPS warps
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 2) multiply_packed_experts(
    const char* x, const char* codes, const float* scale, const float* minimum, const char* bias, const float* shares,
    char* out, const int* order, const int* tile_expert, int width, int depth, int per_row, int group_steps)
{
    __shared__ Shared shared;
    const int blocks = (width + COLUMNS - 1) / COLUMNS, tile = blockIdx.x / blocks, expert = tile_expert[tile];
    if (expert < 0) return;
    order += tile * TOKENS;
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, of_row = threadIdx.x % WARP / 4;
    const int first_column = blockIdx.x % blocks * COLUMNS, row_bytes = depth * BITS / 8, steps = row_bytes / STEP;
    const int every = IS_GATED ? 2 * width : width;
    const long long before = static_cast<long long>(expert) * every, groups = steps * HALVES / group_steps;
    Weight weight = {codes + before * row_bytes, scale + before * groups, minimum + before * groups, row_bytes, every,
                     group_steps};
    Rows tokens = {x};
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = first_column + (IS_GATED ? 0 : i * TILE) + j * EIGHT + of_row;
            weight.rows[i][j] = min(column, width - 1) + (IS_GATED ? i * width : 0);
        }
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const int place = order[i * EIGHT + of_row];
        tokens.at[i] = static_cast<long long>(place < 0 ? 0 : place / per_row) * depth * NUMBER_BYTES;
    }

    const int each = (steps + warps - 1) / warps;
    Sums sums = {};
    add_steps(sums, weight, tokens, warp * each, min((warp + 1) * each, steps), steps, [] {});
    const auto* biases = reinterpret_cast<const unsigned short*>(bias) + before;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        share(shared, sums, eight);
        for (int at = threadIdx.x; at < COLUMNS * EIGHT; at += blockDim.x) {
            const int own = at % COLUMNS, token = at / COLUMNS, column = first_column + own;
            const int place = order[eight * EIGHT + token];
            if (place < 0 || column >= width) continue;
            float gate = sum_of(shared, own, token), up = IS_GATED ? sum_of(shared, TILE + own, token) : 0.0f;
            if (WEIGHS && IS_ACTIVATED) gate *= shares[place], up *= shares[place];
            if (BIAS) gate += to_f32<NUMBER>(biases[column]);
            if (BIAS && IS_GATED) up += to_f32<NUMBER>(biases[width + column]);
            gate = ACTIVATION::of(gate, up);
            if (WEIGHS && !IS_ACTIVATED) gate *= shares[place];
            reinterpret_cast<unsigned short*>(out)[static_cast<long long>(place) * width + column] = from_f32<NUMBER>(gate);
        }
    }
}
