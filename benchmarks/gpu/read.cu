// Reads memory and does nothing else: what is timed behind it finds caches that are full of other lines, none of which
// has to be written back.

constexpr int AHEAD = 4;  // loads of a thread in flight

__device__ __forceinline__ unsigned mix(const uint4& vector) { return vector.x ^ vector.y ^ vector.z ^ vector.w; }

// memory: `vectors` of 16 bytes
// sink:   is written if what a thread has read adds up to one number, lest the loads be left out
extern "C" __global__ void read_all(const uint4* memory, long long vectors, unsigned* sink)
{
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned mixed = 0;
#pragma unroll 1
    for (; at + (AHEAD - 1) * threads < vectors; at += AHEAD * threads) {
        uint4 held[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) held[i] = memory[at + i * threads];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) mixed += mix(held[i]);
    }
#pragma unroll 1
    for (; at < vectors; at += threads) mixed += mix(memory[at]);
    if (mixed == 0x9e3779b9u) *sink = mixed;
}
