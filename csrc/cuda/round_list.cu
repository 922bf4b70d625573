// round_list: outputs[i] = inputs[i], rounded, for a list of float32 arrays (see round_list.h).
// One launch for the list, as in clip_grad_norm.cu: addresses travel in the kernel's arguments, arrays are cut into
// chunks, a block takes one and finds its array by bisection. All loads of a thread are under way before its first
// store. Bound by memory: 4 bytes read and 2 written an element.
#include "cuda_ops/round_list.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/tensor_list.cuh"

static constexpr int THREADS = 256;
static constexpr int VECTORS = 2; // of a thread, 8 elements each
static constexpr int64_t CHUNK = 8 * VECTORS * THREADS;
static constexpr int MAX_TENSORS = 128;

template <typename T>
struct RoundList {
    T *outputs[MAX_TENSORS];
    const float *inputs[MAX_TENSORS];
    int64_t counts[MAX_TENSORS];
    int32_t first_chunk[MAX_TENSORS]; // of all the list's chunks, the first of this array
    bool aligned[MAX_TENSORS];
    int32_t tensors, chunks;
};
static_assert(sizeof(RoundList<__half>) <= 4096, "kernel arguments hold 4 KB");

template <typename T>
__global__ void __launch_bounds__(THREADS) round_list_kernel(const __grid_constant__ RoundList<T> list)
{
    typedef vector16<float> V;
    wait_for_predecessor();
    release_successor();
    for (int32_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int tensor = tensor_of(list, chunk);
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK, left = list.counts[tensor] - begin;
        const float *const input = list.inputs[tensor] + begin;
        T *const output = list.outputs[tensor] + begin;
        if (list.aligned[tensor] && left >= CHUNK) {
            V halves[VECTORS][2];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    halves[v][h] = reinterpret_cast<const V *>(input)[2 * (threadIdx.x + v * THREADS) + h];
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                float values[8];
#pragma unroll
                for (int e = 0; e < 8; e++)
                    values[e] = halves[v][e / 4].element[e % 4];
                store_vector(reinterpret_cast<vector16<T> *>(output) + threadIdx.x + v * THREADS, vector_of<T>(values));
            }
            continue;
        }
        for (int64_t i = threadIdx.x; i < left && i < CHUNK; i += THREADS)
            output[i] = store_from_accumulate<T>(input[i]);
    }
}

template <typename T>
static cuda_ops_status launch(const RoundList<T> &list, cudaStream_t stream)
{
    launch_dependent(round_list_kernel<T>, dim3(clamp_grid(list.chunks)), dim3(THREADS), 0, stream, list);
    return launch_status();
}

template <typename T>
static cuda_ops_status round_list(void *const *outputs, const float *const *inputs, const int64_t *counts,
                                  int64_t tensors, cudaStream_t stream)
{
    RoundList<T> list = {};
    for (int64_t i = 0; i < tensors; i++) {
        const int64_t chunks = ceil_div(counts[i], CHUNK);
        if (chunks > INT32_MAX - MAX_GRID) // they are counted in 32 bits: 2^43 elements a launch
            return CUDA_OPS_INVALID_ARGUMENT;
        if (chunks == 0)
            continue;
        if (list.tensors == MAX_TENSORS || list.chunks > INT32_MAX - MAX_GRID - chunks) {
            const cuda_ops_status status = launch(list, stream);
            if (status != CUDA_OPS_SUCCESS)
                return status;
            list.tensors = list.chunks = 0;
        }
        const int at = list.tensors++;
        list.outputs[at] = (T *)outputs[i];
        list.inputs[at] = inputs[i];
        list.counts[at] = counts[i];
        list.first_chunk[at] = list.chunks;
        list.aligned[at] = is_aligned_16(outputs[i]) && is_aligned_16(inputs[i]);
        list.chunks += (int32_t)chunks;
    }
    return list.tensors > 0 ? launch(list, stream) : CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_round_list_cuda(void *const *outputs, const float *const *inputs,
                                                    const int64_t *counts, int64_t tensors, cuda_ops_dtype dtype,
                                                    cuda_ops_stream stream)
{
    if (dtype == CUDA_OPS_FLOAT16)
        return round_list<__half>(outputs, inputs, counts, tensors, stream);
    if (dtype == CUDA_OPS_BFLOAT16)
        return round_list<__nv_bfloat16>(outputs, inputs, counts, tensors, stream);
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
