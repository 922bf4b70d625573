// interleave: output[r, 2 c] = input[r, c] and output[r, 2 c + 1] = other[r, c], and the reverse.
// A thread has up to 16 bytes of output in IN_FLIGHT places, and reads half as many of each input: as wide as rows and
// addresses allow, so that rows of 58 elements of 16 bits still move by words. Bound by memory: one read and one write.
#include "cuda_ops/interleave.h"

#include "common/aligned_vector.cuh"
#include "common/wide_division.cuh"

static constexpr int INTERLEAVE_THREADS = 256;
static constexpr int INTERLEAVE_IN_FLIGHT = 4;

// Two elements that need not be aligned as such.
template <typename U>
struct LoosePair {
    U element[2];
};

// COUNT elements of each of both.
template <typename Both, typename U, int COUNT>
__device__ __forceinline__ Both by_turns(const aligned_vector<U, COUNT> &a, const aligned_vector<U, COUNT> &b)
{
    Both both;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        both.element[2 * e] = a.element[e], both.element[2 * e + 1] = b.element[e];
    return both;
}

// Both: 2 COUNT elements.
template <typename U, int COUNT, typename Both>
__global__ void __launch_bounds__(INTERLEAVE_THREADS)
    interleave_forward_kernel(U *output, const U *input, const U *other, int64_t input_stride, int64_t other_stride,
                              int64_t vectors, int64_t of_row, Divider by_row)
{
    typedef aligned_vector<U, COUNT> V;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * INTERLEAVE_THREADS * INTERLEAVE_IN_FLIGHT + threadIdx.x; first < vectors;
         first += (int64_t)gridDim.x * INTERLEAVE_THREADS * INTERLEAVE_IN_FLIGHT) {
        V a[INTERLEAVE_IN_FLIGHT], b[INTERLEAVE_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < INTERLEAVE_IN_FLIGHT; k++) {
            const int64_t at = first + k * INTERLEAVE_THREADS;
            if (at < vectors) {
                const int64_t row = divided(at, of_row, by_row), column = (at - row * of_row) * COUNT;
                a[k] = *reinterpret_cast<const V *>(input + row * input_stride + column);
                b[k] = *reinterpret_cast<const V *>(other + row * other_stride + column);
            }
        }
#pragma unroll
        for (int k = 0; k < INTERLEAVE_IN_FLIGHT; k++)
            if (first + k * INTERLEAVE_THREADS < vectors)
                reinterpret_cast<Both *>(output)[first + k * INTERLEAVE_THREADS] = by_turns<Both>(a[k], b[k]);
    }
}

template <typename U, int COUNT, typename Both>
__global__ void __launch_bounds__(INTERLEAVE_THREADS)
    interleave_backward_kernel(U *grad_input, U *grad_other, const U *grad, int64_t vectors)
{
    typedef aligned_vector<U, COUNT> V;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * INTERLEAVE_THREADS * INTERLEAVE_IN_FLIGHT + threadIdx.x; first < vectors;
         first += (int64_t)gridDim.x * INTERLEAVE_THREADS * INTERLEAVE_IN_FLIGHT) {
        Both both[INTERLEAVE_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < INTERLEAVE_IN_FLIGHT; k++)
            if (first + k * INTERLEAVE_THREADS < vectors)
                both[k] = reinterpret_cast<const Both *>(grad)[first + k * INTERLEAVE_THREADS];
#pragma unroll
        for (int k = 0; k < INTERLEAVE_IN_FLIGHT; k++) {
            V a, b;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                a.element[e] = both[k].element[2 * e], b.element[e] = both[k].element[2 * e + 1];
            if (first + k * INTERLEAVE_THREADS < vectors) {
                reinterpret_cast<V *>(grad_input)[first + k * INTERLEAVE_THREADS] = a;
                reinterpret_cast<V *>(grad_other)[first + k * INTERLEAVE_THREADS] = b;
            }
        }
    }
}

static bool is_aligned_to(int64_t bytes, const void *a, const void *b)
{
    return (uintptr_t)a % bytes == 0 && (uintptr_t)b % bytes == 0;
}

static dim3 interleave_grid(int64_t vectors)
{
    return dim3(clamp_grid(ceil_div(vectors, INTERLEAVE_THREADS * INTERLEAVE_IN_FLIGHT)));
}

template <typename U, int COUNT, typename Both = aligned_vector<U, 2 * COUNT>>
static bool try_forward(U *output, const U *input, const U *other, int64_t input_stride, int64_t other_stride,
                        int64_t rows, int64_t cols, cudaStream_t stream)
{
    const bool fits = cols % COUNT == 0 && input_stride % COUNT == 0 && other_stride % COUNT == 0 &&
                      is_aligned_to(COUNT * sizeof(U), input, other) && is_aligned_to(alignof(Both), output, output);
    if (fits)
        launch_dependent(interleave_forward_kernel<U, COUNT, Both>, interleave_grid(rows * cols / COUNT),
                         dim3(INTERLEAVE_THREADS), 0, stream, output, input, other, input_stride, other_stride,
                         rows * cols / COUNT, cols / COUNT, wide_divider_by(cols / COUNT));
    return fits;
}

template <typename U, int COUNT, typename Both = aligned_vector<U, 2 * COUNT>>
static bool try_backward(U *grad_input, U *grad_other, const U *grad, int64_t count, cudaStream_t stream)
{
    const bool fits = count % COUNT == 0 && is_aligned_to(COUNT * sizeof(U), grad_input, grad_other) &&
                      is_aligned_to(alignof(Both), grad, grad);
    if (fits)
        launch_dependent(interleave_backward_kernel<U, COUNT, Both>, interleave_grid(count / COUNT),
                         dim3(INTERLEAVE_THREADS), 0, stream, grad_input, grad_other, grad, count / COUNT);
    return fits;
}

extern "C" cuda_ops_status cuda_ops_interleave_forward_cuda(void *output, const void *input, const void *other,
                                                            int64_t input_stride, int64_t other_stride, int64_t rows,
                                                            int64_t cols, int element_bytes, cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    const auto run = [&](auto *to, auto... counts) {
        typedef std::remove_reference_t<decltype(*to)> U;
        const U *const x = (const U *)input, *const y = (const U *)other;
        if (!(try_forward<U, decltype(counts)::value>(to, x, y, input_stride, other_stride, rows, cols, stream) || ...))
            try_forward<U, 1, LoosePair<U>>(to, x, y, input_stride, other_stride, rows, cols, stream);
    };
    if (element_bytes == 2)
        run((uint16_t *)output, std::integral_constant<int, 4>(), std::integral_constant<int, 2>(),
            std::integral_constant<int, 1>());
    else if (element_bytes == 4)
        run((uint32_t *)output, std::integral_constant<int, 2>(), std::integral_constant<int, 1>());
    else if (element_bytes == 8)
        run((uint64_t *)output, std::integral_constant<int, 1>());
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_interleave_backward_cuda(void *grad_input, void *grad_other, const void *grad,
                                                             int64_t rows, int64_t cols, int element_bytes,
                                                             cuda_ops_stream stream)
{
    if (rows == 0 || cols == 0)
        return CUDA_OPS_SUCCESS;
    const auto run = [&](auto *to, auto... counts) {
        typedef std::remove_reference_t<decltype(*to)> U;
        U *const second = (U *)grad_other;
        if (!(try_backward<U, decltype(counts)::value>(to, second, (const U *)grad, rows * cols, stream) || ...))
            try_backward<U, 1, LoosePair<U>>(to, second, (const U *)grad, rows * cols, stream);
    };
    if (element_bytes == 2)
        run((uint16_t *)grad_input, std::integral_constant<int, 4>(), std::integral_constant<int, 2>(),
            std::integral_constant<int, 1>());
    else if (element_bytes == 4)
        run((uint32_t *)grad_input, std::integral_constant<int, 2>(), std::integral_constant<int, 1>());
    else if (element_bytes == 8)
        run((uint64_t *)grad_input, std::integral_constant<int, 1>());
    else
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return launch_status();
}
