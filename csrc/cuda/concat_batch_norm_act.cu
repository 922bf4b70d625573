// concat_batch_norm_act: batch_norm_act of sources, one behind the other along the channels, read where they are:
//
//     output[row, channels before source s + c] = f((source s[row, c] - mean) * scale + offset)
//     grad of source s = what others add to it + (gated grad_output * scale + (input - mean) * slope + offset)
//
// with batch_norm's scale, slope and offset. As batch_norm/rows.cu, a thread keeps to one 16-byte vector of the rows of
// output, and so to one source; the sources' addresses travel as the kernel's argument. Forward is one kernel, whose
// blocks make the coefficients of their channels. Backward takes three: sums, coefficients, gradients.
// Bound by memory: forward reads the sources and writes output once; backward reads grad_output and the sources twice,
// the gradients that are there once, and writes theirs.
#include "cuda_ops/concat_batch_norm_act.h"

#include "batch_norm/coefficients.cuh"
#include "batch_norm/epilogue.cuh"
#include "batch_norm/row_partition.cuh"
#include "common/aligned_vector.cuh"

static constexpr int SOURCES = CUDA_OPS_NORM_SOURCES;

// Sources by the vectors of a row that they begin at; first_vector[count] is their sum.
struct Places {
    int count;
    int first_vector[SOURCES + 1];

    // The last source that begins at the vector or before.
    __device__ __forceinline__ int source_of(int vector) const
    {
        int low = 0, high = count - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_vector[middle] <= vector)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
    __device__ __forceinline__ int vectors_of(int source) const
    {
        return first_vector[source + 1] - first_vector[source];
    }
};

struct ForwardSources {
    Places places;
    const void *input[SOURCES], *mean[SOURCES], *variance[SOURCES];
};

struct BackwardSources {
    Places places;
    const void *input[SOURCES], *grad[SOURCES];
    void *grad_input[SOURCES];
    int64_t grad_pitch[SOURCES]; // vectors
};

template <typename T>
__global__ void __launch_bounds__(THREADS)
    concat_normalize_kernel(T *output, double *new_mean, double *new_variance,
                            const __grid_constant__ ForwardSources sources,
                            const __grid_constant__ RunningUpdate running, const void *weight, const void *bias,
                            int64_t rows, int64_t channels, const __grid_constant__ RowsPartition p, double eps,
                            cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
                            const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    __shared__ A centers[THREADS], scales[THREADS], offsets[THREADS];
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, rows, vectors);
    const int width = p.lanes * SIZE;
    const int64_t channel = blockIdx.x % p.tiles * width + threadIdx.x;
    wait_for_predecessor();
    release_successor();
    if ((int)threadIdx.x < width && channel < channels) { // a thread a channel
        const int source = sources.places.source_of((int)(channel / SIZE));
        const int64_t own = channel - (int64_t)sources.places.first_vector[source] * SIZE;
        const double mean = load_value(sources.mean[source], statistics_dtype, own);
        const double variance = load_value(sources.variance[source], statistics_dtype, own);
        // As set_forward_coefficients.
        const double scale = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) / sqrt(variance + eps);
        const double shift = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
        const A center = (A)mean;
        centers[threadIdx.x] = center;
        scales[threadIdx.x] = (A)scale;
        offsets[threadIdx.x] = (A)(shift - (mean - (double)center) * scale);
        if (blockIdx.x < p.tiles) { // the first split
            if (new_mean) {
                new_mean[channel] = mean;
                new_variance[channel] = variance;
            }
            running.update(channel, mean, variance);
        }
    }
    __syncthreads();
    if (!at.inside)
        return;
    A center[SIZE], scale[SIZE], offset[SIZE];
    load_values(center, centers + at.lane * SIZE);
    load_values(scale, scales + at.lane * SIZE);
    load_values(offset, offsets + at.lane * SIZE);
    const int source = sources.places.source_of((int)at.vector);
    const int64_t pitch = sources.places.vectors_of(source);
    const V *const x = (const V *)sources.input[source] + (at.vector - sources.places.first_vector[source]);
    V *const y = reinterpret_cast<V *>(output) + at.vector;
    const auto write = [&](int64_t row, const V &value) {
        A values[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            values[e] = (element_of(value, e) - center[e]) * scale[e] + offset[e];
        epilogue.apply(values);
        store_vector(y + row * vectors, vector_of<T>(values));
    };
    int64_t row = at.row;
    for (; row + (ROWS - 1) * p.groups < at.end; row += ROWS * p.groups) {
        V loaded[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            loaded[k] = x[(row + k * p.groups) * pitch];
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            write(row + k * p.groups, loaded[k]);
    }
    for (; row < at.end; row += p.groups)
        write(row, x[row * pitch]);
}

// Sums of the gated grad_output, and of its products with input - center, as rows_sums_kernel.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    concat_sums_kernel(double *partials, const T *grad_output, const __grid_constant__ BackwardSources sources,
                       const void *mean, const void *variance, const void *weight, const void *bias, int64_t rows,
                       int64_t channels, const __grid_constant__ RowsPartition p, double eps,
                       cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype,
                       const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    __shared__ A sums[THREADS * SIZE], all_products[THREADS * SIZE];
    __shared__ A centers[THREADS], scales[THREADS], shifts[THREADS];
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, rows, vectors);
    const int width = p.lanes * SIZE;
    const int64_t channel = blockIdx.x % p.tiles * width + threadIdx.x;
    const bool has_channel = (int)threadIdx.x < width && channel < channels;
    wait_for_predecessor();
    release_successor();
    if (has_channel) { // to the last digit as in forward: the gate asks where its sum was 0
        const double m = load_value(mean, statistics_dtype, channel);
        const double deviation = sqrt(load_value(variance, statistics_dtype, channel) + eps);
        const double factor = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) / deviation;
        const double lift = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
        centers[threadIdx.x] = (A)m;
        scales[threadIdx.x] = (A)factor;
        shifts[threadIdx.x] = (A)(lift - (m - (double)(A)m) * factor);
    }
    __syncthreads();
    A center[SIZE], scale[SIZE], shift[SIZE], sum[SIZE], products[SIZE];
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        sum[e] = products[e] = A(0);
    if (at.inside) {
        load_values(center, centers + at.lane * SIZE);
        load_values(scale, scales + at.lane * SIZE);
        load_values(shift, shifts + at.lane * SIZE);
        const int source = sources.places.source_of((int)at.vector);
        const int64_t pitch = sources.places.vectors_of(source);
        const V *const x = (const V *)sources.input[source] + (at.vector - sources.places.first_vector[source]);
        const V *const g = reinterpret_cast<const V *>(grad_output) + at.vector;
        const auto add = [&](const V &grad, const V &value) {
            A gradient[SIZE], z[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                gradient[e] = element_of(grad, e);
                z[e] = (element_of(value, e) - center[e]) * scale[e] + shift[e];
            }
            epilogue.gate(gradient, z);
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                sum[e] += gradient[e];
                products[e] += gradient[e] * (element_of(value, e) - center[e]);
            }
        };
        int64_t row = at.row;
        for (; row + (ROWS - 1) * p.groups < at.end; row += ROWS * p.groups) {
            V grads[ROWS], values[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                grads[k] = g[(row + k * p.groups) * vectors];
                values[k] = x[(row + k * p.groups) * pitch];
            }
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                add(grads[k], values[k]);
        }
        for (; row < at.end; row += p.groups)
            add(g[row * vectors], x[row * pitch]);
    }
    if (at.group < p.groups) {
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            sums[at.group * width + at.lane * SIZE + e] = sum[e];
            all_products[at.group * width + at.lane * SIZE + e] = products[e];
        }
    }
    __syncthreads();
    if (!has_channel)
        return;
    A total = A(0), all = A(0);
    for (int group = 0; group < p.groups; group++) {
        total += sums[group * width + threadIdx.x];
        all += all_products[group * width + threadIdx.x];
    }
    double *const partial = partials + (channel * p.splits + blockIdx.x / p.tiles) * PARTIAL;
    partial[0] = (double)total;
    partial[1] = (double)all;
}

// Without `training` a gradient does not depend on input, which must not even be multiplied by 0 (Inf).
template <typename T>
__global__ void __launch_bounds__(THREADS)
    concat_grad_kernel(const T *grad_output, const __grid_constant__ BackwardSources sources,
                       const accumulate_type<T> *coefficients, int64_t rows, int64_t channels,
                       const __grid_constant__ RowsPartition p, bool training,
                       const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size, IN_FLIGHT = ROWS / 2;
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, rows, vectors);
    wait_for_predecessor();
    release_successor();
    if (!at.inside)
        return;
    const int source = sources.places.source_of((int)at.vector);
    const int64_t pitch = sources.places.vectors_of(source), own = at.vector - sources.places.first_vector[source];
    if (!sources.grad_input[source])
        return;
    const int64_t other_pitch = sources.grad_pitch[source];
    const V *const x = (const V *)sources.input[source] + own, *const others = (const V *)sources.grad[source] + own;
    const bool has_others = sources.grad[source];
    const V *const g = reinterpret_cast<const V *>(grad_output) + at.vector;
    V *const y = (V *)sources.grad_input[source] + own;
    const A *const mine = coefficients + at.vector * SIZE;
    A center[SIZE], scale[SIZE], slope[SIZE], offset[SIZE], shift[SIZE];
    load_values(center, mine);
    load_values(scale, mine + channels);
    load_values(slope, mine + 2 * channels);
    load_values(offset, mine + 3 * channels);
    load_values(shift, mine + 4 * channels);
    const auto write = [&](int64_t row, const V &grad, const V &value, const V &other) {
        A values[SIZE], z[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            values[e] = element_of(grad, e);
            z[e] = (element_of(value, e) - center[e]) * scale[e] + shift[e];
        }
        epilogue.gate(values, z);
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            values[e] *= scale[e];
            if (training)
                values[e] += (element_of(value, e) - center[e]) * slope[e] + offset[e];
            if (has_others)
                values[e] += element_of(other, e);
        }
        store_vector(y + row * pitch, vector_of<T>(values));
    };
    int64_t row = at.row;
    for (; row + (IN_FLIGHT - 1) * p.groups < at.end; row += IN_FLIGHT * p.groups) {
        V grads[IN_FLIGHT], values[IN_FLIGHT], other[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            grads[k] = g[(row + k * p.groups) * vectors];
            values[k] = x[(row + k * p.groups) * pitch];
            other[k] = has_others ? others[(row + k * p.groups) * other_pitch] : grads[k];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            write(row + k * p.groups, grads[k], values[k], other[k]);
    }
    for (; row < at.end; row += p.groups)
        write(row, g[row * vectors], x[row * pitch], has_others ? others[row * other_pitch] : g[row * vectors]);
}

static int vector_size(cuda_ops_dtype dtype)
{
    return 16 / (int)dtype_size(dtype);
}

static int64_t channels_of(const cuda_ops_norm_source *sources, int64_t count)
{
    int64_t channels = 0;
    for (int64_t s = 0; s < count; s++)
        channels += sources[s].channels;
    return channels;
}

extern "C" int cuda_ops_concat_batch_norm_act_supports_cuda(const cuda_ops_norm_source *sources, int64_t count,
                                                            int64_t rows, cuda_ops_dtype dtype)
{
    if (count < 1 || count > SOURCES)
        return 0;
    const int size = vector_size(dtype);
    for (int64_t s = 0; s < count; s++)
        if (sources[s].channels % size != 0 || !is_aligned_16(sources[s].input) ||
            !is_aligned_16(sources[s].grad_input) ||
            (sources[s].grad && (!is_aligned_16(sources[s].grad) || sources[s].grad_pitch % size != 0)))
            return 0;
    const int64_t channels = channels_of(sources, count);
    if (channels > INT32_MAX)
        return 0;
    if (channels == 0 || rows == 0)
        return 1;
    const RowsPartition p = partition_of(rows, channels, size);
    return p.tiles <= INT32_MAX / p.splits;
}

static Places places_of(const cuda_ops_norm_source *sources, int64_t count, int size)
{
    Places places = {};
    places.count = (int)count;
    for (int64_t s = 0; s < count; s++)
        places.first_vector[s + 1] = places.first_vector[s] + (int)(sources[s].channels / size);
    return places;
}

template <typename T>
static void forward(void *output, double *mean, double *variance, const ForwardSources &sources,
                    const RunningUpdate &running, const void *weight, const void *bias,
                    const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows, int64_t channels, double eps,
                    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    const RowsPartition p = partition_of(rows, channels, vector16<T>::size);
    launch_dependent(concat_normalize_kernel<T>, dim3((unsigned int)(p.tiles * p.splits)), dim3(THREADS), 0, stream,
                     (T *)output, mean, variance, sources, running, weight, bias, rows, channels, p, eps,
                     parameter_dtype, statistics_dtype, epilogue_of<T>(epilogue));
}

extern "C" cuda_ops_status cuda_ops_concat_batch_norm_act_forward_cuda(
    void *output, double *mean, double *variance, const cuda_ops_norm_source *sources, int64_t count,
    const cuda_ops_running_statistics *running, const void *weight, const void *bias,
    const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows, double eps, cuda_ops_dtype dtype,
    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_concat_batch_norm_act_supports_cuda(sources, count, rows, dtype) || !is_aligned_16(output))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t channels = channels_of(sources, count);
    if (rows == 0 || channels == 0)
        return CUDA_OPS_SUCCESS;
    ForwardSources given = {};
    given.places = places_of(sources, count, vector_size(dtype));
    for (int64_t s = 0; s < count; s++) {
        given.input[s] = sources[s].input;
        given.mean[s] = sources[s].mean;
        given.variance[s] = sources[s].variance;
    }
    RunningUpdate update = {};
    if (running)
        update = {*running, (double)rows / ((double)rows - 1.0)};
    CUDA_OPS_DISPATCH(dtype, T,
                      forward<T>(output, mean, variance, given, update, weight, bias, epilogue, rows, channels, eps,
                                 parameter_dtype, statistics_dtype, stream);
                      return launch_status());
    return CUDA_OPS_INVALID_ARGUMENT;
}

extern "C" int64_t cuda_ops_concat_batch_norm_act_workspace_cuda(int64_t rows, int64_t channels, cuda_ops_dtype dtype)
{
    if (rows == 0 || channels == 0)
        return 0;
    return batch_norm_workspace_bytes(partition_of(rows, channels, vector_size(dtype)).splits, channels);
}

template <typename T>
static cuda_ops_status backward(void *grad_weight, void *grad_bias, void *workspace, const void *grad_output,
                                const BackwardSources &sources, const void *weight, const void *bias, const void *mean,
                                const void *variance, const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows,
                                int64_t channels, double eps, bool training, bool wants_grads,
                                cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const RowsPartition p = partition_of(rows, channels, vector16<T>::size);
    const dim3 blocks((unsigned int)(p.tiles * p.splits));
    double *const partials = (double *)workspace;
    A *const coefficients = coefficients_of<A>(workspace, p.splits, channels);
    const bool needs_sums = training || grad_weight;
    if (needs_sums) {
        launch_dependent(concat_sums_kernel<T>, blocks, dim3(THREADS), 0, stream, partials, (const T *)grad_output,
                         sources, mean, variance, weight, bias, rows, channels, p, eps, parameter_dtype,
                         statistics_dtype, epilogue_of<T>(epilogue));
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    prepare_backward(grad_weight, grad_bias, coefficients, partials, weight, bias, mean, variance, channels,
                     needs_sums ? p.splits : 0, (double)rows, eps, parameter_dtype, statistics_dtype, stream);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !wants_grads)
        return status;
    launch_dependent(concat_grad_kernel<T>, blocks, dim3(THREADS), 0, stream, (const T *)grad_output, sources,
                     (const A *)coefficients, rows, channels, p, training, epilogue_of<T>(epilogue));
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_concat_batch_norm_act_backward_cuda(
    void *grad_weight, void *grad_bias, void *workspace, const void *grad_output, const cuda_ops_norm_source *sources,
    int64_t count, const void *weight, const void *bias, const void *mean, const void *variance,
    const cuda_ops_batch_norm_epilogue *epilogue, int64_t rows, double eps, int training, cuda_ops_dtype dtype,
    cuda_ops_dtype parameter_dtype, cuda_ops_dtype statistics_dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_concat_batch_norm_act_supports_cuda(sources, count, rows, dtype) || !is_aligned_16(grad_output))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t channels = channels_of(sources, count);
    if (rows == 0 || channels == 0)
        return CUDA_OPS_SUCCESS;
    BackwardSources given = {};
    const int size = vector_size(dtype);
    given.places = places_of(sources, count, size);
    bool wants_grads = false;
    for (int64_t s = 0; s < count; s++) {
        given.input[s] = sources[s].input;
        given.grad[s] = sources[s].grad;
        given.grad_pitch[s] = sources[s].grad_pitch / size;
        given.grad_input[s] = sources[s].grad_input;
        wants_grads |= sources[s].grad_input != nullptr;
    }
    CUDA_OPS_DISPATCH(dtype, T,
                      return backward<T>(grad_weight, grad_bias, workspace, grad_output, given, weight, bias, mean,
                                         variance, epilogue, rows, channels, eps, training, wants_grads,
                                         parameter_dtype, statistics_dtype, stream));
    return CUDA_OPS_INVALID_ARGUMENT;
}
