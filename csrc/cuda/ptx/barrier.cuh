// bar: the barriers 1 to 15 of a block (0 is __syncthreads()'s) among `threads` of its threads, whole warps.
#ifndef CUDA_OPS_PTX_BARRIER_CUH
#define CUDA_OPS_PTX_BARRIER_CUH

#include <cuda_runtime.h>

// Arrives and waits.
__device__ __forceinline__ void bar_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same with their number in the instruction.
template <int THREADS>
__device__ __forceinline__ void bar_sync(int barrier)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
// Arrives, and goes on.
__device__ __forceinline__ void bar_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#endif
