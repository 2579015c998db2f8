// Codes of weights as pairs of numbers, made of four codes in a register: `codes_jit.py` says how. Wants `matrix.cuh`.

#ifdef __CUDACC__
// What is read once passes by the first-level cache, and has the second bring its whole line, whose rest is read next.
__device__ __forceinline__ uint4 load_once(const uint4* from)
{
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "l"(from));
    return four;
}
#endif

// Bytes 0 and 1, then 2 and 3, of `codes`, each below the byte `upper` of a number of 16 bits.
__device__ __forceinline__ void below(unsigned (&pairs)[2], unsigned codes, unsigned upper)
{
    pairs[0] = __byte_perm(codes, upper, 0x4140);
    pairs[1] = __byte_perm(codes, upper, 0x4342);
}

// Codes of int8.
__device__ __forceinline__ void of_int8(unsigned (&pairs)[2], unsigned codes)
{
    if constexpr (IS_BF16) {
        constexpr unsigned FROM_128 = 0x43434343, MINUS_1 = 0xbf80bf80;
        unsigned offsets[2];  // 256 where the code is negative, else 128
        below(pairs, codes & 0x7f7f7f7f, FROM_128);
        below(offsets, codes & 0x80808080, FROM_128);
        pairs[0] = fused<IS_BF16>(offsets[0], MINUS_1, pairs[0]);
        pairs[1] = fused<IS_BF16>(offsets[1], MINUS_1, pairs[1]);
    } else {
        constexpr unsigned FROM_1024 = 0x64646464, MINUS_1152 = 0xe480e480;
        below(pairs, codes ^ 0x80808080, FROM_1024);
        pairs[0] = fused<IS_BF16>(pairs[0], ONE_TWICE, MINUS_1152);
        pairs[1] = fused<IS_BF16>(pairs[1], ONE_TWICE, MINUS_1152);
    }
}

// Codes of 4 bits, the low half of each byte, less 8.
__device__ __forceinline__ void of_nibbles(unsigned (&pairs)[2], unsigned codes)
{
    constexpr unsigned UPPER = IS_BF16 ? 0x43434343 : 0x64646464;  // 128, 1024
    constexpr unsigned OFFSET = IS_BF16 ? 0xc308c308 : 0xe408e408;  // -136, -1032
    below(pairs, codes & 0x0f0f0f0f, UPPER);
    pairs[0] = fused<IS_BF16>(pairs[0], ONE_TWICE, OFFSET);
    pairs[1] = fused<IS_BF16>(pairs[1], ONE_TWICE, OFFSET);
}

// float8_e4m3fn, but for its two codes that are no numbers.
__device__ __forceinline__ void of_e4m3(unsigned (&pairs)[2], unsigned codes)
{
    constexpr unsigned POWER = IS_BF16 ? 0x7b807b80 : 0x5c005c00;  // 2 to the 120th, to the 8th
    constexpr unsigned SHIFT = IS_BF16 ? 4 : 1, SIZE = IS_BF16 ? 0x07f007f0 : 0x3f803f80;
    constexpr unsigned SIGN = 0x80008000, MINUS_0 = SIGN;  // added, it leaves 0 its sign
    const unsigned upper[2] = {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned number = (upper[i] >> SHIFT & SIZE) | (upper[i] & SIGN);
        pairs[i] = fused<IS_BF16>(number, POWER, MINUS_0);
    }
}
