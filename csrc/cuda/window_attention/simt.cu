// window_attention, simt path: any dtype, window and head. A warp has a query at a time, its lanes the keys, for which a
// row of weights lies in shared memory, and then the output's elements; backward goes over the window once by queries,
// for grad_query and the bias's gradient, and once by keys, with every row's largest score, sum and mean slope kept.
// Queries, keys and values lie in shared memory too where they fit. Bound by shared memory.
#include <math_constants.h>

#include "common/common.cuh"
#include "window_attention/paths.h"

static constexpr int SIMT_WARPS = 4;
static constexpr int SIMT_SHARED = 48 << 10;

template <typename T>
struct SimtWindows {
    typedef accumulate_type<T> A;
    cuda_ops_windows w;
    const T *qkv, *grad_output;
    T *result; // output, or grad_qkv
    const A *bias;
    A *partials;
    A scale;
    int64_t count, slots;
    int positions;
};

__device__ __forceinline__ float exponential(float x)
{
    return expf(x);
}
__device__ __forceinline__ double exponential(double x)
{
    return exp(x);
}

// Elements of a window's pixels: array 0 is query, 1 key, 2 value, 3 grad_output.
template <typename T, bool STAGED>
struct WindowElements {
    typedef accumulate_type<T> A;
    const SimtWindows<T> &a;
    const A *staged;
    int64_t head;
    cuda_ops_window window;

    __device__ int pitch() const
    {
        return (int)a.w.head_dim + 1;
    }
    __device__ int64_t pixel(int position) const
    {
        const int y = position / (int)a.w.window_width, x = position - y * (int)a.w.window_width;
        return cuda_ops_window_pixel(&a.w, &window, y, x);
    }
    __device__ int part(int position) const
    {
        const int y = position / (int)a.w.window_width, x = position - y * (int)a.w.window_width;
        return cuda_ops_window_part(&window, y, x);
    }
    __device__ const T *from(int array, int position) const
    {
        const int64_t channels = a.w.heads * a.w.head_dim, first = head * a.w.head_dim;
        return array == 3 ? a.grad_output + pixel(position) * channels + first
                          : a.qkv + (pixel(position) * 3 + array) * channels + first;
    }
    // A row's elements one after the other.
    struct Row {
        const A *staged;
        const T *global;
        __device__ A operator[](int64_t d) const
        {
            if constexpr (STAGED)
                return staged[d];
            else
                return load_as_accumulate(global[d]);
        }
    };
    __device__ Row row(int array, int position) const
    {
        if constexpr (STAGED)
            return {staged + ((int64_t)array * a.positions + position) * pitch(), nullptr};
        else
            return {nullptr, from(array, position)};
    }
    __device__ A dot(const Row &x, const Row &y) const
    {
        A sum = 0;
        for (int64_t d = 0; d < a.w.head_dim; d++)
            sum += x[d] * y[d];
        return sum;
    }
    // i: the query.
    __device__ A score(const Row &query, const Row &key, int i, int j) const
    {
        A score = dot(query, key) * a.scale;
        if (a.bias)
            score += a.bias[(head * a.positions + i) * a.positions + j];
        return part(i) == part(j) ? score : score + CUDA_OPS_WINDOW_APART;
    }
};

// Brings the arrays of a window to shared memory.
template <typename T, bool STAGED>
__device__ void stage_window(const WindowElements<T, STAGED> &of, accumulate_type<T> *to, int arrays)
{
    if constexpr (STAGED) {
        __syncthreads(); // those of the window before have been read
        const int lane = (int)threadIdx.x % WARP_SIZE, warps = (int)blockDim.x / WARP_SIZE;
        for (int row = (int)threadIdx.x / WARP_SIZE; row < arrays * of.a.positions; row += warps) {
            const T *const from = of.from(row / of.a.positions, row % of.a.positions);
            for (int d = lane; d < of.a.w.head_dim; d += WARP_SIZE)
                to[row * of.pitch() + d] = load_as_accumulate(from[d]);
        }
        __syncthreads();
    }
}

template <typename T, bool STAGED>
__global__ void window_attention_forward_kernel(const SimtWindows<T> a)
{
    typedef accumulate_type<T> A;
    extern __shared__ double window_memory[];
    const int lane = (int)threadIdx.x % WARP_SIZE, warp = (int)threadIdx.x / WARP_SIZE;
    const int warps = (int)blockDim.x / WARP_SIZE, positions = a.positions;
    A *const weights = reinterpret_cast<A *>(window_memory) + warp * positions;
    A *const staged = reinterpret_cast<A *>(window_memory) + warps * positions;
    wait_for_predecessor();
    release_successor();
    for (int64_t unit = blockIdx.x; unit < a.count * a.w.heads; unit += gridDim.x) {
        const int64_t number = unit / a.w.heads;
        const WindowElements<T, STAGED> of = {a, staged, unit - number * a.w.heads, cuda_ops_window_at(&a.w, number)};
        stage_window(of, staged, 3);
        for (int i = warp; i < positions; i += warps) {
            const auto query = of.row(0, i);
            A largest = -CUDART_INF_F, total = 0;
            for (int j = lane; j < positions; j += WARP_SIZE) {
                const A score = of.score(query, of.row(1, j), i, j);
                weights[j] = score;
                largest = score > largest || score != score ? score : largest;
            }
            largest = warp_max(largest);
            for (int j = lane; j < positions; j += WARP_SIZE) {
                weights[j] = exponential(weights[j] - largest);
                total += weights[j];
            }
            total = warp_sum(total);
            __syncwarp();
            T *const to = a.result + (of.pixel(i) * a.w.heads + of.head) * a.w.head_dim;
            for (int64_t d = lane; d < a.w.head_dim; d += WARP_SIZE) {
                A sum = 0;
                for (int j = 0; j < positions; j++)
                    sum += weights[j] * of.row(2, j)[d];
                to[d] = store_from_accumulate<T>(sum / total);
            }
            __syncwarp();
        }
    }
}

template <typename T, bool STAGED>
__global__ void window_attention_backward_kernel(const SimtWindows<T> a)
{
    typedef accumulate_type<T> A;
    extern __shared__ double window_memory[];
    const int lane = (int)threadIdx.x % WARP_SIZE, warp = (int)threadIdx.x / WARP_SIZE;
    const int warps = (int)blockDim.x / WARP_SIZE, positions = a.positions;
    A *const memory = reinterpret_cast<A *>(window_memory);
    A *const largest_of = memory, *const factor_of = memory + positions, *const delta_of = memory + 2 * positions;
    A *const weights = memory + (3 + 2 * warp) * positions, *const slopes = weights + positions;
    A *const staged = memory + (3 + 2 * warps) * positions;
    const int64_t head = blockIdx.x % a.w.heads, slot = blockIdx.x / a.w.heads;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = slot; number < a.count; number += a.slots) {
        const WindowElements<T, STAGED> of = {a, staged, head, cuda_ops_window_at(&a.w, number)};
        const auto result = [&](int array, int position) {
            return a.result + ((of.pixel(position) * 3 + array) * a.w.heads + head) * a.w.head_dim;
        };
        stage_window(of, staged, 4);
        for (int i = warp; i < positions; i += warps) {
            const auto query = of.row(0, i), grad = of.row(3, i);
            A largest = -CUDART_INF_F, total = 0, delta = 0;
            for (int j = lane; j < positions; j += WARP_SIZE) {
                const A score = of.score(query, of.row(1, j), i, j);
                weights[j] = score;
                slopes[j] = of.dot(grad, of.row(2, j));
                largest = score > largest || score != score ? score : largest;
            }
            largest = warp_max(largest);
            for (int j = lane; j < positions; j += WARP_SIZE) {
                weights[j] = exponential(weights[j] - largest);
                total += weights[j];
            }
            const A factor = A(1) / warp_sum(total);
            for (int j = lane; j < positions; j += WARP_SIZE)
                delta += weights[j] * factor * slopes[j];
            delta = warp_sum(delta);
            if (lane == 0)
                largest_of[i] = largest, factor_of[i] = factor, delta_of[i] = delta;
            for (int j = lane; j < positions; j += WARP_SIZE) {
                slopes[j] = weights[j] * factor * (slopes[j] - delta);
                if (a.partials) { // the same thread's in every window
                    A *const partial = a.partials + ((slot * a.w.heads + head) * positions + i) * positions + j;
                    *partial = number == slot ? slopes[j] : *partial + slopes[j];
                }
            }
            __syncwarp();
            for (int64_t d = lane; d < a.w.head_dim; d += WARP_SIZE) {
                A sum = 0;
                for (int j = 0; j < positions; j++)
                    sum += slopes[j] * of.row(1, j)[d];
                result(0, i)[d] = store_from_accumulate<T>(sum * a.scale);
            }
            __syncwarp();
        }
        __syncthreads();
        for (int j = warp; j < positions; j += warps) {
            const auto key = of.row(1, j), value = of.row(2, j);
            for (int i = lane; i < positions; i += WARP_SIZE) {
                const A score = of.score(of.row(0, i), key, i, j);
                weights[i] = exponential(score - largest_of[i]) * factor_of[i];
                slopes[i] = weights[i] * (of.dot(of.row(3, i), value) - delta_of[i]);
            }
            __syncwarp();
            for (int64_t d = lane; d < a.w.head_dim; d += WARP_SIZE) {
                A of_key = 0, of_value = 0;
                for (int i = 0; i < positions; i++) {
                    of_key += slopes[i] * of.row(0, i)[d];
                    of_value += weights[i] * of.row(3, i)[d];
                }
                result(1, j)[d] = store_from_accumulate<T>(of_key * a.scale);
                result(2, j)[d] = store_from_accumulate<T>(of_value);
            }
            __syncwarp();
        }
        __syncthreads();
    }
}

template <typename T>
static cuda_ops_status launch_simt(const WindowCall &call, const Device &device)
{
    typedef accumulate_type<T> A;
    SimtWindows<T> a = {};
    a.w = call.windows;
    a.qkv = (const T *)call.qkv, a.grad_output = (const T *)call.grad_output;
    a.result = (T *)(call.backward ? call.grad_qkv : call.output);
    a.bias = (const A *)call.bias, a.partials = call.grad_bias ? (A *)call.workspace : nullptr;
    a.scale = (A)a.w.scale;
    a.count = cuda_ops_window_count(&a.w);
    a.positions = (int)cuda_ops_window_positions(&a.w);
    a.slots = window_slots(a.w, device);
    int warps = SIMT_WARPS;
    const auto row_bytes = [&] { return (call.backward ? 3 + 2 * warps : warps) * a.positions * (int)sizeof(A); };
    while (row_bytes() > SIMT_SHARED)
        warps /= 2;
    const int64_t tile_bytes = (call.backward ? 4 : 3) * a.positions * (a.w.head_dim + 1) * (int64_t)sizeof(A);
    const bool staged = row_bytes() + tile_bytes <= SIMT_SHARED;
    const auto forward = staged ? window_attention_forward_kernel<T, true> : window_attention_forward_kernel<T, false>;
    const auto backward =
        staged ? window_attention_backward_kernel<T, true> : window_attention_backward_kernel<T, false>;
    const int64_t blocks = call.backward ? a.slots * a.w.heads : a.count * a.w.heads;
    if (call.backward && blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const dim3 grid(call.backward ? (unsigned int)blocks : clamp_grid(blocks)), block(warps * WARP_SIZE);
    launch_dependent(call.backward ? backward : forward, grid, block, row_bytes() + (staged ? tile_bytes : 0),
                     call.stream, a);
    const cuda_ops_status status = launch_status();
    return status == CUDA_OPS_SUCCESS && call.grad_bias ? window_bias_sums(call, a.slots) : status;
}

cuda_ops_status window_attention_simt(const WindowCall &call, const Device &device)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_simt<T>(call, device));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
