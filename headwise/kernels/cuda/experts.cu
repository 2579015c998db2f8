// Mixtures of experts around their matrix products: which experts a token goes to, its rows in the order of experts, and
// the sum of what they made of it. The products are `experts_jit.py`.
//
// A token has CHOSEN + SHARED assignments: the experts chosen for it, and the shared ones, whose numbers begin behind
// those of the experts. Assignment i is that of token i / (CHOSEN + SHARED). All sizes of launches are known from shapes.
//
// Macros of a variant: NUMBER, one of F16, BF16, F32, the dtype of logits and results; EXPERTS to choose from, CHOSEN and
// SHARED of a token, at most 32 together; SCORED_BY, one of the below; GROUPS of experts, at most 32, of which a token may
// use GROUPS_USED, and whose score is the sum of its GROUP_BEST best.

#include "numbers.cuh"
#include "vectors.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int HELD = (EXPERTS + WARP - 1) / WARP;  // scores of a lane: those of experts `lane`, `lane + 32`, ...
constexpr int ASSIGNED = CHOSEN + SHARED;
constexpr int NONE = 0x7fffffff;
constexpr int SOFTMAX = 0, SIGMOID = 1, ROOT_SOFTPLUS = 2;  // in the order of `kernels/experts.py`
constexpr int COUNTED = EXPERTS + SHARED;
constexpr int MEMBERS = EXPERTS / GROUPS;  // of a group

// plain: the score without the correction
struct Best {
    float score;
    int index;
    float plain;
};

// Of equal scores the lower index is the better; whatever can be chosen is better than NONE.
__device__ __forceinline__ Best better(const Best& one, const Best& other)
{
    const bool is_one = one.score > other.score || (one.score == other.score && one.index < other.index);
    return is_one ? one : other;
}

__device__ __forceinline__ Best best_of_lanes(Best mine)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) {
        Best other;
        other.score = __shfl_xor_sync(ALL_LANES, mine.score, across);
        other.index = __shfl_xor_sync(ALL_LANES, mine.index, across);
        other.plain = __shfl_xor_sync(ALL_LANES, mine.plain, across);
        mine = better(mine, other);
    }
    return mine;
}

__device__ __forceinline__ float sum_of_lanes(float value)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2) value += __shfl_xor_sync(ALL_LANES, value, across);
    return value;
}

__device__ __forceinline__ float most_of_lanes(float value)
{
#pragma unroll
    for (int across = WARP / 2; across > 0; across /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, across));
    return value;
}

// The best of this warp's experts from `first` to `last` that were not taken, a bit of `taken` each that a lane has.
__device__ __forceinline__ Best best_left(
    const float (&scores)[HELD], const float (&plain)[HELD], unsigned taken, int first, int last, unsigned groups)
{
    const int lane = threadIdx.x % WARP;
    Best mine = {__uint_as_float(0xff800000u), NONE, 0.0f};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * WARP + lane;
        const bool is_open = expert >= first && expert < last && !(taken >> i & 1)
            && groups >> expert / MEMBERS & 1;
        const float score = scores[i] == scores[i] ? scores[i] : __uint_as_float(0xff800000u);  // NaN is chosen last
        if (is_open) mine = better({score, expert, plain[i]}, mine);
    }
    return best_of_lanes(mine);
}

// Marks an expert as taken where the lane has it.
__device__ __forceinline__ unsigned with(unsigned taken, int expert)
{
    return expert % WARP == threadIdx.x % WARP ? taken | 1u << expert / WARP : taken;
}

// Of groups, a bit each, those a token may use.
__device__ __forceinline__ unsigned groups_of(const float (&corrected)[HELD])
{
    if (GROUPS == 1) return 1;
    const int lane = threadIdx.x % WARP;
    float mine = 0.0f;  // the score of the group that has this lane's number
    for (int group = 0; group < GROUPS; group++) {
        unsigned taken = 0;
        float score = 0.0f;
        for (int i = 0; i < GROUP_BEST; i++) {
            const Best best = best_left(corrected, corrected, taken, group * MEMBERS, (group + 1) * MEMBERS, ~0u);
            score += best.score;
            taken = with(taken, best.index);
        }
        if (lane == group) mine = score;
    }
    unsigned used = 0;
    for (int i = 0; i < GROUPS_USED; i++) {
        Best candidate = {__uint_as_float(0xff800000u), NONE, 0.0f};
        if (lane < GROUPS && !(used >> lane & 1)) candidate = {mine, lane, 0.0f};
        used |= 1u << best_of_lanes(candidate).index;
    }
    return used;
}

__device__ __forceinline__ float logit_of(const char* logits, const float* bias, int expert)
{
    const float logit = NUMBER == F32 ? reinterpret_cast<const float*>(logits)[expert]
                                      : to_f32<NUMBER>(reinterpret_cast<const unsigned short*>(logits)[expert]);
    return bias == nullptr ? logit : logit + bias[expert];
}

// Scores of a warp's token, by its logits.
__device__ __forceinline__ void score(const char* logits, const float* bias, float (&scores)[HELD])
{
    const int lane = threadIdx.x % WARP;
    float most = __uint_as_float(0xff800000u), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * WARP + lane;
        scores[i] = __uint_as_float(0xff800000u);
        if (expert >= EXPERTS) continue;
        scores[i] = logit_of(logits, bias, expert);
        most = fmaxf(most, scores[i]);
    }
    if (SCORED_BY == SOFTMAX) most = most_of_lanes(most);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        scores[i] = SCORED_BY == SIGMOID         ? 1.0f / (1.0f + expf(-scores[i]))
                    : SCORED_BY == ROOT_SOFTPLUS ? sqrtf(fmaxf(scores[i], 0.0f) + log1pf(expf(-fabsf(scores[i]))))
                                                 : expf(scores[i] - most);
        sum += scores[i];
    }
    if (SCORED_BY != SOFTMAX) return;
    sum = sum_of_lanes(sum);
#pragma unroll
    for (int i = 0; i < HELD; i++) scores[i] /= sum;
}

// logits:     [tokens, EXPERTS]; its stride is bytes from token to token
// bias:       [EXPERTS], added to logits; null for none
// correction: [EXPERTS], added to scores for the choice alone; null for none
// scales:     [EXPERTS], factors on weights; null for none
// live:       tokens from *live on are padding: they are assigned to -1
// chosen:     [tokens, ASSIGNED]
// shares:     [tokens, ASSIGNED], the weights: scores, divided by their sum or by norm_min, whichever is greater, unless
//             that is negative, and times `scale`; those of shared experts are 1
// grid:       a warp, a token
extern "C" __global__ void choose_experts(
    const char* logits, const float* __restrict__ bias, const float* __restrict__ correction,
    const float* __restrict__ scales, const int* live, int* chosen, float* shares, long long token_stride, int tokens,
    float norm_min, float scale)
{
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    const long long to = static_cast<long long>(token) * ASSIGNED + lane;
    if (token >= *live) {
        if (lane < ASSIGNED) chosen[to] = -1, shares[to] = 0.0f;
        return;
    }
    float scores[HELD], corrected[HELD];
    logits += token * token_stride;
    score(logits, bias, scores);
    // Sigmoids that nothing is added to are compared by their logits, which differ where they round to 1.
    const bool is_plain = SCORED_BY == SIGMOID && GROUPS == 1 && correction == nullptr;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * WARP + lane;
        corrected[i] = scores[i];
        if (expert < EXPERTS && correction != nullptr) corrected[i] += correction[expert];
        if (expert < EXPERTS && is_plain) corrected[i] = logit_of(logits, bias, expert);
    }
    const unsigned groups = groups_of(corrected);
    unsigned taken = 0;
    int expert = EXPERTS + lane - CHOSEN;  // of this lane's assignment
    float share = 1.0f, sum = 0.0f;
    for (int i = 0; i < CHOSEN; i++) {
        const Best best = best_left(corrected, scores, taken, 0, EXPERTS, groups);
        taken = with(taken, best.index);
        sum += best.plain;
        if (lane == i) expert = best.index, share = best.plain;
    }
    if (lane >= ASSIGNED) return;
    if (lane < CHOSEN) {
        // A comparison, not fmaxf: NaN stays NaN.
        if (norm_min >= 0.0f) share /= sum < norm_min ? norm_min : sum;
        share *= scale;
        if (scales != nullptr) share *= scales[expert];
    }
    chosen[to] = expert;
    shares[to] = share;
}

// Puts assignments in the order of experts. Each expert's begin with a tile of their own.
//
// chosen:      [assignments]: an expert, or -1
// order:       [tiles, rows]: assignments, -1 where a tile is not full. Within an expert's tiles they come in any order:
//              a product's rows do not depend on each other
// tile_expert: [tiles]: whose it is, -1 for tiles that are not needed; `tiles` is as many as there can be
// grid:        one block
extern "C" __global__ void __launch_bounds__(1024, 1) sort_by_expert(
    const int* chosen, int* order, int* tile_expert, int assignments, int tiles, int rows)
{
    __shared__ int counts[COUNTED], first_tile[COUNTED + 1];
    const int thread = threadIdx.x, threads = blockDim.x;
    for (int expert = thread; expert < COUNTED; expert += threads) counts[expert] = 0;
    for (int i = thread; i < tiles * rows; i += threads) order[i] = -1;
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < assignments; i += threads) {
        const int expert = chosen[i];
        if (expert >= 0) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    if (thread < WARP) {
        int before = 0;
        for (int base = 0; base < COUNTED; base += WARP) {
            const int expert = base + thread;
            const int own = expert < COUNTED ? (counts[expert] + rows - 1) / rows : 0;
            int until = own;
#pragma unroll
            for (int across = 1; across < WARP; across *= 2) {
                const int other = __shfl_sync(ALL_LANES, until, thread >= across ? thread - across : 0);
                if (thread >= across) until += other;
            }
            if (expert < COUNTED) first_tile[expert] = before + until - own;
            before += __shfl_sync(ALL_LANES, until, WARP - 1);
        }
        if (thread == 0) first_tile[COUNTED] = before;
    }
    __syncthreads();
    for (int tile = thread; tile < tiles; tile += threads) {
        int expert = 0, beyond = COUNTED;  // the last expert that begins at this tile or before
        while (beyond - expert > 1) {
            const int middle = (expert + beyond) / 2;
            if (first_tile[middle] <= tile) expert = middle;
            else beyond = middle;
        }
        tile_expert[tile] = tile < first_tile[COUNTED] ? expert : -1;
    }
    for (int expert = thread; expert < COUNTED; expert += threads) counts[expert] = first_tile[expert] * rows;
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < assignments; i += threads) {
        const int expert = chosen[i];
        if (expert >= 0) order[atomicAdd(&counts[expert], 1)] = i;
    }
}

// parts:  [tokens, ASSIGNED, vectors]
// chosen: [tokens, ASSIGNED]; a token that has no experts becomes zeros
// out:    [tokens, vectors], the sums, added up in float32
// grid:   `count` threads, tokens * vectors
extern "C" __global__ void add_parts(const char* parts, const int* chosen, char* out, int count, int vectors)
{
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const int token = index / vectors, vector = index % vectors;
    Floats sum = {};
    if (chosen[static_cast<long long>(token) * ASSIGNED] >= 0) {
        const char* from = parts + (static_cast<long long>(token) * ASSIGNED * vectors + vector) * VECTOR;
#pragma unroll
        for (int i = 0; i < ASSIGNED; i++) {
            const Floats part = widened(load(from + static_cast<long long>(i) * vectors * VECTOR));
#pragma unroll
            for (int j = 0; j < ELEMENTS; j++) sum.at[j] += part.at[j];
        }
    }
    store(out + static_cast<long long>(index) * VECTOR, sum);
}
