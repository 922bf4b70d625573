// Split k: D = activation(alpha * sum over splits, in order, of partial + bias), and the preactivation where it is to
// be kept. One thread an element. Bound by memory: reads 4 bytes (float64: 8) per element and split.
#include "common/activation.cuh"
#include "common/common.cuh"
#include "gemm/paths.h"

static constexpr int THREADS = 256;

template <typename T>
__global__ void gemm_add_splits_kernel(void *d, const accumulate_type<T> *partial, const void *bias,
                                       const __grid_constant__ cuda_ops_gemm_problem p, int64_t splits)
{
    typedef accumulate_type<T> A;
    wait_for_predecessor();
    release_successor();
    const int64_t count = p.batch * p.m * p.n;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        A sum = partial[i];
        for (int64_t split = 1; split < splits; split++)
            sum += partial[split * count + i];
        const int64_t row = i / p.n, column = i - row * p.n, matrix = row / p.m;
        sum *= (A)p.alpha;
        if (bias)
            sum += p.bias_dtype == CUDA_OPS_FLOAT32 ? ((const float *)bias)[column]
                                                    : load_as_accumulate(((const T *)bias)[column]);
        const int64_t to = matrix * p.stride_d + (row - matrix * p.m) * p.ldd + column;
        const auto store = [&](void *output) {
            if (p.output_dtype == CUDA_OPS_FLOAT32) {
                ((float *)output)[to] = (float)sum;
            } else {
                const T rounded = store_from_accumulate<T>(sum);
                ((T *)output)[to] = rounded;
                sum = load_as_accumulate(rounded);
            }
        };
        if (p.preactivation)
            store(p.preactivation);
        sum = activate(sum, p.activation);
        store(d);
    }
}

int64_t gemm_splits_bytes(const cuda_ops_gemm_problem &p, int64_t splits)
{
    return splits > 1 ? splits * p.batch * p.m * p.n * (p.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

cuda_ops_status gemm_add_splits(const GemmCall &call, int64_t splits)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const dim3 grid(clamp_grid(ceil_div(p.batch * p.m * p.n, THREADS)));
    CUDA_OPS_DISPATCH(p.dtype, T,
                      launch_dependent(gemm_add_splits_kernel<T>, grid, THREADS, 0, call.stream, call.d,
                                       (const accumulate_type<T> *)call.workspace, call.bias, p, splits));
    return launch_status();
}
