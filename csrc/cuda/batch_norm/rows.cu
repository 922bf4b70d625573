// batch_norm where channels are innermost in memory, and rows of them whole vectors of 16 bytes (channels_last images,
// and batches of features). As split.cu, in three kernels a pass, but a thread keeps to the channels of one vector: it
// has their sums, or their coefficients, in registers, and walks down the rows with several loads in flight.
// Neighbouring threads take neighbouring vectors of a row and then the next row: a block reads whole stretches of memory.
// Each thread merges the moments of ROWS values at a time into its own (Chan's formula, whose division is the same for
// all its channels); values are taken relative to one of their channel, as in split.cu.
// Bound by memory: forward reads input twice and writes output; backward reads input and grad_output twice and writes
// grad_input.
// FUSED kernels are batch_norm_act's. Forward reads the residual once more. Backward computes the activation's argument
// anew: without a residual in both of its passes; with one in the first, which reads the residual and leaves grad_sum,
// the residual's gradient, and the second is batch_norm's of that. Where output's gradient is given as two, whose sum it
// is, the first adds them.
#include "batch_norm/coefficients.cuh"
#include "batch_norm/epilogue.cuh"
#include "batch_norm/paths.h"
#include "batch_norm/row_partition.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

template <typename T>
static RowsPartition partition_for(const NormCall &call)
{
    return partition_of(call.outer, call.channels, vector16<T>::size);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    rows_moments_kernel(double *partials, const T *input, int64_t outer, int64_t channels, const RowsPartition p)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    __shared__ A means[THREADS * SIZE], all_squares[THREADS * SIZE];
    __shared__ int counts[THREADS];
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, outer, vectors);
    const V *const x = reinterpret_cast<const V *>(input) + at.vector;
    A origin[SIZE], mean[SIZE], squares[SIZE];
    A count = A(0);
#pragma unroll
    for (int e = 0; e < SIZE; e++)
        origin[e] = mean[e] = squares[e] = A(0);
    wait_for_predecessor();
    release_successor();
    if (at.inside) {
        const V first = x[0], middle = x[outer / 2 * vectors], last = x[(outer - 1) * vectors];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            origin[e] = middle_of(element_of(first, e), element_of(middle, e), element_of(last, e));
        int64_t row = at.row;
        for (; row + (ROWS - 1) * p.groups < at.end; row += ROWS * p.groups) {
            V loaded[ROWS];
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                loaded[k] = x[(row + k * p.groups) * vectors];
            const A before = count, share = A(ROWS) / (count + A(ROWS));
            count += A(ROWS);
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                A value[ROWS], sum = A(0), apart = A(0);
#pragma unroll
                for (int k = 0; k < ROWS; k++) {
                    value[k] = element_of(loaded[k], e) - origin[e];
                    sum += value[k];
                }
                const A middle_value = sum * (A(1) / A(ROWS));
#pragma unroll
                for (int k = 0; k < ROWS; k++)
                    apart += (value[k] - middle_value) * (value[k] - middle_value);
                const A difference = middle_value - mean[e];
                mean[e] += difference * share;
                squares[e] += apart + difference * difference * before * share;
            }
        }
        for (; row < at.end; row += p.groups) {
            const V loaded = x[row * vectors];
            count += A(1);
            const A share = A(1) / count;
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                const A value = element_of(loaded, e) - origin[e], difference = value - mean[e];
                mean[e] += difference * share;
                squares[e] += difference * (value - mean[e]);
            }
        }
    }
    // [group][channel of the tile]
    const int width = p.lanes * SIZE;
    if (at.group < p.groups) {
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            means[at.group * width + at.lane * SIZE + e] = mean[e];
            all_squares[at.group * width + at.lane * SIZE + e] = squares[e];
        }
        if (at.lane == 0)
            counts[at.group] = (int)count;
    }
    __syncthreads();
    // A thread a channel: the mean first, then the squared differences from it, without a division a group.
    const int64_t channel = blockIdx.x % p.tiles * width + threadIdx.x;
    if ((int)threadIdx.x >= width || channel >= channels)
        return;
    A sum = A(0), total = A(0), apart = A(0);
    for (int g = 0; g < p.groups; g++) {
        sum += A(counts[g]) * means[g * width + threadIdx.x];
        total += A(counts[g]);
    }
    const A middle_value = sum / total;
    for (int g = 0; g < p.groups; g++) {
        const A difference = means[g * width + threadIdx.x] - middle_value;
        apart += all_squares[g * width + threadIdx.x] + A(counts[g]) * difference * difference;
    }
    const A start =
        middle_of(load_as_accumulate(input[channel]), load_as_accumulate(input[outer / 2 * channels + channel]),
                  load_as_accumulate(input[(outer - 1) * channels + channel]));
    double *const partial = partials + (channel * p.splits + blockIdx.x / p.tiles) * PARTIAL;
    partial[0] = (double)total;
    partial[1] = (double)start + (double)middle_value;
    partial[2] = (double)apart;
}

// What the sums of batch_norm_act's backward need more.
template <typename T>
struct Gate {
    T *grad_sum; // written where there is a residual
    const T *added;
    const void *weight, *bias, *variance;
    double eps;
    cuda_ops_dtype parameter_dtype;
    Epilogue<T> epilogue;
};

// Sums of grad_output and of grad_output * (input - center); FUSED: of grad_sum. ADDS: `added` to grad_output first.
template <typename T, bool FUSED, bool ADDS>
__global__ void __launch_bounds__(THREADS)
    rows_sums_kernel(double *partials, const T *grad_output, const T *input, const void *mean, int64_t outer,
                     int64_t channels, const __grid_constant__ RowsPartition p, cuda_ops_dtype statistics_dtype,
                     const __grid_constant__ Gate<T> gate)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size, IN_FLIGHT = ADDS && SIZE > 4 ? ROWS / 2 : ROWS; // else a block alone has registers
    __shared__ A sums[THREADS * SIZE], all_products[THREADS * SIZE];
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, outer, vectors);
    const V *const g = reinterpret_cast<const V *>(grad_output) + at.vector;
    const V *const x = reinterpret_cast<const V *>(input) + at.vector;
    const V *const r = reinterpret_cast<const V *>(gate.epilogue.residual) + at.vector;
    const V *const more = reinterpret_cast<const V *>(gate.added) + at.vector;
    V *const out = reinterpret_cast<V *>(gate.grad_sum) + at.vector;
    const bool has_residual = FUSED && gate.epilogue.residual;
    const int width = p.lanes * SIZE;
    const int64_t channel = blockIdx.x % p.tiles * width + threadIdx.x;
    const bool has_channel = (int)threadIdx.x < width && channel < channels;
    A center[SIZE], sum[SIZE], products[SIZE], scale[SIZE], shift[SIZE];
    wait_for_predecessor();
    release_successor();
    if (FUSED) { // a thread a channel, so that each is divided for once a block; see prepare_backward
        __shared__ A scales[THREADS], shifts[THREADS];
        if (has_channel) {
            const double m = load_value(mean, statistics_dtype, channel);
            const double deviation = sqrt(load_value(gate.variance, statistics_dtype, channel) + gate.eps);
            const double factor =
                (gate.weight ? load_value(gate.weight, gate.parameter_dtype, channel) : 1.0) / deviation;
            const double lift = gate.bias ? load_value(gate.bias, gate.parameter_dtype, channel) : 0.0;
            scales[threadIdx.x] = (A)factor;
            shifts[threadIdx.x] = (A)(lift - (m - (double)(A)m) * factor);
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            scale[e] = at.inside ? scales[at.lane * SIZE + e] : A(0);
            shift[e] = at.inside ? shifts[at.lane * SIZE + e] : A(0);
        }
    }
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        sum[e] = products[e] = A(0);
        center[e] = at.inside ? (A)load_value(mean, statistics_dtype, at.vector * SIZE + e) : A(0);
    }
    const auto add = [&](int64_t row, const V &grad, const V &value, const V &residual, const V &other) {
        A gradient[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            gradient[e] = ADDS ? element_of(grad, e) + element_of(other, e) : element_of(grad, e);
        if (FUSED) {
            A z[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                z[e] = (element_of(value, e) - center[e]) * scale[e] + shift[e];
            if (has_residual)
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    z[e] += element_of(residual, e);
            gate.epilogue.gate(gradient, z);
            if (has_residual) { // the sums are those of what is stored
                const V stored = vector_of<T>(gradient);
                out[row * vectors] = stored;
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    gradient[e] = element_of(stored, e);
            }
        }
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            sum[e] += gradient[e];
            products[e] += gradient[e] * (element_of(value, e) - center[e]);
        }
    };
    if (at.inside) {
        int64_t row = at.row;
        for (; row + (IN_FLIGHT - 1) * p.groups < at.end; row += IN_FLIGHT * p.groups) {
            V grads[IN_FLIGHT], values[IN_FLIGHT], residuals[IN_FLIGHT], others[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
                grads[k] = g[(row + k * p.groups) * vectors];
                others[k] = ADDS ? more[(row + k * p.groups) * vectors] : grads[k];
                values[k] = x[(row + k * p.groups) * vectors];
                residuals[k] = has_residual ? r[(row + k * p.groups) * vectors] : grads[k];
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
                add(row + k * p.groups, grads[k], values[k], residuals[k], others[k]);
        }
        for (; row < at.end; row += p.groups)
            add(row, g[row * vectors], x[row * vectors], has_residual ? r[row * vectors] : g[row * vectors],
                ADDS ? more[row * vectors] : g[row * vectors]);
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

template <typename T, bool FUSED>
__global__ void __launch_bounds__(THREADS)
    rows_normalize_kernel(T *output, const T *input, const accumulate_type<T> *coefficients, int64_t outer,
                          int64_t channels, const __grid_constant__ RowsPartition p,
                          const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size;
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, outer, vectors);
    if (!at.inside)
        return;
    wait_for_predecessor();
    release_successor();
    const A *const mine = coefficients + at.vector * SIZE;
    A center[SIZE], scale[SIZE], offset[SIZE];
    load_values(center, mine);
    load_values(scale, mine + channels);
    load_values(offset, mine + 2 * channels);
    const V *const x = reinterpret_cast<const V *>(input) + at.vector;
    const V *const r = reinterpret_cast<const V *>(epilogue.residual) + at.vector;
    V *const y = reinterpret_cast<V *>(output) + at.vector;
    const bool has_residual = FUSED && epilogue.residual;
    const auto write = [&](int64_t row, const V &value, const V &residual) {
        A values[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            values[e] = (element_of(value, e) - center[e]) * scale[e] + offset[e];
        if (has_residual)
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                values[e] += element_of(residual, e);
        if (FUSED)
            epilogue.apply(values);
        store_vector(y + row * vectors, vector_of<T>(values));
    };
    int64_t row = at.row;
    for (; row + (ROWS - 1) * p.groups < at.end; row += ROWS * p.groups) {
        V loaded[ROWS], residuals[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            loaded[k] = x[(row + k * p.groups) * vectors];
            residuals[k] = has_residual ? r[(row + k * p.groups) * vectors] : loaded[k];
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            write(row + k * p.groups, loaded[k], residuals[k]);
    }
    for (; row < at.end; row += p.groups)
        write(row, x[row * vectors], has_residual ? r[row * vectors] : x[row * vectors]);
}

// TRAINING: else with running statistics, where grad_input does not depend on input, which must not even be multiplied
// by 0 (Inf). FUSED: without a residual.
template <typename T, bool TRAINING, bool FUSED>
__global__ void __launch_bounds__(THREADS)
    rows_grad_input_kernel(T *grad_input, const T *grad_output, const T *input, const accumulate_type<T> *coefficients,
                           int64_t outer, int64_t channels, const __grid_constant__ RowsPartition p,
                           const __grid_constant__ Epilogue<T> epilogue)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    constexpr int SIZE = V::size, IN_FLIGHT = TRAINING ? ROWS / 2 : ROWS;
    const int64_t vectors = channels / SIZE;
    const Place at = place_of(p, outer, vectors);
    if (!at.inside)
        return;
    wait_for_predecessor();
    release_successor();
    const A *const mine = coefficients + at.vector * SIZE;
    A center[SIZE], scale[SIZE], slope[SIZE], offset[SIZE], shift[SIZE];
    load_values(scale, mine + channels);
    if (TRAINING || FUSED)
        load_values(center, mine);
    if (FUSED)
        load_values(shift, mine + 4 * channels);
    if (TRAINING) {
        load_values(slope, mine + 2 * channels);
        load_values(offset, mine + 3 * channels);
    }
    const V *const g = reinterpret_cast<const V *>(grad_output) + at.vector;
    const V *const x = reinterpret_cast<const V *>(input) + at.vector;
    V *const y = reinterpret_cast<V *>(grad_input) + at.vector;
    const auto write = [&](int64_t row, const V &grad, const V &value) {
        A values[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++)
            values[e] = element_of(grad, e);
        if (FUSED) {
            A z[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                z[e] = (element_of(value, e) - center[e]) * scale[e] + shift[e];
            epilogue.gate(values, z);
        }
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            values[e] *= scale[e];
            if (TRAINING)
                values[e] += (element_of(value, e) - center[e]) * slope[e] + offset[e];
        }
        store_vector(y + row * vectors, vector_of<T>(values));
    };
    int64_t row = at.row;
    for (; row + (IN_FLIGHT - 1) * p.groups < at.end; row += IN_FLIGHT * p.groups) {
        V grads[IN_FLIGHT], values[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            grads[k] = g[(row + k * p.groups) * vectors];
            if (TRAINING || FUSED)
                values[k] = x[(row + k * p.groups) * vectors];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            write(row + k * p.groups, grads[k], values[k]);
    }
    for (; row < at.end; row += p.groups)
        write(row, g[row * vectors], TRAINING || FUSED ? x[row * vectors] : g[row * vectors]);
}

template <typename T>
static cuda_ops_status forward(const NormCall &call)
{
    typedef accumulate_type<T> A;
    const RowsPartition p = partition_for<T>(call);
    const dim3 blocks((unsigned int)(p.tiles * p.splits));
    double *const partials = (double *)call.workspace;
    A *const coefficients = coefficients_of<A>(call.workspace, p.splits, call.channels);
    if (call.pass == CUDA_OPS_BATCH_NORM_TRAINING) {
        launch_dependent(rows_moments_kernel<T>, blocks, dim3(THREADS), 0, call.stream, partials, (const T *)call.input,
                         call.outer, call.channels, p);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
        prepare_training(call.new_mean, call.new_variance, coefficients, partials, call.weight, call.bias,
                         call.channels, p.splits, call.eps, call.parameter_dtype, running_update_of(call), call.stream);
    } else {
        prepare_inference(coefficients, call.weight, call.bias, call.mean, call.variance, call.channels, call.eps,
                          call.parameter_dtype, call.statistics_dtype, call.stream);
    }
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !call.wants_output)
        return status;
    launch_dependent(call.epilogue ? rows_normalize_kernel<T, true> : rows_normalize_kernel<T, false>, blocks,
                     dim3(THREADS), 0, call.stream, (T *)call.output, (const T *)call.input, (const A *)coefficients,
                     call.outer, call.channels, p, epilogue_of<T>(call.epilogue));
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(const NormCall &call)
{
    typedef accumulate_type<T> A;
    const RowsPartition p = partition_for<T>(call);
    const dim3 blocks((unsigned int)(p.tiles * p.splits));
    double *const partials = (double *)call.workspace;
    A *const coefficients = coefficients_of<A>(call.workspace, p.splits, call.channels);
    const T *const g = (const T *)call.grad_output, *const x = (const T *)call.input;
    const bool training = call.pass == CUDA_OPS_BATCH_NORM_TRAINING_BACKWARD, fused = call.epilogue;
    const Epilogue<T> epilogue = epilogue_of<T>(call.epilogue);
    const bool needs_sums = training || call.grad_weight || epilogue.residual;
    if (needs_sums) {
        const Gate<T> gate = {(T *)call.grad_sum, (const T *)call.grad_added, call.weight, call.bias, call.variance,
                              call.eps,           call.parameter_dtype,       epilogue};
        launch_dependent(call.grad_added ? rows_sums_kernel<T, true, true>
                         : fused         ? rows_sums_kernel<T, true, false>
                                         : rows_sums_kernel<T, false, false>,
                         blocks, dim3(THREADS), 0, call.stream, partials, g, x, call.mean, call.outer, call.channels, p,
                         call.statistics_dtype, gate);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    prepare_backward(call.grad_weight, call.grad_bias, coefficients, partials, call.weight, call.bias, call.mean,
                     call.variance, call.channels, needs_sums ? p.splits : 0, (double)call.outer, call.eps,
                     call.parameter_dtype, call.statistics_dtype, call.stream);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !call.wants_output)
        return status;
    const auto kernel = [&](auto is_training, auto is_fused) {
        return rows_grad_input_kernel<T, is_training, is_fused>;
    };
    const std::true_type yes{};
    const std::false_type none{};
    // With a residual the sums' kernel has left what the activation makes of the gradient.
    const bool in_both = fused && !epilogue.residual;
    const T *const grad = epilogue.residual ? (const T *)call.grad_sum : g;
    launch_dependent(training ? (in_both ? kernel(yes, yes) : kernel(yes, none))
                              : (in_both ? kernel(none, yes) : kernel(none, none)),
                     blocks, dim3(THREADS), 0, call.stream, (T *)call.grad_input, grad, x, (const A *)coefficients,
                     call.outer, call.channels, p, epilogue);
    return launch_status();
}

Answer batch_norm_rows_supports(const NormCall &call, const Device &)
{
    if (call.inner != 1)
        return no("channels are not innermost in memory");
    if (call.channels * dtype_size(call.dtype) % 16 != 0)
        return no("a row of channels is no multiple of 16 bytes");
    const void *const residual = call.epilogue ? call.epilogue->residual : nullptr;
    if (call.grad_added && !residual)
        return NORM_ADDS_TO_RESIDUALS;
    const void *const tensors[] = {call.input, call.output,   call.grad_output, call.grad_input,
                                   residual,   call.grad_sum, call.grad_added};
    for (const void *const tensor : tensors)
        if (!is_aligned_16(tensor))
            return no("a tensor is not aligned to 16 bytes");
    const RowsPartition p = partition_of(call.outer, call.channels, (int)(16 / dtype_size(call.dtype)));
    return p.tiles <= INT32_MAX / p.splits ? YES : no("more blocks than a grid has");
}

int64_t batch_norm_rows_workspace(const NormCall &call, const Device &)
{
    const RowsPartition p = partition_of(call.outer, call.channels, (int)(16 / dtype_size(call.dtype)));
    return batch_norm_workspace_bytes(p.splits, call.channels);
}

cuda_ops_status batch_norm_rows(const NormCall &call, const Device &)
{
    const bool is_forward = call.pass == CUDA_OPS_BATCH_NORM_TRAINING || call.pass == CUDA_OPS_BATCH_NORM_INFERENCE;
    CUDA_OPS_DISPATCH(call.dtype, T, return is_forward ? forward<T>(call) : backward<T>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}
