// layer_norm, rung 2: the parameters' gradients by two kernels of their own, down the columns.
//     output = xhat * weight + bias, xhat = (input - mean) * rstd
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)), h = grad_output * weight
//     grad_weight = sum over rows of grad_output * xhat, grad_bias = sum over rows of grad_output
// Threads: output and grad_input as in rung 1, less the atomics. Then blocks of 32 x 8 for 32 columns and a slab of
// rows: a thread goes down its column, every eighth row of the slab, and 8 threads of a column are added in shared
// memory; the block leaves a row of 32 partial sums of either gradient. A second kernel adds the slabs' rows, in their
// order. Fixes: no atomics, the same bits again, and a write for each slab instead of two for each element. Leaves:
// input and grad_output are read three times in backward: twice for grad_input, once here. Bound by memory, of which it
// moves too much.
#include "common/common.cuh"
#include "layer_norm/ladder/rungs.h"

static constexpr int HEIGHT = 8;           // threads of a column
static constexpr int LEAST_ROWS = 64;      // of a slab
static constexpr int64_t MOST_SLABS = 128; // what the second kernel adds

// The sum over the threads of a column, for the first of them.
template <int THREADS_DOWN>
__device__ __forceinline__ float sum_of_column(float value, float (&tile)[THREADS_DOWN][WARP_SIZE])
{
    tile[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    float sum = 0;
    if (threadIdx.y == 0)
        for (int y = 0; y < THREADS_DOWN; y++)
            sum += tile[y][threadIdx.x];
    __syncthreads();
    return sum;
}

__global__ void __launch_bounds__(WARP_SIZE *HEIGHT)
    layer_norm_slabs_kernel(const LayerNormLadder a, int64_t rows_of_slab)
{
    __shared__ float tile[HEIGHT][WARP_SIZE];
    const int64_t column = (int64_t)blockIdx.x * WARP_SIZE + threadIdx.x, first = blockIdx.y * rows_of_slab;
    const int64_t end = first + rows_of_slab < a.rows ? first + rows_of_slab : a.rows;
    float grad_weight = 0, grad_bias = 0;
    if (column < a.columns)
#pragma unroll 4
        for (int64_t row = first + threadIdx.y; row < end; row += HEIGHT) {
            const float g = a.grad_output[row * a.columns + column];
            grad_weight += g * (a.input[row * a.columns + column] - a.mean[row]) * a.rstd[row];
            grad_bias += g;
        }
    grad_weight = sum_of_column(grad_weight, tile);
    grad_bias = sum_of_column(grad_bias, tile);
    if (threadIdx.y == 0 && column < a.columns) {
        a.partials[blockIdx.y * 2 * a.columns + column] = grad_weight;
        a.partials[(blockIdx.y * 2 + 1) * a.columns + column] = grad_bias;
    }
}

__global__ void __launch_bounds__(WARP_SIZE *WARP_SIZE)
    layer_norm_sum_partials_kernel(const LayerNormLadder a, int64_t partials)
{
    __shared__ float tile[WARP_SIZE][WARP_SIZE];
    const int64_t column = (int64_t)blockIdx.x * WARP_SIZE + threadIdx.x; // of both gradients, side by side
    float sum = 0;
    if (column < 2 * a.columns)
#pragma unroll 4
        for (int64_t i = threadIdx.y; i < partials; i += WARP_SIZE)
            sum += a.partials[i * 2 * a.columns + column];
    sum = sum_of_column(sum, tile);
    if (threadIdx.y == 0 && column < 2 * a.columns)
        (column < a.columns ? a.grad_weight : a.grad_bias - a.columns)[column] = sum;
}

// Zeros of no partials.
void layer_norm_sum_partials(const LayerNormLadder &a, int64_t partials, cudaStream_t stream)
{
    if (a.columns > 0)
        layer_norm_sum_partials_kernel<<<(unsigned int)ceil_div(2 * a.columns, WARP_SIZE), dim3(WARP_SIZE, WARP_SIZE),
                                         0, stream>>>(a, partials);
}

void layer_norm_grads_of_parameters(const LayerNormLadder &a, cudaStream_t stream)
{
    const int64_t even = ceil_div(a.rows, MOST_SLABS), rows_of_slab = even > LEAST_ROWS ? even : LEAST_ROWS;
    const int64_t slabs = ceil_div(a.rows, rows_of_slab);
    if (slabs > 0 && a.columns > 0)
        layer_norm_slabs_kernel<<<dim3((unsigned int)ceil_div(a.columns, WARP_SIZE), (unsigned int)slabs),
                                  dim3(WARP_SIZE, HEIGHT), 0, stream>>>(a, rows_of_slab);
    layer_norm_sum_partials(a, slabs, stream);
}

cuda_ops_status layer_norm_partial_sums(const LadderCall &call)
{
    const LayerNormLadder a = layer_norm_tensors(call);
    layer_norm_forward_by_warps(a, call.stream);
    layer_norm_grad_input_by_warps(a, call.stream);
    layer_norm_grads_of_parameters(a, call.stream);
    return launch_status();
}
