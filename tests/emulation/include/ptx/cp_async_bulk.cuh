// csrc/cuda/ptx/cp_async_bulk.cuh, emulated as far as wgmma takes it: nothing is in another order here.
#ifndef CUDA_OPS_PTX_CP_ASYNC_BULK_CUH
#define CUDA_OPS_PTX_CP_ASYNC_BULK_CUH

static inline void fence_proxy_async()
{
}

#endif
