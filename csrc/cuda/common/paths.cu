// What tables of paths share: the facts about a device, and when the environment is read.
#include "common/paths.h"

#include <cuda_runtime.h>
#include <stdlib.h>

#include "common/common.cuh"

// The numbers of a device in one, so that threads which ask at the same time see all of them or none.
static constexpr int MOST_DEVICES = 64;
static std::atomic<uint64_t> known_devices[MOST_DEVICES];

static cuda_ops_status ask_device(Device &facts, int device)
{
    const auto ask = [&](int &value, cudaDeviceAttr attribute) {
        return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
    };
    int major = 0, minor = 0;
    if (!ask(major, cudaDevAttrComputeCapabilityMajor) || !ask(minor, cudaDevAttrComputeCapabilityMinor) ||
        !ask(facts.multiprocessors, cudaDevAttrMultiProcessorCount) ||
        !ask(facts.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin))
        return launch_status();
    facts.capability = 10 * major + minor;
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_device_facts_cuda(cuda_ops_device_facts *facts)
{
    *facts = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess)
        return launch_status(); // and no error of the next launch
    if (device >= MOST_DEVICES)
        return ask_device(*facts, device);
    if (const uint64_t known = known_devices[device].load(std::memory_order_relaxed)) {
        *facts = {(int)(known & 0xffff), (int)(known >> 16 & 0xffff), (int)(known >> 32)};
        return CUDA_OPS_SUCCESS;
    }
    Device found = {};
    const cuda_ops_status status = ask_device(found, device);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    *facts = found;
    known_devices[device].store((uint64_t)found.capability | (uint64_t)found.multiprocessors << 16 |
                                    (uint64_t)found.shared_bytes << 32,
                                std::memory_order_relaxed);
    return CUDA_OPS_SUCCESS;
}

Device current_device()
{
    Device facts;
    cuda_ops_device_facts_cuda(&facts);
    return facts;
}

static std::atomic<unsigned int> readings{1};

extern "C" void cuda_ops_reload_paths_cuda(void)
{
    readings.fetch_add(1, std::memory_order_relaxed);
}

unsigned int ForcedPath::generation()
{
    return readings.load(std::memory_order_relaxed) & 0xffffff;
}

const char *ForcedPath::read() const
{
    const char *const value = getenv(variable);
    return value && *value ? value : nullptr;
}
