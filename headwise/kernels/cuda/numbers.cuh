// Numbers of two bytes, and four, in registers.

enum Number { F16, BF16, F32, INT8, E4M3, INT4 };

#ifdef __CUDACC__
__device__ __forceinline__ float f16_to_f32(unsigned short bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short f32_to_f16(float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// Rounds half to even; NaN stays one.
__device__ __forceinline__ unsigned short f32_to_bf16(float value)
{
    const unsigned bits = __float_as_uint(value);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Both are NaN where either of what is compared is.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ float lower(float a, float b) { return a < b || a != a ? a : b; }

template <Number KIND>
__device__ __forceinline__ float to_f32(unsigned bits)
{
    if constexpr (KIND == F16) return f16_to_f32(bits);
    if constexpr (KIND == BF16) return __uint_as_float(bits << 16);
    return __uint_as_float(bits);
}

template <Number KIND>
__device__ __forceinline__ unsigned from_f32(float value)
{
    if constexpr (KIND == F16) return f32_to_f16(value);
    if constexpr (KIND == BF16) return f32_to_bf16(value);
    return __float_as_uint(value);
}
