// attention_packed_bias: grad_bias of queries, keys and values (see attention_packed_bias.h): a third of grad_qkv is
// summed over its rows, by column_sums.cuh; the rest is zeros and the product of a row with a matrix, of which a warp's
// lanes take 32 columns and the block's warps the rows. Bound by memory: one read of the queries' gradient.
#include "cuda_ops/attention_packed_bias.h"

#include <string.h>

#include "common/column_sums.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 512, WARPS = THREADS / WARP_SIZE;

template <typename T>
__device__ __forceinline__ T load_from_l2(const T *from)
{
    if constexpr (sizeof(T) == 2) {
        const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short *>(from));
        T value;
        memcpy(&value, &bits, 2);
        return value;
    } else {
        return __ldcg(from);
    }
}

// Runs beside the first kernel of the sums, which releases this one only when all before it have ended: so nothing is
// waited for here before grad_next_bias and next_weight are read. From the L2 cache, where what those left is: only a
// wait would tell that the L1 cache holds nothing older.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attention_packed_bias_kernel(accumulate_type<T> *grad_bias, const accumulate_type<T> *grad_next_bias,
                                 const T *next_weight, int64_t features, int64_t outputs)
{
    typedef accumulate_type<T> A;
    constexpr int IN_FLIGHT = 16;
    __shared__ A shared[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * WARP_SIZE; first < features; first += (int64_t)gridDim.x * WARP_SIZE) {
        const int64_t column = first + lane;
        A sum = 0;
        if (column < features)
            for (int64_t i = warp; i < outputs; i += IN_FLIGHT * WARPS) {
                A product[IN_FLIGHT];
#pragma unroll
                for (int r = 0; r < IN_FLIGHT; r++) {
                    const int64_t row = i + r * WARPS;
                    product[r] = row < outputs
                                     ? load_from_l2(grad_next_bias + row) *
                                           load_as_accumulate(load_from_l2(next_weight + row * features + column))
                                     : A(0);
                }
#pragma unroll
                for (int r = 0; r < IN_FLIGHT; r++)
                    sum += product[r];
            }
        shared[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && column < features) {
            A total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += shared[w][lane];
            grad_bias[features + column] = 0;
            grad_bias[2 * features + column] = total;
        }
        __syncthreads();
    }
    wait_for_predecessor(); // the kernel behind this one reads what the one before leaves
}

extern "C" int64_t cuda_ops_attention_packed_bias_workspace_cuda(int64_t rows, int64_t features, cuda_ops_dtype dtype)
{
    return column_sums_workspace(rows, features, dtype);
}

extern "C" cuda_ops_status cuda_ops_attention_packed_bias_cuda(void *grad_bias, const void *grad_qkv,
                                                               const void *grad_next_bias, const void *next_weight,
                                                               void *workspace, int64_t rows, int64_t features,
                                                               int64_t outputs, cuda_ops_dtype dtype,
                                                               cuda_ops_stream stream)
{
    if (features == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        typedef accumulate_type<T> A;
        return column_sums((A *)grad_bias, workspace, (const T *)grad_qkv, rows, features, stream, 3 * features, [=] {
            launch_dependent(attention_packed_bias_kernel<T>, dim3(clamp_grid(ceil_div(features, WARP_SIZE))),
                             dim3(THREADS), 0, stream, (A *)grad_bias, (const A *)grad_next_bias,
                             (const T *)next_weight, features, outputs);
        });
    });
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
