// Blocks of one layer, of which ranks keep every token together, on their way to each of these ranks.

struct alignas(16) Vector {
    unsigned words[4];
};

// A part of one member's slots of a sequence's blocks, one behind the other, and a batch that says so.
// block_tables: [groups, any], of the sequence
// own:          [columns, own_bytes]; of a block that is not mapped, left as it is
// first_byte:   where that part of the first slot begins in a block
// table:        [columns], of which the first is block `first`; -1 of a block that is not mapped
// rows:         [2], where the sequence's queries begin and end
// grid:         the columns
extern "C" __global__ void take_slots(
    const char* arena, const int* block_tables, const int* head_groups, const int* head_slots, char* own, int* table,
    int* rows, long long block_bytes, long long slot_bytes, long long first_byte, long long own_bytes,
    int table_stride, int first, int begin, int end)
{
    const int column = blockIdx.x;
    const int block = block_tables[static_cast<long long>(head_groups[0]) * table_stride + column];
    if (threadIdx.x == 0) {
        table[column] = block < 0 ? -1 : first + column;
        if (column == 0) rows[0] = begin, rows[1] = end;
    }
    if (block < 0) return;
    const char* slot = arena + block * block_bytes + head_slots[0] * slot_bytes;
    const Vector* from = reinterpret_cast<const Vector*>(slot + first_byte);
    Vector* to = reinterpret_cast<Vector*>(own + column * own_bytes);
    for (int i = threadIdx.x; i < own_bytes / sizeof(Vector); i += blockDim.x) to[i] = from[i];
}

template <class Word>
__device__ __forceinline__ void join(
    const char* every, char* whole, long long apart, int token_bytes, int block_tokens, int parts)
{
    const int words = token_bytes / sizeof(Word);
    for (int i = threadIdx.x; i < parts * block_tokens * words; i += blockDim.x) {
        const int token = i / words, part = token % parts, at = token / parts * words + i % words;
        reinterpret_cast<Word*>(whole)[i] = reinterpret_cast<const Word*>(every + part * apart)[at];
    }
}

// What one role has of all tokens, those of the ranks in turn.
// every: [parts, blocks, slot_bytes], in each of which the role's tokens begin at `from`
// whole: [blocks, whole_bytes], in each of which they begin at `to`
// grid:  the blocks
extern "C" __global__ void join_tokens(
    const char* every, char* whole, long long slot_bytes, long long whole_bytes, long long from, long long to,
    int token_bytes, int block_tokens, int parts)
{
    every += blockIdx.x * slot_bytes + from, whole += blockIdx.x * whole_bytes + to;
    const long long apart = gridDim.x * slot_bytes;
    if (token_bytes % sizeof(Vector) == 0) join<Vector>(every, whole, apart, token_bytes, block_tokens, parts);
    else join<unsigned>(every, whole, apart, token_bytes, block_tokens, parts);
}
