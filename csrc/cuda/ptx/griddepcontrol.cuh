// griddepcontrol: programmatic dependent launch (Hopper). A kernel started by launch_dependent may begin while the one
// before it on the stream still runs, so that its launch and prologue hide under that one's tail. Before Hopper the
// functions do nothing, and launch_dependent makes ordinary launches.
#ifndef CUDA_OPS_PTX_GRIDDEPCONTROL_CUH
#define CUDA_OPS_PTX_GRIDDEPCONTROL_CUH

#include <cuda_runtime.h>

// griddepcontrol.wait: until the kernel before has ended and its memory is seen. Every thread of such a kernel calls it
// before it touches memory that an earlier kernel wrote, or writes memory that one reads; every thread, or the kernel
// after it could overtake the one before.
__device__ __forceinline__ void wait_for_predecessor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: from here on the next kernel may be started, once every block has said so or ended.
// It still waits for this one's memory in wait_for_predecessor().
__device__ __forceinline__ void release_successor()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
