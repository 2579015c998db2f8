// Tokens of a sequence that a rank keeps, where ranks keep them together: `TokenShare`.

// How many of a sequence's first `tokens` are a share's.
__device__ __forceinline__ int count_of(int tokens, int part, int parts) { return (tokens + parts - 1 - part) / parts; }
