// What the tensor-core paths of conv2d do beside their products, on every device that has such a path: weights in
// another order, and the sum of a weight gradient's pieces. Bound by memory.
#include "conv2d/relayout.h"

static constexpr int THREADS = 256;
static constexpr int PATCH = 32, PATCH_ROWS = 8;

// Through patches in shared memory: read along the axis that lies closer in `from`, written along b.
template <typename T>
__global__ void __launch_bounds__(PATCH *PATCH_ROWS)
    conv2d_relayout_kernel(T *to, const T *from, const __grid_constant__ Relayout r)
{
    __shared__ T patch[PATCH][PATCH + 1];
    const bool along_a = r.a_size < r.b_size;
    const int64_t across = ceil_div(r.b, PATCH), patches = across * ceil_div(r.a, PATCH);
    const int x = threadIdx.x % PATCH, y = threadIdx.x / PATCH;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < patches * r.t; index += gridDim.x) {
        const int64_t t = index / patches, a = index % patches / across * PATCH, b = index % patches % across * PATCH;
#pragma unroll
        for (int i = y; i < PATCH; i += PATCH_ROWS) {
            const int da = along_a ? x : i, db = along_a ? i : x;
            if (a + da < r.a && b + db < r.b)
                patch[da][db] = from[(a + da) * r.a_size + t * r.t_size + (b + db) * r.b_size];
        }
        __syncthreads();
#pragma unroll
        for (int i = y; i < PATCH; i += PATCH_ROWS)
            if (a + i < r.a && b + x < r.b)
                to[((a + i) * r.t + t) * r.pitch + b + x] = patch[i][x];
        __syncthreads();
    }
}

// weight = sum over pieces, in order, of partial[piece][o][tap][width] (of which the first `channels` count). Four
// channels a thread; the threads of a block that are 32 apart take every 8th piece where there are many.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv2d_sum_pieces_kernel(T *weight, const float *partial, int64_t outs, int64_t taps, int64_t channels,
                             int64_t width, int64_t pieces, int channels_last)
{
    constexpr int WARPS = THREADS / WARP_SIZE;
    __shared__ float4 sums[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t fours = channels / 4, count = outs * taps * fours, piece_size = outs * taps * width;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t index = first + lane, line = index / fours, channel = (index - line * fours) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (index < count)
#pragma unroll 4
            for (int64_t piece = warp; piece < pieces; piece += WARPS) {
                const float4 more = *(const float4 *)(partial + piece * piece_size + line * width + channel);
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && index < count) {
            const int others = pieces < WARPS ? (int)pieces : WARPS;
            for (int w = 1; w < others; w++) {
                const float4 more = sums[w][lane];
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
            const float values[4] = {sum.x, sum.y, sum.z, sum.w};
            const int64_t o = line / taps, tap = line - o * taps;
#pragma unroll
            for (int i = 0; i < 4; i++)
                weight[channels_last ? line * channels + channel + i : (o * channels + channel + i) * taps + tap] =
                    store_from_accumulate<T>(values[i]);
        }
        __syncthreads();
    }
}

cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &r, cuda_ops_dtype dtype,
                                cudaStream_t stream)
{
    const dim3 grid(clamp_grid(ceil_div(r.a, PATCH) * ceil_div(r.b, PATCH) * r.t));
    CUDA_OPS_DISPATCH(
        dtype, T,
        launch_dependent(conv2d_relayout_kernel<T>, grid, PATCH * PATCH_ROWS, 0, stream, (T *)to, (const T *)from, r));
    return launch_status();
}

cuda_ops_status conv2d_sum_pieces(void *weight, const float *partial, const cuda_ops_conv2d_sizes &s, int64_t width,
                                  int64_t pieces, cuda_ops_dtype dtype, cudaStream_t stream)
{
    const int64_t taps = s.kernel_height * s.kernel_width, channels = s.in_channels / s.groups;
    const dim3 grid(clamp_grid(ceil_div(s.out_channels * taps * channels / 4, WARP_SIZE)));
    CUDA_OPS_DISPATCH(dtype, T,
                      launch_dependent(conv2d_sum_pieces_kernel<T>, grid, THREADS, 0, stream, (T *)weight, partial,
                                       s.out_channels, taps, channels, width, pieces,
                                       (int)conv2d_weight_is_channels_last(s)));
    return launch_status();
}
