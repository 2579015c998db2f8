// Kernels that begin while those before them on the stream still run (programmatic dependent launch): what does not depend
// on these, a launch and weights on their way, takes no time of its own then. A kernel that calls wait_for_earlier() is
// launched so, by every thread before it reads what others wrote, or writes anything. From sm_90 on; before, kernels begin
// in order and neither does anything.
//
// What is before the kernel before has ended, too, since that has waited for it.
//
// Source: PTX ISA 8.0, "griddepcontrol".

// Until all that was launched before has ended, and what it wrote can be read.
__device__ __forceinline__ void wait_for_earlier()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once each block of this one has said so, or ended.
__device__ __forceinline__ void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
