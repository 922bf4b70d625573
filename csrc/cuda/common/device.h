// What launchers ask the driver about devices and kernels. Each answer is cached per device, since a query costs a good
// part of a launch. Thread-safe.
#ifndef CUDA_OPS_COMMON_DEVICE_H
#define CUDA_OPS_COMMON_DEVICE_H

#include <cuda_runtime.h>
#include <stddef.h>

#include "cuda_ops/paths.h"

typedef cuda_ops_device_facts Device;

// The current device. All zeros if there is none, and no error is left for the next launch to report.
Device current_device();

// The shared memory of a multiprocessor, shared by its resident blocks.
int multiprocessor_shared_bytes();

// Allows `kernel` to be launched on the current device with up to `bytes` of dynamic shared memory; never lowers what
// was allowed before, which another thread's launch may need.
cudaError_t allow_shared_memory(const void *kernel, size_t bytes);

// Allows clusters of 16, where the device can run them.
cudaError_t allow_clusters_of_16(const void *kernel);

// Blocks of `threads` with `shared_bytes` of dynamic shared memory (allowed before) that a multiprocessor of the
// current device runs at once; at least 1.
int active_blocks(const void *kernel, int threads, size_t shared_bytes);

// Clusters of `cluster` such blocks, without dynamic shared memory, that the current device runs at once; at least 1. They
// are fewer than its blocks are worth, where a part of the device has room for less than a cluster.
int active_clusters(const void *kernel, int threads, int cluster);

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
static inline int active_clusters(void (*kernel)(Parameters...), int threads, int cluster)
{
    return active_clusters(reinterpret_cast<const void *>(kernel), threads, cluster);
}
template <typename... Parameters>
static inline int active_blocks(void (*kernel)(Parameters...), int threads, size_t shared_bytes)
{
    return active_blocks(reinterpret_cast<const void *>(kernel), threads, shared_bytes);
}

#endif
