// Launches with attributes: programmatic dependent launch and clusters.
#ifndef CUDA_OPS_COMMON_LAUNCH_CUH
#define CUDA_OPS_COMMON_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "common/device.h"

// A launch whose kernel may begin while the one before it on the stream still runs (ptx/griddepcontrol.cuh). Before
// Hopper it is an ordinary launch.
template <typename... Parameters, typename... Arguments>
static inline void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                                    cudaStream_t stream, Arguments... arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = current_device().capability >= 90 ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...); // its error is launch_status()'s
}

// launch_dependent in clusters of `cluster` blocks along x. More than 48 KB of shared memory must have been allowed
// before (allow_shared_memory). Before Hopper (`capability` below 90) there are no clusters, and the kernel must work
// without.
template <typename... Parameters>
static inline cudaError_t start_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int cluster,
                                         int shared_bytes, int capability, cudaStream_t stream,
                                         const std::common_type_t<Parameters> &...arguments)
{
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = (unsigned int)cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned int)blocks);
    config.blockDim = dim3((unsigned int)threads);
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = capability >= 90 ? (cluster > 1 ? 2 : 1) : 0;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The same for the current device, with its shared memory allowed.
template <typename... Parameters>
static inline void launch_dependent_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int cluster,
                                             int shared_bytes, cudaStream_t stream,
                                             const std::common_type_t<Parameters> &...arguments)
{
    if (shared_bytes > 48 << 10)
        allow_shared_memory(kernel, shared_bytes);
    // Its error is launch_status()'s.
    start_clusters(kernel, blocks, threads, cluster, shared_bytes, current_device().capability, stream, arguments...);
}

#endif
