// fold_batch_norm: folded_weight[o] = weight[o] * scale[o], folded_bias[o] = (bias[o] - mean[o]) * scale[o] +
// norm_bias[o], where scale[o] = norm_weight[o] / sqrt(variance[o] + eps).
// A warp or a block an output channel. Bound by latency: what it reads is asked of the L2 while the kernel before still
// runs, and loaded all at once; the scale is made while the first UNROLL elements a thread of the weight are on their
// way.
#include "cuda_ops/fold_batch_norm.h"

#include "common/common.cuh"
#include "common/launch.cuh"
#include "common/prefetch.cuh"
#include "common/value.cuh"

static constexpr int FOLD_THREADS = 256, FOLD_UNROLL = 8;
static constexpr int64_t FOLD_LONG_ROW = 1024; // from which on a block has a channel

// The norm's values of a channel; 1 or 0 where there are none.
struct FoldedNorm {
    double mean, variance, weight, bias;
};

__device__ __forceinline__ FoldedNorm load_norm(const cuda_ops_fold &f, int64_t o)
{
    if (f.statistics_dtype == CUDA_OPS_FLOAT32 && f.norm_dtype == CUDA_OPS_FLOAT32) {
        // Without a branch on a dtype between them, so that nothing waits for the first of the loads.
        const float mean = ((const float *)f.mean)[o], variance = ((const float *)f.variance)[o];
        const float weight = f.norm_weight ? ((const float *)f.norm_weight)[o] : 1.0f;
        const float bias = f.norm_bias ? ((const float *)f.norm_bias)[o] : 0.0f;
        return {mean, variance, weight, bias};
    }
    return {load_value(f.mean, f.statistics_dtype, o), load_value(f.variance, f.statistics_dtype, o),
            f.norm_weight ? load_value(f.norm_weight, f.norm_dtype, o) : 1.0,
            f.norm_bias ? load_value(f.norm_bias, f.norm_dtype, o) : 0.0};
}

__device__ __forceinline__ void prefetch_value(const void *values, cuda_ops_dtype dtype, int64_t index)
{
    const int size = dtype == CUDA_OPS_FLOAT64 ? 8 : dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    if (values)
        prefetch_global_l2((const char *)values + index * size);
}

// across: threads of a channel, a warp or the block.
template <typename T, typename W>
__global__ void __launch_bounds__(FOLD_THREADS)
    fold_batch_norm_kernel(T *folded_weight, T *folded_bias, const __grid_constant__ cuda_ops_fold f, int across)
{
    typedef accumulate_type<T> A;
    const int lane = (int)threadIdx.x % across, channels = FOLD_THREADS / across;
    const int64_t first = (int64_t)blockIdx.x * channels + (int)threadIdx.x / across;
    if (first < f.channels) {
        const char *const row = (const char *)((const W *)f.weight + first * f.count);
        const int64_t bytes = f.count * (int64_t)sizeof(W);
        for (int64_t at = (int64_t)lane * CACHE_LINE; at < bytes; at += (int64_t)across * CACHE_LINE)
            prefetch_global_l2(row + at);
        if (lane == 0) {
            prefetch_value(f.mean, f.statistics_dtype, first);
            prefetch_value(f.variance, f.statistics_dtype, first);
            prefetch_value(f.norm_weight, f.norm_dtype, first);
            prefetch_value(f.norm_bias, f.norm_dtype, first);
        }
    }
    wait_for_predecessor();
    release_successor();
    for (int64_t o = first; o < f.channels; o += (int64_t)gridDim.x * channels) {
        const W *const from = (const W *)f.weight + o * f.count;
        T *const to = folded_weight + o * f.count;
        const FoldedNorm norm = load_norm(f, o);
        double scale = 0;
        for (int64_t begin = lane; begin < f.count || begin == lane; begin += (int64_t)across * FOLD_UNROLL) {
            W raw[FOLD_UNROLL];
#pragma unroll
            for (int u = 0; u < FOLD_UNROLL; u++)
                if (begin + u * across < f.count)
                    raw[u] = from[begin + u * across];
            if (begin == lane)
                scale = norm.weight / sqrt(norm.variance + f.eps);
#pragma unroll
            for (int u = 0; u < FOLD_UNROLL; u++)
                if (begin + u * across < f.count)
                    to[begin + u * across] = store_from_accumulate<T>((A)load_as_accumulate(raw[u]) * (A)scale);
        }
        if (lane == 0) {
            const double before = (f.bias ? load_value(f.bias, f.weight_dtype, o) : 0.0) - norm.mean;
            folded_bias[o] = store_from_accumulate<T>((A)(before * scale + norm.bias));
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
    const int across = fold->count >= FOLD_LONG_ROW ? FOLD_THREADS : WARP_SIZE;
    const dim3 grid(clamp_grid(ceil_div(fold->channels, FOLD_THREADS / across))), block(FOLD_THREADS);
    CUDA_OPS_DISPATCH(dtype, T, {
        const auto kernel = same ? fold_batch_norm_kernel<T, T> : fold_batch_norm_kernel<T, float>;
        launch_dependent(kernel, grid, block, 0, stream, (T *)folded_weight, (T *)folded_bias, *fold, across);
        return launch_status();
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
