// Winograd's transforms of weights: U = G g G^T of each 3 x 3 kernel g, and grad_weight = G^T U G (transforms.cuh).
//
// A block of 256 threads takes 8 x 32 kernels, one a thread. They pass through shared memory: in a weight they lie by
// output channel, input channel and tap, in its transform by the channel in which a row of the GEMM's operand ends. Bound
// by memory: 36 numbers (F(4x4)) or 16 for 9.
#include "common/common.cuh"
#include "conv2d/relayout.h"
#include "conv2d/winograd/parts.h"
#include "conv2d/winograd/transforms.cuh"

static constexpr int SIDE_S = 8, SIDE_R = 32, THREADS = SIDE_S * SIDE_R, TAPS = 9;
// Rows of 33, and taps four banks apart: few of the threads that copy a run of taps and channels meet in a bank.
static constexpr int ROW = SIDE_R + 1, PLANE = 292;
static_assert(PLANE >= SIDE_S * ROW && PLANE % 32 == 4, "four banks apart");

// The weight's sizes, and those of the transformed weight, [point][s][r].
struct WeightSizes {
    int out_channels, in_channels; // of all groups, and of one
    int s, r, padded_s, padded_r;
    int tiles_r, tiles; // of 8 x 32 kernels
    bool channels_last;
};

// Visits the elements of a tile of kernels, threads side by side those side by side in memory. visit(offset, place):
// where one is in the weight, and in the tile [tap][s][r]. SWAPPED: s is the output channel, else the input channel.
template <bool SWAPPED, typename Visit>
__device__ __forceinline__ void for_elements(const WeightSizes &w, int first_s, int first_r, Visit visit)
{
    constexpr int INS = SWAPPED ? SIDE_R : SIDE_S;
    const int first_out = SWAPPED ? first_s : first_r, first_in = SWAPPED ? first_r : first_s;
#pragma unroll
    for (int round = 0; round < TAPS; round++) {
        const int i = round * THREADS + (int)threadIdx.x, out = i / (INS * TAPS), rest = i % (INS * TAPS);
        const int in = w.channels_last ? rest % INS : rest / TAPS, tap = w.channels_last ? rest / INS : rest % TAPS;
        if (first_out + out >= w.out_channels || first_in + in >= w.in_channels)
            continue;
        const int64_t kernel = (int64_t)(first_out + out) * w.in_channels;
        const int64_t offset = w.channels_last ? kernel * TAPS + (int64_t)tap * w.in_channels + first_in + in
                                               : (kernel + first_in + in) * TAPS + tap;
        visit(offset, tap * PLANE + (SWAPPED ? out * ROW + in : in * ROW + out));
    }
}

// SWAPPED, for the gradient of input: the kernel is turned by 180 degrees, too.
template <int POINTS, bool SWAPPED>
__global__ void __launch_bounds__(THREADS)
    conv2d_winograd_weight_kernel(float *transformed, const float *weight, const __grid_constant__ WeightSizes w)
{
    __shared__ float tile[TAPS * PLANE];
    const int64_t plane = (int64_t)w.padded_s * w.padded_r;
    const int r = threadIdx.x % SIDE_R, s = threadIdx.x / SIDE_R;
    wait_for_predecessor();
    release_successor();
    for (int block = blockIdx.x; block < w.tiles; block += gridDim.x) {
        const int first_s = block / w.tiles_r * SIDE_S, first_r = block % w.tiles_r * SIDE_R;
        for_elements<SWAPPED>(w, first_s, first_r, [&](int64_t offset, int place) { tile[place] = weight[offset]; });
        __syncthreads();
        if (first_s + s < w.padded_s && first_r + r < w.padded_r) {
            const bool inside = first_s + s < w.s && first_r + r < w.r;
            float taps[3][3], points[POINTS][POINTS];
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                const int from = SWAPPED ? TAPS - 1 - tap : tap;
                taps[tap / 3][tap % 3] = inside ? tile[from * PLANE + s * ROW + r] : 0.0f;
            }
            transform(points, taps);
            float *const to = transformed + (int64_t)(first_s + s) * w.padded_r + first_r + r;
#pragma unroll
            for (int point = 0; point < POINTS * POINTS; point++)
                to[point * plane] = points[point / POINTS][point % POINTS];
        }
        __syncthreads();
    }
}

template <int POINTS>
__global__ void __launch_bounds__(THREADS)
    conv2d_winograd_grad_weight_kernel(float *grad_weight, const float *transformed,
                                       const __grid_constant__ WeightSizes w, bool add)
{
    __shared__ float tile[TAPS * PLANE];
    const int64_t plane = (int64_t)w.padded_s * w.padded_r;
    const int r = threadIdx.x % SIDE_R, s = threadIdx.x / SIDE_R;
    wait_for_predecessor();
    release_successor();
    for (int block = blockIdx.x; block < w.tiles; block += gridDim.x) {
        const int first_s = block / w.tiles_r * SIDE_S, first_r = block % w.tiles_r * SIDE_R;
        if (first_s + s < w.s && first_r + r < w.r) {
            const float *const from = transformed + (int64_t)(first_s + s) * w.padded_r + first_r + r;
            float points[POINTS][POINTS], taps[3][3];
#pragma unroll
            for (int point = 0; point < POINTS * POINTS; point++)
                points[point / POINTS][point % POINTS] = from[point * plane];
            transform(taps, points);
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                tile[tap * PLANE + s * ROW + r] = taps[tap / 3][tap % 3];
        }
        __syncthreads();
        for_elements<false>(w, first_s, first_r, [&](int64_t offset, int place) {
            grad_weight[offset] = add ? grad_weight[offset] + tile[place] : tile[place];
        });
        __syncthreads();
    }
}

static WeightSizes sizes_of(const ConvCall &call)
{
    const bool swapped = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    WeightSizes w = {};
    w.out_channels = (int)call.sizes.out_channels;
    w.in_channels = (int)(call.sizes.in_channels / call.sizes.groups);
    w.s = swapped ? w.out_channels : w.in_channels;
    w.r = swapped ? w.in_channels : w.out_channels;
    w.padded_s = (int)conv2d_winograd_padded(w.s);
    w.padded_r = (int)conv2d_winograd_padded(w.r);
    w.tiles_r = (int)ceil_div(w.padded_r, SIDE_R);
    w.tiles = w.tiles_r * (int)ceil_div(w.padded_s, SIDE_S);
    w.channels_last = conv2d_weight_is_channels_last(call.sizes);
    return w;
}

cuda_ops_status conv2d_winograd_transform_weight(float *transformed, const ConvCall &call, int tile)
{
    const WeightSizes w = sizes_of(call);
    const bool swapped = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT;
    const auto kernel =
        tile == 4 ? (swapped ? conv2d_winograd_weight_kernel<6, true> : conv2d_winograd_weight_kernel<6, false>)
                  : (swapped ? conv2d_winograd_weight_kernel<4, true> : conv2d_winograd_weight_kernel<4, false>);
    launch_dependent(kernel, dim3(clamp_grid(w.tiles)), THREADS, 0, call.stream, transformed,
                     (const float *)call.weight, w);
    return launch_status();
}

cuda_ops_status conv2d_winograd_transform_grad_weight(float *grad_weight, const float *transformed,
                                                      const ConvCall &call, int tile, bool add)
{
    const WeightSizes w = sizes_of(call);
    launch_dependent(tile == 4 ? conv2d_winograd_grad_weight_kernel<6> : conv2d_winograd_grad_weight_kernel<4>,
                     dim3(clamp_grid(w.tiles)), THREADS, 0, call.stream, grad_weight, transformed, w, add);
    return launch_status();
}
