// Products of some dozens of rows with weights of 4 and 8 bits: `packed.cu` has those of few. Macros of a variant: NUMBER,
// F16 or BF16, the dtype of x and out; those that `packed.cuh` wants, with TILES 2 and MOST_WARPS 8; WHOLE_ROWS, if a row of
// the weight has one scale and no minimum; STAGE_BYTES, what `Stage` takes, as the host reckons it.
//
// With so many rows it is x that takes time: read by every 32 rows of the weight, there is more of it than of codes. So a
// block has 128 rows of the weight, and x passes through shared memory, once for all of them. A stage of that has 128 bytes
// of each row's codes, of which half of the warps take the first 64 each, and the others the rest; they are on their way
// `stages` - 1 ahead.
//
// Every block has an equal part of the work, which is tiles of out times their stages, one behind the other: parts begin and
// end anywhere in a tile. Whose part is a whole tile writes it. Else sums go to memory, and the last of a tile's blocks to
// come adds them up, in the order of the depth, whoever it is.

#include "overlap.cuh"
#include "async_copy.cuh"
#include "numbers.cuh"
#include "matrix.cuh"
#include "codes.cuh"
#include "packed.cuh"

constexpr int DEPTH_WARPS = 2, ROW_WARPS = MOST_WARPS / DEPTH_WARPS, THREADS = MOST_WARPS * WARP;
constexpr int ROWS = ROW_WARPS * BLOCK_ROWS;                  // of the weight, of a block
constexpr int CHUNK = 64, STEPS = CHUNK / STEP;               // bytes of a row's codes that a warp takes of a stage
constexpr int LINE = CHUNK * NUMBER_BYTES;                    // bytes of x in the same columns, of each half
constexpr int VECTOR = 16, LINE_VECTORS = LINE / VECTOR;
constexpr int FACTORS = WHOLE_ROWS ? 0 : HALVES * STEPS;      // scales of a row, in a chunk
constexpr int AT_ONCE = MINIMA ? 2 : 4;                   // eights of x whose products are in registers

static_assert(TILES == 2 && THREADS == DEPTH_WARPS * ROWS && !PLAIN && EIGHTS % AT_ONCE == 0, "what blocks are cut for");

// What warps of one half of a stage's depth take.
struct alignas(VECTOR) Part {
    char codes[ROWS][CHUNK];
    char x[HALVES][TOKENS][LINE];  // of which vectors lie as `swizzled` says
    float scale[FACTORS > 0 ? FACTORS : 1][ROWS];
    float minimum[MINIMA ? FACTORS : 1][MINIMA ? ROWS : 1];
};

struct Stage {
    Part of[DEPTH_WARPS];
};
static_assert(sizeof(Stage) == STAGE_BYTES);

struct Product {
    const char *x, *codes;
    const float *scale, *minimum;
    unsigned short* out;
    float* partial;     // [gridDim, 2, TOKENS, ROWS]: of each block, of the tile that it begins within, and that it ends in
    unsigned* arrived;  // [tiles], 0 before and after
    long long x_stride, of_group;  // of_group: 2 ** 40 over the steps of a group, rounded up
    int rows, width, row_bytes;
    int stages, token_tiles;  // stages of a tile
    long long units;          // stages of all tiles
};

// A stage of a tile.
struct Place {
    int tile, stage;
};

__device__ __forceinline__ Place place_of(const Product& product, long long unit)
{
    return {static_cast<int>(unit / product.stages), static_cast<int>(unit % product.stages)};
}

__device__ __forceinline__ int first_row_of(const Product& product, int tile) { return tile / product.token_tiles * ROWS; }
__device__ __forceinline__ int first_token_of(const Product& product, int tile) { return tile % product.token_tiles * TOKENS; }

// Where vector `at` of a line lies: lanes that read at once, 8 or, of 8 bytes each, 16, find theirs in different banks.
__device__ __forceinline__ int swizzled(int line, int at)
{
    return at ^ (STEP == 64 ? line & 1 : STEP == 32 ? (line & 1) * 4 : (line & 3) * 2);
}

// What a thread copies of a stage: a vector of each so many rows of the weight, and of rows of x, and a row's factors.
constexpr int CODE_VECTORS = DEPTH_WARPS * CHUNK / VECTOR, X_VECTORS = DEPTH_WARPS * LINE_VECTORS;
constexpr int ROWS_AT_ONCE = THREADS / CODE_VECTORS, TOKENS_AT_ONCE = THREADS / X_VECTORS;
static_assert(TOKENS_AT_ONCE % 4 == 0, "of the lines that a thread copies, vectors lie alike");

struct Copier {
    Place next;
    const char *codes, *x;       // of the thread's first rows, in that stage
    int rows_left, tokens_left;  // of the tile, and those behind it
};

__device__ __forceinline__ void begin_tile(Copier& copier, const Product& product)
{
    const int thread = threadIdx.x, stage = copier.next.stage, first_row = first_row_of(product, copier.next.tile);
    const int row = first_row + thread / CODE_VECTORS;
    const int token = first_token_of(product, copier.next.tile) + thread / X_VECTORS;
    const int byte = (stage * CODE_VECTORS + thread % CODE_VECTORS) * VECTOR;
    const int of_x = (stage * X_VECTORS + thread % X_VECTORS) * VECTOR;
    copier.codes = product.codes + static_cast<long long>(row) * product.row_bytes + byte;
    copier.x = product.x + token * product.x_stride + of_x;
    copier.rows_left = product.width - first_row;
    copier.tokens_left = product.rows - first_token_of(product, copier.next.tile);
}

__device__ __forceinline__ Copier copier_at(const Product& product, long long unit)
{
    Copier copier = {place_of(product, unit)};
    begin_tile(copier, product);
    return copier;
}

__device__ __forceinline__ void advance(Copier& copier, const Product& product)
{
    copier.codes += CODE_VECTORS * VECTOR, copier.x += X_VECTORS * VECTOR;
    if (++copier.next.stage < product.stages) return;
    copier.next = {copier.next.tile + 1, 0};
    begin_tile(copier, product);
}

// Codes and factors of a stage, on their way. Behind the last row, and behind a row's end, there are zeros.
__device__ __forceinline__ void copy_weight(Stage& stage, const Product& product, const Copier& copier)
{
    constexpr int EACH = CHUNK / VECTOR;
    const int thread = threadIdx.x, at = thread % CODE_VECTORS;
    const bool in_row = (copier.next.stage * CODE_VECTORS + at) * VECTOR < product.row_bytes;
    char* to = &stage.of[at / EACH].codes[thread / CODE_VECTORS][at % EACH * VECTOR];
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE)
        copy_16(to + i * CHUNK, copier.codes + static_cast<long long>(i) * product.row_bytes, in_row && thread / CODE_VECTORS + i < copier.rows_left);
    Part& part = stage.of[thread / ROWS];
    const int steps = product.row_bytes / STEP;
#pragma unroll
    for (int factor = 0; factor < FACTORS; factor++) {
        const int step = (copier.next.stage * DEPTH_WARPS + thread / ROWS) * STEPS + factor % STEPS;
        const bool there = thread % ROWS < copier.rows_left && step < steps;
        const long long group = (step + factor / STEPS * steps) * product.of_group >> 40;
        const long long from = (group + 1) * product.width - copier.rows_left + thread % ROWS;
        copy_4(&part.scale[factor][thread % ROWS], product.scale + from, there);
        if (MINIMA) copy_4(&part.minimum[factor][thread % ROWS], product.minimum + from, there);
    }
}

// Of x the same columns.
__device__ __forceinline__ void copy_x(Stage& stage, const Product& product, const Copier& copier)
{
    const int at = threadIdx.x % X_VECTORS, first = threadIdx.x / X_VECTORS, half_bytes = product.row_bytes * NUMBER_BYTES;
    const bool in_row = (copier.next.stage * X_VECTORS + at) * VECTOR < half_bytes;
    char* to = &stage.of[at / LINE_VECTORS].x[0][first][swizzled(first, at % LINE_VECTORS) * VECTOR];
#pragma unroll
    for (int i = 0; i < TOKENS; i += TOKENS_AT_ONCE)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            copy_16(to + (half * TOKENS + i) * LINE, copier.x + i * product.x_stride + half * half_bytes,
                    in_row && first + i < copier.tokens_left);
}

// Until all that was copied has landed but the last `latest` stages.
__device__ __forceinline__ void wait_for_stage(int latest)
{
    if (latest <= 0) wait_for_all_but<0>();
    else if (latest == 1) wait_for_all_but<1>();
    else if (latest == 2) wait_for_all_but<2>();
    else wait_for_all_but<3>();
}

// Of row `token` of x, numbers in the columns of a lane's codes of a step.
__device__ __forceinline__ void load_pairs(unsigned (&pairs)[FOURS][2], const char (&lines)[TOKENS][LINE], int token, int step)
{
    const int lane = threadIdx.x % 4;
    const char* line = lines[token];
    if constexpr (FOURS == 1) {
        const int at = swizzled(token, step * 2 + lane / 2) * VECTOR + lane % 2 * 8;
        const uint2 two = *reinterpret_cast<const uint2*>(line + at);
        pairs[0][0] = two.x, pairs[0][1] = two.y;
    } else {
#pragma unroll
        for (int i = 0; i < FOURS / 2; i++) {
            const int at = swizzled(token, (step * 4 + lane) * (FOURS / 2) + i) * VECTOR;
            const uint4 four = *reinterpret_cast<const uint4*>(line + at);
            pairs[2 * i][0] = four.x, pairs[2 * i][1] = four.y, pairs[2 * i + 1][0] = four.z, pairs[2 * i + 1][1] = four.w;
        }
    }
}

// A lane's codes of a step, as numbers: of rows g and g + 8 of each tile, as `add_products` has them.
using Fragments = unsigned[FOURS][TILES][4];

// Adds the products of a step of one half, with eights `first` to `first` + AT_ONCE of x.
__device__ __forceinline__ void add_eights(
    Sums& sums, const Fragments& weights, const Factors& scale, const Factors& minimum, const char (&lines)[TOKENS][LINE],
    int first, int step)
{
    constexpr unsigned ONES[4] = {ONE_TWICE, ONE_TWICE, ONE_TWICE, ONE_TWICE};
    unsigned pairs[AT_ONCE][FOURS][2];
    float products[AT_ONCE][TILES][4] = {}, of_x[AT_ONCE][4] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) load_pairs(pairs[i], lines, (first + i) * EIGHT + threadIdx.x % WARP / 4, step);
#pragma unroll
    for (int four = 0; four < FOURS; four++)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                add_products<IS_BF16>(
                    WHOLE_ROWS ? sums[tile][first + i] : products[i][tile], weights[four][tile], pairs[i][four]);
            if (MINIMA) add_products<IS_BF16>(of_x[i], ONES, pairs[i][four]);
        }
    if (WHOLE_ROWS) return;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            add_scaled(sums[tile][first + i], products[i][tile], scale.of[tile], of_x[i], minimum.of[tile]);
}

__device__ __forceinline__ void add_part(Sums& sums, const Part& part)
{
    const int lane = threadIdx.x % WARP, first_row = threadIdx.x / WARP % ROW_WARPS * BLOCK_ROWS + lane / 4;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
#pragma unroll 1
        for (int half = 0; half < HALVES; half++) {
            Fragments weights;
            Factors scale = {}, minimum = {};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int row = first_row + tile * TILE + j * EIGHT, factor = half * STEPS + step;
                    unsigned codes[WORDS];
                    load_words(codes, &part.codes[row][step * STEP + lane % 4 * LANE_BYTES]);
#pragma unroll
                    for (int four = 0; four < FOURS; four++) {
                        unsigned pairs[2];
                        numbers_of(pairs, codes, four, half);
                        weights[four][tile][j] = pairs[0], weights[four][tile][2 + j] = pairs[1];
                    }
                    if (!WHOLE_ROWS) scale.of[tile][j] = part.scale[factor][row];
                    if (MINIMA) minimum.of[tile][j] = part.minimum[factor][row];
                }
#pragma unroll
            for (int first = 0; first < EIGHTS; first += AT_ONCE) {
                if (MINIMA && HALVES == 1) __syncwarp();  // else numbers of all eights are loaded first, and spill
                add_eights(sums, weights, scale, minimum, part.x[half], first, step);
            }
        }
    }
}

__device__ __forceinline__ long long first_unit(const Product& product, int block)
{
    return product.units * block / gridDim.x;
}

__device__ __forceinline__ int block_with(const Product& product, long long unit)
{
    return static_cast<int>(((unit + 1) * gridDim.x - 1) / product.units);
}

__device__ __forceinline__ float* partial_of(const Product& product, int block, int tile)
{
    const bool from_its_begin = first_unit(product, block) <= static_cast<long long>(tile) * product.stages;
    return product.partial + (2LL * block + from_its_begin) * (TOKENS * ROWS);
}

__device__ __forceinline__ void write_sum(const Product& product, int tile, int row, int token, float sum)
{
    const int of_out = first_row_of(product, tile) + row;
    if (WHOLE_ROWS) sum *= product.scale[of_out];
    token += first_token_of(product, tile);
    product.out[static_cast<long long>(token) * product.width + of_out] = from_f32<NUMBER>(sum);
}

// Writes what this block has of a tile, or the whole tile if that is what was missing. All threads call it.
__device__ __forceinline__ void finish(Shared& shared, bool& is_last, const Sums& sums, const Product& product, int tile)
{
    const long long unit = static_cast<long long>(tile) * product.stages;
    const int first = block_with(product, unit), last = block_with(product, unit + product.stages - 1);
    const int rows = min(ROWS, product.width - first_row_of(product, tile));
    const int tokens = min(TOKENS, product.rows - first_token_of(product, tile));
    float* mine = partial_of(product, blockIdx.x, tile);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        share(shared, sums, eight);
        for (int at = threadIdx.x; at < ROWS * EIGHT; at += THREADS) {
            const int row = at % ROWS, of_eight = at / ROWS, token = eight * EIGHT + of_eight;
            if (row >= rows || token >= tokens) continue;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < DEPTH_WARPS; i++) sum += shared[i * ROW_WARPS + row / BLOCK_ROWS][row % BLOCK_ROWS][of_eight];
            if (first == last) write_sum(product, tile, row, token, sum);
            else mine[token * ROWS + row] = sum;
        }
    }
    if (first == last) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(product.arrived + tile, last - first) == last - first;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int at = threadIdx.x; at < tokens * ROWS; at += THREADS) {
        if (at % ROWS >= rows) continue;
        float sum = 0.0f;
        for (int block = first; block <= last; block++) sum += __ldcg(partial_of(product, block, tile) + at);
        write_sum(product, tile, at % ROWS, at / ROWS, sum);
    }
}

// out [rows, width] = x [rows, depth] @ weight.T, of rows `x_stride` bytes apart.
//
// codes:          [width, depth * BITS / 8]
// scale, minimum: [groups, width]
// of_group, partial, arrived: see `Product`
// stages:         of which shared memory has room, 2 to 5
// grid:           blocks, at most one for each stage of a tile; threads: MOST_WARPS warps
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 1) multiply_packed_many(
    const char* x, const char* codes, const float* scale, const float* minimum, char* out, float* partial, unsigned* arrived,
    long long x_stride, long long of_group, int rows, int width, int depth, int stages)
{
    __shared__ Shared shared;
    __shared__ bool is_last;
    let_next_begin();
    Stage* stage = reinterpret_cast<Stage*>(dynamic_shared());
    const int row_bytes = depth * BITS / 8, of_tile = (row_bytes + DEPTH_WARPS * CHUNK - 1) / (DEPTH_WARPS * CHUNK);
    const int token_tiles = (rows + TOKENS - 1) / TOKENS, tiles = (width + ROWS - 1) / ROWS * token_tiles;
    const Product product = {
        x, codes, scale, minimum, reinterpret_cast<unsigned short*>(out), partial, arrived, x_stride, of_group, rows, width,
        row_bytes, of_tile, token_tiles, static_cast<long long>(tiles) * of_tile};
    const long long first = first_unit(product, blockIdx.x);
    const int units = static_cast<int>(first_unit(product, blockIdx.x + 1) - first), ahead = stages - 1;

    Copier copier = copier_at(product, first);
    for (int i = 0; i < ahead && i < units; i++, advance(copier, product)) copy_weight(stage[i], product, copier);
    wait_for_earlier();
    copier = copier_at(product, first);
    for (int i = 0; i < ahead; i++, end_group())
        if (i < units) copy_x(stage[i], product, copier), advance(copier, product);

    Place place = place_of(product, first);
    Sums sums = {};
    for (int unit = 0, at = 0; unit < units; unit++, at = at + 1 == stages ? 0 : at + 1) {
        wait_for_stage(ahead - 1);
        __syncthreads();  // what all have copied is there, and nobody reads any more what is copied over
        if (unit + ahead < units) {
            Stage& free = stage[at == 0 ? ahead : at - 1];
            copy_weight(free, product, copier), copy_x(free, product, copier), advance(copier, product);
        }
        end_group();
        add_part(sums, stage[at].of[threadIdx.x / WARP / ROW_WARPS]);
        if (++place.stage < of_tile && unit + 1 < units) continue;
        finish(shared, is_last, sums, product, place.tile);
        place = {place.tile + 1, 0};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][eight][j] = 0.0f;
    }
}
