// CUDA C++ on a CPU, for tests: the threads of a block are fibers that switch at barriers and shuffles.
//
// Only what the kernels here use, and stricter than a GPU: a barrier or shuffle that not every thread reaches, a
// shuffle whose threads disagree about its kind, an access to memory not aligned to its type, and one behind the shared
// memory that a launch asks for are errors. What is copied asynchronously is NaN until its thread has waited for it.
// `shim_launch` returns the first one; nothing else of the launch can be relied on then.
#pragma once

#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

namespace shim {

constexpr unsigned kWarp = 32, kMostThreads = 1024, kMostSent = 6;
constexpr size_t kStack = 64 << 10;
constexpr unsigned kMostCopies = 512, kMostShared = 227 << 10, kGuard = 1024;  // bytes behind shared memory
enum State { kReady, kAtShuffle, kAtBarrier, kDone };

// Where a fiber is. `ucontext` switches with two system calls, for a signal mask that is the same for all fibers: most of
// the time of a kernel of many barriers. Here what a call preserves (System V ABI) is kept on the fiber's own stack.
#if defined(__x86_64__)
struct Context { void** top; };

__attribute__((naked, noinline, used)) static void switch_fibers(Context* from, Context* to) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi)\n"
        "movq (%rsi), %rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}

inline void prepare(Context& context, char* stack, void (*start)()) {
    void** top = reinterpret_cast<void**>(stack + kStack);
    *--top = nullptr;  // where `start` would return to, which it never does
    *--top = reinterpret_cast<void*>(start);
    for (int preserved = 0; preserved < 6; preserved++) *--top = nullptr;
    context.top = top;
}
#else
using Context = ucontext_t;

inline void switch_fibers(Context* from, Context* to) { swapcontext(from, to); }

inline void prepare(Context& context, char* stack, void (*start)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStack;
    makecontext(&context, start, 0);
}
#endif

struct Copy { char* to; const char* from; unsigned size, group; bool there; };

struct Thread {
    Context context;
    alignas(16) char stack[kStack];
    State state;
    unsigned index, shuffle, turn;
    Copy copies[kMostCopies];  // asynchronous ones that have not landed, in their order
    unsigned num_copies, group;
    unsigned sent[2][kMostSent];  // what a warp's threads send is kept for two turns, until all have read it
};

inline Context scheduler;
inline Thread threads[kMostThreads];
inline Thread* current;
inline dim3 grid, block, block_index;
alignas(16) inline char dynamic[kMostShared + kGuard];
inline unsigned shared_bytes;
inline char error[256];

inline void fail(const char* what, unsigned long detail) {
    if (!error[0]) snprintf(error, sizeof error, "%s (%lu), thread %u of block %u", what, detail, current->index, block_index.x);
}

inline void wait(State state) {
    current->state = state;
    switch_fibers(&current->context, &scheduler);
}

// Every thread of the warp sends `count` words. Returns the first of the warp's threads, whose `sent[turn]` has them.
inline const Thread* exchange(const unsigned* words, unsigned count, unsigned kind, unsigned& turn) {
    Thread* self = current;
    turn = self->turn++ % 2;
    memcpy(self->sent[turn], words, count * sizeof *words);
    self->shuffle = kind;
    wait(kAtShuffle);
    return threads + self->index / kWarp * kWarp;
}

// Every thread of the warp sends `bits`; returns what lane `from` sent.
inline unsigned exchange(unsigned mask, unsigned bits, unsigned from, unsigned kind) {
    if (mask != 0xffffffffu) fail("a shuffle of part of a warp", mask);
    unsigned turn;
    const Thread* warp = exchange(&bits, 1, kind, turn);
    return warp[from].sent[turn][0];
}

inline void copy(char* to, const char* from, unsigned size, bool there) {
    Thread* self = current;
    if ((size_t)to % size || (size_t)from % size) fail("an asynchronous copy that is not aligned to its size", (size_t)from);
    if (self->num_copies == kMostCopies) return fail("more asynchronous copies on their way than the shim keeps", kMostCopies);
    memset(to, 0xff, size);
    self->copies[self->num_copies++] = {to, from, size, self->group, there};
}

// Those land of all groups but the `latest` last ones.
inline void land(unsigned latest) {
    Thread* self = current;
    unsigned landed = 0;
    for (; landed < self->num_copies && self->copies[landed].group + latest < self->group; landed++) {
        const Copy& each = self->copies[landed];
        if (each.there) memcpy(each.to, each.from, each.size);
        else memset(each.to, 0, each.size);
    }
    self->num_copies -= landed;
    memmove(self->copies, self->copies + landed, self->num_copies * sizeof(Copy));
}

inline bool all_are(State state, unsigned first, unsigned last) {
    for (unsigned i = first; i < last; i++)
        if (threads[i].state != state) return false;
        else if (state == kAtShuffle && threads[i].shuffle != threads[first].shuffle) return false;
    return true;
}

inline bool release(State state, unsigned first, unsigned last) {
    if (!all_are(state, first, last)) return false;
    for (unsigned i = first; i < last; i++) threads[i].state = kReady;
    return true;
}

template <class Body> void run_block(const Body& body, bool backwards) {
    static const Body* what;
    what = &body;
    void (*start)() = [] { (*what)(); current->state = kDone; switch_fibers(&current->context, &scheduler); };
    unsigned count = block.x;
    for (unsigned i = 0; i < count; i++) {
        Thread& thread = threads[i];
        thread.state = kReady, thread.index = i, thread.turn = thread.shuffle = thread.num_copies = thread.group = 0;
        prepare(thread.context, thread.stack, start);
    }
    memset(dynamic, 0xff, shared_bytes + kGuard);
    for (bool progress = true; progress && !error[0];) {
        progress = false;
        for (unsigned i = 0; i < count; i++) {
            current = &threads[backwards ? count - 1 - i : i];
            if (current->state == kReady) switch_fibers(&scheduler, &current->context), progress = true;
        }
        for (unsigned first = 0; first < count; first += kWarp) release(kAtShuffle, first, first + kWarp);
        release(kAtBarrier, 0, count);
    }
    if (!all_are(kDone, 0, count)) fail("a barrier or shuffle that not every thread reaches", count);
    for (unsigned i = 0; i < kGuard; i++)
        if (dynamic[shared_bytes + i] != (char)0xff) return fail("a write behind dynamic shared memory", i);
}

template <class... A, size_t... I>
void launch(void (*kernel)(A...), void** arguments, bool backwards, std::index_sequence<I...>) {
    auto body = [&] { kernel(*static_cast<A*>(arguments[I])...); };
    unsigned blocks = grid.x * grid.y * grid.z;
    for (unsigned i = 0; i < blocks && !error[0]; i++) {
        unsigned at = backwards ? blocks - 1 - i : i;
        block_index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        run_block(body, backwards);
    }
}

// The caller passes the widths of its arguments: on a GPU, wrong ones are read as something else.
template <class... A>
const char* checked_launch(void (*kernel)(A...), const unsigned* sizes, unsigned count, void** arguments, bool backwards) {
    error[0] = 0;
    const unsigned expected[] = {sizeof(A)...};
    if (count != sizeof...(A)) return "the kernel takes another number of arguments";
    if (memcmp(sizes, expected, sizeof expected)) return "an argument has another width than its parameter";
    if (shared_bytes > kMostShared) return "more shared memory than a GPU has";
    if (block.x % kWarp || block.x > kMostThreads) return "a block that is not 1 to 32 whole warps";
    launch(kernel, arguments, backwards, std::index_sequence_for<A...>());
    return error;
}

}  // namespace shim

#define threadIdx (dim3{shim::current->index, 0, 0})
#define blockIdx (shim::block_index)
#define blockDim (shim::block)
#define gridDim (shim::grid)

inline void __syncthreads() { shim::wait(shim::kAtBarrier); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::exchange(mask, 0, 0, 1); }

template <class T> T shim_shuffle(unsigned mask, T value, unsigned from, unsigned kind) {
    static_assert(sizeof(T) == 4);
    unsigned bits;
    memcpy(&bits, &value, 4);
    bits = shim::exchange(mask, bits, from, kind);
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned shim_lane() { return shim::current->index % shim::kWarp; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return shim_shuffle(mask, value, shim_lane() / width * width + from % width, 2 + width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    if (lanes >= width) shim::fail("a shuffle beyond its width", lanes);
    return shim_shuffle(mask, value, shim_lane() ^ lanes, 100 + lanes * 64 + width);
}

// A group of a thread has the number that its `group` had then.
inline char* dynamic_shared() { return shim::dynamic; }
inline void copy_16(char* to, const char* from, bool there) { shim::copy(to, from, 16, there); }
inline void copy_4(float* to, const float* from, bool there) { shim::copy((char*)to, (const char*)from, 4, there); }
inline void end_group() { shim::current->group++; }
template <int LATEST> void wait_for_all_but() { shim::land(LATEST); }

// Fibers do not interrupt.
template <class T> T atomicAdd(T* to, T value) { T before = *to; *to += value; return before; }
inline unsigned atomicInc(unsigned* to, unsigned most) { unsigned before = *to; *to = before >= most ? 0 : before + 1; return before; }
inline void __threadfence() {}

// Between launches of several ranks, each by a library and a thread of its own: who waits lets the others run.
inline void tell(unsigned long long* flag, unsigned long long value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline unsigned long long told(const unsigned long long* flag)
{
    shim::wait(shim::kReady);
    sched_yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline uint4 load_fresh(const char* from) { return *reinterpret_cast<const uint4*>(from); }

template <class T> T __ldcg(const T* from) { return *from; }

template <class T> T __ldcs(const T* from) { return *from; }
template <class T> T load_once(const T* from) { return *from; }
template <class T> void __stcs(T* to, T value) { *to = value; }

inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }

// What the kernels do with one PTX instruction each.
inline float f16_to_f32(unsigned short bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent == 0 ? ldexpf(mantissa, -24) : ldexpf(mantissa + 1024, exponent - 25);
    if (exponent == 31) size = mantissa ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}
inline unsigned short f32_to_f16(float value) {
    int exponent, sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    if (size != size) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (int)rintf(size * 0x1p24f);
    frexpf(size, &exponent);
    return sign | ((exponent + 13) << 10) + (int)rintf(ldexpf(size, 11 - exponent));  // the leading 1 adds to the exponent
}

inline float bf16_to_f32(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
template <bool BF> float shim_number(unsigned pair, int at) {
    unsigned short bits = pair >> at * 16;
    return BF ? bf16_to_f32(bits) : f16_to_f32(bits);
}
inline unsigned short shim_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <bool BF> unsigned fused(unsigned a, unsigned b, unsigned c) {
    unsigned pair = 0;
    for (int at = 0; at < 2; at++) {
        float sum = shim_number<BF>(a, at) * shim_number<BF>(b, at) + shim_number<BF>(c, at);
        pair |= (unsigned)(BF ? shim_bf16(sum) : f32_to_f16(sum)) << at * 16;
    }
    return pair;
}
template <bool BF> void add_products(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned turn, words[6] = {a[0], a[1], a[2], a[3], b[0], b[1]}, lane = shim_lane();
    const shim::Thread* warp = shim::exchange(words, 6, 5000, turn);
    for (int at = 0; at < 4; at++) {
        unsigned row = lane / 4, column = lane % 4 * 2 + at % 2;
        for (int k = 0; k < 16; k++) {  // which lane of four has it, in which register, and in which half of that
            unsigned from = k % 8 / 2, part = k / 8;
            sums[at] += shim_number<BF>(warp[row * 4 + from].sent[turn][2 * part + at / 2], k % 2) *
                        shim_number<BF>(warp[column * 4 + from].sent[turn][4 + part], k % 2);
        }
    }
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned made = 0;
    for (int i = 0; i < 4; i++) made |= (unsigned)(bytes >> (selectors >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return made;
}
inline int min(int a, int b) { return a < b ? a : b; }

// Called by what `-fsanitize=alignment` adds to each access to memory.
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(void*, unsigned long address) {
    shim::fail("an access that is not aligned to its type", address);
}

#define SHIM_KERNEL(name)                                                                                       \
    extern "C" const char* shim_launch_##name(const unsigned* grid, unsigned threads, unsigned shared_bytes,    \
                                              const unsigned* sizes, unsigned count, void** arguments, int backwards) {                \
        shim::grid = {grid[0], grid[1], grid[2]}, shim::block = {threads}, shim::shared_bytes = shared_bytes;   \
        return shim::checked_launch(name, sizes, count, arguments, backwards != 0);                             \
    }
