// The path few_classes of linear_cross_entropy: one kernel for all of it.
// A block holds weight in shared memory and takes 32 rows at a time, eight neighbouring threads a row, which split the
// features for the logits and for grad_input. For grad_weight a thread keeps four features of all classes in registers,
// over all of the block's rows. The blocks of a cluster add their sums in the order of their ranks; of more blocks than
// a cluster has, a second kernel adds them.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_FEW_CLASSES_CUH
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_FEW_CLASSES_CUH

#include "common/aligned_vector.cuh"
#include "common/loss.cuh"
#include "linear_cross_entropy/problem.cuh"
#include "ptx/cluster.cuh"

static constexpr int MOST_CLASSES = 16;
static constexpr int64_t MOST_FEATURES = 1024;
static constexpr int ROW_GROUP = 8; // threads of a row, each with the logits of two classes
static constexpr int TILE_ROWS = THREADS / ROW_GROUP;
static constexpr int LARGEST_CLUSTER = 8;
static constexpr int64_t MOST_BLOCKS = 132; // a large GPU's; a constant, so that sums are split alike on all
static_assert(MOST_CLASSES == 2 * ROW_GROUP, "two classes a thread");

template <typename A>
using four = aligned_vector<A, 4>;

// Number of a block's sums: of weight, in whole quads, and of bias.
__host__ __device__ __forceinline__ int head_sums(int classes, int quads)
{
    return classes * (quads * 4 + 1);
}

// Elements of shared memory for weight and a tile of input, which the slices' sums for grad_weight overwrite later.
__host__ __device__ __forceinline__ int head_tile_elements(int quads)
{
    const int tile = (MOST_CLASSES + TILE_ROWS) * quads * 4, sums = THREADS / quads * MOST_CLASSES * quads * 4;
    return tile > sums ? tile : sums;
}

template <typename A>
static size_t head_shared_bytes(int classes, int in_features)
{
    const int quads = (int)ceil_div(in_features, 4);
    return sizeof(A) * (size_t)(head_tile_elements(quads) + TILE_ROWS * MOST_CLASSES + head_sums(classes, quads));
}

template <typename A, typename S>
__device__ __forceinline__ four<A> load_four(const S *from, int valid, bool vectors)
{
    four<A> result;
    if (vectors) {
        const four<S> p = *reinterpret_cast<const four<S> *>(from);
#pragma unroll
        for (int e = 0; e < 4; e++)
            result.element[e] = load_as_accumulate(p.element[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            result.element[e] = e < valid ? (A)load_as_accumulate(from[e]) : A(0);
    }
    return result;
}

template <typename T, typename A>
__device__ __forceinline__ void store_four(T *to, const four<A> &value, int valid, bool vectors)
{
    four<T> result;
#pragma unroll
    for (int e = 0; e < 4; e++)
        result.element[e] = store_from_accumulate<T>(value.element[e]);
    if (vectors) {
        *reinterpret_cast<four<T> *>(to) = result;
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (e < valid)
                to[e] = result.element[e];
    }
}

// A reduce-scatter over the eight threads of a row: each gets the sums of two classes, 2 * rank and the next.
template <typename A>
__device__ __forceinline__ void share_out_logits(A (&own)[2], A (&values)[MOST_CLASSES], int rank)
{
#pragma unroll
    for (int step = 0; step < 3; step++) {
        const int half = ROW_GROUP >> step;
        const bool upper = rank & (half / 2);
#pragma unroll
        for (int i = 0; i < ROW_GROUP; i++)
            if (i < half) {
                const A sent = upper ? values[i] : values[i + half], kept = upper ? values[i + half] : values[i];
                values[i] = kept + __shfl_xor_sync(FULL_WARP, sent, half / 2);
            }
    }
    own[0] = values[0];
    own[1] = values[1];
}

// Replaces a thread's two logits by their gradients; the row's first thread adds the row's loss and weight.
template <typename T, typename P>
__device__ __forceinline__ void row_loss(accumulate_type<T> (&logits)[2], const head_problem<T, P> &p, int64_t row,
                                         int64_t t, accumulate_type<T> scale, int rank, double &loss_sum,
                                         double &weight_sum)
{
    typedef accumulate_type<T> A;
    const bool counts = t != p.ignore_index && is_class(t, p.classes);
    log_sum_exp<A> state = log_sum_exp_of_none<A>();
#pragma unroll
    for (int e = 0; e < 2; e++)
        if (2 * rank + e < p.classes)
            add_element(state, logits[e]);
    state = group_reduce<ROW_GROUP, false>(state, (log_sum_exp<A> *)nullptr);
    const A log_sum = log_of_sum(state);
    A loss = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int c = 2 * rank + e;
        if (c >= p.classes) {
            logits[e] = 0;
            continue;
        }
        const A shifted = logits[e] - state.maximum;
        A gradient = exp(shifted - log_sum);
        if (p.spread > A(0)) {
            gradient -= p.spread;
            loss += p.spread * (log_sum - shifted);
        }
        if (c == t) {
            gradient -= p.keep;
            loss += p.keep * (log_sum - shifted);
        }
        logits[e] = counts ? scale * gradient : A(0);
    }
    loss = group_reduce<ROW_GROUP, false>(loss, (A *)nullptr);
    if (rank != 0 || row >= p.rows)
        return;
    if (!counts)
        loss = t == p.ignore_index ? A(0) : A(CUDART_NAN);
    if (t != p.ignore_index && !counts)
        record_bad_index(p.error, row, t, p.classes);
    if (p.reduction == CUDA_OPS_REDUCTION_NONE)
        p.losses[row] = store_from_accumulate<P>((accumulate_type<P>)loss);
    loss_sum += loss;
    weight_sum += counts;
}

template <typename T, typename P>
__device__ __forceinline__ void write_loss(const head_problem<T, P> &p, double loss, double weight)
{
    if (p.reduction == CUDA_OPS_REDUCTION_NONE)
        return;
    const double result = p.reduction == CUDA_OPS_REDUCTION_MEAN ? loss / weight : loss;
    *p.losses = store_from_accumulate<P>((accumulate_type<P>)result);
    *p.total_weight = (accumulate_type<T>)weight;
}

// Stores element i of the sums to grad_weight or grad_bias.
template <typename T, typename P>
__device__ __forceinline__ void write_head_sum(const head_problem<T, P> &p, int i, accumulate_type<T> sum)
{
    const int width = p.quads * 4, c = i / width, f = i % width;
    if (c >= p.classes) {
        if (p.grad_bias)
            p.grad_bias[i - p.classes * width] = sum;
    } else if (p.grad_weight && f < p.in_features) {
        p.grad_weight[c * p.in_features + f] = store_from_accumulate<weight_gradient_type<T, P>>(sum);
    }
}

// cluster: the grid is one cluster (or one block), which finishes the sums itself; else each block stores its own to
// partial_sums [blocks][head_sums] and partial_losses [blocks][2].
// CLASSES, at least p.classes, is the loops' length, without branches; weight has zeros for the classes beyond. An
// instance with fewer than MOST_CLASSES exists for float32, fp16 and bf16 on Hopper only, to save compile time. Turing
// always takes the path for any number of classes.
// One long function: the main loop's sums, in registers, are what its end reduces over slices, warps and the cluster.
template <typename T, typename P, int CLASSES>
__global__ void __launch_bounds__(THREADS)
    linear_cross_entropy_kernel(head_problem<T, P> p, accumulate_type<T> *partial_sums, double *partial_losses,
                                bool cluster)
{
    typedef accumulate_type<T> A;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if (CLASSES < MOST_CLASSES || __CUDA_ARCH__ < 800)
        return;
#endif
    constexpr int CLASS_QUADS = (CLASSES + 3) / 4;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ double scratch[WARP_SIZE], block_losses[2];
    four<A> *const weight = reinterpret_cast<four<A> *>(shared);
    four<A> *const input = weight + MOST_CLASSES * p.quads;
    A *const grad_logits = reinterpret_cast<A *>(shared) + head_tile_elements(p.quads);
    A *const sums = grad_logits + TILE_ROWS * MOST_CLASSES;
    const int rank = threadIdx.x % ROW_GROUP, tile_row = threadIdx.x / ROW_GROUP;
    const int slices = THREADS / p.quads, slice = threadIdx.x / p.quads, quad = threadIdx.x - slice * p.quads;
    const bool in_slice = slice < slices;
    const bool with_weight = p.grad_weight != nullptr;
    const bool with_gradient = p.grad_input || p.grad_weight || p.grad_bias;
    release_successor();
    wait_for_predecessor();

    if (in_slice)
#pragma unroll 2
        for (int c = slice; c < CLASSES; c += slices) {
            four<A> value = {};
            if (c < p.classes)
                value = load_four<A>(p.weight + c * p.in_features + 4 * quad, p.in_features - 4 * quad, p.vectors);
            weight[c * p.quads + quad] = value;
        }
    A own_bias[2];
#pragma unroll
    for (int e = 0; e < 2; e++)
        own_bias[e] = p.bias && 2 * rank + e < p.classes ? (A)load_as_accumulate(p.bias[2 * rank + e]) : A(0);
    double loss_sum = 0, weight_sum = 0;
    A bias_sums[2] = {};
    four<A> weight_sums[CLASSES] = {};

    for (int64_t first = (int64_t)blockIdx.x * TILE_ROWS; first < p.rows; first += (int64_t)gridDim.x * TILE_ROWS) {
        const int64_t row = first + tile_row;
        const int64_t t = row < p.rows ? p.target[row] : p.ignore_index;
        const A scale = p.row_scale && row < p.rows ? (A)load_as_accumulate(p.row_scale[row]) : A(1);
        if (in_slice)
#pragma unroll 4
            for (int r = slice; r < TILE_ROWS; r += slices) {
                four<A> value = {};
                if (first + r < p.rows)
                    value = load_four<A>(p.input + (first + r) * p.in_features + 4 * quad, p.in_features - 4 * quad,
                                         p.vectors);
                input[r * p.quads + quad] = value;
            }
        __syncthreads();
        A values[MOST_CLASSES] = {};
#pragma unroll 2
        for (int q = rank; q < p.quads; q += ROW_GROUP) {
            const four<A> x = input[tile_row * p.quads + q];
            four<A> w[CLASSES];
#pragma unroll
            for (int c = 0; c < CLASSES; c++)
                w[c] = weight[c * p.quads + q];
#pragma unroll
            for (int c = 0; c < CLASSES; c++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    values[c] += x.element[e] * w[c].element[e];
        }
        A own[2];
        share_out_logits(own, values, rank);
        own[0] += own_bias[0];
        own[1] += own_bias[1];
        row_loss(own, p, row, t, scale, rank, loss_sum, weight_sum);
        if (with_gradient) {
            bias_sums[0] += own[0];
            bias_sums[1] += own[1];
            grad_logits[tile_row * MOST_CLASSES + 2 * rank] = own[0];
            grad_logits[tile_row * MOST_CLASSES + 2 * rank + 1] = own[1];
        }
        __syncthreads();
        if (p.grad_input && row < p.rows) {
            const four<A> *const gradients = reinterpret_cast<const four<A> *>(grad_logits + tile_row * MOST_CLASSES);
            four<A> gradient[CLASS_QUADS];
#pragma unroll
            for (int c = 0; c < CLASS_QUADS; c++)
                gradient[c] = gradients[c];
#pragma unroll 2
            for (int q = rank; q < p.quads; q += ROW_GROUP) {
                four<A> sum = {};
#pragma unroll
                for (int c = 0; c < CLASSES; c++) {
                    const four<A> w = weight[c * p.quads + q];
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum.element[e] += gradient[c / 4].element[c % 4] * w.element[e];
                }
                store_four(p.grad_input + row * p.in_features + 4 * q, sum, p.in_features - 4 * q, p.vectors);
            }
        }
        if (with_weight && in_slice)
#pragma unroll 2
            for (int r = slice; r < TILE_ROWS; r += slices) {
                const four<A> x = input[r * p.quads + quad];
                const four<A> *const gradients = reinterpret_cast<const four<A> *>(grad_logits + r * MOST_CLASSES);
                four<A> gradient[CLASS_QUADS];
#pragma unroll
                for (int c = 0; c < CLASS_QUADS; c++)
                    gradient[c] = gradients[c];
#pragma unroll
                for (int c = 0; c < CLASSES; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        weight_sums[c].element[e] += gradient[c / 4].element[c % 4] * x.element[e];
            }
        __syncthreads(); // input and grad_logits are overwritten by the next tile, or by the sums below
    }

    // The block's sums in order: over the slices, and for bias over the warps.
    loss_sum = block_sum(loss_sum, scratch);
    weight_sum = block_sum(weight_sum, scratch);
    const int count = with_gradient ? head_sums(p.classes, p.quads) : 0;
    const auto leave = [&](int i, A sum) {
        if (!cluster)
            partial_sums[(int64_t)blockIdx.x * count + i] = sum;
        else if (gridDim.x == 1)
            write_head_sum(p, i, sum);
        else
            sums[i] = sum;
    };
    if (with_gradient) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            bias_sums[e] += __shfl_xor_sync(FULL_WARP, bias_sums[e], ROW_GROUP);
            bias_sums[e] += __shfl_xor_sync(FULL_WARP, bias_sums[e], 2 * ROW_GROUP);
            if (threadIdx.x % WARP_SIZE < ROW_GROUP)
                grad_logits[threadIdx.x / WARP_SIZE * MOST_CLASSES + 2 * rank + e] = bias_sums[e];
        }
        four<A> *const slice_sums = weight; // overwrites weight and input
        if (with_weight && in_slice)
#pragma unroll
            for (int c = 0; c < CLASSES; c++)
                slice_sums[(slice * CLASSES + c) * p.quads + quad] = weight_sums[c];
        __syncthreads();
        if (with_weight && in_slice)
            for (int c = slice; c < p.classes; c += slices) {
                four<A> sum = {};
#pragma unroll 8
                for (int s = 0; s < slices; s++) {
                    const four<A> other = slice_sums[(s * CLASSES + c) * p.quads + quad];
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum.element[e] += other.element[e];
                }
#pragma unroll
                for (int e = 0; e < 4; e++)
                    leave((c * p.quads + quad) * 4 + e, sum.element[e]);
            }
        if (threadIdx.x < p.classes) {
            A sum = 0;
#pragma unroll
            for (int w = 0; w < THREADS / WARP_SIZE; w++)
                sum += grad_logits[w * MOST_CLASSES + threadIdx.x];
            leave(p.classes * p.quads * 4 + threadIdx.x, sum);
        }
    }
    if (!cluster) {
        if (threadIdx.x == 0) {
            partial_losses[2 * blockIdx.x] = loss_sum;
            partial_losses[2 * blockIdx.x + 1] = weight_sum;
        }
        return;
    }
    if (gridDim.x == 1) {
        if (threadIdx.x == 0)
            write_loss(p, loss_sum, weight_sum);
        return;
    }
    if (threadIdx.x == 0) {
        block_losses[0] = loss_sum;
        block_losses[1] = weight_sum;
    }
    cluster_sync();
    const int blocks = gridDim.x;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += blocks * THREADS) {
        A parts[LARGEST_CLUSTER], sum = 0;
#pragma unroll
        for (int b = 0; b < LARGEST_CLUSTER; b++)
            parts[b] = *mapa(sums + i, b < blocks ? b : 0);
#pragma unroll
        for (int b = 0; b < LARGEST_CLUSTER; b++)
            sum += b < blocks ? parts[b] : A(0);
        write_head_sum(p, i, sum);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        double losses[LARGEST_CLUSTER], weights[LARGEST_CLUSTER], loss = 0, total = 0;
#pragma unroll
        for (int b = 0; b < LARGEST_CLUSTER; b++) {
            losses[b] = *mapa(block_losses, b < blocks ? b : 0);
            weights[b] = *mapa(block_losses + 1, b < blocks ? b : 0);
        }
#pragma unroll
        for (int b = 0; b < LARGEST_CLUSTER; b++) {
            loss += b < blocks ? losses[b] : 0;
            total += b < blocks ? weights[b] : 0;
        }
        write_loss(p, loss, total);
    }
    cluster_sync(); // a block's shared memory must outlive the others' reads
}

// Adds the partial sums of the kernel above: a block has 32 sums, a warp of it a slice of the blocks.
template <typename T, typename P>
__global__ void __launch_bounds__(THREADS)
    linear_cross_entropy_sums_kernel(head_problem<T, P> p, const accumulate_type<T> *partial_sums,
                                     const double *partial_losses, int blocks, int count)
{
    typedef accumulate_type<T> A;
    constexpr int SLICES = THREADS / WARP_SIZE;
    __shared__ A slice_sums[SLICES][WARP_SIZE];
    __shared__ double scratch[WARP_SIZE];
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % WARP_SIZE, slice = threadIdx.x / WARP_SIZE, i = blockIdx.x * WARP_SIZE + lane;
    A sum = 0;
    if (i < count)
#pragma unroll 4
        for (int b = slice; b < blocks; b += SLICES)
            sum += partial_sums[(int64_t)b * count + i];
    slice_sums[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && i < count) {
        for (int s = 1; s < SLICES; s++)
            sum += slice_sums[s][lane];
        write_head_sum(p, i, sum);
    }
    if (blockIdx.x == 0) {
        double loss = 0, weight = 0;
        for (int b = threadIdx.x; b < blocks; b += THREADS) {
            loss += partial_losses[2 * b];
            weight += partial_losses[2 * b + 1];
        }
        loss = block_sum(loss, scratch);
        weight = block_sum(weight, scratch);
        if (threadIdx.x == 0)
            write_loss(p, loss, weight);
    }
}

static int64_t small_head_blocks(int64_t rows)
{
    const int64_t tiles = ceil_div(rows, TILE_ROWS);
    return tiles < MOST_BLOCKS ? tiles : MOST_BLOCKS;
}

template <typename T, typename P>
static cuda_ops_status small_head(head_problem<T, P> p, void *workspace, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const int blocks = (int)small_head_blocks(p.rows);
    p.quads = (int)ceil_div(p.in_features, 4);
    const bool hopper = current_device().capability >= 90, cluster = blocks <= (hopper ? LARGEST_CLUSTER : 1);
    const int count = p.grad_input || p.grad_weight || p.grad_bias ? head_sums(p.classes, p.quads) : 0;
    double *const partial_losses = (double *)workspace;
    A *const partial_sums = (A *)(partial_losses + 2 * MOST_BLOCKS);
    p.vectors =
        p.in_features % 4 == 0 && is_aligned_16(p.input) && is_aligned_16(p.weight) && is_aligned_16(p.grad_input);
    auto kernel = linear_cross_entropy_kernel<T, P, MOST_CLASSES>;
    if constexpr (sizeof(A) == sizeof(float))
        if (p.classes <= 10 && hopper)
            kernel = linear_cross_entropy_kernel<T, P, 10>;
    launch_dependent_clusters(kernel, (unsigned int)blocks, THREADS, cluster ? blocks : 1,
                              (int)head_shared_bytes<A>(p.classes, p.in_features), stream, p, partial_sums,
                              partial_losses, cluster);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || cluster)
        return status;
    launch_dependent_clusters(linear_cross_entropy_sums_kernel<T, P>,
                              (unsigned int)(count > 0 ? ceil_div(count, WARP_SIZE) : 1), THREADS, 1, 0, stream, p,
                              (const A *)partial_sums, (const double *)partial_losses, blocks, count);
    return launch_status();
}

static Answer few_classes_supports(const HeadCall &call, const Device &device)
{
    if (call.classes < 1 || call.classes > MOST_CLASSES)
        return no("takes 1 to 16 classes");
    if (call.in_features < 1 || call.in_features > MOST_FEATURES)
        return no("takes 1 to 1024 in_features");
    if (call.z_loss > 0 || call.softcap > 0)
        return no("has neither z_loss nor logit_softcap");
    if (device.capability < 80)
        return NEEDS_80;
    const size_t needed = call.dtype == CUDA_OPS_FLOAT64
                              ? head_shared_bytes<double>((int)call.classes, (int)call.in_features)
                              : head_shared_bytes<float>((int)call.classes, (int)call.in_features);
    return needed + 1024 <= (size_t)device.shared_bytes // 1 KB for the kernel's static shared memory
               ? YES
               : no("weight does not fit into the shared memory of a block");
}

static int64_t few_classes_workspace(const HeadCall &call, const Device &)
{
    return (int64_t)(2 * sizeof(double) * MOST_BLOCKS) +
           small_head_blocks(call.rows) * accumulate_bytes(call.dtype) *
               head_sums((int)call.classes, (int)ceil_div(call.in_features, 4));
}

static cuda_ops_status few_classes(const HeadCall &call, const Device &)
{
    CUDA_OPS_MIXED_DISPATCH(call.dtype, call.parameter_dtype, T, P, {
        head_problem<T, P> p = problem_of<T, P>(call);
        p.in_features = (int)call.in_features, p.classes = (int)call.classes;
        return small_head(p, call.workspace, call.stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

#endif
