// dropout: output = input * (word of Philox >= threshold ? 1 / (1 - p) : 0), plus a residual for dropout_add; backward, of
// both, is the product with grad_output.
// Maps one thread to the four elements of one Philox counter in a grid-stride loop, moved by one load and one store
// (two for double) where the arrays are aligned.
// Bound by memory: 2 streams, 3 with a residual, and no mask; the ten rounds hide behind the loads.
#include "cuda_ops/dropout.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 256;
static constexpr int WORDS = 4;

// The elements of one counter.
template <typename T>
using quadruple = aligned_vector<T, WORDS>;

// `state` is written, and `residual` added, if it is not NULL. `quadruples` is how many counters have their four elements moved at once:
// count / 4, or 0 when misaligned.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    dropout_kernel(T *output, int64_t *state, const T *input, const T *residual, int64_t count, int64_t quadruples,
                   uint32_t threshold, accumulate_type<T> scale, cuda_ops_philox_state philox)
{
    typedef accumulate_type<T> A;
    const uint64_t seed = cuda_ops_philox_seed(philox), offset = cuda_ops_philox_offset(philox);
    if (state != nullptr && global_thread_index() == 0) {
        state[0] = (int64_t)seed;
        state[1] = (int64_t)offset;
    }
    for (int64_t q = global_thread_index(); q * WORDS < count; q += global_thread_count()) {
        uint32_t words[WORDS] = {(uint32_t)(offset / 4), (uint32_t)(offset / 4 >> 32), (uint32_t)q,
                                 (uint32_t)((uint64_t)q >> 32)};
        cuda_ops_philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
        if (q < quadruples) {
            quadruple<T> x = reinterpret_cast<const quadruple<T> *>(input)[q], r;
            if (residual)
                r = reinterpret_cast<const quadruple<T> *>(residual)[q];
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const A product = load_as_accumulate(x.element[w]) * (words[w] >= threshold ? scale : A(0));
                x.element[w] =
                    store_from_accumulate<T>(residual ? product + load_as_accumulate(r.element[w]) : product);
            }
            reinterpret_cast<quadruple<T> *>(output)[q] = x;
            continue;
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++)
            if (q * WORDS + w < count) {
                const int64_t i = q * WORDS + w;
                const A product = load_as_accumulate(input[i]) * (words[w] >= threshold ? scale : A(0));
                output[i] = store_from_accumulate<T>(residual ? product + load_as_accumulate(residual[i]) : product);
            }
    }
}

template <typename T>
static cuda_ops_status dropout(T *output, int64_t *state, const T *input, const T *residual, int64_t count, double p,
                               cuda_ops_philox_state philox, cudaStream_t stream)
{
    const bool aligned = is_aligned_16(output) && is_aligned_16(input) && is_aligned_16(residual); // NULL is
    const unsigned int grid = clamp_grid(ceil_div(count, WORDS * THREADS));
    dropout_kernel<T><<<grid, THREADS, 0, stream>>>(output, state, input, residual, count, aligned ? count / WORDS : 0,
                                                    cuda_ops_dropout_threshold(p),
                                                    (accumulate_type<T>)cuda_ops_dropout_scale(p), philox);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_dropout_forward_cuda(void *output, int64_t *state, const void *input, int64_t count,
                                                         double p, cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                                         cuda_ops_stream stream)
{
    return cuda_ops_dropout_add_forward_cuda(output, state, input, nullptr, count, p, philox, dtype, stream);
}

extern "C" cuda_ops_status cuda_ops_dropout_add_forward_cuda(void *output, int64_t *state, const void *input,
                                                             const void *residual, int64_t count, double p,
                                                             cuda_ops_philox_state philox, cuda_ops_dtype dtype,
                                                             cuda_ops_stream stream)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T, return dropout((T *)output, state, (const T *)input, (const T *)residual, count, p, philox, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_dropout_backward_cuda(void *grad_input, const void *grad_output,
                                                          const int64_t *state, int64_t count, double p,
                                                          cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!(p >= 0.0 && p <= 1.0))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    cuda_ops_philox_state philox = {0, 0, state, state + 1};
    CUDA_OPS_DISPATCH(dtype, T,
                      return dropout((T *)grad_input, (int64_t *)nullptr, (const T *)grad_output, (const T *)nullptr,
                                     count, p, philox, stream));
    return CUDA_OPS_SUCCESS;
}
