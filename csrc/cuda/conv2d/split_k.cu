// Split-K in conv2d: output = sum over splits of partial[split], in an order that their number decides.
//
// A lane per element (per four channels of a weight). Where there are several splits, 2, 4 or 8 of a block's eight warps
// take as many elements together, each every 2nd, 4th or 8th split, and their sums are then added in order through
// shared memory. Bound by memory: one read of the partial sums.
#include "conv2d/split_k.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "conv2d/relayout.h"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;

// Warps that take the same elements: a power of two, no more than splits.
static int warps_together(int64_t splits)
{
    int together = 1;
    while (together < WARPS && 2 * together <= splits)
        together *= 2;
    return together;
}

// Blocks for `count` lanes' work.
static dim3 grid_of(int64_t count, int together)
{
    return dim3(clamp_grid(ceil_div(count, WARP_SIZE * WARPS / together)));
}

template <typename T>
__global__ void conv2d_sum_splits_kernel(T *output, const accumulate_type<T> *partial, int64_t count, int64_t splits,
                                         int together)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int part = warp % together, of_block = WARP_SIZE * WARPS / together;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * of_block; first < count; first += (int64_t)gridDim.x * of_block) {
        const int64_t i = first + warp / together * WARP_SIZE + lane;
        A sum = 0;
        if (i < count)
#pragma unroll 8
            for (int64_t split = part; split < splits; split += together)
                sum += partial[split * count + i];
        sums[warp][lane] = sum;
        __syncthreads();
        if (part == 0 && i < count) {
            for (int w = 1; w < together; w++)
                sum += sums[warp + w][lane];
            output[i] = store_from_accumulate<T>(sum);
        }
        __syncthreads();
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_sum_weight_splits_kernel(T *weight, const float *partial, int64_t outs, int64_t group, int64_t group_taken,
                                    int64_t taps, int64_t channels, int64_t padded_channels, int64_t splits,
                                    int together, int channels_last, int by_four)
{
    __shared__ float4 sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int part = warp % together, of_block = WARP_SIZE * WARPS / together;
    const int64_t vectors = ceil_div(channels, 4), count = outs * taps * vectors,
                  split_size = outs * taps * padded_channels;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * of_block; first < count; first += (int64_t)gridDim.x * of_block) {
        const int64_t index = first + warp / together * WARP_SIZE + lane, row = index / vectors,
                      channel = (index - row * vectors) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (index < count)
#pragma unroll 4
            for (int64_t split = part; split < splits; split += together) {
                const float4 more = *(const float4 *)(partial + split * split_size + row * padded_channels + channel);
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
        sums[warp][lane] = sum;
        __syncthreads();
        if (part == 0 && index < count) {
            for (int w = 1; w < together; w++) {
                const float4 more = sums[warp + w][lane];
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
            const int64_t padded = row / taps, tap = row - padded * taps, in = padded % group;
            const int64_t o = padded / group * group_taken + in;
            if (in < group_taken && by_four) { // channels_last
                aligned_vector<T, 4> four;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    four.element[i] = store_from_accumulate<T>(values[i]);
                store_vector((aligned_vector<T, 4> *)(weight + (o * taps + tap) * channels + channel), four);
            } else if (in < group_taken) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (channel + i < channels)
                        weight[channels_last ? (o * taps + tap) * channels + channel + i
                                             : (o * channels + channel + i) * taps + tap] =
                            store_from_accumulate<T>(values[i]);
            }
        }
        __syncthreads();
    }
}

cuda_ops_status conv2d_sum_splits(void *output, const void *partial, int64_t count, int64_t splits,
                                  cuda_ops_dtype dtype, cudaStream_t stream)
{
    const int together = warps_together(splits);
    CUDA_OPS_DISPATCH(dtype, T,
                      launch_dependent(conv2d_sum_splits_kernel<T>, grid_of(count, together), THREADS, 0, stream,
                                       (T *)output, (const accumulate_type<T> *)partial, count, splits, together));
    return launch_status();
}

cuda_ops_status conv2d_sum_weight_splits(const ConvCall &call, const float *partial, int64_t padded_channels,
                                         int64_t splits)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t taps = s.kernel_height * s.kernel_width, outs = s.out_channels / s.groups;
    const int64_t channels = call.weight_outs ? call.weight_channels : s.in_channels / s.groups;
    const int64_t outs_taken = call.weight_outs ? call.weight_outs : outs;
    const int together = warps_together(splits);
    const bool last = conv2d_weight_is_channels_last(s),
               by_four = last && channels % 4 == 0 && call.dtype != CUDA_OPS_FLOAT64 && is_aligned_16(call.result);
    const dim3 grid = grid_of(s.out_channels * taps * ceil_div(channels, 4), together);
    CUDA_OPS_DISPATCH(call.dtype, T,
                      launch_dependent(conv2d_sum_weight_splits_kernel<T>, grid, THREADS, 0, call.stream,
                                       (T *)call.result, partial, s.out_channels, outs, outs_taken, taps, channels,
                                       padded_channels, splits, together, (int)last, (int)by_four));
    return launch_status();
}
