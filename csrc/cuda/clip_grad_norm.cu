// clip_grad_norm: the norm of a list of gradients, and their scaling by it (see clip_grad_norm.h).
// Two launches, both as in sgd.cu: addresses in the kernel's arguments, gradients cut into chunks, which blocks go
// through in a grid-stride loop. The first leaves a partial a block, in double; each block of the second adds up all of
// them, the same way, so that nobody has to wait for one that does it. Bound by memory: one stream read, then one read
// and written, unless the factor is 1, which nobody but the device knows.
#include "cuda_ops/clip_grad_norm.h"

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/tensor_list.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t CHUNK = 4096;
static constexpr int MAX_TENSORS = 180;
// Of one launch: enough to fill the largest GPU, and few enough that every block of the second adds them up in passing.
static constexpr int64_t MAX_PARTIALS = 1024;

template <typename T>
struct GradList {
    T *grads[MAX_TENSORS];
    int64_t counts[MAX_TENSORS];
    int32_t first_chunk[MAX_TENSORS]; // of all the list's chunks, the first of this gradient
    bool aligned[MAX_TENSORS];
    int32_t tensors, chunks;
};
static_assert(sizeof(GradList<double>) + 64 <= 4096, "kernel arguments hold 4 KB");

enum NormKind { SUM_OF_SQUARES, SUM_OF_MAGNITUDES, LARGEST, SUM_OF_POWERS };

static inline NormKind kind_of(double norm_type)
{
    return norm_type == 2     ? SUM_OF_SQUARES
           : norm_type == 1   ? SUM_OF_MAGNITUDES
           : isinf(norm_type) ? LARGEST
                              : SUM_OF_POWERS;
}

// NaN stays.
template <typename A>
__device__ __forceinline__ A larger(A a, A b)
{
    return b > a || b != b ? b : a;
}

template <NormKind KIND, typename A>
__device__ __forceinline__ void add_gradient(A &sum, A g, A norm_type)
{
    if constexpr (KIND == SUM_OF_SQUARES)
        sum += g * g;
    else if constexpr (KIND == SUM_OF_MAGNITUDES)
        sum += fabs(g);
    else if constexpr (KIND == LARGEST)
        sum = larger(sum, A(fabs(g)));
    else
        sum += pow(fabs(g), norm_type);
}

// Of a whole block; every thread gets it. `scratch`: 32 doubles of shared memory.
template <bool MAXIMUM>
__device__ __forceinline__ double block_total(double value, double *scratch)
{
    if constexpr (!MAXIMUM) {
        return block_sum(value, scratch);
    } else {
        const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
        value = warp_max(value);
        if (lane == 0)
            scratch[warp] = value;
        __syncthreads();
        value = warp_max(lane < THREADS / WARP_SIZE ? scratch[lane] : 0.0); // magnitudes are not below 0
        __syncthreads();
        return value;
    }
}

// partials[block] = the sum over the block's chunks.
template <typename T, NormKind KIND>
__global__ void __launch_bounds__(THREADS)
    grad_norm_kernel(double *partials, const __grid_constant__ GradList<T> list, double norm_type)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int VECTORS = CHUNK / (THREADS * V::size);
    __shared__ double scratch[WARP_SIZE];
    double total = 0;
    wait_for_predecessor();
    release_successor();
    for (int32_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int tensor = tensor_of(list, chunk);
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK, left = list.counts[tensor] - begin;
        const T *const grad = list.grads[tensor] + begin;
        const int count = (int)(left < CHUNK ? left : CHUNK);
        A sum = 0;
        int vectorised_end = 0;
        if (list.aligned[tensor] && count == CHUNK) {
            V vectors[VECTORS]; // all are loading before the first is looked at
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                vectors[v] = reinterpret_cast<const V *>(grad)[threadIdx.x + v * THREADS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    add_gradient<KIND>(sum, element_of(vectors[v], e), A(norm_type));
            vectorised_end = (int)CHUNK;
        }
        for (int i = vectorised_end + threadIdx.x; i < count; i += THREADS)
            add_gradient<KIND>(sum, load_as_accumulate(grad[i]), A(norm_type));
        total = KIND == LARGEST ? larger(total, double(sum)) : total + double(sum);
    }
    total = block_total < KIND == LARGEST > (total, scratch);
    if (threadIdx.x == 0)
        partials[blockIdx.x] = total;
}

__device__ __forceinline__ void store_norm(void *norm, cuda_ops_dtype dtype, double value)
{
    if (dtype == CUDA_OPS_FLOAT32)
        *(float *)norm = (float)value;
    else if (dtype == CUDA_OPS_FLOAT64)
        *(double *)norm = value;
    else if (dtype == CUDA_OPS_FLOAT16)
        *(__half *)norm = __float2half_rn((float)value);
    else
        *(__nv_bfloat16 *)norm = __float2bfloat16_rn((float)value);
}

struct ClipScalars {
    void *norm;
    const double *partials;
    int64_t partial_count;
    double norm_type, max_norm;
    cuda_ops_dtype norm_dtype;
};

// What the partials come to; every thread of the block gets the same bits, and so does every block.
__device__ __forceinline__ double total_norm(const ClipScalars &scalars, double *scratch)
{
    const bool largest = isinf(scalars.norm_type);
    double total = 0;
    for (int64_t i = threadIdx.x; i < scalars.partial_count; i += THREADS) {
        const double partial = scalars.partials[i];
        total = largest ? larger(total, partial) : total + partial;
    }
    if (largest)
        return block_total<true>(total, scratch);
    total = block_total<false>(total, scratch);
    return scalars.norm_type == 2 ? sqrt(total) : scalars.norm_type == 1 ? total : pow(total, 1 / scalars.norm_type);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    clip_grads_kernel(const __grid_constant__ GradList<T> list, const __grid_constant__ ClipScalars scalars)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int VECTORS = CHUNK / (THREADS * V::size);
    __shared__ double scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    const double norm = total_norm(scalars, scratch);
    if (scalars.norm && blockIdx.x == 0 && threadIdx.x == 0)
        store_norm(scalars.norm, scalars.norm_dtype, norm);
    const double quotient = scalars.max_norm / (norm + 1e-6);
    if (quotient >= 1) // not with NaN
        return;
    const A factor = A(quotient);
    for (int32_t chunk = blockIdx.x; chunk < list.chunks; chunk += gridDim.x) {
        const int tensor = tensor_of(list, chunk);
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK, left = list.counts[tensor] - begin;
        T *const grad = list.grads[tensor] + begin;
        const int count = (int)(left < CHUNK ? left : CHUNK);
        int vectorised_end = 0;
        if (list.aligned[tensor] && count == CHUNK) {
            V vectors[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                vectors[v] = reinterpret_cast<const V *>(grad)[threadIdx.x + v * THREADS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                A values[V::size];
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    values[e] = element_of(vectors[v], e) * factor;
                reinterpret_cast<V *>(grad)[threadIdx.x + v * THREADS] = vector_of<T>(values);
            }
            vectorised_end = (int)CHUNK;
        }
        for (int i = vectorised_end + threadIdx.x; i < count; i += THREADS)
            grad[i] = store_from_accumulate<T>(load_as_accumulate(grad[i]) * factor);
    }
}

// --- launchers ------------------------------------------------------------------------------------------------------

static inline int64_t chunks_of(int64_t count)
{
    return ceil_div(count, CHUNK);
}

static inline int64_t partials_of(int64_t chunks)
{
    return chunks < MAX_PARTIALS ? chunks : MAX_PARTIALS;
}

// Calls launch(list) for gradients [begin, end) at a time, as many as one launch takes; the chunks of each launch are
// known without the addresses.
template <typename Launch>
static cuda_ops_status for_lists(const int64_t *counts, int64_t tensors, Launch launch)
{
    int64_t begin = 0, taken = 0, chunks = 0;
    for (int64_t i = 0; i < tensors; i++) {
        const int64_t more = chunks_of(counts[i]);
        // Chunks are counted in 32 bits: 2^43 elements a launch.
        if (more > INT32_MAX - MAX_GRID)
            return CUDA_OPS_INVALID_ARGUMENT;
        if (more > 0 && (taken == MAX_TENSORS || chunks > INT32_MAX - MAX_GRID - more)) {
            const cuda_ops_status status = launch(begin, i, chunks);
            if (status != CUDA_OPS_SUCCESS)
                return status;
            begin = i, taken = chunks = 0;
        }
        taken += more > 0;
        chunks += more;
    }
    return chunks > 0 ? launch(begin, tensors, chunks) : CUDA_OPS_SUCCESS;
}

template <typename T>
static GradList<T> list_of(void *const *grads, const int64_t *counts, int64_t begin, int64_t end)
{
    GradList<T> list = {};
    for (int64_t i = begin; i < end; i++) {
        if (counts[i] == 0)
            continue;
        const int at = list.tensors++;
        list.grads[at] = (T *)grads[i];
        list.counts[at] = counts[i];
        list.first_chunk[at] = list.chunks;
        list.aligned[at] = is_aligned_16(grads[i]);
        list.chunks += (int32_t)chunks_of(counts[i]);
    }
    return list;
}

template <typename T, NormKind KIND>
static cuda_ops_status grad_norm(double *partials, void *const *grads, const int64_t *counts, int64_t tensors,
                                 double norm_type, cudaStream_t stream)
{
    return for_lists(counts, tensors, [&](int64_t begin, int64_t end, int64_t chunks) {
        const int64_t blocks = partials_of(chunks);
        launch_dependent(grad_norm_kernel<T, KIND>, dim3((unsigned int)blocks), dim3(THREADS), 0, stream, partials,
                         list_of<T>(grads, counts, begin, end), norm_type);
        partials += blocks;
        return launch_status();
    });
}

extern "C" int64_t cuda_ops_grad_norm_partials_cuda(const int64_t *counts, int64_t tensors)
{
    int64_t partials = 0;
    for_lists(counts, tensors, [&](int64_t, int64_t, int64_t chunks) {
        partials += partials_of(chunks);
        return CUDA_OPS_SUCCESS;
    });
    return partials;
}

extern "C" cuda_ops_status cuda_ops_grad_norm_cuda(double *partials, const void *const *grads, const int64_t *counts,
                                                   int64_t tensors, double norm_type, cuda_ops_dtype dtype,
                                                   cuda_ops_stream stream)
{
    if (!(norm_type > 0))
        return CUDA_OPS_INVALID_ARGUMENT;
    void *const *const list = const_cast<void *const *>(grads); // a list's type serves both kernels
    CUDA_OPS_DISPATCH(
        dtype, T, switch (kind_of(norm_type)) {
            case SUM_OF_SQUARES:
                return grad_norm<T, SUM_OF_SQUARES>(partials, list, counts, tensors, norm_type, stream);
            case SUM_OF_MAGNITUDES:
                return grad_norm<T, SUM_OF_MAGNITUDES>(partials, list, counts, tensors, norm_type, stream);
            case LARGEST:
                return grad_norm<T, LARGEST>(partials, list, counts, tensors, norm_type, stream);
            default:
                return grad_norm<T, SUM_OF_POWERS>(partials, list, counts, tensors, norm_type, stream);
        });
    return CUDA_OPS_SUCCESS;
}

template <typename T>
static cuda_ops_status clip_grads(ClipScalars scalars, void *const *grads, const int64_t *counts, int64_t tensors,
                                  cudaStream_t stream)
{
    const auto launch = [&](const GradList<T> &list) {
        // Blocks that stay: each adds up the partials once.
        const int64_t blocks = list.chunks < 1 ? 1 : partials_of(list.chunks);
        launch_dependent(clip_grads_kernel<T>, dim3((unsigned int)blocks), dim3(THREADS), 0, stream, list, scalars);
        scalars.norm = nullptr; // the first one has written it
        return launch_status();
    };
    const cuda_ops_status status = for_lists(counts, tensors, [&](int64_t begin, int64_t end, int64_t) {
        return launch(list_of<T>(grads, counts, begin, end));
    });
    return status == CUDA_OPS_SUCCESS && scalars.norm ? launch(GradList<T>{}) : status;
}

extern "C" cuda_ops_status cuda_ops_clip_grads_cuda(void *norm, cuda_ops_dtype norm_dtype, void *const *grads,
                                                    const int64_t *counts, int64_t tensors, const double *partials,
                                                    int64_t partial_count, double norm_type, double max_norm,
                                                    cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!(norm_type > 0))
        return CUDA_OPS_INVALID_ARGUMENT;
    const ClipScalars scalars = {norm, partials, partial_count, norm_type, max_norm, norm_dtype};
    CUDA_OPS_DISPATCH(dtype, T, return clip_grads<T>(scalars, grads, counts, tensors, stream));
    return CUDA_OPS_SUCCESS;
}
