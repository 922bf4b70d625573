// conv2d of one to four input channels and stride 2, backward_input:
//
//   grad_input[n][c][y][x] = sum over o, r, s of grad_output[n][o][(y + padding - r) / 2][...] * weight[o][c][r][s]
//
// where the divisions leave no remainder. Four neighbouring pixels of grad_input, one of each stride phase, read the
// same window of grad_output, half the kernel's height and width, and are one pixel of a tile: a value of grad_output,
// once read from shared memory, serves all rows of the kernel in two phases. Each phase has instructions of its own, so
// that none meets a tap of another, not even as zero times infinity. Persistent blocks take tiles with a patch of
// grad_output, a chunk of channels at a time. mma.sync (fp16, bf16, TF32): the next chunk is in flight; a warp has 16
// columns and 8 rows of four pixels, or 2 where images are few. FMA: a lane has one column and 7 rows, or 2. Bound by
// the instructions, of mma.sync's columns three channels fill three of eight: 0.15 of memory's speed at 64x3 to 64,
// 224x224, 7x7 in bf16, 0.23 at 3x3.
#include "common/aligned_vector.cuh"
#include "conv2d/few_channels/backward_input.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

static constexpr int STRIDE = 2, WARP_COLUMNS = 16, MOST_ROWS = 8, FEWEST_ROWS = 2;
static constexpr int RESULT_COLUMNS = STRIDE * WARP_COLUMNS; // of grad_input, in a row of a warp's tile
static_assert(RESULT_COLUMNS == WARP_SIZE, "one per lane");

// HEIGHT: the kernel's, where the loop over its rows is unrolled; else 0. WARP_ROWS: of four pixels. One long function:
// the accumulators of the main loop are the epilogue's, and a chunk's loads overlap the products of the one before.
template <typename T, int MATH, int HEIGHT, int WARP_ROWS>
__global__ void __launch_bounds__(FEW_THREADS, MATH == FEW_16BIT && HEIGHT == 0 ? 3 : 2)
    conv2d_few_channels_backward_input_stride2_kernel(const __grid_constant__ FewProblem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int PER_WORD = 4 / sizeof(T), CHANNELS = WORDS * PER_WORD; // output channels in a word and in a patch
    extern __shared__ __align__(16) uint32_t shared[];
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int chunks = (p.out_channels + CHANNELS - 1) / CHANNELS, kernel = p.kernel_height * p.kernel_width;
    const int window_y = (p.kernel_height + 1) / 2, window_x = (p.kernel_width + 1) / 2;
    uint32_t *const patches = shared;
    uint32_t *const weights = patches + 2 * p.patch; // [chunk][s][r][channel][word % 4][2]

    wait_for_predecessor();
    release_successor();

    // A tile's corner is row y0, column x0 of groups of four pixels, which are rows 2 * y0 - padding and the next one
    // of grad_input, and read rows y0 - window + 1 to y0 of grad_output.
    const int warp_x = warp % p.warps_x * WARP_COLUMNS, warp_y = warp / p.warps_x * WARP_ROWS;
    const auto locate = [&](int64_t tile, int64_t &n, int &y0, int &x0) {
        const FewTile at = few_tile(p, tile);
        n = at.n;
        y0 = p.padding_top / STRIDE + at.y * p.tile_height;
        x0 = p.padding_left / STRIDE + at.x * p.tile_width;
    };

    float sum[STRIDE][STRIDE][WARP_ROWS][4] = {}; // [phase of x][phase of y]
    int64_t tile = blockIdx.x;
    for (int chunk = -1, buffer = 1;;
         buffer ^= 1) { // starts before the first chunk: patches are then fetched at one point of the code
        const int next_chunk = chunk + 1 < chunks ? chunk + 1 : 0;
        const int64_t next_tile = chunk + 1 < chunks ? tile : tile + gridDim.x;
        int64_t n;
        int y0, x0;
        cp_async_wait_all();
        __syncthreads(); // this patch has arrived, and the other one has been read
        if (next_tile < p.tiles) {
            locate(next_tile, n, y0, x0);
            few_fetch_grad(patches + (buffer ^ 1) * p.patch, p, (const T *)p.output + n * p.out.n,
                           next_chunk * CHANNELS, y0 - window_y + 1, (x0 - window_x + 1) & ~3);
        }
        if (chunk < 0) // beside the first patch
            few_arrange_weight<T, MATH>(weights, p, chunks, false);
        if (chunk >= 0) {
            locate(tile, n, y0, x0);
            const int skipped = (x0 - window_x + 1) & 3; // columns of the patch to the left of the first one read
            const uint32_t *const patch = patches + buffer * p.patch;
            const uint32_t row_bytes = p.columns * WORDS * 4;
            const uint2 *taps = (const uint2 *)(weights + chunk * kernel * 32) + (g % 4 * 4 + t);
#pragma unroll 1
            for (int back = 0; back < window_x; back++) {
                const uint32_t from = few_grad_address(patch, p, warp_y, skipped + warp_x + window_x - 1 - back);
#pragma unroll
                for (int x = 0; x < STRIDE; x++, taps += p.kernel_height * 16) {
                    if (STRIDE * back + x >= p.kernel_width)
                        break;
                    if constexpr (HEIGHT > 0) {
                        constexpr int WINDOW = (HEIGHT + 1) / 2;
                        uint2 b[HEIGHT];
#pragma unroll
                        for (int r = 0; r < HEIGHT; r++)
                            b[r] = g < 4 ? taps[r * 16] : make_uint2(0, 0);
#pragma unroll
                        for (int line = 0; line < WARP_ROWS + WINDOW - 1; line++) {
                            uint32_t a[4];
                            few_load_grad<MATH>(a, from + line * row_bytes);
#pragma unroll
                            for (int r = 0; r < HEIGHT; r++) {
                                const int row = line - (WINDOW - 1 - r / STRIDE);
                                if (row >= 0 && row < WARP_ROWS)
                                    mma_sync<T>(sum[x][r % STRIDE][row], a, b[r].x, b[r].y);
                            }
                        }
                    } else {
#pragma unroll
                        for (int y = 0; y < STRIDE; y++)
                            for (int r = y; r < p.kernel_height; r += STRIDE) {
                                const uint2 b = g < 4 ? taps[r * 16] : make_uint2(0, 0);
                                const uint32_t at = from + (window_y - 1 - r / STRIDE) * row_bytes;
#pragma unroll
                                for (int row = 0; row < WARP_ROWS; row++) {
                                    uint32_t a[4];
                                    few_load_grad<MATH>(a, at + row * row_bytes);
                                    mma_sync<T>(sum[x][y][row], a, b.x, b.y);
                                }
                            }
                    }
                }
            }
        }

        if (chunk == chunks - 1) {
            // A row of the warp's pixels goes through shared memory, so that lanes write neighbours, whole sectors,
            // where a phase alone would write half of each.
            const bool last = p.in.c == 1 || p.channels == 1;
            const int x_first = STRIDE * (x0 + warp_x) - p.padding_left, row_size = RESULT_COLUMNS * p.channels;
            T *const result = (T *)p.result + n * p.in.n;
            T *const rows = (T *)(weights + chunks * kernel * 32) + warp * STRIDE * RESULT_COLUMNS * FEW_MOST_CHANNELS;
#pragma unroll
            for (int row = 0; row < WARP_ROWS; row++) {
                __syncwarp(); // the previous rows have been read
#pragma unroll
                for (int i = 0; i < STRIDE * STRIDE; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &value = sum[i % STRIDE][i / STRIDE][row][e];
                        const int c = 2 * t + e % 2, x = STRIDE * (e / 2 * 8 + g) + i % STRIDE;
                        if (c < p.channels)
                            rows[i / STRIDE * row_size + (last ? x * p.channels + c : c * RESULT_COLUMNS + x)] =
                                store_from_accumulate<T>(value);
                        value = 0;
                    }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < STRIDE; i++) {
                    const int y = STRIDE * (y0 + warp_y + row) + i - p.padding_top;
                    if ((unsigned int)y >= (unsigned int)p.height)
                        continue;
                    // Elements of a row of the result: of all channels (channels_last), or of one channel after
                    // another.
                    const int first = last ? x_first * p.channels : x_first,
                              end = last ? p.width * p.channels : p.width;
                    T *line = result + y * p.in.y;
#pragma unroll 1
                    for (int channel = 0; channel < p.channels; channel++) {
                        const int at = first + lane + (last ? channel * RESULT_COLUMNS : 0);
                        if ((unsigned int)at < (unsigned int)end)
                            line[at] = rows[i * row_size + channel * RESULT_COLUMNS + lane];
                        line += last ? 0 : p.in.c;
                    }
                }
            }
        }
        if (next_tile >= p.tiles)
            break;
        chunk = next_chunk;
        tile = next_tile;
    }
#endif
}

// By FMA: a lane has one column and LANE_ROWS rows of four pixels, of all channels; blocks take turns at loading and
// multiplying.
static constexpr int MOST_LANE_ROWS = 7;

template <int CHANNELS, int HEIGHT, int LANE_ROWS>
__global__ void __launch_bounds__(FEW_THREADS, HEIGHT > 0 ? 4 : 3)
    conv2d_few_channels_backward_input_stride2_fma_kernel(const __grid_constant__ FewProblem p)
{
    extern __shared__ __align__(16) float fma_shared[];
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const int kernel = p.kernel_height * p.kernel_width, plane = p.rows * p.columns;
    const int window_y = (p.kernel_height + 1) / 2, window_x = (p.kernel_width + 1) / 2;
    float *const patch = fma_shared;
    float4 *const weights = (float4 *)(patch + FMA_CHANNELS * plane); // [output channel][s][r]
    const int lane_x = warp % p.warps_x * WARP_SIZE + lane, warp_y = warp / p.warps_x * LANE_ROWS;
    wait_for_predecessor();
    release_successor();
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const FewTile of = few_tile(p, tile);
        const int y0 = p.padding_top / STRIDE + of.y * p.tile_height,
                  x0 = p.padding_left / STRIDE + of.x * p.tile_width;
        const int left = x0 - window_x + 1, aligned_left = left & ~3;
        const float *const image = (const float *)p.output + of.n * p.out.n;

        float sum[STRIDE][STRIDE][LANE_ROWS][CHANNELS] = {}; // [phase of x][phase of y]
        for (int first = 0; first < p.out_channels; first += FMA_CHANNELS) {
            const int valid = min(FMA_CHANNELS, p.out_channels - first);
            __syncthreads(); // the patch has been multiplied
            few_fetch_planes(patch, p, image, first, valid, y0 - window_y + 1, aligned_left);
            for (int i = thread; i < valid * kernel; i += FEW_THREADS) {
                const int o = i / kernel, tap = i % kernel, s = tap / p.kernel_height, r = tap % p.kernel_height;
                weights[i] = few_filter_tap<CHANNELS>(p, first + o, r, s);
            }
            cp_async_wait_all();
            __syncthreads();

            for (int o = 0; o < valid; o++) {
                const float *at = patch + o * plane + warp_y * p.columns + lane_x + left - aligned_left + window_x - 1;
                const float4 *taps = weights + o * kernel;
#pragma unroll 1
                for (int back = 0; back < window_x; back++, at--) {
                    const auto multiply = [&](float(&value)[CHANNELS], float4 w, float x) {
                        value[0] += x * w.x;
                        if constexpr (CHANNELS > 1)
                            value[1] += x * w.y;
                        if constexpr (CHANNELS > 2)
                            value[2] += x * w.z;
                        if constexpr (CHANNELS > 3)
                            value[3] += x * w.w;
                    };
                    constexpr int WINDOW = (HEIGHT + 1) / 2;
                    float window[HEIGHT > 0 ? LANE_ROWS + WINDOW - 1 : 1];
                    if constexpr (HEIGHT > 0) {
#pragma unroll
                        for (int i = 0; i < LANE_ROWS + WINDOW - 1; i++)
                            window[i] = at[i * p.columns];
                    }
#pragma unroll
                    for (int x = 0; x < STRIDE; x++, taps += p.kernel_height) {
                        if (STRIDE * back + x >= p.kernel_width)
                            break;
                        if constexpr (HEIGHT > 0) {
#pragma unroll
                            for (int r = 0; r < HEIGHT; r++) {
                                const float4 w = taps[r];
#pragma unroll
                                for (int row = 0; row < LANE_ROWS; row++)
                                    multiply(sum[x][r % STRIDE][row], w, window[row + WINDOW - 1 - r / STRIDE]);
                            }
                        } else {
#pragma unroll
                            for (int y = 0; y < STRIDE; y++)
                                for (int r = y; r < p.kernel_height; r += STRIDE) {
                                    const float4 w = taps[r];
                                    const float *const line = at + (window_y - 1 - r / STRIDE) * p.columns;
#pragma unroll
                                    for (int row = 0; row < LANE_ROWS; row++)
                                        multiply(sum[x][y][row], w, line[row * p.columns]);
                                }
                        }
                    }
                }
            }
        }

        float *const result = (float *)p.result + of.n * p.in.n;
#pragma unroll
        for (int row = 0; row < LANE_ROWS; row++)
#pragma unroll
            for (int i = 0; i < STRIDE * STRIDE; i++) {
                const int y = STRIDE * (y0 + warp_y + row) + i / STRIDE - p.padding_top;
                const int x = STRIDE * (x0 + lane_x) + i % STRIDE - p.padding_left;
                if ((unsigned int)y < (unsigned int)p.height && (unsigned int)x < (unsigned int)p.width)
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++)
                        if (c < p.channels)
                            result[c * p.in.c + y * p.in.y + x * p.in.x] = sum[i % STRIDE][i / STRIDE][row][c];
            }
    }
}

// Chooses the arrangement of a block's warps of `warp_rows` rows, and with it the tile and the patch. False where none
// fits.
static bool plan_tiles(FewProblem &p, const ConvCall &call, int warp_rows, size_t most_shared, size_t &shared)
{
    const bool fma = few_math(call) == FEW_FMA;
    const int64_t taps = (int64_t)p.kernel_height * p.kernel_width, chunk = call.dtype == CUDA_OPS_FLOAT32 ? 8 : 16;
    const int warp_columns = fma ? WARP_SIZE : WARP_COLUMNS;
    // Rows and columns of groups of four: from the one with grad_input's first pixel to the one with its last.
    const int64_t rows_of_four = ((int64_t)p.height - 1 + p.padding_top) / STRIDE - p.padding_top / STRIDE + 1,
                  columns_of_four = ((int64_t)p.width - 1 + p.padding_left) / STRIDE - p.padding_left / STRIDE + 1;
    double least = 0;
    for (int warps_x = 1; warps_x <= FEW_WARPS; warps_x *= 2) {
        const int width = warps_x * warp_columns, height = FEW_WARPS / warps_x * warp_rows;
        // The patch starts up to three columns further left, at a multiple of four, and is whole fours.
        const int64_t rows = height + (p.kernel_height + 1) / 2 - 1,
                      columns = ceil_div(width + (p.kernel_width + 1) / 2 - 1 + 3, 4) * 4;
        if (rows * columns >= 1 << 15 || !few_patch_fits(p, rows, columns))
            continue;
        const size_t bytes =
            fma ? 4 * (size_t)(FMA_CHANNELS * (rows * columns + 4 * taps))
                : 4 * (size_t)(2 * rows * columns * WORDS + ceil_div(p.out_channels, chunk) * taps * 32 +
                               FEW_WARPS * STRIDE * RESULT_COLUMNS * FEW_MOST_CHANNELS);
        if (bytes > most_shared)
            continue;
        if (!few_keep_cheaper(p, columns_of_four, rows_of_four, width, height, rows, columns,
                              500.0 * warp_rows + (double)(rows * columns), least))
            continue;
        p.warps_x = warps_x;
        p.patch = (int)(rows * columns * WORDS);
        // The divisor of the copies that run along quads of columns: units of 4 quads (mma.sync), quads (FMA).
        p.by_rows = make_divisor((int)(fma ? columns / 4 : ceil_div(columns / 4, 4)));
        shared = bytes;
    }
    p.tiles = p.batch * p.tiles_x * p.tiles_y;
    return least > 0;
}

// The same with as many rows of a warp as leave a tile to each multiprocessor; `warp_rows` receives them.
static bool plan(FewProblem &p, const ConvCall &call, ConvDevice device, size_t &shared, int &warp_rows)
{
    const size_t most_shared = few_most_shared(device.capability);
    if (p.stride_height != STRIDE || p.stride_width != STRIDE || p.dilation_height != 1 || p.dilation_width != 1)
        return false;
    if (p.out_channels < 1 || (int64_t)p.kernel_height * p.kernel_width > 4096 || p.out_channels > 1 << 20 ||
        (int64_t)p.out_height * p.out_width > INT_MAX)
        return false;
    warp_rows = few_math(call) == FEW_FMA ? MOST_LANE_ROWS : MOST_ROWS;
    bool fits = plan_tiles(p, call, warp_rows, most_shared, shared);
    if (!fits || p.tiles < device.multiprocessors) {
        warp_rows = FEWEST_ROWS;
        fits = plan_tiles(p, call, warp_rows, most_shared, shared);
    }
    const int element = call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    const bool whole = p.out.c == 1 ? p.out_channels % (16 / element) == 0 : p.out_width % 4 == 0;
    p.vector = whole && is_aligned_16(call.output) ? 16 : element;
    return fits;
}

template <typename Kernel>
static cuda_ops_status launch_kernel(Kernel kernel, const FewProblem &p, size_t shared, ConvDevice device,
                                     cudaStream_t stream)
{
    const int64_t resident_blocks = few_resident_blocks(kernel, FEW_THREADS, shared, device);
    launch_dependent(kernel, dim3((unsigned int)(p.tiles < resident_blocks ? p.tiles : resident_blocks)),
                     dim3(FEW_THREADS), shared, stream, p);
    return launch_status();
}

template <typename T, int MATH>
static cuda_ops_status launch(const FewProblem &p, size_t shared, int warp_rows, ConvDevice device, cudaStream_t stream)
{
    return launch_kernel(
        warp_rows == FEWEST_ROWS ? conv2d_few_channels_backward_input_stride2_kernel<T, MATH, 0, FEWEST_ROWS>
        : p.kernel_height == 7   ? conv2d_few_channels_backward_input_stride2_kernel<T, MATH, 7, MOST_ROWS>
                                 : conv2d_few_channels_backward_input_stride2_kernel<T, MATH, 0, MOST_ROWS>,
        p, shared, device, stream);
}

template <int LANE_ROWS>
static cuda_ops_status launch_fma(const FewProblem &p, size_t shared, ConvDevice device, cudaStream_t stream)
{
    const bool few = p.channels <= 3;
    return launch_kernel(
        few && p.kernel_height == 7   ? conv2d_few_channels_backward_input_stride2_fma_kernel<3, 7, LANE_ROWS>
        : few && p.kernel_height == 3 ? conv2d_few_channels_backward_input_stride2_fma_kernel<3, 3, LANE_ROWS>
                                      : conv2d_few_channels_backward_input_stride2_fma_kernel<4, 0, LANE_ROWS>,
        p, shared, device, stream);
}

bool conv2d_few_channels_backward_input_stride2_supports(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    int warp_rows;
    return plan(p, call, device, shared, warp_rows);
}

cuda_ops_status conv2d_few_channels_backward_input_stride2(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    int warp_rows;
    if (!plan(p, call, device, shared, warp_rows))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (call.dtype) {
    case CUDA_OPS_FLOAT16:
        return launch<__half, FEW_16BIT>(p, shared, warp_rows, device, call.stream);
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16, FEW_16BIT>(p, shared, warp_rows, device, call.stream);
    default:
        if (call.sizes.allow_tf32)
            return launch<float, FEW_TF32>(p, shared, warp_rows, device, call.stream);
        return warp_rows == FEWEST_ROWS ? launch_fma<FEWEST_ROWS>(p, shared, device, call.stream)
                                        : launch_fma<MOST_LANE_ROWS>(p, shared, device, call.stream);
    }
}
