// csrc/cuda/ptx/cp_async.cuh, emulated: a copy is made when the thread waits for it, no sooner.
#ifndef CUDA_OPS_PTX_CP_ASYNC_CUH
#define CUDA_OPS_PTX_CP_ASYNC_CUH

#include "ptx/shared_memory.cuh"

namespace emulation
{
void copy_later(uint32_t to, const void *from, int bytes, int valid);
void commit_copies();
void wait_for_copies(int pending); // all but so many groups; -1: of all, closed as groups or not
} // namespace emulation

template <int BYTES>
static inline void cp_async(uint32_t to, const void *from, int valid)
{
    emulation::copy_later(to, from, BYTES, valid);
}
static inline void cp_async_16(uint32_t to, const void *from)
{
    emulation::copy_later(to, from, 16, 16);
}
static inline void cp_async_commit_group()
{
    emulation::commit_copies();
}
template <int PENDING>
static inline void cp_async_wait_group()
{
    emulation::wait_for_copies(PENDING);
}
static inline void cp_async_wait_all()
{
    emulation::wait_for_copies(-1);
}

#endif
