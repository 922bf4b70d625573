// pointwise_loss: losses of elements, none, their mean or their sum, and their derivatives by input or target; the formulas
// are those of cuda_ops/pointwise_loss_functions.h.
// Maps one thread to 16 bytes (4 floats, 8 halves) of input and target in a grid-stride loop; the tail, and arrays that
// are not all 16-byte aligned, go element by element. Which loss it is is asked once for each vector, so that one kernel
// serves all. A mean or a sum goes by the two stages of common/loss.cuh: a vector's losses are added in float, all
// else in double.
// Bound by memory: two streams read, and one written where there is no reduction; backward three.
#include "cuda_ops/pointwise_loss.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/elementwise.cuh"
#include "common/loss.cuh"

static constexpr int THREADS = ELEMENTWISE_THREADS;
static constexpr int64_t ELEMENTS_OF_ONE_BLOCK = 4096; // up to which there is no second stage

CUDA_OPS_FUNCTION float logarithm_f16(float x)
{
    return logf(x);
}
CUDA_OPS_FUNCTION float logarithm_f32(float x)
{
    return logf(x);
}
CUDA_OPS_FUNCTION double logarithm_f64(double x)
{
    return log(x);
}
#define REAL float
#define FN(name) name##_f16
#include "cuda_ops/pointwise_loss_functions.h"
#undef FN
#define FN(name) name##_f32
#include "cuda_ops/pointwise_loss_functions.h"
#undef REAL
#undef FN
#define REAL double
#define FN(name) name##_f64
#include "cuda_ops/pointwise_loss_functions.h"
#undef REAL
#undef FN

template <typename A>
struct LossOf {
    cuda_ops_pointwise_loss loss;
    A parameter;
    cuda_ops_loss_factors factors;
};

template <typename T>
__device__ __forceinline__ accumulate_type<T> factor_at(const cuda_ops_loss_factor &factor, int64_t i)
{
    const int64_t position = factor.inner == 1 ? i : i / factor.inner;
    // Of one value, of one for each element, or of one for each channel.
    const int64_t at = factor.size == 0 ? position : factor.size == 1 ? 0 : position % factor.size;
    return load_as_accumulate(((const T *)factor.values)[at]);
}

// The loss (derivative 0), or its derivative by input (1) or target (2), of the elements of a vector; `first` is the number of the first one.
template <typename T, int COUNT>
__device__ __forceinline__ void losses_of(accumulate_type<T> (&result)[COUNT], const aligned_vector<T, COUNT> &input,
                                          const aligned_vector<T, COUNT> &target, int64_t first, int derivative,
                                          const LossOf<accumulate_type<T>> &of)
{
    typedef accumulate_type<T> A;
    A pos[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        pos[e] = of.factors.pos_weight.values ? factor_at<T>(of.factors.pos_weight, first + e) : A(1);
#define APPLY(function)                                                                                                \
    for (int e = 0; e < COUNT; e++) {                                                                                  \
        const A x = element_of(input, e), t = element_of(target, e);                                                   \
        if constexpr (sizeof(T) == 2)                                                                                  \
            result[e] = function##_f16(x, t, pos[e], of.parameter);                                                    \
        else if constexpr (sizeof(T) == 4)                                                                             \
            result[e] = function##_f32(x, t, pos[e], of.parameter);                                                    \
        else                                                                                                           \
            result[e] = function##_f64(x, t, pos[e], of.parameter);                                                    \
    }
#define CASE(enumerator, name)                                                                                         \
    case CUDA_OPS_POINTWISE_LOSS_##enumerator:                                                                         \
        if (derivative == 0) {                                                                                         \
            _Pragma("unroll") APPLY(name)                                                                              \
        } else if (derivative == 1) {                                                                                  \
            _Pragma("unroll") APPLY(name##_by_input)                                                                   \
        } else {                                                                                                       \
            _Pragma("unroll") APPLY(name##_by_target)                                                                  \
        }                                                                                                              \
        break;
    switch (of.loss) {
        CUDA_OPS_POINTWISE_LOSSES(CASE)
    }
#undef CASE
#undef APPLY
    if (of.factors.weight.values)
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            result[e] *= factor_at<T>(of.factors.weight, first + e);
}

// Calls function(first, x, t) for each vector, or element, of a grid's share; x and t are aligned_vectors.
template <typename T, typename F>
__device__ __forceinline__ void for_pairs(const T *input, const T *target, int64_t count, int64_t vectors, F function)
{
    typedef vector16<T> V;
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count())
        function(v * V::size, reinterpret_cast<const V *>(input)[v], reinterpret_cast<const V *>(target)[v]);
    for (int64_t i = vectors * V::size + global_thread_index(); i < count; i += global_thread_count())
        function(i, aligned_vector<T, 1>{{input[i]}}, aligned_vector<T, 1>{{target[i]}});
}

// partials: the number of all elements, then the blocks' pairs.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    pointwise_loss_forward_kernel(T *losses, double *partials, const T *input, const T *target, int64_t count,
                                  int64_t vectors, const LossOf<accumulate_type<T>> of, cuda_ops_reduction reduction)
{
    typedef accumulate_type<T> A;
    __shared__ double scratch[WARP_SIZE];
    double sum = 0, number = 0;
    for_pairs(input, target, count, vectors, [&](int64_t first, const auto &x, const auto &t) {
        A result[x.size];
        losses_of(result, x, t, first, 0, of);
        if (reduction == CUDA_OPS_REDUCTION_NONE) {
            *reinterpret_cast<aligned_vector<T, x.size> *>(losses + first) = vector_of<T>(result);
            return;
        }
        A part = 0;
#pragma unroll
        for (int e = 0; e < x.size; e++)
            part += result[e];
        sum += part;
        number += x.size;
    });
    if (reduction == CUDA_OPS_REDUCTION_NONE)
        return;
    if (gridDim.x > 1) {
        write_partials(partials + 1, sum, number, scratch);
        return;
    }
    sum = block_sum(sum, scratch);
    number = block_sum(number, scratch);
    if (threadIdx.x == 0)
        write_loss(losses, (A *)partials, sum, number, reduction == CUDA_OPS_REDUCTION_MEAN);
}

// scale: what a mean divides by, as a factor.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    pointwise_loss_backward_kernel(T *gradient, const T *grad_output, const T *input, const T *target, int64_t count,
                                   int64_t vectors, const LossOf<accumulate_type<T>> of, bool by_target, bool each,
                                   accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    const A common = each ? A(1) : load_as_accumulate(grad_output[0]) * scale;
    for_pairs(input, target, count, vectors, [&](int64_t first, const auto &x, const auto &t) {
        typedef aligned_vector<T, x.size> V;
        A result[x.size];
        V g = {};
        if (each)
            g = *reinterpret_cast<const V *>(grad_output + first);
        losses_of(result, x, t, first, by_target ? 2 : 1, of);
#pragma unroll
        for (int e = 0; e < x.size; e++)
            result[e] *= each ? element_of(g, e) : common;
        *reinterpret_cast<V *>(gradient + first) = vector_of<T>(result);
    });
}

static unsigned int forward_grid(int64_t count, cuda_ops_reduction reduction)
{
    if (reduction == CUDA_OPS_REDUCTION_NONE)
        return clamp_grid(ceil_div(count, THREADS));
    return count <= ELEMENTS_OF_ONE_BLOCK ? 1 : clamp_to_partials(ceil_div(count, 16 * THREADS));
}

// The number of the elements, which nobody asks for, then the blocks' pairs.
extern "C" size_t cuda_ops_pointwise_loss_workspace_cuda(int64_t count)
{
    return sizeof(double) + partials_bytes(forward_grid(count, CUDA_OPS_REDUCTION_SUM));
}

template <typename T>
static LossOf<accumulate_type<T>> loss_of(cuda_ops_pointwise_loss loss, double parameter,
                                          const cuda_ops_loss_factors *factors)
{
    return {loss, (accumulate_type<T>)parameter, *factors};
}

template <typename T>
static cuda_ops_status forward(T *losses, double *workspace, const T *input, const T *target, int64_t count,
                               const LossOf<accumulate_type<T>> &of, cuda_ops_reduction reduction, cudaStream_t stream)
{
    const bool each = reduction == CUDA_OPS_REDUCTION_NONE;
    const int64_t vectors =
        each ? vectors_of(count, (const T *)losses, input, target) : vectors_of(count, input, target);
    const unsigned int grid = each ? elementwise_grid(count, vectors) : forward_grid(count, reduction);
    pointwise_loss_forward_kernel<<<grid, THREADS, 0, stream>>>(losses, workspace, input, target, count, vectors, of,
                                                                reduction);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || each || grid == 1)
        return status;
    return launch_loss_reduce(losses, workspace, workspace + 1, grid, reduction, stream);
}

template <typename T>
static cuda_ops_status backward(T *gradient, const T *grad_output, const T *input, const T *target, int64_t count,
                                const LossOf<accumulate_type<T>> &of, bool by_target, cuda_ops_reduction reduction,
                                cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const bool each = reduction == CUDA_OPS_REDUCTION_NONE;
    const int64_t vectors = each ? vectors_of(count, (const T *)gradient, grad_output, input, target)
                                 : vectors_of(count, (const T *)gradient, input, target);
    const A scale = reduction == CUDA_OPS_REDUCTION_MEAN ? (A)(1 / (double)count) : A(1);
    pointwise_loss_backward_kernel<<<elementwise_grid(count, vectors), THREADS, 0, stream>>>(
        gradient, grad_output, input, target, count, vectors, of, by_target, each, scale);
    return launch_status();
}

static bool is_known(cuda_ops_pointwise_loss loss)
{
    return CUDA_OPS_POINTWISE_LOSS_MSE <= loss && loss <= CUDA_OPS_POINTWISE_LOSS_KL_DIV_OF_LOG;
}

extern "C" cuda_ops_status cuda_ops_pointwise_loss_forward_cuda(void *losses, void *workspace, const void *input,
                                                                const void *target,
                                                                const cuda_ops_loss_factors *factors, int64_t count,
                                                                cuda_ops_pointwise_loss loss, double parameter,
                                                                cuda_ops_reduction reduction, cuda_ops_dtype dtype,
                                                                cuda_ops_stream stream)
{
    if (!is_known(loss))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return forward((T *)losses, (double *)workspace, (const T *)input, (const T *)target, count,
                                     loss_of<T>(loss, parameter, factors), reduction, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_pointwise_loss_backward_cuda(void *gradient, const void *grad_output,
                                                                 const void *input, const void *target,
                                                                 const cuda_ops_loss_factors *factors, int64_t count,
                                                                 cuda_ops_pointwise_loss loss, double parameter,
                                                                 int by_target, cuda_ops_reduction reduction,
                                                                 cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!is_known(loss))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward((T *)gradient, (const T *)grad_output, (const T *)input, (const T *)target, count,
                                      loss_of<T>(loss, parameter, factors), by_target != 0, reduction, stream));
    return CUDA_OPS_SUCCESS;
}
