// Rows in int8 or E4M3 with a scale each, NaN for one that has a NaN, as kernels/mla_quantised.py has them. Wants
// vectors.cuh, e4m3.cuh, and CACHE: INT8, E4M3, or another, which has no such rows.

constexpr bool QUANTISED = CACHE == INT8 || CACHE == E4M3;
constexpr int CACHE_BYTES = QUANTISED ? 1 : 4 / WORD_ELEMENTS;
constexpr float LARGEST = CACHE == INT8 ? 127.0f : 448.0f;

__device__ __forceinline__ float largest_of(const Floats& floats, float least)
{
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) least = larger(least, fabsf(floats.at[i]));
    return least;
}

__device__ __forceinline__ float largest_of_warp(float value)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) value = larger(value, __shfl_xor_sync(ALL_LANES, value, across));
    return value;
}

// Of a row whose largest magnitude is given.
__device__ __forceinline__ float scale_of(float largest) { return largest == 0.0f ? 1.0f : largest / LARGEST; }

// Floats over the scale, of int8 as whole numbers.
__device__ __forceinline__ Floats rounded(const Floats& floats, float scale)
{
    Floats whole;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const float value = floats.at[i] / scale;
        whole.at[i] = CACHE == INT8 ? rintf(value) : value;
    }
    return whole;
}

__device__ __forceinline__ unsigned byte_of(float value)
{
    if constexpr (CACHE == INT8) return static_cast<unsigned>(static_cast<int>(value)) & 0xff;
    return to_e4m3(fminf(fmaxf(value, -LARGEST), LARGEST));
}

// What `rounded` made.
__device__ __forceinline__ void store_bytes(char* to, const Floats& floats)
{
    unsigned packed[ELEMENTS / 4];
#pragma unroll
    for (int word = 0; word < ELEMENTS / 4; word++) {
        packed[word] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[word] |= byte_of(floats.at[4 * word + i]) << 8 * i;
        reinterpret_cast<unsigned*>(to)[word] = packed[word];
    }
}
