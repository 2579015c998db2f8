// Rows in int8 or E4M3 with a scale each, NaN for one that has a NaN, as kernels/mla_quantised.py has them. Wants
// vectors.cuh, e4m3.cuh, and CACHE: INT8, E4M3, or another, which has no such rows.

constexpr bool QUANTISED = CACHE == INT8 || CACHE == E4M3;
constexpr int CACHE_BYTES = QUANTISED ? 1 : 4 / WORD_ELEMENTS;
constexpr float LARGEST = CACHE == INT8 ? 127.0f : 448.0f;
constexpr float COARSE = 16.0f;                          // fine units in a coarse one
constexpr float TURNED = CACHE == INT8 ? COARSE : 1.0f;  // of the unit, what the coarse part of a rotated number counts

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

// Of `value` over the block, all of whose threads take part.
__device__ __forceinline__ float largest_of_block(float value)
{
    __shared__ float of_warps[WARP];
    const int lane = threadIdx.x % WARP;
    value = largest_of_warp(value);
    if (lane == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    return largest_of_warp(lane < blockDim.x / WARP ? of_warps[lane] : 0.0f);
}

// Of a row whose largest magnitude is given.
__device__ __forceinline__ float scale_of(float largest) { return largest == 0.0f ? 1.0f : largest / LARGEST; }

// A float over the scale, of int8 as a whole number.
__device__ __forceinline__ float rounded(float value, float scale)
{
    value /= scale;
    return CACHE == INT8 ? rintf(value) : value;
}

__device__ __forceinline__ Floats rounded(const Floats& floats, float scale)
{
    Floats whole;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) whole.at[i] = rounded(floats.at[i], scale);
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

// Of a rotated number, which takes two bytes, and `rounded` made.
__device__ __forceinline__ float coarse_of(float whole) { return CACHE == INT8 ? rintf(whole / COARSE) : whole; }

__device__ __forceinline__ float fine_of(float whole)
{
    if constexpr (CACHE == INT8) return whole - COARSE * coarse_of(whole);
    return COARSE * (whole - of_e4m3(byte_of(whole)));
}

__device__ __forceinline__ void store_coarse_and_fine(char* coarse_at, char* fine_at, const Floats& floats, float scale)
{
    const Floats whole = rounded(floats, scale);
    Floats coarse, fine;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) coarse.at[i] = coarse_of(whole.at[i]), fine.at[i] = fine_of(whole.at[i]);
    store_bytes(coarse_at, coarse), store_bytes(fine_at, fine);
}
