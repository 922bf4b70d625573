// random_fill: output = first + u * (second - first), or first + second * z, with u and z from Philox.
// Maps one thread to 16 bytes in a grid-stride loop: to one counter's four floats or two doubles, or to two counters' eight
// halves. Normal numbers come in pairs (Box and Muller), in float by the special function unit, whose absolute errors,
// some 2^-21, are below what 2^24 angles tell.
// Bound by memory, one write of the output, and in float32 nearly so by the ten rounds, some 15 instructions a number.
#include "cuda_ops/random_fill.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 256;
static constexpr int WORDS = 4;

__device__ __forceinline__ void units_of(const uint32_t (&words)[WORDS], float (&unit)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        unit[i] = cuda_ops_unit_float(words[i]);
}

__device__ __forceinline__ void units_of(const uint32_t (&words)[WORDS], double (&unit)[2])
{
    unit[0] = cuda_ops_unit_double(words[0], words[1]);
    unit[1] = cuda_ops_unit_double(words[2], words[3]);
}

__device__ __forceinline__ void normals_of(const uint32_t (&words)[WORDS], float (&normal)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        // Of a number near 1 the logarithm's error may be above it.
        const float radius = sqrtf(fmaxf(-2 * __logf(cuda_ops_positive_unit_float(words[i])), 0));
        float sine, cosine;
        __sincosf(6.2831853f * (cuda_ops_unit_float(words[i + 1]) - 0.5f), &sine, &cosine);
        normal[i] = -radius * cosine; // the angle is less by pi
        normal[i + 1] = -radius * sine;
    }
}

__device__ __forceinline__ void normals_of(const uint32_t (&words)[WORDS], double (&normal)[2])
{
    const double radius = sqrt(-2 * log(cuda_ops_positive_unit_double(words[0], words[1])));
    double sine, cosine;
    sincospi(2 * cuda_ops_unit_double(words[2], words[3]), &sine, &cosine);
    normal[0] = radius * cosine;
    normal[1] = radius * sine;
}

// vectors: how many are stored at once, count / SIZE, or 0 where output is misaligned.
template <typename T, bool NORMAL>
__global__ void __launch_bounds__(THREADS)
    random_fill_kernel(T *output, int64_t count, int64_t vectors, accumulate_type<T> first, accumulate_type<T> scale,
                       cuda_ops_philox_state philox)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int OF_COUNTER = sizeof(A) == 8 ? 2 : 4;
    const uint64_t seed = cuda_ops_philox_seed(philox), offset = cuda_ops_philox_offset(philox);
    for (int64_t v = global_thread_index(); v * V::size < count; v += global_thread_count()) {
        A values[V::size];
#pragma unroll
        for (int i = 0; i < V::size; i += OF_COUNTER) {
            const uint64_t counter = (uint64_t)(v * V::size + i) / OF_COUNTER;
            uint32_t words[WORDS] = {(uint32_t)(offset / 4), (uint32_t)(offset / 4 >> 32), (uint32_t)counter,
                                     (uint32_t)(counter >> 32)};
            cuda_ops_philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
            A numbers[OF_COUNTER];
            if constexpr (NORMAL)
                normals_of(words, numbers);
            else
                units_of(words, numbers);
#pragma unroll
            for (int k = 0; k < OF_COUNTER; k++)
                values[i + k] = first + scale * numbers[k];
        }
        if (v < vectors) {
            reinterpret_cast<V *>(output)[v] = vector_of<T>(values);
            continue;
        }
#pragma unroll
        for (int i = 0; i < V::size; i++)
            if (v * V::size + i < count)
                output[v * V::size + i] = store_from_accumulate<T>(values[i]);
    }
}

extern "C" cuda_ops_status cuda_ops_random_fill_cuda(void *output, int64_t count, cuda_ops_distribution distribution,
                                                     double first, double second, cuda_ops_philox_state philox,
                                                     cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    const bool is_normal = distribution == CUDA_OPS_NORMAL;
    if (!(is_normal ? second >= 0 : first <= second) || (!is_normal && distribution != CUDA_OPS_UNIFORM))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        typedef accumulate_type<T> A;
        const int64_t vectors = is_aligned_16(output) ? count / vector16<T>::size : 0;
        const unsigned int grid = clamp_grid(ceil_div(count, vector16<T>::size * THREADS));
        const auto kernel = is_normal ? random_fill_kernel<T, true> : random_fill_kernel<T, false>;
        kernel<<<grid, THREADS, 0, stream>>>((T *)output, count, vectors, (A)first,
                                             (A)(is_normal ? second : second - first), philox);
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}
