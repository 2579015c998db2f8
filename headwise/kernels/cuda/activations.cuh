// Activations in float32: what comes of a gate and of what it lets through, or of what there is without a gate.

struct Silu {
    static constexpr bool IS_GATED = true;
    static __device__ __forceinline__ float of(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }
};

// 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u.
struct GeluTanh {
    static constexpr bool IS_GATED = true;
    static __device__ __forceinline__ float of(float gate, float up)
    {
        const float argument = 1.5957691216057308f * (gate + 0.044715f * (gate * gate * gate));  // 2 * sqrt(2 / pi)
        return gate / (1.0f + expf(-argument)) * up;
    }
};

// See `Activation` in kernels/fused.py. Comparisons, not fminf: NaN stays NaN.
struct Clamped {
    static constexpr bool IS_GATED = true;
    static __device__ __forceinline__ float of(float gate, float up)
    {
        gate = gate > 7.0f ? 7.0f : gate;
        up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
    }
};

// See `Activation` likewise.
struct LimitedSilu {
    static constexpr bool IS_GATED = true;
    static __device__ __forceinline__ float of(float gate, float up)
    {
        return Silu::of(gate > 10.0f ? 10.0f : gate, up > 10.0f ? 10.0f : up < -10.0f ? -10.0f : up);
    }
};

// See `Activation` likewise.
struct ClippedSilu {
    static constexpr bool IS_GATED = true;
    static __device__ __forceinline__ float of(float gate, float up)
    {
        gate = Silu::of(gate, 1.0f);
        return (gate > 7.0f ? 7.0f : gate) * (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up);
    }
};

// A comparison, not fmaxf: NaN stays NaN.
struct Relu2 {
    static constexpr bool IS_GATED = false;
    static __device__ __forceinline__ float of(float x, float)
    {
        x = x <= 0.0f ? 0.0f : x;
        return x * x;
    }
};
