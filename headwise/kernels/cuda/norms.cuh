// What norms a row of vectors in registers. Wants HELD, the vectors of a row that a thread keeps; and vectors.cuh before it.

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

__device__ __forceinline__ float sum_over_lanes(float value, int lanes)
{
    for (int across = lanes / 2; across > 0; across /= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    return value;
}

// Of `value` over the `group` threads of a row; all threads of the block take part.
__device__ __forceinline__ float sum_over_group(float value, int group)
{
    if (group <= WARP) return sum_over_lanes(value, group);
    __shared__ float of_warps[WARP];
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    value = sum_over_lanes(value, WARP);
    if (lane == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    return sum_over_lanes(lane < warps ? of_warps[lane] : 0.0f, WARP);
}

// The vector of sums, rounded to the dtype.
__device__ __forceinline__ uint4 added(const uint4& left, const uint4& right)
{
    const Floats first = widened(left), second = widened(right);
    Floats sums;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) sums.at[i] = first.at[i] + second.at[i];
    return narrowed(sums);
}

// Of the vectors of one row that this thread holds, `vectors` in all. All threads of the block take part.
__device__ __forceinline__ void norm_row(
    const uint4 (&held)[HELD], const float* weight, char* out, bool here, int vectors, int group, float eps)
{
    const int at = threadIdx.x % group;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (!here || i * group + at >= vectors) continue;
        const Floats floats = widened(held[i]);
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++) sum += floats.at[j] * floats.at[j];
    }
    const float mean = sum_over_group(sum, group) / (vectors * ELEMENTS);
    const float scale = 1.0f / sqrtf(mean + eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int vector = i * group + at;
        if (!here || vector >= vectors) continue;
        Floats floats = widened(held[i]);
        const Floats weights = load_floats(weight + vector * ELEMENTS);
#pragma unroll
        for (int j = 0; j < ELEMENTS; j++) floats.at[j] = floats.at[j] * scale * weights.at[j];
        store(out + vector * VECTOR, floats);
    }
}
