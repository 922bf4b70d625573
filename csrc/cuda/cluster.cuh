// Clusters of blocks (Hopper), which read each other's shared memory. Before Hopper a block is a cluster of its own.
#ifndef CUDA_OPS_CLUSTER_CUH
#define CUDA_OPS_CLUSTER_CUH

#include "common.cuh"

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

// launch_dependent for clusters of `cluster` blocks along x.
template <typename... Parameters, typename... Arguments>
static inline void launch_dependent_clusters(void (*kernel)(Parameters...), unsigned int grid, unsigned int block,
                                             int cluster, int shared_bytes, cudaStream_t stream, Arguments... arguments)
{
    if (shared_bytes > 48 << 10)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = (unsigned int)cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = compute_capability() >= 90 ? (cluster > 1 ? 2 : 1) : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...); // its error is launch_status()'s
}

#endif
