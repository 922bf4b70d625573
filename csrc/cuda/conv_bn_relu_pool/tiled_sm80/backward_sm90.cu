// Both gradients of conv_bn_relu_pool's tiled path in TF32 on Hopper in one kernel, by wgmma, for images of one tile and
// up to 32 -> 64 channels: dy, which convolve_sm90.cu and backward_weight_sm90.cu pass on by memory, stays in shared
// memory. A block takes an image at a time. A warpgroup makes dy of the convolution's output, which the copy engine has
// brought, and transposes the input, all of the next image loaded while this one is multiplied; another
// multiplies for the gradient of weight, with dy as fragments from registers, and one for that of input.
// Of an image's time the tensor cores' 4032 + 4800 cycles are half; the gradient of weight waits for its fragments
// (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/gradient_sm90.cuh"
#include "conv_bn_relu_pool/tiled_sm80/weight_sm90.cuh"

#include "ptx/arithmetic.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"

static constexpr int THREADS = 3 * WARPGROUP;
static constexpr int GRADIENTS = GRADIENT_WEIGHT_BYTES, TRANSPOSED = GRADIENTS + GRADIENT_STAGE;
static constexpr int OUTPUT = TRANSPOSED + TRANSPOSED_BYTES; // the convolution's, as it lies in memory
static constexpr int COEFFICIENTS = OUTPUT + SIDE * SIDE * WEIGHT_OUT * 4;
static constexpr int BARRIERS = COEFFICIENTS + 3 * WEIGHT_OUT * 4, SHARED_BYTES = BARRIERS + 5 * 8;
static_assert(GRADIENT_COLUMNS == WEIGHT_IN && GRADIENT_CHUNKS * DEPTH == WEIGHT_OUT, "both gradients of one dy");

struct wgmma_backward_arguments {
    tiled_problem problem;
    gradient_source gradient;
    const float *input, *weight;
    float *grad_input, *partial;
};

#if defined(CUDA_OPS_HOPPER_CODE)

static constexpr int PRODUCERS = WARPGROUP;
static constexpr int STEP = PRODUCERS / VECTORS, UNITS = (WINDOWS + STEP - 1) / STEP; // a thread's windows
static constexpr int SHARES = RASTER * 2 * (WEIGHT_IN / 4) / PRODUCERS;               // of the input that it transposes

// The pooled gradients of a producer's windows of an image in four channels.
struct window_gradients {
    float4 grad[UNITS];
    uint32_t argmax[UNITS];

    __device__ __forceinline__ void load(const gradient_source &source, int64_t image, const tiled_problem &p,
                                         int thread)
    {
        const int channel = thread % VECTORS * 4;
        const int64_t windows = image * p.pooled_height * p.pooled_width;
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int window = thread / VECTORS + i * STEP, row = window / (SIDE / 2), column = window % (SIDE / 2);
            const int64_t at = (windows + row * p.pooled_width + column) * p.out_channels + channel;
            const bool whole = channel < p.out_channels && row < p.pooled_height && column < p.pooled_width;
            grad[i] = whole ? __ldcs(reinterpret_cast<const float4 *>(source.grad_pooled + at))
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            argmax[i] = whole ? __ldcs(reinterpret_cast<const uint32_t *>(source.argmax + at)) : 0xffffffffu;
        }
    }
};

// What a producer transposes at a time: half a row of an image, in four channels.
__device__ __forceinline__ void load_share(float4 (&v)[8], const float *input, int64_t image, const tiled_problem &p,
                                           const transposed_share &share)
{
    const int y = share.row - 1;
    const bool exists = share.four * 4 < p.in_channels && y >= 0 && y < p.height;
    const float *const from = input + (image * p.height + y) * p.width * p.in_channels + share.four * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int x = share.half * 8 + i - 1;
        v[i] = exists && x >= 0 && x < p.width ? __ldg(reinterpret_cast<const float4 *>(from + x * p.in_channels))
                                               : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// dy of the producer's windows, rounded, to the rasters. The next window is loaded while one is made.
__device__ __forceinline__ void make_gradient(uint32_t raster, uint32_t output, uint32_t coefficients,
                                              const window_gradients &image, const tiled_problem &p, int thread)
{
    const int channel = thread % VECTORS * 4;
    if (channel >= p.out_channels)
        return;
    const float4 scale = ld_shared_v4_f32(coefficients + channel * 4);
    const float4 slope = ld_shared_v4_f32(coefficients + (WEIGHT_OUT + channel) * 4);
    const float4 offset = ld_shared_v4_f32(coefficients + (2 * WEIGHT_OUT + channel) * 4);
    float4 y[2][4];
    const auto load = [&](float4(&to)[4], int window) {
        const int first = min(window, WINDOWS - 1), row = first / (SIDE / 2) * 2, column = first % (SIDE / 2) * 2;
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[e] =
                ld_shared_v4_f32(output + (((row + e / 2) * p.width + column + e % 2) * p.out_channels + channel) * 4);
    };
    load(y[0], thread / VECTORS);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const int window = thread / VECTORS + i * STEP;
        if (i + 1 < UNITS)
            load(y[(i + 1) % 2], window + STEP);
        const int row = window / (SIDE / 2) * 2, column = window % (SIDE / 2) * 2;
        const float4 &grad = image.grad[i];
        const float4 dz = make_float4(scale.x * grad.x, scale.y * grad.y, scale.z * grad.z, scale.w * grad.w);
        float4 dy[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const auto make = [&](int byte, float value, float z, float by, float to_add) {
                const float made = fmaf(by, value, to_add);
                return (image.argmax[i] >> (8 * byte) & 255) == (uint32_t)e ? made + z : made;
            };
            const float4 &v = y[i % 2][e];
            dy[e] = rounded<true>(
                make_float4(make(0, v.x, dz.x, slope.x, offset.x), make(1, v.y, dz.y, slope.y, offset.y),
                            make(2, v.z, dz.z, slope.z, offset.z), make(3, v.w, dz.w, slope.w, offset.w)));
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (row + e / 2 < p.height && column + e % 2 < p.width)
                st_shared_v4_f32(raster + gradient_address<GRADIENT_RASTER>(
                                              (row + e / 2 + 1) * RASTER + column + e % 2 + 1, channel),
                                 dy[e]);
    }
}

#endif

__global__ void __launch_bounds__(THREADS, 1) wgmma_backward_kernel(const __grid_constant__ wgmma_backward_arguments a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(1024) unsigned char shared[];
    const int group = warp_uniform(threadIdx.x / WARPGROUP), lane = threadIdx.x % WARP_SIZE;
    const tiled_problem &p = a.problem;
    const uint32_t weights = shared_address(shared), raster = weights + GRADIENTS, transposed = weights + TRANSPOSED;
    const uint32_t output = weights + OUTPUT, coefficients = weights + COEFFICIENTS;
    const uint32_t output_full = weights + BARRIERS, gradient_full = output_full + 8, input_full = output_full + 16,
                   gradient_empty = output_full + 24, input_empty = output_full + 32;
    const int64_t first = blockIdx.x, step = gridDim.x;
    if (threadIdx.x == 0) {
        mbarrier_init(output_full, 1);
        mbarrier_init(gradient_full, PRODUCERS);
        mbarrier_init(input_full, PRODUCERS);
        mbarrier_init(gradient_empty, 2 * WARPGROUP / WARP_SIZE);
        mbarrier_init(input_empty, WARPGROUP / WARP_SIZE);
        fence_mbarrier_init();
    }
    zero_shared(shared + GRADIENTS, GRADIENT_STAGE); // what lies around an image stays so
    wait_for_predecessor();
    release_successor();
    stage_gradient_weight(weights, a.weight, p, 0);
    if (threadIdx.x < p.out_channels) {
        const float *const of[3] = {a.gradient.scale, a.gradient.slope, a.gradient.offset};
#pragma unroll
        for (int i = 0; i < 3; i++)
            st_shared(coefficients + (i * WEIGHT_OUT + threadIdx.x) * 4, __float_as_uint(of[i][threadIdx.x]));
    }
    fence_proxy_async();
    __syncthreads();
    if (group == 2) {
        setmaxnreg_dec<128>();
        // Opaque anew in each use: addresses that are kept from image to image would be spilled.
        const int thread = threadIdx.x - 2 * WARPGROUP;
        const auto start_output = [&](int64_t image) {
            if (thread == 0 && image < p.batch) {
                const int values = p.height * p.width * p.out_channels;
                mbarrier_arrive_expect_tx(output_full, values * 4);
                bulk_load(output, a.gradient.conv_output + image * values, values * 4, output_full);
            }
        };
        window_gradients gradients;
        float4 input[8];
        const auto start_image = [&](int64_t image) {
            start_output(image);
            if (image >= p.batch)
                return;
            constexpr int LINE = 128 / sizeof(float);
            const int64_t values = (int64_t)p.height * p.width * p.in_channels;
            for (int64_t at = thread * LINE; at < values; at += PRODUCERS * LINE)
                prefetch_global_l2(a.input + image * values + at); // of which a part is loaded later
            gradients.load(a.gradient, image, p, opaque(thread));
            load_share(input, a.input, image, p, share_of(opaque(thread)));
        };
        start_image(first);
        int n = 0;
        for (int64_t image = first; image < p.batch; image += step, n++) {
            if (n > 0)
                mbarrier_wait(input_empty, (n & 1) ^ 1);
#pragma unroll
            for (int s = 0; s < SHARES; s++) {
                const transposed_share share = share_of(opaque(thread) + s * PRODUCERS);
                if (s > 0)
                    load_share(input, a.input, image, p, share);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    input[i] = rounded<true>(input[i]);
                store_transposed(transposed, input, share);
            }
            fence_proxy_async();
            mbarrier_arrive(input_full);
            mbarrier_wait(output_full, n & 1);
            if (n > 0)
                mbarrier_wait(gradient_empty, (n & 1) ^ 1);
            make_gradient(raster, output, coefficients, gradients, p, opaque(thread));
            fence_proxy_async();
            mbarrier_arrive(gradient_full);
            bar_sync(1, PRODUCERS); // all have read the output
            start_image(image + step);
        }
    } else if (group == 0) {
        setmaxnreg_inc<208>();
        const int row_channel = threadIdx.x / WARP_SIZE * 16 + lane / 4, t = lane % 4;
        float sums[3][WEIGHT_COLUMNS / 2] = {};
        uint32_t at[4]; // dy of pixels 2 t - 2 to 2 t + 1 of a row's first eight
#pragma unroll
        for (int i = 0; i < 4; i++)
            at[i] = gradient_address<GRADIENT_RASTER>(RASTER - 1 + 2 * t + i, row_channel);
        int n = 0;
        for (int64_t image = first; image < p.batch; image += step, n++) {
            mbarrier_wait(input_full, n & 1);
            mbarrier_wait(gradient_full, n & 1);
            multiply_weight(sums, raster, at, transposed);
            if (lane == 0) {
                mbarrier_arrive(input_empty);
                mbarrier_arrive(gradient_empty);
            }
        }
        store_weight(a.partial + first * (WEIGHT_VECTORS * 4), sums, row_channel, t);
    } else {
        const int channel = threadIdx.x % WARPGROUP / WARP_SIZE * 8 + lane / 4;
        int n = 0;
        for (int64_t image = first; image < p.batch; image += step, n++) {
            mbarrier_wait(gradient_full, n & 1);
            float d[GRADIENT_PIXELS / 2];
            multiply_gradient(d, weights, raster, lane);
            if (lane == 0)
                mbarrier_arrive(gradient_empty);
            store_gradient(a.grad_input, d, p, {image, 0, 0}, channel, lane % 4);
        }
    }
#endif
}

bool wgmma_backward_fits(const tiled_problem &p)
{
    const Device device = current_device();
    return HAS_SM90A && device.capability == 90 && device.shared_bytes >= SHARED_BYTES && p.height <= SIDE &&
           p.width <= SIDE && p.in_channels <= WEIGHT_IN && p.out_channels <= WEIGHT_OUT;
}

cuda_ops_status wgmma_backward(float *grad_input, float4 *partial, const gradient_source &source, const float *input,
                               const float *weight, const tiled_problem &p, int64_t blocks, cudaStream_t stream)
{
    const wgmma_backward_arguments a = {p, source, input, weight, grad_input, (float *)partial};
    allow_shared_memory(wgmma_backward_kernel, SHARED_BYTES);
    launch_dependent(wgmma_backward_kernel, (unsigned int)blocks, THREADS, SHARED_BYTES, stream, a);
    return launch_status();
}
