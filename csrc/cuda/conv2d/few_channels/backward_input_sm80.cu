// conv2d of one to four input channels and stride 1, backward_input:
//
//   grad_input[n][c][y][x] = sum over o, r, s of weight[o][c][r][s] *
//                                                grad_output[n][o][y + padding - r * dilation][alike in x]
//
// A pixel has few results, so that they fill half of an instruction's columns at most; what matters is not to read
// grad_output from shared memory again for each result and tap. A lane or warp therefore sums several rows of
// grad_input at the same columns: a value of grad_output, once read, serves all rows of the kernel. Persistent blocks
// take tiles with a patch of grad_output, a chunk of channels at a time. mma.sync (fp16, bf16, TF32): a warp has 32
// columns and 8 rows. FMA: a lane has one column and 14 rows, of all channels. Bound by the rate of the instructions
// (7x7), by reading grad_output (3x3 of 1 channel to 32).
#include "common/aligned_vector.cuh"
#include "conv2d/few_channels/backward_input.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

static constexpr int WARP_ROWS = 8;

template <typename T, int MATH, int HEIGHT>
__global__ void __launch_bounds__(FEW_THREADS, 3)
    conv2d_few_channels_backward_input_kernel(const __grid_constant__ FewProblem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int PER_WORD = 4 / sizeof(T), CHANNELS = WORDS * PER_WORD; // output channels in a word and in a patch
    extern __shared__ __align__(16) uint32_t shared[];
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int chunks = (p.out_channels + CHANNELS - 1) / CHANNELS, kernel = p.kernel_height * p.kernel_width;
    uint32_t *const patch = shared;
    // [chunk][s][r][channel][word % 4][2], rows and columns of the kernel counted from their ends
    uint32_t *const weights = patch + p.rows * p.columns * WORDS;

    wait_for_predecessor();
    release_successor();
    few_arrange_weight<T, MATH>(weights, p, chunks, true);
    const int warp_x = warp % p.warps_x * WARP_SIZE, warp_y = warp / p.warps_x * WARP_ROWS;
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int64_t n = tile / (p.tiles_x * p.tiles_y);
        const int rest = (int)(tile - n * (p.tiles_x * p.tiles_y));
        const int y0 = rest / p.tiles_x * p.tile_height, x0 = rest % p.tiles_x * p.tile_width;
        // grad_output's row and column in the corner of the patch; columns are aligned down to four.
        const int top = y0 + p.padding_top - (p.kernel_height - 1) * p.dilation_height;
        const int left = x0 + p.padding_left - (p.kernel_width - 1) * p.dilation_width;
        const int aligned_left = left & ~3;
        const T *const image = (const T *)p.output + n * p.out.n;

        float sum[2][WARP_ROWS][4] = {};
        for (int chunk = 0; chunk < chunks; chunk++) {
            __syncthreads(); // the patch has been multiplied
            few_fetch_grad(patch, p, image, chunk * CHANNELS, top, aligned_left);
            cp_async_wait_all();
            __syncthreads();

            const uint32_t *const chunk_weights = weights + chunk * kernel * 32;
            for (int s = 0; s < p.kernel_width; s++) {
                const uint32_t from =
                    few_grad_address(patch, p, warp_y, left - aligned_left + warp_x + s * p.dilation_width);
                const uint32_t row_bytes = p.columns * WORDS * 4;
                const uint2 *const taps = (const uint2 *)(chunk_weights + s * p.kernel_height * 32) + (g % 4 * 4 + t);
                if constexpr (HEIGHT > 0) {
                    uint2 b[HEIGHT];
#pragma unroll
                    for (int r = 0; r < HEIGHT; r++)
                        b[r] = g < 4 ? taps[r * 16] : make_uint2(0, 0);
#pragma unroll
                    for (int row = 0; row < WARP_ROWS + HEIGHT - 1; row++) {
                        uint32_t a[2][4];
                        few_load_grad<MATH>(a[0], from + row * row_bytes);
                        few_load_grad<MATH>(a[1], from + row * row_bytes + 16 * WORDS * 4);
#pragma unroll
                        for (int r = 0; r < HEIGHT; r++)
                            if (row - r >= 0 && row - r < WARP_ROWS) {
                                mma_sync<T>(sum[0][row - r], a[0], b[r].x, b[r].y);
                                mma_sync<T>(sum[1][row - r], a[1], b[r].x, b[r].y);
                            }
                    }
                } else {
                    for (int r = 0; r < p.kernel_height; r++) {
                        const uint2 b = g < 4 ? taps[r * 16] : make_uint2(0, 0);
                        const uint32_t at = from + r * p.dilation_height * row_bytes;
#pragma unroll
                        for (int row = 0; row < WARP_ROWS; row++) {
                            uint32_t a[2][4];
                            few_load_grad<MATH>(a[0], at + row * row_bytes);
                            few_load_grad<MATH>(a[1], at + row * row_bytes + 16 * WORDS * 4);
                            mma_sync<T>(sum[0][row], a[0], b.x, b.y);
                            mma_sync<T>(sum[1][row], a[1], b.x, b.y);
                        }
                    }
                }
            }
        }

        T *const result = (T *)p.result + n * p.in.n;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int row = 0; row < WARP_ROWS; row++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int c = 2 * t + e % 2, y = y0 + warp_y + row, x = x0 + warp_x + i * 16 + e / 2 * 8 + g;
                    if (c < p.channels && y < p.height && x < p.width)
                        result[c * p.in.c + y * p.in.y + x * p.in.x] = store_from_accumulate<T>(sum[i][row][e]);
                }
    }
#endif
}

// By FMA, with the loop over taps with and without a fixed height.
static constexpr int LANE_ROWS = 14;

template <int CHANNELS, int HEIGHT>
__global__ void __launch_bounds__(FEW_THREADS, 4)
    conv2d_few_channels_backward_input_fma_kernel(const __grid_constant__ FewProblem p)
{
    extern __shared__ __align__(16) float fma_shared[];
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    const int kernel = p.kernel_height * p.kernel_width, plane = p.rows * p.columns;
    float *const patch = fma_shared;
    float4 *const weights = (float4 *)(patch + FMA_CHANNELS * plane); // [output channel][s][r], from their ends

    const int lane_x = warp % p.warps_x * WARP_SIZE + lane, warp_y = warp / p.warps_x * LANE_ROWS;
    wait_for_predecessor();
    release_successor();
    for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int64_t n = tile / (p.tiles_x * p.tiles_y);
        const int rest = (int)(tile - n * (p.tiles_x * p.tiles_y));
        const int y0 = rest / p.tiles_x * p.tile_height, x0 = rest % p.tiles_x * p.tile_width;
        const int top = y0 + p.padding_top - (p.kernel_height - 1) * p.dilation_height;
        const int left = x0 + p.padding_left - (p.kernel_width - 1) * p.dilation_width;
        const int aligned_left = left & ~3;
        const float *const image = (const float *)p.output + n * p.out.n;

        float sum[CHANNELS][LANE_ROWS] = {};
        for (int first = 0; first < p.out_channels; first += FMA_CHANNELS) {
            const int valid = min(FMA_CHANNELS, p.out_channels - first);
            __syncthreads(); // the patch has been multiplied
            for (int i = thread; i < valid * kernel; i += FEW_THREADS) {
                const int o = i / kernel, tap = i % kernel;
                const int s = p.kernel_width - 1 - tap / p.kernel_height,
                          r = p.kernel_height - 1 - tap % p.kernel_height;
                weights[i] = few_filter_tap<CHANNELS>(p, first + o, r, s);
            }
            few_fetch_planes(patch, p, image, first, valid, top, aligned_left);
            cp_async_wait_all();
            __syncthreads();

            for (int o = 0; o < valid; o++) {
                const float *at = patch + o * plane + warp_y * p.columns + lane_x + left - aligned_left;
                const float4 *taps = weights + o * kernel;
#pragma unroll 1
                for (int s = 0; s < p.kernel_width; s++, at += p.dilation_width, taps += p.kernel_height) {
                    const auto multiply = [&](int row, float4 w, float x) {
                        sum[0][row] += x * w.x;
                        if constexpr (CHANNELS > 1)
                            sum[1][row] += x * w.y;
                        if constexpr (CHANNELS > 2)
                            sum[2][row] += x * w.z;
                        if constexpr (CHANNELS > 3)
                            sum[3][row] += x * w.w;
                    };
                    if constexpr (HEIGHT > 0) {
                        float window[LANE_ROWS + HEIGHT - 1];
#pragma unroll
                        for (int i = 0; i < LANE_ROWS + HEIGHT - 1; i++)
                            window[i] = at[i * p.columns];
#pragma unroll
                        for (int r = 0; r < HEIGHT; r++) {
                            const float4 w = taps[r];
#pragma unroll
                            for (int row = 0; row < LANE_ROWS; row++)
                                multiply(row, w, window[row + r]);
                        }
                    } else {
                        for (int r = 0; r < p.kernel_height; r++) {
                            const float4 w = taps[r];
                            const float *const line = at + r * p.dilation_height * p.columns;
#pragma unroll
                            for (int row = 0; row < LANE_ROWS; row++)
                                multiply(row, w, line[row * p.columns]);
                        }
                    }
                }
            }
        }

        float *const result = (float *)p.result + n * p.in.n + (int64_t)(x0 + lane_x) * p.in.x;
        if (x0 + lane_x < p.width)
#pragma unroll
            for (int row = 0; row < LANE_ROWS; row++) {
                const int y = y0 + warp_y + row;
                if (y < p.height)
#pragma unroll
                    for (int c = 0; c < CHANNELS; c++)
                        if (c < p.channels)
                            result[c * p.in.c + y * p.in.y] = sum[c][row];
            }
    }
}

// Chooses the arrangement of a block's warps, and with it the tile and the patch. False where none fits.
static bool plan_input(FewProblem &p, const ConvCall &call, FewMath math, size_t most_shared, size_t &shared)
{
    if (p.stride_height != 1 || p.stride_width != 1 || (int64_t)p.out_height * p.out_width > INT_MAX)
        return false;
    const int element = math == FEW_16BIT ? 2 : 4, rows_each = math == FEW_FMA ? LANE_ROWS : WARP_ROWS;
    const int64_t reach_y = (int64_t)(p.kernel_height - 1) * p.dilation_height,
                  reach_x = (int64_t)(p.kernel_width - 1) * p.dilation_width;
    const int64_t taps = (int64_t)p.kernel_height * p.kernel_width;
    if (taps > 4096 || p.out_channels > 1 << 20)
        return false;
    const int64_t chunk = math == FEW_16BIT ? 16 : 8;
    double least = 0;
    for (int warps_x = 1; warps_x <= FEW_WARPS; warps_x *= 2) {
        const int width = warps_x * WARP_SIZE, height = FEW_WARPS / warps_x * rows_each;
        // The patch starts up to three columns further left, at a multiple of four, and is whole fours.
        const int64_t rows = height + reach_y, columns = ceil_div(width + reach_x + 3, 4) * 4;
        if (rows >= 1 << 16 || columns >= 1 << 16 || rows * columns >= 1 << 15)
            continue;
        if (math != FEW_FMA && !few_patch_fits(p, rows, columns))
            continue;
        const size_t bytes = math == FEW_FMA
                                 ? 4 * (size_t)(FMA_CHANNELS * (rows * columns + 4 * taps))
                                 : 4 * (size_t)(rows * columns * WORDS + ceil_div(p.out_channels, chunk) * taps * 32);
        if (bytes > most_shared)
            continue;
        if (!few_keep_cheaper(p, p.width, p.height, width, height, rows, columns, 4000.0 + (double)(rows * columns),
                              least))
            continue;
        p.warps_x = warps_x;
        // The divisor of the copies that run along quads of columns: units of 4 quads (mma.sync), quads (FMA).
        p.by_rows = make_divisor((int)(math == FEW_FMA ? columns / 4 : ceil_div(columns / 4, 4)));
        shared = bytes;
    }
    if (least == 0)
        return false;
    p.tiles = p.batch * p.tiles_x * p.tiles_y;
    const bool whole = p.out.c == 1 ? p.out_channels % (16 / element) == 0 : p.out_width % 4 == 0;
    p.vector = whole && is_aligned_16(call.output) ? 16 : element;
    return true;
}

template <typename Kernel>
static cuda_ops_status launch_input(Kernel kernel, const FewProblem &p, size_t shared, ConvDevice device,
                                    cudaStream_t stream)
{
    const int64_t resident_blocks = few_resident_blocks(kernel, FEW_THREADS, shared, device);
    launch_dependent(kernel, dim3((unsigned int)(p.tiles < resident_blocks ? p.tiles : resident_blocks)),
                     dim3(FEW_THREADS), shared, stream, p);
    return launch_status();
}

bool conv2d_few_channels_backward_input_supports(const ConvCall &call, ConvDevice device)
{
    FewProblem p = direct_problem<FewProblem>(call);
    size_t shared = 0;
    return conv2d_few_channels_backward_input_small_filter_supports(call, device) ||
           plan_input(p, call, few_math(call), few_most_shared(device.capability), shared) ||
           conv2d_few_channels_backward_input_stride2_supports(call, device);
}

cuda_ops_status conv2d_few_channels_backward_input(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_status status = conv2d_few_channels_backward_input_small_filter(call, device);
    if (status != CUDA_OPS_INVALID_ARGUMENT)
        return status;
    FewProblem p = direct_problem<FewProblem>(call);
    const FewMath math = few_math(call);
    size_t shared = 0;
    if (!plan_input(p, call, math, few_most_shared(device.capability), shared))
        return conv2d_few_channels_backward_input_stride2(call, device);
    const int height = p.dilation_height == 1 ? p.kernel_height : 0;
    const auto launch = [&](auto kernel) { return launch_input(kernel, p, shared, device, call.stream); };
    if (math == FEW_FMA) {
        if (p.channels == 1)
            return height == 3 ? launch(conv2d_few_channels_backward_input_fma_kernel<1, 3>)
                               : launch(conv2d_few_channels_backward_input_fma_kernel<1, 0>);
        if (p.channels <= 3 && height == 7)
            return launch(conv2d_few_channels_backward_input_fma_kernel<3, 7>);
        if (p.channels <= 3 && height == 3)
            return launch(conv2d_few_channels_backward_input_fma_kernel<3, 3>);
        return launch(conv2d_few_channels_backward_input_fma_kernel<4, 0>);
    }
    if (math == FEW_TF32)
        return height == 7 ? launch(conv2d_few_channels_backward_input_kernel<float, FEW_TF32, 7>)
                           : launch(conv2d_few_channels_backward_input_kernel<float, FEW_TF32, 0>);
    if (call.dtype == CUDA_OPS_FLOAT16)
        return height == 7 ? launch(conv2d_few_channels_backward_input_kernel<__half, FEW_16BIT, 7>)
                           : launch(conv2d_few_channels_backward_input_kernel<__half, FEW_16BIT, 0>);
    return height == 7 ? launch(conv2d_few_channels_backward_input_kernel<__nv_bfloat16, FEW_16BIT, 7>)
                       : launch(conv2d_few_channels_backward_input_kernel<__nv_bfloat16, FEW_16BIT, 0>);
}
