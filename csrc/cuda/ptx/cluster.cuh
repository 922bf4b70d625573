// Clusters of blocks (Hopper), which read each other's shared memory. Before Hopper a block is a cluster of its own.
#ifndef CUDA_OPS_PTX_CLUSTER_CUH
#define CUDA_OPS_PTX_CLUSTER_CUH

#include <type_traits>

#include "common/common.cuh"

__device__ __forceinline__ void cluster_barrier()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where block `rank` of the cluster has what this one has at `pointer` (in shared memory).
template <typename T>
__device__ __forceinline__ const T *in_block_of_cluster(const T *pointer, int rank)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(pointer), "r"(rank));
    return reinterpret_cast<const T *>(address);
#else
    return pointer;
#endif
}

static inline int compute_capability()
{
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major * 10 + minor;
}

// launch_dependent in clusters of `cluster` blocks along x. The kernel has been told of its shared memory if that is
// more than 48 KB. Before Hopper (`capability` below 90) blocks go without clusters, and the kernel counts on it.
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

// The same for whatever device is current, its shared memory told.
template <typename... Parameters>
static inline void launch_dependent_clusters(void (*kernel)(Parameters...), int64_t blocks, int threads, int cluster,
                                             int shared_bytes, cudaStream_t stream,
                                             const std::common_type_t<Parameters> &...arguments)
{
    if (shared_bytes > 48 << 10)
        allow_shared_memory(kernel, shared_bytes);
    // Its error is launch_status()'s.
    start_clusters(kernel, blocks, threads, cluster, shared_bytes, compute_capability(), stream, arguments...);
}

#endif
