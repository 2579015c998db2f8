// Sums of products of few rows with weights of 4 and 8 bits: what `packed.cu` and `packed_experts.cu` have in common.
//
// Which column of a tile is which does not matter to a product, as long as weight and x agree. So a lane takes codes that
// lie side by side in memory, as they lie, and the numbers of x in the same columns; codes become numbers in registers,
// and nothing passes through shared memory until the warps of a block, each of which has a part of the depth, add up
// their sums. Scales are applied to the sums of a step, which is within a group, in float32.
//
// Wants `matrix.cuh`, `codes.cuh`, and the macros BITS of a code, 4 or 8; FLOATS, if those of 8 are float8_e4m3fn, not
// int8; MINIMA, if there are any; STEP, bytes of a row's codes that are taken at a time: 16, 32 or 64; TOKENS, rows of x
// of a block, a multiple of 8; TILES of 16 rows of the weight that a block has; AHEAD, steps that are on their way;
// MOST_WARPS of a block.

constexpr int WARP = 32;
constexpr int TILE = 16, EIGHT = 8;  // rows of the weight, and of x, in an instruction
constexpr int BLOCK_ROWS = TILES * TILE, EIGHTS = TOKENS / EIGHT;
constexpr int LANE_BYTES = STEP / 4, WORDS = LANE_BYTES / 4;  // of a row's codes, in one step
constexpr int HALVES = BITS == 4 ? 2 : 1;                     // a step of 4-bit codes has columns of both halves of a row
constexpr int NUMBER_BYTES = 2;

// Of a weight [rows, depth], what a lane reads: of rows g and g + 8 of each tile, where lanes 4 * g to 4 * g + 3 are a row's.
struct Weight {
    const char* codes;              // [rows, row_bytes]; two codes of 4 bits, plus 8, share a byte: see `packed_jit.py`
    const float *scale, *minimum;   // [groups, every]
    int row_bytes, every, group_steps;  // a group is so many steps of one half of a row
    int rows[TILES][2];
};

// Where a lane's rows of x are: bytes from the first.
struct Rows {
    const char* first;
    long long at[EIGHTS];
};

struct Factors {
    float of[TILES][2];
};

// A lane's part of a step of the weight.
struct Held {
    unsigned codes[TILES][2][WORDS];
    Factors scale[HALVES], minimum[HALVES];
};

// Where the next step is, and the groups of its halves: their factors, and how many steps they still have.
struct Next {
    const char* codes;
    long long group_at[HALVES];
    int left[HALVES];
};

template <int COUNT>
__device__ __forceinline__ void load_codes(unsigned (&words)[COUNT], const char* from)
{
    if constexpr (COUNT == 4) {
        const uint4 four = load_once(reinterpret_cast<const uint4*>(from));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (COUNT == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = *reinterpret_cast<const unsigned*>(from);
    }
}

__device__ __forceinline__ void load_factors(Factors& factors, const float* from, const int (&rows)[TILES][2])
{
#pragma unroll
    for (int i = 0; i < TILES; i++) factors.of[i][0] = from[rows[i][0]], factors.of[i][1] = from[rows[i][1]];
}

__device__ __forceinline__ void load_step(Held& held, const Weight& weight, Next& next)
{
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_codes(held.codes[i][j], next.codes + static_cast<long long>(weight.rows[i][j]) * weight.row_bytes);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        load_factors(held.scale[half], weight.scale + next.group_at[half], weight.rows);
        if (MINIMA) load_factors(held.minimum[half], weight.minimum + next.group_at[half], weight.rows);
        if (--next.left[half] == 0) next.left[half] = weight.group_steps, next.group_at[half] += weight.every;
    }
    next.codes += STEP;
}

// Numbers of x in the columns of a lane's codes, of a row of each eight.
struct Numbers {
    unsigned pairs[EIGHTS][WORDS][2];
};

__device__ __forceinline__ void load_numbers(Numbers& numbers, const char* x, const Rows& rows)
{
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        auto& pairs = numbers.pairs[eight];
        const char* from = x + rows.at[eight];
        if constexpr (WORDS == 1) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            pairs[0][0] = two.x, pairs[0][1] = two.y;
        } else {
#pragma unroll
            for (int word = 0; word < WORDS; word += 2) {
                const uint4 four = reinterpret_cast<const uint4*>(from)[word / 2];
                pairs[word][0] = four.x, pairs[word][1] = four.y, pairs[word + 1][0] = four.z, pairs[word + 1][1] = four.w;
            }
        }
    }
}

__device__ __forceinline__ void numbers_of(unsigned (&pairs)[2], unsigned codes, int half)
{
    if constexpr (BITS == 4) of_nibbles(pairs, codes >> half * 4);
    else if constexpr (FLOATS) of_e4m3(pairs, codes);
    else of_int8(pairs, codes);
}

using Sums = float[TILES][EIGHTS][4];

// Adds what one half of a step makes of the rows of x from column `x` on. Instructions that wait for each other are far
// apart: no warp waits for what it has begun just before.
__device__ __forceinline__ void add_half(Sums& sums, const Held& held, int half, const char* x, const Rows& rows)
{
    constexpr unsigned ONES[4] = {ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE};
    Numbers numbers;
    load_numbers(numbers, x, rows);
    Sums products = {};
    float of_x[EIGHTS][4] = {};
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        unsigned weights[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                unsigned pairs[2];
                numbers_of(pairs, held.codes[i][j][word], half);
                weights[i][j] = pairs[0], weights[i][2 + j] = pairs[1];
            }
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) add_products<IS_BF16>(products[i][eight], weights[i], numbers.pairs[eight][word]);
            if (MINIMA) add_products<IS_BF16>(of_x[eight], ONES, numbers.pairs[eight][word]);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
            for (int at = 0; at < 4; at++) {
                float& sum = sums[i][eight][at];
                sum = fmaf(products[i][eight][at], held.scale[half].of[i][at / 2], sum);
                if (MINIMA) sum = fmaf(held.minimum[half].of[i][at / 2], of_x[eight][at % 2], sum);
            }
}

// The sums over steps `first` to `last` of the `steps` that a row has, of a lane: of its rows of the weight and, two each,
// rows 2 * t and 2 * t + 1 of each eight of x, as `add_products` has them.
__device__ __forceinline__ void add_steps(Sums& sums, const Weight& weight, const Rows& rows, int first, int last, int steps)
{
    const int at = first * STEP + threadIdx.x % 4 * LANE_BYTES;
    Next next = {weight.codes + at};
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int step = first + half * steps, group = step / weight.group_steps;
        next.group_at[half] = static_cast<long long>(group) * weight.every;
        next.left[half] = (group + 1) * weight.group_steps - step;
    }
    Held held[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (first + i < last) load_step(held[i], weight, next);
    const char* x = rows.first + static_cast<long long>(at) * NUMBER_BYTES;
#pragma unroll 1
    for (int step = first; step < last; step += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (step + i >= last) break;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                add_half(sums, held[i], half, x + static_cast<long long>(half) * weight.row_bytes * NUMBER_BYTES, rows);
                if (HALVES > 1) __syncwarp();  // else numbers of both halves are loaded first, and spill
            }
            x += STEP * NUMBER_BYTES;
            if (step + i + AHEAD < last) load_step(held[i], weight, next);
        }
    }
}

// The sums of a block's warps, of eight rows of x.
using Shared = float[MOST_WARPS][BLOCK_ROWS][EIGHT + 1];

// Brings them together: behind it, every thread may read all.
__device__ __forceinline__ void share(Shared& shared, const Sums& sums, int eight)
{
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int at = 0; at < 4; at++)
            shared[warp][i * TILE + at / 2 * EIGHT + lane / 4][lane % 4 * 2 + at % 2] = sums[i][eight][at];
    __syncthreads();
}

__device__ __forceinline__ float sum_of(const Shared& shared, int row, int token)
{
    float sum = 0.0f;
    for (int warp = 0; warp < blockDim.x / WARP; warp++) sum += shared[warp][row][token];
    return sum;
}
