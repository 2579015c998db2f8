// Histograms of a row's tokens by key, in weight and number: what drawing a token is made of. Wants scores.cuh.

constexpr float UNITS = 0x1p44f;  // of the likeliest token's weight; 2^19 tokens of it are less than 2^64
constexpr int BINS = 2048;
constexpr int MOST_CHUNKS = MOST_PARTS * (MOST_THREADS / WARP);  // of warps, in a row

struct Weights {
    float largest, inverse_temperature, log_min_p;

    __device__ __forceinline__ Mass operator()(float logit) const
    {
        const float scaled = (logit - largest) * inverse_temperature;
        return scaled >= log_min_p ? static_cast<Mass>(expf(scaled) * UNITS) : 0;
    }
};

// ---- sums over the block ----

__device__ __forceinline__ Mass sum_of_warp(Mass mass)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) mass += shuffled(mass, threadIdx.x % WARP ^ across);
    return mass;
}

// What the threads before have, and all of them.
struct Prefix {
    Mass before, all;
};

__device__ __forceinline__ Prefix prefix_of(Mass own)
{
    __shared__ Mass of_warps[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    Mass upto = own;
#pragma unroll
    for (int across = 1; across < WARP; across *= 2) {
        const Mass other = shuffled(upto, (lane - across) & (WARP - 1));
        upto += lane < across ? 0 : other;
    }
    __syncthreads();  // all have read what was here before
    if (lane == WARP - 1) of_warps[warp] = upto;
    __syncthreads();
    Prefix prefix = {upto - own, 0};
    for (int i = 0; i < warps; i++) {
        if (i < warp) prefix.before += of_warps[i];
        prefix.all += of_warps[i];
    }
    return prefix;
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
    const Prefix weight = prefix_of(own);
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

struct Histogram {
    Mass masses[BINS];
    unsigned counts[BINS];
};

// Clears a part of a histogram.
__device__ __forceinline__ void clear(Histogram& histogram, int part, int parts)
{
    for (int bin = part * blockDim.x + threadIdx.x; bin < BINS; bin += parts * blockDim.x) {
        histogram.masses[bin] = 0, histogram.counts[bin] = 0;
    }
}

// The bins of a block's tokens. 64 bits are added up in two halves: shared memory adds 32 at once.
struct Bins {
    unsigned low[BINS], high[BINS], counts[BINS];

    __device__ __forceinline__ void add(int bin, Mass mass, bool has_counts)
    {
        const unsigned more = mass, before = atomicAdd(low + bin, more);
        const unsigned carried = static_cast<unsigned>(mass >> 32) + (before + more < more);
        if (carried) atomicAdd(high + bin, carried);
        if (has_counts) atomicAdd(counts + bin, 1u);
    }
};

// Adds the part's tokens that weigh anything to the row's histogram: those whose keys are `among` it, each to `bin_of`
// its key. What weighs less than `light` is added to the bin 0 without more ado.
template <class Among, class BinOf>
__device__ __forceinline__ void fill(
    Histogram& histogram, const Scores& scores, const Weights& weights, bool has_counts, Mass light, const Among& among,
    const BinOf& bin_of)
{
    __shared__ Bins bins;
    Mass all_light = 0;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins.low[bin] = bins.high[bin] = bins.counts[bin] = 0;
    __syncthreads();
    walk(scores, [&](int, float logit) {
        const unsigned key = scores.key(logit);
        const Mass mass = among(key) ? weights(logit) : 0;
        if (mass < light) all_light += mass;
        else if (mass) bins.add(bin_of(key), mass, has_counts);
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

// Of tokens: those above some key, or all.
struct Above {
    Mass mass;
    unsigned count;
};

__device__ __forceinline__ Above sum(const Histogram& histogram)
{
    Above own = {0, 0};
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        own.mass += __ldcg(histogram.masses + bin), own.count += __ldcg(histogram.counts + bin);
    }
    return Above{prefix_of(own.mass).all, static_cast<unsigned>(prefix_of(own.count).all)};
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
    for (int bin = end - 1; bin >= begin; bin--) {
        own.mass += __ldcg(histogram.masses + bin), own.count += __ldcg(histogram.counts + bin);
    }
    above.mass += prefix_of(own.mass).before, above.count += prefix_of(own.count).before;
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

// ---- bins of keys ----

// All keys: a bin for each 64th of each power of two from 2^-7 to 2^8, of either sign, and one for what is nearer to
// zero, one for what is farther away. In between, bins from 0 to 2047 are of no key.
constexpr int MANTISSA = 6, CUT = 23 - MANTISSA;                 // bits of a bin's numbers that it tells, and does not
constexpr int FINE_BEGIN = 120 << MANTISSA, FINE = 15 << MANTISSA;  // of positive numbers without those bits; how many

// The bin of a key of 32 bits.
__device__ __forceinline__ int bin_of_whole(unsigned key)
{
    const int place = static_cast<int>(key >> CUT) - (1 << (31 - CUT)), sign = place >> 31;
    const int size = (place ^ sign) - (FINE_BEGIN - 1);
    return (smaller(size < 0 ? 0 : size, FINE + 1) ^ sign) + BINS / 2;
}

// The least key of 32 bits that has the bin, or a higher one.
__device__ __forceinline__ unsigned low_of_bin(int bin)
{
    const int place = bin - BINS / 2, sign = place >> 31, size = place ^ sign;  // sizes are 0 to FINE + 1
    constexpr int ALL = 1 << (31 - CUT);
    if (!sign && size > FINE + 1) return 0;  // 2^32
    if (sign) {  // the largest size first
        const int last = size > FINE ? ALL - 1 : size + FINE_BEGIN - 1;
        return static_cast<unsigned>(ALL - 1 - last) << CUT;
    }
    return static_cast<unsigned>(ALL + (size == 0 ? 0 : size + FINE_BEGIN - 1)) << CUT;
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
#pragma unroll
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
