// The tables of paths (cuda_ops/paths.h) as ops return them, for cuda_ops.explain.
#pragma once

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "cuda_ops/paths.h"

namespace cuda_ops
{

// Of each row: name, file, kernels, reason ("" where it could take the call), and the sum of 1: supports, 2: is fast,
// 4: is chosen.
using PathRows = std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<std::string>,
                            std::vector<std::string>, std::vector<int64_t>>;
#define CUDA_OPS_PATH_ROWS " -> (str[] name, str[] file, str[] kernels, str[] reason, int[] flags)"

cuda_ops_dtype path_dtype(at::ScalarType type);

// The facts given as capability, multiprocessors and bytes of shared memory a block.
cuda_ops_device_facts facts_of(at::IntArrayRef device);

[[noreturn]] void throw_no_tables();

// ask(reports, room, device) is a `cuda_ops_<op>_paths_cuda`; device: empty for the current one.
template <typename Ask>
PathRows path_rows(at::IntArrayRef device, const Ask &ask)
{
    std::array<cuda_ops_path_report, 32> reports{};
    const cuda_ops_device_facts facts = facts_of(device);
    const int count = ask(reports.data(), static_cast<int>(reports.size()), device.empty() ? nullptr : &facts);
    TORCH_CHECK(count >= 0, "explain: sizes are beyond the op's limits");
    TORCH_INTERNAL_ASSERT(count <= static_cast<int>(reports.size()));
    PathRows rows;
    for (int i = 0; i < count; i++) {
        const cuda_ops_path_report &report = reports[i];
        std::get<0>(rows).emplace_back(report.name);
        std::get<1>(rows).emplace_back(report.file);
        std::get<2>(rows).emplace_back(report.kernels);
        std::get<3>(rows).emplace_back(report.reason ? report.reason : "");
        std::get<4>(rows).push_back((report.supports ? 1 : 0) + (report.is_fast ? 2 : 0) + (report.chosen ? 4 : 0));
    }
    return rows;
}

} // namespace cuda_ops

// A build without CUDA has no tables.
#ifdef CUDA_OPS_WITH_CUDA
#define CUDA_OPS_PATHS(device, call)                                                                                   \
    ::cuda_ops::path_rows(                                                                                             \
        device, [&](cuda_ops_path_report *reports, int room, const cuda_ops_device_facts *facts) { return call; })
#else
#define CUDA_OPS_PATHS(device, call) (::cuda_ops::throw_no_tables(), ::cuda_ops::PathRows())
#endif
