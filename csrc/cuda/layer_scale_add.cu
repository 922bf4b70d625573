// layer_scale_add: sum = residual + weight * row_scale * input, and its gradients.
// A thread has one 16-byte vector of sums (and as many elements of the other arrays) of several rows, so that weights
// of columns are loaded once, and grad_weight's sums over rows stay in registers; blocks leave theirs in the workspace,
// and a second kernel adds them in a fixed order. Bound by memory: three streams forward (0.83 to 0.95 of its speed),
// and with a rounded copy of the sum a fourth; backward grad_sum, input and grad_input (0.3 to 0.5), and with a
// gradient of the copy that and grad_residual (0.5 to 0.7).
#include "cuda_ops/layer_scale_add.h"

#include <type_traits>

#include "common/column_sums.cuh"
#include "common/device.h"

static constexpr int SCALE_THREADS = 256;
static constexpr int SCALE_ROWS = 4;               // of a thread, under way together
static constexpr int64_t MOST_WEIGHT_BLOCKS = 264; // two for each multiprocessor of a large GPU: as many as run at once

// Tensors as the launchers get them, by dtype: B of the branch and of the copy, R of the residual, S of the sum.
template <typename B, typename R, typename S>
struct ScaleAdd {
    typedef accumulate_type<S> A;
    S *sum;
    B *copy, *grad_input;
    R *grad_residual;
    A *partials;
    const B *input, *grad_copy;
    const R *residual;
    const S *weight, *grad_sum;
    const A *row_scale;
    int64_t rows, cols, channels, image_rows, vectors; // vectors: of a row
    int across;                                        // threads of a block that share a row
};

// The factor of a row's elements, but for weights of columns.
template <typename Call>
__device__ __forceinline__ typename Call::A scale_of_row(const Call &a, int64_t row)
{
    typename Call::A scale = 1;
    const bool small = a.rows <= INT32_MAX;
    if (a.row_scale)
        scale = a.row_scale[small ? (int64_t)((uint32_t)row / (uint32_t)a.image_rows) : row / a.image_rows];
    if (a.weight && a.channels > 0)
        scale *=
            load_as_accumulate(a.weight[small ? (int64_t)((uint32_t)row % (uint32_t)a.channels) : row % a.channels]);
    return scale;
}

template <int COUNT, typename Call>
__device__ __forceinline__ void weights_of_columns(typename Call::A (&weights)[COUNT], const Call &a, int64_t vector)
{
    const bool by_column = a.weight && a.channels == 0 && vector < a.vectors;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        weights[e] = by_column ? load_as_accumulate(a.weight[vector * COUNT + e]) : typename Call::A(1);
}

template <typename B, typename R, typename S, int COUNT>
__global__ void __launch_bounds__(SCALE_THREADS) layer_scale_add_forward_kernel(const ScaleAdd<B, R, S> a)
{
    typedef accumulate_type<S> A;
    typedef aligned_vector<B, COUNT> VB;
    typedef aligned_vector<R, COUNT> VR;
    typedef aligned_vector<S, COUNT> VS;
    const int down = SCALE_THREADS / a.across, y = (int)threadIdx.x / a.across;
    const int64_t vector = (int64_t)blockIdx.x * a.across + threadIdx.x % a.across;
    wait_for_predecessor();
    release_successor();
    if (y >= down || vector >= a.vectors)
        return;
    A weights[COUNT];
    weights_of_columns(weights, a, vector);
    const int64_t step = (int64_t)gridDim.y * down * SCALE_ROWS;
    for (int64_t first = (int64_t)blockIdx.y * down * SCALE_ROWS + y; first < a.rows; first += step) {
        VB x[SCALE_ROWS];
        VR r[SCALE_ROWS];
        A scales[SCALE_ROWS];
#pragma unroll
        for (int u = 0; u < SCALE_ROWS; u++)
            if (first + u * down < a.rows) {
                const int64_t at = (first + u * down) * a.cols + vector * COUNT;
                x[u] = *reinterpret_cast<const VB *>(a.input + at);
                r[u] = *reinterpret_cast<const VR *>(a.residual + at);
                scales[u] = scale_of_row(a, first + u * down);
            }
#pragma unroll
        for (int u = 0; u < SCALE_ROWS; u++)
            if (first + u * down < a.rows) {
                const int64_t at = (first + u * down) * a.cols + vector * COUNT;
                A sum[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    sum[e] = element_of(r[u], e) + weights[e] * scales[u] * element_of(x[u], e);
                store_vector(reinterpret_cast<VS *>(a.sum + at), vector_of<S>(sum));
                if constexpr (!std::is_same_v<B, S>)
                    if (a.copy)
                        store_vector(reinterpret_cast<VB *>(a.copy + at), vector_of<B>(sum));
            }
    }
}

template <typename B, typename R, typename S, int COUNT>
__global__ void __launch_bounds__(SCALE_THREADS) layer_scale_add_backward_kernel(const ScaleAdd<B, R, S> a)
{
    typedef accumulate_type<S> A;
    typedef aligned_vector<B, COUNT> VB;
    typedef aligned_vector<R, COUNT> VR;
    typedef aligned_vector<S, COUNT> VS;
    __shared__ A exchange[SCALE_THREADS * COUNT];
    const int down = SCALE_THREADS / a.across, x = (int)threadIdx.x % a.across, y = (int)threadIdx.x / a.across;
    const int64_t vector = (int64_t)blockIdx.x * a.across + x;
    const bool works = y < down && vector < a.vectors;
    const VB none = vector_of_equal<B, COUNT>(0);
    const VS zeros = vector_of_equal<S, COUNT>(A(0));
    wait_for_predecessor();
    release_successor();
    A weights[COUNT], grad_weight[COUNT] = {};
    weights_of_columns(weights, a, vector);
    const int64_t step = (int64_t)gridDim.y * down * SCALE_ROWS;
    for (int64_t first = (int64_t)blockIdx.y * down * SCALE_ROWS + y; first < a.rows && works; first += step) {
        VS g[SCALE_ROWS];
        VB c[SCALE_ROWS], input[SCALE_ROWS];
        A scales[SCALE_ROWS];
#pragma unroll
        for (int u = 0; u < SCALE_ROWS; u++) {
            const bool there = first + u * down < a.rows;
            const int64_t at = (first + u * down) * a.cols + vector * COUNT;
            g[u] = load_vector_or(reinterpret_cast<const VS *>(a.grad_sum + at), there && a.grad_sum, zeros);
            c[u] = load_vector_or(reinterpret_cast<const VB *>(a.grad_copy + at), there && a.grad_copy, none);
            input[u] = load_vector_or(reinterpret_cast<const VB *>(a.input + at), there && a.partials, none);
            scales[u] = there ? scale_of_row(a, first + u * down) : A(0);
        }
#pragma unroll
        for (int u = 0; u < SCALE_ROWS; u++)
            if (first + u * down < a.rows) {
                const int64_t at = (first + u * down) * a.cols + vector * COUNT;
                A grad[COUNT], of_input[COUNT];
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    grad[e] = element_of(g[u], e) + element_of(c[u], e);
                    of_input[e] = grad[e] * weights[e] * scales[u];
                    grad_weight[e] += grad[e] * scales[u] * element_of(input[u], e);
                }
                if (a.grad_input)
                    store_vector(reinterpret_cast<VB *>(a.grad_input + at), vector_of<B>(of_input));
                if (a.grad_residual)
                    store_vector(reinterpret_cast<VR *>(a.grad_residual + at), vector_of<R>(grad));
            }
    }
    if (!a.partials)
        return;
    // The rows that the block had side by side, added in their order.
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        exchange[threadIdx.x * COUNT + e] = grad_weight[e];
    __syncthreads();
    for (int i = threadIdx.x; i < a.across * COUNT; i += SCALE_THREADS) {
        A total = 0;
        for (int other = 0; other < down; other++)
            total += exchange[other * a.across * COUNT + i];
        const int64_t column = (int64_t)blockIdx.x * a.across * COUNT + i;
        if (column < a.cols)
            a.partials[blockIdx.y * a.cols + column] = total;
    }
}

// How rows of `vectors` are laid on blocks.
struct ScaleBlocks {
    int across;
    int64_t tiles, groups; // groups of rows

    ScaleBlocks(int64_t rows, int64_t vectors, bool sums)
    {
        tiles = ceil_div(vectors, SCALE_THREADS);
        across = (int)ceil_div(vectors, tiles);
        groups = ceil_div(rows, (int64_t)(SCALE_THREADS / across) * SCALE_ROWS);
        const int64_t most = sums ? ceil_div(MOST_WEIGHT_BLOCKS, tiles) : MAX_GRID;
        groups = groups < most ? groups : most;
    }
};

extern "C" int64_t cuda_ops_layer_scale_add_workspace_cuda(int64_t rows, int64_t cols, cuda_ops_dtype sum_dtype)
{
    if (rows == 0 || cols == 0)
        return 0;
    const int64_t size = 16 / dtype_size(sum_dtype);
    int64_t most = ScaleBlocks(rows, cols, true).groups;
    if (cols % size == 0 && ScaleBlocks(rows, cols / size, true).groups > most)
        most = ScaleBlocks(rows, cols / size, true).groups;
    return most * cols * (sum_dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

// Runs the statement with B, R and S for the dtypes of branch, residual and sum.
#define DISPATCH_SCALE(...)                                                                                            \
    if (input_dtype == sum_dtype && residual_dtype == sum_dtype) {                                                     \
        CUDA_OPS_DISPATCH(sum_dtype, S, typedef S B; typedef S R; __VA_ARGS__);                                        \
    } else if (sum_dtype == CUDA_OPS_FLOAT32) {                                                                        \
        typedef float S;                                                                                               \
        if (input_dtype == CUDA_OPS_FLOAT16 && residual_dtype == CUDA_OPS_FLOAT32) {                                   \
            typedef __half B;                                                                                          \
            typedef float R;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else if (input_dtype == CUDA_OPS_FLOAT16 && residual_dtype == CUDA_OPS_FLOAT16) {                            \
            typedef __half B;                                                                                          \
            typedef __half R;                                                                                          \
            __VA_ARGS__;                                                                                               \
        } else if (input_dtype == CUDA_OPS_BFLOAT16 && residual_dtype == CUDA_OPS_FLOAT32) {                           \
            typedef __nv_bfloat16 B;                                                                                   \
            typedef float R;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else if (input_dtype == CUDA_OPS_BFLOAT16 && residual_dtype == CUDA_OPS_BFLOAT16) {                          \
            typedef __nv_bfloat16 B;                                                                                   \
            typedef __nv_bfloat16 R;                                                                                   \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    }

template <typename Call, typename... Pointers>
static int64_t lay_out(Call &a, int count, const Pointers *...pointers)
{
    const bool vectorised = a.cols % count == 0 && (is_aligned_16(pointers) && ...);
    a.vectors = vectorised ? a.cols / count : a.cols;
    return vectorised ? count : 1;
}

template <typename B, typename R, typename S>
static cuda_ops_status forward(ScaleAdd<B, R, S> a, cudaStream_t stream)
{
    constexpr int SIZE = vector16<S>::size;
    const bool vectorised = lay_out(a, SIZE, a.sum, a.copy, a.input, a.residual) > 1;
    const ScaleBlocks blocks(a.rows, a.vectors, false);
    a.across = blocks.across;
    launch_dependent(vectorised ? layer_scale_add_forward_kernel<B, R, S, SIZE>
                                : layer_scale_add_forward_kernel<B, R, S, 1>,
                     dim3((unsigned int)blocks.tiles, (unsigned int)blocks.groups), dim3(SCALE_THREADS), 0, stream, a);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_layer_scale_add_forward_cuda(void *sum, void *copy, const void *input,
                                                                 const void *residual, const void *weight,
                                                                 const void *row_scale, int64_t rows, int64_t cols,
                                                                 int64_t channels, int64_t image_rows,
                                                                 cuda_ops_dtype sum_dtype, cuda_ops_dtype input_dtype,
                                                                 cuda_ops_dtype residual_dtype, cuda_ops_stream stream)
{
    if (copy && input_dtype == sum_dtype)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    DISPATCH_SCALE(ScaleAdd<B, R, S> a = {}; a.sum = (S *)sum; a.copy = (B *)copy; a.input = (const B *)input;
                   a.residual = (const R *)residual; a.weight = (const S *)weight;
                   a.row_scale = (const accumulate_type<S> *)row_scale; a.rows = rows; a.cols = cols;
                   a.channels = channels; a.image_rows = image_rows; return forward(a, stream))
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

template <typename B, typename R, typename S>
static cuda_ops_status backward(ScaleAdd<B, R, S> a, S *grad_weight, cudaStream_t stream)
{
    constexpr int SIZE = vector16<S>::size;
    const bool vectorised = lay_out(a, SIZE, a.grad_input, a.grad_residual, a.grad_sum, a.grad_copy, a.input) > 1;
    const ScaleBlocks blocks(a.rows, a.vectors, grad_weight != nullptr);
    a.across = blocks.across;
    launch_dependent(vectorised ? layer_scale_add_backward_kernel<B, R, S, SIZE>
                                : layer_scale_add_backward_kernel<B, R, S, 1>,
                     dim3((unsigned int)blocks.tiles, (unsigned int)blocks.groups), dim3(SCALE_THREADS), 0, stream, a);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !grad_weight)
        return status;
    return add_column_sums(grad_weight, a.partials, blocks.groups, a.cols, stream);
}

extern "C" cuda_ops_status cuda_ops_layer_scale_add_backward_cuda(
    void *grad_input, void *grad_residual, void *grad_weight, void *workspace, const void *grad_sum,
    const void *grad_copy, const void *input, const void *weight, const void *row_scale, int64_t rows, int64_t cols,
    int64_t channels, int64_t image_rows, cuda_ops_dtype sum_dtype, cuda_ops_dtype input_dtype,
    cuda_ops_dtype residual_dtype, cuda_ops_stream stream)
{
    if (grad_weight && (channels > 0 || !input || !workspace))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    DISPATCH_SCALE(ScaleAdd<B, R, S> a = {}; a.grad_input = (B *)grad_input; a.grad_residual = (R *)grad_residual;
                   a.partials = grad_weight ? (accumulate_type<S> *)workspace : nullptr;
                   a.grad_sum = (const S *)grad_sum; a.grad_copy = (const B *)grad_copy; a.input = (const B *)input;
                   a.weight = (const S *)weight; a.row_scale = (const accumulate_type<S> *)row_scale; a.rows = rows;
                   a.cols = cols; a.channels = channels; a.image_rows = image_rows;
                   return backward(a, (S *)grad_weight, stream))
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
