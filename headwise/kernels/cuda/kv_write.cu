// Writes a step's keys and values to the blocks of the cache, rotating queries and keys on the way if asked to, and
// adding the biases of the projections that they come from before.
//
// One block of threads a token; a row is one head's query, key or value of the token. LANES lanes of a warp hold a row,
// 8 elements each, 16 of rows that a warp would not hold else, so that rows are loaded and stored in whole vectors and
// reduced by shuffles.
//
// Macros of a variant: HEAD_DIM, a multiple of 16 up to 256, or of 32 up to 512; VALUE_DIM, likewise and no more, where
// values are smaller; INPUT, one of F16, BF16, F32; CACHE, the same or one of INT8, E4M3, which store a scale per row, or
// INT4, of whole groups of 32, which stores a scale and a minimum for each.

#include "overlap.cuh"
#include "numbers.cuh"
#include "e4m3.cuh"
#include "nibbles.cuh"
#include "sequences.cuh"

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

constexpr bool QUANTISED = CACHE == INT8 || CACHE == E4M3;
constexpr bool PACKED = CACHE == INT4;
constexpr float LARGEST = CACHE == INT8 ? 127.0f : 448.0f;

constexpr int ELEMENTS = HEAD_DIM <= 256 ? 8 : 16;               // of a row, in a lane
constexpr int LANES = HEAD_DIM / ELEMENTS;                       // that hold a row
constexpr int GROUP = LANES <= 8 ? 8 : LANES <= 16 ? 16 : 32;    // lanes given to a row
constexpr int WORD_ELEMENTS = INPUT == F32 ? 1 : 2;              // in 32 bits
constexpr int WORDS = ELEMENTS / WORD_ELEMENTS;                  // in a lane
constexpr int INPUT_ROW = HEAD_DIM * 4 / WORD_ELEMENTS;          // bytes
constexpr int CACHE_ROW = PACKED ? HEAD_DIM / 2 : QUANTISED ? HEAD_DIM : INPUT_ROW;
constexpr int SCALES_ROW = PACKED ? HEAD_DIM / SCALED * 4 : 4;   // of a token
constexpr int VALUE_LANES = VALUE_DIM / ELEMENTS;                // the same of a row of values
constexpr int VALUE_INPUT_ROW = VALUE_DIM * 4 / WORD_ELEMENTS;
constexpr int VALUE_CACHE_ROW = PACKED ? VALUE_DIM / 2 : QUANTISED ? VALUE_DIM : VALUE_INPUT_ROW;
constexpr int VALUE_SCALES_ROW = PACKED ? VALUE_DIM / SCALED * 4 : 4;
constexpr int HALF_LANES = HALF / ELEMENTS;                      // that hold half of a group of INT4

static_assert(QUANTISED || PACKED || int(CACHE) == int(INPUT), "only quantised caches differ from their input");
static_assert(!PACKED || (HEAD_DIM % SCALED == 0 && VALUE_DIM % SCALED == 0), "a row must be whole groups");
static_assert(VALUE_DIM <= HEAD_DIM && VALUE_DIM % ELEMENTS == 0, "lanes of keys must hold a row of values");
static_assert(HEAD_DIM % (2 * ELEMENTS) == 0 && HEAD_DIM <= WARP * ELEMENTS, "a row must fit a warp");

struct Lane {  // what one lane holds of a row, in the input's numbers
    unsigned words[WORDS];
};

// ---- numbers ----

__device__ __forceinline__ float element(const Lane& lane, int i)
{
    const unsigned word = lane.words[i / WORD_ELEMENTS];
    if constexpr (WORD_ELEMENTS == 1) return to_f32<INPUT>(word);
    return to_f32<INPUT>(i % 2 ? word >> 16 : word & 0xffff);
}

__device__ __forceinline__ unsigned quantised(float value, float scale)
{
    const float scaled = fminf(fmaxf(value / scale, -LARGEST), LARGEST);
    if constexpr (CACHE == INT8) return static_cast<unsigned>(static_cast<int>(rintf(scaled))) & 0xff;
    return to_e4m3(scaled);
}

// ---- rows ----

__device__ __forceinline__ Lane load(const char* from)
{
    Lane lane;
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + 4 * i);
        lane.words[i] = four.x, lane.words[i + 1] = four.y, lane.words[i + 2] = four.z, lane.words[i + 3] = four.w;
    }
    return lane;
}

// Rounded to the input's dtype.
__device__ __forceinline__ Lane sum_of(const Lane& first, const Lane& second)
{
    Lane sum;
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        sum.words[word] = 0;
#pragma unroll
        for (int part = 0; part < WORD_ELEMENTS; part++) {
            const int i = word * WORD_ELEMENTS + part;
            sum.words[word] |= from_f32<INPUT>(element(first, i) + element(second, i)) << part * 16;
        }
    }
    return sum;
}

__device__ __forceinline__ void store(char* to, const Lane& lane)
{
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
        *reinterpret_cast<uint4*>(to + 4 * i) =
            uint4{lane.words[i], lane.words[i + 1], lane.words[i + 2], lane.words[i + 3]};
}

struct Floats {
    float4 quarters[ELEMENTS / 4];
};

__device__ __forceinline__ Floats load_floats(const float* from)
{
    Floats floats;
#pragma unroll
    for (int i = 0; i < ELEMENTS / 4; i++) floats.quarters[i] = reinterpret_cast<const float4*>(from)[i];
    return floats;
}

__device__ __forceinline__ float element(const Floats& floats, int i)
{
    const float4& quarter = floats.quarters[i / 4];
    return i % 4 == 0 ? quarter.x : i % 4 == 1 ? quarter.y : i % 4 == 2 ? quarter.z : quarter.w;
}

// The row rotated by the angles whose cosines and sines, [HEAD_DIM / 2] each, are given: element i turns with element
// i + HEAD_DIM / 2. All lanes of a warp take part.
__device__ __forceinline__ Lane rotated(const Lane& own, const float* cosines, const float* sines, int at)
{
    Lane result;
    const int angle = at % (LANES / 2) * ELEMENTS;
    const Floats cosine = load_floats(cosines + angle), sine = load_floats(sines + angle);
    float turned[WORD_ELEMENTS];
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        Lane other;
        other.words[word] = __shfl_sync(ALL_LANES, own.words[word], (at + LANES / 2) % LANES, GROUP);
#pragma unroll
        for (int part = 0; part < WORD_ELEMENTS; part++) {
            const int i = word * WORD_ELEMENTS + part;
            const float across = element(other, i) * element(sine, i), along = element(own, i) * element(cosine, i);
            turned[part] = at < LANES / 2 ? along - across : along + across;
        }
        result.words[word] = from_f32<INPUT>(turned[0]);
        if constexpr (WORD_ELEMENTS == 2) result.words[word] |= from_f32<INPUT>(turned[1]) << 16;
    }
    return result;
}

// Of the whole row, in each of its lanes. All lanes of a warp take part.
__device__ __forceinline__ float largest_magnitude(const Lane& lane)
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) largest = fmaxf(largest, fabsf(element(lane, i)));
#pragma unroll
    for (int lanes = GROUP / 2; lanes > 0; lanes /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, lanes, GROUP));
    return largest;
}

__device__ __forceinline__ void store_quantised(char* to, const Lane& lane, float scale)
{
    unsigned packed[ELEMENTS / 4] = {};
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) packed[i / 4] |= quantised(element(lane, i), scale) << i % 4 * 8;
#pragma unroll
    for (int i = 0; i < ELEMENTS / 4; i += 2)
        reinterpret_cast<uint2*>(to)[i / 2] = uint2{packed[i], packed[i + 1]};
}

// ---- groups of four-bit codes ----

struct Packed {  // what one lane holds of a group
    unsigned codes[ELEMENTS / 4];  // in the lanes of the group's first half: their elements', and those HALF behind
    Steps steps;                   // of the group
};

// All lanes of a warp take part.
__device__ __forceinline__ Packed packed_of(const Lane& lane)
{
    float lowest = clipped(element(lane, 0)), highest = lowest;
#pragma unroll
    for (int i = 1; i < ELEMENTS; i++) {
        lowest = lower(lowest, clipped(element(lane, i)));
        highest = larger(highest, clipped(element(lane, i)));
    }
#pragma unroll
    for (int lanes = HALF_LANES; lanes > 0; lanes /= 2) {
        lowest = lower(lowest, __shfl_xor_sync(ALL_LANES, lowest, lanes, GROUP));
        highest = larger(highest, __shfl_xor_sync(ALL_LANES, highest, lanes, GROUP));
    }
    Packed packed = {};
    packed.steps = steps_of(lowest, highest);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++)
        packed.codes[i / 4] |= code_of(clipped(element(lane, i)), packed.steps) << i % 4 * 8;
#pragma unroll
    for (int i = 0; i < ELEMENTS / 4; i++)
        packed.codes[i] |= __shfl_xor_sync(ALL_LANES, packed.codes[i], HALF_LANES, GROUP) << 4;
    return packed;
}

// What lane `at` of the row at `to`, whose scales and minima are at `scales`, has to store of it.
__device__ __forceinline__ void store_packed(char* to, char* scales, const Packed& packed, int at)
{
    const int group = at / (2 * HALF_LANES), within = at % (2 * HALF_LANES);
    if (within >= HALF_LANES) return;
    uint2* codes = reinterpret_cast<uint2*>(to + group * HALF + within * ELEMENTS);
#pragma unroll
    for (int i = 0; i < ELEMENTS / 4; i += 2) codes[i / 2] = uint2{packed.codes[i], packed.codes[i + 1]};
    if (within == 0) reinterpret_cast<unsigned*>(scales)[group] = packed.steps.word();
}

// query, key, value:  [tokens, heads, HEAD_DIM], of values VALUE_DIM; their strides are bytes from token to token
// cosines, sines:     [tokens, HEAD_DIM / 2], or null: nothing is rotated. Queries are only there to be rotated.
// bias:               of a token's queries, keys and values, as these lie one behind the other, or null
// arena, layout:      see BlockLayout; *_at are byte offsets of the roles within a slot
// batch, tables, ...: see AttentionBatch and HeadTable; table_stride is from row to row of block_tables
// part, parts:        of the tokens whose keys and values are stored, see TokenShare; block_size is of these
// grid:               the tokens, and any number of blocks for each; threads: any number of warps
extern "C" __global__ void write_kv(
    char* query, const char* key, const char* value, const float* cosines, const float* sines,
    const char* bias, char* arena, const int* cu_seqlens_q, const int* seq_lens, const int* block_tables,
    const int* head_groups, const int* head_slots,
    long long query_stride, long long key_stride, long long value_stride,
    long long block_bytes, long long slot_bytes,
    long long value_at, long long key_scale_at, long long value_scale_at,
    int batch, int groups, int table_stride, int block_size, int query_heads, int kv_heads, int part, int parts)
{
    let_next_begin();
    wait_for_earlier();
    const int token = blockIdx.x;
    const int sequence = sequence_of(token, cu_seqlens_q + 1, batch);
    if (sequence == batch) return;  // padding
    const int of_all = seq_lens[sequence] - cu_seqlens_q[sequence + 1] + token, position = of_all / parts;
    const int* table = block_tables + static_cast<long long>(sequence) * groups * table_stride + position / block_size;
    const int offset = position % block_size;

    const int at = threadIdx.x % GROUP;
    const int rows = of_all % parts == part ? query_heads + 2 * kv_heads : query_heads;
    // Lanes without a row go along: a warp's shuffles need all of it.
    for (int first = blockIdx.y * (blockDim.x / GROUP); first < rows; first += gridDim.y * (blockDim.x / GROUP)) {
        const int row = first + threadIdx.x / GROUP;
        const bool is_query = row < query_heads, is_value = row >= query_heads + kv_heads;
        const bool here = row < rows && at < (is_value ? VALUE_LANES : LANES);
        const int head = is_query ? row : is_value ? row - query_heads - kv_heads : row - query_heads;
        const int in_row = at * (INPUT_ROW / LANES);
        const long long within = static_cast<long long>(head) * (is_value ? VALUE_INPUT_ROW : INPUT_ROW) + in_row;
        const long long before = is_query ? 0 : static_cast<long long>(is_value ? query_heads + kv_heads : query_heads) * INPUT_ROW;
        const char* from = is_query ? query + token * query_stride
                         : is_value ? value + token * value_stride : key + token * key_stride;

        Lane lane = {};  // zeros where there is no row: they change no maximum
        if (here) lane = load(from + within);
        if (here && bias) lane = sum_of(lane, load(bias + before + within));
        if (cosines) {
            const long long angles = static_cast<long long>(token) * (HEAD_DIM / 2);
            const Lane turned = rotated(lane, cosines + angles, sines + angles, at);
            if (here && !is_value) lane = turned;
        }
        float scale = 1.0f;
        if constexpr (QUANTISED) {
            const float largest = largest_magnitude(lane);
            if (largest > 0.0f) scale = largest / LARGEST;
        }
        Packed packed = {};
        if constexpr (PACKED) packed = packed_of(lane);
        if (!here) continue;
        if (is_query) {
            store(query + token * query_stride + within, lane);
            continue;
        }
        const int block = table[head_groups[head] * table_stride];
        if (block < 0) continue;
        char* slot = arena + block * block_bytes + head_slots[head] * slot_bytes;
        char* to = slot + (is_value ? value_at + offset * VALUE_CACHE_ROW : offset * CACHE_ROW);
        char* scales = slot + (is_value ? value_scale_at + offset * VALUE_SCALES_ROW : key_scale_at + offset * SCALES_ROW);
        if constexpr (PACKED) {
            store_packed(to, scales, packed, at);
        } else if constexpr (QUANTISED) {
            store_quantised(to + at * ELEMENTS, lane, scale);
            if (at == 0) *reinterpret_cast<float*>(scales) = scale;
        } else {
            store(to + at * (CACHE_ROW / LANES), lane);
        }
    }
}
