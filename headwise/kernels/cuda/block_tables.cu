// Block tables that stay on the GPU: changed in place, and gathered for a step.
//
// tables: [max_rows, groups, max_blocks], without gaps. A row is of one sequence, and a batch names its rows in any
// order. All copies are of 4 bytes, side by side for a warp; a thread has its loads in flight before its first store.

constexpr int NOWHERE = -1;
constexpr int EACH = 8;  // cells of a thread

// Lets rows name no block.
// rows:  of the tables, gridDim.x of them; cells: of a row, groups * max_blocks
// grid:  rows, pieces of EACH * blockDim.x cells
extern "C" __global__ void clear(int* tables, const int* rows, long long cells)
{
    int* row = tables + rows[blockIdx.x] * cells;
    const long long first = static_cast<long long>(blockIdx.y) * EACH * blockDim.x + threadIdx.x;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const long long at = first + i * blockDim.x;
        if (at < cells) row[at] = NOWHERE;
    }
}

// updates: [count, 4] of (row, group, index, block); of row NOWHERE they are padding. Those of one cell are equal: which of
//          them comes last is unknown.
// grid: threads for all updates
extern "C" __global__ void apply(int* tables, const int* updates, int count, int groups, int max_blocks)
{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const int* update = updates + 4LL * at;
    if (update[0] == NOWHERE) return;
    tables[(static_cast<long long>(update[0]) * groups + update[1]) * max_blocks + update[2]] = update[3];
}

// Of each sequence of a batch and each group, the columns that `seq_lens` reaches; others of `out` stay as they are.
// rows, seq_lens: [batch]
// out:            [batch * groups, columns]
// grid:           rows of `out`, pieces of EACH * blockDim.x columns: most end at once where one sequence is long
extern "C" __global__ void gather(const int* tables, const int* rows, const int* seq_lens, int* out,
                                  int groups, int max_blocks, int columns, int block_size)
{
    const int sequence = blockIdx.x / groups, group = blockIdx.x % groups;
    const int length = seq_lens[sequence];
    int reached = length / block_size + (length % block_size != 0);
    if (reached > max_blocks) reached = max_blocks;
    if (reached > columns) reached = columns;
    const int first = blockIdx.y * EACH * blockDim.x + threadIdx.x;
    if (first >= reached) return;

    const int* from = tables + (static_cast<long long>(rows[sequence]) * groups + group) * max_blocks;
    int* to = out + static_cast<long long>(blockIdx.x) * columns;
    int held[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = first + i * blockDim.x;
        if (at < reached) held[i] = from[at];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = first + i * blockDim.x;
        if (at < reached) to[at] = held[i];
    }
}
