// Histograms of a row's tokens by key, in weight and number: what drawing a token is made of. Wants scores.cuh.

constexpr float UNITS = 0x1p44f;  // of the likeliest token's weight; 2^19 tokens of it are less than 2^64
constexpr int MOST_CHUNKS = MOST_PARTS * (MOST_THREADS / WARP);  // of warps, in a row

struct Weights {
    float largest, inverse_temperature, log_min_p;

    // Without a branch: several of them are under way at a time.
    __device__ __forceinline__ Mass operator()(float logit) const
    {
        const float scaled = (logit - largest) * inverse_temperature, weight = expf(scaled) * UNITS;
        return static_cast<Mass>(scaled >= log_min_p ? weight : 0.0f);
    }
};

// Of tokens: those above some key, or all.
struct Above {
    Mass mass;
    unsigned count;

    __device__ __forceinline__ Above operator+(const Above& other) const
    {
        return Above{mass + other.mass, count + other.count};
    }
    __device__ __forceinline__ Above operator-(const Above& other) const
    {
        return Above{mass - other.mass, count - other.count};
    }
};

// ---- sums over the block ----

__device__ __forceinline__ Above shuffled(const Above& above, int from)
{
    return Above{shuffled(above.mass, from), __shfl_sync(ALL_LANES, above.count, from)};
}

__device__ __forceinline__ Mass sum_of_warp(Mass mass)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) mass += shuffled(mass, threadIdx.x % WARP ^ across);
    return mass;
}

// What the lanes up to this one have.
template <class Sum>
__device__ __forceinline__ Sum upto_lane(Sum own)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int across = 1; across < WARP; across *= 2) {
        const Sum more = own + shuffled(own, (lane - across) & (WARP - 1));
        own = lane < across ? own : more;
    }
    return own;
}

// What the threads before have, and all of them.
template <class Sum>
struct Prefix {
    Sum before, all;
};

template <class Sum>
__device__ __forceinline__ Prefix<Sum> prefix_of(const Sum& own)
{
    __shared__ Sum of_warps[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const Sum upto = upto_lane(own);
    __syncthreads();  // all have read what was here before
    if (lane == WARP - 1) of_warps[warp] = upto;
    __syncthreads();
    const Sum of_warp = of_warps[lane < warps ? lane : 0], of_lane = lane < warps ? of_warp : Sum{};
    const Sum upto_warp = upto_lane(of_lane);
    return Prefix<Sum>{shuffled(upto_warp - of_lane, warp) + (upto - own), shuffled(upto_warp, WARP - 1)};
}

// Where weights, added up in the order of tokens, come to more than a target: what is left of it there.
struct Place {
    int thread;
    Mass target, tied;
};

// The thread whose tokens are at the target. Each one's follow those of the thread before it.
//
// above: what the thread's tokens above the key weigh; ties: how many have it, of which the first at.tied count; each:
// what one of them weighs
__device__ __forceinline__ Place place_of(const Place& at, Mass above, Mass ties, Mass each)
{
    __shared__ Place found;
    const Mass before = prefix_of(ties).before, left = before < at.tied ? at.tied - before : 0;
    const Mass own = above + smaller(ties, left) * each;
    const Prefix<Mass> weight = prefix_of(own);
    if (weight.before <= at.target && at.target - weight.before < own) {
        found = Place{static_cast<int>(threadIdx.x), at.target - weight.before, left};
    }
    __syncthreads();
    return found;
}

// Whether the block is the last part of its row; then it sees what the others wrote.
__device__ __forceinline__ bool is_last_part(unsigned* arrived)
{
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) is_last = arrives_last(arrived);
    __syncthreads();
    return is_last;
}

// ---- histograms ----

// All keys of 32 bits: BINS bins, of which there is one for each 2^-MANTISSA of each power of two from 2^-7 to 2^8, of
// either sign, and one for what is nearer to zero, one for what is farther away. In between, bins are of no key.
template <int MANTISSA>
struct KeyBins {
    static constexpr int BINS = 32 << MANTISSA, CUT = 23 - MANTISSA;  // CUT: bits of a number that its bin does not tell
    static constexpr int FINE_BEGIN = 120 << MANTISSA, FINE = 15 << MANTISSA;  // of positive numbers without those
    static constexpr int ALL = 1 << (31 - CUT);

    static __device__ __forceinline__ int bin_of(unsigned key)
    {
        const int place = static_cast<int>(key >> CUT) - ALL, sign = place >> 31;
        const int size = (place ^ sign) - (FINE_BEGIN - 1);
        return (smaller(size < 0 ? 0 : size, FINE + 1) ^ sign) + BINS / 2;
    }

    // Whether the bin is of what is nearer or farther.
    static __device__ __forceinline__ bool is_outer(int bin)
    {
        const int place = bin - BINS / 2, size = place ^ place >> 31;
        return static_cast<unsigned>(size - 1) >= FINE;
    }

    // How far a number is from the least one of its sign that has no outer bin; less than FINE, if it has none itself.
    static __device__ __forceinline__ unsigned distance_of(float number)
    {
        return ((__float_as_uint(number) & 0x7fffffff) >> CUT) - FINE_BEGIN;
    }

    // The bin of such a number.
    static __device__ __forceinline__ unsigned fine_bin_of(float number, unsigned distance)
    {
        return (distance + 1 ^ static_cast<int>(__float_as_uint(number)) >> 31) + BINS / 2;
    }

    // The number of a bin that is no outer one, without the bits that it does not tell.
    static __device__ __forceinline__ float number_of(int bin)
    {
        const int place = bin - BINS / 2, sign = place >> 31, bits = ((place ^ sign) + FINE_BEGIN - 1) << CUT;
        return __uint_as_float(bits | (sign & 0x80000000u));
    }

    // The least key that has the bin, or a higher one.
    static __device__ __forceinline__ unsigned low_of(int bin)
    {
        const int place = bin - BINS / 2, sign = place >> 31, size = place ^ sign;  // sizes are 0 to FINE + 1
        if (!sign && size > FINE + 1) return 0;  // 2^32
        if (sign) {  // the largest size first
            const int last = size > FINE ? ALL - 1 : size + FINE_BEGIN - 1;
            return static_cast<unsigned>(ALL - 1 - last) << CUT;
        }
        return static_cast<unsigned>(ALL + (size == 0 ? 0 : size + FINE_BEGIN - 1)) << CUT;
    }
};

using Coarse = KeyBins<6>;
constexpr int BINS = Coarse::BINS;

struct Histogram {
    Mass masses[BINS];
    unsigned counts[BINS];
};

// Clears a part of `words` words, `part` of `parts`.
__device__ __forceinline__ void clear(void* from, int words, int part, int parts)
{
    unsigned* to = static_cast<unsigned*>(from);
    for (int word = part * blockDim.x + threadIdx.x; word < words; word += parts * blockDim.x) to[word] = 0;
}

constexpr int HISTOGRAM_WORDS = sizeof(Histogram) / sizeof(unsigned);

// Adds to 64 bits in two halves: shared memory adds 32 at once.
__device__ __forceinline__ void add_halves(unsigned* low, unsigned* high, Mass mass)
{
    const unsigned more = mass, before = atomicAdd(low, more);
    const unsigned carried = static_cast<unsigned>(mass >> 32) + (before + more < more);
    if (carried) atomicAdd(high, carried);
}

// The bins of a block's tokens.
struct Bins {
    unsigned low[BINS], high[BINS], counts[BINS];

    __device__ __forceinline__ void add(int bin, Mass mass, bool has_counts)
    {
        add_halves(low + bin, high + bin, mass);
        if (has_counts) atomicAdd(counts + bin, 1u);
    }
};

// Adds the part's tokens that weigh anything to the row's histogram: those whose keys are `among` it, each to `bin_of`
// its key, which none is whose logit is less than `least`. What weighs less than `light` is added to the bin 0 without
// more ado.
template <class Among, class BinOf>
__device__ __forceinline__ void fill(
    Histogram& histogram, const Scores& scores, const Weights& weights, bool has_counts, Mass light, float least,
    const Among& among, const BinOf& bin_of)
{
    __shared__ Bins bins;
    Mass all_light = 0;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins.low[bin] = bins.high[bin] = bins.counts[bin] = 0;
    __syncthreads();
    const auto see = [&](int, float logit) {
        const unsigned key = scores.key(logit);
        if (!among(key)) return;
        const Mass mass = weights(logit);
        if (mass < light) all_light += mass;
        else if (mass) bins.add(bin_of(key), mass, has_counts);
    };
    walk_share<1>(scores, [&](int vector, const uint4& loaded) {
        scores.visit(vector, loaded, [&](float largest) { return largest >= least; }, see);
    });
    if (light) {
        all_light = sum_of_warp(all_light);
        if (threadIdx.x % WARP == 0) bins.add(0, all_light, false);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        const Mass mass = static_cast<Mass>(bins.high[bin]) << 32 | bins.low[bin];
        if (!mass) continue;
        atomicAdd(histogram.masses + bin, mass);
        if (has_counts) atomicAdd(histogram.counts + bin, bins.counts[bin]);
    }
}

__device__ __forceinline__ Above sum(const Histogram& histogram)
{
    Above own = {0, 0};
#pragma unroll 4
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        own.mass += __ldcg(histogram.masses + bin), own.count += __ldcg(histogram.counts + bin);
    }
    return prefix_of(own).all;
}

struct Crossing {
    int bin;
    Above above;  // the bin
};

// The highest bin from which on, with those above the histogram, tokens have what is wanted: so many of them, or weight.
// There are such tokens; those above do not have it.
__device__ __forceinline__ Crossing crossing(const Histogram& histogram, bool by_count, Mass wanted, Above above)
{
    __shared__ Crossing found;
    const int share = (BINS + blockDim.x - 1) / blockDim.x;
    const int end = BINS - smaller(BINS, static_cast<int>(threadIdx.x) * share);
    const int begin = end - smaller(end, share);
    Above own = {0, 0};
#pragma unroll 4
    for (int bin = end - 1; bin >= begin; bin--) {
        own.mass += __ldcg(histogram.masses + bin), own.count += __ldcg(histogram.counts + bin);
    }
    above = above + prefix_of(own).before;
    Mass reached = by_count ? above.count : above.mass;
    if (reached < wanted && wanted - reached <= (by_count ? own.count : own.mass)) {
#pragma unroll 1
        for (int bin = end - 1; bin >= begin; bin--) {
            const Mass mass = __ldcg(histogram.masses + bin);
            const unsigned count = __ldcg(histogram.counts + bin);
            reached += by_count ? count : mass;
            if (reached >= wanted) {
                found = Crossing{bin, above};
                break;
            }
            above.mass += mass, above.count += count;
        }
    }
    __syncthreads();
    return found;
}

// A range of keys: 2^step of them to a bin, the fewest that can be.
__device__ __forceinline__ int step_of(unsigned low, unsigned high)
{
    int step = 0;
    while ((high - low) >> step >= BINS) step++;
    return step;
}

// ---- random numbers ----

// The 53 bits of Philox 4x64-10 (Salmon, Moraes, Dror, Shaw, SC 2011) with the seed as its key and the position as the
// second word of its counter, in the upper bits of the word.
__device__ __forceinline__ unsigned long long number_of(unsigned long long seed, unsigned long long position)
{
    unsigned long long counter[4] = {1, position, 0, 0}, key[2] = {seed, 0};
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        const unsigned long long first = counter[0], third = counter[2];
        counter[0] = __umul64hi(0xca5a826395121157ull, third) ^ counter[1] ^ key[0];
        counter[1] = 0xca5a826395121157ull * third;
        counter[2] = __umul64hi(0xd2e7470ee14c6c93ull, first) ^ counter[3] ^ key[1];
        counter[3] = 0xd2e7470ee14c6c93ull * first;
        key[0] += 0x9e3779b97f4a7c15ull, key[1] += 0xbb67ae8584caa73bull;
    }
    return counter[0] & ~0x7ffull;
}
