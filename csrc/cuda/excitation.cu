// excitation: hidden = f(input weight1^T + bias1), output = hidden weight2^T + bias2, for a row an image.
// Two launches of one kernel. A warp makes one column of D for eight rows, so that it reads the column's weights once;
// lanes take adjacent elements of k, 16 bytes of float32 weights where rows are whole vectors. Bound by latency: a
// layer's weights are in the L2. Parameters are read as they are, without the casts to halves that products want.
#include "cuda_ops/excitation.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"

static constexpr int EXCITATION_THREADS = 256, EXCITATION_ROWS = 8;
static constexpr int EXCITATION_WARPS = EXCITATION_THREADS / WARP_SIZE;
static constexpr int64_t FEWEST_VECTORS = 16; // of a row, for lanes to take four elements each

template <typename T, typename P>
struct ExcitationProduct {
    T *output;
    const T *input;
    const P *weight, *bias; // bias: or NULL
    int64_t rows, columns, depth;
    int activation; // a cuda_ops_excitation_activation, or -1
};

template <typename T, typename A>
__device__ __forceinline__ A excited(A x, int activation)
{
    if (activation == CUDA_OPS_EXCITATION_RELU)
        return x < A(0) ? A(0) : x; // NaN stays
    if (activation == CUDA_OPS_EXCITATION_SILU) {
        if constexpr (sizeof(T) == 2)
            return silu_f16(x);
        else if constexpr (sizeof(T) == 4)
            return silu_f32(x);
        else
            return silu_f64(x);
    }
    if (activation == CUDA_OPS_EXCITATION_HARDSWISH) {
        if constexpr (sizeof(A) == 4)
            return hardswish_f32(x);
        else
            return hardswish_f64(x);
    }
    return x;
}

template <typename T, typename P, int COUNT>
__global__ void __launch_bounds__(EXCITATION_THREADS) excitation_kernel(const ExcitationProduct<T, P> p)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> VT;
    typedef aligned_vector<P, COUNT> VP;
    constexpr int ROWS = EXCITATION_ROWS;
    const int lane = (int)threadIdx.x % WARP_SIZE;
    const int64_t column = (int64_t)blockIdx.x * EXCITATION_WARPS + threadIdx.x / WARP_SIZE;
    wait_for_predecessor();
    release_successor();
    if (column >= p.columns)
        return;
    const P *const weight = p.weight + column * p.depth;
    for (int64_t first = (int64_t)blockIdx.y * ROWS; first < p.rows; first += (int64_t)gridDim.y * ROWS) {
        A sum[ROWS] = {};
#pragma unroll 2
        for (int64_t k = lane * COUNT; k < p.depth; k += WARP_SIZE * COUNT) {
            const VP w = *reinterpret_cast<const VP *>(weight + k);
            VT x[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) // a row that is not there: the last one
                x[r] = *reinterpret_cast<const VT *>(p.input + (first + r < p.rows ? first + r : p.rows - 1) * p.depth +
                                                     k);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    sum[r] += (A)element_of(w, e) * element_of(x[r], e);
        }
        // Lanes add up by halves, and keep half of the rows each time, until one row is left to four of them.
        int row = 0;
#pragma unroll
        for (int half = ROWS / 2, apart = WARP_SIZE / 2; half > 0; half /= 2, apart /= 2) {
            const bool upper = lane & apart;
            row += upper ? half : 0;
#pragma unroll
            for (int r = 0; r < half; r++) {
                const A kept = upper ? sum[r + half] : sum[r], given = upper ? sum[r] : sum[r + half];
                sum[r] = kept + __shfl_xor_sync(FULL_WARP, given, apart);
            }
        }
#pragma unroll
        for (int apart = WARP_SIZE / 2 / ROWS; apart > 0; apart /= 2)
            sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], apart);
        if (lane % (WARP_SIZE / ROWS) == 0 && first + row < p.rows) {
            const A bias = p.bias ? (A)load_as_accumulate(p.bias[column]) : A(0);
            p.output[(first + row) * p.columns + column] =
                store_from_accumulate<T>(excited<T>(sum[0] + bias, p.activation));
        }
    }
}

template <typename T, typename P>
static cuda_ops_status multiply_excitation(const ExcitationProduct<T, P> &p, cudaStream_t stream)
{
    constexpr int COUNT = 16 / sizeof(P) < 4 ? 2 : 4; // float64: 2
    const bool vectorised =
        p.depth % COUNT == 0 && p.depth / COUNT >= FEWEST_VECTORS && is_aligned_16(p.input) && is_aligned_16(p.weight);
    const int64_t columns = ceil_div(p.columns, EXCITATION_WARPS), rows = ceil_div(p.rows, EXCITATION_ROWS);
    if (columns > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(vectorised ? excitation_kernel<T, P, COUNT> : excitation_kernel<T, P, 1>,
                     dim3((unsigned int)columns, (unsigned int)(rows < MAX_GRID ? rows : MAX_GRID)),
                     dim3(EXCITATION_THREADS), 0, stream, p);
    return launch_status();
}

template <typename T, typename P>
static cuda_ops_status excite(T *output, T *hidden, const cuda_ops_excitation &c, cudaStream_t stream)
{
    const ExcitationProduct<T, P> squeeze = {hidden,   (const T *)c.input, (const P *)c.weight1, (const P *)c.bias1,
                                             c.images, c.squeezed,         c.channels,           (int)c.activation};
    const ExcitationProduct<T, P> excite = {output,   hidden,    (const P *)c.weight2, (const P *)c.bias2,
                                            c.images, c.outputs, c.squeezed,           -1};
    const cuda_ops_status status = c.squeezed > 0 ? multiply_excitation(squeeze, stream) : CUDA_OPS_SUCCESS;
    return status == CUDA_OPS_SUCCESS ? multiply_excitation(excite, stream) : status;
}

extern "C" cuda_ops_status cuda_ops_excitation_forward_cuda(void *output, void *hidden, const cuda_ops_excitation *call,
                                                            cuda_ops_dtype parameter_dtype, cuda_ops_dtype dtype,
                                                            cuda_ops_stream stream)
{
    const bool is_half = dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16;
    const bool same = parameter_dtype == dtype;
    if (!same && !(is_half && parameter_dtype == CUDA_OPS_FLOAT32))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (call->images == 0 || call->outputs == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        if (same)
            return excite<T, T>((T *)output, (T *)hidden, *call, stream);
        if constexpr (sizeof(T) == 2)
            return excite<T, float>((T *)output, (T *)hidden, *call, stream);
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
