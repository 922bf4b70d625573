// What tables of paths share: when the environment is read.
#include "common/paths.h"

#include <stdlib.h>

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
