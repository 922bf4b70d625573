// excitation: hidden = f(input weight1^T + bias1), output = hidden weight2^T + bias2, for a row an image.
// Two launches. Where rows of the weight are long, a warp makes one column of D for eight rows, so that it reads the
// column's weights once; lanes take adjacent elements of k, and the rows are in shared memory. Where they are short, a
// thread makes a column. Bound by latency: a layer's weights are in the L2, and all that a thread reads of them in a
// chunk of k is on its way together. Parameters are read as they are, without the casts to halves that products want.
#include "cuda_ops/excitation.h"

#include "common/activation_functions.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"

static constexpr int EXCITATION_THREADS = 256, EXCITATION_ROWS = 8;
static constexpr int EXCITATION_WARPS = EXCITATION_THREADS / WARP_SIZE;
static constexpr int SHORT_THREADS = 64, SHORT_ROWS = 4;
static constexpr int MOST_SHORT = 64; // elements of a row that a thread takes

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
    constexpr int ROWS = EXCITATION_ROWS, VECTORS = EXCITATION_THREADS / WARP_SIZE; // of a lane, in a chunk
    constexpr int CHUNK = EXCITATION_THREADS * COUNT;
    __shared__ __align__(16) T rows[ROWS * CHUNK];
    const int lane = (int)threadIdx.x % WARP_SIZE;
    const int64_t column = (int64_t)blockIdx.x * EXCITATION_WARPS + threadIdx.x / WARP_SIZE;
    const P *const weight = p.weight + (column < p.columns ? column : p.columns - 1) * p.depth;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.y * ROWS; first < p.rows; first += (int64_t)gridDim.y * ROWS) {
        A sum[ROWS] = {};
        for (int64_t begin = 0; begin < p.depth; begin += CHUNK) {
            const int count = p.depth - begin < CHUNK ? (int)(p.depth - begin) : CHUNK;
            VP w[VECTORS];
            VT x[ROWS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if ((v * WARP_SIZE + lane) * COUNT < count)
                    w[v] = *reinterpret_cast<const VP *>(weight + begin + (v * WARP_SIZE + lane) * COUNT);
            const int own = (int)threadIdx.x * COUNT;
#pragma unroll
            for (int r = 0; r < ROWS; r++) // a row that is not there: the last one
                if (own < count)
                    x[r] = *reinterpret_cast<const VT *>(
                        p.input + (first + r < p.rows ? first + r : p.rows - 1) * p.depth + begin + own);
            __syncthreads(); // the chunk before has been read
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (own < count)
                    *reinterpret_cast<VT *>(rows + r * CHUNK + own) = x[r];
            __syncthreads();
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int k = (v * WARP_SIZE + lane) * COUNT;
                if (k < count)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        const VT y = *reinterpret_cast<const VT *>(rows + r * CHUNK + k);
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            sum[r] += (A)element_of(w[v], e) * element_of(y, e);
                    }
            }
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
        if (lane % (WARP_SIZE / ROWS) == 0 && first + row < p.rows && column < p.columns) {
            const A bias = p.bias ? (A)load_as_accumulate(p.bias[column]) : A(0);
            p.output[(first + row) * p.columns + column] =
                store_from_accumulate<T>(excited<T>(sum[0] + bias, p.activation));
        }
    }
}

template <typename T, typename P, int COUNT>
__global__ void __launch_bounds__(SHORT_THREADS) excitation_short_kernel(const ExcitationProduct<T, P> p)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<P, COUNT> VP;
    constexpr int ROWS = SHORT_ROWS;
    __shared__ A rows[MOST_SHORT * ROWS]; // [k][row]
    const int64_t column = (int64_t)blockIdx.x * SHORT_THREADS + threadIdx.x;
    const P *const weight = p.weight + (column < p.columns ? column : p.columns - 1) * p.depth;
    const int depth = (int)p.depth;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.y * ROWS; first < p.rows; first += (int64_t)gridDim.y * ROWS) {
        __syncthreads(); // those before have been read
        for (int i = threadIdx.x; i < ROWS * depth; i += SHORT_THREADS) {
            const int r = i / depth, k = i - r * depth;
            const int64_t row = first + r < p.rows ? first + r : p.rows - 1;
            rows[k * ROWS + r] = load_as_accumulate(p.input[row * depth + k]);
        }
        A sum[ROWS] = {};
        const A bias = p.bias && column < p.columns ? (A)load_as_accumulate(p.bias[column]) : A(0);
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < depth; k += COUNT) {
            const VP w = *reinterpret_cast<const VP *>(weight + k);
#pragma unroll
            for (int e = 0; e < COUNT; e++)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sum[r] += (A)element_of(w, e) * rows[(k + e) * ROWS + r];
        }
        if (column < p.columns)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (first + r < p.rows)
                    p.output[(first + r) * p.columns + column] =
                        store_from_accumulate<T>(excited<T>(sum[r] + bias, p.activation));
    }
}

template <typename T, typename P>
static cuda_ops_status multiply_excitation(const ExcitationProduct<T, P> &p, cudaStream_t stream)
{
    constexpr int COUNT = 16 / sizeof(P) < 4 ? 2 : 4; // float64: 2
    const bool vectorised = p.depth % COUNT == 0 && is_aligned_16(p.input) && is_aligned_16(p.weight);
    const bool is_short = p.depth <= MOST_SHORT;
    const int64_t columns = ceil_div(p.columns, is_short ? SHORT_THREADS : EXCITATION_WARPS);
    const int64_t rows = ceil_div(p.rows, is_short ? SHORT_ROWS : EXCITATION_ROWS);
    if (columns > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const dim3 grid((unsigned int)columns, (unsigned int)(rows < MAX_GRID ? rows : MAX_GRID));
    if (is_short)
        launch_dependent(vectorised ? excitation_short_kernel<T, P, COUNT> : excitation_short_kernel<T, P, 1>, grid,
                         dim3(SHORT_THREADS), 0, stream, p);
    else
        launch_dependent(vectorised ? excitation_kernel<T, P, COUNT> : excitation_kernel<T, P, 1>, grid,
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
