// Tokens on their way from the step that sampled them to the next one, which the host need not have seen.
//
// last: [max_rows] the token that each row was given last; what `rows` names is known to be below max_rows

constexpr int LAST_SAMPLED = -1;  // in a step's tokens: the one that its row was given last
constexpr int NO_TOKEN = -1;

// A step's tokens, where they stand for the last ones. Only the first of a sequence can.
// tokens: [tokens of the step]; begins: [count + 1], of the sequences, ascending: one that begins where the next does is padding
// grid:   threads for all sequences
extern "C" __global__ void fill(int* tokens, const int* begins, const int* rows, const int* last, int count)
{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const int first = begins[at];
    if (begins[at + 1] <= first || tokens[first] != LAST_SAMPLED) return;
    tokens[first] = last[rows[at]];
}

// What was sampled: told to the host as NO_TOKEN where the largest logit `best` is not finite; such a row goes on with 0,
// which nobody listens to.
// rows, tokens, best, told: [count]
// grid: threads for all
extern "C" __global__ void keep(const int* rows, const int* tokens, const float* best, int* last, int* told, int count)
{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const float spread = best[at] - best[at];  // 0, or NaN
    const int token = spread == 0.0f ? tokens[at] : NO_TOKEN;
    told[at] = token;
    last[rows[at]] = token < 0 ? 0 : token;
}
