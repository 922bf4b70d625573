// Split-K in conv2d: output = sum over splits of partial[split], in the order of the splits.
//
// A lane per element (per four channels of a weight); where there are many splits, each of a block's eight warps takes
// every 8th, and the eight sums are then added in order through shared memory. Bound by memory: one read of the partial
// sums.
#include "conv2d/split_k.h"

#include "common/common.cuh"
#include "conv2d/relayout.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

template <typename T>
__global__ void conv2d_sum_splits_kernel(T *output, const accumulate_type<T> *partial, int64_t count, int64_t splits)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t i = first + lane;
        A sum = 0;
        if (i < count)
#pragma unroll 8
            for (int64_t split = warp; split < splits; split += WARPS)
                sum += partial[split * count + i];
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && i < count) {
            for (int w = 1; w < WARPS; w++)
                sum += sums[w][lane];
            output[i] = store_from_accumulate<T>(sum);
        }
        __syncthreads();
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_sum_weight_splits_kernel(T *weight, const float *partial, int64_t outs, int64_t group, int64_t group_taken,
                                    int64_t taps, int64_t channels, int64_t padded_channels, int64_t splits,
                                    int channels_last)
{
    __shared__ float4 sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t vectors = ceil_div(channels, 4), count = outs * taps * vectors,
                  split_size = outs * taps * padded_channels;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t index = first + lane, row = index / vectors, channel = (index - row * vectors) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (index < count)
#pragma unroll 4
            for (int64_t split = warp; split < splits; split += WARPS) {
                const float4 more = *(const float4 *)(partial + split * split_size + row * padded_channels + channel);
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && index < count) {
            const int others = splits < WARPS ? (int)splits : WARPS;
            for (int w = 1; w < others; w++) {
                const float4 more = sums[w][lane];
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
            const int64_t padded = row / taps, tap = row - padded * taps, in = padded % group;
            const int64_t o = padded / group * group_taken + in;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (in < group_taken && channel + i < channels)
                    weight[channels_last ? (o * taps + tap) * channels + channel + i
                                         : (o * channels + channel + i) * taps + tap] =
                        store_from_accumulate<T>(values[i]);
        }
        __syncthreads();
    }
}

cuda_ops_status conv2d_sum_splits(void *output, const void *partial, int64_t count, int64_t splits,
                                  cuda_ops_dtype dtype, cudaStream_t stream)
{
    const dim3 grid(clamp_grid(ceil_div(count, WARP_SIZE)));
    CUDA_OPS_DISPATCH(dtype, T,
                      launch_dependent(conv2d_sum_splits_kernel<T>, grid, THREADS, 0, stream, (T *)output,
                                       (const accumulate_type<T> *)partial, count, splits));
    return launch_status();
}

cuda_ops_status conv2d_sum_weight_splits(const ConvCall &call, const float *partial, int64_t padded_channels,
                                         int64_t splits)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t taps = s.kernel_height * s.kernel_width, outs = s.out_channels / s.groups;
    const int64_t channels = call.weight_outs ? call.weight_channels : s.in_channels / s.groups;
    const int64_t outs_taken = call.weight_outs ? call.weight_outs : outs;
    const dim3 grid(clamp_grid(ceil_div(s.out_channels * taps * ceil_div(channels, 4), WARP_SIZE)));
    CUDA_OPS_DISPATCH(call.dtype, T,
                      launch_dependent(conv2d_sum_weight_splits_kernel<T>, grid, THREADS, 0, call.stream,
                                       (T *)call.result, partial, s.out_channels, outs, outs_taken, taps, channels,
                                       padded_channels, splits, (int)conv2d_weight_is_channels_last(s)));
    return launch_status();
}
