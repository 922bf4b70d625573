// Tables of paths, by which an op with several kernels chooses one (cuda_ops/paths.h). What a call is stands in the
// op's paths.h; the table, and the launchers that call run_path, path_workspace or report_paths, in <op>.cu.
#ifndef CUDA_OPS_COMMON_PATHS_H
#define CUDA_OPS_COMMON_PATHS_H

#include <stddef.h>
#include <string.h>

#include <atomic>

#include "common/device.h"
#include "cuda_ops/paths.h"

// Yes, or a static string that says why not.
struct Answer {
    const char *why_not;
    constexpr operator bool() const
    {
        return why_not == nullptr;
    }
};
static constexpr Answer YES = {nullptr};
static constexpr Answer no(const char *why)
{
    return {why};
}

// Answers that several tables give.
static constexpr Answer NEEDS_80 = {"needs compute capability 8.0 or later"};
static constexpr Answer NEEDS_90 = {"needs compute capability 9.0"};
static constexpr Answer NEEDS_HALVES = {"takes float16 and bfloat16 alone"};
static constexpr Answer NEEDS_ALIGNMENT = {"a tensor is not aligned to 16 bytes"};
static constexpr Answer NOT_COMPILED = {"this build has no code for sm_90a"};

// A row. Pointers in a call are NULL where only its sizes are asked about, and count as aligned then.
template <typename Call>
struct Path {
    const char *name, *file, *kernels; // cuda_ops_path_report's
    Answer (*supports)(const Call &call, const Device &device);
    Answer (*is_fast)(const Call &call, const Device &device);    // NULL: wherever it is supported
    int64_t (*workspace)(const Call &call, const Device &device); // bytes; NULL: none
    cuda_ops_status (*launch)(const Call &call, const Device &device);
};

// What an op's environment variable said when it was read last: a row's index, or one of these.
struct ForcedPath {
    enum { NONE = -1, UNKNOWN = -2 };

    const char *variable;                // CUDA_OPS_<OP>_PATH
    std::atomic<unsigned int> known = 0; // of which generation (its upper bits), and the index + 2

    // The index of the row whose name is in the environment; name(i): of row i of `count`.
    template <typename Name>
    int row(int count, Name name)
    {
        const unsigned int now = generation(), last = known.load(std::memory_order_relaxed);
        if (last >> 8 == now)
            return (int)(last & 255) - 2;
        const char *const value = read();
        int found = value ? UNKNOWN : NONE;
        for (int i = 0; i < count && value; i++)
            if (strcmp(name(i), value) == 0)
                found = i;
        known.store(now << 8 | (unsigned int)(found + 2), std::memory_order_relaxed);
        return found;
    }

  private:
    static unsigned int generation(); // how often the environment was to be read again, from 1 on
    const char *read() const;         // NULL: unset or empty
};

template <typename Call, int COUNT>
struct PathTable {
    ForcedPath forced;
    Path<Call> rows[COUNT];

    int forced_row()
    {
        return forced.row(COUNT, [&](int i) { return rows[i].name; });
    }

    // Whether row i takes the call, where `wanted` is the row that is forced, or NONE.
    bool takes(int i, int wanted, const Call &call, const Device &device) const
    {
        const Path<Call> &row = rows[i];
        return (wanted == ForcedPath::NONE ? !row.is_fast || row.is_fast(call, device) : wanted == i) &&
               row.supports(call, device);
    }
};

// The first row from `from` on that takes the call; COUNT where none does.
template <typename Call, int COUNT>
static int find_path(PathTable<Call, COUNT> &table, const Call &call, const Device &device, int from = 0)
{
    const int wanted = table.forced_row();
    while (from < COUNT && !table.takes(from, wanted, call, device))
        from++;
    return from;
}

template <typename Call, int COUNT>
static cuda_ops_status no_path(PathTable<Call, COUNT> &table)
{
    const int wanted = table.forced_row();
    return wanted == ForcedPath::NONE      ? CUDA_OPS_INVALID_ARGUMENT
           : wanted == ForcedPath::UNKNOWN ? CUDA_OPS_UNKNOWN_PATH
                                           : CUDA_OPS_PATH_CANNOT;
}

// A path may find at its launch that it cannot take the call after all (a driver without tensor maps); then the next
// one does.
template <typename Call, int COUNT>
static cuda_ops_status run_path(PathTable<Call, COUNT> &table, const Call &call)
{
    const Device device = current_device();
    for (int i = find_path(table, call, device); i < COUNT; i = find_path(table, call, device, i + 1)) {
        const cuda_ops_status status = table.rows[i].launch(call, device);
        if (status != CUDA_OPS_INVALID_ARGUMENT)
            return status;
    }
    return no_path(table);
}

// Enough for every row that may take the call: the pointers, unknown here, may be less aligned than assumed, and the
// call then falls to a later row.
template <typename Call, int COUNT>
static int64_t path_workspace(PathTable<Call, COUNT> &table, const Call &call)
{
    const Device device = current_device();
    int64_t bytes = 0;
    for (int i = find_path(table, call, device); i < COUNT; i = find_path(table, call, device, i + 1))
        if (table.rows[i].workspace) {
            const int64_t wanted = table.rows[i].workspace(call, device);
            bytes = wanted > bytes ? wanted : bytes;
        }
    return bytes;
}

// Fills in what there is `room` for, and returns how many rows the table has. device: NULL for the current one.
template <typename Call, int COUNT>
static int report_paths(cuda_ops_path_report *reports, int room, PathTable<Call, COUNT> &table, const Call &call,
                        const cuda_ops_device_facts *device)
{
    const Device on = device ? *device : current_device();
    const int chosen = find_path(table, call, on);
    for (int i = 0; i < COUNT && i < room; i++) {
        const Path<Call> &row = table.rows[i];
        const Answer supports = row.supports(call, on);
        const Answer is_fast = !supports ? no(nullptr) : row.is_fast ? row.is_fast(call, on) : YES;
        reports[i] = {row.name,    row.file,
                      row.kernels, supports ? is_fast.why_not : supports.why_not,
                      supports,    supports && is_fast,
                      i == chosen};
    }
    return COUNT;
}

#endif
