// Kernel A of one_channel.cu: moments.
//
// E[p] and Cov(p) follow from the images' sums of products at the 13 lags between two taps, less what the border rows
// and columns lack: 38 sums. A warp takes 28 columns of seven rows, a lane a column (two lanes on either side hold the
// neighbours'), and walks down with the 3 x 5 pixels around it in registers; each pixel is loaded once and reaches the
// other lanes by shuffles. Sums of seven rows are in float, everything beyond in double.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_MOMENTS_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_MOMENTS_CUH

#include "conv_bn_relu_pool/paths.h"

#include "common/common.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
static constexpr int TAPS = 9;
static constexpr int CHANNELS = 32; // of a block

typedef cuda_ops_conv_bn_relu_pool_one_sizes one_sizes;

static constexpr int LAGS = 13;
// A thread's sums: the lags, in the order of lag_index; all pixels; then for the first row and for the last row the
// pixels, and their products with the pixels 0, 1 and 2 to the right.
static constexpr int SUM = LAGS, FIRST_ROW = SUM + 1, LAST_ROW = FIRST_ROW + 4, THREAD_SUMS = LAST_ROW + 4;
// For the first column and for the last: the pixels, their products with the pixels 0, 1 and 2 below, and pixel and
// square in the corners with the first and the last row.
static constexpr int FIRST_COLUMN = THREAD_SUMS, LAST_COLUMN = FIRST_COLUMN + 8, SUMS = LAST_COLUMN + 8;
static constexpr int MOST_MOMENT_BLOCKS = 132;
static constexpr int MOMENT_THREADS = 512, MOMENT_WARPS = MOMENT_THREADS / WARP_SIZE;
static constexpr int MOMENT_ROWS = 7;     // of a warp's segment, summed in float
static constexpr int MOMENT_COLUMNS = 28; // of a warp: its lanes less two on either side

__host__ __device__ constexpr int lag_index(int dy, int dx)
{
    return dy == 0 ? dx : 3 + (dy - 1) * 5 + dx + 2;
}

struct moment_grid {
    int strips, segments; // of MOMENT_COLUMNS; of MOMENT_ROWS
    unsigned int blocks;  // for each strip
};

static moment_grid moment_grid_of(const one_sizes &s)
{
    moment_grid m;
    m.strips = (int)ceil_div(s.width, MOMENT_COLUMNS);
    m.segments = (int)ceil_div(s.height, MOMENT_ROWS);
    // Few blocks where there is little work: B has fewer sums to add.
    const int64_t most = MOST_MOMENT_BLOCKS / m.strips > 0 ? MOST_MOMENT_BLOCKS / m.strips : 1;
    const int64_t useful = ceil_div(s.batch * m.segments, MOMENT_WARPS / 2);
    m.blocks = (unsigned int)(useful < most ? useful : most);
    return m;
}

// This lane's column of a segment's rows and of the two rows below.
template <typename T>
__device__ __forceinline__ void load_segment(float (&pixels)[MOMENT_ROWS + 2], const T *input, int64_t image, int begin,
                                             int x, const one_sizes &s)
{
    const T *source = input + (image * s.height + begin) * s.width + x;
    const bool inside = x >= 0 && x < s.width && image < s.batch;
#pragma unroll
    for (int r = 0; r < MOMENT_ROWS + 2; r++)
        pixels[r] = inside && begin + r < s.height ? (float)load_as_accumulate(source[r * s.width]) : 0.0f;
}

// Lane i gets the warp's sum of total[i] (a reduce-scatter): 31 shuffles, where a butterfly per sum would take 5 each.
__device__ __forceinline__ double share_out_sums(const double (&total)[THREAD_SUMS], int lane)
{
    static_assert(WARP_SIZE / 2 < THREAD_SUMS && THREAD_SUMS <= WARP_SIZE, "a lane for each sum");
    double left[WARP_SIZE];
#pragma unroll
    for (int i = 0; i < WARP_SIZE; i++)
        left[i] = i < THREAD_SUMS ? total[i] : 0.0;
#pragma unroll
    for (int step = 0; step < 5; step++) {
        const int half = WARP_SIZE / 2 >> step;
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < WARP_SIZE / 2; i++)
            if (i < half) {
                const double sent = upper ? left[i] : left[i + half], kept = upper ? left[i + half] : left[i];
                left[i] = kept + __shfl_xor_sync(FULL_WARP, sent, half);
            }
    }
    return left[0];
}

template <typename T>
__global__ void __launch_bounds__(MOMENT_THREADS)
    one_moments_kernel(double *partials, const T *input, one_sizes s, moment_grid m)
{
    __shared__ double shared[SUMS][MOMENT_WARPS];
    wait_for_predecessor();
    release_successor();
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int x = blockIdx.x * MOMENT_COLUMNS + lane - 2;
    const bool mine = lane >= 2 && lane < 2 + MOMENT_COLUMNS; // the other lanes hold neighbours' columns
    double total[THREAD_SUMS];
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++)
        total[i] = 0.0;
    // Every step-th of all images' segments, without a division for each.
    const int64_t step = (int64_t)gridDim.y * MOMENT_WARPS, task = (int64_t)warp * gridDim.y + blockIdx.y;
    const int64_t images_on = step / m.segments;
    const int segments_on = (int)(step - images_on * m.segments);
    int64_t image = task / m.segments;
    int segment = (int)(task - image * m.segments);
    float next[MOMENT_ROWS + 2];
    load_segment(next, input, image, segment * MOMENT_ROWS, x, s);
    while (image < s.batch) {
        const int begin = segment * MOMENT_ROWS;
        image += images_on;
        segment += segments_on;
        if (segment >= m.segments) {
            segment -= m.segments;
            image++;
        }
        float pixels[MOMENT_ROWS + 2], lags[LAGS], sum = 0.0f, rows[3][5];
#pragma unroll
        for (int r = 0; r < MOMENT_ROWS + 2; r++)
            pixels[r] = next[r];
        load_segment(next, input, image, segment * MOMENT_ROWS, x, s);
#pragma unroll
        for (int i = 0; i < LAGS; i++)
            lags[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < MOMENT_ROWS + 2; r++) {
            // rows[2] is row r, with its neighbours from -2 to 2.
#pragma unroll
            for (int d = 0; d < 5; d++) {
                rows[0][d] = rows[1][d];
                rows[1][d] = rows[2][d];
                rows[2][d] = d == 2 ? pixels[r] : __shfl_sync(FULL_WARP, pixels[r], lane + d - 2);
            }
            if (r < 2)
                continue;
            const float pixel = mine ? rows[0][2] : 0.0f;
            sum += pixel;
#pragma unroll
            for (int dx = 0; dx <= 2; dx++)
                lags[lag_index(0, dx)] += pixel * rows[0][2 + dx];
#pragma unroll
            for (int dy = 1; dy <= 2; dy++)
#pragma unroll
                for (int dx = -2; dx <= 2; dx++)
                    lags[lag_index(dy, dx)] += pixel * rows[dy][2 + dx];
            const int y = begin + r - 2;
            if (r == 2 && y == 0) {
                total[FIRST_ROW] += (double)pixel;
#pragma unroll
                for (int i = 0; i < 3; i++)
                    total[FIRST_ROW + 1 + i] += (double)(pixel * rows[0][2 + i]);
            }
            if (y == s.height - 1) {
                total[LAST_ROW] += (double)pixel;
#pragma unroll
                for (int i = 0; i < 3; i++)
                    total[LAST_ROW + 1 + i] += (double)(pixel * rows[0][2 + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < LAGS; i++)
            total[i] += (double)lags[i];
        total[SUM] += (double)sum;
    }
    const int of_column[8] = {SUM,       lag_index(0, 0), lag_index(1, 0), lag_index(2, 0),
                              FIRST_ROW, FIRST_ROW + 1,   LAST_ROW,        LAST_ROW + 1};
    const bool first = blockIdx.x == 0 && lane == 2, last = x == s.width - 1 && mine;
    if (lane == 0)
#pragma unroll
        for (int i = 0; i < 8; i++)
            shared[FIRST_COLUMN + i][warp] = shared[LAST_COLUMN + i][warp] = 0.0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (first)
            shared[FIRST_COLUMN + i][warp] = total[of_column[i]];
        if (last)
            shared[LAST_COLUMN + i][warp] = total[of_column[i]];
    }
    const double all_of_warp = share_out_sums(total, lane);
    if (lane < THREAD_SUMS)
        shared[lane][warp] = all_of_warp;
    __syncthreads();
    if (threadIdx.x < SUMS) {
        double all = 0.0;
#pragma unroll
        for (int w = 0; w < MOMENT_WARPS; w++)
            all += shared[threadIdx.x][w];
        partials[((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * SUMS + threadIdx.x] = all;
    }
}

#endif
