// What launchers ask the driver about devices and kernels. Each thing is asked once a device and kept, since a question
// costs a good part of what a launch does; any thread may ask.
#ifndef CUDA_OPS_COMMON_DEVICE_H
#define CUDA_OPS_COMMON_DEVICE_H

#include <cuda_runtime.h>
#include <stddef.h>

#include "cuda_ops/paths.h"

typedef cuda_ops_device_facts Device;

// The current device. Zeros if there is none; that is no error of the next launch then.
Device current_device();

// The shared memory of one of its multiprocessors, which the blocks on it have between them.
int multiprocessor_shared_bytes();

// Lets `kernel` be launched on the current device with up to `bytes` of dynamic shared memory, and never with less than
// it was allowed before: the attribute is the kernel's, and another thread's launch may need more.
cudaError_t allow_shared_memory(const void *kernel, size_t bytes);

// Lets it be launched in clusters of 16, where the device can.
cudaError_t allow_clusters_of_16(const void *kernel);

// Blocks of `threads` with `shared_bytes` of dynamic shared memory, which it has been allowed, that a multiprocessor of
// the current device runs at once; at least 1.
int active_blocks(const void *kernel, int threads, size_t shared_bytes);

template <typename... Parameters>
static inline cudaError_t allow_shared_memory(void (*kernel)(Parameters...), size_t bytes)
{
    return allow_shared_memory(reinterpret_cast<const void *>(kernel), bytes);
}
template <typename... Parameters>
static inline cudaError_t allow_clusters_of_16(void (*kernel)(Parameters...))
{
    return allow_clusters_of_16(reinterpret_cast<const void *>(kernel));
}
template <typename... Parameters>
static inline int active_blocks(void (*kernel)(Parameters...), int threads, size_t shared_bytes)
{
    return active_blocks(reinterpret_cast<const void *>(kernel), threads, shared_bytes);
}

#endif
