// Copies many small pieces of memory at once, between a GPU's memory and pinned host memory or within either.
//
// The copy engines of a GPU take microseconds per piece; here a warp takes CHUNK bytes of a piece at a time, with all its
// loads in flight before its first store. Loads and stores are streaming: nothing that is copied is soon read again, and
// the forward pass beside the copy lives on the L2 cache.

constexpr int CHUNK = 2048;  // bytes a warp copies at a time: 4 vectors of 16 bytes a lane
constexpr int WARP = 32;
constexpr int VECTORS = CHUNK / (WARP * 16);

__device__ __forceinline__ void copy_vectors(const char* source, char* target, int bytes, int lane)
{
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
    const int vectors = bytes / 16;
    uint4 held[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (lane + i * WARP < vectors) held[i] = __ldcs(from + lane + i * WARP);
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (lane + i * WARP < vectors) __stcs(to + lane + i * WARP, held[i]);
}

__device__ __forceinline__ void copy_bytes(const char* source, char* target, int begin, int end, int lane)
{
    for (int at = begin + lane; at < end; at += WARP) target[at] = source[at];
}

// sources, targets: addresses of the pieces; sizes: their bytes; each [count]
// chunks:           so many chunks hold the largest piece; count * chunks is less than 2^31
extern "C" __global__ void copy_pieces(const unsigned long long* sources, const unsigned long long* targets,
                                       const long long* sizes, int count, int chunks)
{
    const int lane = threadIdx.x % WARP;
    const int warps = gridDim.x * blockDim.x / WARP;
    for (int item = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; item < count * chunks; item += warps) {
        const int piece = item / chunks;
        const long long begin = static_cast<long long>(item % chunks) * CHUNK;
        const long long left = sizes[piece] - begin;
        if (left <= 0) continue;
        const char* source = reinterpret_cast<const char*>(sources[piece] + begin);
        char* target = reinterpret_cast<char*>(targets[piece] + begin);
        const int bytes = left < CHUNK ? static_cast<int>(left) : CHUNK;
        const int whole = (sources[piece] | targets[piece]) % 16 == 0 ? bytes / 16 * 16 : 0;
        copy_vectors(source, target, whole, lane);
        copy_bytes(source, target, whole, bytes, lane);
    }
}
