// Draws a token for each row of scores: temperature, top-k, min-p and top-p, then one number of a counter-based
// generator, all as `headwise/runtime/worker/sampler.py` has it. The kernels follow one another: `survey`, and where
// rows have a threshold to search for `count_keys`, or `bin_all` and `bin_range` as often as that takes, then `draw`.
//
// Weights are integers, in units of 2^-44 of the likeliest token's, so their sums do not depend on the order in which
// they are added up. Nothing is sorted: a threshold is found by a histogram over all keys, then over those of the bin in
// which it lies, until a bin is one key. The last part of a row that is done reads the histogram. bfloat16 has so few
// keys that bins are one key from the start, but for outer ones: for it `count_keys` is all of the search.
//
// What only the last part does is one block's, and begins with code that no cache has: it is kept short by loops.
//
// Macro of a variant: NUMBER, one of F16, BF16, F32, the dtype of scores.

#include "numbers.cuh"
#include "vectors.cuh"
#include "scores.cuh"
#include "histograms.cuh"

// How a row draws.
struct Row {
    double top_p;
    unsigned long long seed, position;
    float inverse_temperature;
    float log_min_p;
    int top_k;        // 0: all
    int unused;
};

enum Phase { DONE, TOP_K, TOP_P };  // what a row's threshold is searched for

// The tokens that are left: those above a key, and the first of those that have it.
struct Kept {
    unsigned key;
    Mass tied;
};

// Where a row is.
struct Search {
    Kept kept;            // by the phases before
    Above above;          // the range
    Mass wanted;          // of tokens or weight, with those above the range
    unsigned low, high;   // keys, in whose range the threshold is
    unsigned largest;     // key
    unsigned floor;       // a key: the threshold is no less
    int draws, phase;
};

using Keys = KeyBins<7>;  // of bfloat16: each one key, but for outer ones
constexpr int OUTER = 4;

// Tokens by bins of one key each, but for outer ones, of which it is told what they weigh.
struct Counts {
    unsigned of_bins[Keys::BINS];
    Mass of_outer[OUTER];
};

struct Scratch {
    union {
        struct {
            Histogram all, range;
        };
        Counts counts;
    };
    Mass above[MOST_CHUNKS];            // by chunk: what tokens above the key weigh
    unsigned ties[MOST_CHUNKS];         // how many have it
    unsigned largest[MOST_CHUNKS * 2];  // key, of the halves of warps
    Mass of_parts[MOST_PARTS];
    Search search;
    unsigned long long number;  // that is drawn with
    unsigned arrived;
};

constexpr int SCRATCH_BYTES = 1 << 16;  // from row to row
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "the host allocates as much");

__device__ __forceinline__ Scratch& scratch_of_row(char* scratch)
{
    return *reinterpret_cast<Scratch*>(scratch + blockIdx.y * SCRATCH_BYTES);
}

__device__ __forceinline__ Weights weights_of(const Scores& logits, const Row& row, const Search& search)
{
    return Weights{logits.logit_of(search.largest), row.inverse_temperature, row.log_min_p};
}

__device__ __forceinline__ bool has_top_k(const Row& row, int vocab) { return 1 < row.top_k && row.top_k < vocab; }

// Whether `count_keys` searches, instead of `bin_all` and `bin_range`.
__device__ __forceinline__ bool has_counts(float cap) { return NUMBER == BF16 && cap == 0.0f; }

// ---- thresholds ----

// A key that as many tokens have, or a larger one, as halves of warps have any: the least of `largest [chunks, 2]`,
// what each has. By a warp; 0 if `wanted` tokens are more than that.
__device__ __forceinline__ unsigned floor_of(const Scores& logits, const unsigned* largest, int wanted)
{
    const int size = chunk_size(logits), chunks = (logits.vectors() + size - 1) / size;
    // The last chunk's second half has none, if that chunk is short. Where all are, others have none, either: 0.
    const int halves = 2 * chunks - (logits.vectors() - (chunks - 1) * size <= WARP / 2);
    if (wanted > halves) return 0;
    unsigned least = 0xffffffffu;
#pragma unroll 4
    for (int half = threadIdx.x % WARP; half < halves; half += WARP) {
        const unsigned key = __ldcg(largest + half);
        least = key < least ? key : least;
    }
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        const unsigned other = __shfl_xor_sync(ALL_LANES, least, across);
        least = other < least ? other : least;
    }
    return least;
}

// Tokens that weigh less than this are not among those that have top_p of the weight: all of them have less than half of
// the rest together, since the likeliest one weighs UNITS.
__device__ __forceinline__ Mass light_of(double top_p, int vocab)
{
    return static_cast<Mass>((1.0 - top_p) * (UNITS / 2) / vocab);
}

// The weight that top-p keeps, of tokens that weigh `total`.
__device__ __forceinline__ Mass top_p_of(const Row& row, Mass total)
{
    const Mass wanted = smaller(static_cast<Mass>(ceil(row.top_p * static_cast<double>(total))), total);
    return wanted ? wanted : 1;
}

// Looks for the threshold of `phase` among all keys. wanted: of tokens or weight, no more than there is
__device__ __forceinline__ void begin(
    Search& search, Phase phase, Mass wanted, const Histogram& all, const Scores& logits)
{
    search.phase = phase, search.wanted = wanted;
    const Crossing at = crossing(all, phase == TOP_K, wanted, Above{0, 0});
    search.above = at.above, search.low = Coarse::low_of(at.bin) >> logits.shift;
    search.high = (Coarse::low_of(at.bin + 1) - 1) >> logits.shift;
}

// Top-p, if the row has it, of tokens that weigh `total`.
__device__ __forceinline__ void begin_top_p(
    Search& search, const Row& row, Mass total, const Histogram& all, const Scores& logits)
{
    if (row.top_p >= 1.0) {
        search.phase = DONE;
        return;
    }
    begin(search, TOP_P, top_p_of(row, total), all, logits);
}

// On with the bin of the range's histogram in which the threshold is; if that is one key, it is found.
__device__ __forceinline__ void go_on(
    Search& search, const Row& row, const Scratch& scratch, const Scores& logits, const Weights& weights)
{
    const int step = step_of(search.low, search.high);
    const Crossing at = crossing(scratch.range, search.phase == TOP_K, search.wanted, search.above);
    search.low += static_cast<unsigned>(at.bin) << step, search.above = at.above;
    const unsigned last = search.low + ((1u << step) - 1);
    search.high = last < search.high ? last : search.high;
    if (step > 0) return;
    const Mass each = weights(logits.logit_of(search.low));
    if (search.phase == TOP_P) {
        search.kept = Kept{search.low, (search.wanted - at.above.mass + each - 1) / each};
        search.phase = DONE;
    } else {
        search.kept = Kept{search.low, search.wanted - at.above.count};
        begin_top_p(search, row, at.above.mass + search.kept.tied * each, scratch.all, logits);
    }
}

// ---- counts of keys ----

// Of the outer bins.
__device__ __forceinline__ int outer_of(int bin)
{
    return bin < Keys::BINS / 2 ? bin < Keys::BINS / 4 : 2 + (bin > Keys::BINS * 3 / 4);
}

// A block's: of all bins, or of so many keys that follow one another.
struct BlockCounts {
    // So that lanes, each with 8 bins of its own, find them in all banks; and one for what is not counted.
    static constexpr unsigned NOWHERE = Keys::BINS + Keys::BINS / WARP;
    unsigned places[NOWHERE + 1];
    unsigned low[OUTER], high[OUTER];

    static __device__ __forceinline__ unsigned place_of(unsigned bin) { return bin + bin / WARP; }
    __device__ __forceinline__ unsigned& at(unsigned bin) { return places[place_of(bin)]; }
};

// The keys that a block has counted.
struct Counted {
    bool all;      // by bins; else
    unsigned low;  // as many as there are bins, from this one on
};

// ---- kernels ----
//
// scores:  [rows, vocab], at most 2^19 tokens; the stride is bytes from row to row
// cap:     of logits, cap * tanh(score / cap); 0 for none
// scratch: [rows, SCRATCH_BYTES], zeros before the first of all launches; for these kernels alone
// grid:    parts of a row, at most MOST_PARTS, and rows; blocks of 2 to 16 warps

// tokens:  [rows], the likeliest ones
// best:    [rows], the largest logit, or NaN where there is one; if it is not finite, the token is the likeliest
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) survey(
    const char* scores, const Row* rows, int* tokens, float* best, char* scratch, long long row_stride, int vocab,
    float cap)
{
    const Row& row = rows[blockIdx.y];
    Scratch& own = scratch_of_row(scratch);
    const Scores logits = scores_of_row(scores + blockIdx.y * row_stride, cap, vocab);
    const Mass first = first_of_row<4>(logits, own.of_parts, &own.arrived, own.largest);
    const bool searches = row.top_k != 1 && (has_top_k(row, vocab) || row.top_p < 1.0);
    if (searches) {
        const int words = has_counts(cap) ? sizeof(Counts) / sizeof(unsigned) : 2 * HISTOGRAM_WORDS;
        clear(&own.counts, words, blockIdx.x, gridDim.x);
    }
    // While the first warp waits for the other parts.
    if (blockIdx.x == 0 && threadIdx.x == WARP) own.number = number_of(row.seed, row.position);
    if (!first) return;
    const unsigned floor = has_top_k(row, vocab) ? floor_of(logits, own.largest, row.top_k) : 0;
    if (threadIdx.x > 0) return;
    const unsigned largest = first >> 32;
    const bool is_finite = MINUS_INFINITY_KEY >> logits.shift < largest && largest < INFINITY_KEY >> logits.shift;
    tokens[blockIdx.y] = place_of_rank(first), best[blockIdx.y] = logits.logit_of(largest);
    Search search = {};
    search.largest = largest, search.floor = floor, search.draws = is_finite && row.top_k != 1;
    search.phase = !search.draws || !searches ? DONE : has_top_k(row, vocab) ? TOP_K : TOP_P;
    own.search = search;
}

// Of bfloat16 logits without a cap.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) count_keys(
    const char* scores, const Row* rows, char* scratch, long long row_stride, int vocab)
{
    if constexpr (NUMBER != BF16) return;
    __shared__ BlockCounts counts;
    __shared__ Crossing found;
    const Row& row = rows[blockIdx.y];
    Scratch& own = scratch_of_row(scratch);
    const Search& search = own.search;
    if (search.phase == DONE) return;
    const Scores logits = scores_of_row(scores + blockIdx.y * row_stride, 0.0f, vocab);
    const Weights weights = weights_of(logits, row, search);
    clear(&counts, sizeof(counts) / sizeof(unsigned), 0, 1);
    __syncthreads();
    {
        const float least = logits.least_of(search.floor);
        const auto may = [&](float largest) { return largest >= least; };
        walk_share<2>(logits, [&](int vector, const uint4& loaded) {
            unsigned farthest = 0;
            logits.visit(vector, loaded, may, [&](int, float logit) {
                const unsigned distance = Keys::distance_of(logit);
                const bool counts_here = distance < Keys::FINE && logit >= least;
                const unsigned place = BlockCounts::place_of(Keys::fine_bin_of(logit, distance));
                atomicAdd(counts.places + (counts_here ? place : BlockCounts::NOWHERE), 1u);  // without a branch
                farthest = distance > farthest ? distance : farthest;
            });
            if (farthest < Keys::FINE) return;
            logits.revisit(vector, [&](int, float logit) {
                if (logit < least || Keys::distance_of(logit) < Keys::FINE) return;
                const Mass mass = weights(logit);
                if (!mass) return;
                const int bin = Keys::bin_of(logits.key(logit) << logits.shift);
                atomicAdd(&counts.at(bin), 1u);
                add_halves(counts.low + outer_of(bin), counts.high + outer_of(bin), mass);
            });
        });
    }
    __syncthreads();
#pragma unroll 2
    for (int bin = threadIdx.x; bin < Keys::BINS; bin += blockDim.x) {
        const unsigned count = counts.at(bin);
        if (count) atomicAdd(own.counts.of_bins + bin, count);
    }
    if (threadIdx.x < OUTER) {
        const Mass mass = static_cast<Mass>(counts.high[threadIdx.x]) << 32 | counts.low[threadIdx.x];
        if (mass) atomicAdd(own.counts.of_outer + threadIdx.x, mass);
    }
    if (!is_last_part(&own.arrived)) return;

    // By what all parts have counted. Where the threshold is in an outer bin, this block counts keys of that bin, from the
    // largest on, as many at a time as there are bins.
    int phase = search.phase;
    Counted counted = {true, 0};
    unsigned last = 0;  // that are counted
    Above above = {0, 0};
    Mass wanted = 0, total = 0;
    const int share = (Keys::BINS + blockDim.x - 1) / blockDim.x;
    const int end = Keys::BINS - smaller(Keys::BINS, static_cast<int>(threadIdx.x) * share);
    const int begin = end - smaller(end, share);
    const auto in_bin = [&](int bin) {
        const unsigned count = counts.at(bin);
        if (!count) return Above{0, 0};
        if (counted.all && Keys::is_outer(bin)) return Above{__ldcg(own.counts.of_outer + outer_of(bin)), count};
        const Mass each = weights(counted.all ? Keys::number_of(bin) : logits.logit_of(counted.low + bin));
        return Above{each * count, count};
    };
#pragma unroll 1
    while (true) {
        if (counted.all) {
#pragma unroll 8
            for (int bin = threadIdx.x; bin < Keys::BINS; bin += blockDim.x) {
                counts.at(bin) = __ldcg(own.counts.of_bins + bin);
            }
        } else {
            clear(&counts, sizeof(counts) / sizeof(unsigned), 0, 1);
            __syncthreads();
            const float least = logits.least_of(counted.low);
            const auto see = [&](int, float logit) {
                const unsigned key = logits.key(logit);
                if (counted.low <= key && key <= last) atomicAdd(&counts.at(key - counted.low), 1u);
            };
            walk<1>(logits, threadIdx.x, logits.vectors(), blockDim.x, [&](int vector, const uint4& loaded) {
                logits.visit(vector, loaded, [&](float largest) { return largest >= least; }, see);
            });
        }
        if (threadIdx.x == 0) found.bin = -1;
        __syncthreads();
        Above mine = {0, 0};
#pragma unroll 1
        for (int bin = begin; bin < end; bin++) mine = mine + in_bin(bin);
        const Prefix<Above> prefix = prefix_of(mine);
        if (counted.all) {
            if (phase == TOP_K && row.top_k > prefix.all.count) phase = TOP_P;
            if (phase == TOP_P && row.top_p >= 1.0) break;
            wanted = phase == TOP_K ? row.top_k : top_p_of(row, total ? total : prefix.all.mass);
        }
        Above before = above + prefix.before;
        const Mass reached = phase == TOP_K ? before.count : before.mass;
        if (reached < wanted && wanted - reached <= (phase == TOP_K ? mine.count : mine.mass)) {
#pragma unroll 1
            for (int bin = end - 1; bin >= begin; bin--) {
                const Above with = before + in_bin(bin);
                if ((phase == TOP_K ? with.count : with.mass) >= wanted) {
                    found = Crossing{bin, before};
                    break;
                }
                before = with;
            }
        }
        __syncthreads();
        const Crossing at = found;
        __syncthreads();  // all have read it
        const bool is_outer = counted.all && at.bin >= 0 && Keys::is_outer(at.bin);
        if (at.bin < 0 || is_outer) {
            if (!is_outer && (counted.all || counted.low == 0)) break;  // not of scores that stay as they are
            above = is_outer ? at.above : above + prefix.all;
            last = is_outer ? (Keys::low_of(at.bin + 1) - 1) >> logits.shift : counted.low - 1;
            counted = Counted{false, last < Keys::BINS ? 0 : last - (Keys::BINS - 1)};
            continue;
        }
        const float logit = counted.all ? Keys::number_of(at.bin) : logits.logit_of(counted.low + at.bin);
        const Mass each = weights(logit);
        Kept kept = {logits.key(logit), 0};
        if (phase == TOP_K) kept.tied = wanted - at.above.count;
        else if (threadIdx.x == 0) kept.tied = (wanted - at.above.mass + each - 1) / each;
        if (threadIdx.x == 0) own.search.kept = kept;
        if (phase == TOP_P) break;
        total = at.above.mass + kept.tied * each, above = Above{0, 0};
        phase = TOP_P, counted.all = true;
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) bin_all(
    const char* scores, const Row* rows, char* scratch, long long row_stride, int vocab, float cap)
{
    const Row& row = rows[blockIdx.y];
    Scratch& own = scratch_of_row(scratch);
    const Search before = own.search;
    if (before.phase == DONE) return;
    const Scores logits = scores_of_row(scores + blockIdx.y * row_stride, cap, vocab);
    const Weights weights = weights_of(logits, row, before);
    const Mass light = before.phase == TOP_P ? light_of(row.top_p, vocab) : 0;
    fill(own.all, logits, weights, before.phase == TOP_K, light, logits.least_of(before.floor),
         [&](unsigned key) { return key >= before.floor; },
         [&](unsigned key) { return Coarse::bin_of(key << logits.shift); });
    if (!is_last_part(&own.arrived)) return;
    Search search = own.search;
    const Above total = sum(own.all);
    const bool by_count = search.phase == TOP_K && row.top_k <= total.count;
    if (by_count || row.top_p < 1.0) {
        begin(search, by_count ? TOP_K : TOP_P, by_count ? row.top_k : top_p_of(row, total.mass), own.all, logits);
    } else {
        search.phase = DONE;
    }
    if (threadIdx.x == 0) own.search = search;
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) bin_range(
    const char* scores, const Row* rows, char* scratch, long long row_stride, int vocab, float cap)
{
    const Row& row = rows[blockIdx.y];
    Scratch& own = scratch_of_row(scratch);
    const Search before = own.search;
    if (before.phase == DONE) return;
    const Scores logits = scores_of_row(scores + blockIdx.y * row_stride, cap, vocab);
    const Weights weights = weights_of(logits, row, before);
    const int step = step_of(before.low, before.high);
    const unsigned low = before.low, most = before.high - before.low;
    fill(own.range, logits, weights, before.phase == TOP_K, 0, logits.least_of(low),
         [&](unsigned key) { return key - low <= most; },
         [&](unsigned key) { return static_cast<int>((key - low) >> step); });
    if (!is_last_part(&own.arrived)) return;
    Search search = own.search;  // again: it need not stay in registers
    go_on(search, row, own, logits, weights_of(logits, row, search));
    __syncthreads();  // all have read the histogram
    clear(&own.range, HISTOGRAM_WORDS, 0, 1);
    if (threadIdx.x == 0) own.search = search;
}

// tokens:  of rows that draw
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 2) draw(
    const char* scores, const Row* rows, int* tokens, char* scratch, long long row_stride, int vocab, float cap)
{
    const Row& row = rows[blockIdx.y];
    Scratch& own = scratch_of_row(scratch);
    const Search search = own.search;
    if (!search.draws) return;
    const Kept kept = search.kept;
    const Scores logits = scores_of_row(scores + blockIdx.y * row_stride, cap, vocab);
    const Weights weights = weights_of(logits, row, search);
    const int warps = blockDim.x / WARP;
    const float bound = logits.least_of(kept.key);
    Mass above = 0, ties = 0;
    if (kept.key == 0) {
        const auto see = [&](int, float logit) { above += weights(logit); };
        walk_share<2>(logits, [&](int vector, const uint4& loaded) {
            logits.visit(vector, loaded, [](float) { return true; }, see);
        });
    } else {
        unsigned count = 0;
        const auto see = [&](int, float logit) {
            if (logit > bound) above += weights(logit);
            count += logit == bound;
        };
        walk_share<2>(logits, [&](int vector, const uint4& loaded) {
            logits.visit(vector, loaded, [&](float largest) { return largest >= bound; }, see);
        });
        ties = count;
    }
    above = sum_of_warp(above), ties = sum_of_warp(ties);
    if (threadIdx.x % WARP == 0) {
        const int chunk = blockIdx.x * warps + threadIdx.x / WARP;
        own.above[chunk] = above, own.ties[chunk] = ties;
    }
    if (!is_last_part(&own.arrived)) return;

    // At which the weights added up are more than the target: the chunk; then, of so many tokens as each thread has of
    // it, the thread's; and so on, until that is one token.
    const Mass each = kept.tied ? weights(bound) : 0;
    const bool has_chunk = threadIdx.x < gridDim.x * warps;
    above = has_chunk ? __ldcg(own.above + threadIdx.x) : 0;
    ties = has_chunk ? __ldcg(own.ties + threadIdx.x) : 0;
    Place at = {0, __umul64hi(own.number, prefix_of(above).all + kept.tied * each), kept.tied};
    const int threads = blockDim.x;
    int begin = 0, end = 0, share = 0;
#pragma unroll 1
    for (bool is_chunk = true;; is_chunk = false) {
        at = place_of(at, above, ties, each);
        if (is_chunk) {
            const Span span = span_of(logits, at.thread);
            begin = logits.token_of(span.begin), end = logits.token_of(span.end);
            begin = begin < 0 ? 0 : begin, end = smaller(end, vocab);
        } else {
            begin += at.thread * share, end = smaller(begin + share, end);
        }
        if (!is_chunk && share <= 1) break;
        share = (end - begin + threads - 1) / threads;
        above = 0, ties = 0;
        const int from = begin + threadIdx.x * share, to = smaller(from + share, end);
#pragma unroll 1
        for (int token = from; token < to; token++) {
            const float logit = logits.logit(token);
            if (logit > bound) above += weights(logit);
            ties += logit == bound;
        }
    }
    if (threadIdx.x == 0) tokens[blockIdx.y] = begin;
}
