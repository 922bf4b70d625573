// Facts about devices and kernels, cached (see device.h). The tables are never freed: a thread may launch while others
// leave main().
#include "common/device.h"

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "common/common.cuh"

// Facts of devices from this number on are not cached.
static constexpr int CACHED_DEVICES = 64;

namespace
{
struct DeviceRecord {
    Device facts;
    int multiprocessor_shared_bytes;
};

struct KernelFacts {
    size_t shared_bytes = 0; // allowed
    bool clusters_of_16 = false;
    std::map<std::pair<int, size_t>, int> active_blocks; // of (threads, shared bytes)
    std::map<std::pair<int, int>, int> active_clusters;  // of (threads, blocks of a cluster)
};

struct KernelTable {
    std::mutex mutex;
    std::unordered_map<const void *, KernelFacts> kernels[CACHED_DEVICES];
};
} // namespace

static KernelTable &kernel_table()
{
    static KernelTable *const table = new KernelTable;
    return *table;
}

// The current device's number; negative where nothing is cached for it.
static int cached_device()
{
    int device = -1;
    if (cudaGetDevice(&device) != cudaSuccess) {
        cudaGetLastError(); // no device; the next launch must not report it
        return -1;
    }
    return device < CACHED_DEVICES ? device : -1;
}

static cuda_ops_status ask(DeviceRecord &record, int device)
{
    const auto attribute = [&](int &value, cudaDeviceAttr name) {
        return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess;
    };
    int major = 0, minor = 0;
    if (!attribute(major, cudaDevAttrComputeCapabilityMajor) || !attribute(minor, cudaDevAttrComputeCapabilityMinor) ||
        !attribute(record.facts.multiprocessors, cudaDevAttrMultiProcessorCount) ||
        !attribute(record.facts.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin) ||
        !attribute(record.multiprocessor_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor))
        return launch_status();
    record.facts.capability = 10 * major + minor;
    return CUDA_OPS_SUCCESS;
}

static cuda_ops_status current_record(DeviceRecord *record)
{
    static DeviceRecord kept[CACHED_DEVICES];
    static std::atomic<bool> known[CACHED_DEVICES];
    static std::mutex mutex;
    *record = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess)
        return launch_status(); // and clears the error
    if (device < CACHED_DEVICES && known[device].load(std::memory_order_acquire)) {
        *record = kept[device];
        return CUDA_OPS_SUCCESS;
    }
    DeviceRecord found = {};
    const cuda_ops_status status = ask(found, device);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    *record = found;
    if (device >= CACHED_DEVICES)
        return CUDA_OPS_SUCCESS;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!known[device].load(std::memory_order_relaxed)) {
        kept[device] = found;
        known[device].store(true, std::memory_order_release);
    }
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_device_facts_cuda(cuda_ops_device_facts *facts)
{
    DeviceRecord record;
    const cuda_ops_status status = current_record(&record);
    *facts = record.facts;
    return status;
}

Device current_device()
{
    DeviceRecord record;
    current_record(&record);
    return record.facts;
}

int multiprocessor_shared_bytes()
{
    DeviceRecord record;
    current_record(&record);
    return record.multiprocessor_shared_bytes;
}

cudaError_t allow_shared_memory(const void *kernel, size_t bytes)
{
    const int device = cached_device();
    if (device < 0)
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    KernelTable &table = kernel_table();
    const std::lock_guard<std::mutex> lock(table.mutex);
    KernelFacts &facts = table.kernels[device][kernel];
    if (bytes <= facts.shared_bytes)
        return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (error == cudaSuccess)
        facts.shared_bytes = bytes;
    return error;
}

cudaError_t allow_clusters_of_16(const void *kernel)
{
    const int device = cached_device();
    if (device < 0)
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    KernelTable &table = kernel_table();
    const std::lock_guard<std::mutex> lock(table.mutex);
    KernelFacts &facts = table.kernels[device][kernel];
    if (facts.clusters_of_16)
        return cudaSuccess;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    facts.clusters_of_16 = error == cudaSuccess;
    return error;
}

static int ask_active_blocks(const void *kernel, int threads, size_t shared_bytes, cudaError_t *error)
{
    int blocks = 0;
    *error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
    return blocks > 0 ? blocks : 1;
}

int active_blocks(const void *kernel, int threads, size_t shared_bytes)
{
    cudaError_t error;
    const int device = cached_device();
    if (device < 0)
        return ask_active_blocks(kernel, threads, shared_bytes, &error);
    KernelTable &table = kernel_table();
    const std::lock_guard<std::mutex> lock(table.mutex);
    std::map<std::pair<int, size_t>, int> &known = table.kernels[device][kernel].active_blocks;
    const auto found = known.find({threads, shared_bytes});
    if (found != known.end())
        return found->second;
    const int blocks = ask_active_blocks(kernel, threads, shared_bytes, &error);
    if (error == cudaSuccess)
        known[{threads, shared_bytes}] = blocks;
    return blocks;
}

static int ask_active_clusters(const void *kernel, int threads, int cluster, cudaError_t *error)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned int)cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned int)cluster);
    config.blockDim = dim3((unsigned int)threads);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    *error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    return clusters > 0 ? clusters : 1;
}

int active_clusters(const void *kernel, int threads, int cluster)
{
    cudaError_t error;
    const int device = cached_device();
    if (device < 0)
        return ask_active_clusters(kernel, threads, cluster, &error);
    KernelTable &table = kernel_table();
    const std::lock_guard<std::mutex> lock(table.mutex);
    std::map<std::pair<int, int>, int> &known = table.kernels[device][kernel].active_clusters;
    const auto found = known.find({threads, cluster});
    if (found != known.end())
        return found->second;
    const int clusters = ask_active_clusters(kernel, threads, cluster, &error);
    if (error == cudaSuccess)
        known[{threads, cluster}] = clusters;
    return clusters;
}
