// csrc/cuda/ptx/griddepcontrol.cuh, emulated: until a thread has waited it must not touch device memory.
#ifndef CUDA_OPS_PTX_GRIDDEPCONTROL_CUH
#define CUDA_OPS_PTX_GRIDDEPCONTROL_CUH

void wait_for_predecessor();
static inline void release_successor()
{
}

#endif
