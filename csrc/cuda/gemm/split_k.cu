// Split k: D = activation(alpha * sum over splits of partial + bias), and the preactivation where it is to be kept. A
// thread takes four elements of a row where rows are whole fours and aligned (not in float64), else one, adds the
// splits in order and has the loads of 16 of them in flight; eight warps share more splits of a small D. Bound by
// memory: reads 4 bytes (float64: 8) per element and split.
#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/paths.h"

static constexpr int THREADS = 256;

// D's elements from `i` on, of one row, of their sums.
template <typename T, int COUNT>
__device__ __forceinline__ void finish(void *d, aligned_vector<accumulate_type<T>, COUNT> &sum, const void *bias,
                                       const cuda_ops_gemm_problem &p, int64_t i)
{
    typedef accumulate_type<T> A;
    // Divisions of 64 bits take longer than the rest of it.
    const bool small = p.batch * p.m * p.n <= INT32_MAX;
    const int64_t row = small ? (int64_t)((uint32_t)i / (uint32_t)p.n) : i / p.n, column = i - row * p.n;
    const int64_t matrix = p.batch == 1 ? 0 : small ? (int64_t)((uint32_t)row / (uint32_t)p.m) : row / p.m;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        A &value = sum.element[e];
        value *= (A)p.alpha;
        if (bias)
            value += p.bias_dtype == CUDA_OPS_FLOAT32 ? ((const float *)bias)[column + e]
                                                      : load_as_accumulate(((const T *)bias)[column + e]);
    }
    const int64_t to = matrix * p.stride_d + (row - matrix * p.m) * p.ldd + column;
    const auto store = [&](void *output) {
        if (p.output_dtype == CUDA_OPS_FLOAT32) {
            aligned_vector<float, COUNT> values;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                values.element[e] = (float)sum.element[e];
            *(aligned_vector<float, COUNT> *)((float *)output + to) = values;
        } else {
            aligned_vector<T, COUNT> rounded;
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                rounded.element[e] = store_from_accumulate<T>(sum.element[e]);
                sum.element[e] = load_as_accumulate(rounded.element[e]);
            }
            *(aligned_vector<T, COUNT> *)((T *)output + to) = rounded;
        }
    };
    if (p.preactivation)
        store(p.preactivation);
    activate_all(sum.element, p.activation);
    store(d);
}

template <typename T, int COUNT>
__global__ void gemm_add_splits_kernel(void *d, const accumulate_type<T> *partial, const void *bias,
                                       const __grid_constant__ cuda_ops_gemm_problem p, int64_t splits)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<A, COUNT> Sums;
    constexpr int IN_FLIGHT = GEMM_SPLITS_IN_FLIGHT;
    wait_for_predecessor();
    release_successor();
    const int64_t count = p.batch * p.m * p.n;
    for (int64_t i = global_thread_index() * COUNT; i < count; i += global_thread_count() * COUNT) {
        Sums sum = {};
        for (int64_t first = 0; first < splits; first += IN_FLIGHT) {
            Sums part[IN_FLIGHT];
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                if (first + s < splits)
                    part[s] = *(const Sums *)(partial + (first + s) * count + i);
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                if (first + s < splits)
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        sum.element[e] += part[s].element[e];
        }
        finish<T, COUNT>(d, sum, bias, p, i);
    }
}

// Many splits of a small D: the elements are too few for as many threads as the GPU has, and each of them would wait
// for memory round after round. So eight warps share an element's splits, and their sums are added in order.
static constexpr int SHARES = 8, COLUMNS = WARP_SIZE;
static_assert(SHARES * COLUMNS == THREADS, "a warp for each share");

template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_add_many_splits_kernel(void *d, const accumulate_type<T> *partial, const void *bias,
                                const __grid_constant__ cuda_ops_gemm_problem p, int64_t splits)
{
    typedef accumulate_type<T> A;
    constexpr int IN_FLIGHT = GEMM_SPLITS_IN_FLIGHT;
    __shared__ A shares[SHARES][COLUMNS];
    const int share = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    const int64_t count = p.batch * p.m * p.n, i = (int64_t)blockIdx.x * COLUMNS + column;
    wait_for_predecessor();
    release_successor();
    A sum = 0;
    if (i < count)
        for (int64_t first = share; first < splits; first += IN_FLIGHT * SHARES) {
            A part[IN_FLIGHT];
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                part[s] = first + s * SHARES < splits ? partial[(first + s * SHARES) * count + i] : A(0);
#pragma unroll
            for (int s = 0; s < IN_FLIGHT; s++)
                sum += part[s];
        }
    shares[share][column] = sum;
    __syncthreads();
    if (share > 0 || i >= count)
        return;
    aligned_vector<A, 1> total = {};
#pragma unroll
    for (int s = 0; s < SHARES; s++)
        total.element[0] += shares[s][column];
    finish<T, 1>(d, total, bias, p, i);
}

int64_t gemm_splits_bytes(const cuda_ops_gemm_problem &p, int64_t splits)
{
    return splits > 1 ? splits * p.batch * p.m * p.n * (p.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

// Where threads that take four elements each would be fewer than those of 64 blocks.
static bool adds_many_splits(int64_t splits, int64_t count)
{
    return splits > GEMM_SPLITS_IN_FLIGHT && count < 64 * 4 * THREADS;
}

int64_t gemm_splits_in_flight(const cuda_ops_gemm_problem &p, int64_t splits)
{
    return GEMM_SPLITS_IN_FLIGHT * (adds_many_splits(splits, p.batch * p.m * p.n) ? SHARES : 1);
}

cuda_ops_status gemm_add_splits(const GemmCall &call, int64_t splits)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const bool fours = p.dtype != CUDA_OPS_FLOAT64 && p.n % 4 == 0 && p.ldd % 4 == 0 && p.stride_d % 4 == 0 &&
                       is_aligned_16(call.d) && is_aligned_16(p.preactivation) && is_aligned_16(call.workspace);
    CUDA_OPS_DISPATCH(p.dtype, T, {
        const int64_t count = p.batch * p.m * p.n;
        const accumulate_type<T> *const partial = (const accumulate_type<T> *)call.workspace;
        if (adds_many_splits(splits, count))
            launch_dependent(gemm_add_many_splits_kernel<T>, dim3((unsigned int)ceil_div(count, COLUMNS)), THREADS, 0,
                             call.stream, call.d, partial, call.bias, p, splits);
        else if (sizeof(T) != 8 && fours)
            launch_dependent(gemm_add_splits_kernel < T, sizeof(T) == 8 ? 1 : 4 >,
                             clamp_grid(ceil_div(count / 4, THREADS)), THREADS, 0, call.stream, call.d, partial,
                             call.bias, p, splits);
        else
            launch_dependent(gemm_add_splits_kernel<T, 1>, clamp_grid(ceil_div(count, THREADS)), THREADS, 0,
                             call.stream, call.d, partial, call.bias, p, splits);
    });
    return launch_status();
}
