// Vectors of 16 bytes, as which rows are read and written, and their numbers as floats. Wants NUMBER, the rows' dtype.

constexpr int VECTOR = 16;                            // bytes
constexpr int WORD_ELEMENTS = NUMBER == F32 ? 1 : 2;  // in 32 bits
constexpr int ELEMENTS = VECTOR / 4 * WORD_ELEMENTS;  // in a vector

struct Floats {
    float at[ELEMENTS];
};

__device__ __forceinline__ uint4 load(const char* from)
{
    return *reinterpret_cast<const uint4*>(from);
}

__device__ __forceinline__ Floats load_floats(const float* from)
{
    Floats floats;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        floats.at[i] = four.x, floats.at[i + 1] = four.y, floats.at[i + 2] = four.z, floats.at[i + 3] = four.w;
    }
    return floats;
}

__device__ __forceinline__ Floats widened(const uint4& vector)
{
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    Floats floats;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const unsigned word = words[i / WORD_ELEMENTS];
        floats.at[i] = WORD_ELEMENTS == 1 ? to_f32<NUMBER>(word) : to_f32<NUMBER>(i % 2 ? word >> 16 : word & 0xffff);
    }
    return floats;
}

__device__ __forceinline__ uint4 narrowed(const Floats& floats)
{
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++)
        words[i / WORD_ELEMENTS] |= from_f32<NUMBER>(floats.at[i]) << (i % WORD_ELEMENTS * 16);
    return uint4{words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void store(char* to, const Floats& floats)
{
    *reinterpret_cast<uint4*>(to) = narrowed(floats);
}
