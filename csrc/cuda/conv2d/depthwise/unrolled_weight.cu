// conv2d with a group per channel in channels_last, backward_weight of 3x3 and 5x5 filters with strides of 1 and 2, and
// of 7x7 filters with a stride of 1, with all loops over taps unrolled.
//
// A thread has one or two channels with all of their sums in registers; it takes units of 2 x 4 pixels of grad_output,
// with what of the input they meet. A block has up to 32 vectors of channels and a share of the units, and adds its
// threads' sums in shared memory; those of a cluster's blocks are added by way of distributed shared memory, in order.
// So one launch suffices but for few channels of many pixels, or before Hopper, where blocks leave partial sums for
// another. Lanes along the channels are a power of two, so that threads of a warp have few units, and take one branch.
// No pixel beside grad_output is multiplied, not even by zero, where an input that it would meet is infinite.
// Bound by memory; small images by latency, large filters by instructions.
#include <algorithm>
#include <type_traits>

#include "conv2d/depthwise/channel_vector.cuh"
#include "conv2d/split_k.h"
#include "ptx/cluster.cuh"

static constexpr int THREADS = 256;
static constexpr int UNIT_ROWS = 2, UNIT_COLUMNS = 4;
static constexpr int MOST_CLUSTER = 8;
static constexpr int WORDS_AHEAD = 32; // of rows of the input that are fetched ahead
static constexpr int SUM_BYTES = 31 << 10;

// cluster * splits blocks share the units of a tile of channels.
struct WeightTiles {
    int lanes, groups, channel_tiles, units_x, units_y, cluster, splits;
    struct Divisor by_lanes;
    struct Divider by_units_x, by_units_y;
    int64_t units, units_each; // all of a tile of channels, and of a block
};

// Rows of the filter whose sums are added at a time.
__host__ __device__ static constexpr int rows_at_once(int kernel, int vector)
{
    const int rows = SUM_BYTES / (THREADS * vector * kernel * (int)sizeof(float));
    return rows < kernel ? rows : kernel;
}

__host__ __device__ static constexpr int blocks_at_once(int kernel, int vector)
{
    return kernel == 7 && vector == 2 ? 1 : 2;
}

template <typename T, int K, int STRIDE, int VECTOR>
__global__ void __launch_bounds__(THREADS, blocks_at_once(K, VECTOR))
    conv2d_depthwise_backward_weight_unrolled_kernel(float *partial, const __grid_constant__ DepthwiseProblem p,
                                                     const __grid_constant__ WeightTiles t)
{
    constexpr int ROWS = (UNIT_ROWS - 1) * STRIDE + K, COLUMNS = (UNIT_COLUMNS - 1) * STRIDE + K;
    constexpr int AT_ONCE = rows_at_once(K, VECTOR);
    typedef ChannelVector<T, VECTOR> V;
    constexpr int AHEAD = WORDS_AHEAD / (COLUMNS * V::WORDS) < 2 ? 2 : WORDS_AHEAD / (COLUMNS * V::WORDS);
    __shared__ float sums[THREADS * VECTOR * AT_ONCE * K], total[K * K * WARP_SIZE * VECTOR];
    const int group = quotient(threadIdx.x, t.by_lanes), lane = (int)threadIdx.x - group * t.lanes;
    // Blocks of a cluster are neighbours.
    const int rank = blockIdx.x % t.cluster, rest = blockIdx.x / t.cluster, split = rest / t.channel_tiles;
    const int width = t.lanes * VECTOR;
    const int64_t first_channel = (int64_t)(rest - split * t.channel_tiles) * width;
    const int64_t channel = first_channel + lane * VECTOR;
    const int64_t first = ((int64_t)split * t.cluster + rank) * t.units_each;
    const int64_t end = min(t.units, first + t.units_each);
    const int64_t in_line = p.in.y * (int)sizeof(T), in_column = p.in.x * (int)sizeof(T); // bytes
    wait_for_predecessor();
    release_successor();

    float sum[K][K][VECTOR] = {};
    if (group < t.groups && channel < p.channels)
        for (int64_t unit = first + group; unit < end; unit += t.groups) {
            const uint32_t line = t.by_units_x.of((uint32_t)unit), image = t.by_units_y.of(line);
            const int64_t n = image;
            const int x = (int)((uint32_t)unit - line * t.units_x) * UNIT_COLUMNS,
                      y = (int)(line - image * t.units_y) * UNIT_ROWS;
            const int left_x = p.out_width - x, left_y = p.out_height - y;
            const int in_x = x * STRIDE - p.padding_left, in_y = y * STRIDE - p.padding_top;
            const char *const corner =
                (const char *)((const T *)p.input + n * p.in.n + channel + in_y * p.in.y + in_x * p.in.x);
            unsigned int inside = 0;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                inside |= (unsigned int)((unsigned int)(in_x + i) < (unsigned int)p.width) << i;
            const auto fetch = [&](V(&raw)[COLUMNS], int row) {
                const unsigned int there = (unsigned int)(in_y + row) < (unsigned int)p.height ? inside : 0;
                const char *from = corner + row * in_line;
#pragma unroll
                for (int i = 0; i < COLUMNS; i++, from += in_column)
                    load_channels(raw[i], (const T *)from, there >> i & 1);
            };
            V raw[AHEAD][COLUMNS], raw_grad[UNIT_ROWS][UNIT_COLUMNS];
            const T *grad = (const T *)p.output + n * p.out.n + channel + y * p.out.y + x * p.out.x;
#pragma unroll
            for (int i = 0; i < UNIT_ROWS; i++, grad += p.out.y)
#pragma unroll
                for (int j = 0; j < UNIT_COLUMNS; j++)
                    load_channels(raw_grad[i][j], grad + j * p.out.x, i < left_y && j < left_x);
#pragma unroll
            for (int row = 0; row < AHEAD; row++)
                fetch(raw[row], row);
            float value[UNIT_ROWS][UNIT_COLUMNS][VECTOR];
#pragma unroll
            for (int i = 0; i < UNIT_ROWS; i++)
                convert_channels(value[i], raw_grad[i]);
            const bool whole = left_x >= UNIT_COLUMNS && left_y >= UNIT_ROWS;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float seen[COLUMNS][VECTOR];
                convert_channels(seen, raw[row % AHEAD]);
                if (row + AHEAD < ROWS)
                    fetch(raw[row % AHEAD], row + AHEAD);
                // Pixels past the output are zeros: they are left out where they would meet what is not finite.
                bool all_at_once = whole;
                if (!whole) {
                    float zero = 0;
#pragma unroll
                    for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                        for (int k = 0; k < VECTOR; k++)
                            zero += 0.0f * seen[i][k];
                    all_at_once = zero == 0;
                }
                const auto multiply = [&](auto all) {
#pragma unroll
                    for (int i = 0; i < UNIT_ROWS; i++) {
                        const int r = row - i * STRIDE;
                        if (r < 0 || r >= K)
                            continue;
#pragma unroll
                        for (int j = 0; j < UNIT_COLUMNS; j++)
                            if (all.value || (i < left_y && j < left_x))
#pragma unroll
                                for (int s = 0; s < K; s++)
#pragma unroll
                                    for (int k = 0; k < VECTOR; k++)
                                        sum[r][s][k] += value[i][j][k] * seen[j * STRIDE + s][k];
                    }
                };
                if (all_at_once)
                    multiply(std::true_type());
                else
                    multiply(std::false_type());
            }
        }

    // Sums of the groups that had units: [group][tap][channel].
    const int busy = (int)max((int64_t)0, min((int64_t)t.groups, end - first));
#pragma unroll
    for (int r0 = 0; r0 < K; r0 += AT_ONCE) {
        constexpr int ALL = K; // of a filter's rows
        const int rows = min(AT_ONCE, ALL - r0), each = rows * K * width;
        if (group < busy)
#pragma unroll
            for (int r = r0; r < r0 + AT_ONCE && r < ALL; r++)
#pragma unroll
                for (int s = 0; s < K; s++)
#pragma unroll
                    for (int k = 0; k < VECTOR; k++)
                        sums[group * each + ((r - r0) * K + s) * width + lane * VECTOR + k] = sum[r][s][k];
        __syncthreads();
        for (int i = threadIdx.x; i < each; i += THREADS) {
            float all = 0;
            for (int g = 0; g < busy; g++)
                all += sums[g * each + i];
            total[r0 * K * width + i] = all;
        }
        if (r0 + AT_ONCE < K)
            __syncthreads();
    }
    __syncwarp(); // barriers of clusters are whole warps'
    if (t.cluster > 1)
        cluster_sync();
    else
        __syncthreads();
    // Each block of the cluster adds a share of its sums, in the order of the filters in memory.
    const int count = K * K * (int)min((int64_t)width, p.channels - first_channel);
    for (int i = rank * THREADS + threadIdx.x; i < count; i += t.cluster * THREADS) {
        const int c = i / (K * K), cell = (i - c * (K * K)) * width + c;
        float all = 0;
        if (t.cluster > 1)
            for (int other = 0; other < t.cluster; other++)
                all += *mapa(total + cell, other);
        else
            all = total[cell];
        const int64_t to = first_channel * (K * K) + i;
        if (t.splits > 1)
            partial[split * p.channels * (K * K) + to] = all;
        else
            ((T *)p.result)[to] = store_from_accumulate<T>(all);
    }
    __syncwarp();
    if (t.cluster > 1)
        cluster_sync(); // others may still read this block's sums
}

// The tiles of a call with that vector, and the cycles that it is expected to take.
static double tiles_of(WeightTiles &best, const DepthwiseProblem &p, int vector, const Device &device)
{
    constexpr double LATENCY = 1500;     // cycles of a unit, at least
    constexpr double SECOND_PASS = 3500; // cycles of the launch that adds splits
    constexpr double CLUSTER = 1000;     // and of a cluster's sums
    const int K = p.kernel_width, stride = p.stride_width, processors = std::max(1, device.multiprocessors);
    const int64_t vectors = p.channels / vector;
    WeightTiles t = {};
    t.units_x = (int)ceil_div(p.out_width, UNIT_COLUMNS);
    t.units_y = (int)ceil_div(p.out_height, UNIT_ROWS);
    t.units = p.batch * t.units_y * t.units_x;
    t.by_units_x = divider_by((uint32_t)t.units_x);
    t.by_units_y = divider_by((uint32_t)t.units_y);
    const double loads = ((UNIT_ROWS - 1) * stride + K) * ((UNIT_COLUMNS - 1) * stride + K) + UNIT_ROWS * UNIT_COLUMNS;
    const double work = (double)UNIT_ROWS * UNIT_COLUMNS * K * K * vector + loads * (5 + vector) + 200;
    const double last = 16.0 * K * K * vector + 500;
    const int most = device.capability >= 90 ? MOST_CLUSTER : 1, at_once = blocks_at_once(K, vector);
    double least = -1;
    for (int lanes = WARP_SIZE; lanes >= 8; lanes /= 2) { // of one unit in a warp, or of two or four
        if (lanes > 8 && lanes / 2 >= vectors)
            continue;
        t.lanes = lanes;
        t.channel_tiles = (int)ceil_div(vectors, lanes);
        t.groups = THREADS / lanes;
        t.by_lanes = make_divisor((uint32_t)lanes);
        const int64_t most_parts = std::min(ceil_div(t.units, t.groups), ceil_div(4 * processors, t.channel_tiles));
        // Each number of a cluster's blocks, and of clusters some: a call on the host looks at no more than 20.
        for (int64_t parts = 1; parts <= most_parts;
             parts += parts < most ? 1 : std::max<int64_t>(most, parts / 2 / most * most)) {
            const int64_t cluster = std::min<int64_t>(parts, most);
            const double blocks = (double)t.channel_tiles * (double)parts, room = (double)processors * at_once;
            const double waves = (double)(int64_t)((blocks + room - 1) / room);
            const int64_t each = ceil_div(t.units, parts);
            // Instructions of a warp take so many cycles, with a block or two of a multiprocessor.
            const double pace = blocks <= processors ? 5 : 8;
            const double cycles = waves * ((double)ceil_div(each, t.groups) * std::max(LATENCY, work * pace) + last) +
                                  (cluster > 1 ? CLUSTER : 0) + (parts > cluster ? SECOND_PASS : 0);
            if (least >= 0 && cycles >= least)
                continue;
            least = cycles;
            t.cluster = (int)cluster;
            t.splits = (int)(parts / cluster);
            t.units_each = each;
            best = t;
        }
    }
    return least;
}

// Two channels a thread, or one: whichever takes less time.
static int tiles_of(WeightTiles &t, const DepthwiseProblem &p, bool aligned, const Device &device)
{
    const double one = tiles_of(t, p, 1, device);
    WeightTiles pairs;
    if (!aligned || p.channels % 2 != 0 || tiles_of(pairs, p, 2, device) >= one)
        return 1;
    t = pairs;
    return 2;
}

bool conv2d_depthwise_unrolled_weight_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype)
{
    return dtype != CUDA_OPS_FLOAT64 && p.in.c == 1 && p.out.c == 1 && p.multiplier == 1 &&
           p.kernel_height == p.kernel_width && (p.kernel_width == 3 || p.kernel_width == 5 || p.kernel_width == 7) &&
           p.stride_height == p.stride_width && (p.stride_width == 1 || (p.stride_width == 2 && p.kernel_width < 7)) &&
           p.dilation_height == 1 && p.dilation_width == 1 && p.batch > 0 &&
           p.batch * ceil_div(p.out_height, UNIT_ROWS) * ceil_div(p.out_width, UNIT_COLUMNS) <= INT_MAX;
}

// An H200 took so many times the cycles that the model counts, which are those of instructions alone.
double conv2d_depthwise_unrolled_weight_microseconds(const DepthwiseProblem &p, const Device &device)
{
    constexpr double CYCLES_OF_A_MICROSECOND = 1755;
    WeightTiles t = {};
    const double one = tiles_of(t, p, 1, device),
                 cycles = p.channels % 2 == 0 ? std::min(one, tiles_of(t, p, 2, device)) : one;
    return cycles / CYCLES_OF_A_MICROSECOND * (p.kernel_width == 5 ? 1.2 : 1.65);
}

size_t conv2d_depthwise_unrolled_weight_workspace(const DepthwiseProblem &p, const Device &device)
{
    int splits = 1;
    for (const int vector : {1, 2}) { // the pointers are not known here
        WeightTiles t;
        if (p.channels % vector == 0) {
            tiles_of(t, p, vector, device);
            splits = std::max(splits, t.splits);
        }
    }
    return splits > 1 ? sizeof(float) * (size_t)splits * p.channels * p.kernel_height * p.kernel_width : 0;
}

typedef void (*WeightKernel)(float *, DepthwiseProblem, WeightTiles);

template <typename T, int K>
static WeightKernel kernel_of(int stride, int vector)
{
    if (stride == 1)
        return vector == 2 ? conv2d_depthwise_backward_weight_unrolled_kernel<T, K, 1, 2>
                           : conv2d_depthwise_backward_weight_unrolled_kernel<T, K, 1, 1>;
    if constexpr (K < 7)
        return vector == 2 ? conv2d_depthwise_backward_weight_unrolled_kernel<T, K, 2, 2>
                           : conv2d_depthwise_backward_weight_unrolled_kernel<T, K, 2, 1>;
    return nullptr;
}

template <typename T>
static WeightKernel kernel_of(int kernel, int stride, int vector)
{
    return kernel == 3   ? kernel_of<T, 3>(stride, vector)
           : kernel == 5 ? kernel_of<T, 5>(stride, vector)
                         : kernel_of<T, 7>(stride, vector);
}

cuda_ops_status conv2d_depthwise_unrolled_weight(const DepthwiseProblem &p, cuda_ops_dtype dtype, void *workspace,
                                                 const Device &device, cudaStream_t stream)
{
    const uintptr_t addresses = (uintptr_t)p.input | (uintptr_t)p.output;
    WeightTiles t;
    const int stride = p.stride_width, K = p.kernel_width;
    const int vector = tiles_of(t, p, addresses % (uintptr_t)(2 * dtype_size(dtype)) == 0, device);
    const WeightKernel kernel = dtype == CUDA_OPS_FLOAT32   ? kernel_of<float>(K, stride, vector)
                                : dtype == CUDA_OPS_FLOAT16 ? kernel_of<__half>(K, stride, vector)
                                                            : kernel_of<__nv_bfloat16>(K, stride, vector);
    const double blocks = (double)t.channel_tiles * t.cluster * t.splits;
    if (blocks > INT_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent_clusters(kernel, (int64_t)blocks, THREADS, t.cluster, 0, stream, (float *)workspace, p, t);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || t.splits == 1)
        return status;
    return conv2d_sum_splits(p.result, workspace, p.channels * p.kernel_height * p.kernel_width, t.splits, dtype,
                             stream);
}
