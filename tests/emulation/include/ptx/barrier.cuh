// csrc/cuda/ptx/barrier.cuh, emulated.
#ifndef CUDA_OPS_PTX_BARRIER_CUH
#define CUDA_OPS_PTX_BARRIER_CUH

namespace emulation
{
void bar_sync(int barrier, int threads);
void bar_arrive(int barrier, int threads);
} // namespace emulation
using emulation::bar_arrive;
using emulation::bar_sync;

template <int THREADS>
static inline void bar_sync(int barrier)
{
    emulation::bar_sync(barrier, THREADS);
}

#endif
