// mbarriers (sm_90): 8 bytes of shared memory, by address, that count arrivals and bytes of copies. A phase ends when
// all of both have come; waiters name the parity of the phase that they wait for, 0 for the first.
#ifndef CUDA_OPS_PTX_MBARRIER_CUH
#define CUDA_OPS_PTX_MBARRIER_CUH

#include "ptx/shared_memory.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes the initialised barriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_init_fenced(uint32_t barrier, uint32_t arrivals = 1)
{
    mbarrier_init(barrier, arrivals);
    fence_mbarrier_init();
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and adds the bytes whose copying the phase also waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at a barrier of any block of the cluster, by mapa's address. It releases nothing beyond the block: the
// arriving threads have only read, and what .release.cluster adds (a fence of the whole GPU) costs more than the
// products of a stage.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The thread's arrival comes once its cp.async copies so far have landed; it is one of those that the barrier counts.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// try_wait until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// The same for what other blocks of the cluster have sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

#endif
