// Numbers of float8_e4m3fn: a sign, 4 bits of exponent, 3 of mantissa.

// The 8 bits of `value`, which is at most 448 in magnitude: rounds half to even.
__device__ __forceinline__ unsigned to_e4m3(float value)
{
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude < 0x3c800000)  // below 2^-6 lie multiples of 2^-9; the largest rounds up to the code of 2^-6 itself
        return sign | static_cast<unsigned>(rintf(__uint_as_float(magnitude) * 512.0f));
    const unsigned rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;  // 3 bits of mantissa left
    return sign | (rounded - ((127 - 7) << 3));                                    // the exponent's bias becomes 7
}

// What 8 bits are, unless that is NaN.
__device__ __forceinline__ float of_e4m3(unsigned code)
{
    const unsigned sign = (code & 0x80) << 24, magnitude = code & 0x7f;
    const float size = magnitude < 8 ? magnitude / 512.0f : __uint_as_float((magnitude << 20) + ((127 - 7) << 23));
    return __uint_as_float(__float_as_uint(size) | sign);
}
