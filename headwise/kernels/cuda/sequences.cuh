// Which sequence of a step a token is of.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

// The sequence that owns `token`: as many end at or before it. `batch` for a token of none.
__device__ __forceinline__ int sequence_of(int token, const int* ends, int batch)
{
    int before = 0;
#pragma unroll 4
    for (int i = threadIdx.x % WARP; i < batch; i += WARP) before += ends[i] <= token;
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) before += __shfl_xor_sync(ALL_LANES, before, lanes, WARP);
    return before;
}
