// histc: counts[floor((v - low) * bins / (high - low))] += 1 for each element v; bincount: counts[v] += 1, or
// sums[v] += weight.
// A block counts in shared memory and adds what it has to the counts once, at its end: integers alone, in any order the
// same. Each lane of a warp has a counter of its own for a bin, in a bank of its own, as far as these fit, so that equal
// elements do not wait for each other; lanes share counters where bins are many, and with more than shared memory
// holds, all count in global memory.
// Weights of few bins are added up by each thread of its own, bin by bin in shared memory, threads in a fixed order after
// that; of many bins by atomics on floats, or where sums are to repeat as integers, in any order the same
// (common/ordered_sums.cuh).
// Bound by memory: one read of the elements, while shared memory takes their additions, a warp's in a few clocks.
#include "cuda_ops/histogram.h"

#include <math.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/ordered_sums.cuh"

// RESIDENT: blocks of a multiprocessor, where it has room for 2048 threads.
static constexpr int THREADS = 1024, RESIDENT = 2;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ / 100 == 10)
#define CUDA_OPS_HISTOGRAM_BOUNDS __launch_bounds__(THREADS, RESIDENT)
#else
#define CUDA_OPS_HISTOGRAM_BOUNDS __launch_bounds__(THREADS)
#endif
static constexpr int IN_FLIGHT = 2;            // vectors of a thread
static constexpr int PART_THREADS = WARP_SIZE; // of a block that adds weights
static constexpr int MAX_PARTS = 2048, MERGE_WARPS = 32;

// What the counting kernel asks of a kind of bins: bin_of(element), which is -1 for an element that is in none.

template <typename T>
struct EqualBins {
    typedef T Element;
    typedef accumulate_type<T> A;
    A low, high, range, inverse; // 1 / range, or 0 where a product with it would lose digits
    int last;

    __device__ __forceinline__ int bin_of(T element) const
    {
        const A value = load_as_accumulate(element);
        if (!(value >= low && value <= high)) // NaN too
            return -1;
        const A product = (value - low) * (A(last) + A(1));
        A place;
        if (inverse != A(0)) {
            // product / range, rounded as a division rounds it, by three products.
            const A near = product * inverse;
            place = fma(fma(-near, range, product), inverse, near);
        } else {
            place = product / range;
        }
        const int bin = (int)place;
        return bin < last ? (bin > 0 ? bin : 0) : last;
    }
};

template <typename K>
struct IntegerBins {
    typedef K Element;
    int64_t bins;

    __device__ __forceinline__ int bin_of(K key) const
    {
        return 0 <= (int64_t)key && (int64_t)key < bins ? (int)key : -1;
    }
};

// `copies`: counters of a bin in shared memory, a power of two of at most a warp; 0: all count in global memory.
template <typename Bins>
__global__ void CUDA_OPS_HISTOGRAM_BOUNDS histogram_kernel(unsigned long long *counts,
                                                           const typename Bins::Element *input, int64_t count,
                                                           int64_t vectors, int bins, int copies, const Bins by)
{
    typedef typename Bins::Element E;
    typedef vector16<E> V;
    extern __shared__ unsigned int counters[]; // [bins][copies]; a block has less than 2^32 elements
    for (int i = threadIdx.x; i < bins * copies; i += THREADS)
        counters[i] = 0;
    wait_for_predecessor();
    release_successor();
    __syncthreads();
    unsigned int *const own = counters + (copies > 0 ? threadIdx.x % copies : 0);
    const auto add = [&](E element) {
        const int bin = by.bin_of(element);
        if (bin < 0)
            return;
        if (copies > 0)
            atomicAdd(&own[bin * copies], 1u);
        else
            atomicAdd(&counts[bin], 1ull);
    };
    const int64_t step = global_thread_count();
    int64_t v = global_thread_index();
    for (; v + (IN_FLIGHT - 1) * step < vectors; v += IN_FLIGHT * step) {
        V x[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            x[k] = reinterpret_cast<const V *>(input)[v + k * step];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
#pragma unroll
            for (int e = 0; e < V::size; e++)
                add(x[k].element[e]);
    }
    for (; v < vectors; v += step) {
        const V x = reinterpret_cast<const V *>(input)[v];
#pragma unroll
        for (int e = 0; e < V::size; e++)
            add(x.element[e]);
    }
    for (int64_t i = vectors * V::size + global_thread_index(); i < count; i += step)
        add(input[i]);
    __syncthreads();
    for (int bin = threadIdx.x; copies > 0 && bin < bins; bin += THREADS) {
        unsigned int sum = 0;
        for (int c = 0; c < copies; c++)
            sum += counters[bin * copies + (c + bin) % copies]; // neighbouring threads begin in other banks
        if (sum > 0)
            atomicAdd(&counts[bin], (unsigned long long)sum);
    }
}

template <typename Bins>
static cuda_ops_status count_elements(int64_t *counts, const void *elements, int64_t count, int64_t bins,
                                      const Bins &by, cudaStream_t stream)
{
    typedef typename Bins::Element E;
    const cudaError_t error = cudaMemsetAsync(counts, 0, 8 * bins, stream);
    if (error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    const Device device = current_device();
    // As many as leave room for all blocks of a multiprocessor; one, where that takes room from them.
    const int64_t room = multiprocessor_shared_bytes() / RESIDENT - 1024;
    int copies = WARP_SIZE;
    while (copies > 1 && 4 * bins * copies > room)
        copies /= 2;
    if (4 * bins * copies > device.shared_bytes)
        copies = 0;
    const size_t shared_bytes = 4 * bins * copies;
    if (shared_bytes > 48 << 10)
        allow_shared_memory(histogram_kernel<Bins>, shared_bytes);
    const int64_t blocks =
        (int64_t)device.multiprocessors * active_blocks(histogram_kernel<Bins>, THREADS, shared_bytes);
    const int64_t vectors = is_aligned_16(elements) ? count / vector16<E>::size : 0;
    const int64_t most = ceil_div(vectors > 0 ? vectors : count, THREADS);
    launch_dependent(histogram_kernel<Bins>, dim3((unsigned int)(blocks < most ? blocks : most)), dim3(THREADS),
                     shared_bytes, stream, (unsigned long long *)counts, (const E *)elements, count, vectors, (int)bins,
                     copies, by);
    return launch_status();
}

// ---- histc ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(THREADS) convert_counts_kernel(T *output, const int64_t *counts, int64_t bins)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < bins; i += global_thread_count())
        output[i] = store_from_accumulate<T>((accumulate_type<T>)counts[i]);
}

extern "C" size_t cuda_ops_histc_workspace_cuda(int64_t bins)
{
    return 8 * (size_t)bins;
}

extern "C" cuda_ops_status cuda_ops_histc_cuda(void *output, void *workspace, const void *input, int64_t count,
                                               int64_t bins, double low, double high, cuda_ops_dtype dtype,
                                               cuda_ops_stream stream)
{
    if (bins < 1 || bins > INT32_MAX || !(low < high) || !isfinite(low) || !isfinite(high))
        return CUDA_OPS_INVALID_ARGUMENT;
    CUDA_OPS_DISPATCH(dtype, T, {
        typedef accumulate_type<T> A;
        EqualBins<T> by = {(A)low, (A)high, (A)high - (A)low, 0, (int)(bins - 1)};
        // Neither the range nor what is divided by it comes near the ends of the exponents.
        const double safe = sizeof(A) == 4 ? 0x1p60 : 0x1p500;
        if (by.range > 1 / safe && by.range < safe)
            by.inverse = A(1) / by.range;
        const cuda_ops_status status = count_elements((int64_t *)workspace, input, count, bins, by, stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        launch_dependent(convert_counts_kernel<T>, clamp_grid(ceil_div(bins, THREADS)), THREADS, 0, stream, (T *)output,
                         (const int64_t *)workspace, bins);
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

// ---- bincount ------------------------------------------------------------------------------------------------------

// Runs the statement with `K` standing for the integers of so many bytes.
#define DISPATCH_KEYS(key_bytes, K, ...)                                                                               \
    switch (key_bytes) {                                                                                               \
    case 1: {                                                                                                          \
        typedef uint8_t K;                                                                                             \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case 4: {                                                                                                          \
        typedef int32_t K;                                                                                             \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    case 8: {                                                                                                          \
        typedef int64_t K;                                                                                             \
        __VA_ARGS__;                                                                                                   \
        break;                                                                                                         \
    }                                                                                                                  \
    }

extern "C" cuda_ops_status cuda_ops_bincount_cuda(int64_t *counts, const void *input, int key_bytes, int64_t count,
                                                  int64_t bins, cuda_ops_stream stream)
{
    if (bins > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (bins == 0)
        return CUDA_OPS_SUCCESS;
    DISPATCH_KEYS(key_bytes, K, return count_elements(counts, input, count, bins, IntegerBins<K>{bins}, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}

// range: the largest of ~key, and of key, of non-negative ones; -1 before.
template <typename K>
__global__ void __launch_bounds__(THREADS)
    key_range_kernel(int64_t *range, const K *input, int64_t count, int64_t vectors)
{
    typedef vector16<K> V;
    wait_for_predecessor();
    release_successor();
    int64_t smallest = 0, largest = -1; // as ~smallest is -1
    const auto add = [&](K key) {
        smallest = (int64_t)key < smallest ? (int64_t)key : smallest;
        largest = (int64_t)key > largest ? (int64_t)key : largest;
    };
#pragma unroll 4
    for (int64_t v = global_thread_index(); v < vectors; v += global_thread_count()) {
        const V x = reinterpret_cast<const V *>(input)[v];
#pragma unroll
        for (int e = 0; e < V::size; e++)
            add(x.element[e]);
    }
    for (int64_t i = vectors * V::size + global_thread_index(); i < count; i += global_thread_count())
        add(input[i]);
    // Both of them grow, so that a thread or two a block ask the atomics for more.
    if (~smallest > ((volatile int64_t *)range)[0])
        atomicMax((long long *)&range[0], (long long)~smallest);
    if (largest > ((volatile int64_t *)range)[1])
        atomicMax((long long *)&range[1], (long long)largest);
}

extern "C" cuda_ops_status cuda_ops_bincount_range_cuda(int64_t *range, const void *input, int key_bytes, int64_t count,
                                                        cuda_ops_stream stream)
{
    const cudaError_t error = cudaMemsetAsync(range, 0xff, 16, stream);
    if (error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    DISPATCH_KEYS(key_bytes, K, {
        const int64_t vectors = is_aligned_16(input) ? count / vector16<K>::size : 0;
        const int64_t most = ceil_div(vectors > 0 ? vectors : count, THREADS),
                      blocks = current_device().multiprocessors * 4;
        if (most > 0)
            launch_dependent(key_range_kernel<K>, dim3((unsigned int)(blocks < most ? blocks : most)), dim3(THREADS), 0,
                             stream, range, (const K *)input, count, vectors);
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

// ---- weights -------------------------------------------------------------------------------------------------------

// A part's elements go to a warp, and those of a lane to its own column of sums: [bins][PART_THREADS], each in a bank of
// its own. partials: [parts][bins].
template <typename K, typename A>
__global__ void __launch_bounds__(PART_THREADS)
    weight_parts_kernel(A *partials, const K *input, const A *weights, int64_t count, int64_t part, int bins)
{
    extern __shared__ double aligned_sums[];
    A *const sums = (A *)aligned_sums;
    const int lane = threadIdx.x;
    for (int bin = 0; bin < bins; bin++)
        sums[bin * PART_THREADS + lane] = 0;
    wait_for_predecessor();
    release_successor();
    const int64_t begin = blockIdx.x * part, end = begin + part < count ? begin + part : count;
#pragma unroll 8
    for (int64_t i = begin + lane; i < end; i += PART_THREADS) {
        const int64_t key = input[i];
        const A weight = weights[i];
        if (0 <= key && key < bins)
            sums[key * PART_THREADS + lane] += weight;
    }
    __syncwarp();
    for (int bin = lane; bin < bins; bin += PART_THREADS) {
        A sum = 0;
#pragma unroll
        for (int c = 0; c < PART_THREADS; c++)
            sum += sums[bin * PART_THREADS + (c + lane) % PART_THREADS];
        partials[blockIdx.x * (int64_t)bins + bin] = sum;
    }
}

// A lane has a bin, and a warp every MERGE_WARPS'th part.
template <typename A>
__global__ void __launch_bounds__(MERGE_WARPS *WARP_SIZE)
    merge_parts_kernel(A *sums, const A *partials, int parts, int bins)
{
    __shared__ A of_warps[MERGE_WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int bin = blockIdx.x * WARP_SIZE + lane;
    wait_for_predecessor();
    release_successor();
    A sum = 0;
#pragma unroll 8
    for (int part = warp; bin < bins && part < parts; part += MERGE_WARPS)
        sum += partials[(int64_t)part * bins + bin];
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || bin >= bins)
        return;
    for (int w = 1; w < MERGE_WARPS; w++)
        sum += of_warps[w][lane];
    sums[bin] = sum;
}

// The elements of a part, and their number: of the sizes alone, so that sums repeat on any device.
static int64_t part_size(int64_t count)
{
    return ceil_div(ceil_div(count, MAX_PARTS), 8 * PART_THREADS) * (8 * PART_THREADS);
}

// Four parts at once on a multiprocessor of 9.0, and one where shared memory is scarcest (7.5), are worth their columns.
static bool fits_columns(int64_t bins, cuda_ops_dtype dtype)
{
    return bins * PART_THREADS * dtype_size(dtype) <= 48 << 10;
}

template <typename K, typename A>
struct WeightsOfKeys {
    static constexpr bool WIDE = sizeof(A) == 8;
    A *sums;
    const K *input;
    const A *weights;
    int64_t bins;

    __device__ __forceinline__ int64_t row(int64_t i) const
    {
        return (int64_t)input[i];
    }
    __device__ __forceinline__ int64_t place(int64_t, int64_t key) const
    {
        return 0 <= key && key < bins ? key : -1;
    }
    __device__ __forceinline__ double value(int64_t i) const
    {
        return (double)weights[i];
    }
    __device__ __forceinline__ void finish(int64_t place, double sum) const
    {
        sums[place] = (A)sum;
    }
};

template <typename K, typename A>
static cuda_ops_status add_weights(A *sums, void *workspace, const K *input, const A *weights, int64_t count,
                                   int64_t bins, cuda_ops_dtype dtype, int deterministic, cudaStream_t stream)
{
    if (fits_columns(bins, dtype)) {
        const int64_t part = part_size(count), parts = ceil_div(count, part);
        launch_dependent(weight_parts_kernel<K, A>, dim3((unsigned int)parts), dim3(PART_THREADS),
                         bins * PART_THREADS * sizeof(A), stream, (A *)workspace, input, weights, count, part,
                         (int)bins);
        launch_dependent(merge_parts_kernel<A>, dim3((unsigned int)ceil_div(bins, WARP_SIZE)),
                         dim3(MERGE_WARPS * WARP_SIZE), 0, stream, sums, (const A *)workspace, (int)parts, (int)bins);
        return launch_status();
    }
    const cudaError_t error = cudaMemsetAsync(sums, 0, bins * sizeof(A), stream);
    if (error != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)error;
    const WeightsOfKeys<K, A> source = {sums, input, weights, bins};
    return deterministic ? launch_ordered_sums(workspace, source, count, bins, stream)
                         : launch_atomic_sums(sums, A(1), source, count, 0, bins, stream);
}

extern "C" size_t cuda_ops_bincount_weights_workspace_cuda(int64_t count, int64_t bins, cuda_ops_dtype dtype,
                                                           int deterministic)
{
    if (count == 0)
        return 0;
    if (fits_columns(bins, dtype))
        return ceil_div(count, part_size(count)) * bins * dtype_size(dtype);
    return deterministic ? ordered_sums_bytes(bins, dtype == CUDA_OPS_FLOAT64) : 0;
}

extern "C" cuda_ops_status cuda_ops_bincount_weights_cuda(void *sums, void *workspace, const void *input, int key_bytes,
                                                          const void *weights, int64_t count, int64_t bins,
                                                          cuda_ops_dtype dtype, int deterministic,
                                                          cuda_ops_stream stream)
{
    if (bins > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (dtype != CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (bins == 0)
        return CUDA_OPS_SUCCESS;
    if (count == 0) {
        const cudaError_t error = cudaMemsetAsync(sums, 0, bins * dtype_size(dtype), stream);
        return error == cudaSuccess ? CUDA_OPS_SUCCESS : CUDA_OPS_CUDA_ERROR + (int)error;
    }
    DISPATCH_KEYS(key_bytes, K, {
        if (dtype == CUDA_OPS_FLOAT32)
            return add_weights((float *)sums, workspace, (const K *)input, (const float *)weights, count, bins, dtype,
                               deterministic, stream);
        return add_weights((double *)sums, workspace, (const K *)input, (const double *)weights, count, bins, dtype,
                           deterministic, stream);
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}
