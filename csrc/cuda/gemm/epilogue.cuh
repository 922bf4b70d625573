// Shared by the kernels on the CUDA cores (paths 4 to 10): the epilogue, and what the teaching kernels support.
#ifndef CUDA_OPS_GEMM_EPILOGUE_CUH
#define CUDA_OPS_GEMM_EPILOGUE_CUH

#include "common/activation.cuh"
#include "common/common.cuh"
#include "gemm/paths.h"

// D = A * B and no more: all that the ladder's kernels 5 to 9 compute. naive and simt take every problem.
static inline bool is_plain_product(const cuda_ops_gemm_problem &p)
{
    return !p.transpose_a && !p.transpose_b && p.batch == 1 && p.alpha == 1 && p.output_dtype == p.dtype &&
           p.activation == CUDA_OPS_GEMM_NONE;
}

static inline bool is_plain_product(const GemmCall &call)
{
    return call.bias == nullptr && is_plain_product(call.problem);
}

static constexpr Answer GEMM_NEEDS_PLAIN = {"takes row-major products alone: no bias, batch or activation"};

// float32 or float64: what is computed with as it is stored.
static inline bool is_float(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT32 || dtype == CUDA_OPS_FLOAT64;
}

// A tile of D for each block; the grid has one dimension, since the others end at 65535.
static inline unsigned int tile_count(const cuda_ops_gemm_problem &p, int rows, int columns)
{
    return (unsigned int)(ceil_div(p.m, rows) * ceil_div(p.n, columns));
}

// The dynamic shared memory to ask for where a block needs `bytes`: so much that no more of `blocks` share a
// multiprocessor than have to. While the previous kernel still runs, the multiprocessors that are already free would
// otherwise take more than their share, and finish last.
static inline int spread_bytes(int bytes, int64_t blocks)
{
    constexpr int MOST_EACH = 4; // each block has 1 KB more, which then still fits
    const Device device = current_device();
    const int64_t each = ceil_div(blocks, device.multiprocessors);
    if (each < 1 || each > MOST_EACH)
        return bytes;
    const int share = multiprocessor_shared_bytes() / ((int)each + 1);
    const int spread = share < device.shared_bytes ? share : device.shared_bytes;
    return spread > bytes ? spread : bytes;
}

// activation(alpha * sum + bias), stored as float32 or T. The dtypes and pointers of a call, as the kernels get them.
struct Epilogue {
    double alpha;
    const void *bias;
    int bias_float32, output_float32; // with fp16 and bf16: float32 instead of T
    cuda_ops_gemm_activation activation;
};

static inline Epilogue epilogue_of(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return {p.alpha, call.bias, p.bias_dtype == CUDA_OPS_FLOAT32, p.output_dtype == CUDA_OPS_FLOAT32, p.activation};
}

template <typename T>
__device__ __forceinline__ accumulate_type<T> bias_at(const Epilogue &epilogue, int64_t column)
{
    if (sizeof(T) == 2 && epilogue.bias_float32)
        return (accumulate_type<T>)static_cast<const float *>(epilogue.bias)[column];
    return load_as_accumulate(static_cast<const T *>(epilogue.bias)[column]);
}

// None, or relu.
template <typename T>
__device__ __forceinline__ accumulate_type<T> finish_simply(accumulate_type<T> sum, const Epilogue &epilogue,
                                                            int64_t column)
{
    typedef accumulate_type<T> A;
    A value = sum * (A)epilogue.alpha;
    if (epilogue.bias)
        value += bias_at<T>(epilogue, column);
    if (epilogue.activation == CUDA_OPS_GEMM_RELU)
        value = value < A(0) ? A(0) : value; // and NaN stays
    return value;
}

template <typename T>
__device__ __forceinline__ accumulate_type<T> finish(accumulate_type<T> sum, const Epilogue &epilogue, int64_t column)
{
    const accumulate_type<T> value = finish_simply<T>(sum, epilogue, column);
    return epilogue.activation > CUDA_OPS_GEMM_RELU ? activate(value, epilogue.activation) : value;
}

template <typename T>
__device__ __forceinline__ void store_output(void *output, int64_t index, accumulate_type<T> value,
                                             const Epilogue &epilogue)
{
    if (sizeof(T) == 2 && epilogue.output_float32)
        static_cast<float *>(output)[index] = (float)value;
    else
        static_cast<T *>(output)[index] = store_from_accumulate<T>(value);
}

#endif
