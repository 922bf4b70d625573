// layer_norm and rms_norm of rows that do not fit into registers, or do not start where vectors do: a block has a row,
// and reads it again for each step, mostly from the L2: for the mean, for the variance, and to write the result;
// backward for the two sums and to write grad_input. 16-byte vectors wherever rows start (common/rows.cuh), if all arrays
// lie alike. grad_weight and grad_bias come of a kernel of their own, in which a thread goes down a column, and so read
// input and grad_output once more. Bound by memory.
#include "common/device.h"
#include "common/rows.cuh"
#include "cuda_ops/dropout.h"
#include "layer_norm/paths.h"
#include "layer_norm/rows.cuh"

static constexpr int ROW_THREADS = 512;
static constexpr int COLUMN_THREADS = 256;
static constexpr int ROWS_UNDER_WAY = 4;
static constexpr int64_t LEAST_ROWS = 32; // that a thread goes down

// for_row, or the same element by element.
template <int INPUTS, typename T, typename F>
__device__ __forceinline__ void for_elements(T *output, const T *const (&inputs)[INPUTS], int64_t cols, bool vectorised,
                                             F function)
{
    if (vectorised) {
        for_row(output, inputs, cols, threadIdx.x, ROW_THREADS, function);
        return;
    }
    for (int64_t c = threadIdx.x; c < cols; c += ROW_THREADS) {
        accumulate_type<T> values[INPUTS][1];
#pragma unroll
        for (int k = 0; k < INPUTS; k++)
            values[k][0] = load_as_accumulate(inputs[k][c]);
        function(c, values);
        if (output)
            output[c] = store_from_accumulate<T>(values[0][0]);
    }
}

template <typename T, bool ADD>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_forward_streamed_kernel(T *output, T *sum, double *mean, accumulate_type<T> *rstd, int64_t *state,
                                       const T *input, const T *residual, const void *weight, const void *bias,
                                       int64_t rows, int64_t cols, accumulate_type<T> eps, bool rms, bool full,
                                       bool vectorised, uint32_t threshold, accumulate_type<T> scale,
                                       cuda_ops_philox_state philox)
{
    typedef accumulate_type<T> A;
    __shared__ RowScratch<A, 2> scratch;
    int turn = 0;
    const A inverse_cols = A(1) / (A)cols;
    wait_for_predecessor();
    release_successor();
    uint64_t seed = 0, offset = 0;
    if (ADD && state) {
        seed = cuda_ops_philox_seed(philox), offset = cuda_ops_philox_offset(philox);
        if (global_thread_index() == 0) {
            state[0] = (int64_t)seed;
            state[1] = (int64_t)offset;
        }
    }
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t start = row * cols;
        if constexpr (ADD) {
            const T *const both[2] = {input + start, residual + start};
            for_elements(sum + start, both, cols, vectorised, [&](int64_t c, auto &x) {
                constexpr int COUNT = (int)(sizeof(x[0]) / sizeof(A));
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    A kept = A(1);
                    if (state) { // as in dropout.cu: one of Philox's counters is for four elements
                        const uint64_t at = (uint64_t)(start + c + e), counter = at / 4;
                        uint32_t words[4] = {(uint32_t)(offset / 4), (uint32_t)(offset / 4 >> 32), (uint32_t)counter,
                                             (uint32_t)(counter >> 32)};
                        cuda_ops_philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
                        const int word_index = (int)(at % 4);
                        const uint32_t word =
                            word_index < 2 ? words[word_index == 1] : (word_index == 2 ? words[2] : words[3]);
                        kept = word >= threshold ? scale : A(0);
                    }
                    x[0][e] = x[0][e] * kept + x[1][e];
                }
            });
            __syncthreads(); // the row of sums is read below, maybe by other threads
        }
        const T *const from[1] = {ADD ? sum + start : input + start};
        A m[1] = {0};
        if (!rms) {
            for_elements((T *)nullptr, from, cols, vectorised, [&](int64_t, const auto &x) {
#pragma unroll
                for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                    m[0] += x[0][e] * inverse_cols;
            });
            row_sums<false>(m, ROW_THREADS, 1, scratch, turn);
        }
        A sums[2] = {0, 0};
        for_elements((T *)nullptr, from, cols, vectorised, [&](int64_t, const auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                const A difference = x[0][e] - m[0];
                sums[0] += difference * difference;
                sums[1] += difference * inverse_cols;
            }
        });
        row_sums<false>(sums, ROW_THREADS, 1, scratch, turn);
        const A rest = rms ? A(0) : sums[1];
        const A r = rstd_of(sums[0] * inverse_cols, rest, eps), shift = -rest * r;
        if (threadIdx.x == 0) {
            if (mean)
                mean[row] = (double)m[0] + (double)rest;
            rstd[row] = r;
        }
        for_elements(output + start, from, cols, vectorised, [&](int64_t c, auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                x[0][e] = (x[0][e] - m[0]) * r + shift;
                if (weight)
                    x[0][e] *= parameter_at<T>(weight, full, c + e);
                if (bias)
                    x[0][e] += parameter_at<T>(bias, full, c + e);
            }
        });
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 1)
    layer_norm_grad_input_streamed_kernel(T *grad_input, const T *grad_output, const T *grad_sum, const T *input,
                                          const void *weight, const double *mean, const accumulate_type<T> *rstd,
                                          int64_t rows, int64_t cols, bool rms, bool full, bool vectorised)
{
    typedef accumulate_type<T> A;
    __shared__ RowScratch<A, 2> scratch;
    int turn = 0;
    wait_for_predecessor();
    release_successor();
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int64_t start = row * cols;
        const double m = rms ? 0.0 : mean[row];
        const A r = rstd[row], center = (A)m, shift = (A)((double)center - m) * r;
        const T *const both[2] = {grad_output + start, input + start};
        A sums[2] = {0, 0};
        for_elements((T *)nullptr, both, cols, vectorised, [&](int64_t c, const auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                const A h = weight ? x[0][e] * parameter_at<T>(weight, full, c + e) : x[0][e];
                sums[0] += h;
                sums[1] += h * ((x[1][e] - center) * r + shift);
            }
        });
        row_sums<false>(sums, ROW_THREADS, 1, scratch, turn);
        const A mean_h = rms ? A(0) : sums[0] / (A)cols, slope = sums[1] / (A)cols;
        for_elements(grad_input + start, both, cols, vectorised, [&](int64_t c, auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                const A h = weight ? x[0][e] * parameter_at<T>(weight, full, c + e) : x[0][e];
                x[0][e] = r * (h - mean_h - ((x[1][e] - center) * r + shift) * slope);
                if (grad_sum)
                    x[0][e] += load_as_accumulate(grad_sum[start + c + e]);
            }
        });
    }
}

// Block (x, y): columns from x * COLUMN_THREADS on, and the y-th part of the rows, from y * part_rows on.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS)
    layer_norm_grad_parameters_streamed_kernel(accumulate_type<T> *partials, const T *grad_output, const T *input,
                                               const double *mean, const accumulate_type<T> *rstd, int64_t rows,
                                               int64_t cols, int64_t part_rows, bool rms)
{
    typedef accumulate_type<T> A;
    wait_for_predecessor();
    release_successor();
    const int64_t begin = blockIdx.y * part_rows, end = begin + part_rows < rows ? begin + part_rows : rows;
    for (int64_t column = global_thread_index(); column < cols; column += global_thread_count()) {
        A grad_weight = 0, grad_bias = 0;
        for (int64_t first = begin; first < end; first += ROWS_UNDER_WAY) {
            A x[ROWS_UNDER_WAY], g[ROWS_UNDER_WAY];
#pragma unroll
            for (int i = 0; i < ROWS_UNDER_WAY; i++) {
                const bool there = first + i < end;
                x[i] = there ? load_as_accumulate(input[(first + i) * cols + column]) : A(0);
                g[i] = there ? load_as_accumulate(grad_output[(first + i) * cols + column]) : A(0);
            }
#pragma unroll
            for (int i = 0; i < ROWS_UNDER_WAY; i++)
                if (first + i < end) {
                    const double m = rms ? 0.0 : mean[first + i];
                    const A r = rstd[first + i], center = (A)m;
                    grad_weight += g[i] * ((x[i] - center) * r + (A)((double)center - m) * r);
                    grad_bias += g[i];
                }
        }
        partials[2 * blockIdx.y * cols + column] = grad_weight;
        partials[(2 * blockIdx.y + 1) * cols + column] = grad_bias;
    }
}

// Parts of the rows, so that blocks fill the device four times.
static int64_t parts_of(const LayerNormCall &call, const Device &device)
{
    const int64_t across = ceil_div(call.cols, COLUMN_THREADS), most = ceil_div(call.rows, LEAST_ROWS);
    const int64_t wanted = ceil_div(4 * (int64_t)device.multiprocessors, across);
    const int64_t parts = wanted < most ? wanted : most;
    return parts < 1 ? 1 : (parts < MAX_GRID ? parts : MAX_GRID);
}

int64_t layer_norm_streamed_workspace(const LayerNormCall &call, const Device &device)
{
    return parts_of(call, device) * 2 * call.cols * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
}

template <typename T>
static cuda_ops_status forward(const LayerNormCall &call)
{
    typedef accumulate_type<T> A;
    const bool vectorised =
        same_alignment(call.input, call.output) &&
        (!call.residual || (same_alignment(call.input, call.residual) && same_alignment(call.input, call.sum)));
    launch_dependent(
        call.residual ? layer_norm_forward_streamed_kernel<T, true> : layer_norm_forward_streamed_kernel<T, false>,
        dim3(clamp_grid(call.rows)), dim3(ROW_THREADS), 0, call.stream, (T *)call.output, (T *)call.sum, call.mean,
        (A *)call.rstd, call.state, (const T *)call.input, (const T *)call.residual, call.weight, call.bias, call.rows,
        call.cols, (A)call.eps, call.rms, call.parameter_dtype != call.dtype, vectorised,
        cuda_ops_dropout_threshold(call.p), (A)cuda_ops_dropout_scale(call.p), call.philox);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(const LayerNormCall &call, const Device &device)
{
    typedef accumulate_type<T> A;
    if (call.grad_input) {
        const bool vectorised =
            same_alignment(call.input, call.grad_output) && same_alignment(call.input, call.grad_input);
        launch_dependent(layer_norm_grad_input_streamed_kernel<T>, dim3(clamp_grid(call.rows)), dim3(ROW_THREADS), 0,
                         call.stream, (T *)call.grad_input, (const T *)call.grad_output, (const T *)call.grad_sum,
                         (const T *)call.input, call.weight, call.saved_mean, (const A *)call.saved_rstd, call.rows,
                         call.cols, call.rms, call.parameter_dtype != call.dtype, vectorised);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    if (!call.grad_weight && !call.grad_bias)
        return call.grad_input_sums ? layer_norm_sum_grad_input(call) : CUDA_OPS_SUCCESS;
    int64_t parts = parts_of(call, device);
    const int64_t part_rows = ceil_div(call.rows, parts);
    parts = ceil_div(call.rows, part_rows); // without empty ones
    const dim3 grid(clamp_grid(ceil_div(call.cols, COLUMN_THREADS)), (unsigned int)parts);
    launch_dependent(layer_norm_grad_parameters_streamed_kernel<T>, grid, dim3(COLUMN_THREADS), 0, call.stream,
                     (A *)call.workspace, (const T *)call.grad_output, (const T *)call.input, call.saved_mean,
                     (const A *)call.saved_rstd, call.rows, call.cols, part_rows, call.rms);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = layer_norm_sum_partials(call, parts, false);
    return status == CUDA_OPS_SUCCESS && call.grad_input_sums ? layer_norm_sum_grad_input(call) : status;
}

cuda_ops_status layer_norm_streamed(const LayerNormCall &call, const Device &device)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return call.backward ? backward<T>(call, device) : forward<T>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}
