// sgd: param -= lr * g over a list of parameters, with weight decay, momentum and Nesterov's variant (see sgd.h).
// One launch for the whole list: the addresses travel in the kernel's arguments, which hold 4 KB on every GPU, so that
// nothing is copied to the device and a CUDA graph can capture it. The parameters are cut into chunks; a block takes
// chunks in a grid-stride loop and finds the parameter of each by bisection. Bound by memory: 2 streams read and 1
// written, with momentum 3 and 2.
#include "cuda_ops/sgd.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/prefetch.cuh"
#include "common/tensor_list.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t CHUNK = 2048;
static constexpr int MAX_TENSORS = 96;

static constexpr uint8_t FIRST = 1;   // the momentum buffer holds nothing yet
static constexpr uint8_t ALIGNED = 2; // its arrays take 16-byte loads

template <typename T>
struct SgdList {
    T *params[MAX_TENSORS];
    const T *grads[MAX_TENSORS];
    T *buffers[MAX_TENSORS];
    int64_t counts[MAX_TENSORS];
    int32_t first_chunk[MAX_TENSORS]; // of all the list's chunks, the first of this parameter
    uint8_t flags[MAX_TENSORS];
    int32_t tensors;
    int32_t chunks;
};

template <typename A>
struct SgdScalars {
    A lr, momentum, fresh, weight_decay; // fresh = 1 - dampening
    const void *device_lr;
    bool device_lr_is_double, nesterov, maximize;
};
static_assert(sizeof(SgdList<double>) + sizeof(SgdScalars<double>) <= 4096, "kernel arguments hold 4 KB");

template <typename A>
__device__ __forceinline__ void sgd_element(A &param, A grad, A &buffer, const SgdScalars<A> &scalars, A lr, bool first)
{
    A g = scalars.maximize ? -grad : grad;
    if (scalars.weight_decay != A(0))
        g += scalars.weight_decay * param;
    if (scalars.momentum != A(0)) {
        buffer = first ? g : scalars.momentum * buffer + scalars.fresh * g;
        g = scalars.nesterov ? g + scalars.momentum * buffer : buffer;
    }
    param -= lr * g;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sgd_kernel(const __grid_constant__ SgdList<T> list, const __grid_constant__ SgdScalars<accumulate_type<T>> scalars)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size;
    const bool momentum = scalars.momentum != A(0);
    A lr = scalars.lr;
    release_successor();
    int32_t chunk = blockIdx.x;
    if (chunk < list.chunks) { // parameters were last used long ago, and nobody but this kernel writes them
        const int tensor = tensor_of(list, chunk);
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK, left = list.counts[tensor] - begin;
        const int64_t bytes = (left < CHUNK ? left : CHUNK) * (int64_t)sizeof(T);
        prefetch_lines(list.params[tensor] + begin, bytes);
        if (momentum)
            prefetch_lines(list.buffers[tensor] + begin, bytes);
    }
    wait_for_predecessor();
    if (scalars.device_lr)
        lr = scalars.device_lr_is_double ? A(*(const double *)scalars.device_lr) : A(*(const float *)scalars.device_lr);

    for (; chunk < list.chunks; chunk += gridDim.x) {
        const int tensor = tensor_of(list, chunk);
        T *const param = list.params[tensor];
        const T *const grad = list.grads[tensor];
        T *const buffer = list.buffers[tensor];
        const bool first = list.flags[tensor] & FIRST;
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK;
        const int64_t end = begin + CHUNK < list.counts[tensor] ? begin + CHUNK : list.counts[tensor];
        int64_t vectors_end = begin;
        if (list.flags[tensor] & ALIGNED) {
            vectors_end = begin + (end - begin) / SIZE * SIZE;
            for (int64_t i = begin + (int64_t)threadIdx.x * SIZE; i < vectors_end; i += THREADS * SIZE) {
                vector16<T> p = *reinterpret_cast<const vector16<T> *>(param + i);
                const vector16<T> g = *reinterpret_cast<const vector16<T> *>(grad + i);
                vector16<T> b;
                if (momentum && !first)
                    b = *reinterpret_cast<const vector16<T> *>(buffer + i);
#pragma unroll
                for (int e = 0; e < SIZE; e++) {
                    A x = load_as_accumulate(p.element[e]),
                      y = momentum && !first ? load_as_accumulate(b.element[e]) : A(0);
                    sgd_element(x, A(load_as_accumulate(g.element[e])), y, scalars, lr, first);
                    p.element[e] = store_from_accumulate<T>(x);
                    b.element[e] = store_from_accumulate<T>(y);
                }
                *reinterpret_cast<vector16<T> *>(param + i) = p;
                if (momentum)
                    *reinterpret_cast<vector16<T> *>(buffer + i) = b;
            }
        }
        for (int64_t i = vectors_end + threadIdx.x; i < end; i += THREADS) {
            A x = load_as_accumulate(param[i]), y = momentum && !first ? load_as_accumulate(buffer[i]) : A(0);
            sgd_element(x, A(load_as_accumulate(grad[i])), y, scalars, lr, first);
            param[i] = store_from_accumulate<T>(x);
            if (momentum)
                buffer[i] = store_from_accumulate<T>(y);
        }
    }
}

template <typename T>
static cuda_ops_status launch(const SgdList<T> &list, const SgdScalars<accumulate_type<T>> &scalars,
                              cudaStream_t stream)
{
    if (list.tensors == 0)
        return CUDA_OPS_SUCCESS;
    launch_dependent(sgd_kernel<T>, clamp_grid(list.chunks), THREADS, 0, stream, list, scalars);
    return launch_status();
}

template <typename T>
static cuda_ops_status sgd(void *const *params, const void *const *grads, void *const *buffers, const int64_t *counts,
                           const uint8_t *first, int64_t tensors, const cuda_ops_sgd_options *options, const void *lr,
                           cuda_ops_dtype lr_dtype, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    SgdScalars<A> scalars;
    scalars.lr = (A)options->lr;
    scalars.momentum = (A)options->momentum;
    scalars.fresh = (A)(1 - options->dampening);
    scalars.weight_decay = (A)options->weight_decay;
    scalars.device_lr = lr;
    scalars.device_lr_is_double = lr_dtype == CUDA_OPS_FLOAT64;
    scalars.nesterov = options->nesterov;
    scalars.maximize = options->maximize;

    SgdList<T> list = {};
    for (int64_t i = 0; i < tensors; i++) {
        if (counts[i] == 0)
            continue;
        const int64_t chunks = ceil_div(counts[i], CHUNK);
        // Chunks are counted in 32 bits: 2^42 elements a launch.
        if (chunks > INT32_MAX - MAX_GRID)
            return CUDA_OPS_INVALID_ARGUMENT;
        if (list.tensors == MAX_TENSORS || list.chunks > INT32_MAX - MAX_GRID - chunks) {
            const cuda_ops_status status = launch(list, scalars, stream);
            if (status != CUDA_OPS_SUCCESS)
                return status;
            list.tensors = list.chunks = 0;
        }
        const int at = list.tensors++;
        list.params[at] = (T *)params[i];
        list.grads[at] = (const T *)grads[i];
        list.buffers[at] = buffers ? (T *)buffers[i] : nullptr;
        list.counts[at] = counts[i];
        list.first_chunk[at] = list.chunks;
        // A missing buffer has address 0, which is aligned.
        const bool aligned =
            is_aligned_16(list.params[at]) && is_aligned_16(list.grads[at]) && is_aligned_16(list.buffers[at]);
        list.flags[at] = (uint8_t)((first[i] ? FIRST : 0) | (aligned ? ALIGNED : 0));
        list.chunks += (int32_t)chunks;
    }
    return launch(list, scalars, stream);
}

extern "C" cuda_ops_status cuda_ops_sgd_cuda(void *const *params, const void *const *grads, void *const *buffers,
                                             const int64_t *counts, const uint8_t *first, int64_t tensors,
                                             const cuda_ops_sgd_options *options, const void *lr,
                                             cuda_ops_dtype lr_dtype, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (lr && lr_dtype != CUDA_OPS_FLOAT32 && lr_dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T,
                      return sgd<T>(params, grads, buffers, counts, first, tensors, options, lr, lr_dtype, stream));
    return CUDA_OPS_SUCCESS;
}
