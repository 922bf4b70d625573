// conv2d of one to four input channels, stride 1 and at most 64 taps of all channels together, backward_input:
//
//   grad_input[n][c][y][x] = sum over r, s of product[c, r, s][y + padding - r * dilation][x + ...], where
//   product[c, r, s][pixel] = sum over o of weight[o][c][r][s] * grad_output[n][o][pixel]
//
// So few taps fit into an mma.sync's rows (fp16, bf16, TF32); its columns are pixels of grad_output, which come from
// device memory right into the instruction's registers, once for all taps (two or four warps share them where there are
// more than 16 taps). The products go to a ring in shared memory, from which grad_input gathers its own. Persistent
// blocks go down strips of an image, 32 or 64 pixels per warp at a time, with the next ones in flight. Bound by memory:
// grad_output once, and a strip's neighbouring rows once more.
#include <string.h>

#include "common/aligned_vector.cuh"
#include "conv2d/few_channels/problem.cuh"
#include "ptx/mma.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;

// A lane has SIZE output channels of SIZE pixels in SIZE 16-byte vectors, along pixels or, channels_last, along
// channels. The first STEP channels are the first instruction's: which channels a lane has is free, if both operands
// agree.
template <typename T>
struct SmallFilterLane {
    static constexpr int SIZE = 16 / sizeof(T), STEPS = 2, STEP = SIZE / STEPS;
    static constexpr int CHANNELS = 4 * SIZE; // of a slice
    static constexpr int PIXELS = 8 * SIZE;   // of a warp
    static constexpr int PAD = 4;             // between the taps' products, so that eight rows fall into all banks
    uint4 vector[SIZE];

    // grad_output's channels from `channel` on at the pixels from `pixel` on of [0, p.out_height * p.out_width).
    template <bool LAST>
    __device__ __forceinline__ void load(const FewProblem &p, const T *image, int channel, int pixel)
    {
        const int pixels = p.out_height * p.out_width;
        const int along = LAST ? channel : pixel, along_end = LAST ? p.out_channels : pixels;
        const int across = LAST ? pixel : channel, across_end = LAST ? pixels : p.out_channels;
        const int64_t pitch = LAST ? p.out_channels : pixels;
        const T *from = image + across * pitch + along;
#pragma unroll
        for (int i = 0; i < SIZE; i++, from += pitch) {
            vector[i] = make_uint4(0, 0, 0, 0);
            if (across + i >= across_end)
                continue;
            if (p.vector == 16) {
                if (along < along_end)
                    vector[i] = *(const uint4 *)from;
            } else {
                T element[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    element[e] = along + e < along_end ? from[e] : store_from_accumulate<T>(0.0f);
                memcpy(&vector[i], element, 16);
            }
        }
    }

    // The operand of instruction `step` at the lane's pixel `j`.
    template <int MATH, bool LAST>
    __device__ __forceinline__ void operand(uint32_t &b0, uint32_t &b1, int step, int j) const
    {
        const auto word = [&](int i, int w) {
            return w == 0 ? vector[i].x : w == 1 ? vector[i].y : w == 2 ? vector[i].z : vector[i].w;
        };
        if constexpr (LAST) {
            b0 = word(j, 2 * step), b1 = word(j, 2 * step + 1);
        } else if constexpr (sizeof(T) == 4) {
            b0 = word(2 * step, j), b1 = word(2 * step + 1, j);
        } else {
            const uint32_t order = j % 2 ? 0x7632 : 0x5410;
            b0 = __byte_perm(word(4 * step, j / 2), word(4 * step + 1, j / 2), order);
            b1 = __byte_perm(word(4 * step + 2, j / 2), word(4 * step + 3, j / 2), order);
        }
        b0 = few_operand<MATH>(b0), b1 = few_operand<MATH>(b1);
    }
};

// The weight in the order of the fragments: [16 taps][slice][step][lane], zeros out of bounds.
template <typename T, int MATH>
__device__ __forceinline__ void arrange_small_filter(uint4 *weights, const FewProblem &p, int slices, int kernel)
{
    typedef SmallFilterLane<T> L;
    for (int i = threadIdx.x; i < p.warps_x * slices * L::STEPS * WARP_SIZE; i += THREADS) {
        const int lane = i % WARP_SIZE, step = i / WARP_SIZE % L::STEPS, rest = i / WARP_SIZE / L::STEPS;
        const int tile = rest / slices, slice = rest - tile * slices;
        uint32_t word[4];
#pragma unroll
        for (int w = 0; w < 4; w++) { // the lane's row and the one 8 below, of its first channels; then of its others
            const int tap = tile * 16 + lane / 4 + w % 2 * 8, c = tap / kernel, r = tap % kernel / p.kernel_width,
                      s = tap % p.kernel_width;
            const int o = slice * L::CHANNELS + lane % 4 * L::SIZE + step * L::STEP + w / 2 * (L::STEP / 2);
            const T *const from = (const T *)p.weight + c * p.w.c + r * p.w.y + s * p.w.x;
            word[w] = 0;
            if (c < p.channels && o < p.out_channels) {
                word[w] = few_operand<MATH>(bits_of(from[o * p.w.n]));
                if (sizeof(T) == 2 && o + 1 < p.out_channels)
                    word[w] |= bits_of(from[(o + 1) * p.w.n]) << 16;
            }
        }
        weights[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// A block goes down a strip of p.tile_height rows `step` of them at a time, and keeps the products of the last
// `ring` * PIXELS pixels in shared memory, so that each pixel of grad_output is multiplied once per strip.
struct StripPlan {
    int step, ring;
};

// A strip's rows y0 to y_end of grad_input, and the pixels of grad_output that they read, in memory's order.
struct Strip {
    int64_t n;
    int y0, y_end, first, end; // `first` is a multiple of a lane's pixels
};

// The end of the pixels that rows up to `y` read.
__device__ __forceinline__ int pixels_end(const FewProblem &p, int y)
{
    return min(max(y + p.padding_top, 0), p.out_height) * p.out_width;
}

template <int SIZE>
__device__ __forceinline__ Strip strip_of(const FewProblem &p, int64_t tile)
{
    const FewTile at = few_tile(p, tile);
    const int y0 = at.y * p.tile_height, y_end = min(y0 + p.tile_height, p.height);
    const int top = y0 + p.padding_top - (p.kernel_height - 1) * p.dilation_height;
    const int from = min(max(top, 0), p.out_height) * p.out_width;
    return {at.n, y0, y_end, from / SIZE * SIZE, pixels_end(p, y_end)};
}

// Blocks that share a multiprocessor, as their registers allow.
template <typename T>
static constexpr int RESIDENT = sizeof(T) == 4 ? 3 : 2;

// LAST: grad_output is channels_last. Of a block's warps, p.warps_x share pixels, and each has 16 of the taps.
template <typename T, int MATH, bool LAST>
__global__ void __launch_bounds__(THREADS, RESIDENT<T>)
    conv2d_few_channels_backward_input_small_filter_kernel(const __grid_constant__ FewProblem p, StripPlan strips)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    typedef SmallFilterLane<T> L;
    extern __shared__ __align__(16) uint4 weights[];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int kernel = p.kernel_height * p.kernel_width, taps = p.channels * kernel;
    const int slices = (p.out_channels + L::CHANNELS - 1) / L::CHANNELS;
    const int ring_pixels = strips.ring * L::PIXELS, pitch = ring_pixels + L::PAD;
    float *const products = (float *)(weights + p.warps_x * slices * L::STEPS * WARP_SIZE); // [tap][pixel]
    const int first_tap = warp % p.warps_x * 16;
    const uint4 *const operands = weights + warp % p.warps_x * slices * L::STEPS * WARP_SIZE + lane;

    const int first_unit = warp / p.warps_x, together = WARPS / p.warps_x;
    L ahead; // the next operand, in flight
    const auto fetch = [&](const Strip &strip, int unit, int slice) {
        const int pixel = strip.first + unit * L::PIXELS;
        if (pixel < strip.end)
            ahead.template load<LAST>(p, (const T *)p.output + strip.n * p.out.n, slice * L::CHANNELS + t * L::SIZE,
                                      pixel + g * L::SIZE);
    };
    wait_for_predecessor();
    release_successor();
    Strip strip = strip_of<L::SIZE>(p, blockIdx.x);
    fetch(strip, first_unit, 0);
    arrange_small_filter<T, MATH>(weights, p, slices, kernel);
    __syncthreads();
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        int unit = first_unit, ring_unit = first_unit; // the warp's next pixels, in the strip and in the ring
        T *const result = (T *)p.result + strip.n * p.in.n;
        const int first = strip.first, y_stop = strip.y_end;
        for (int y0 = strip.y0; y0 < y_stop; y0 += strips.step) {
            const int y_end = min(y0 + strips.step, y_stop), end = pixels_end(p, y_end);
            for (; first + unit * L::PIXELS < end; unit += together, ring_unit += together) {
                float sum[L::SIZE][4] = {};
                for (int slice = 0; slice < slices; slice++) {
                    const L now = ahead;
                    const bool last = slice == slices - 1;
                    fetch(strip, last ? unit + together : unit, last ? 0 : slice + 1);
#pragma unroll
                    for (int step = 0; step < L::STEPS; step++) {
                        const uint4 w = operands[(slice * L::STEPS + step) * WARP_SIZE];
                        const uint32_t a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                        for (int j = 0; j < L::SIZE; j++) {
                            uint32_t b0, b1;
                            now.template operand<MATH, LAST>(b0, b1, step, j);
                            mma_sync<T>(sum[j], a, b0, b1);
                        }
                    }
                }
                while (ring_unit >= strips.ring)
                    ring_unit -= strips.ring;
                // An instruction's columns 2t and 2t + 1 are pixels of the lanes with these as their g.
                float *const to = products + (first_tap + g) * pitch + ring_unit * L::PIXELS + 2 * t * L::SIZE;
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (first_tap + e / 2 * 8 + g < taps)
#pragma unroll
                        for (int j = 0; j < L::SIZE; j += 4)
                            *(float4 *)(to + e / 2 * 8 * pitch + e % 2 * L::SIZE + j) =
                                make_float4(sum[j][e], sum[j + 1][e], sum[j + 2][e], sum[j + 3][e]);
            }
            __syncthreads();
            if (y_end == y_stop && tile + gridDim.x < p.tiles) {
                strip = strip_of<L::SIZE>(p, tile + gridDim.x);
                fetch(strip, first_unit, 0);
            }
            // The ring holds the last pixels up to `end`, pixel i at i modulo its length: those from `origin` on, a
            // multiple of the length, are at i - origin, earlier ones a length later.
            const int units = (max(end - first, 1) + L::PIXELS - 1) / L::PIXELS;
            const int origin = (units - 1) / strips.ring * ring_pixels + first;
            for (int i = threadIdx.x; i < (y_end - y0) * p.width; i += THREADS) {
                const int line = quotient(i, p.by_columns), x = i - line * p.width, y = y0 + line;
                const float *product = products;
                for (int c = 0; c < p.channels; c++) {
                    float sum = 0;
                    for (int r = 0; r < p.kernel_height; r++) {
                        const int from_y = y + p.padding_top - r * p.dilation_height;
                        const bool inside = (unsigned int)from_y < (unsigned int)p.out_height;
                        for (int s = 0; s < p.kernel_width; s++, product += pitch) {
                            const int from_x = x + p.padding_left - s * p.dilation_width;
                            if (inside && (unsigned int)from_x < (unsigned int)p.out_width) {
                                const int at = from_y * p.out_width + from_x - origin;
                                sum += product[at < 0 ? at + ring_pixels : at];
                            }
                        }
                    }
                    result[c * p.in.c + y * p.in.y + x * p.in.x] = store_from_accumulate<T>(sum);
                }
            }
            __syncthreads();
        }
    }
#endif
}

// Chooses strips that balance the blocks, and steps as high as shared memory allows.
template <typename T>
static bool plan_small_filter(FewProblem &p, const ConvCall &call, ConvDevice device, StripPlan &strips, size_t &shared)
{
    typedef SmallFilterLane<T> L;
    const int64_t taps = (int64_t)p.channels * p.kernel_height * p.kernel_width;
    if (p.stride_height != 1 || p.stride_width != 1 || taps > 64 || p.out_channels > 1 << 12 ||
        (int64_t)p.out_height * p.out_width * 64 > INT_MAX || (int64_t)p.height * p.width > INT_MAX / 2)
        return false;
    p.warps_x = taps > 32 ? 4 : taps > 16 ? 2 : 1;
    const int64_t weights = p.warps_x * ceil_div(p.out_channels, L::CHANNELS) * L::STEPS * WARP_SIZE * 16;
    const int64_t reach = (int64_t)(p.kernel_height - 1) * p.dilation_height;
    const auto units_of = [&](int64_t height) {
        const int64_t lines = height + reach < p.out_height ? height + reach : p.out_height;
        return ceil_div(lines * p.out_width + L::SIZE - 1, L::PIXELS);
    };
    // A step's pixels are divided by the width through a 32-bit product; see make_divisor.
    const auto divides = [&](int64_t step) { return step * p.width <= UINT32_MAX / p.width; };
    double least = 0;
    const auto consider = [&](int64_t height, int resident) {
        const int64_t most = (int64_t)few_most_shared(device.capability) * 2 / resident;
        int64_t step = height, bytes = 0, ring = 0;
        for (;; step = ceil_div(step, 2)) { // with several steps, a step begins anywhere in a unit
            ring = step == height ? units_of(step) : units_of(step) + 1;
            bytes = weights + taps * (ring * L::PIXELS + L::PAD) * 4;
            if ((bytes <= most && divides(step)) || step == 1)
                break;
        }
        const int64_t strip_count = p.batch * ceil_div(p.height, height);
        const double waves = (double)ceil_div(strip_count, (int64_t)resident * device.multiprocessors);
        const double cost =
            waves * resident * (double)(ceil_div(height, step) + ceil_div(units_of(height), WARPS / p.warps_x));
        if (bytes > most || !divides(step) || (least > 0 && cost >= least))
            return;
        least = cost;
        p.tile_height = (int)height, p.tiles_y = (int)ceil_div(p.height, height), p.tiles_x = 1;
        p.tiles = strip_count;
        strips = {(int)step, (int)ring};
        shared = (size_t)bytes;
    };
    for (int resident = RESIDENT<T>; resident > 1 && least == 0; resident--) {
        for (int64_t height = p.height; height > 1; height = ceil_div(height, 2))
            consider(height, resident);
        consider(1, resident);
    }
    // channels_last in 16 bits, many taps and several steps: backward_input_sm80.cu was faster by a tenth and more.
    if (sizeof(T) == 2 && p.out.c == 1 && p.warps_x > 1 && strips.step < p.tile_height)
        return false;
    p.by_columns = make_divisor(p.width);
    const int64_t run = p.out.c == 1 ? p.out_channels : (int64_t)p.out_height * p.out_width;
    p.vector = run % L::SIZE == 0 && is_aligned_16(call.output) ? 16 : sizeof(T);
    return least > 0;
}

template <typename T, int MATH>
static cuda_ops_status launch_small_filter(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    StripPlan strips = {};
    size_t shared = 0;
    if (!plan_small_filter<T>(p, call, device, strips, shared))
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto launch = [&](auto kernel) {
        const int64_t resident_blocks = few_resident_blocks(kernel, THREADS, shared, device);
        launch_dependent(kernel, dim3((unsigned int)(p.tiles < resident_blocks ? p.tiles : resident_blocks)), THREADS,
                         shared, call.stream, p, strips);
        return launch_status();
    };
    return p.out.c == 1 ? launch(conv2d_few_channels_backward_input_small_filter_kernel<T, MATH, true>)
                        : launch(conv2d_few_channels_backward_input_small_filter_kernel<T, MATH, false>);
}

bool conv2d_few_channels_backward_input_small_filter_supports(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    StripPlan strips = {};
    size_t shared = 0;
    switch (few_math(call)) {
    case FEW_16BIT:
        return plan_small_filter<__half>(p, call, device, strips, shared);
    case FEW_TF32:
        return plan_small_filter<float>(p, call, device, strips, shared);
    default:
        return false;
    }
}

cuda_ops_status conv2d_few_channels_backward_input_small_filter(const ConvCall &call, ConvDevice device)
{
    switch (few_math(call)) {
    case FEW_16BIT:
        return call.dtype == CUDA_OPS_FLOAT16 ? launch_small_filter<__half, FEW_16BIT>(call, device)
                                              : launch_small_filter<__nv_bfloat16, FEW_16BIT>(call, device);
    case FEW_TF32:
        return launch_small_filter<float, FEW_TF32>(call, device);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
