// nll_loss: loss = -weight[target] * input[target] for each column; grad_input is zero except at the target.
// Forward maps one thread to a column, in a grid-stride loop, and reduces in two stages (loss.cuh), or in one block if
// columns are few: a second launch would cost more than a few columns a thread. Backward maps threads to elements as
// common/thread_group.cuh does, and writes each once, which is cheaper than filling with zeros and then scattering.
// Bound by memory: one scattered read a column forward, one write an element backward.
#include "cuda_ops/nll_loss.h"

#include "common/aligned_vector.cuh"
#include "common/loss.cuh"
#include "common/thread_group.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t COLUMNS_OF_ONE_BLOCK = 4 * THREADS;

// Without a reduction `losses` has a loss for each column. With one, a grid of one block writes the loss and
// `total_weight`; a larger grid writes `partials`.
template <typename T>
__global__ void nll_loss_forward_kernel(T *losses, accumulate_type<T> *total_weight, double *partials,
                                        cuda_ops_index_error *error, const T *input, const int64_t *target,
                                        const T *weight, int64_t columns, int64_t classes, int64_t inner,
                                        int64_t ignore_index, cuda_ops_reduction reduction)
{
    typedef accumulate_type<T> A;
    __shared__ double scratch[WARP_SIZE];
    double loss_sum = 0, weight_sum = 0;
    for (int64_t column = global_thread_index(); column < columns; column += global_thread_count()) {
        const int64_t t = target[column];
        A loss = 0, w = 0;
        if (t != ignore_index) {
            if (is_class(t, classes)) {
                w = weight ? load_as_accumulate(weight[t]) : A(1);
                loss = -w * load_as_accumulate(input[column_offset(column, classes, inner) + t * inner]);
            } else {
                record_bad_index(error, column, t, classes);
                loss = A(CUDART_NAN);
            }
        }
        if (reduction == CUDA_OPS_REDUCTION_NONE)
            losses[column] = store_from_accumulate<T>(loss);
        loss_sum += loss;
        weight_sum += w;
    }
    if (reduction == CUDA_OPS_REDUCTION_NONE)
        return;
    if (gridDim.x > 1) {
        write_partials(partials, loss_sum, weight_sum, scratch);
        return;
    }
    loss_sum = block_sum(loss_sum, scratch);
    weight_sum = block_sum(weight_sum, scratch);
    if (threadIdx.x == 0)
        write_loss(losses, total_weight, loss_sum, weight_sum, reduction == CUDA_OPS_REDUCTION_MEAN);
}

// total_weight is null unless the reduction was a mean. `vectors`: rows are whole aligned vectors, and written so.
template <typename T>
__global__ void nll_loss_backward_kernel(T *grad_input, const T *grad_output, const int64_t *target, const T *weight,
                                         const accumulate_type<T> *total_weight, int64_t columns, int64_t classes,
                                         int64_t inner, int64_t ignore_index, bool grad_per_column, bool vectors,
                                         group_shape shape)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    const group_position position = position_in_group(shape.threads, shape.strided);
    const int slots = GROUP_THREADS / shape.threads;
    for (int64_t column = (int64_t)blockIdx.x * slots + position.slot; column < columns;
         column += (int64_t)gridDim.x * slots) {
        const int64_t t = target[column];
        A value = 0;
        if (t != ignore_index && is_class(t, classes)) {
            value = -load_as_accumulate(grad_output[grad_per_column ? column : 0]);
            if (weight)
                value *= load_as_accumulate(weight[t]);
            if (total_weight)
                value /= *total_weight;
        }
        const int64_t offset = column_offset(column, classes, inner);
        for (int64_t v = position.rank; vectors && v < classes / V::size; v += shape.threads) {
            V vector;
#pragma unroll
            for (int e = 0; e < V::size; e++)
                vector.element[e] = store_from_accumulate<T>(v * V::size + e == t ? value : A(0));
            reinterpret_cast<V *>(grad_input + offset)[v] = vector;
        }
        for (int64_t c = position.rank; !vectors && c < classes; c += shape.threads)
            grad_input[offset + c * inner] = store_from_accumulate<T>(c == t ? value : A(0));
    }
}

static unsigned int forward_grid(int64_t columns)
{
    return columns <= COLUMNS_OF_ONE_BLOCK ? 1 : clamp_to_partials(ceil_div(columns, THREADS));
}

extern "C" size_t cuda_ops_nll_loss_workspace_cuda(int64_t outer, int64_t inner)
{
    return partials_bytes(forward_grid(outer * inner));
}

template <typename T>
static cuda_ops_status nll_loss_forward(T *losses, void *total_weight, double *partials, cuda_ops_index_error *error,
                                        const T *input, const int64_t *target, const T *weight, int64_t columns,
                                        int64_t classes, int64_t inner, int64_t ignore_index,
                                        cuda_ops_reduction reduction, cudaStream_t stream)
{
    const unsigned int grid = forward_grid(columns);
    nll_loss_forward_kernel<<<grid, THREADS, 0, stream>>>(losses, (accumulate_type<T> *)total_weight, partials, error,
                                                          input, target, weight, columns, classes, inner, ignore_index,
                                                          reduction);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || reduction == CUDA_OPS_REDUCTION_NONE || grid == 1)
        return status;
    return launch_loss_reduce(losses, total_weight, partials, grid, reduction, stream);
}

template <typename T>
static cuda_ops_status nll_loss_backward(T *grad_input, const T *grad_output, const int64_t *target, const T *weight,
                                         const void *total_weight, int64_t columns, int64_t classes, int64_t inner,
                                         int64_t ignore_index, cuda_ops_reduction reduction, cudaStream_t stream)
{
    const bool vectors = inner == 1 && classes % vector16<T>::size == 0 && is_aligned_16(grad_input);
    const group_shape shape = choose_group(vectors ? classes / vector16<T>::size : classes, inner);
    const void *divisor = reduction == CUDA_OPS_REDUCTION_MEAN ? total_weight : nullptr;
    nll_loss_backward_kernel<<<clamp_grid(group_blocks(columns, shape)), GROUP_THREADS, 0, stream>>>(
        grad_input, grad_output, target, weight, (const accumulate_type<T> *)divisor, columns, classes, inner,
        ignore_index, reduction == CUDA_OPS_REDUCTION_NONE, vectors, shape);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_nll_loss_forward_cuda(void *losses, void *total_weight, void *workspace,
                                                          cuda_ops_index_error *error, const void *input,
                                                          const int64_t *target, const void *weight, int64_t outer,
                                                          int64_t classes, int64_t inner, int64_t ignore_index,
                                                          cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                          cuda_ops_stream stream)
{
    if (outer == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return nll_loss_forward((T *)losses, total_weight, (double *)workspace, error, (const T *)input,
                                              target, (const T *)weight, outer * inner, classes, inner, ignore_index,
                                              reduction, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_nll_loss_backward_cuda(void *grad_input, const void *grad_output,
                                                           const int64_t *target, const void *weight,
                                                           const void *total_weight, int64_t outer, int64_t classes,
                                                           int64_t inner, int64_t ignore_index,
                                                           cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                           cuda_ops_stream stream)
{
    if (outer == 0 || classes == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return nll_loss_backward((T *)grad_input, (const T *)grad_output, target, (const T *)weight,
                                               total_weight, outer * inner, classes, inner, ignore_index, reduction,
                                               stream));
    return CUDA_OPS_SUCCESS;
}
