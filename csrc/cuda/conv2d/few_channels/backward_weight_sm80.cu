// conv2d of one to four input channels, backward_weight:
//
//   grad_weight[o][tap] = sum over pixels of grad_output[o][pixel] * input[pixel + tap]
//
// A GEMM of channels x pixels x taps, whose second operand is read from a patch of input as in forward_sm80.cu.
// Persistent blocks take tiles of 256 pixels, with the next tile's grad_output and patch in flight, and keep the sums
// of 64 channels and 160 taps (32 and 64 for small kernels) in registers. Each writes its split once; a second kernel
// adds them in order. mma.sync (fp16, bf16, TF32): warps share taps and pixels. FMA: a lane owns 8 channels and some
// rows of the kernel, and reads a row of input once for all taps along it. Bound by reading grad_output, by FMA for 3
// channels and 7x7 in float32.
#include "common/aligned_vector.cuh"
#include "conv2d/few_channels/problem.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;

// A tile of mma.sync: OUT * 16 channels by TAPS * 8 taps for each warp; of FMA: OUT * 16 channels by TAPS rows of WIDTH
// taps for each lane.
template <typename T, int MATH, int OUT, int TAPS, int WIDTH>
struct FewWeightTile {
    static constexpr int PIXELS = 256; // of a block's tile
    static constexpr int CHANNELS = 16 * OUT, WARP_TAPS = MATH == FEW_FMA ? 4 * TAPS * WIDTH : 8 * TAPS;
    static constexpr int LANE_SUMS = MATH == FEW_FMA ? 2 * OUT * TAPS * WIDTH : OUT * TAPS * 4;
    static constexpr int WORD_PIXELS = 4 / sizeof(T); // pixels in a word
    // grad_output's tile, in words: a row per channel or, channels_last, per pixel. The padding sends the lanes of a
    // fragment to different banks.
    static constexpr int CHANNEL_LINE = PIXELS / WORD_PIXELS + 4;
    static constexpr int PIXEL_LINE = CHANNELS / WORD_PIXELS + (sizeof(T) == 2 ? 4 : 8);
    static constexpr int GRAD_WORDS =
        CHANNELS * CHANNEL_LINE > PIXELS *PIXEL_LINE ? CHANNELS *CHANNEL_LINE : PIXELS *PIXEL_LINE;
};

// Copies grad_output's tile in vectors of BYTES, along pixels or along channels.
template <typename Tile, typename T, int BYTES>
__device__ __forceinline__ void copy_grad(uint32_t *grad, const int *pixel_of, const FewProblem &p, int64_t n,
                                          int first_channel)
{
    constexpr int SIZE = BYTES / sizeof(T);
    const bool last = p.out.c == 1;
    const T *const image = (const T *)p.output + n * p.out.n;
    // All vectors of a thread are at the same offset of their rows, as both sizes are powers of two.
    constexpr int PER_CHANNEL = Tile::PIXELS / SIZE, PER_PIXEL = Tile::CHANNELS / SIZE;
    constexpr int VECTORS = Tile::PIXELS * Tile::CHANNELS / SIZE;
#pragma unroll 4
    for (int i = threadIdx.x; i < VECTORS; i += THREADS) {
        const int index = last ? i / PER_PIXEL : i % PER_CHANNEL * SIZE;
        const int channel = last ? i % PER_PIXEL * SIZE : i / PER_CHANNEL;
        const int pixel = pixel_of[index];
        const bool inside = pixel >= 0 && first_channel + channel < p.out_channels;
        const T *const from = inside ? image + (first_channel + channel) * p.out.c + pixel * p.out.x : image;
        T *const to =
            (T *)(grad + (last ? index * Tile::PIXEL_LINE : channel * Tile::CHANNEL_LINE)) + (last ? channel : index);
        if constexpr (BYTES >= 4)
            copy_to_shared<BYTES>(to, from, inside);
        else
            *to = inside ? *from : store_from_accumulate<T>(0.0f);
    }
}

// STRIDE: of columns, where WIDTH is more than 1. One long function: the copies in flight, the products and the sums
// over warps share a lane's taps and pixels.
template <typename T, int MATH, int OUT, int TAPS, int WIDTH, int STRIDE>
__global__ void __launch_bounds__(THREADS, OUT == 4 ? 1 : 2)
    conv2d_few_channels_backward_weight_kernel(float *partial, const __grid_constant__ FewProblem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr bool ENABLED = true;
#else
    constexpr bool ENABLED = MATH == FEW_FMA;
#endif
    if constexpr (ENABLED) {
        typedef FewWeightTile<T, MATH, OUT, TAPS, WIDTH> Tile;
        extern __shared__ __align__(16) uint32_t shared[];
        // Of three tiles: the one that slow warps still multiply, the one in flight, and the one after it.
        __shared__ int pixels[3][Tile::PIXELS];        // of the plane of output; -1: none
        __shared__ int pixel_offsets[3][Tile::PIXELS]; // of a word or group of pixels of k, to be added to a tap's
        uint32_t *const grads = shared, *const patches = shared + 2 * Tile::GRAD_WORDS,
                        *const patch_coordinates = patches + 2 * p.patch;

        const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE, g = lane / 4,
                  t = lane % 4;
        // warps_x of the warps are neighbours along taps; the others share the pixels.
        const int warp_taps = warp % p.warps_x, warp_pixels = warp / p.warps_x, sharing = WARPS / p.warps_x;
        const int kernel = p.kernel_height * p.kernel_width, taps = p.channels * kernel;
        const int tap_tiles = (taps + Tile::WARP_TAPS * p.warps_x - 1) / (Tile::WARP_TAPS * p.warps_x);
        const int first_channel = blockIdx.y / tap_tiles * Tile::CHANNELS;
        const int first_tap = (blockIdx.y % tap_tiles * p.warps_x + warp_taps) * Tile::WARP_TAPS;
        const auto offset_of_tap = [&](int tap) {
            if (tap >= taps)
                return 0; // summed, but not stored
            const int c = tap / kernel, rest = tap - c * kernel, r = rest / p.kernel_width,
                      s = rest - r * p.kernel_width;
            return c * p.plane + r * p.dilation_height * p.columns + s * p.dilation_width;
        };
        // mma.sync: the lane's column of each instruction. FMA: the first tap of each of its rows.
        int tap_offsets[TAPS];
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            tap_offsets[j] = offset_of_tap(first_tap + (MATH == FEW_FMA ? (t * TAPS + j) * WIDTH : j * 8 + g));
        wait_for_predecessor();
        release_successor();
        few_clear_zeros(patches, p);
        few_clear_zeros(patches + p.patch, p);
        few_write_coordinates(patch_coordinates, p);

        const int used = p.tile_width * p.tile_height; // of the tile's pixels
        const int own_y = thread / p.tile_width, own_x = thread % p.tile_width;
        const auto locate = [&](int64_t tile, int stage) {
            const FewTile at = few_tile(p, tile);
            const int y0 = at.y * p.tile_height, x0 = at.x * p.tile_width;
            static_assert(Tile::PIXELS == THREADS, "a thread for each pixel");
            const int y = own_y, x = own_x;
            const bool row = y < p.tile_height && y0 + y < p.out_height;
            pixels[stage][thread] = row && x0 + x < p.out_width ? (y0 + y) * p.out_width + x0 + x : -1;
            const int offset = y * p.stride_height * p.columns + x * p.stride_width;
            if constexpr (MATH == FEW_FMA) {
                // The offset of each group of four pixels, and how many of them are inside.
                if (thread % 4 == 0) {
                    pixel_offsets[stage][thread] = offset;
                    pixel_offsets[stage][thread + 1] = row ? min(4, max(0, p.out_width - x0 - x)) : 0;
                }
            } else if (thread % Tile::WORD_PIXELS == 0) {
                const int valid = row ? p.out_width - x0 - x : 0;
                pixel_offsets[stage][thread / Tile::WORD_PIXELS] = valid >= Tile::WORD_PIXELS ? offset
                                                                   : valid > 0                ? p.single + offset
                                                                                              : p.zero;
            }
        };
        FewPatch<T, OUT == 4 ? 7 : 3> copy;
        const auto fetch = [&](int64_t tile, int buffer, int stage) {
            const FewTile at = few_tile(p, tile);
            uint32_t *const grad = grads + buffer * Tile::GRAD_WORDS;
            switch (p.vector) {
            case 16:
                copy_grad<Tile, T, 16>(grad, pixels[stage], p, at.n, first_channel);
                break;
            case 8:
                copy_grad<Tile, T, 8>(grad, pixels[stage], p, at.n, first_channel);
                break;
            case 4:
                copy_grad<Tile, T, 4>(grad, pixels[stage], p, at.n, first_channel);
                break;
            default:
                copy_grad<Tile, T, sizeof(T)>(grad, pixels[stage], p, at.n, first_channel);
            }
            copy.fetch(patches + buffer * p.patch, patch_coordinates, p, at.n,
                       at.y * p.tile_height * p.stride_height - p.padding_top,
                       at.x * p.tile_width * p.stride_width - p.padding_left);
        };

        constexpr int LANE_TAPS = MATH == FEW_FMA ? TAPS * WIDTH : 1;
        float sum[OUT][MATH == FEW_FMA ? 1 : TAPS][4] = {}; // as the instruction has them
        float fma_sum[MATH == FEW_FMA ? 2 * OUT : 1][LANE_TAPS] = {};

        int64_t tile = blockIdx.x;
        if (tile < p.tiles) {
            locate(tile, 0);
            __syncthreads();
            fetch(tile, 0, 0);
            copy.store(patches, patch_coordinates, p);
        }
        for (int buffer = 0, stage = 0; tile < p.tiles; tile += gridDim.x, buffer ^= 1) {
            const bool more = tile + gridDim.x < p.tiles;
            const int next_stage = stage == 2 ? 0 : stage + 1;
            if (more)
                locate(tile + gridDim.x, next_stage);
            cp_async_wait_all();
            __syncthreads();
            if (more)
                fetch(tile + gridDim.x, buffer ^ 1, next_stage);
            const uint32_t *const grad = grads + buffer * Tile::GRAD_WORDS, *const patch = patches + buffer * p.patch;
            const int *const offsets = pixel_offsets[stage];
            const bool last = p.out.c == 1;

            if constexpr (MATH == FEW_FMA) {
                const float *const values = (const float *)grad;
                for (int group = warp_pixels; group < used / 4; group += sharing) {
                    const int offset = offsets[4 * group], valid = offsets[4 * group + 1];
                    if (valid == 4) {
                        float window[TAPS][3 * STRIDE + WIDTH];
                        if constexpr (WIDTH > 1) {
#pragma unroll
                            for (int j = 0; j < TAPS; j++)
#pragma unroll
                                for (int i = 0; i < 3 * STRIDE + WIDTH; i++)
                                    window[j][i] = __uint_as_float(patch[tap_offsets[j] + offset + i]);
                        } else {
#pragma unroll
                            for (int j = 0; j < TAPS; j++)
#pragma unroll
                                for (int i = 0; i < 4; i++)
                                    window[j][i] = __uint_as_float(patch[tap_offsets[j] + offset + i * p.stride_width]);
                        }
#pragma unroll
                        for (int o = 0; o < 2 * OUT; o++) {
                            float4 v;
                            if (last) {
                                const float *const from = values + 4 * group * Tile::PIXEL_LINE + o * 8 + g;
                                v = make_float4(from[0], from[Tile::PIXEL_LINE], from[2 * Tile::PIXEL_LINE],
                                                from[3 * Tile::PIXEL_LINE]);
                            } else
                                v = *(const float4 *)(values + (o * 8 + g) * Tile::CHANNEL_LINE + 4 * group);
                            const float values_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                            for (int pixel = 0; pixel < 4; pixel++)
#pragma unroll
                                for (int i = 0; i < LANE_TAPS; i++) {
                                    const int tap = pixel % 2 ? LANE_TAPS - 1 - i : i; // back and forth
                                    fma_in_order(fma_sum[o][tap], values_of[pixel],
                                                 window[tap / WIDTH][tap % WIDTH + STRIDE * pixel]);
                                }
                        }
                    } else {
                        // Zeros of grad_output for missing pixels would not do: input may be infinite.
#pragma unroll 1
                        for (int pixel = 0; pixel < valid; pixel++) {
                            float window[TAPS][WIDTH];
#pragma unroll
                            for (int j = 0; j < TAPS; j++)
#pragma unroll
                                for (int s = 0; s < WIDTH; s++)
                                    window[j][s] =
                                        __uint_as_float(patch[tap_offsets[j] + offset + pixel * p.stride_width + s]);
#pragma unroll
                            for (int o = 0; o < 2 * OUT; o++) {
                                const int channel = o * 8 + g, at = 4 * group + pixel;
                                const float v =
                                    values[last ? at * Tile::PIXEL_LINE + channel : channel * Tile::CHANNEL_LINE + at];
#pragma unroll
                                for (int j = 0; j < TAPS; j++)
#pragma unroll
                                    for (int s = 0; s < WIDTH; s++)
                                        fma_sum[o][j * WIDTH + s] += v * window[j][s];
                            }
                        }
                    }
                }
            } else {
                const int steps = (used / Tile::WORD_PIXELS + 7) / 8;
#pragma unroll 1
                for (int step = warp_pixels; step < steps; step += sharing) {
                    const uint32_t *const near = patch + offsets[step * 8 + t], *const far =
                                                                                    patch + offsets[step * 8 + 4 + t];
                    uint32_t a[OUT][4];
                    if (sizeof(T) == 2 && last) {
                        const uint32_t *const from =
                            grad + (step * 16 + lane / 16 * 8 + lane % 8) * Tile::PIXEL_LINE + lane / 8 % 2 * 4;
#pragma unroll
                        for (int i = 0; i < OUT; i++)
                            ldmatrix_x4_trans(a[i], shared_address(from + i * 8));
                    } else {
                        const int channel_step = last ? 1 : Tile::CHANNEL_LINE, word_step = last ? Tile::PIXEL_LINE : 1;
                        const uint32_t *const from = grad + g * channel_step + (step * 8 + t) * word_step;
#pragma unroll
                        for (int i = 0; i < OUT; i++) {
                            a[i][0] = few_operand<MATH>(from[i * 16 * channel_step]);
                            a[i][1] = few_operand<MATH>(from[(i * 16 + 8) * channel_step]);
                            a[i][2] = few_operand<MATH>(from[i * 16 * channel_step + 4 * word_step]);
                            a[i][3] = few_operand<MATH>(from[(i * 16 + 8) * channel_step + 4 * word_step]);
                        }
                    }
#pragma unroll
                    for (int j = 0; j < TAPS; j++) {
                        const uint32_t b0 = few_operand<MATH>(near[tap_offsets[j]]),
                                       b1 = few_operand<MATH>(far[tap_offsets[j]]);
#pragma unroll
                        for (int i = 0; i < OUT; i++)
                            mma_sync<T>(sum[i][j], a[i], b0, b1);
                    }
                }
            }
            if (more)
                copy.store(patches + (buffer ^ 1) * p.patch, patch_coordinates, p);
            stage = next_stage;
        }

        // The warps that share pixels add their sums one after the other, in the shared memory of grad_output; the last
        // one stores the block's.
        float *const so_far = (float *)shared + warp_taps * Tile::LANE_SUMS * WARP_SIZE + lane;
        float *const mine = MATH == FEW_FMA ? &fma_sum[0][0] : &sum[0][0][0];
#pragma unroll 1
        for (int sharer = 0; sharer < sharing; sharer++) {
            __syncthreads();
            if (warp_pixels != sharer)
                continue;
            if (sharer > 0)
#pragma unroll
                for (int i = 0; i < Tile::LANE_SUMS; i++)
                    mine[i] += so_far[i * WARP_SIZE];
            if (sharer < sharing - 1)
#pragma unroll
                for (int i = 0; i < Tile::LANE_SUMS; i++)
                    so_far[i * WARP_SIZE] = mine[i];
        }
        if (warp_pixels < sharing - 1)
            return;
        float *const result = partial + (int64_t)blockIdx.x * p.out_channels * taps;
        const auto put = [&](int channel, int tap, float value) {
            if (first_channel + channel < p.out_channels && first_tap + tap < taps)
                result[(int64_t)(first_channel + channel) * taps + first_tap + tap] = value;
        };
        if constexpr (MATH == FEW_FMA) {
#pragma unroll
            for (int o = 0; o < 2 * OUT; o++)
#pragma unroll
                for (int j = 0; j < LANE_TAPS; j++)
                    put(o * 8 + g, t * LANE_TAPS + j, fma_sum[o][j]);
        } else {
#pragma unroll
            for (int i = 0; i < OUT; i++)
#pragma unroll
                for (int j = 0; j < TAPS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        put(i * 16 + e / 2 * 8 + g, j * 8 + 2 * t + e % 2, sum[i][j][e]);
        }
    }
}

// grad_weight[i] = sum over splits of partial[split][i], in order: a lane per element, every 32nd split for each warp,
// and the 32 sums added in the end.
static constexpr int SUM_THREADS = 1024, SUM_WARPS = SUM_THREADS / WARP_SIZE;

template <typename T>
__global__ void __launch_bounds__(SUM_THREADS)
    conv2d_few_channels_sum_splits_kernel(const float *partial, const __grid_constant__ FewProblem p)
{
    constexpr int IN_FLIGHT = 9; // 32 times that is about the largest number of splits
    __shared__ float sums[SUM_WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    const int kernel = p.kernel_height * p.kernel_width, taps = p.channels * kernel;
    const int64_t count = (int64_t)p.out_channels * taps;
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < count; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t i = first + lane;
        float sum = 0;
        if (i < count)
            for (int split = warp; split < p.splits; split += IN_FLIGHT * SUM_WARPS) {
                float some[IN_FLIGHT]; // an unrolled loop would load the remainder one by one
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    some[k] = split + k * SUM_WARPS < p.splits ? partial[(split + k * SUM_WARPS) * count + i] : 0;
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++)
                    sum += some[k];
            }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && i < count) {
#pragma unroll
            for (int w = 1; w < SUM_WARPS; w++)
                sum += sums[w][lane];
            const int64_t o = i / taps;
            const int tap = (int)(i - o * taps), c = tap / kernel, r = tap % kernel / p.kernel_width,
                      s = tap % p.kernel_width;
            ((T *)p.result)[o * p.w.n + c * p.w.c + r * p.w.y + s * p.w.x] = store_from_accumulate<T>(sum);
        }
        __syncthreads();
    }
}

// A variant's plan, for the launch and for the workspace query.
struct WeightPlan {
    FewProblem problem;
    size_t shared;
    dim3 grid;
};

template <typename Tile>
static bool plan_weight(WeightPlan &plan, const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    const bool is_16_bit = Tile::WORD_PIXELS == 2;
    const int element = is_16_bit ? 2 : 4;
    const int64_t taps = (int64_t)p.channels * p.kernel_height * p.kernel_width;
    if ((int64_t)p.out_height * p.out_width > INT_MAX || taps > 4096)
        return false;
    p.pair = p.stride_width;
    const bool single = is_16_bit && p.out_width % 2 == 1;
    // Without the tables. A block may have a multiprocessor for itself.
    const size_t most_shared = (device.capability > 89 ? 214 : device.capability == 80 ? 152 : 88) * 1024;
    double least = 0;
    // Tiles of 256 pixels or, where their patches are too large (strides), of a half or a quarter.
    for (int pixels = Tile::PIXELS; pixels >= Tile::PIXELS / 4 && least == 0; pixels /= 2)
        for (int width = 8; width <= pixels; width += 8) {
            const int height = pixels / width;
            const int64_t reach_y = (int64_t)(p.kernel_height - 1) * p.dilation_height,
                          reach_x = (int64_t)(p.kernel_width - 1) * p.dilation_width;
            const int64_t rows = (int64_t)(height - 1) * p.stride_height + reach_y + 1;
            const int64_t columns = (int64_t)(width - 1) * p.stride_width + reach_x + 1;
            if (rows >= 1 << 16 || columns >= 1 << 16 || p.channels * rows * columns >= 1 << 15)
                continue;
            const int64_t plane = rows * columns, all = p.channels * plane;
            const int64_t zeros = (p.channels - 1) * plane + reach_y * columns + reach_x + 1;
            const int64_t patch = ceil_div(all * (single ? 2 : 1) + zeros, 4) * 4;
            const size_t bytes = 4 * (size_t)(2 * Tile::GRAD_WORDS + 2 * patch + all);
            if (bytes > most_shared)
                continue;
            if (!few_keep_cheaper(p, p.out_width, p.out_height, width, height, rows, columns, 4000.0 + (double)all,
                                  least))
                continue;
            p.plane = (int)plane;
            p.single = single ? (int)all : 0;
            p.zero = (int)(all * (single ? 2 : 1));
            p.zeros = (int)zeros;
            p.patch = (int)patch;
            p.by_rows = make_divisor(p.rows);
            plan.shared = bytes;
        }
    if (least == 0)
        return false;
    p.tiles = p.batch * p.tiles_x * p.tiles_y;
    // As many warps along taps as pad them least.
    const auto padded = [&](int warps) {
        return ceil_div(taps, (int64_t)Tile::WARP_TAPS * warps) * Tile::WARP_TAPS * warps;
    };
    p.warps_x = 1;
    for (int warps = 2; warps <= WARPS && Tile::WARP_TAPS * (warps / 2) < taps; warps *= 2)
        if (padded(warps) <= padded(p.warps_x))
            p.warps_x = warps;
    if (p.warps_x < WARPS) { // warps that share pixels add their sums in shared memory
        const size_t sums = 4 * (size_t)(Tile::LANE_SUMS * p.warps_x * WARP_SIZE);
        plan.shared = plan.shared > sums ? plan.shared : sums;
    }
    // Vectors do not cross rows, and tiles start at one, where rows are multiples of a vector.
    const int64_t row = p.out.c == 1 ? p.out_channels : p.out_width;
    p.vector = element;
    if (is_aligned_16(p.output))
        for (int bytes = 2 * element; bytes <= 16 && row % (bytes / element) == 0; bytes *= 2)
            p.vector = bytes;
    const int64_t across =
        ceil_div(p.out_channels, Tile::CHANNELS) * ceil_div(taps, (int64_t)Tile::WARP_TAPS * p.warps_x);
    const int64_t resident_blocks = ceil_div((int64_t)device.multiprocessors * (Tile::CHANNELS == 64 ? 1 : 2), across);
    const int64_t blocks = p.tiles < resident_blocks ? p.tiles : resident_blocks;
    p.splits = (int)blocks;
    plan.grid = dim3((unsigned int)blocks, (unsigned int)across);
    plan.problem = p;
    return across <= 65535;
}

// Calls `visit` with the template arguments of a call's variant: query, plan and launch take the same one.
template <typename T, int MATH, typename Visitor>
static auto with_tile(const ConvCall &call, Visitor visit)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if constexpr (MATH == FEW_FMA) {
        const int64_t stride = s.dilation_width == 1 ? s.stride_width : 0;
        if (stride == 1 && s.kernel_width == 7)
            return visit.template operator()<T, MATH, 4, 3, 7, 1>();
        if (stride == 2 && s.kernel_width == 7)
            return visit.template operator()<T, MATH, 4, 3, 7, 2>();
        if (stride == 1 && s.kernel_width == 3 && s.in_channels * s.kernel_height <= 4)
            return visit.template operator()<T, MATH, 2, 1, 3, 1>();
        if (stride == 1 && s.kernel_width == 3)
            return visit.template operator()<T, MATH, 2, 3, 3, 1>();
        if (stride == 2 && s.kernel_width == 3 && s.in_channels > 1)
            return visit.template operator()<T, MATH, 2, 3, 3, 2>();
        return visit.template operator()<T, MATH, 2, 8, 1, 1>();
    } else {
        if (s.in_channels * s.kernel_height * s.kernel_width <= 64)
            return visit.template operator()<T, MATH, 2, 2, 1, 1>();
        return visit.template operator()<T, MATH, 4, 10, 1, 1>();
    }
}

template <typename Visitor>
static auto with_math(const ConvCall &call, Visitor visit)
{
    switch (call.dtype) {
    case CUDA_OPS_FLOAT16:
        return with_tile<__half, FEW_16BIT>(call, visit);
    case CUDA_OPS_BFLOAT16:
        return with_tile<__nv_bfloat16, FEW_16BIT>(call, visit);
    default:
        return call.sizes.allow_tf32 ? with_tile<float, FEW_TF32>(call, visit) : with_tile<float, FEW_FMA>(call, visit);
    }
}

struct Planner {
    WeightPlan &plan;
    const ConvCall &call;
    ConvDevice device;

    template <typename T, int MATH, int OUT, int TAPS, int WIDTH, int STRIDE>
    bool operator()() const
    {
        return plan_weight<FewWeightTile<T, MATH, OUT, TAPS, WIDTH>>(plan, call, device);
    }
};

struct Launcher {
    const WeightPlan &plan;
    const ConvCall &call;

    template <typename T, int MATH, int OUT, int TAPS, int WIDTH, int STRIDE>
    cuda_ops_status operator()() const
    {
        const auto kernel = conv2d_few_channels_backward_weight_kernel<T, MATH, OUT, TAPS, WIDTH, STRIDE>;
        allow_shared_memory(kernel, plan.shared);
        launch_dependent(kernel, plan.grid, THREADS, plan.shared, call.stream, (float *)call.workspace, plan.problem);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
        const FewProblem &p = plan.problem;
        const int64_t count = (int64_t)p.out_channels * p.channels * p.kernel_height * p.kernel_width;
        launch_dependent(conv2d_few_channels_sum_splits_kernel<T>, dim3(clamp_grid(ceil_div(count, WARP_SIZE))),
                         SUM_THREADS, 0, call.stream, (const float *)call.workspace, p);
        return launch_status();
    }
};

bool conv2d_few_channels_backward_weight_supports(const ConvCall &call, ConvDevice device)
{
    WeightPlan plan;
    return with_math(call, Planner{plan, call, device});
}

size_t conv2d_few_channels_backward_weight_workspace(const ConvCall &call, ConvDevice device)
{
    WeightPlan plan;
    if (!with_math(call, Planner{plan, call, device}))
        return 0;
    const FewProblem &p = plan.problem;
    return sizeof(float) * (size_t)p.splits * p.out_channels * p.channels * p.kernel_height * p.kernel_width;
}

cuda_ops_status conv2d_few_channels_backward_weight(const ConvCall &call, ConvDevice device)
{
    WeightPlan plan;
    if (!with_math(call, Planner{plan, call, device}))
        return CUDA_OPS_INVALID_ARGUMENT;
    return with_math(call, Launcher{plan, call});
}
