// batch_norm in training where channels are innermost in memory, in rows of whole vectors, and the rows are few enough
// for shared memory: one kernel a pass, which reads its tensors once, instead of rows.cu's three.
// A tile is 4 or 8 neighbouring vectors of all rows, 64 or 128 bytes of each. A block copies its share of a tile's rows
// to shared memory, all of them under way at once; on Hopper a tile has a cluster of up to eight blocks, before it one
// block. Each finds mean and squared differences of what it has, relative to one of its values; these go to the
// cluster's other blocks through distributed shared memory, and all merge them in the same order, in double (Chan's
// formula). Then each writes its rows. Bound by latency where there are few tiles, by memory beyond.
#include "batch_norm/channel_values.cuh"
#include "batch_norm/paths.h"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int MOST_LANES = 8, FEWEST_LANES = 4; // vectors of a tile
static constexpr int MOST_CHANNELS = MOST_LANES * 8;   // of a tile, in halves
static constexpr int MOST_CLUSTER = 8;
static constexpr int64_t MOST_BYTES = 100 << 10; // of a block's rows: two blocks of a multiprocessor
static constexpr int64_t FEW_BYTES = 64 << 10;   // three of them
static constexpr int64_t OTHER_BYTES = 12 << 10; // of shared memory, beside its rows
static constexpr int RESIDENT = 4;               // blocks of a multiprocessor that has registers for them
static constexpr int UNASKED_BYTES = 32 << 10;   // that a kernel has without asking
static constexpr int FEWEST_ROWS = 2;            // of a thread, where more blocks would do no more

// How a call's rows are laid on blocks: `step` rows to each of a tile's `cluster` blocks.
struct Tiles {
    int64_t outer, channels;
    int lanes, cluster, step;
    double eps;
};

// Two sums of a channel over the rows of a block: of values and squares about their mean, or backward's.
struct Pair {
    double first, second;
};

// The block's place: its tile's first vector, and its rows.
struct Place {
    int64_t vector, vectors, row;
    int lane, group, rows, width; // width: channels of a tile
    bool inside;
};

template <int SIZE>
__device__ __forceinline__ Place place_of(const Tiles &t)
{
    Place at;
    const int rank = (int)(blockIdx.x % t.cluster);
    at.lane = (int)threadIdx.x % t.lanes, at.group = (int)threadIdx.x / t.lanes;
    at.vectors = t.channels / SIZE;
    at.vector = (int64_t)(blockIdx.x / t.cluster) * t.lanes + at.lane;
    at.inside = at.vector < at.vectors;
    at.row = (int64_t)rank * t.step;
    const int64_t left = t.outer - at.row;
    at.rows = (int)(left < 0 ? 0 : left < t.step ? left : t.step);
    at.width = t.lanes * SIZE;
    return at;
}

// Starts copying the block's rows, [row][lane]; a thread has its lane of every row that it will read.
template <typename V>
__device__ __forceinline__ void keep(V *kept, const V *tensor, const Place &at, int lanes)
{
    const V *from = tensor + (at.row + at.group) * at.vectors + at.vector;
    const int groups = THREADS / lanes;
    for (int row = at.group; row < at.rows && at.inside; row += groups, from += groups * at.vectors) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
        cp_async_16(shared_address(kept + row * lanes + at.lane), from);
#else
        kept[row * lanes + at.lane] = *from;
#endif
    }
}

// The sums of a thread's channels over the warp's threads of the same lane, in double, to scratch[warp][channel].
template <typename A, int SIZE>
__device__ __forceinline__ void leave_sums(const A (&sums)[SIZE], double *scratch, const Place &at, int lanes)
{
    const int warp = (int)threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        double sum = (double)sums[e];
        for (int offset = lanes; offset < WARP_SIZE; offset *= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        if ((int)threadIdx.x % WARP_SIZE < lanes)
            scratch[warp * MOST_CHANNELS + at.lane * SIZE + e] = sum;
    }
}

// A channel's, of all warps.
__device__ __forceinline__ double total_of(const double *scratch, int channel)
{
    double total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        total += scratch[warp * MOST_CHANNELS + channel];
    return total;
}

// What the blocks of a tile have left in `mine`, as [rank][channel]: of other blocks copied to `all`, whose memory
// nothing else uses any more.
__device__ __forceinline__ const Pair *collect(const Pair *mine, double *scratch, int width, int cluster)
{
    __syncwarp(); // barriers of clusters are whole warps'
    if (cluster > 1) {
        cluster_sync();
        Pair *const all = (Pair *)scratch;
        for (int i = (int)threadIdx.x; i < cluster * width; i += THREADS)
            all[i] = *mapa(mine + i % width, i / width);
        cluster_arrive_aligned(); // and waited for in the end: other blocks read this one's
        mine = all;
    }
    __syncthreads();
    return mine;
}

template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    cluster_forward_kernel(T *output, double *mean, double *variance, const __grid_constant__ RunningUpdate running,
                           const T *input, const void *weight, const void *bias, const __grid_constant__ Tiles t,
                           cuda_ops_dtype parameter_dtype)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(16) double scratch[2 * WARPS * MOST_CHANNELS];
    __shared__ Pair mine[MOST_CHANNELS];
    __shared__ ForwardFactors<A> factors[MOST_CHANNELS];
    __shared__ A shifts[MOST_CHANNELS];
    V *const kept = (V *)memory;
    const Place at = place_of<SIZE>(t);
    const int groups = THREADS / t.lanes;
    // A thread a channel, where it is about channels.
    const int c = (int)threadIdx.x;
    const int64_t channel = (at.vector - at.lane) * SIZE + c;
    const bool has_channel = c < at.width && channel < t.channels;
    wait_for_predecessor();
    release_successor();
    keep(kept, reinterpret_cast<const V *>(input), at, t.lanes);
    double w = 1, b = 0, old_mean = 0, old_variance = 0;
    if (has_channel) { // on their way beside the rows
        w = weight ? load_value(weight, parameter_dtype, channel) : 1.0;
        b = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
        if (running.statistics.mean) {
            old_mean = load_value(running.statistics.mean, running.statistics.dtype, channel);
            old_variance = load_value(running.statistics.variance, running.statistics.dtype, channel);
        }
    }
    cp_async_wait_all();
    __syncthreads();
    const auto origin_of = [&](int vector, int e) {
        return middle_of(element_of(kept[vector], e), element_of(kept[at.rows / 2 * t.lanes + vector], e),
                         element_of(kept[(at.rows - 1) * t.lanes + vector], e));
    };
    const bool has_rows = at.rows > 0 && at.inside;
    A origin[SIZE], sums[SIZE], shift[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        origin[e] = has_rows ? origin_of(at.lane, e) : A(0);
        sums[e] = A(0);
    }
#pragma unroll 4
    for (int row = at.group; row < at.rows && at.inside; row += groups) {
        const V value = kept[row * t.lanes + at.lane];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            sums[e] += element_of(value, e) - origin[e];
    }
    leave_sums(sums, scratch, at, t.lanes);
    __syncthreads();
    double relative = 0;
    if (c < at.width) {
        relative = at.rows > 0 ? total_of(scratch, c) / at.rows : 0.0;
        shifts[c] = (A)relative;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        shift[e] = shifts[at.lane * SIZE + e];
        sums[e] = A(0);
    }
#pragma unroll 4
    for (int row = at.group; row < at.rows && at.inside; row += groups) {
        const V value = kept[row * t.lanes + at.lane];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            const A difference = element_of(value, e) - origin[e] - shift[e];
            sums[e] += difference * difference;
        }
    }
    leave_sums(sums, scratch, at, t.lanes);
    __syncthreads();
    if (has_channel)
        mine[c] = {at.rows > 0 ? (double)origin_of(c / SIZE, c % SIZE) + relative : 0.0, total_of(scratch, c)};
    const Pair *const pairs = collect(mine, scratch, at.width, t.cluster);
    if (has_channel) {
        double m = 0, squares = 0;
        const auto rows_of = [&](int rank) {
            const int64_t left = t.outer - (int64_t)rank * t.step;
            return (double)(left < 0 ? 0 : left < t.step ? left : t.step);
        };
        for (int rank = 0; rank < t.cluster; rank++)
            m += rows_of(rank) * pairs[rank * at.width + c].first;
        m /= (double)t.outer;
        for (int rank = 0; rank < t.cluster; rank++) {
            const double difference = pairs[rank * at.width + c].first - m;
            squares += pairs[rank * at.width + c].second + rows_of(rank) * difference * difference;
        }
        const double biased = squares / (double)t.outer;
        factors[c] = ForwardFactors<A>(m, biased, w, b, t.eps);
        if (at.row == 0) {
            mean[channel] = m;
            variance[channel] = biased;
            running.update(channel, m, biased, old_mean, old_variance);
        }
    }
    __syncthreads();
    V *to = reinterpret_cast<V *>(output) + (at.row + at.group) * at.vectors + at.vector;
    ForwardFactors<A> f[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        f[e] = factors[at.lane * SIZE + e];
#pragma unroll 2
    for (int row = at.group; row < at.rows && at.inside; row += groups, to += groups * at.vectors) {
        const V value = kept[row * t.lanes + at.lane];
        A result[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            result[e] = (element_of(value, e) - f[e].center) * f[e].scale + f[e].offset;
        store_vector(to, vector_of<T>(result));
    }
    __syncwarp();
    if (t.cluster > 1)
        cluster_wait_aligned(); // until the others have read this block's
}

template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
    cluster_backward_kernel(T *grad_input, void *grad_weight, void *grad_bias, const T *grad_output, const T *input,
                            const void *weight, const void *mean, const void *variance, const __grid_constant__ Tiles t,
                            cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(16) double scratch[2 * WARPS * MOST_CHANNELS];
    __shared__ Pair mine[MOST_CHANNELS];
    __shared__ BackwardFactors<A> factors[MOST_CHANNELS];
    __shared__ A centers[MOST_CHANNELS];
    V *const kept_grad = (V *)memory, *const kept_input = kept_grad + t.step * t.lanes;
    const Place at = place_of<SIZE>(t);
    const int groups = THREADS / t.lanes;
    const int c = (int)threadIdx.x;
    const int64_t channel = (at.vector - at.lane) * SIZE + c;
    const bool has_channel = c < at.width && channel < t.channels;
    wait_for_predecessor();
    release_successor();
    keep(kept_grad, reinterpret_cast<const V *>(grad_output), at, t.lanes);
    keep(kept_input, reinterpret_cast<const V *>(input), at, t.lanes);
    double w = 1, m = 0, v = 1;
    if (has_channel) {
        w = weight ? load_value(weight, parameter_dtype, channel) : 1.0;
        m = load_value(mean, statistics_dtype, channel);
        v = load_value(variance, statistics_dtype, channel);
    }
    if (c < at.width)
        centers[c] = (A)m;
    cp_async_wait_all();
    __syncthreads();
    A center[SIZE], sums[SIZE], products[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        center[e] = centers[at.lane * SIZE + e];
        sums[e] = products[e] = A(0);
    }
#pragma unroll 4
    for (int row = at.group; row < at.rows && at.inside; row += groups) {
        const V grad = kept_grad[row * t.lanes + at.lane], value = kept_input[row * t.lanes + at.lane];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            sums[e] += element_of(grad, e);
            products[e] += element_of(grad, e) * (element_of(value, e) - center[e]);
        }
    }
    double *const of_products = scratch + WARPS * MOST_CHANNELS;
    leave_sums(sums, scratch, at, t.lanes);
    leave_sums(products, of_products, at, t.lanes);
    __syncthreads();
    if (has_channel)
        mine[c] = {total_of(scratch, c), total_of(of_products, c)};
    const Pair *const pairs = collect(mine, scratch, at.width, t.cluster);
    if (has_channel) {
        double total = 0, product = 0, dot;
        for (int rank = 0; rank < t.cluster; rank++)
            total += pairs[rank * at.width + c].first, product += pairs[rank * at.width + c].second;
        factors[c] = BackwardFactors<A>(total, product, m, v, w, t.eps, 1.0 / (double)t.outer, &dot);
        if (at.row == 0 && grad_weight) {
            store_value(grad_weight, parameter_dtype, channel, dot);
            store_value(grad_bias, parameter_dtype, channel, total);
        }
    }
    __syncthreads();
    V *to = reinterpret_cast<V *>(grad_input) + (at.row + at.group) * at.vectors + at.vector;
    BackwardFactors<A> f[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        f[e] = factors[at.lane * SIZE + e];
#pragma unroll 2
    for (int row = at.group; row < at.rows && at.inside; row += groups, to += groups * at.vectors) {
        const V grad = kept_grad[row * t.lanes + at.lane], value = kept_input[row * t.lanes + at.lane];
        A result[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            result[e] =
                element_of(grad, e) * f[e].scale + (element_of(value, e) - center[e]) * f[e].slope + f[e].offset;
        store_vector(to, vector_of<T>(result));
    }
    __syncwarp();
    if (t.cluster > 1)
        cluster_wait_aligned();
}

static bool is_backward(const NormCall &call)
{
    return call.pass == CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD;
}

static int64_t bytes_of(const NormCall &call, int lanes, int cluster)
{
    return ceil_div(call.outer, cluster) * lanes * 16 * (is_backward(call) ? 2 : 1);
}

static int64_t tiles_of(const NormCall &call, int lanes)
{
    return ceil_div(call.channels * dtype_size(call.dtype) / 16, lanes);
}

// How the rows are laid on blocks: in the smallest clusters with which all blocks run at once and each multiprocessor
// has two, unless rows are too few to be parted further; large clusters start late. Where they do not all run at once,
// wide tiles are read faster. lanes = 0: the rows do not fit.
static Tiles tiling_of(const NormCall &call, const Device &device)
{
    const int most = device.capability >= 90 ? MOST_CLUSTER : 1;
    const auto tiles = [&](int lanes, int cluster) {
        return Tiles{call.outer, call.channels, lanes, cluster, (int)ceil_div(call.outer, cluster), call.eps};
    };
    for (int cluster = 1; cluster <= most; cluster *= 2)
        for (const int lanes : {MOST_LANES, FEWEST_LANES}) {
            const int64_t bytes = bytes_of(call, lanes, cluster), blocks = tiles_of(call, lanes) * cluster;
            const int64_t room = device.shared_bytes / (bytes + OTHER_BYTES),
                          resident = room < RESIDENT ? room : RESIDENT;
            const bool are_parted = cluster == most || blocks >= 2 * device.multiprocessors ||
                                    call.outer < (int64_t)2 * cluster * FEWEST_ROWS * (THREADS / lanes);
            if (bytes <= MOST_BYTES && are_parted && blocks <= resident * device.multiprocessors)
                return tiles(lanes, cluster);
        }
    for (const int64_t limit : {FEW_BYTES, MOST_BYTES})
        for (const int lanes : {MOST_LANES, FEWEST_LANES})
            for (int cluster = 1; cluster <= most; cluster *= 2) {
                const int64_t bytes = bytes_of(call, lanes, cluster);
                if (bytes <= limit && bytes + OTHER_BYTES <= device.shared_bytes)
                    return tiles(lanes, cluster);
            }
    return tiles(0, 1);
}

Answer batch_norm_cluster_supports(const NormCall &call, const Device &device)
{
    if (!is_backward(call) && call.pass != CUDA_OPS_BATCH_NORM_TRAINING)
        return no("takes only training");
    if (call.epilogue)
        return no("has no activation and no residual");
    if (!call.wants_output)
        return no("does not take calls for the values by channel only");
    if (call.dtype == CUDA_OPS_FLOAT64)
        return no("has no kernel for float64");
    if (call.inner != 1)
        return no("channels are not innermost in memory");
    if (call.channels * dtype_size(call.dtype) % 16 != 0)
        return no("a row of channels is no multiple of 16 bytes");
    for (const void *const tensor :
         {call.input, (const void *)call.output, call.grad_output, (const void *)call.grad_input})
        if (!is_aligned_16(tensor))
            return no("a tensor is not aligned to 16 bytes");
    if (call.outer > MOST_BYTES || bytes_of(call, FEWEST_LANES, MOST_CLUSTER) > MOST_BYTES ||
        tiling_of(call, device).lanes == 0)
        return no("the rows of a tile do not fit into the shared memory of a cluster");
    return tiles_of(call, FEWEST_LANES) <= INT32_MAX / MOST_CLUSTER ? YES : no("more blocks than a grid has");
}

template <typename T>
static void launch(const NormCall &call, const Device &device)
{
    const Tiles t = tiling_of(call, device);
    const int64_t blocks = tiles_of(call, t.lanes) * t.cluster;
    const int bytes = (int)bytes_of(call, t.lanes, t.cluster);
    // Beside what the kernels declare, which counts too.
    if (bytes > UNASKED_BYTES)
        is_backward(call) ? allow_shared_memory(cluster_backward_kernel<T>, bytes)
                          : allow_shared_memory(cluster_forward_kernel<T>, bytes);
    if (is_backward(call))
        launch_dependent_clusters(cluster_backward_kernel<T>, blocks, THREADS, t.cluster, bytes, call.stream,
                                  (T *)call.grad_input, call.grad_weight, call.grad_bias, (const T *)call.grad_output,
                                  (const T *)call.input, call.weight, call.mean, call.variance, t, call.parameter_dtype,
                                  call.statistics_dtype);
    else
        launch_dependent_clusters(cluster_forward_kernel<T>, blocks, THREADS, t.cluster, bytes, call.stream,
                                  (T *)call.output, call.new_mean, call.new_variance, running_update_of(call),
                                  (const T *)call.input, call.weight, call.bias, t, call.parameter_dtype);
}

cuda_ops_status batch_norm_cluster(const NormCall &call, const Device &device)
{
    switch (call.dtype) {
    case CUDA_OPS_FLOAT32:
        launch<float>(call, device);
        break;
    case CUDA_OPS_FLOAT16:
        launch<__half>(call, device);
        break;
    default:
        launch<__nv_bfloat16>(call, device);
    }
    return launch_status();
}
