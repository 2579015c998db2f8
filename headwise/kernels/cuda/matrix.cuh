// Pairs of numbers in registers, and the instruction of tensor cores that multiplies tiles of them. Wants NUMBER.

static_assert(NUMBER == F16 || NUMBER == BF16, "tensor cores multiply numbers of two bytes");
constexpr bool IS_BF16 = NUMBER == BF16;
constexpr unsigned ONE_TWICE = IS_BF16 ? 0x3f803f80 : 0x3c003c00;

#ifdef __CUDACC__
// sums [16, 8] += a [16, 16] @ b [8, 16].T, by a warp. Lane 4 * g + t has, two to a register,
//     a:    of rows g and g + 8 the columns 2 * t and 2 * t + 1, then of both rows the columns 2 * t + 8 and 2 * t + 9
//     b:    of row g the columns 2 * t and 2 * t + 1, then 2 * t + 8 and 2 * t + 9
//     sums: of row g the columns 2 * t and 2 * t + 1, then of row g + 8
// Source: PTX ISA 8.0, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <bool BF>
__device__ __forceinline__ void add_products(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2])
{
    if constexpr (BF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// a * b + c of two pairs each, rounded once.
template <bool BF>
__device__ __forceinline__ unsigned fused(unsigned a, unsigned b, unsigned c)
{
    unsigned sums;
    if constexpr (BF) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
    return sums;
}
#endif
