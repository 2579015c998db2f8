// Draws a token for each row of scores: temperature, top-k, min-p and top-p, then one number of a counter-based
// generator, all as `headwise/runtime/worker/sampler.py` has it. The kernels follow one another: `survey`, and where rows
// have a threshold to search for `bin_all` and `bin_range` as often as that takes, then `draw`.
//
// Weights are integers, in units of 2^-44 of the likeliest token's, so their sums do not depend on the order in which
// they are added up. Nothing is sorted: a threshold is found by a histogram over all keys, then over those of the bin in
// which it lies, until a bin is one key. The last part of a row that is done reads the histogram.
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

struct Scratch {
    Histogram all, range;
    Mass above[MOST_CHUNKS], ties[MOST_CHUNKS];  // by chunk: what tokens above the key weigh, how many have it
    unsigned largest[MOST_CHUNKS];               // key
    Mass of_parts[MOST_PARTS];
    Search search;
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

// ---- thresholds ----

// A key that as many tokens have, or a larger one, as warps have any: the least of `largest [chunks]`, what each has. By
// a warp; 0 if `wanted` tokens are more than that.
__device__ __forceinline__ unsigned floor_of(const Scores& logits, const unsigned* largest, int wanted)
{
    const int size = chunk_size(logits), chunks = (logits.vectors() + size - 1) / size;
    if (wanted > chunks) return 0;
    unsigned least = 0xffffffffu;
    for (int chunk = threadIdx.x % WARP; chunk < chunks; chunk += WARP) {
        const unsigned key = __ldcg(largest + chunk);
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

// Looks for the threshold of `phase` among all keys. wanted: of tokens or weight, no more than there is
__device__ __forceinline__ void begin(
    Search& search, Phase phase, Mass wanted, const Histogram& all, const Scores& logits)
{
    search.phase = phase, search.wanted = wanted;
    const Crossing at = crossing(all, phase == TOP_K, wanted, Above{0, 0});
    search.above = at.above, search.low = low_of_bin(at.bin) >> logits.shift;
    search.high = (low_of_bin(at.bin + 1) - 1) >> logits.shift;
}

// Top-p, if the row has it, of tokens that weigh `total`.
__device__ __forceinline__ void begin_top_p(
    Search& search, const Row& row, Mass total, const Histogram& all, const Scores& logits)
{
    if (row.top_p >= 1.0) {
        search.phase = DONE;
        return;
    }
    const Mass wanted = smaller(static_cast<Mass>(ceil(row.top_p * static_cast<double>(total))), total);
    begin(search, TOP_P, wanted ? wanted : 1, all, logits);
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
    const bool searches = row.top_k != 1 && (has_top_k(row, vocab) || row.top_p < 1.0);
    if (searches) {
        clear(own.all, blockIdx.x, gridDim.x);
        clear(own.range, blockIdx.x, gridDim.x);
    }
    const Mass first = first_of_row(logits, own.of_parts, &own.arrived, own.largest);
    if (!first) return;
    const unsigned floor = has_top_k(row, vocab) ? floor_of(logits, own.largest, row.top_k) : 0;
    if (threadIdx.x > 0) return;
    const unsigned largest = first >> 32;
    const bool is_finite = MINUS_INFINITY_KEY >> logits.shift < largest && largest < INFINITY_KEY >> logits.shift;
    tokens[blockIdx.y] = token_of(first), best[blockIdx.y] = logits.logit_of(largest);
    Search search = {};
    search.largest = largest, search.floor = floor, search.draws = is_finite && row.top_k != 1;
    search.phase = !search.draws || !searches ? DONE : has_top_k(row, vocab) ? TOP_K : TOP_P;
    own.search = search;
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
    fill(own.all, logits, weights, before.phase == TOP_K, light,
         [&](unsigned key) { return key >= before.floor; },
         [&](unsigned key) { return bin_of_whole(key << logits.shift); });
    if (!is_last_part(&own.arrived)) return;
    Search search = before;
    const Above total = sum(own.all);
    if (search.phase == TOP_K && row.top_k <= total.count) begin(search, TOP_K, row.top_k, own.all, logits);
    else begin_top_p(search, row, total.mass, own.all, logits);
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
    fill(own.range, logits, weights, before.phase == TOP_K, 0,
         [&](unsigned key) { return key - low <= most; },
         [&](unsigned key) { return static_cast<int>((key - low) >> step); });
    if (!is_last_part(&own.arrived)) return;
    Search search = own.search;  // again: it need not stay in registers
    go_on(search, row, own, logits, weights_of(logits, row, search));
    __syncthreads();  // all have read the histogram
    clear(own.range, 0, 1);
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
    Mass above = 0;
    unsigned ties = 0;
    walk(logits, [&](int, float logit) {
        const unsigned key = logits.key(logit);
        if (key > kept.key) above += weights(logit);
        ties += key == kept.key;
    });
    const Mass of_warp = sum_of_warp(above), ties_of_warp = sum_of_warp(ties);
    if (threadIdx.x % WARP == 0) {
        const int chunk = blockIdx.x * warps + threadIdx.x / WARP;
        own.above[chunk] = of_warp, own.ties[chunk] = ties_of_warp;
    }
    if (!is_last_part(&own.arrived)) return;

    // The chunk, then the thread of this block, then its token, at which the weights added up are more than the target.
    const Mass each = kept.tied ? weights(logits.logit_of(kept.key)) : 0;
    const bool has_chunk = threadIdx.x < gridDim.x * warps;
    above = has_chunk ? __ldcg(own.above + threadIdx.x) : 0;
    const Mass total = prefix_of(above).all + kept.tied * each;
    Place at = {0, __umul64hi(number_of(row.seed, row.position), total), kept.tied};
    at = place_of(at, above, has_chunk ? __ldcg(own.ties + threadIdx.x) : 0, each);

    const Span span = span_of(logits, at.thread);
    const int share = (span.end - span.begin + blockDim.x - 1) / blockDim.x;
    const int from = smaller(span.begin + static_cast<int>(threadIdx.x) * share, span.end);
    const int to = smaller(from + share, span.end);
    above = 0, ties = 0;
    for (int vector = from; vector < to; vector++) {
        logits.visit(vector, [&](int, float logit) {
            const unsigned key = logits.key(logit);
            if (key > kept.key) above += weights(logit);
            ties += key == kept.key;
        });
    }
    at = place_of(at, above, ties, each);
    if (threadIdx.x != at.thread) return;
    int drawn = -1;
    for (int vector = from; vector < to && drawn < 0; vector++) {
        logits.visit(vector, [&](int token, float logit) {
            const unsigned key = logits.key(logit);
            const bool is_tied = key == kept.key && at.tied > 0;
            const Mass mass = key > kept.key ? weights(logit) : is_tied ? each : 0;
            if (drawn < 0 && at.target < mass) drawn = token;
            at.target -= mass, at.tied -= is_tied;
        });
    }
    tokens[blockIdx.y] = drawn;
}
