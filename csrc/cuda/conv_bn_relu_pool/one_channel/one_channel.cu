// conv_bn_relu_pool of images with one channel (3x3, padding 1, pooled 2x2, in training). With p the nine pixels under
// the kernel, 0 outside the image:
//     y = weight . p + bias,  mean = weight . E[p] + bias,  variance = weight^T Cov(p) weight
//     output[window] = max over its four y of relu((y - mean) * scale + bn_bias),  scale = bn_weight * rstd
//     grad_weight = scale * (S - sum(dz) * E[p] - dot * rstd * Cov(p) weight)
//     S = sum of dz * p at the argmax,  dot = rstd * weight . (S - sum(dz) * E[p])
// y is never stored. Forward: A takes E[p] and Cov(p) from the images, B recomputes y, normalises and pools. Backward:
// C makes S and sum(dz), D the gradients. In B and C a lane has a channel (float32) or a fragment of m16n8k16 (fp16,
// bf16).
// Bound by memory at best, float32 by arithmetic (36 FMA for 5 bytes), few images by latency. On an H200 forward of
// 4096 images in bf16 runs at 0.3 of a copy's 4.3 TB/s (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/paths.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/prefetch.cuh"
#include "common/value.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 256;
static constexpr int WARPS = THREADS / WARP_SIZE;
static constexpr int TAPS = 9;
static constexpr int CHANNELS = 32; // of a block

typedef cuda_ops_conv_bn_relu_pool_one_sizes one_sizes;

// ---- A: moments ----
//
// E[p] and Cov(p) follow from the images' sums of products at the 13 lags between two taps, less what the border rows
// and columns lack: 38 sums. A warp takes 28 columns of seven rows, a lane a column (two lanes on either side hold the
// neighbours'), and walks down with the 3 x 5 pixels around it in registers; each pixel is loaded once and reaches the
// other lanes by shuffles. Sums of seven rows are in float, everything beyond in double.

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
__device__ __forceinline__ void load_segment(float (&pixels)[MOMENT_ROWS + 2], const T *input, int64_t task,
                                             int64_t tasks, int x, const one_sizes &s, const moment_grid &m)
{
    const int64_t image = task / m.segments;
    const int begin = (int)(task - image * m.segments) * MOMENT_ROWS;
    const T *source = input + (image * s.height + begin) * s.width + x;
    const bool inside = x >= 0 && x < s.width && task < tasks;
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
    const int64_t tasks = s.batch * m.segments, step = (int64_t)gridDim.y * MOMENT_WARPS;
    int64_t task = (int64_t)warp * gridDim.y + blockIdx.y;
    float next[MOMENT_ROWS + 2];
    load_segment(next, input, task, tasks, x, s, m);
    for (; task < tasks; task += step) {
        const int begin = (int)(task % m.segments) * MOMENT_ROWS;
        float pixels[MOMENT_ROWS + 2], lags[LAGS], sum = 0.0f, rows[3][5];
#pragma unroll
        for (int r = 0; r < MOMENT_ROWS + 2; r++)
            pixels[r] = next[r];
        load_segment(next, input, task + step, tasks, x, s, m);
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

// ---- B's coefficients from the moments ----

// The edge that a tap never reads: tap row 0 reads every row of pixels but the last, tap row 2 every row but the first.
__device__ __forceinline__ int missed(int tap, int first, int last)
{
    return tap == 0 ? last : tap == 2 ? first : -1;
}

__device__ __forceinline__ double tap_sum(const double *sums, int k)
{
    const int row = missed(k / 3, FIRST_ROW, LAST_ROW), column = missed(k % 3, FIRST_COLUMN, LAST_COLUMN);
    double sum = sums[SUM];
    sum -= row >= 0 ? sums[row] : 0.0;
    sum -= column >= 0 ? sums[column] : 0.0;
    sum += row >= 0 && column >= 0 ? sums[column + (row == FIRST_ROW ? 4 : 6)] : 0.0;
    return sum;
}

__device__ __forceinline__ double tap_product(const double *sums, int k, int l)
{
    if (k > l) {
        const int other = k;
        k = l;
        l = other;
    }
    // Towards the edge that one tap misses the other tap is out of bounds, unless both are in the same row or column.
    const int dy = l / 3 - k / 3, dx = l % 3 - k % 3;
    const int row = dy == 0 ? missed(k / 3, FIRST_ROW, LAST_ROW) : -1;
    const int column = dx == 0 ? missed(k % 3, FIRST_COLUMN, LAST_COLUMN) : -1;
    double sum = sums[lag_index(dy, dx)];
    sum -= row >= 0 ? sums[row + 1 + dx] : 0.0;
    sum -= column >= 0 ? sums[column + 1 + dy] : 0.0;
    sum += row >= 0 && column >= 0 ? sums[column + (row == FIRST_ROW ? 5 : 7)] : 0.0;
    return sum;
}

// Statistics kept for backward: mean and variance of each channel, then E[p] and Cov(p).
__device__ __forceinline__ double *tap_means_of(double *statistics, int64_t channels)
{
    return statistics + 2 * channels;
}

// A weight as it is multiplied: rounded to the images' dtype.
template <typename T>
__device__ __forceinline__ float rounded_weight(float weight)
{
    return load_as_accumulate(store_from_accumulate<T>(weight));
}

struct one_parameters {
    const void *weight, *bias; // bias may be NULL
    cuda_ops_dtype weight_dtype;
    cuda_ops_norm_parameters norm;
};

struct one_coefficients {
    float weight[TAPS][CHANNELS]; // times the sign of scale, so that max(y) is where max(z) is
    float scale[CHANNELS], offset[CHANNELS];
};

static constexpr int PARTS = THREADS / SUMS;

struct one_scratch {
    double parts[SUMS][PARTS], sums[SUMS], means[TAPS], covariance[TAPS][TAPS];
};

// Channels [first, first + CHANNELS), by the whole block; the block that `writes` also stores the statistics.
template <typename T>
__device__ void make_coefficients(one_coefficients &c, one_scratch &scratch, double *statistics,
                                  const cuda_ops_running_statistics &running, const double *partials, int partial_count,
                                  const one_parameters &p, const one_sizes &s, int first, bool writes)
{
    const double count = (double)s.batch * s.height * s.width;
    const int part = threadIdx.x / SUMS, which = threadIdx.x % SUMS, channel = first + threadIdx.x;
    const bool inside = threadIdx.x < CHANNELS && channel < s.channels;
    // The loads of the parameters are issued before those of the sums, to overlap the latencies.
    float weight[TAPS];
#pragma unroll
    for (int k = 0; k < TAPS; k++)
        weight[k] = inside ? load_value_early(p.weight, p.weight_dtype, (int64_t)channel * TAPS + k) : 0.0f;
    const float gamma = inside && p.norm.weight ? load_value_early(p.norm.weight, p.norm.dtype, channel) : 1.0f;
    const float shift = inside && p.norm.bias ? load_value_early(p.norm.bias, p.norm.dtype, channel) : 0.0f;
    if (part < PARTS) {
        double sum = 0.0;
#pragma unroll 22
        for (int i = part; i < partial_count; i += PARTS)
            sum += partials[(int64_t)i * SUMS + which];
        scratch.parts[which][part] = sum;
    }
    __syncthreads();
    double *const sums = scratch.sums;
    if (threadIdx.x < SUMS) {
        double sum = 0.0;
        for (int i = 0; i < PARTS; i++)
            sum += scratch.parts[threadIdx.x][i];
        sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TAPS * TAPS) {
        const int k = threadIdx.x / TAPS, l = threadIdx.x % TAPS;
        const double mean_k = tap_sum(sums, k) / count, mean_l = tap_sum(sums, l) / count;
        const double covariance = tap_product(sums, k, l) / count - mean_k * mean_l;
        scratch.covariance[k][l] = covariance;
        if (l == 0)
            scratch.means[k] = mean_k;
        if (writes && first == 0) {
            double *means = tap_means_of(statistics, s.channels);
            means[TAPS + threadIdx.x] = covariance;
            if (l == 0)
                means[k] = mean_k;
        }
    }
    __syncthreads();
    if (threadIdx.x < CHANNELS) {
        double mean = 0.0, variance = 0.0;
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            weight[k] = rounded_weight<T>(weight[k]);
            mean += (double)weight[k] * scratch.means[k];
        }
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            double dot = 0.0;
#pragma unroll
            for (int l = 0; l < TAPS; l++)
                dot += scratch.covariance[k][l] * (double)weight[l];
            variance += dot * (double)weight[k];
        }
        variance = variance < 0.0 ? 0.0 : variance; // by rounding; a NaN stays
        const double scale = (double)gamma / sqrt(variance + p.norm.eps);
        const float sign = scale < 0.0 ? -1.0f : scale == 0.0 ? 0.0f : 1.0f;
#pragma unroll
        for (int k = 0; k < TAPS; k++)
            c.weight[k][threadIdx.x] = weight[k] * sign;
        c.scale[threadIdx.x] = (float)fabs(scale);
        c.offset[threadIdx.x] = (float)((double)shift - mean * scale);
        if (writes && inside) {
            mean += p.bias ? load_value(p.bias, p.weight_dtype, channel) : 0.0;
            statistics[channel] = mean;
            statistics[s.channels + channel] = variance;
            if (running.mean) {
                const double keep = 1.0 - running.momentum, take = running.momentum;
                store_value(running.mean, running.dtype, channel,
                            keep * load_value(running.mean, running.dtype, channel) + take * mean);
                store_value(running.variance, running.dtype, channel,
                            keep * load_value(running.variance, running.dtype, channel) +
                                take * variance * (count / (count - 1.0)));
            }
            if (running.batches && channel == 0)
                *running.batches += 1;
        }
    }
    __syncthreads();
}

// ---- Images in shared memory ----

// A unit of work is a band: some rows of windows of one image, with all pixels under them. A block takes several.
struct band_grid {
    int window_rows, window_columns; // of an image
    int rows, bands;                 // rows of windows in a band; bands in an image
    int pitch, tile;                 // pixels of a row and of a band in shared memory
    int units;                       // of a block
    int64_t all_units;
    unsigned int blocks;
};

static constexpr int WANTED_BLOCKS = 264; // two, which fit, for each multiprocessor of the largest GPUs
static constexpr int TILE_BYTES = 24 << 10;

// The largest divisor of `number` that is not above `most`.
static int divisor(int number, int most)
{
    while (number % most != 0)
        most--;
    return most;
}

static band_grid band_grid_of(const one_sizes &s, int element_size)
{
    band_grid b;
    b.window_rows = s.height / 2;
    b.window_columns = s.width / 2;
    b.pitch = (s.width + 2 + 1) / 2 * 2;
    // Bands of equal height, so that the windows of consecutive units are consecutive. Small batches get smaller bands.
    const int most_rows = (TILE_BYTES / element_size / b.pitch - 2) / 2;
    b.rows = divisor(b.window_rows, b.window_rows < most_rows ? b.window_rows : most_rows);
    while (b.rows > 4 && s.batch * (b.window_rows / b.rows) < WANTED_BLOCKS / 2)
        b.rows = divisor(b.window_rows, b.rows - 1);
    b.bands = b.window_rows / b.rows;
    b.tile = (2 * b.rows + 2) * b.pitch;
    b.all_units = s.batch * b.bands;
    const int64_t most = TILE_BYTES / element_size / b.tile > 0 ? TILE_BYTES / element_size / b.tile : 1;
    // One wave of blocks, each with the same number of rounds: a second wave, or a round that only some blocks have,
    // leaves multiprocessors idle.
    const int64_t each = ceil_div(b.all_units, WANTED_BLOCKS), rounds = ceil_div(each, most);
    b.units = (int)ceil_div(each, rounds);
    b.blocks = (unsigned int)ceil_div(b.all_units, b.units * rounds);
    return b;
}

// Zeros the padding's columns, which no load overwrites.
template <typename U>
__device__ __forceinline__ void clear_border(U *tiles, const one_sizes &s, const band_grid &b)
{
    for (int line = threadIdx.x; line < b.units * (2 * b.rows + 2); line += THREADS) {
        tiles[line * b.pitch] = store_from_accumulate<U>(0.0f);
        for (int column = s.width + 1; column < b.pitch; column++)
            tiles[line * b.pitch + column] = store_from_accumulate<U>(0.0f);
    }
}

// Loads units [first, first + units) as aligned vectors of N pixels, `runs` to a line, and converts them to U. A thread
// has several loads in flight, since this is bound by their latency.
template <int N, typename U, typename T>
__device__ __forceinline__ void load_runs(U *tiles, const T *input, int64_t first, unsigned int runs,
                                          const one_sizes &s, const band_grid &b)
{
    typedef aligned_vector<T, N> run;
    constexpr unsigned int AT_ONCE = 4;
    const unsigned int tile_rows = 2 * b.rows + 2, count = b.units * tile_rows * runs;
    const int64_t first_image = first / b.bands;
    const unsigned int first_band = (unsigned int)(first - first_image * b.bands);
    const unsigned int units = (unsigned int)(b.all_units - first < b.units ? b.all_units - first : b.units);
    for (unsigned int begin = threadIdx.x; begin < count; begin += AT_ONCE * THREADS) {
        run value[AT_ONCE];
        U *target[AT_ONCE];
#pragma unroll
        for (unsigned int i = 0; i < AT_ONCE; i++) {
            const unsigned int index = begin + i * THREADS, line = index / runs, column = (index - line * runs) * N;
            const unsigned int unit = line / tile_rows, row = line - unit * tile_rows;
            const unsigned int band = first_band + unit, image = band / b.bands;
            const int y = (int)((band - image * b.bands) * 2 * b.rows + row) - 1;
            target[i] = index < count ? tiles + unit * b.tile + row * b.pitch + 1 + column : nullptr;
#pragma unroll
            for (int e = 0; e < N; e++)
                value[i].element[e] = store_from_accumulate<T>(0.0f);
            if (index < count && unit < units && y >= 0 && y < s.height)
                value[i] = *(const run *)(input + ((first_image + image) * s.height + y) * s.width + column);
        }
#pragma unroll
        for (unsigned int i = 0; i < AT_ONCE; i++)
            if (target[i])
#pragma unroll
                for (int e = 0; e < N; e++)
                    target[i][e] = store_from_accumulate<U>(load_as_accumulate(value[i].element[e]));
    }
}

// Pixels of units [first, first + units). Begins and ends with a barrier.
template <typename U, typename T>
__device__ __forceinline__ void load_tiles(U *tiles, const T *input, int64_t first, const one_sizes &s,
                                           const band_grid &b)
{
    __syncthreads(); // what was here before has been read
    if (s.width % 4 == 0 && reinterpret_cast<uintptr_t>(input) % (4 * sizeof(T)) == 0)
        load_runs<4>(tiles, input, first, s.width / 4, s, b);
    else
        load_runs<1>(tiles, input, first, s.width, s, b);
    __syncthreads();
}

struct one_strides {
    int64_t image, window, channel; // of output and argmax
};

static one_strides strides_of(const one_sizes &s, const band_grid &b)
{
    const int64_t windows = (int64_t)b.window_rows * b.window_columns;
    if (s.output_channels_last)
        return {windows * s.channels, s.channels, 1};
    return {windows * s.channels, 1, windows};
}

// The largest of a window's four values, and its position as one bit of a byte, 0x80 >> position: shifted left by
// `position`, the byte's sign is then a mask for C. Of equal values the first. (A byte of 0 says that relu gave 0.)
__device__ __forceinline__ float largest(float y0, float y1, float y2, float y3, unsigned int &position)
{
    const bool right = y1 > y0, lower_right = y3 > y2;
    const float upper = right ? y1 : y0, lower = lower_right ? y3 : y2;
    const bool down = lower > upper;
    position = down ? (lower_right ? 0x10u : 0x20u) : (right ? 0x40u : 0x80u);
    return down ? lower : upper;
}

// ---- B on CUDA cores: each block adds A's partial sums and makes the coefficients; a lane has a channel, with its
// weights in registers ----

template <typename T>
__global__ void __launch_bounds__(THREADS)
    one_forward_kernel(T *output, uint8_t *argmax, double *statistics, cuda_ops_running_statistics running,
                       const double *partials, int partial_count, const T *input, one_parameters p, one_sizes s,
                       band_grid b, one_strides strides)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float *const tiles = (float *)dynamic_shared;
    __shared__ one_coefficients c;
    __shared__ one_scratch scratch;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + lane;
    clear_border(tiles, s, b);
    wait_for_predecessor();
    release_successor();
    make_coefficients<T>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                         blockIdx.x == 0);
    float weight[TAPS];
#pragma unroll
    for (int k = 0; k < TAPS; k++)
        weight[k] = c.weight[k][lane];
    const float scale = c.scale[lane], offset = c.offset[lane];

    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        load_tiles(tiles, input, first, s, b);
        for (int line = warp; line < b.units * b.rows; line += WARPS) {
            const int unit = line / b.rows, row = line - unit * b.rows;
            const int64_t at = first + unit, image = at / b.bands;
            const int window_row = (int)(at - image * b.bands) * b.rows + row;
            if (at >= b.all_units)
                continue;
            const float *tile = tiles + unit * b.tile + 2 * row * b.pitch;
            const int64_t base = image * strides.image + (int64_t)window_row * b.window_columns * strides.window +
                                 channel * strides.channel;
            float pixels[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float2 two = *(const float2 *)(tile + r * b.pitch);
                pixels[r][2] = two.x;
                pixels[r][3] = two.y;
            }
#pragma unroll 2
            for (int column = 0; column < b.window_columns; column++) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float2 two = *(const float2 *)(tile + r * b.pitch + 2 * column + 2);
                    pixels[r][0] = pixels[r][2];
                    pixels[r][1] = pixels[r][3];
                    pixels[r][2] = two.x;
                    pixels[r][3] = two.y;
                }
                float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int k = 0; k < TAPS; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        y[i] += weight[k] * pixels[k / 3 + i / 2][k % 3 + i % 2];
                unsigned int position;
                const float z = largest(y[0], y[1], y[2], y[3], position) * scale + offset;
                const bool inactive = z <= 0.0f;
                if (channel < s.channels) {
                    const int64_t i = base + column * strides.window;
                    output[i] = store_from_accumulate<T>(inactive ? 0.0f : z);
                    argmax[i] = (uint8_t)(inactive ? 0u : position);
                }
            }
        }
    }
}

// ---- C on CUDA cores: a lane has a channel ----

// For each channel S and sum(dz).
static constexpr int GRADIENT_SUMS = TAPS + 1;

// Adds the warps' sums, shared[warp][sum][channel], into partials[channel][sum][block].
__device__ __forceinline__ void store_gradient_sums(float *partials, const float *shared, int warps, int first_channel,
                                                    const one_sizes &s)
{
    for (int i = threadIdx.x; i < GRADIENT_SUMS * CHANNELS; i += THREADS) {
        const int channel = first_channel + i % CHANNELS;
        float sum = 0.0f;
        for (int w = 0; w < warps; w++)
            sum += shared[w * GRADIENT_SUMS * CHANNELS + i];
        if (channel < s.channels)
            partials[((int64_t)channel * GRADIENT_SUMS + i / CHANNELS) * gridDim.x + blockIdx.x] = sum;
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    one_sums_kernel(float *partials, const T *grad_output, const uint8_t *argmax, const T *input, one_sizes s,
                    band_grid b, one_strides strides)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float *const tiles = (float *)dynamic_shared;
    __shared__ float shared[WARPS * GRADIENT_SUMS * CHANNELS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + lane;
    clear_border(tiles, s, b);
    wait_for_predecessor();
    release_successor();
    float sums[GRADIENT_SUMS];
#pragma unroll
    for (int k = 0; k < GRADIENT_SUMS; k++)
        sums[k] = 0.0f;
    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        load_tiles(tiles, input, first, s, b);
        for (int line = warp; line < b.units * b.rows; line += WARPS) {
            const int unit = line / b.rows, row = line - unit * b.rows;
            const int64_t at = first + unit, image = at / b.bands;
            const int window_row = (int)(at - image * b.bands) * b.rows + row;
            if (at >= b.all_units || channel >= s.channels)
                continue;
            const float *tile = tiles + unit * b.tile + 2 * row * b.pitch;
            const int64_t base = image * strides.image + (int64_t)window_row * b.window_columns * strides.window +
                                 channel * strides.channel;
#pragma unroll 4
            for (int column = 0; column < b.window_columns; column++) {
                const int64_t i = base + column * strides.window;
                const unsigned int position = argmax[i];
                const float dz = position ? (float)load_as_accumulate(grad_output[i]) : 0.0f;
                const float *pixels = tile + 2 * column + (position & 0x50u ? 1 : 0) + (position & 0x30u ? b.pitch : 0);
                sums[TAPS] += dz;
#pragma unroll
                for (int k = 0; k < TAPS; k++)
                    sums[k] += dz * pixels[k / 3 * b.pitch + k % 3];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < GRADIENT_SUMS; k++)
        shared[(warp * GRADIENT_SUMS + k) * CHANNELS + lane] = sums[k];
    __syncthreads();
    store_gradient_sums(partials, shared, WARPS, first_channel, s);
}

// ---- B and C on tensor cores, in fp16 and bf16 ----
//
// In B the 4 x 4 pixels of a window are the k of one m16n8k16; its columns are the kernel at each of the window's four
// positions, for 32 channels. Channels are permuted such that a thread ends up with 8 neighbouring ones of a window, a
// 16-byte store. C is the transposed product: k is windows, the rows are (position, channel), the columns the pixels.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define CUDA_OPS_ONE_TENSOR_CORES 1
#endif

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const T pair[2] = {store_from_accumulate<T>(low), store_from_accumulate<T>(high)};
    return (uint32_t)*(const uint16_t *)&pair[0] | (uint32_t)*(const uint16_t *)&pair[1] << 16;
}

// The offset in `tiles` of each window's 4 x 4 pixels. Ends without a barrier.
__device__ __forceinline__ void fill_corners(uint16_t *corners, const band_grid &b)
{
    for (int window = threadIdx.x; window < b.units * b.rows * b.window_columns; window += THREADS) {
        const int row = window / b.window_columns, column = window - row * b.window_columns;
        const int unit = row / b.rows;
        corners[window] = (uint16_t)(unit * b.tile + 2 * (row - unit * b.rows) * b.pitch + 2 * column);
    }
}

// How many windows a block's units from `first` on have, and how many the tensor has before them.
struct window_range {
    int count;
    int64_t before;
};

__device__ __forceinline__ window_range windows_of(int64_t first, const band_grid &b)
{
    const int of_unit = b.rows * b.window_columns;
    const int64_t left = b.all_units - first;
    return {(int)(left < b.units ? left : b.units) * of_unit, first * of_unit};
}

// channels is a multiple of 8, and output and argmax are channels_last and aligned to 16 bytes.
template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    one_forward_tensor_kernel(T *output, uint8_t *argmax, double *statistics, cuda_ops_running_statistics running,
                              const double *partials, int partial_count, const T *input, one_parameters p, one_sizes s,
                              band_grid b)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    T *const tiles = (T *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ one_coefficients c;
    __shared__ one_scratch scratch;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS, channel = first_channel + 8 * t;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    // A waited for the images before it released this kernel, so that they can be read before A has finished.
    int64_t first = (int64_t)blockIdx.x * b.units;
    load_tiles(tiles, input, first, s, b);
    wait_for_predecessor();
    release_successor();
    make_coefficients<T>(c, scratch, statistics, running, partials, partial_count, p, s, first_channel,
                         blockIdx.x == 0);
    // Column g of the fragment `block` is channel 8 * (g / 2) + 2 * block + g % 2.
    uint32_t weight[4][4][2]; // [block][position]
    float scale[8], offset[8];
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int position = 0; position < 4; position++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = (2 * t + 8 * half) / 4 - position / 2, column = (2 * t + e) % 4 - position % 2;
                    const bool inside = row >= 0 && row < 3 && column >= 0 && column < 3;
                    value[e] = inside ? c.weight[row * 3 + column][8 * (g / 2) + 2 * block + g % 2] : 0.0f;
                }
                weight[block][position][half] = pack<T>(value[0], value[1]);
            }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        scale[i] = c.scale[8 * t + i];
        offset[i] = c.offset[8 * t + i];
    }

    for (bool again = false; first < b.all_units; first += (int64_t)gridDim.x * b.units, again = true) {
        if (again)
            load_tiles(tiles, input, first, s, b);
        const window_range windows = windows_of(first, b);
        for (int begin = warp * 16; begin < windows.count; begin += WARPS * 16) {
            uint32_t pixels[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                const T *corner = tiles + corners[window < windows.count ? window : 0] + t / 2 * b.pitch + t % 2 * 2;
                pixels[half] = *(const uint32_t *)corner;
                pixels[2 + half] = *(const uint32_t *)(corner + 2 * b.pitch);
            }
            uint32_t result[2][4], where[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (int block = 0; block < 4; block++) {
                float y[4][4];
#pragma unroll
                for (int position = 0; position < 4; position++) {
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        y[position][i] = 0.0f;
                    mma_sync<T>(y[position], pixels, weight[block][position][0], weight[block][position][1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float z[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * half + e;
                        unsigned int position;
                        z[e] = largest(y[0][i], y[1][i], y[2][i], y[3][i], position) * scale[2 * block + e] +
                               offset[2 * block + e];
                        const bool inactive = z[e] <= 0.0f;
                        z[e] = inactive ? 0.0f : z[e];
                        where[half][block / 2] |= (inactive ? 0u : position) << (block % 2 * 16 + e * 8);
                    }
                    result[half][block] = pack<T>(z[0], z[1]);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int window = begin + g + 8 * half;
                if (window < windows.count && channel < s.channels) {
                    const int64_t i = (windows.before + window) * s.channels + channel;
                    *(uint4 *)(output + i) =
                        make_uint4(result[half][0], result[half][1], result[half][2], result[half][3]);
                    *(uint2 *)(argmax + i) = make_uint2(where[half][0], where[half][1]);
                }
            }
        }
    }
#endif
}

// C's warps copy grad_output and argmax to shared memory several steps ahead (a step is 16 windows of 32 channels): the
// one step that fits in registers would leave memory idle. The pitches keep windows 2t in different banks.
static constexpr int GRAD_PITCH = 80, ARGMAX_PITCH = 48, STEP_BYTES = 16 * (GRAD_PITCH + ARGMAX_PITCH);
static constexpr int STEPS_AHEAD = 4, RING_BYTES = WARPS * STEPS_AHEAD * STEP_BYTES;

// A warp's sums of dz * pixel, [position][channel][pixel], in shared memory; rows of 18 against bank conflicts.
static constexpr int PRODUCT_ROW = 18, PRODUCTS = 4 * CHANNELS * PRODUCT_ROW, WARPS_AT_ONCE = 4;

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    one_sums_tensor_kernel(float *partials, const T *grad_output, const uint8_t *argmax, const T *input, one_sizes s,
                           band_grid b, int ring_offset)
{
#ifdef CUDA_OPS_ONE_TENSOR_CORES
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    T *const tiles = (T *)dynamic_shared;
    uint16_t *const corners = (uint16_t *)(tiles + b.units * b.tile);
    __shared__ float shared_sums[WARPS][CHANNELS];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, g = lane / 4, t = lane % 4;
    const int first_channel = blockIdx.y * CHANNELS;
    const bool whole_vectors = s.channels % 16 == 0;
    unsigned char *const ring = dynamic_shared + ring_offset + warp * STEPS_AHEAD * STEP_BYTES;
    clear_border(tiles, s, b);
    fill_corners(corners, b);
    // Prefetch what forward stored, while the kernel before this one still runs: each block its first units.
    const int64_t first_unit = (int64_t)blockIdx.x * b.units;
    if (first_unit < b.all_units && s.channels <= CHANNELS) {
        const window_range windows = windows_of(first_unit, b);
        prefetch_lines(argmax + windows.before * s.channels, (int64_t)windows.count * s.channels);
        const int64_t image = first_unit / b.bands, left = s.batch - image, some = b.units / b.bands + 1;
        const int64_t size = (int64_t)s.height * s.width;
        prefetch_lines(input + image * size, (some < left ? some : left) * size * (int64_t)sizeof(T));
    }
    wait_for_predecessor();
    release_successor();
    float products[4][2][2][4], sums[2][4]; // [channel][pair of positions][pixels]
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; j++)
            products[i][j / 8][j / 4 % 2][j % 4] = 0.0f;
    }
    const uint32_t one = pack<T>(1.0f, 1.0f), ones[2] = {one, one};
    for (int64_t first = (int64_t)blockIdx.x * b.units; first < b.all_units; first += (int64_t)gridDim.x * b.units) {
        const window_range windows = windows_of(first, b);
        // Starts a step of this warp: 16 windows, each with 64 bytes of gradients and 32 of argmax.
        const auto start_step = [&](int step) {
            unsigned char *const to = ring + step % STEPS_AHEAD * STEP_BYTES;
            const int begin = (step * WARPS + warp) * 16;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = lane / 4 + 8 * i, window = begin + row, of = first_channel + lane % 4 * 8;
                const bool valid = window < windows.count && of < s.channels;
                const int64_t at = (windows.before + (valid ? window : 0)) * s.channels + (valid ? of : 0);
                cp_async<16>(shared_address(to + row * GRAD_PITCH + lane % 4 * 16), grad_output + at, valid ? 16 : 0);
            }
            // Argmax: 16 bytes are 16 channels, of which the tensor may have the first 8 only.
            const int row = lane / 2, window = begin + row, of = first_channel + lane % 2 * 16;
            unsigned char *const target = to + 16 * GRAD_PITCH + row * ARGMAX_PITCH + lane % 2 * 16;
            const bool valid = window < windows.count && of + 16 <= s.channels;
            const int64_t at = (windows.before + (window < windows.count ? window : 0)) * s.channels;
            if (whole_vectors) {
                cp_async<16>(shared_address(target), argmax + at + (valid ? of : 0), valid ? 16 : 0);
            } else {
                const bool some = window < windows.count && of < s.channels;
                const uint2 low = some ? *(const uint2 *)(argmax + at + of) : make_uint2(0, 0);
                const uint2 high = valid ? *(const uint2 *)(argmax + at + of + 8) : make_uint2(0, 0);
                *(uint4 *)target = make_uint4(low.x, low.y, high.x, high.y);
            }
            cp_async_commit_group();
        };
#pragma unroll
        for (int step = 0; step < STEPS_AHEAD - 1; step++)
            start_step(step);
        load_tiles(tiles, input, first, s, b);
        int step = 0;
        for (int begin = warp * 16; begin < windows.count; begin += WARPS * 16, step++) {
            cp_async_wait_group<STEPS_AHEAD - 2>();
            __syncwarp(); // all lanes have read the step before, whose slot the next start_step overwrites
            const unsigned char *const from = ring + step % STEPS_AHEAD * STEP_BYTES;
            uint2 grad[4];
            uint32_t where[4], pixels[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
            for (int i = 0; i < 4; i++) { // windows 2t, 2t + 1 and these eight on
                const int row = 2 * t + i % 2 + i / 2 * 8, window = begin + row;
                grad[i] = *(const uint2 *)(from + row * GRAD_PITCH + 8 * g);
                where[i] = *(const uint32_t *)(from + 16 * GRAD_PITCH + row * ARGMAX_PITCH + 4 * g);
                const uint16_t *corner =
                    (const uint16_t *)tiles + corners[window < windows.count ? window : 0] + g / 4 * b.pitch + g % 4;
                pixels[0][i / 2] |= (uint32_t)corner[0] << (i % 2 * 16);
                pixels[1][i / 2] |= (uint32_t)corner[2 * b.pitch] << (i % 2 * 16);
            }
            start_step(step + STEPS_AHEAD - 1);
            uint32_t any[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t dz[2], masked[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint2 even = grad[2 * half], odd = grad[2 * half + 1];
                    dz[half] = __byte_perm(j < 2 ? even.x : even.y, j < 2 ? odd.x : odd.y, j % 2 ? 0x7632 : 0x5410);
#pragma unroll
                    for (int position = 0; position < 4; position++) {
                        const uint32_t mask =
                            prmt(where[2 * half] << position, where[2 * half + 1] << position, 0xCC88 + j * 0x1111);
                        masked[half][position] = dz[half] & mask;
                    }
                    any[half][j] = masked[half][0] | masked[half][1] | masked[half][2] | masked[half][3];
                }
#pragma unroll
                for (int pair = 0; pair < 2; pair++) {
                    const uint32_t a[4] = {masked[0][2 * pair], masked[0][2 * pair + 1], masked[1][2 * pair],
                                           masked[1][2 * pair + 1]};
                    mma_sync<T>(products[j][pair][0], a, pixels[0][0], pixels[0][1]);
                    mma_sync<T>(products[j][pair][1], a, pixels[1][0], pixels[1][1]);
                }
            }
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const uint32_t a[4] = {any[0][2 * pair], any[0][2 * pair + 1], any[1][2 * pair], any[1][2 * pair + 1]};
                mma_sync<T>(sums[pair], a, ones[0], ones[1]);
            }
        }
        cp_async_wait_all(); // the steps beyond the last
    }
    if (t == 0)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            shared_sums[warp][4 * g + 2 * pair] = sums[pair][0];
            shared_sums[warp][4 * g + 2 * pair + 1] = sums[pair][2];
        }
    // The products of WARPS_AT_ONCE warps at a time go where the images were.
    float *const shared = (float *)dynamic_shared;
    float total[2] = {0.0f, 0.0f};
    for (int round = 0; round < WARPS / WARPS_AT_ONCE; round++) {
        __syncthreads();
        if (warp / WARPS_AT_ONCE == round) {
            float *mine = shared + warp % WARPS_AT_ONCE * PRODUCTS + 4 * g * PRODUCT_ROW + 2 * t;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int position = 0; position < 4; position++)
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        const float *from = &products[j][position / 2][tile][position % 2 * 2];
                        *(float2 *)(mine + (position * CHANNELS + j) * PRODUCT_ROW + 8 * tile) =
                            make_float2(from[0], from[1]);
                    }
        }
        __syncthreads();
#pragma unroll
        for (int pass = 0; pass < 2; pass++) {
            const int i = threadIdx.x + pass * THREADS, tap = i / CHANNELS;
            if (i < TAPS * CHANNELS)
                for (int w = 0; w < WARPS_AT_ONCE; w++)
#pragma unroll
                    for (int position = 0; position < 4; position++) {
                        const int pixel = (tap / 3 + position / 2) * 4 + tap % 3 + position % 2;
                        total[pass] +=
                            shared[w * PRODUCTS + (position * CHANNELS + i % CHANNELS) * PRODUCT_ROW + pixel];
                    }
        }
    }
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        const int i = threadIdx.x + pass * THREADS, of_channel = first_channel + i % CHANNELS;
        if (i >= GRADIENT_SUMS * CHANNELS || of_channel >= s.channels)
            continue;
        if (i >= TAPS * CHANNELS)
            for (int w = 0; w < WARPS; w++)
                total[pass] += shared_sums[w][i % CHANNELS];
        partials[((int64_t)of_channel * GRADIENT_SUMS + i / CHANNELS) * gridDim.x + blockIdx.x] = total[pass];
    }
#endif
}

// Bytes of shared memory for the images and the windows' offsets.
static size_t tensor_shared(const band_grid &b)
{
    return ((size_t)b.units * b.tile + (size_t)b.units * b.rows * b.window_columns) * sizeof(uint16_t);
}

// Whether the tensor-core kernels apply; the pointers are those accessed as aligned vectors.
static bool uses_tensor_cores(const one_sizes &s, const void *first, const void *second)
{
    return current_device().capability >= 80 && s.output_channels_last && s.channels % 8 == 0 && is_aligned_16(first) &&
           is_aligned_16(second);
}

// ---- D: gradients ----

static constexpr int GRADIENT_THREADS = GRADIENT_SUMS * WARP_SIZE;

struct one_gradients {
    void *weight, *bias, *norm_weight, *norm_bias; // all but weight may be NULL
};

// A block has a channel, a warp one of its sums, added in a fixed order in double.
template <typename T>
__global__ void __launch_bounds__(GRADIENT_THREADS)
    one_gradients_kernel(one_gradients grads, const float *partials, int partial_count, const double *statistics,
                         one_parameters p, one_sizes s)
{
    __shared__ double sums[GRADIENT_SUMS];
    const int lane = threadIdx.x % WARP_SIZE, which = threadIdx.x / WARP_SIZE;
    const int64_t channel = blockIdx.x;
    wait_for_predecessor();
    release_successor();
    const float *mine = partials + (channel * GRADIENT_SUMS + which) * partial_count;
    // The loads that the first threads need after the sums are issued before them, to overlap the latencies.
    const int k = threadIdx.x;
    const bool makes = k < TAPS;
    const double *means = statistics + 2 * s.channels, *covariance = means + TAPS;
    double mean[TAPS], row[TAPS], mean_of_mine = 0.0, variance = 0.0;
    float weight[TAPS], gamma = 1.0f;
    if (makes) {
        mean_of_mine = means[k];
        variance = statistics[s.channels + channel];
        gamma = p.norm.weight ? load_value_early(p.norm.weight, p.norm.dtype, channel) : 1.0f;
#pragma unroll
        for (int l = 0; l < TAPS; l++) {
            weight[l] = load_value_early(p.weight, p.weight_dtype, channel * TAPS + l);
            mean[l] = means[l];
            row[l] = covariance[k * TAPS + l];
        }
    }
    double sum = 0.0;
#pragma unroll 9
    for (int i = lane; i < partial_count; i += WARP_SIZE)
        sum += (double)mine[i];
    sum = warp_sum(sum);
    if (lane == 0)
        sums[which] = sum;
    __syncthreads();
    if (!makes)
        return;
    const double rstd = 1.0 / sqrt(variance + p.norm.eps), scale = (double)gamma * rstd, total = sums[TAPS];
    double dot = 0.0, spread = 0.0;
#pragma unroll
    for (int l = 0; l < TAPS; l++) {
        const double w = (double)rounded_weight<T>(weight[l]);
        dot += w * (sums[l] - total * mean[l]);
        spread += w * row[l];
    }
    dot *= rstd;
    const double grad = scale * (sums[k] - total * mean_of_mine - dot * rstd * spread);
    store_value(grads.weight, p.weight_dtype, channel * TAPS + k, grad);
    if (k > 0)
        return;
    if (grads.norm_weight)
        store_value(grads.norm_weight, p.norm.dtype, channel, dot);
    if (grads.norm_bias)
        store_value(grads.norm_bias, p.norm.dtype, channel, total);
    if (grads.bias)
        store_value(grads.bias, p.weight_dtype, channel, 0.0 * (total + dot * scale));
}

// ---- launchers ----

static bool is_valid(const one_sizes &s)
{
    return s.batch > 0 && s.channels > 0 && s.height >= 2 && s.width >= 2 && s.width <= CUDA_OPS_ONE_WIDEST &&
           s.channels < (int64_t)MAX_GRID * CHANNELS && (int64_t)s.height * s.width < INT32_MAX;
}

int64_t conv_bn_relu_pool_one_channel_statistics(int64_t channels)
{
    return 2 * channels + TAPS + TAPS * TAPS;
}

int64_t conv_bn_relu_pool_one_channel_workspace(const one_sizes *s)
{
    if (!is_valid(*s))
        return 0;
    const moment_grid m = moment_grid_of(*s);
    const int64_t forward = (int64_t)m.blocks * m.strips * SUMS * (int64_t)sizeof(double);
    const int64_t blocks = 2 * WANTED_BLOCKS;
    const int64_t backward = s->channels * GRADIENT_SUMS * blocks * (int64_t)sizeof(float);
    return forward > backward ? forward : backward;
}

template <typename T>
static cuda_ops_status forward(T *output, uint8_t *argmax, double *statistics, double *partials,
                               const cuda_ops_running_statistics &running, const T *input, const one_parameters &p,
                               const one_sizes &s, cudaStream_t stream)
{
    const moment_grid m = moment_grid_of(s);
    launch_dependent(one_moments_kernel<T>, dim3(m.strips, m.blocks), dim3(MOMENT_THREADS), 0, stream, partials, input,
                     s, m);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int partial_count = (int)(m.blocks * m.strips);
    const unsigned int channel_blocks = (unsigned int)ceil_div(s.channels, CHANNELS);
    if constexpr (sizeof(T) == 2)
        if (uses_tensor_cores(s, output, argmax)) {
            const band_grid b = band_grid_of(s, sizeof(T));
            launch_dependent(one_forward_tensor_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                             tensor_shared(b), stream, output, argmax, statistics, running, partials, partial_count,
                             input, p, s, b);
            return launch_status();
        }
    const band_grid b = band_grid_of(s, sizeof(float));
    launch_dependent(one_forward_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                     (size_t)b.units * b.tile * sizeof(float), stream, output, argmax, statistics, running, partials,
                     partial_count, input, p, s, b, strides_of(s, b));
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(const one_gradients &grads, float *partials, const T *grad_output,
                                const uint8_t *argmax, const double *statistics, const T *input,
                                const one_parameters &p, const one_sizes &s, cudaStream_t stream)
{
    const unsigned int channel_blocks = (unsigned int)ceil_div(s.channels, CHANNELS);
    band_grid b = band_grid_of(s, sizeof(float));
    bool launched = false;
    if constexpr (sizeof(T) == 2)
        if (uses_tensor_cores(s, grad_output, argmax)) {
            b = band_grid_of(s, sizeof(T));
            const size_t for_products = WARPS_AT_ONCE * PRODUCTS * sizeof(float);
            const size_t ring_offset = (tensor_shared(b) + 15) / 16 * 16, for_reading = ring_offset + RING_BYTES;
            const size_t bytes = for_products > for_reading ? for_products : for_reading;
            allow_shared_memory(one_sums_tensor_kernel<T>, bytes);
            launch_dependent(one_sums_tensor_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS), bytes, stream,
                             partials, grad_output, argmax, input, s, b, (int)ring_offset);
            launched = true;
        }
    if (!launched)
        launch_dependent(one_sums_kernel<T>, dim3(b.blocks, channel_blocks), dim3(THREADS),
                         (size_t)b.units * b.tile * sizeof(float), stream, partials, grad_output, argmax, input, s, b,
                         strides_of(s, b));
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    launch_dependent(one_gradients_kernel<T>, dim3((unsigned int)s.channels), dim3(GRADIENT_THREADS), 0, stream, grads,
                     partials, (int)b.blocks, statistics, p, s);
    return launch_status();
}

cuda_ops_status conv_bn_relu_pool_one_channel_forward(void *output, uint8_t *argmax, double *statistics,
                                                      void *workspace, const cuda_ops_running_statistics *running,
                                                      const void *input, const void *weight, const void *bias,
                                                      const cuda_ops_norm_parameters *norm, const one_sizes *s,
                                                      cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                      cudaStream_t stream)
{
    if (!is_valid(*s))
        return CUDA_OPS_INVALID_ARGUMENT;
    const one_parameters p = {weight, bias, weight_dtype, *norm};
    double *const partials = (double *)workspace;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return forward((float *)output, argmax, statistics, partials, *running, (const float *)input, p, *s, stream);
    case CUDA_OPS_FLOAT16:
        return forward((__half *)output, argmax, statistics, partials, *running, (const __half *)input, p, *s, stream);
    case CUDA_OPS_BFLOAT16:
        return forward((__nv_bfloat16 *)output, argmax, statistics, partials, *running, (const __nv_bfloat16 *)input, p,
                       *s, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status conv_bn_relu_pool_one_channel_backward(void *grad_weight, void *grad_bias, void *grad_norm_weight,
                                                       void *grad_norm_bias, void *workspace, const void *grad_output,
                                                       const uint8_t *argmax, const double *statistics,
                                                       const void *input, const void *weight,
                                                       const cuda_ops_norm_parameters *norm, const one_sizes *s,
                                                       cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype,
                                                       cudaStream_t stream)
{
    if (!is_valid(*s))
        return CUDA_OPS_INVALID_ARGUMENT;
    const one_parameters p = {weight, NULL, weight_dtype, *norm};
    const one_gradients grads = {grad_weight, grad_bias, grad_norm_weight, grad_norm_bias};
    float *const partials = (float *)workspace;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return backward(grads, partials, (const float *)grad_output, argmax, statistics, (const float *)input, p, *s,
                        stream);
    case CUDA_OPS_FLOAT16:
        return backward(grads, partials, (const __half *)grad_output, argmax, statistics, (const __half *)input, p, *s,
                        stream);
    case CUDA_OPS_BFLOAT16:
        return backward(grads, partials, (const __nv_bfloat16 *)grad_output, argmax, statistics,
                        (const __nv_bfloat16 *)input, p, *s, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
