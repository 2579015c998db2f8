// Rotary embedding of rows whose halves are whole vectors: a thread turns a pair of these. Wants vectors.cuh.

constexpr int NUMBER_BYTES = 4 / WORD_ELEMENTS;

struct Pair {
    Floats low, high;
};

// Vector `at` of the first half of a row, and the one of the second half that it turns with. Rounded to the dtype.
__device__ __forceinline__ Pair rotated(const char* row, int at, int half_bytes, const float* cosines, const float* sines)
{
    const Floats low = widened(load(row + at * VECTOR)), high = widened(load(row + half_bytes + at * VECTOR));
    if (!cosines) return {low, high};
    const Floats cosine = load_floats(cosines + at * ELEMENTS), sine = load_floats(sines + at * ELEMENTS);
    Pair turned;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        turned.low.at[i] = low.at[i] * cosine.at[i] - high.at[i] * sine.at[i];
        turned.high.at[i] = low.at[i] * sine.at[i] + high.at[i] * cosine.at[i];
    }
    return {widened(narrowed(turned.low)), widened(narrowed(turned.high))};
}

// Turns the first `width` numbers of each of `heads` rows in place, `head_bytes` apart; the threads of a block share them.
__device__ __forceinline__ void rotate_heads(
    char* rows, int heads, long long head_bytes, int width, const float* cosines, const float* sines)
{
    const int half_bytes = width / 2 * NUMBER_BYTES, pairs = width / 2 / ELEMENTS;
    for (int i = threadIdx.x; i < heads * pairs; i += blockDim.x) {
        char* row = rows + i / pairs * head_bytes;
        const Pair turned = rotated(row, i % pairs, half_bytes, cosines, sines);
        store(row + i % pairs * VECTOR, turned.low), store(row + half_bytes + i % pairs * VECTOR, turned.high);
    }
}
