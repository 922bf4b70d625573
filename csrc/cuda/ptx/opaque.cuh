// No instruction at all: a value whose origin the compiler is not to know.
#ifndef CUDA_OPS_PTX_OPAQUE_CUH
#define CUDA_OPS_PTX_OPAQUE_CUH

#include <stdint.h>

// From here on `value` could be any number. What is computed of it is computed here, instead of ahead of a loop, where
// its results would take registers.
__device__ __forceinline__ void make_opaque(uint64_t &value)
{
    asm volatile("" : "+l"(value));
}

#endif
