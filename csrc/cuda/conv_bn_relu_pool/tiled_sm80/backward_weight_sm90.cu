// The gradient of weight in conv_bn_relu_pool's tiled path in TF32 on Hopper, by wgmma with pixels as k:
//     dw[64 out][tap row, 32 in][tap column] = sum over pixels q of dy[q - tap column][out] * input[q + tap row][in]
// of tiles of 14 x 14 pixels of dy in rasters 16 wide. wgmma's right operand has k side by side, so the input is
// transposed to [row][in channel][16 pixels]: a tap row is the next 32 of its rows, and one product makes all three.
// Tap columns would be shifts by single pixels, which a descriptor cannot have: they are taken from dy, the left
// operand, whose fragments come from registers. A thread's two k are neighbours in a row, so that four loads serve three
// taps. One warpgroup multiplies, and keeps all sums; two make dy of the convolution's output, which they also store
// where the gradient of input wants it, and transpose the input, which TMA has padded and rounded.
// Bound by memory: 1.4 times what forward stored, and dy (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/tiled_sm80/weight_sm90.cuh"

#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"

static constexpr int PRODUCERS = 2 * WARPGROUP;
// dy: [32 channels of two][2 pixels of zeros, then 14 rows][channel], vectors xored with the pixel. The last two
// columns of a row are zeros, and so what is left of the next row's first pixel.
static constexpr int LEAD = 2, GRADIENT_HALF = (LEAD + SIDE * RASTER) * PIXEL_BYTES, GRADIENT_BYTES = 2 * GRADIENT_HALF;
static constexpr int TRANSPOSED = BOX_BYTES, GRADIENTS = TRANSPOSED + 2 * TRANSPOSED_BYTES;
static constexpr int BARRIERS = GRADIENTS + 2 * GRADIENT_BYTES, SHARED_BYTES = BARRIERS + 5 * 8;
static_assert(RASTER * 2 * (WEIGHT_IN / 4) == PRODUCERS, "a thread transposes eight pixels of four channels");

struct wgmma_weight_arguments {
    tiled_problem problem;
    wgmma_tiling tiles;
    int out_kinds, in_kinds; // groups of WEIGHT_OUT and WEIGHT_IN channels
    gradient_source gradient;
    float *partial;
};

#if defined(CUDA_OPS_HOPPER_CODE)

// A window of y in four channels, its pooled gradient and where that goes.
struct gradient_window {
    float4 y[4], grad;
    uint32_t argmax;
};

struct gradient_maker {
    float4 scale, slope, offset;
    int channel; // the first of four
    bool exists;

    // Where a window begins in the image, and in its tile.
    struct place {
        int64_t image;
        int y, x, row, column;
    };

    static __device__ __forceinline__ place place_of(const tile_coordinate &origin, int window)
    {
        const int row = window / (SIDE / 2) * 2, column = window % (SIDE / 2) * 2;
        return {origin.image, origin.y + row, origin.x + column, row, column};
    }

    __device__ __forceinline__ void load(gradient_window &w, const gradient_source &s, const tiled_problem &p,
                                         const place &at) const
    {
        const int64_t pooled =
            ((at.image * p.pooled_height + at.y / 2) * p.pooled_width + at.x / 2) * (int64_t)p.out_channels + channel;
        const float *from =
            s.conv_output + ((at.image * p.height + at.y) * p.width + at.x) * (int64_t)p.out_channels + channel;
        const bool whole = exists && at.y / 2 < p.pooled_height && at.x / 2 < p.pooled_width;
        w.grad = whole ? __ldg(reinterpret_cast<const float4 *>(s.grad_pooled + pooled))
                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        w.argmax = whole ? __ldg(reinterpret_cast<const uint32_t *>(s.argmax + pooled)) : 0xffffffffu;
#pragma unroll
        for (int e = 0; e < 4; e++)
            w.y[e] = exists && at.y + e / 2 < p.height && at.x + e % 2 < p.width
                         ? __ldcs(reinterpret_cast<const float4 *>(from +
                                                                   (int64_t)(e / 2 * p.width + e % 2) * p.out_channels))
                         : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    __device__ __forceinline__ void store(uint32_t gradient, float *made, const gradient_window &w,
                                          const tiled_problem &p, const place &at, int first_channel) const
    {
        const float4 dz = make_float4(scale.x * w.grad.x, scale.y * w.grad.y, scale.z * w.grad.z, scale.w * w.grad.w);
        float *const to = made + ((at.image * p.height + at.y) * p.width + at.x) * (int64_t)p.out_channels + channel;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const auto make = [&](int byte, float value, float z, float by, float to_add) {
                const float dy = fmaf(by, value, to_add);
                return (w.argmax >> (8 * byte) & 255) == (uint32_t)e ? dy + z : dy;
            };
            const float4 y = w.y[e];
            const float4 dy = rounded<true>(
                make_float4(make(0, y.x, dz.x, slope.x, offset.x), make(1, y.y, dz.y, slope.y, offset.y),
                            make(2, y.z, dz.z, slope.z, offset.z), make(3, y.w, dz.w, slope.w, offset.w)));
            const bool inside = exists && at.y + e / 2 < p.height && at.x + e % 2 < p.width;
            const int pixel = LEAD + (at.row + e / 2) * RASTER + at.column + e % 2;
            st_shared_v4_f32(gradient + gradient_address<GRADIENT_HALF>(pixel, channel - first_channel),
                             inside ? dy : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            if (made && inside)
                *reinterpret_cast<float4 *>(to + (int64_t)(e / 2 * p.width + e % 2) * p.out_channels) = dy;
        }
    }
};

__device__ __forceinline__ void transpose(uint32_t transposed, uint32_t input, int thread)
{
    const transposed_share share = share_of(thread);
    float4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] =
            ld_shared_v4_f32(input + (share.row * RASTER + share.half * 8 + i) * PIXEL_BYTES + ((share.four ^ i) << 4));
    store_transposed(transposed, v, share);
}

#endif

__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    wgmma_weight_kernel(const __grid_constant__ CUtensorMap images, const __grid_constant__ wgmma_weight_arguments a)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(1024) unsigned char shared[];
    const int group = warp_uniform(threadIdx.x / WARPGROUP);
    const tiled_problem &p = a.problem;
    const uint32_t input = shared_address(shared), transposed = input + TRANSPOSED, gradients = input + GRADIENTS;
    const uint32_t full = input + BARRIERS, empty = full + 16, loaded = full + 32;
    const int kinds = a.out_kinds * a.in_kinds, kind = blockIdx.x % kinds;
    const int first_out = kind / a.in_kinds * WEIGHT_OUT, first_in = kind % a.in_kinds * WEIGHT_IN;
    const int64_t block = blockIdx.x / kinds, blocks = gridDim.x / kinds;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&images);
        for (int stage = 0; stage < 2; stage++) {
            mbarrier_init(full + stage * 8, PRODUCERS);
            mbarrier_init(empty + stage * 8, WARPGROUP / WARP_SIZE);
        }
        mbarrier_init(loaded, 1);
        fence_mbarrier_init();
    }
    zero_shared(shared + GRADIENTS, 2 * GRADIENT_BYTES);
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (group > 0) {
        setmaxnreg_dec<128>();
        const int thread = threadIdx.x - WARPGROUP;
        const auto start = [&](int64_t tile) {
            if (thread == 0 && tile < a.tiles.count) {
                const tile_coordinate origin = origin_of(a.tiles, tile);
                mbarrier_arrive_expect_tx(loaded, BOX_BYTES);
                tma_load_4d(input, &images, loaded, first_in, origin.x - 1, origin.y - 1, (int)origin.image);
            }
        };
        start(block);
        gradient_maker maker;
        maker.channel = first_out + thread % VECTORS * 4;
        maker.exists = maker.channel < p.out_channels;
        const int of = maker.exists ? maker.channel : 0;
        maker.scale = __ldg(reinterpret_cast<const float4 *>(a.gradient.scale + of));
        maker.slope = __ldg(reinterpret_cast<const float4 *>(a.gradient.slope + of));
        maker.offset = __ldg(reinterpret_cast<const float4 *>(a.gradient.offset + of));
        float *const made = first_in == 0 ? a.gradient.made : nullptr;
        int n = 0;
        for (int64_t tile = block; tile < a.tiles.count; tile += blocks, n++) {
            const int stage = n & 1;
            const tile_coordinate origin = origin_of(a.tiles, tile);
            if (n >= 2)
                mbarrier_wait(empty + stage * 8, (n >> 1 & 1) ^ 1);
            // Two windows at a time, so that their loads are on their way together.
            constexpr int AT_ONCE = 2, STEP = PRODUCERS / VECTORS;
#pragma unroll 1
            for (int window = thread / VECTORS; window < WINDOWS; window += AT_ONCE * STEP) {
                gradient_window w[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (window + i * STEP < WINDOWS)
                        maker.load(w[i], a.gradient, p, gradient_maker::place_of(origin, window + i * STEP));
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (window + i * STEP < WINDOWS)
                        maker.store(gradients + stage * GRADIENT_BYTES, made, w[i], p,
                                    gradient_maker::place_of(origin, window + i * STEP), first_out);
            }
            mbarrier_wait(loaded, n & 1);
            transpose(transposed + stage * TRANSPOSED_BYTES, input, thread);
            fence_proxy_async();
            mbarrier_arrive(full + stage * 8);
            bar_sync(1, PRODUCERS); // all have read the input
            start(tile + blocks);
        }
        return;
    }
    setmaxnreg_inc<240>();
    const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE, g = lane / 4, t = lane % 4;
    const int row_channel = warp * 16 + g;
    float sums[3][WEIGHT_COLUMNS / 2] = {};
    uint32_t at[4]; // dy of pixels 2 t - 2 to 2 t + 1 of a row's first eight; eight channels on: xored with 32
#pragma unroll
    for (int i = 0; i < 4; i++)
        at[i] = gradient_address<GRADIENT_HALF>(2 * t + i, row_channel);
    int n = 0;
    for (int64_t tile = block; tile < a.tiles.count; tile += blocks, n++) {
        const int stage = n & 1;
        const uint32_t gradient = gradients + stage * GRADIENT_BYTES;
        mbarrier_wait(full + stage * 8, n >> 1 & 1);
        multiply_weight(sums, gradient, at, transposed + stage * TRANSPOSED_BYTES);
        if (lane == 0)
            mbarrier_arrive(empty + stage * 8);
    }
    store_weight(a.partial + (block * kinds + kind) * (int64_t)(WEIGHT_VECTORS * 4), sums, row_channel, t);
#endif
}

static_assert(WEIGHT_IN == DEPTH, "a raster has a block's channels");

int64_t wgmma_weight_tiles(const tiled_problem &p)
{
    return wgmma_tiling_of(p).count;
}

bool wgmma_weight_fits(const tiled_problem &p)
{
    return wgmma_fits(p, SHARED_BYTES);
}

cuda_ops_status wgmma_weight_gradient(float4 *partial, const gradient_source &source, const float *input,
                                      const tiled_problem &p, int64_t blocks, cudaStream_t stream)
{
    wgmma_weight_arguments a = {};
    a.problem = p;
    a.tiles = wgmma_tiling_of(p);
    a.out_kinds = (int)ceil_div(p.out_channels, WEIGHT_OUT);
    a.in_kinds = (int)ceil_div(p.in_channels, WEIGHT_IN);
    a.gradient = source;
    a.partial = (float *)partial;
    CUtensorMap images;
    if (blocks > INT32_MAX || !make_raster_map(&images, input, true, p, p.in_channels))
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(wgmma_weight_kernel, SHARED_BYTES);
    launch_dependent(wgmma_weight_kernel, (unsigned int)blocks, 3 * WARPGROUP, SHARED_BYTES, stream, images, a);
    return launch_status();
}
