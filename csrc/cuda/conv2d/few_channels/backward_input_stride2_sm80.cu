// conv2d of one to four input channels and stride 2, backward_input by mma.sync (fp16, bf16, TF32):
//
//   grad_input[n][c][y][x] = sum over o, r, s of grad_output[n][o][(y + padding - r) / 2][...] * weight[o][c][r][s]
//
// where the divisions leave no remainder. Four neighbouring pixels of grad_input, one of each stride phase, read the
// same window of grad_output, half the kernel's height and width, and are one pixel of a tile: a value of grad_output,
// once read from shared memory, serves all rows of the kernel in two phases. Each phase has instructions of its own, so
// that none meets a tap of another, not even as zero times infinity. Persistent blocks take tiles with a patch of
// grad_output, a chunk of channels at a time, the next in flight; a warp has 16 columns and 8 rows of four pixels.
// Bound by the instructions, of whose columns three channels fill three of eight: 0.15 of memory's speed at 64x3 to 64,
// 224x224, 7x7 in bf16, 0.23 at 3x3.
#include "common/aligned_vector.cuh"
#include "conv2d/few_channels/backward_input.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

static constexpr int STRIDE = 2, WARP_COLUMNS = 16, WARP_ROWS = 8;
static constexpr int RESULT_COLUMNS = STRIDE * WARP_COLUMNS; // of grad_input, in a row of a warp's tile
static_assert(RESULT_COLUMNS == WARP_SIZE, "one per lane");

// HEIGHT: the kernel's, where the loop over its rows is unrolled; else 0. One long function: the accumulators of the
// main loop are the epilogue's, and a chunk's loads overlap the products of the one before.
template <typename T, int MATH, int HEIGHT>
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

    few_arrange_weight<T, MATH>(weights, p, chunks, false);

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

// Chooses the arrangement of a block's warps, and with it the tile and the patch. False where none fits.
static bool plan(FewProblem &p, const ConvCall &call, size_t most_shared, size_t &shared)
{
    const int64_t taps = (int64_t)p.kernel_height * p.kernel_width, chunk = call.dtype == CUDA_OPS_FLOAT32 ? 8 : 16;
    if (p.stride_height != STRIDE || p.stride_width != STRIDE || p.dilation_height != 1 || p.dilation_width != 1 ||
        few_math(call) == FEW_FMA)
        return false;
    if (p.out_channels < 1 || taps > 4096 || p.out_channels > 1 << 20 || (int64_t)p.out_height * p.out_width > INT_MAX)
        return false;
    // Rows and columns of groups of four: from the one with grad_input's first pixel to the one with its last.
    const int64_t rows_of_four = ((int64_t)p.height - 1 + p.padding_top) / STRIDE - p.padding_top / STRIDE + 1,
                  columns_of_four = ((int64_t)p.width - 1 + p.padding_left) / STRIDE - p.padding_left / STRIDE + 1;
    double least = 0;
    for (int warps_x = 1; warps_x <= FEW_WARPS; warps_x *= 2) {
        const int width = warps_x * WARP_COLUMNS, height = FEW_WARPS / warps_x * WARP_ROWS;
        // The patch starts up to three columns further left, at a multiple of four, and is whole fours.
        const int64_t rows = height + (p.kernel_height + 1) / 2 - 1,
                      columns = ceil_div(width + (p.kernel_width + 1) / 2 - 1 + 3, 4) * 4;
        if (rows * columns >= 1 << 15 || !few_patch_fits(p, rows, columns))
            continue;
        const size_t bytes = 4 * (size_t)(2 * rows * columns * WORDS + ceil_div(p.out_channels, chunk) * taps * 32 +
                                          FEW_WARPS * STRIDE * RESULT_COLUMNS * FEW_MOST_CHANNELS);
        if (bytes > most_shared)
            continue;
        if (!few_keep_cheaper(p, columns_of_four, rows_of_four, width, height, rows, columns,
                              4000.0 + (double)(rows * columns), least))
            continue;
        p.warps_x = warps_x;
        p.patch = (int)(rows * columns * WORDS);
        p.by_rows = make_divisor(ceil_div(columns / 4, 4)); // a warp copies 4 quads of columns at a time
        shared = bytes;
    }
    if (least == 0)
        return false;
    p.tiles = p.batch * p.tiles_x * p.tiles_y;
    const int element = call.dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    const bool whole = p.out.c == 1 ? p.out_channels % (16 / element) == 0 : p.out_width % 4 == 0;
    p.vector = whole && is_aligned_16(call.output) ? 16 : element;
    return true;
}

template <typename T, int MATH>
static cuda_ops_status launch(const FewProblem &p, size_t shared, ConvDevice device, cudaStream_t stream)
{
    const auto kernel = p.kernel_height == 7 ? conv2d_few_channels_backward_input_stride2_kernel<T, MATH, 7>
                                             : conv2d_few_channels_backward_input_stride2_kernel<T, MATH, 0>;
    const int64_t resident_blocks = few_resident_blocks(kernel, FEW_THREADS, shared, device);
    kernel<<<(unsigned int)(p.tiles < resident_blocks ? p.tiles : resident_blocks), FEW_THREADS, shared, stream>>>(p);
    return launch_status();
}

bool conv2d_few_channels_backward_input_stride2_supports(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    return plan(p, call, few_most_shared(device.capability), shared);
}

cuda_ops_status conv2d_few_channels_backward_input_stride2(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    if (!plan(p, call, few_most_shared(device.capability), shared))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (call.dtype) {
    case CUDA_OPS_FLOAT16:
        return launch<__half, FEW_16BIT>(p, shared, device, call.stream);
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16, FEW_16BIT>(p, shared, device, call.stream);
    default:
        return launch<float, FEW_TF32>(p, shared, device, call.stream);
    }
}
