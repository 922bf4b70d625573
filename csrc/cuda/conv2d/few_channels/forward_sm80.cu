// conv2d of one to four input channels, forward:
//
//   output[n][o][y][x] = bias[o] + sum over c, r, s of weight[o][c][r][s] *
//                                               input[n][c][y * stride - padding + r * dilation][alike in x]
//
// An implicit GEMM of pixels x taps x output channels. Persistent blocks keep the patch of input under a tile of 256
// pixels in shared memory: an operand's address is the pixel's offset, a register, plus the tap's, from a table, so
// that any kernel size, stride and dilation run in the same instances. A warp takes 32 or 64 pixels and 32 or 64
// channels by mma.sync (fp16, bf16, TF32), or by FMA with the same ownership. A lane owns neighbouring pixels, and
// channels in runs of 16 bytes, so that NCHW and channels_last are both stored in whole sectors from registers. Bound
// by writing the output (1 channel to 32), by FMA for 3 channels and 7x7 in float32; benchmarks/notes/conv2d_direct.md.
#include "common/aligned_vector.cuh"
#include "conv2d/activation.cuh"
#include "conv2d/few_channels/problem.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

static constexpr int TILE_PIXELS = 256, FEWEST_PIXELS = 64; // of a tile; the latter of small images
static constexpr int STEP = 8;                              // words that an instruction sums over

// Instructions along a warp's pixels. FMA needs many accumulators per operand read, mma.sync more warps.
template <int MATH>
static constexpr int mma_rows = MATH == FEW_FMA ? 4 : 2;
template <int MATH>
static constexpr int forward_threads = TILE_PIXELS / (16 * mma_rows<MATH>)*WARP_SIZE;

// Neighbouring pixels that a lane owns: whole sectors of NCHW, and no bank conflict when a warp reads words (of every
// other column for 16-bit elements).
template <typename T>
static constexpr int pixel_run = sizeof(T) == 2 ? 2 : 4;

// The channel, from the block's first, of column 2 * t + e of instruction j, for elements of SIZE bytes. Which channel
// a column of the instruction stands for is free to choose.
template <int SIZE>
__device__ __forceinline__ int channel_of(int j, int t, int e)
{
    constexpr int RUN = 16 / SIZE, COLUMNS = RUN / 2; // channels in 16 bytes; instructions that hold them
    return j / COLUMNS * (4 * RUN) + t * RUN + j % COLUMNS * 2 + e;
}

// The first tap of a word, which has two neighbours in a row of the kernel for 16-bit elements.
struct Tap {
    int c, r, s;
};

template <int MATH>
__device__ __forceinline__ Tap tap_of(const FewProblem &p, int word)
{
    const int per_row = MATH == FEW_16BIT ? (p.kernel_width + 1) / 2 : p.kernel_width;
    const int row = word / per_row, c = row / p.kernel_height;
    return {c, row - c * p.kernel_height, (word - row * per_row) * (MATH == FEW_16BIT ? 2 : 1)};
}

template <typename T, int MATH>
__device__ __forceinline__ uint32_t weight_word(const FewProblem &p, int word, int channel)
{
    if (word >= p.words || channel >= p.out_channels)
        return 0;
    const Tap tap = tap_of<MATH>(p, word);
    const T *const weight = (const T *)p.weight + channel * p.w.n + tap.c * p.w.c + tap.r * p.w.y;
    uint32_t bits = few_operand<MATH>(bits_of(weight[tap.s * p.w.x]));
    if (MATH == FEW_16BIT && tap.s + 1 < p.kernel_width)
        bits |= bits_of(weight[(tap.s + 1) * p.w.x]) << 16;
    return bits;
}

template <int MATH>
__device__ __forceinline__ int offset_of_word(const FewProblem &p, int word)
{
    if (word >= p.words)
        return p.zero;
    const Tap tap = tap_of<MATH>(p, word);
    const int offset = tap.c * p.plane + tap.r * p.dilation_height * p.columns + tap.s * p.dilation_width;
    return MATH == FEW_16BIT && tap.s + 1 == p.kernel_width ? p.single + offset : offset;
}

// COLUMNS: instructions along channels, of 8 each. WIDTH: for FMA, the kernel's width where stride and dilation are 1,
// so that a row of input is read once for all taps of a row; 0: any. One long function: what a lane owns (offsets,
// groups of pixels, accumulators) is shared by main loop and epilogue.
template <typename T, int MATH, int COLUMNS, int WIDTH>
__global__ void __launch_bounds__(forward_threads<MATH>, COLUMNS == 8 ? 2 : 3)
    conv2d_few_channels_forward_kernel(const __grid_constant__ FewProblem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr bool ENABLED = true;
#else
    constexpr bool ENABLED = MATH == FEW_FMA;
#endif
    if constexpr (ENABLED) {
        constexpr int ROWS = mma_rows<MATH>, THREADS = forward_threads<MATH>;
        constexpr int PIXELS = 2 * ROWS, RUN = pixel_run<T>, GROUPS = PIXELS / RUN; // of a lane
        extern __shared__ __align__(16) uint32_t shared[];
        const int steps = (p.words + STEP - 1) / STEP;
        uint32_t *const weights = shared;                              // [step][pair of instructions][lane][4]
        float *const bias = (float *)(weights + steps * 64 * COLUMNS); // [channel]
        int *const table = (int *)(bias + 8 * COLUMNS);                // the offset of each word in the patch
        uint32_t *const patches = (uint32_t *)(table + steps * STEP), *const coordinates = patches + 2 * p.patch;

        const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE, g = lane / 4,
                  t = lane % 4;
        const int first_channel = blockIdx.y * (8 * COLUMNS);
        wait_for_predecessor();
        release_successor();
        few_write_coordinates(coordinates, p);
        few_clear_zeros(patches, p);
        few_clear_zeros(patches + p.patch, p);
        __syncthreads();

        // The lane's groups of RUN pixels, and the offset of each pixel in the patch.
        int group_y[GROUPS], group_x[GROUPS], pixel_offset[PIXELS];
#pragma unroll
        for (int q = 0; q < GROUPS; q++) {
            const int pixel = (warp * GROUPS + q) * 8 * RUN + g * RUN;
            group_y[q] = pixel / p.tile_width;
            group_x[q] = pixel % p.tile_width;
            const bool used = group_y[q] < p.tile_height;
#pragma unroll
            for (int e = 0; e < RUN; e++)
                pixel_offset[q * RUN + e] =
                    used ? group_y[q] * p.stride_height * p.columns + (group_x[q] + e) * p.stride_width : 0;
            if (!used)
                group_y[q] = INT_MAX / 2;
        }

        const int words = warp * 8 * PIXELS < p.tile_width * p.tile_height ? p.words : 0; // 0: the warp has no pixels

        FewPatch<T, COLUMNS == 8 ? 7 : 3> copy;
        const auto fetch = [&](int64_t tile, uint32_t *patch) {
            const FewTile at = few_tile(p, tile);
            copy.fetch(patch, coordinates, p, at.n, at.y * p.tile_height * p.stride_height - p.padding_top,
                       at.x * p.tile_width * p.stride_width - p.padding_left);
        };
        int64_t tile = blockIdx.x;
        if (tile < p.tiles)
            fetch(tile, patches);
        // Beside the first patch.
#pragma unroll 4
        for (int i = thread; i < steps * 64 * COLUMNS; i += THREADS) {
            if constexpr (MATH == FEW_FMA) { // [word][run of 4 channels][t][4]
                const int word = i / (8 * COLUMNS), rest = i % (8 * COLUMNS);
                weights[i] = weight_word<T, MATH>(p, word, first_channel + rest);
            } else {
                const int of = i % 4, l = i / 4 % WARP_SIZE, j = i / 128 % (COLUMNS / 2) * 2 + of / 2;
                const int word = i / (64 * COLUMNS) * STEP + of % 2 * 4 + l % 4;
                weights[i] =
                    weight_word<T, MATH>(p, word, first_channel + channel_of<sizeof(T)>(j, l / 4 / 2, l / 4 % 2));
            }
        }
        for (int i = thread; i < 8 * COLUMNS; i += THREADS)
            bias[i] = p.bias != nullptr && first_channel + i < p.out_channels
                          ? load_as_accumulate(((const T *)p.bias)[first_channel + i])
                          : 0.0f;
        for (int i = thread; i < steps * STEP; i += THREADS)
            table[i] = offset_of_word<MATH>(p, i);
        if (tile < p.tiles)
            copy.store(patches, coordinates, p);
        for (int buffer = 0; tile < p.tiles; tile += gridDim.x, buffer ^= 1) {
            cp_async_wait_all();
            __syncthreads();
            const uint32_t *const patch = patches + buffer * p.patch;
            uint32_t *const next_patch = patches + (buffer ^ 1) * p.patch;
            const bool more = tile + gridDim.x < p.tiles;
            if (more)
                fetch(tile + gridDim.x, next_patch);

            // [i][j][2 * h + e]: pixel 2 * i + h of the lane's, channel channel_of(j, t, e)
            float sum[ROWS][COLUMNS][4] = {};
            if constexpr (MATH == FEW_FMA) {
                const auto multiply = [&](int word, const auto &pixel_value) {
                    const float4 *const from = (const float4 *)(weights + word * (8 * COLUMNS)) + t;
                    float w[2 * COLUMNS];
#pragma unroll
                    for (int q = 0; q < COLUMNS / 2; q++)
                        *(float4 *)(w + 4 * q) = from[4 * q];
#pragma unroll
                    for (int o = 0; o < 2 * COLUMNS; o++)
#pragma unroll
                        for (int k = 0; k < PIXELS; k++) {
                            const int pixel =
                                o % 2 ? PIXELS - 1 - k : k; // back and forth: one factor stays in its register
                            fma_in_order(sum[pixel / 2][o / 2][pixel % 2 * 2 + o % 2], pixel_value(pixel), w[o]);
                        }
                };
                if constexpr (WIDTH > 0) {
                    const int rows = words / WIDTH;
#pragma unroll 1
                    for (int row = 0; row < rows; row++) {
                        const uint32_t *const line = patch + table[row * WIDTH];
                        float window[GROUPS][RUN + WIDTH - 1];
#pragma unroll
                        for (int q = 0; q < GROUPS; q++)
#pragma unroll
                            for (int i = 0; i < RUN + WIDTH - 1; i++)
                                window[q][i] = __uint_as_float(line[pixel_offset[q * RUN] + i]);
#pragma unroll
                        for (int s = 0; s < WIDTH; s++)
                            multiply(row * WIDTH + s, [&](int pixel) { return window[pixel / RUN][pixel % RUN + s]; });
                    }
                } else {
#pragma unroll 2
                    for (int word = 0; word < words; word++) {
                        const uint32_t *const line = patch + table[word];
                        float x[PIXELS];
#pragma unroll
                        for (int pixel = 0; pixel < PIXELS; pixel++)
                            x[pixel] = __uint_as_float(line[pixel_offset[pixel]]);
                        multiply(word, [&](int pixel) { return x[pixel]; });
                    }
                }
            } else {
#pragma unroll 2
                for (int step = 0; step < (words + STEP - 1) / STEP; step++) {
                    const int near = table[step * STEP + t], far = table[step * STEP + t + 4];
                    uint32_t a[ROWS][4];
#pragma unroll
                    for (int i = 0; i < ROWS; i++) {
                        a[i][0] = few_operand<MATH>(patch[near + pixel_offset[2 * i]]);
                        a[i][1] = few_operand<MATH>(patch[near + pixel_offset[2 * i + 1]]);
                        a[i][2] = few_operand<MATH>(patch[far + pixel_offset[2 * i]]);
                        a[i][3] = few_operand<MATH>(patch[far + pixel_offset[2 * i + 1]]);
                    }
#pragma unroll
                    for (int j = 0; j < COLUMNS; j += 2) {
                        const uint4 b = ((const uint4 *)weights)[(step * (COLUMNS / 2) + j / 2) * WARP_SIZE + lane];
#pragma unroll
                        for (int i = 0; i < ROWS; i++) {
                            mma_sync<T>(sum[i][j], a[i], b.x, b.y);
                            mma_sync<T>(sum[i][j + 1], a[i], b.z, b.w);
                        }
                    }
                }
            }

            const FewTile at = few_tile(p, tile);
            const int y0 = at.y * p.tile_height, x0 = at.x * p.tile_width;
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[i][j][e] += bias[channel_of<sizeof(T)>(j, t, e % 2)];
                    conv2d_activate<T>(sum[i][j], p.activation);
                }
            const auto output_of = [&](int pixel, int j, int e) {
                return store_from_accumulate<T>(sum[pixel / 2][j][pixel % 2 * 2 + e]);
            };
#pragma unroll
            for (int q = 0; q < GROUPS; q++) {
                const int y = y0 + group_y[q], x = x0 + group_x[q];
                if (y >= p.out_height || x >= p.out_width)
                    continue;
                T *const result = (T *)p.result + at.n * p.out.n + y * p.out.y + x * p.out.x;
                if (p.vector == (int)sizeof(T)) {
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                        for (int e = 0; e < 2 * RUN; e++) {
                            const int channel = first_channel + channel_of<sizeof(T)>(j, t, e % 2);
                            if (channel < p.out_channels && x + e / 2 < p.out_width)
                                result[channel * p.out.c + e / 2 * p.out.x] = output_of(q * RUN + e / 2, j, e % 2);
                        }
                } else if (p.out.c == 1) { // runs of channels
                    constexpr int CHANNELS = 16 / sizeof(T);
#pragma unroll
                    for (int e = 0; e < RUN; e++) {
                        if (x + e >= p.out_width)
                            break;
#pragma unroll
                        for (int j = 0; j < COLUMNS; j += CHANNELS / 2) {
                            const int channel = first_channel + channel_of<sizeof(T)>(j, t, 0);
                            if (channel >= p.out_channels)
                                break;
                            T run[CHANNELS];
#pragma unroll
                            for (int k = 0; k < CHANNELS; k++)
                                run[k] = output_of(q * RUN + e, j + k / 2, k % 2);
                            store_run(result + channel + e * p.out.x, run);
                        }
                    }
                } else { // runs of pixels
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int channel = first_channel + channel_of<sizeof(T)>(j, t, e);
                            if (channel >= p.out_channels)
                                continue;
                            T run[RUN];
#pragma unroll
                            for (int k = 0; k < RUN; k++)
                                run[k] = output_of(q * RUN + k, j, e);
                            store_run(result + channel * p.out.c, run);
                        }
                }
            }
            if (more)
                copy.store(next_patch, coordinates, p);
        }
    }
}

// Chooses a tile of up to `pixels` and its patch. False where none fits.
static bool plan_tiles(FewProblem &p, FewMath math, int pixels, int columns, size_t most_shared, size_t &shared)
{
    const bool is_16_bit = math == FEW_16BIT;
    const int64_t words =
        (int64_t)p.channels * p.kernel_height * (is_16_bit ? (p.kernel_width + 1) / 2 : p.kernel_width);
    if (words > 2048)
        return false;
    p.words = (int)words;
    p.pair = p.dilation_width;
    const bool single = is_16_bit && p.kernel_width % 2 == 1;
    const int64_t steps = ceil_div(words, STEP);
    double least = 0;
    for (int width = 4; width <= pixels; width += 4) {
        const int height = pixels / width;
        const int64_t rows =
            (int64_t)(height - 1) * p.stride_height + (int64_t)(p.kernel_height - 1) * p.dilation_height + 1;
        const int64_t columns_in =
            (int64_t)(width - 1) * p.stride_width + (int64_t)(p.kernel_width - 1) * p.dilation_width + 1;
        if (rows >= 1 << 16 || columns_in >= 1 << 16 || p.channels * rows * columns_in >= 1 << 15)
            continue;
        const int64_t plane = rows * columns_in, all = p.channels * plane;
        const int64_t reach = (height - 1) * p.stride_height * columns_in + (width - 1) * p.stride_width + 1;
        // Single elements start at an odd word: pairs are read from every other bank, singles from those between.
        const int64_t first_single = all | 1, zero = single ? first_single + all : all;
        const int64_t patch = ceil_div(zero + reach, 4) * 4;
        const size_t bytes = 4 * (size_t)(steps * (64 * columns + STEP) + 8 * columns + 2 * patch + all);
        if (bytes > most_shared)
            continue;
        // Reading an operand costs about a hundred times what copying a word of the patch does.
        const double each = 100.0 * (double)(steps * STEP) + (double)all;
        if (!few_keep_cheaper(p, p.out_width, p.out_height, width, height, rows, columns_in, each, least))
            continue;
        p.plane = (int)plane;
        p.single = single ? (int)first_single : 0;
        p.zero = (int)zero;
        p.zeros = (int)reach;
        p.patch = (int)patch;
        p.by_rows = make_divisor(p.rows);
        shared = bytes;
    }
    p.tiles = p.batch * p.tiles_x * p.tiles_y;
    return least > 0;
}

// The largest tile that fits, and smaller ones while two multiprocessors would have one between them.
static bool plan_forward(FewProblem &p, FewMath math, size_t element, int columns, ConvDevice device, size_t &shared)
{
    bool fits = false;
    for (int pixels = TILE_PIXELS; pixels >= FEWEST_PIXELS; pixels /= 2) {
        fits = plan_tiles(p, math, pixels, columns, few_most_shared(device.capability), shared);
        if (fits && 2 * p.tiles > device.multiprocessors)
            break;
    }
    if (!fits)
        return false;
    p.vector = (int)element;
    if (is_aligned_16(p.result)) {
        if (p.out.c == 1 ? p.out_channels % (16 / (int)element) == 0 : p.out_width % 4 == 0)
            p.vector = 16;
    }
    return true;
}

// WIDTH of the kernel's instances.
static int forward_width(const FewProblem &p, FewMath math)
{
    const bool usual = p.stride_width == 1 && p.dilation_width == 1 && (p.kernel_width == 3 || p.kernel_width == 7);
    return math == FEW_FMA && usual ? p.kernel_width : 0;
}

// COLUMNS of the kernel's instances. To have few of them, WIDTH 3 has 4 and WIDTH 7 has 8.
static int forward_columns(const FewProblem &p, FewMath math)
{
    const int width = forward_width(p, math);
    return width == 3 || (width == 0 && p.out_channels <= 32) ? 4 : 8;
}

template <typename T, int MATH, int COLUMNS, int WIDTH>
static cuda_ops_status launch_forward(const FewProblem &p, size_t shared, ConvDevice device, cudaStream_t stream)
{
    const auto kernel = conv2d_few_channels_forward_kernel<T, MATH, COLUMNS, WIDTH>;
    constexpr int THREADS = forward_threads<MATH>;
    const int64_t channel_tiles = ceil_div(p.out_channels, 8 * COLUMNS);
    const int64_t resident_blocks = ceil_div(few_resident_blocks(kernel, THREADS, shared, device), channel_tiles);
    const dim3 grid((unsigned int)(p.tiles < resident_blocks ? p.tiles : resident_blocks), (unsigned int)channel_tiles);
    launch_dependent(kernel, grid, dim3(THREADS), shared, stream, p);
    return launch_status();
}

template <typename T, int MATH>
static cuda_ops_status launch_forward(FewProblem p, ConvDevice device, cudaStream_t stream)
{
    size_t shared = 0;
    const int columns = forward_columns(p, (FewMath)MATH);
    if (!plan_forward(p, (FewMath)MATH, sizeof(T), columns, device, shared))
        return CUDA_OPS_INVALID_ARGUMENT;
    if constexpr (MATH == FEW_FMA) {
        if (forward_width(p, FEW_FMA) == 7)
            return launch_forward<T, MATH, 8, 7>(p, shared, device, stream);
        if (forward_width(p, FEW_FMA) == 3)
            return launch_forward<T, MATH, 4, 3>(p, shared, device, stream);
    }
    return columns == 8 ? launch_forward<T, MATH, 8, 0>(p, shared, device, stream)
                        : launch_forward<T, MATH, 4, 0>(p, shared, device, stream);
}

static bool forward_supports(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    const FewMath math = few_math(call);
    return plan_forward(p, math, call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2, forward_columns(p, math), device, shared);
}

static cuda_ops_status forward(const ConvCall &call, ConvDevice device)
{
    const FewProblem p = direct_problem<FewProblem>(call);
    switch (call.dtype) {
    case CUDA_OPS_FLOAT16:
        return launch_forward<__half, FEW_16BIT>(p, device, call.stream);
    case CUDA_OPS_BFLOAT16:
        return launch_forward<__nv_bfloat16, FEW_16BIT>(p, device, call.stream);
    default:
        if (call.sizes.allow_tf32)
            return launch_forward<float, FEW_TF32>(p, device, call.stream);
        return launch_forward<float, FEW_FMA>(p, device, call.stream);
    }
}

Answer conv2d_few_channels_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    if (s.in_channels < 1 || s.in_channels > FEW_MOST_CHANNELS)
        return no("takes one to four input channels");
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("does not take float64");
    if (s.in_channels * s.in_height * s.in_width > INT_MAX) // offsets within an image of input are of 32 bits
        return CONV_IS_LARGE;
    // Turing has no mma.sync for TF32 and bf16; the rest of the path is not worth compiling for it.
    if (device.capability < 80)
        return NEEDS_80;
    const bool fits = call.pass == CUDA_OPS_CONV2D_FORWARD ? forward_supports(call, device)
                      : call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT
                          ? conv2d_few_channels_backward_input_supports(call, device)
                          : conv2d_few_channels_backward_weight_supports(call, device);
    return fits ? YES : no("no tile of such a kernel, with its patch of the image, fits into shared memory");
}

// Tiles have 32 output channels or more. With fewer they are still faster than other paths (measured at 4 and 6), but
// for a single input channel, which the depthwise path takes, and for 4 output channels by FMA. backward_input sums
// over output channels, in slices of 8 to 32.
//
// By FMA a tile takes long where rows of the kernel are not read at once (strides): some 50 us with 3 channels and 7x7,
// forward and for the gradient of input. Below so many tiles to eight multiprocessors simt's smaller ones are faster,
// as an H200 had it.
static constexpr int64_t STRIDED_TILES = 12, STRIDED_TILES_3X3 = 6;
static constexpr int64_t STRIDED_TILES_BACKWARD = 2, STRIDED_TILES_BACKWARD_3X3 = 1;
// From this stride on by FMA, and so many taps of a strided gradient of weight in 16 bits, other paths take less time.
static constexpr int64_t LARGE_STRIDE = 3, MANY_TAPS = 64;

// A 1x1 kernel is a product of matrices but for what an H100 had otherwise: gradients of contiguous images in 16 bits, of
// which the GEMM makes a product each with so few rows, and of very many pixels in TF32.
static constexpr int64_t MANY_PIXELS_1X1 = 150000, MANY_IMAGES_1X1 = 32, FEW_1X1 = 2;

static bool takes_1x1(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (call.pass != CUDA_OPS_CONV2D_BACKWARD_INPUT || s.stride_height != 1 || s.stride_width != 1)
        return false;
    if (call.dtype == CUDA_OPS_FLOAT32)
        return s.allow_tf32 && s.in_channels > 2 && s.batch * s.out_height * s.out_width >= MANY_PIXELS_1X1;
    return !s.output_channels_last && s.out_height * s.out_width > 1 && s.in_channels <= FEW_1X1 &&
           s.batch >= MANY_IMAGES_1X1;
}

Answer conv2d_few_channels_is_fast(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.kernel_height * s.kernel_width == 1 && !takes_1x1(call))
        return no("a 1x1 kernel has no taps whose pixels it could share");
    if (few_math(call) == FEW_FMA && call.pass != CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height >= LARGE_STRIDE &&
        s.stride_width >= LARGE_STRIDE)
        return no("under a large stride its tiles have few pixels for the patch of input");
    if (few_math(call) == FEW_FMA && call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height == 1 &&
        s.stride_width == 1 && conv2d_im2col_supports(call, device))
        return no("the GEMM makes the sums of few channels faster, by way of columns");
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT && call.dtype != CUDA_OPS_FLOAT32 &&
        s.stride_height * s.stride_width > 1 && s.kernel_height * s.kernel_width >= MANY_TAPS)
        return no("patches, or padded channels, have so many taps in less time");
    if (few_math(call) == FEW_FMA && s.stride_height * s.stride_width > 1) {
        const int64_t tiles = ceil_div(s.batch * s.out_height * s.out_width, TILE_PIXELS);
        const bool is_small = s.kernel_height * s.kernel_width <= 9;
        const int64_t enough = call.pass == CUDA_OPS_CONV2D_FORWARD ? (is_small ? STRIDED_TILES_3X3 : STRIDED_TILES)
                               : call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT
                                   ? (is_small ? STRIDED_TILES_BACKWARD_3X3 : STRIDED_TILES_BACKWARD)
                                   : 0;
        if (8 * tiles < enough * device.multiprocessors)
            return no("too few tiles, of which each takes long");
    }
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height == 1 && s.stride_width == 1)
        return s.out_channels > 1 ? YES : no("a single output channel");
    return s.out_channels >= 8 || (s.in_channels > 1 && s.out_channels >= (few_math(call) == FEW_FMA ? 6 : 4))
               ? YES
               : no("too few output channels for its tiles of 32");
}

size_t conv2d_few_channels_workspace(const ConvCall &call, ConvDevice device)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? conv2d_few_channels_backward_weight_workspace(call, device)
                                                        : 0;
}

cuda_ops_status conv2d_few_channels(const ConvCall &call, ConvDevice device)
{
    if (call.pass == CUDA_OPS_CONV2D_FORWARD)
        return forward(call, device);
    if (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT)
        return conv2d_few_channels_backward_input(call, device);
    return conv2d_few_channels_backward_weight(call, device);
}
