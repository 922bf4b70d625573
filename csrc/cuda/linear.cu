// linear: output[i][j] = sum over p of input[i][p] * weight[j][p] + bias[j], and its gradients
//     grad_input[i][p]  = sum over j of grad_output[i][j] * weight[j][p]
//     grad_weight[j][p] = sum over i of grad_output[i][j] * input[i][p]
//     grad_bias[j]      = sum over i of grad_output[i][j]
// The three products are one tiled matrix multiplication whose operands may be stored transposed: a block of 256
// threads makes a tile of 64 x 64, a thread 4 x 4 of it in registers, from slices of 16 of the common dimension in
// shared memory, kept there in the accumulation type. The next slice is loaded into registers while the present one is
// multiplied. Bound by arithmetic on the CUDA cores (no tensor cores).
// Where the tiles are too few to fill a GPU, the common dimension is split among blocks, and the partial results are
// added in order by a second kernel, so that results repeat bit by bit. grad_bias is column_sums.cuh's, bound by
// memory.
#include "cuda_ops/linear.h"

#include "column_sums.cuh"
#include "common.cuh"

static constexpr int THREADS = 256;
static constexpr int TILE = 64;
static constexpr int DEPTH = 16;
static constexpr int PER_THREAD = 4; // TILE * TILE = THREADS * PER_THREAD * PER_THREAD
static constexpr int LOADS = TILE * DEPTH / THREADS;
// Rows of the slices are read 16 bytes at a time; the padding spreads columns over the banks when they are written.
static constexpr int PITCH = TILE + 4;
static_assert(TILE * TILE == THREADS * PER_THREAD * PER_THREAD, "the threads' parts make up the tile");

// What a large GPU holds at once, about; a constant, so that sums are cut alike everywhere.
static constexpr int64_t WANTED_BLOCKS = 264;
static constexpr int64_t SMALLEST_CHUNK = 64;

// The common dimension k in `splits` pieces of `chunk` (the last one shorter).
struct Split {
    int64_t splits, chunk;
};

static Split split_product(int64_t m, int64_t n, int64_t k)
{
    const int64_t tiles = ceil_div(m, TILE) * ceil_div(n, TILE);
    int64_t splits = tiles > 0 ? WANTED_BLOCKS / tiles : 1;
    splits = splits < k / SMALLEST_CHUNK ? splits : k / SMALLEST_CHUNK;
    if (splits <= 1)
        return {1, k};
    const int64_t chunk = ceil_div(ceil_div(k, splits), DEPTH) * DEPTH;
    return {ceil_div(k, chunk), chunk};
}

static int64_t accumulate_size(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT64 ? sizeof(double) : sizeof(float);
}

static int64_t product_workspace(int64_t m, int64_t n, int64_t k, cuda_ops_dtype dtype)
{
    const int64_t splits = split_product(m, n, k).splits;
    return splits > 1 ? splits * m * n * accumulate_size(dtype) : 0;
}

// A slice of TILE rows (or columns) x DEPTH of an operand of `lines` x k: into registers here, into shared memory
// below. `contiguous_depth` tells which way it is stored: operand[line * k + p], else operand[p * lines + line]; either
// way neighbouring threads read neighbouring elements. Zero outside.
template <typename T, bool contiguous_depth>
__device__ __forceinline__ void load_slice(accumulate_type<T> (&slice)[LOADS], const T *operand, int64_t first_line,
                                           int64_t lines, int64_t k, int64_t begin, int64_t end)
{
#pragma unroll
    for (int r = 0; r < LOADS; r++) {
        const int e = threadIdx.x + r * THREADS;
        const int64_t line = first_line + (contiguous_depth ? e / DEPTH : e % TILE);
        const int64_t p = begin + (contiguous_depth ? e % DEPTH : e / TILE);
        const bool inside = line < lines && p < end;
        slice[r] = inside ? load_as_accumulate(operand[contiguous_depth ? line * k + p : p * lines + line])
                          : accumulate_type<T>(0);
    }
}

template <typename A, bool contiguous_depth>
__device__ __forceinline__ void store_slice(A (*shared)[PITCH], const A (&slice)[LOADS])
{
#pragma unroll
    for (int r = 0; r < LOADS; r++) {
        const int e = threadIdx.x + r * THREADS;
        shared[contiguous_depth ? e % DEPTH : e / TILE][contiguous_depth ? e / DEPTH : e % TILE] = slice[r];
    }
}

// output (m x n) = a (m x k) * b (k x n) + bias. a_by_depth: a is stored as m x k, else as k x m;
// b_by_depth: b is stored as n x k, else as k x n. With splits > 1, piece s goes to partial[s][m][n] instead.
template <typename T, bool a_by_depth, bool b_by_depth>
__global__ void __launch_bounds__(THREADS)
    linear_product_kernel(T *output, accumulate_type<T> *partial, const T *a, const T *b, const T *bias, int64_t m,
                          int64_t n, int64_t k, int64_t splits, int64_t chunk)
{
    typedef accumulate_type<T> A;
    __shared__ __align__(16) A a_shared[DEPTH][PITCH];
    __shared__ __align__(16) A b_shared[DEPTH][PITCH];
    const int64_t tile_columns = ceil_div(n, TILE), tiles = ceil_div(m, TILE) * tile_columns;
    const int my_row = threadIdx.x / (TILE / PER_THREAD) * PER_THREAD;
    const int my_column = threadIdx.x % (TILE / PER_THREAD) * PER_THREAD;

    for (int64_t work = blockIdx.x; work < tiles * splits; work += gridDim.x) {
        const int64_t split = work / tiles, tile = work % tiles;
        const int64_t row = tile / tile_columns * TILE, column = tile % tile_columns * TILE;
        const int64_t begin = split * chunk, end = begin + chunk < k ? begin + chunk : k;
        A sum[PER_THREAD][PER_THREAD] = {};
        A a_slice[LOADS], b_slice[LOADS];
        load_slice<T, a_by_depth>(a_slice, a, row, m, k, begin, end);
        load_slice<T, b_by_depth>(b_slice, b, column, n, k, begin, end);
        for (int64_t p = begin; p < end; p += DEPTH) {
            store_slice<A, a_by_depth>(a_shared, a_slice);
            store_slice<A, b_by_depth>(b_shared, b_slice);
            __syncthreads();
            load_slice<T, a_by_depth>(a_slice, a, row, m, k, p + DEPTH, end);
            load_slice<T, b_by_depth>(b_slice, b, column, n, k, p + DEPTH, end);
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                A left[PER_THREAD], right[PER_THREAD];
#pragma unroll
                for (int e = 0; e < PER_THREAD; e++) {
                    left[e] = a_shared[d][my_row + e];
                    right[e] = b_shared[d][my_column + e];
                }
#pragma unroll
                for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                    for (int j = 0; j < PER_THREAD; j++)
                        sum[i][j] += left[i] * right[j];
            }
            // The slices are overwritten next, here or for the block's next tile.
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) {
                const int64_t to_row = row + my_row + i, to_column = column + my_column + j;
                if (to_row >= m || to_column >= n)
                    continue;
                if (splits > 1)
                    partial[(split * m + to_row) * n + to_column] = sum[i][j];
                else
                    output[to_row * n + to_column] =
                        store_from_accumulate<T>(bias ? sum[i][j] + load_as_accumulate(bias[to_column]) : sum[i][j]);
            }
    }
}

// output[i] = sum over s, in order, of partial[s][i] + bias[i % n], for the m * n elements of output.
template <typename T>
__global__ void linear_add_partial_kernel(T *output, const accumulate_type<T> *partial, const T *bias, int64_t count,
                                          int64_t n, int64_t splits)
{
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        accumulate_type<T> sum = partial[i];
        for (int64_t s = 1; s < splits; s++)
            sum += partial[s * count + i];
        output[i] = store_from_accumulate<T>(bias ? sum + load_as_accumulate(bias[i % n]) : sum);
    }
}

template <typename T>
static cuda_ops_status add_partial(T *output, const void *partial, const T *bias, int64_t count, int64_t n,
                                   int64_t splits, cudaStream_t stream)
{
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS)
        return status;
    linear_add_partial_kernel<<<clamp_grid(ceil_div(count, THREADS)), THREADS, 0, stream>>>(
        output, (const accumulate_type<T> *)partial, bias, count, n, splits);
    return launch_status();
}

template <typename T, bool a_by_depth, bool b_by_depth>
static cuda_ops_status product(T *output, const T *a, const T *b, const T *bias, void *workspace, int64_t m, int64_t n,
                               int64_t k, cudaStream_t stream)
{
    if (m == 0 || n == 0)
        return CUDA_OPS_SUCCESS;
    const Split split = split_product(m, n, k);
    const int64_t blocks = ceil_div(m, TILE) * ceil_div(n, TILE) * split.splits;
    linear_product_kernel<T, a_by_depth, b_by_depth><<<clamp_grid(blocks), THREADS, 0, stream>>>(
        output, (accumulate_type<T> *)workspace, a, b, bias, m, n, k, split.splits, split.chunk);
    return split.splits == 1 ? launch_status() : add_partial(output, workspace, bias, m * n, n, split.splits, stream);
}

extern "C" int64_t cuda_ops_linear_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                          cuda_ops_dtype dtype)
{
    return product_workspace(rows, out_features, in_features, dtype);
}

extern "C" int64_t cuda_ops_linear_backward_input_workspace_cuda(int64_t rows, int64_t in_features,
                                                                 int64_t out_features, cuda_ops_dtype dtype)
{
    return product_workspace(rows, in_features, out_features, dtype);
}

extern "C" int64_t cuda_ops_linear_backward_weight_workspace_cuda(int64_t rows, int64_t in_features,
                                                                  int64_t out_features, cuda_ops_dtype dtype)
{
    return product_workspace(out_features, in_features, rows, dtype);
}

extern "C" int64_t cuda_ops_linear_backward_bias_workspace_cuda(int64_t rows, int64_t out_features,
                                                                cuda_ops_dtype dtype)
{
    return column_sums_workspace(rows, out_features, dtype);
}

extern "C" cuda_ops_status cuda_ops_linear_forward_cuda(void *output, const void *input, const void *weight,
                                                        const void *bias, void *workspace, int64_t rows,
                                                        int64_t in_features, int64_t out_features, cuda_ops_dtype dtype,
                                                        cuda_ops_stream stream)
{
    CUDA_OPS_DISPATCH(dtype, T,
                      return (product<T, true, true>((T *)output, (const T *)input, (const T *)weight, (const T *)bias,
                                                     workspace, rows, out_features, in_features, stream)));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_linear_backward_input_cuda(void *grad_input, const void *grad_output,
                                                               const void *weight, void *workspace, int64_t rows,
                                                               int64_t in_features, int64_t out_features,
                                                               cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    CUDA_OPS_DISPATCH(dtype, T,
                      return (product<T, true, false>((T *)grad_input, (const T *)grad_output, (const T *)weight,
                                                      nullptr, workspace, rows, in_features, out_features, stream)));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_linear_backward_weight_cuda(void *grad_weight, const void *grad_output,
                                                                const void *input, void *workspace, int64_t rows,
                                                                int64_t in_features, int64_t out_features,
                                                                cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    CUDA_OPS_DISPATCH(dtype, T,
                      return (product<T, false, false>((T *)grad_weight, (const T *)grad_output, (const T *)input,
                                                       nullptr, workspace, out_features, in_features, rows, stream)));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_linear_backward_bias_cuda(void *grad_bias, const void *grad_output, void *workspace,
                                                              int64_t rows, int64_t out_features, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    CUDA_OPS_DISPATCH(
        dtype, T, return column_sums((T *)grad_bias, workspace, (const T *)grad_output, rows, out_features, stream));
    return CUDA_OPS_SUCCESS;
}
