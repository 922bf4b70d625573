// log_softmax: output = (input - max) - log(sum(exp(input - max))); grad_input = grad_output - exp(output) *
// sum(grad_output); sums along the middle dimension of [outer, cols, inner].
// Maps a team of threads (team.cuh) to a column, which it reads twice: once for the largest and the sum at one go
// (the sum is rescaled when a larger element turns up), once, mostly from cache, to write the result.
// Bound by memory: one read, one write forward; two reads, one write backward.
#include "cuda_ops/log_softmax.h"

#include "team.cuh"

template <typename T, int TEAM, bool STRIDED>
__global__ void __launch_bounds__(TEAM_THREADS)
    log_softmax_forward_kernel(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = TEAM_THREADS / TEAM;
    __shared__ log_sum_exp<A> scratch[TEAM_THREADS];
    const team_place place = place_in_team(TEAM, STRIDED);
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + place.slot;
        const int64_t offset = column_offset(column, cols, inner);
        const int64_t length = column < columns ? cols : 0;
        const log_sum_exp<A> state =
            team_log_sum_exp<TEAM, STRIDED>(input + offset, length, inner, place.rank, scratch);
        const A log_sum = log_of_sum(state);
        for (int64_t c = place.rank; c < length; c += TEAM) {
            const int64_t at = offset + c * inner;
            output[at] = store_from_accumulate<T>((load_as_accumulate(input[at]) - state.maximum) - log_sum);
        }
    }
}

template <typename T, int TEAM, bool STRIDED>
__global__ void __launch_bounds__(TEAM_THREADS)
    log_softmax_backward_kernel(T *grad_input, const T *grad_output, const T *output, int64_t columns, int64_t cols,
                                int64_t inner)
{
    typedef accumulate_type<T> A;
    constexpr int SLOTS = TEAM_THREADS / TEAM;
    __shared__ A scratch[TEAM_THREADS];
    const team_place place = place_in_team(TEAM, STRIDED);
    for (int64_t first = (int64_t)blockIdx.x * SLOTS; first < columns; first += (int64_t)gridDim.x * SLOTS) {
        const int64_t column = first + place.slot;
        const int64_t offset = column_offset(column, cols, inner);
        const int64_t length = column < columns ? cols : 0;
        A sum = 0;
        for (int64_t c = place.rank; c < length; c += TEAM)
            sum += load_as_accumulate(grad_output[offset + c * inner]);
        sum = team_reduce<TEAM, STRIDED>(sum, scratch);
        for (int64_t c = place.rank; c < length; c += TEAM) {
            const int64_t at = offset + c * inner;
            const A softmax = exp(load_as_accumulate(output[at]));
            grad_input[at] = store_from_accumulate<T>(load_as_accumulate(grad_output[at]) - softmax * sum);
        }
    }
}

template <typename T>
static cuda_ops_status log_softmax_forward(T *output, const T *input, int64_t columns, int64_t cols, int64_t inner,
                                           cudaStream_t stream)
{
    const team_shape shape = choose_team(cols, inner);
    const unsigned int grid = clamp_grid(team_blocks(columns, shape));
    CUDA_OPS_TEAM_DISPATCH(shape, TEAM, STRIDED,
                           (log_softmax_forward_kernel<T, TEAM, STRIDED>
                            <<<grid, TEAM_THREADS, 0, stream>>>(output, input, columns, cols, inner)));
    return launch_status();
}

template <typename T>
static cuda_ops_status log_softmax_backward(T *grad_input, const T *grad_output, const T *output, int64_t columns,
                                            int64_t cols, int64_t inner, cudaStream_t stream)
{
    const team_shape shape = choose_team(cols, inner);
    const unsigned int grid = clamp_grid(team_blocks(columns, shape));
    CUDA_OPS_TEAM_DISPATCH(shape, TEAM, STRIDED,
                           (log_softmax_backward_kernel<T, TEAM, STRIDED><<<grid, TEAM_THREADS, 0, stream>>>(
                               grad_input, grad_output, output, columns, cols, inner)));
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_log_softmax_forward_cuda(void *output, const void *input, int64_t outer,
                                                             int64_t cols, int64_t inner, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return log_softmax_forward((T *)output, (const T *)input, outer * inner, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_log_softmax_backward_cuda(void *grad_input, const void *grad_output,
                                                              const void *output, int64_t outer, int64_t cols,
                                                              int64_t inner, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    if (outer == 0 || cols == 0 || inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      return log_softmax_backward((T *)grad_input, (const T *)grad_output, (const T *)output,
                                                  outer * inner, cols, inner, stream));
    return CUDA_OPS_SUCCESS;
}
