// Sums of products of few rows with weights of 4 and 8 bits: what `packed.cu` and `packed_experts.cu` have in common.
//
// Which column of a tile is which does not matter to a product, as long as weight and x agree. So a lane takes codes that
// lie side by side in memory, as they lie, and the numbers of x in the same columns; codes become numbers in registers,
// and nothing passes through shared memory until the warps of a block, each of which has a part of the depth, add up
// their sums. Scales are applied to the sums of a step, which is within a group, in float32.
//
// Wants `matrix.cuh`, `codes.cuh`, and the macros BITS of a code, 4 or 8, or 16: numbers of x's dtype; FLOATS, if those of 8
// are float8_e4m3fn, not int8; MINIMA, if there are any; STEP, bytes of a row's codes that are taken at a time: 16, 32 or
// 64; TOKENS, rows of x of a block, a multiple of 8; TILES of 16 rows of the weight that a block has; AHEAD, steps that are
// on their way; MOST_WARPS of a block.

constexpr int WARP = 32;
constexpr int NUMBER_BYTES = 2;
constexpr int TILE = 16, EIGHT = 8;  // rows of the weight, and of x, in an instruction
constexpr int BLOCK_ROWS = TILES * TILE, EIGHTS = TOKENS / EIGHT;
constexpr bool PLAIN = BITS == 16;                            // numbers, not codes: there are no scales
constexpr int LANE_BYTES = STEP / 4, WORDS = LANE_BYTES / 4;  // of a row's codes, in one step
constexpr int FOURS = PLAIN ? WORDS / 2 : WORDS;              // of codes, of each half of a row
constexpr int X_BYTES = PLAIN ? 1 : NUMBER_BYTES;             // of x, for a byte of codes
constexpr int HALVES = BITS == 4 ? 2 : 1;                     // a step of 4-bit codes has columns of both halves of a row

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
__device__ __forceinline__ void load_words(unsigned (&words)[COUNT], const char* from)
{
    if constexpr (COUNT == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (COUNT == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = *reinterpret_cast<const unsigned*>(from);
    }
}

template <int COUNT>
__device__ __forceinline__ void load_codes(unsigned (&words)[COUNT], const char* from)
{
    if constexpr (COUNT == 4) {
        const uint4 four = load_once(reinterpret_cast<const uint4*>(from));
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {
        load_words(words, from);
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
    for (int half = 0; half < HALVES && !PLAIN; half++) {
        load_factors(held.scale[half], weight.scale + next.group_at[half], weight.rows);
        if (MINIMA) load_factors(held.minimum[half], weight.minimum + next.group_at[half], weight.rows);
        if (--next.left[half] == 0) next.left[half] = weight.group_steps, next.group_at[half] += weight.every;
    }
    next.codes += STEP;
}

// Numbers of x in the columns of a lane's codes, of a row of each eight.
struct Numbers {
    unsigned pairs[EIGHTS][FOURS][2];
};

__device__ __forceinline__ void load_numbers(Numbers& numbers, const char* x, const Rows& rows)
{
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        auto& pairs = numbers.pairs[eight];
        const char* from = x + rows.at[eight];
        if constexpr (FOURS == 1) {
            const uint2 two = *reinterpret_cast<const uint2*>(from);
            pairs[0][0] = two.x, pairs[0][1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < FOURS; i += 2) {
                const uint4 four = reinterpret_cast<const uint4*>(from)[i / 2];
                pairs[i][0] = four.x, pairs[i][1] = four.y, pairs[i + 1][0] = four.z, pairs[i + 1][1] = four.w;
            }
        }
    }
}

// Of the `four`th four codes.
__device__ __forceinline__ void numbers_of(unsigned (&pairs)[2], const unsigned (&codes)[WORDS], int four, int half)
{
    if constexpr (PLAIN) pairs[0] = codes[2 * four], pairs[1] = codes[2 * four + 1];
    else if constexpr (BITS == 4) of_nibbles(pairs, codes[four] >> half * 4);
    else if constexpr (FLOATS) of_e4m3(pairs, codes[four]);
    else of_int8(pairs, codes[four]);
}

using Sums = float[TILES][EIGHTS][4];

// Adds what a step makes of a tile and an eight of x, `of_x` being the sums of x.
__device__ __forceinline__ void add_scaled(
    float (&sums)[4], const float (&products)[4], const float (&scale)[2], const float (&of_x)[4], const float (&minimum)[2])
{
#pragma unroll
    for (int at = 0; at < 4; at++) {
        sums[at] = fmaf(products[at], scale[at / 2], sums[at]);
        if (MINIMA) sums[at] = fmaf(minimum[at / 2], of_x[at % 2], sums[at]);
    }
}

// Adds what one half of a step makes of the rows of x from column `x` on. Instructions that wait for each other are far
// apart: no warp waits for what it has begun just before.
__device__ __forceinline__ void add_half(Sums& sums, const Held& held, int half, const char* x, const Rows& rows)
{
    constexpr unsigned ONES[4] = {ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE};
    Numbers numbers;
    load_numbers(numbers, x, rows);
    Sums scaled = {};
    Sums& products = PLAIN ? sums : scaled;
    float of_x[EIGHTS][4] = {};
#pragma unroll
    for (int four = 0; four < FOURS; four++) {
        unsigned weights[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                unsigned pairs[2];
                numbers_of(pairs, held.codes[i][j], four, half);
                weights[i][j] = pairs[0], weights[i][2 + j] = pairs[1];
            }
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) add_products<IS_BF16>(products[i][eight], weights[i], numbers.pairs[eight][four]);
            if (MINIMA) add_products<IS_BF16>(of_x[eight], ONES, numbers.pairs[eight][four]);
        }
    }
    if (PLAIN) return;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++)
            add_scaled(sums[i][eight], products[i][eight], held.scale[half].of[i], of_x[eight], held.minimum[half].of[i]);
}

// Has what a warp reads of the weight, from step `first` on, brought to the second-level cache.
__device__ __forceinline__ void prefetch_steps(const Weight& weight, int first_row, int first, int last)
{
#if __CUDA_ARCH__ >= 900
    const int lane = threadIdx.x % WARP;
    if (first >= last || lane >= TILES * TILE || first_row + lane >= weight.every) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::
        "l"(weight.codes + static_cast<long long>(first_row + lane) * weight.row_bytes + first * STEP), "r"((last - first) * STEP));
#endif
}

// The sums over steps `first` to `last` of the `steps` that a row has, of a lane: of its rows of the weight and, two each,
// rows 2 * t and 2 * t + 1 of each eight of x, as `add_products` has them. `until_x` is called once weights are on their
// way, before anything of x is read.
template <class Ready>
__device__ __forceinline__ void add_steps(
    Sums& sums, const Weight& weight, const Rows& rows, int first, int last, int steps, Ready until_x)
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
    until_x();
    const char* x = rows.first + static_cast<long long>(at) * X_BYTES;
#pragma unroll 1
    for (int step = first; step < last; step += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (step + i >= last) break;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                add_half(sums, held[i], half, x + static_cast<long long>(half) * weight.row_bytes * X_BYTES, rows);
                if (HALVES > 1) __syncwarp();  // else numbers of both halves are loaded first, and spill
            }
            x += STEP * X_BYTES;
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
