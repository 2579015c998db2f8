// Rows of scores, [rows, vocab]: their logits by 16 bytes a load, the order of these, and the first of the largest.
// Several blocks, its parts, share a row: blockIdx.x of the row blockIdx.y. Wants vectors.cuh.

typedef unsigned long long Mass;  // of tokens: how many they are, or what they weigh

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int MOST_THREADS = 512;
constexpr int MOST_PARTS = 32;
constexpr unsigned NAN_KEY = 0xffffffffu, INFINITY_KEY = 0xff800000u, MINUS_INFINITY_KEY = 0x007fffffu;

__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

__device__ __forceinline__ Mass smaller(Mass a, Mass b) { return a < b ? a : b; }

// ---- the largest of some ----

// Of two pairs of 16 bits, in one instruction; NaN where either is.
__device__ __forceinline__ unsigned larger_pair(unsigned a, unsigned b)
{
#ifdef __CUDACC__
    unsigned larger;
    if (NUMBER == F16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    unsigned both[2];
    for (int i = 0; i < 2; i++)
        both[i] = from_f32<NUMBER>(larger(to_f32<NUMBER>(a >> 16 * i & 0xffff), to_f32<NUMBER>(b >> 16 * i & 0xffff)));
    return both[0] | both[1] << 16;
#endif
}

// Of a vector; NaN where one is.
__device__ __forceinline__ float largest_of(const uint4& vector)
{
    if constexpr (NUMBER == F32) {
        const Floats floats = widened(vector);
        return larger(larger(floats.at[0], floats.at[1]), larger(floats.at[2], floats.at[3]));
    }
    const unsigned pair = larger_pair(larger_pair(vector.x, vector.y), larger_pair(vector.z, vector.w));
    return larger(to_f32<NUMBER>(pair & 0xffff), to_f32<NUMBER>(pair >> 16));
}

// ---- logits, and keys in their order ----

// Few models have caps: called, it takes none of the others' registers or instructions.
__device__ __noinline__ static float capped(float score, float cap) { return cap * tanhf(score / cap); }

struct Scores {
    const char* first;  // the vector in which the row begins
    float cap;          // of logits, cap * tanh(score / cap); 0 for none
    int lead;           // elements of that vector before the row
    int vocab, shift;

    __device__ __forceinline__ int vectors() const { return (lead + vocab + ELEMENTS - 1) / ELEMENTS; }

    // Of a vector, the first token.
    __device__ __forceinline__ int token_of(int vector) const { return vector * ELEMENTS - lead; }

    // Other rows have no part of it.
    __device__ __forceinline__ bool is_whole(int vector) const
    {
        const int begin = lead > 0, end = (lead + vocab) / ELEMENTS;
        return begin <= vector && vector < end;
    }

    // A vector, if it is whole and before `end`.
    __device__ __forceinline__ uint4 loaded(int vector, int end) const
    {
        uint4 loaded = {0, 0, 0, 0};
        if (vector < end && is_whole(vector)) loaded = load(first + static_cast<long long>(vector) * VECTOR);
        return loaded;
    }

    __device__ __forceinline__ float logit(int token) const
    {
        const int element = token + lead;
        const float score = NUMBER == F32 ? reinterpret_cast<const float*>(first)[element]
                                          : to_f32<NUMBER>(reinterpret_cast<const unsigned short*>(first)[element]);
        return cap == 0.0f ? score : capped(score, cap);
    }

    // Calls `see(token, logit)` for the tokens of a vector, in their order; or for none, where `may` says of the largest
    // logit that none is wanted. loaded: the vector, if it is whole
    template <class May, class See>
    __device__ __forceinline__ void visit(int vector, const uint4& loaded, const May& may, const See& see) const
    {
        if (cap != 0.0f || !is_whole(vector)) return revisit(vector, see);
        if (!may(largest_of(loaded))) return;
        const Floats scores = widened(loaded);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) see(token_of(vector) + i, scores.at[i]);
    }

    // The same, one token a time, as few vectors need it, and caps are slow anyway.
    template <class See>
    __device__ __forceinline__ void revisit(int vector, const See& see) const
    {
        const int token = token_of(vector);
#pragma unroll 1
        for (int i = token < 0 ? 0 : token; i < smaller(token + ELEMENTS, vocab); i++) see(i, logit(i));
    }

    // The largest of a vector's logits; NaN where one is.
    __device__ __forceinline__ float largest(int vector, const uint4& loaded) const
    {
        if (is_whole(vector) && cap == 0.0f) return largest_of(loaded);
        float largest = -__uint_as_float(0x7f800000u);
        revisit(vector, [&](int, float logit) { largest = larger(largest, logit); });
        return largest;
    }

    // NaN is above all, and both zeros are one. What is equal for all numbers of the dtype is cut off.
    __device__ __forceinline__ unsigned key(float logit) const
    {
        if (logit != logit) return NAN_KEY >> shift;
        const unsigned bits = __float_as_uint(logit + 0.0f);
        return (bits >> 31 ? ~bits : bits | 0x80000000u) >> shift;
    }

    __device__ __forceinline__ float logit_of(unsigned key) const
    {
        if (key == NAN_KEY >> shift) return __uint_as_float(0x7fc00000u);
        const unsigned whole = key << shift;
        return __uint_as_float(whole >> 31 ? whole & 0x7fffffffu : ~(whole | ((1u << shift) - 1)));
    }

    // What logits with this key, or a larger one, are not less than.
    __device__ __forceinline__ float least_of(unsigned key) const
    {
        return logit_of(key > MINUS_INFINITY_KEY >> shift ? key : MINUS_INFINITY_KEY >> shift);
    }
};

__device__ __forceinline__ Scores scores_of_row(const char* row, float cap, int vocab)
{
    const int beyond = reinterpret_cast<unsigned long long>(row) % VECTOR;
    const int shift = cap != 0.0f || NUMBER == F32 ? 0 : NUMBER == BF16 ? 16 : 13;
    return Scores{row - beyond, cap, beyond * ELEMENTS / VECTOR, vocab, shift};
}

// ---- the parts of a row ----

// Vectors of a row.
struct Span {
    int begin, end;
};

// Of a warp: so many vectors, but for the last ones.
__device__ __forceinline__ int chunk_size(const Scores& scores)
{
    const int chunks = gridDim.x * (blockDim.x / WARP);
    return (scores.vectors() + chunks - 1) / chunks;
}

// What warp `chunk % warps` of the part `chunk / warps` has of the row.
__device__ __forceinline__ Span span_of(const Scores& scores, int chunk)
{
    const int vectors = scores.vectors(), size = chunk_size(scores);
    return Span{smaller(chunk * size, vectors), smaller(chunk * size + size, vectors)};
}

// Calls `see(vector, loaded)` for each `step`th vector from `begin` on; see `Scores::visit`. AHEAD of them are being
// loaded at any time: what is done with one is less than what it takes to come.
template <int AHEAD, class See>
__device__ __forceinline__ void walk(const Scores& scores, int begin, int end, int step, const See& see)
{
    uint4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ahead[i] = scores.loaded(begin + i * step, end);
#pragma unroll 1
    for (int vector = begin; vector < end; vector += step) {
        const uint4 now = ahead[0];
#pragma unroll
        for (int i = 1; i < AHEAD; i++) ahead[i - 1] = ahead[i];
        ahead[AHEAD - 1] = scores.loaded(vector + AHEAD * step, end);
        see(vector, now);
    }
}

// That, of the calling warp's share of the row; each lane has its vectors in their order.
template <int AHEAD, class See>
__device__ __forceinline__ void walk_share(const Scores& scores, const See& see)
{
    const Span span = span_of(scores, blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
    walk<AHEAD>(scores, span.begin + threadIdx.x % WARP, span.end, WARP, see);
}

// Counts a part, by one of its threads, behind a barrier; whether it is the last of the row. Then what all parts wrote
// before can be read past the first cache. `arrived` is 0 before and after.
__device__ __forceinline__ bool arrives_last(unsigned* arrived)
{
#ifdef __CUDACC__
    // Two fences around `atomicInc` would order more than this, and take longer.
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(__cvta_generic_to_global(arrived)), "r"(gridDim.x - 1) : "memory");
#else
    const unsigned before = atomicInc(arrived, gridDim.x - 1);
#endif
    return before == gridDim.x - 1;
}

// ---- the likeliest token ----

// A key and a place, a token's or a vector's, as one number: the first of those with the largest key has the largest.
__device__ __forceinline__ Mass ranked(unsigned key, int place)
{
    return static_cast<Mass>(key) << 32 | (0xffffffffu - place);
}

__device__ __forceinline__ int place_of_rank(Mass rank) { return 0xffffffffu - static_cast<unsigned>(rank); }

__device__ __forceinline__ Mass shuffled(Mass mass, int from)
{
    const unsigned low = __shfl_sync(ALL_LANES, static_cast<unsigned>(mass), from);
    const unsigned high = __shfl_sync(ALL_LANES, static_cast<unsigned>(mass >> 32), from);
    return static_cast<Mass>(high) << 32 | low;
}

__device__ __forceinline__ Mass larger_of(Mass a, Mass b) { return a < b ? b : a; }

// Of each LANES that follow one another.
template <int LANES>
__device__ __forceinline__ Mass largest_of_lanes(Mass rank)
{
#pragma unroll
    for (int across = LANES / 2; across > 0; across /= 2) {
        rank = larger_of(rank, shuffled(rank, threadIdx.x % WARP ^ across));
    }
    return rank;
}

// The largest rank of the row, for the first warp of the part that is done last; for all other threads 0.
//
// of_parts:  [parts], of the row; arrived: the row's, see `arrives_last`
// of_halves: [chunks, 2], the largest key that each half of a warp has, for that last one to read; or null
template <int AHEAD>
__device__ __forceinline__ Mass first_of_row(
    const Scores& scores, Mass* of_parts, unsigned* arrived, unsigned* of_halves = nullptr)
{
    __shared__ Mass of_warps[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    unsigned best = 0;  // less than any key
    int where = 0;      // the vector: which of its tokens it is, is found at the end
    walk_share<AHEAD>(scores, [&](int vector, const uint4& loaded) {
        const unsigned key = scores.key(scores.largest(vector, loaded));
        if (key > best) best = key, where = vector;
    });
    Mass largest = largest_of_lanes<WARP / 2>(best ? ranked(best, where) : 0);
    if (of_halves && lane % (WARP / 2) == 0) {
        of_halves[(blockIdx.x * warps + warp) * 2 + lane / (WARP / 2)] = largest >> 32;
    }
    largest = larger_of(largest, shuffled(largest, lane ^ WARP / 2));
    if (lane == 0) of_warps[warp] = largest;
    __syncthreads();
    if (warp > 0) return 0;
    largest = largest_of_lanes<WARP>(lane < warps ? of_warps[lane] : 0);
    bool is_last = false;
    if (lane == 0) {
        of_parts[blockIdx.x] = largest;
        is_last = arrives_last(arrived);
    }
    if (!__shfl_sync(ALL_LANES, static_cast<int>(is_last), 0)) return 0;
    largest = largest_of_lanes<WARP>(lane < gridDim.x ? __ldcg(of_parts + lane) : 0);
    const int token = scores.token_of(place_of_rank(largest)) + lane;
    const bool is_one = lane < ELEMENTS && 0 <= token && token < scores.vocab;
    return largest_of_lanes<WARP>(is_one ? ranked(scores.key(scores.logit(token)), token) : 0);
}
