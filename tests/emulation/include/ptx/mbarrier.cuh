// csrc/cuda/ptx/mbarrier.cuh, emulated (emulator.cpp).
#ifndef CUDA_OPS_PTX_MBARRIER_CUH
#define CUDA_OPS_PTX_MBARRIER_CUH

#include "ptx/shared_memory.cuh"

void mbarrier_init(uint32_t barrier, uint32_t arrivals);
static inline void fence_mbarrier_init()
{
}
static inline void mbarrier_init_fenced(uint32_t barrier, uint32_t arrivals = 1)
{
    mbarrier_init(barrier, arrivals);
}
void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes);
static inline void mbarrier_arrive(uint32_t barrier)
{
    mbarrier_arrive_expect_tx(barrier, 0);
}
void mbarrier_wait(uint32_t barrier, uint32_t parity);
static inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity)
{
    mbarrier_wait(barrier, parity);
}

#endif
