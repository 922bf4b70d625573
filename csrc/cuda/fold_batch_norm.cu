// fold_batch_norm: folded_weight[o] = weight[o] * scale[o], folded_bias[o] = (bias[o] - mean[o]) * scale[o] +
// norm_bias[o], where scale[o] = norm_weight[o] / sqrt(variance[o] + eps).
// A block an output channel. Bound by latency for a layer's weight, which stays in the L2: the scale, then a row of
// the weight with UNROLL elements a thread in flight.
#include "cuda_ops/fold_batch_norm.h"

#include "common/common.cuh"
#include "common/launch.cuh"
#include "common/value.cuh"

static constexpr int FOLD_THREADS = 256;

template <typename T, typename W>
__global__ void __launch_bounds__(FOLD_THREADS)
    fold_batch_norm_kernel(T *folded_weight, T *folded_bias, const __grid_constant__ cuda_ops_fold f)
{
    typedef accumulate_type<T> A;
    wait_for_predecessor();
    release_successor();
    for (int64_t o = blockIdx.x; o < f.channels; o += gridDim.x) {
        const double variance = load_value(f.variance, f.statistics_dtype, o);
        const double scale =
            (f.norm_weight ? load_value(f.norm_weight, f.norm_dtype, o) : 1.0) / sqrt(variance + f.eps);
        const W *const from = (const W *)f.weight + o * f.count;
        T *const to = folded_weight + o * f.count;
#pragma unroll 8
        for (int64_t i = threadIdx.x; i < f.count; i += FOLD_THREADS)
            to[i] = store_from_accumulate<T>((A)load_as_accumulate(from[i]) * (A)scale);
        if (threadIdx.x == 0) {
            const double before =
                (f.bias ? load_value(f.bias, f.weight_dtype, o) : 0.0) - load_value(f.mean, f.statistics_dtype, o);
            const double lift = f.norm_bias ? load_value(f.norm_bias, f.norm_dtype, o) : 0.0;
            folded_bias[o] = store_from_accumulate<T>((A)(before * scale + lift));
        }
    }
}

extern "C" cuda_ops_status cuda_ops_fold_batch_norm_cuda(void *folded_weight, void *folded_bias,
                                                         const cuda_ops_fold *fold, cuda_ops_dtype dtype,
                                                         cuda_ops_stream stream)
{
    if (fold->channels == 0)
        return CUDA_OPS_SUCCESS;
    const bool same = fold->weight_dtype == dtype;
    const bool is_half = dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16;
    if (!same && !(is_half && fold->weight_dtype == CUDA_OPS_FLOAT32))
        return CUDA_OPS_INVALID_ARGUMENT;
    const dim3 grid(clamp_grid(fold->channels)), block(FOLD_THREADS);
    CUDA_OPS_DISPATCH(dtype, T, {
        const auto kernel = same ? fold_batch_norm_kernel<T, T> : fold_batch_norm_kernel<T, float>;
        launch_dependent(kernel, grid, block, 0, stream, (T *)folded_weight, (T *)folded_bias, *fold);
        return launch_status();
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
