// Reductions: the launcher, which chooses the family (total.cu, extreme.cu, moments.cu); results of nothing.
#include "reduction/reduction.h"

#include <math.h>

#include "common/common.cuh"
#include "common/value.cuh"

static constexpr int FILL_THREADS = 256;

__global__ void __launch_bounds__(FILL_THREADS)
    reduction_of_nothing_kernel(void *output, int64_t count, double value, cuda_ops_dtype dtype)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count())
        store_value(output, dtype, i, value);
}

static bool is_extreme(cuda_ops_reduction_kind kind, double parameter)
{
    return (CUDA_OPS_AMAX <= kind && kind <= CUDA_OPS_ARGMIN) || (kind == CUDA_OPS_NORM && isinf(parameter));
}

extern "C" int64_t cuda_ops_reduction_workspace_cuda(cuda_ops_reduction_sizes sizes, cuda_ops_dtype dtype)
{
    if (sizes.batch == 0 || sizes.outer == 0 || sizes.cols == 0 || sizes.inner == 0)
        return 0;
    // A tensor that turns out not to be aligned is cut differently.
    int64_t most = 0;
    for (int count : {(int)(16 / dtype_size(dtype)), 1}) {
        const int64_t fold = sizes.inner > 1 ? fold_of(sizes, count) : 1;
        const int64_t parts = fold > 0 ? sizes.batch * plan_reduction(folded(sizes, fold), count).parts * fold : 0;
        most = parts > most ? parts : most;
    }
    return most > 1 ? most * sizes.outer * sizes.inner * PARTIAL_BYTES : 0;
}

extern "C" cuda_ops_status cuda_ops_reduction_cuda(void *output, void *workspace, const void *input,
                                                   cuda_ops_reduction_sizes sizes, cuda_ops_reduction_kind kind,
                                                   double parameter, cuda_ops_dtype dtype, cuda_ops_dtype output_dtype,
                                                   cuda_ops_stream stream)
{
    if (sizes.outer == 0 || sizes.inner == 0)
        return CUDA_OPS_SUCCESS;
    const bool indices = kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
    if (kind < CUDA_OPS_SUM || kind > CUDA_OPS_STD || (indices && sizes.batch != 1))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (sizes.batch == 0 || sizes.cols == 0) {
        if (is_extreme(kind, parameter))
            return CUDA_OPS_INVALID_ARGUMENT;
        const bool mean = kind == CUDA_OPS_MEAN || kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD;
        const double value = mean                                       ? (double)NAN
                             : kind == CUDA_OPS_PROD                    ? 1.0
                             : kind == CUDA_OPS_NORM && parameter < 0.0 ? (double)INFINITY
                                                                        : 0.0;
        const int64_t count = sizes.outer * sizes.inner;
        launch_dependent(reduction_of_nothing_kernel, dim3(clamp_grid(ceil_div(count, FILL_THREADS))),
                         dim3(FILL_THREADS), 0, stream, output, count, value, output_dtype);
        return launch_status();
    }
    const ReductionCall call = {output, workspace, input, sizes, kind, parameter, dtype, output_dtype, stream};
    if (is_extreme(kind, parameter))
        return reduction_extreme(call);
    return kind == CUDA_OPS_VAR || kind == CUDA_OPS_STD ? reduction_moments(call) : reduction_total(call);
}
