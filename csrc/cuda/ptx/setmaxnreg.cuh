// setmaxnreg (sm_90a): a warpgroup gives back registers, or waits until the multiprocessor has so many for it. All its
// warps call it alike. REGISTERS a thread: a multiple of 8 from 24 to 256.
#ifndef CUDA_OPS_PTX_SETMAXNREG_CUH
#define CUDA_OPS_PTX_SETMAXNREG_CUH

#include <cuda_runtime.h>

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
