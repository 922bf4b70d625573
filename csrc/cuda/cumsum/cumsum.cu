// cumsum: output[c] = input[0] + ... + input[c] along a dimension; backwards if `reverse`. Short rows (inner == 1), long
// ones, and columns (inner > 1) have kernels of their own. Bound by memory: one read and one write; rows of parts that are
// larger than the L2 cache are read twice.
#include "cuda_ops/cumsum.h"

#include "common/common.cuh"
#include "common/device.h"
#include "cumsum/columns.cuh"
#include "cumsum/long_rows.cuh"
#include "cumsum/short_rows.cuh"

static int64_t chains_bytes(const Chains &chains, cuda_ops_dtype dtype)
{
    return chains.parts > 1 ? 16 + chains.sums() * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

template <typename T>
static cuda_ops_status cumsum_rows(T *output, void *workspace, const T *input, int64_t outer, int64_t cols,
                                   bool reverse, bool aligned, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size, BYTES = ROW_BUFFERS * CHUNK_BYTES;
    const RowPlan plan = plan_short_rows(outer, cols, reverse, aligned, SIZE);
    if (plan.chunks > 0) {
        if (allow_shared_memory(cumsum_short_rows_kernel<T>, BYTES) != cudaSuccess)
            return launch_status();
        const int64_t resident =
            (int64_t)current_device().multiprocessors * active_blocks(cumsum_short_rows_kernel<T>, THREADS, BYTES);
        launch_dependent(cumsum_short_rows_kernel<T>,
                         dim3((unsigned int)(plan.chunks < resident ? plan.chunks : resident)), dim3(THREADS), BYTES,
                         stream, output, input, plan);
        return launch_status();
    }
    const LongRowPlan rows = plan_long_rows(outer, cols, reverse, aligned, SIZE);
    const dim3 grid(clamp_grid(outer * rows.parts));
    if (rows.parts > 1)
        launch_dependent(sum_parts_kernel<T>, grid, dim3(THREADS), 0, stream, (A *)workspace, input, rows);
    launch_dependent(cumsum_long_rows_kernel<T>, grid, dim3(THREADS), 0, stream, output, (const A *)workspace, input,
                     rows);
    return launch_status();
}

template <typename T, int COUNT>
static cuda_ops_status cumsum_columns(T *output, void *workspace, const T *input, const ColumnPlan &plan,
                                      cuda_ops_dtype dtype, cudaStream_t stream)
{
    const int shared_bytes = COUNT > 1 ? COLUMN_BUFFERS * CHUNK_BYTES : 0;
    const int64_t bytes = chains_bytes(plan.chains, dtype), units = plan.chains.chains * plan.chains.parts;
    const auto kernel = cumsum_columns_kernel<T, COUNT>;
    if (allow_shared_memory(kernel, shared_bytes) != cudaSuccess ||
        (bytes > 0 && cudaMemsetAsync(workspace, 0xff, (size_t)bytes, stream) != cudaSuccess))
        return launch_status();
    const int64_t resident = (int64_t)current_device().multiprocessors * active_blocks(kernel, THREADS, shared_bytes);
    kernel<<<(unsigned int)(units < resident ? units : resident), THREADS, shared_bytes, stream>>>(output, workspace,
                                                                                                   input, plan);
    return launch_status();
}

template <typename T>
static cuda_ops_status cumsum(T *output, void *workspace, const T *input, int64_t outer, int64_t cols, int64_t inner,
                              bool reverse, cuda_ops_dtype dtype, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const bool aligned = is_aligned_16(output) && is_aligned_16(input);
    if (inner == 1)
        return cumsum_rows(output, workspace, input, outer, cols, reverse, aligned, stream);
    const int count = aligned && inner % SIZE == 0 ? SIZE : 1;
    const ColumnPlan plan = plan_columns(outer, cols, inner, reverse, count);
    if (count > 1)
        return cumsum_columns<T, SIZE>(output, workspace, input, plan, dtype, stream);
    return cumsum_columns<T, 1>(output, workspace, input, plan, dtype, stream);
}

extern "C" int64_t cuda_ops_cumsum_workspace_cuda(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return 0;
    const int size = (int)(16 / dtype_size(dtype));
    if (inner == 1) {
        if (plan_short_rows(outer, cols, false, true, size).chunks > 0)
            return 0;
        const int64_t parts = plan_long_rows(outer, cols, false, true, size).parts;
        return parts > 1 ? outer * parts * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
    }
    int64_t most = 0;
    for (int count : {size, 1}) { // misaligned arrays are cut differently
        const int64_t bytes = chains_bytes(plan_columns(outer, cols, inner, false, count).chains, dtype);
        most = bytes > most ? bytes : most;
    }
    return most;
}

extern "C" cuda_ops_status cuda_ops_cumsum_cuda(void *output, void *workspace, const void *input, int64_t outer,
                                                int64_t cols, int64_t inner, int reverse, cuda_ops_dtype dtype,
                                                cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T,
        return cumsum((T *)output, workspace, (const T *)input, outer, cols, inner, reverse != 0, dtype, stream));
    return CUDA_OPS_SUCCESS;
}
