// dropout: output = input * (word of Philox >= threshold ? 1 / (1 - p) : 0), plus a residual for dropout_add; backward, of
// both, is the product with grad_output.
// Maps one thread to 16 bytes, those of one Philox counter (four floats) or two (eight halves), in a grid-stride loop of as
// many blocks as are resident, so that the next 16 bytes are on their way while the words for these are made.
// Bound by memory: 2 streams, 3 with a residual, and no mask; of halves the rounds take nearly as long.
#include "cuda_ops/dropout.h"

#include <algorithm>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/device.h"
#include "ptx/arithmetic.cuh"

static constexpr int THREADS = 256;
static constexpr int WORDS = 4;

// Counters whose elements are moved at once.
template <typename T>
static constexpr int COUNTERS = sizeof(T) == 2 ? 2 : 1;

struct Words {
    uint32_t word[WORDS];
};

// What all counters have in common: each round's key, which would be two additions a round and counter.
struct Keys {
    uint32_t key0[CUDA_OPS_PHILOX_ROUNDS], key1[CUDA_OPS_PHILOX_ROUNDS];
    uint32_t low, high; // of the counter's first half
};

__device__ __forceinline__ Keys keys_of(uint64_t seed, uint64_t offset)
{
    Keys keys;
    keys.low = (uint32_t)(offset / 4), keys.high = (uint32_t)(offset / 4 >> 32);
#pragma unroll
    for (uint32_t round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
        keys.key0[round] = (uint32_t)seed + round * CUDA_OPS_PHILOX_WEYL_0;
        keys.key1[round] = (uint32_t)(seed >> 32) + round * CUDA_OPS_PHILOX_WEYL_1;
    }
    return keys;
}

// cuda_ops_philox of that counter.
__device__ __forceinline__ Words words_of(int64_t counter, const Keys &keys)
{
    uint32_t c0 = keys.low, c1 = keys.high, c2 = (uint32_t)counter, c3 = (uint32_t)(counter >> 32);
#pragma unroll
    for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
        const uint64_t product0 = mul_wide_u32(CUDA_OPS_PHILOX_MULTIPLIER_0, c0);
        const uint64_t product1 = mul_wide_u32(CUDA_OPS_PHILOX_MULTIPLIER_1, c2);
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ keys.key0[round], c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ keys.key1[round], c3 = (uint32_t)product0;
    }
    return {{c0, c1, c2, c3}};
}

// `state` is written, and `residual` added, if it is not NULL. `vectors`: 0 when misaligned.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    dropout_kernel(T *output, int64_t *state, const T *input, const T *residual, int64_t count, int64_t vectors,
                   uint32_t threshold, accumulate_type<T> scale, cuda_ops_philox_state philox)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = COUNTERS<T> * WORDS;
    typedef aligned_vector<T, SIZE> V;
    wait_for_predecessor();
    release_successor();
    const uint64_t seed = cuda_ops_philox_seed(philox), offset = cuda_ops_philox_offset(philox);
    if (state != nullptr && global_thread_index() == 0) {
        state[0] = (int64_t)seed;
        state[1] = (int64_t)offset;
    }
    const int64_t stride = global_thread_count();
    int64_t v = global_thread_index();
    V next, next_residual;
    const auto load = [&](int64_t vector) {
        next = reinterpret_cast<const V *>(input)[vector];
        if (residual)
            next_residual = reinterpret_cast<const V *>(residual)[vector];
    };
    if (v < vectors)
        load(v);
    const Keys keys = keys_of(seed, offset);
    for (; v < vectors; v += stride) {
        const V x = next, r = next_residual;
        if (v + stride < vectors)
            load(v + stride);
        A product[SIZE];
#pragma unroll
        for (int c = 0; c < COUNTERS<T>; c++) {
            const Words w = words_of(v * COUNTERS<T> + c, keys);
#pragma unroll
            for (int e = c * WORDS; e < (c + 1) * WORDS; e++)
                product[e] = element_of(x, e) * (w.word[e % WORDS] >= threshold ? scale : A(0));
        }
        if (residual)
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                product[e] += element_of(r, e);
        reinterpret_cast<V *>(output)[v] = vector_of<T>(product);
    }
    for (int64_t q = vectors * COUNTERS<T> + global_thread_index(); q * WORDS < count; q += stride) {
        const Words w = words_of(q, keys);
#pragma unroll
        for (int e = 0; e < WORDS; e++)
            if (q * WORDS + e < count) {
                const int64_t i = q * WORDS + e;
                const A product = load_as_accumulate(input[i]) * (w.word[e] >= threshold ? scale : A(0));
                output[i] = store_from_accumulate<T>(residual ? product + load_as_accumulate(residual[i]) : product);
            }
    }
}

template <typename T>
static cuda_ops_status dropout(T *output, int64_t *state, const T *input, const T *residual, int64_t count, double p,
                               cuda_ops_philox_state philox, cudaStream_t stream)
{
    const bool aligned = is_aligned_16(output) && is_aligned_16(input) && is_aligned_16(residual); // NULL is
    const int64_t vectors = aligned ? count / (COUNTERS<T> * WORDS) : 0;
    const int64_t blocks = vectors > 0 ? ceil_div(vectors, THREADS) : ceil_div(count, WORDS * THREADS);
    const int64_t resident = (int64_t)current_device().multiprocessors * active_blocks(dropout_kernel<T>, THREADS, 0);
    const unsigned int grid = (unsigned int)std::min(blocks, resident);
    launch_dependent(dropout_kernel<T>, dim3(grid), dim3(THREADS), 0, stream, output, state, input, residual, count,
                     vectors, cuda_ops_dropout_threshold(p), (accumulate_type<T>)cuda_ops_dropout_scale(p), philox);
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
