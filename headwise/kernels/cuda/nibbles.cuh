// Groups of 32 numbers in four bits, as kernels/nibbles.py has them: what is read is minimum + code * scale.

constexpr int SCALED = 32;        // numbers that share a scale and a minimum
constexpr int HALF = SCALED / 2;  // of them: the codes of two share a byte
constexpr float LARGEST_F16 = 65504.0f, LARGEST_CODE = 15.0f;

struct Steps {
    unsigned scale, minimum;  // float16

    __device__ __forceinline__ unsigned word() const { return scale | minimum << 16; }
};

// As far as float16 holds it; NaN stays one.
__device__ __forceinline__ float clipped(float value)
{
    return value > LARGEST_F16 ? LARGEST_F16 : value < -LARGEST_F16 ? -LARGEST_F16 : value;
}

// Of the group whose numbers, clipped, go from `lowest` to `highest`.
__device__ __forceinline__ Steps steps_of(float lowest, float highest)
{
    const unsigned minimum = from_f32<F16>(lowest + 0.0f);  // of both zeros the one without a sign
    const unsigned scale = from_f32<F16>((highest - to_f32<F16>(minimum)) / LARGEST_CODE);
    return {to_f32<F16>(scale) > 0.0f ? scale : 0, minimum};
}

// Of a number that is clipped.
__device__ __forceinline__ unsigned code_of(float value, const Steps& steps)
{
    const float scale = to_f32<F16>(steps.scale), minimum = to_f32<F16>(steps.minimum);
    const float above = scale > 0.0f ? (value - minimum) / scale : 0.0f;
    return static_cast<unsigned>(rintf(fminf(fmaxf(above, 0.0f), LARGEST_CODE)));
}

__device__ __forceinline__ float read_of(unsigned code, const Steps& steps)
{
    return to_f32<F16>(steps.minimum) + code * to_f32<F16>(steps.scale);
}
