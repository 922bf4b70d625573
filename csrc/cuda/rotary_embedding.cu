// rotary_embedding: output[e] = input[e] * cos[e] - input[e + half] * sin[e] and its counterpart in the other half of the
// features, or the transposed of it, the gradient.
// Maps a thread to 16 bytes of halves in either half of a head (4 floats, 2 doubles); a block has positions side by side,
// all of whose heads read the same cosines and sines, which come from memory once. Bound by memory: 2 streams.
#include "cuda_ops/rotary_embedding.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"

static constexpr int THREADS = 256;

template <typename T, typename C, typename O>
struct Rotation {
    O *output;
    const T *input;
    const C *cos, *sin;
    int64_t rows, table_stride;
    int64_t input_strides[3], output_strides[3];
    int length, half, items; // items: vectors of half a head, of all heads
    bool transposed;
    Divider by_vectors; // of half a head
};

template <typename T, typename C, typename O, int COUNT>
__global__ void __launch_bounds__(THREADS) rotary_embedding_kernel(const Rotation<T, C, O> a)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    typedef aligned_vector<C, COUNT> W;
    typedef aligned_vector<O, COUNT> R;
    const int vectors = a.half / COUNT;
    for (int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; row < a.rows;
         row += (int64_t)gridDim.x * blockDim.y) {
        const int64_t n = row / a.length, position = row - n * a.length;
        const T *const from = a.input + n * a.input_strides[0] + position * a.input_strides[2];
        O *const to = a.output + n * a.output_strides[0] + position * a.output_strides[2];
        const int64_t table = n * a.table_stride + position * 2 * a.half;
        for (int item = threadIdx.x; item < a.items; item += blockDim.x) {
            const int head = (int)a.by_vectors.of((uint32_t)item), e = (item - head * vectors) * COUNT;
            const T *const its_input = from + head * a.input_strides[1] + e;
            O *const its_output = to + head * a.output_strides[1] + e;
            const V x = *reinterpret_cast<const V *>(its_input);
            const V y = *reinterpret_cast<const V *>(its_input + a.half);
            const W cos_x = *reinterpret_cast<const W *>(a.cos + table + e);
            const W cos_y = *reinterpret_cast<const W *>(a.cos + table + e + a.half);
            const W sin_x = *reinterpret_cast<const W *>(a.sin + table + e);
            const W sin_y = *reinterpret_cast<const W *>(a.sin + table + e + a.half);
            A first[COUNT], second[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                // What the other element of the pair is multiplied by.
                const A to_first = a.transposed ? element_of(sin_y, k) : -element_of(sin_x, k);
                const A to_second = a.transposed ? -element_of(sin_x, k) : element_of(sin_y, k);
                first[k] = element_of(x, k) * element_of(cos_x, k) + element_of(y, k) * to_first;
                second[k] = element_of(y, k) * element_of(cos_y, k) + element_of(x, k) * to_second;
            }
            *reinterpret_cast<R *>(its_output) = vector_of<O>(first);
            *reinterpret_cast<R *>(its_output + a.half) = vector_of<O>(second);
        }
    }
}

template <int COUNT, typename T, typename C, typename O>
static void launch(Rotation<T, C, O> a, int64_t heads, cudaStream_t stream)
{
    const int vectors = a.half / COUNT;
    a.items = (int)(heads * vectors);
    a.by_vectors = divider_by((uint32_t)vectors);
    // Of numbers between multiples of a block as few idle threads as there can be.
    const int64_t turns = ceil_div(a.items, THREADS);
    const unsigned int width = (unsigned int)ceil_div(ceil_div(a.items, turns), WARP_SIZE) * WARP_SIZE;
    const dim3 block(width, THREADS / width);
    rotary_embedding_kernel<T, C, O, COUNT><<<clamp_grid(ceil_div(a.rows, block.y)), block, 0, stream>>>(a);
}

template <typename T, typename C, typename O>
static cuda_ops_status rotate(void *output, const void *input, const void *cos, const void *sin,
                              const cuda_ops_rotary_embedding_call &call, cudaStream_t stream)
{
    constexpr int COUNT = sizeof(T) == 8 ? 2 : sizeof(T) == 4 && sizeof(O) == 4 ? 4 : 8;
    Rotation<T, C, O> a = {};
    a.output = (O *)output, a.input = (const T *)input, a.cos = (const C *)cos, a.sin = (const C *)sin;
    a.rows = call.batch * call.length, a.length = (int)call.length, a.half = (int)(call.features / 2);
    a.table_stride = call.table_stride, a.transposed = call.transposed != 0;
    bool vectors = is_aligned_16(output) && is_aligned_16(input) && is_aligned_16(cos) && is_aligned_16(sin) &&
                   a.half % COUNT == 0 && a.table_stride % COUNT == 0;
    for (int d = 0; d < 3; d++) {
        a.input_strides[d] = call.input_strides[d], a.output_strides[d] = call.output_strides[d];
        vectors = vectors && a.input_strides[d] % COUNT == 0 && a.output_strides[d] % COUNT == 0;
    }
    if (vectors)
        launch<COUNT>(a, call.heads, stream);
    else
        launch<1>(a, call.heads, stream);
    return launch_status();
}

template <typename H>
static cuda_ops_status rotate_half(void *output, const void *input, const void *cos, const void *sin,
                                   const cuda_ops_rotary_embedding_call &call, cudaStream_t stream)
{
    const bool wide_table = call.table_dtype == CUDA_OPS_FLOAT32, wide_output = call.output_dtype == CUDA_OPS_FLOAT32;
    if (!wide_table)
        return wide_output ? CUDA_OPS_UNSUPPORTED_DTYPE : rotate<H, H, H>(output, input, cos, sin, call, stream);
    return wide_output ? rotate<H, float, float>(output, input, cos, sin, call, stream)
                       : rotate<H, float, H>(output, input, cos, sin, call, stream);
}

extern "C" cuda_ops_status cuda_ops_rotary_embedding_cuda(void *output, const void *input, const void *cos,
                                                          const void *sin, const cuda_ops_rotary_embedding_call *call,
                                                          cuda_ops_stream stream)
{
    const cuda_ops_rotary_embedding_call &c = *call;
    if (c.features % 2 != 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (c.batch == 0 || c.heads == 0 || c.length == 0 || c.features == 0)
        return CUDA_OPS_SUCCESS;
    if (c.length > INT32_MAX || c.heads > INT32_MAX / c.features)
        return CUDA_OPS_INVALID_ARGUMENT;
    const cuda_ops_dtype own = c.dtype, table = c.table_dtype, to = c.output_dtype;
    if (own == CUDA_OPS_FLOAT64 && table == own && to == own)
        return rotate<double, double, double>(output, input, cos, sin, c, stream);
    if (own == CUDA_OPS_FLOAT32 && table == own && to == own)
        return rotate<float, float, float>(output, input, cos, sin, c, stream);
    if (own == CUDA_OPS_FLOAT32 && table == own && to == CUDA_OPS_FLOAT16)
        return rotate<float, float, __half>(output, input, cos, sin, c, stream);
    if (own == CUDA_OPS_FLOAT32 && table == own && to == CUDA_OPS_BFLOAT16)
        return rotate<float, float, __nv_bfloat16>(output, input, cos, sin, c, stream);
    const bool fits = (table == own || table == CUDA_OPS_FLOAT32) && (to == own || to == CUDA_OPS_FLOAT32);
    if (own == CUDA_OPS_FLOAT16 && fits)
        return rotate_half<__half>(output, input, cos, sin, c, stream);
    if (own == CUDA_OPS_BFLOAT16 && fits)
        return rotate_half<__nv_bfloat16>(output, input, cos, sin, c, stream);
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
