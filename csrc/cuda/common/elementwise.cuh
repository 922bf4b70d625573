// Elementwise loops over arrays of one dtype: a thread takes 16 bytes of each array (4 fp32, 8 fp16 or bf16) at a time,
// in a grid-stride loop; the tail, and arrays that are not all 16-byte aligned, go element by element.
#ifndef CUDA_OPS_COMMON_ELEMENTWISE_CUH
#define CUDA_OPS_COMMON_ELEMENTWISE_CUH

#include <utility>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int ELEMENTWISE_THREADS = 256;
static constexpr int ELEMENTWISE_VECTORS = 2; // of a thread of elementwise(), so that tensors of 12 MB take one round

// The number of 16-byte vectors of the arrays; 0 if one of them is misaligned.
template <typename T, typename... Arrays>
static inline int64_t vectors_of(int64_t count, const T *array, const Arrays *...arrays)
{
    return is_aligned_16(array) && (is_aligned_16(arrays) && ...) ? count / vector16<T>::size : 0;
}

static inline unsigned int elementwise_grid(int64_t count, int64_t vectors)
{
    return clamp_grid(ceil_div(vectors > 0 ? vectors : count, ELEMENTWISE_THREADS));
}

// For a whole grid: function(i, x, y) gets elements i, i + 1, ... of input k as x[k], and fills y, which is stored at
// the same index of output; x[k] and y have as many elements as a vector, or one. Output may be one of the inputs. A thread
// loads so many vectors together.
template <int VECTORS = 1, typename T, int INPUTS, typename F>
__device__ __forceinline__ void for_elements(T *output, const T *const (&inputs)[INPUTS], int64_t count,
                                             int64_t vectors, F function)
{
    typedef vector16<T> V;
    const int64_t step = VECTORS * global_thread_count();
    for (int64_t v = (int64_t)blockIdx.x * blockDim.x * VECTORS + threadIdx.x; v < vectors; v += step) {
        V x[VECTORS][INPUTS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (i == 0 || v + i * blockDim.x < vectors)
#pragma unroll
                for (int k = 0; k < INPUTS; k++)
                    x[i][k] = reinterpret_cast<const V *>(inputs[k])[v + i * blockDim.x];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (i == 0 || v + i * blockDim.x < vectors) {
                V y;
                function((v + i * blockDim.x) * V::size, x[i], y);
                reinterpret_cast<V *>(output)[v + i * blockDim.x] = y;
            }
    }
    for (int64_t i = vectors * V::size + global_thread_index(); i < count; i += global_thread_count()) {
        aligned_vector<T, 1> x[INPUTS], y;
#pragma unroll
        for (int k = 0; k < INPUTS; k++)
            x[k].element[0] = inputs[k][i];
        function(i, x, y);
        output[i] = y.element[0];
    }
}

template <typename Op, typename Vector, size_t... K>
__device__ __forceinline__ void apply(const Op &op, const Vector *x, Vector &y, std::index_sequence<K...>)
{
#pragma unroll
    for (int e = 0; e < Vector::size; e++)
        y.element[e] = op(x[K].element[e]...);
}

template <typename Op, typename T, typename... Inputs>
__global__ void elementwise_kernel(const __grid_constant__ Op op, T *output, int64_t count, int64_t vectors,
                                   const Inputs *...inputs)
{
    const T *const arrays[] = {inputs...};
    wait_for_predecessor();
    release_successor();
    for_elements<ELEMENTWISE_VECTORS>(output, arrays, count, vectors, [&](int64_t, const auto &x, auto &y) {
        apply(op, x, y, std::index_sequence_for<Inputs...>());
    });
}

// output[i] = op(inputs[i]...): op is a struct whose operator() takes and returns elements, and whose members, if it
// has any, travel as the kernel's arguments.
template <typename Op, typename T, typename... Inputs>
static inline cuda_ops_status elementwise(const Op &op, cudaStream_t stream, int64_t count, T *output,
                                          const Inputs *...inputs)
{
    const int64_t vectors = vectors_of(count, (const T *)output, inputs...);
    launch_dependent(elementwise_kernel<Op, T, Inputs...>,
                     dim3(elementwise_grid(count, ceil_div(vectors, ELEMENTWISE_VECTORS))), dim3(ELEMENTWISE_THREADS),
                     0, stream, op, output, count, vectors, inputs...);
    return launch_status();
}

#endif
