// What linear_relu's backward begins with in the paths gemm and sm90:
//     masked = output <= 0 ? 0 : grad_output,  grad_bias = the column sums of masked
// A lane has an aligned 16-byte vector of a row and adds its warp's rows in float; a second kernel adds the blocks'
// sums in a fixed order. Further blocks of the same launch may round float32 weights to fp16 or bf16. Bound by memory:
// two reads and a write an element.
#include "common/aligned_vector.cuh"
#include "common/column_sums.cuh"
#include "common/common.cuh"
#include "common/prefetch.cuh"
#include "linear_relu/paths.h"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int64_t MOST_BLOCKS = 264;
static constexpr int ROWS_AHEAD = 4;
static constexpr int VECTORS_AHEAD = 4; // of weights, a thread

// Lanes for a row, a power of two; a warp takes WARP_SIZE / lanes rows at a time.
static int lanes_of(int64_t columns, int vector)
{
    int lanes = 1;
    while (lanes < WARP_SIZE && (int64_t)lanes * vector < columns)
        lanes *= 2;
    return lanes;
}

static int64_t blocks_of(int64_t rows, int lanes)
{
    const int64_t useful = ceil_div(rows, (int64_t)WARPS * (WARP_SIZE / lanes) * ROWS_AHEAD);
    return useful < MOST_BLOCKS ? useful : MOST_BLOCKS;
}

// Rounds weight to T: `vectors` 16-byte vectors of the result, the share of block `block` of `blocks`.
template <typename T>
__device__ __forceinline__ void round_weights(T *copy, const float *weight, int64_t vectors, int64_t block,
                                              int64_t blocks)
{
    constexpr int VECTOR = vector16<T>::size, PARTS = VECTOR / 4;
    for (int64_t first = block * THREADS * VECTORS_AHEAD + threadIdx.x; first < vectors;
         first += blocks * THREADS * VECTORS_AHEAD) {
        float4 from[VECTORS_AHEAD][PARTS];
#pragma unroll
        for (int i = 0; i < VECTORS_AHEAD; i++)
            if (first + i * THREADS < vectors)
#pragma unroll
                for (int e = 0; e < PARTS; e++)
                    from[i][e] = ((const float4 *)weight)[(first + i * THREADS) * PARTS + e];
#pragma unroll
        for (int i = 0; i < VECTORS_AHEAD; i++)
            if (first + i * THREADS < vectors) {
                vector16<T> to;
#pragma unroll
                for (int e = 0; e < VECTOR; e++) {
                    const float4 four = from[i][e / 4];
                    to.element[e] = store_from_accumulate<T>(e % 4 == 0   ? four.x
                                                             : e % 4 == 1 ? four.y
                                                             : e % 4 == 2 ? four.z
                                                                          : four.w);
                }
                ((vector16<T> *)copy)[first + i * THREADS] = to;
            }
    }
}

// blockIdx.y selects `lanes` vectors of each row. partials: [blocks][columns], or NULL. Blocks from `blocks` on, if
// there are any, round weights.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    linear_relu_mask_kernel(T *masked, float *partials, T *copy, const T *grad_output, const T *output,
                            const float *weight, int64_t rows, int64_t columns, int64_t weight_vectors, int blocks,
                            int lanes)
{
    constexpr int VECTOR = vector16<T>::size;
    __shared__ float shared[WARPS][WARP_SIZE * VECTOR];
    const bool rounds = (int)blockIdx.x >= blocks;
    if (rounds) { // weights do not depend on the predecessor, as masked does: prefetch this block's first
        constexpr int64_t BYTES = (int64_t)THREADS * VECTORS_AHEAD * VECTOR * (int64_t)sizeof(float);
        const int64_t begin = (((int64_t)blockIdx.x - blocks) * gridDim.y + blockIdx.y) * BYTES;
        const int64_t left = weight_vectors * VECTOR * (int64_t)sizeof(float) - begin;
        prefetch_lines((const char *)weight + begin, left < BYTES ? left : BYTES);
    }
    wait_for_predecessor();
    release_successor();
    if (rounds) {
        round_weights(copy, weight, weight_vectors, ((int64_t)blockIdx.x - blocks) * gridDim.y + blockIdx.y,
                      (int64_t)(gridDim.x - blocks) * gridDim.y);
        return;
    }
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, rows_of_warp = WARP_SIZE / lanes;
    const int64_t column = ((int64_t)blockIdx.y * lanes + lane % lanes) * VECTOR;
    const int64_t step = (int64_t)blocks * WARPS * rows_of_warp;
    float sums[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; e++)
        sums[e] = 0;
    if (column < columns)
        for (int64_t first = ((int64_t)blockIdx.x * WARPS + warp) * rows_of_warp + lane / lanes; first < rows;
             first += ROWS_AHEAD * step) {
            vector16<T> g[ROWS_AHEAD], y[ROWS_AHEAD];
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++)
                if (first + i * step < rows) {
                    const int64_t at = (first + i * step) * columns + column;
                    g[i] = *(const vector16<T> *)(grad_output + at);
                    y[i] = *(const vector16<T> *)(output + at);
                }
#pragma unroll
            for (int i = 0; i < ROWS_AHEAD; i++)
                if (first + i * step < rows) {
#pragma unroll
                    for (int e = 0; e < VECTOR; e++) {
                        const float value = load_as_accumulate(g[i].element[e]);
                        // NaN in the output lets the gradient through, as in relu.
                        const float kept = load_as_accumulate(y[i].element[e]) <= 0 ? 0.0f : value;
                        sums[e] += kept;
                        g[i].element[e] = store_from_accumulate<T>(kept);
                    }
                    *(vector16<T> *)(masked + (first + i * step) * columns + column) = g[i];
                }
        }
    if (partials == nullptr)
        return;
#pragma unroll
    for (int e = 0; e < VECTOR; e++) {
        for (int other = lanes; other < WARP_SIZE; other *= 2)
            sums[e] += __shfl_xor_sync(FULL_WARP, sums[e], other);
        shared[warp][lane * VECTOR + e] = sums[e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < lanes * VECTOR; i += THREADS) {
        const int64_t to = (int64_t)blockIdx.y * lanes * VECTOR + i;
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += shared[w][i];
        if (to < columns)
            partials[blockIdx.x * columns + to] = total;
    }
}

// Launches the kernel for those of masked, partials (*parts of them) and copy that are not NULL.
template <typename T>
static cuda_ops_status prepare(T *masked, float *partials, int64_t *parts, T *copy, const T *grad_output,
                               const T *output, const float *weight, int64_t rows, int64_t columns, int64_t weights,
                               cudaStream_t stream)
{
    constexpr int VECTOR = vector16<T>::size;
    const int lanes = masked ? lanes_of(columns, VECTOR) : 1;
    const int64_t blocks = masked ? blocks_of(rows, lanes) : 0;
    const int64_t column_blocks = masked ? ceil_div(columns, (int64_t)lanes * VECTOR) : 1;
    const int64_t vectors = copy ? weights / VECTOR : 0;
    const int64_t useful = ceil_div(ceil_div(vectors, THREADS * VECTORS_AHEAD), column_blocks);
    const int64_t rounding = useful < MOST_BLOCKS ? useful : MOST_BLOCKS;
    if ((masked && columns % VECTOR != 0) || (copy && weights % VECTOR != 0) || column_blocks > MAX_GRID ||
        !is_aligned_16(masked) || !is_aligned_16(grad_output) || !is_aligned_16(output) || !is_aligned_16(copy) ||
        !is_aligned_16(weight))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (parts)
        *parts = blocks;
    launch_dependent(linear_relu_mask_kernel<T>, dim3((unsigned int)(blocks + rounding), (unsigned int)column_blocks),
                     THREADS, 0, stream, masked, partials, copy, grad_output, output, weight, rows, columns, vectors,
                     (int)blocks, lanes);
    return launch_status();
}

template <typename T>
static cuda_ops_status mask(T *masked, void *grad_bias, float *partials, const T *grad_output, const T *output,
                            int64_t rows, int64_t columns, cuda_ops_dtype bias_dtype, cudaStream_t stream)
{
    int64_t blocks = 0;
    const cuda_ops_status status = prepare(masked, grad_bias ? partials : nullptr, &blocks, (T *)nullptr, grad_output,
                                           output, nullptr, rows, columns, 0, stream);
    if (status == CUDA_OPS_SUCCESS && grad_bias) {
        return bias_dtype == CUDA_OPS_FLOAT32
                   ? add_column_sums((float *)grad_bias, (const float *)partials, blocks, columns, stream)
                   : add_column_sums((T *)grad_bias, (const float *)partials, blocks, columns, stream);
    }
    return status;
}

int64_t linear_relu_mask_workspace(int64_t rows, int64_t out_features)
{
    return (rows < MOST_BLOCKS ? rows : MOST_BLOCKS) * out_features * (int64_t)sizeof(float);
}

cuda_ops_status linear_relu_mask(void *masked, void *grad_bias, void *workspace, const void *grad_output,
                                 const void *output, int64_t rows, int64_t out_features, cuda_ops_dtype dtype,
                                 cuda_ops_dtype parameter_dtype, cudaStream_t stream)
{
    if (parameter_dtype != dtype && parameter_dtype != CUDA_OPS_FLOAT32)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (rows == 0 || out_features == 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    float *const partials = (float *)workspace;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        return mask((float *)masked, grad_bias, partials, (const float *)grad_output, (const float *)output, rows,
                    out_features, parameter_dtype, stream);
    case CUDA_OPS_FLOAT16:
        return mask((__half *)masked, grad_bias, partials, (const __half *)grad_output, (const __half *)output, rows,
                    out_features, parameter_dtype, stream);
    case CUDA_OPS_BFLOAT16:
        return mask((__nv_bfloat16 *)masked, grad_bias, partials, (const __nv_bfloat16 *)grad_output,
                    (const __nv_bfloat16 *)output, rows, out_features, parameter_dtype, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status linear_relu_prepare(void *masked, void *partials, int64_t *parts, void *copy, const void *grad_output,
                                    const void *output, const void *weight, int64_t rows, int64_t in_features,
                                    int64_t out_features, cuda_ops_dtype dtype, cudaStream_t stream)
{
    const float *const w = copy ? (const float *)weight : nullptr;
    const int64_t weights = in_features * out_features;
    if (rows == 0 || weights == 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype == CUDA_OPS_FLOAT16)
        return prepare((__half *)masked, (float *)partials, parts, (__half *)copy, (const __half *)grad_output,
                       (const __half *)output, w, rows, out_features, weights, stream);
    if (dtype == CUDA_OPS_BFLOAT16)
        return prepare((__nv_bfloat16 *)masked, (float *)partials, parts, (__nv_bfloat16 *)copy,
                       (const __nv_bfloat16 *)grad_output, (const __nv_bfloat16 *)output, w, rows, out_features,
                       weights, stream);
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
