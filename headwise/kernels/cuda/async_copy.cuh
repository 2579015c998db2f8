// Copies to shared memory that are on their way while a thread goes on, and shared memory whose size a launch tells.
//
// Source: PTX ISA 8.0, "cp.async". A thread's copies are in its groups, in their order; what others copied is there behind
// a barrier that they reach once theirs have landed.

#ifdef __CUDACC__
__device__ __forceinline__ char* dynamic_shared()
{
    extern __shared__ uint4 of_this_launch[];
    return reinterpret_cast<char*>(of_this_launch);
}

// 16 bytes, past the first-level cache; zeros if not `there`, and nothing is read.
__device__ __forceinline__ void copy_16(char* to, const char* from, bool there)
{
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// 4 bytes, likewise.
__device__ __forceinline__ void copy_4(float* to, const float* from, bool there)
{
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(at), "l"(from), "r"(there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups have landed but the `LATEST` last ones.
template <int LATEST>
__device__ __forceinline__ void wait_for_all_but()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(LATEST) : "memory");
}
#endif
