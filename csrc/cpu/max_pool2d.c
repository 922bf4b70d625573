/* max_pool2d on the CPU. Forward: out = max over the window, and its index; backward: each window's gradient goes to
 * that index. Bound by memory: the input read once, and 12 (double: 16) bytes written per output. Contiguous: windows
 * that lie inside the input are processed a row at a time, with the kernel's and the stride's sizes as constants for
 * the usual 2x2, so that the row is vectorised. channels_last: vectors over the channels. */
#ifndef REAL

#include "cuda_ops/max_pool2d.h"

#include "common/common.h"

/* Channels whose maxima are kept in registers while their window is read. */
enum { LANES = 32 };

/* INDEX: an integer as wide as REAL, so that a comparison of REALs selects between INDEX values without conversion. */
#define REAL float
#define INDEX int32_t
#define FN(name) name##_f32
#include "max_pool2d.c"

#include "common/undef_real.h"
#undef INDEX
#define REAL double
#define INDEX int64_t
#define FN(name) name##_f64
#include "max_pool2d.c"

#include "common/undef_real.h"
#undef INDEX

cuda_ops_status cuda_ops_max_pool2d_forward_cpu(void *output, int64_t *indices, const void *input,
                                                const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                cuda_ops_dtype dtype)
{
    if (!cuda_ops_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        (pool->channels_last ? max_forward_rows_f32 : max_forward_planes_f32)(output, indices, input, pool, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        (pool->channels_last ? max_forward_rows_f64 : max_forward_planes_f64)(output, indices, input, pool, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_max_pool2d_backward_cpu(void *grad_input, const void *grad_output, const int64_t *indices,
                                                 const cuda_ops_pool2d *pool, int64_t begin, int64_t end,
                                                 cuda_ops_dtype dtype)
{
    if (!cuda_ops_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        (pool->channels_last ? max_backward_rows_f32 : max_backward_planes_f32)(grad_input, grad_output, indices, pool,
                                                                                begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        (pool->channels_last ? max_backward_rows_f64 : max_backward_planes_f64)(grad_input, grad_output, indices, pool,
                                                                                begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

/* Windows [begin, end) of one row of outputs, over `rows` rows of the input that lie row_step elements apart. `first`
 * is column 0 of the first of them, `first_index` its index. `inside` promises that no window leaves the input along
 * the width. */
CUDA_OPS_INLINE void FN(max_row)(REAL *restrict output, int64_t *restrict indices, const REAL *restrict first,
                                 int64_t first_index, int32_t rows, int32_t row_step, cuda_ops_pool_axis width,
                                 int32_t begin, int32_t end, bool inside)
{
    for (int32_t w = begin; w < end; w++) {
        const int32_t start = cuda_ops_pool_start(width, w);
        const int32_t tap_begin = inside ? 0 : cuda_ops_pool_first_tap(width, start);
        const int32_t tap_end = inside ? width.kernel : cuda_ops_pool_end_tap(width, start);
        REAL best = (REAL)-INFINITY;
        int32_t index = start + tap_begin * width.dilation;
        for (int32_t row = 0; row < rows; row++)
            for (int32_t tap = tap_begin; tap < tap_end; tap++) {
                const int32_t offset = row * row_step + start + tap * width.dilation;
                const REAL value = first[offset];
                const bool take = value > best || value != value;
                best = take ? value : best;
                index = take ? offset : index;
            }
        output[w] = best;
        indices[w] = rows > 0 && tap_begin < tap_end ? first_index + index : -1;
    }
}

CUDA_OPS_SIMD static void FN(max_forward_planes)(REAL *output, int64_t *indices, const REAL *input,
                                                 const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t input_plane = (int64_t)height.input * width.input;
    /* No window has two rows of the input if the second is dilated out of it, however far. */
    const int32_t row_step = height.dilation < height.input ? height.dilation * width.input : 0;
    int32_t inside_begin, inside_end;
    cuda_ops_pool_inside(width, &inside_begin, &inside_end);
    const bool usual = width.kernel == 2 && width.stride == 2 && width.dilation == 1;
    const cuda_ops_pool_axis two = {width.input, width.output, 2, 2, width.padding, 1};
    for (int64_t plane = begin; plane < end; plane++)
        for (int32_t h = 0; h < height.output; h++) {
            const int32_t start = cuda_ops_pool_start(height, h);
            const int32_t tap_begin = cuda_ops_pool_first_tap(height, start);
            const int32_t rows = cuda_ops_pool_end_tap(height, start) - tap_begin;
            const int64_t first_index = (int64_t)(start + tap_begin * height.dilation) * width.input;
            const REAL *first = input + plane * input_plane + (rows > 0 ? first_index : 0);
            REAL *out = output + (plane * height.output + h) * width.output;
            int64_t *index = indices + (plane * height.output + h) * width.output;
            FN(max_row)(out, index, first, first_index, rows, row_step, width, 0, inside_begin, false);
            if (usual && rows == 2)
                FN(max_row)(out, index, first, first_index, 2, row_step, two, inside_begin, inside_end, true);
            else
                FN(max_row)(out, index, first, first_index, rows, row_step, width, inside_begin, inside_end, true);
            FN(max_row)(out, index, first, first_index, rows, row_step, width, inside_end, width.output, false);
        }
}

/* A window in `lanes` channels, at most LANES of them; `first` is position 0 of the image in the first of these. */
CUDA_OPS_INLINE void FN(max_channels)(REAL *restrict output, int64_t *restrict indices, const REAL *restrict first,
                                      int64_t channels, cuda_ops_pool_axis height, cuda_ops_pool_axis width,
                                      int32_t h_start, int32_t w_start, int64_t lanes)
{
    const int32_t h_begin = cuda_ops_pool_first_tap(height, h_start), h_end = cuda_ops_pool_end_tap(height, h_start);
    const int32_t w_begin = cuda_ops_pool_first_tap(width, w_start), w_end = cuda_ops_pool_end_tap(width, w_start);
    const bool empty = h_begin >= h_end || w_begin >= w_end;
    const INDEX first_index =
        empty ? -1 : (INDEX)((h_start + h_begin * height.dilation) * width.input + w_start + w_begin * width.dilation);
    REAL best[LANES];
    INDEX index[LANES];
    for (int64_t c = 0; c < lanes; c++) {
        best[c] = (REAL)-INFINITY;
        index[c] = first_index;
    }
    for (int32_t h = h_begin; h < h_end; h++)
        for (int32_t w = w_begin; w < w_end; w++) {
            const INDEX position =
                (INDEX)((h_start + h * height.dilation) * width.input + w_start + w * width.dilation);
            const REAL *restrict in = first + position * channels;
            for (int64_t c = 0; c < lanes; c++) {
                const bool take = in[c] > best[c] || in[c] != in[c];
                best[c] = take ? in[c] : best[c];
                index[c] = take ? position : index[c];
            }
        }
    for (int64_t c = 0; c < lanes; c++) {
        output[c] = best[c];
        indices[c] = index[c];
    }
}

CUDA_OPS_SIMD static void FN(max_forward_rows)(REAL *output, int64_t *indices, const REAL *input,
                                               const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const REAL *image = input + row / height.output * height.input * width.input * channels;
        const int32_t h_start = cuda_ops_pool_start(height, (int32_t)(row % height.output));
        for (int32_t w = 0; w < width.output; w++) {
            const int32_t w_start = cuda_ops_pool_start(width, w);
            REAL *out = output + (row * width.output + w) * channels;
            int64_t *index = indices + (row * width.output + w) * channels;
            int64_t c = 0;
            for (; c + LANES <= channels; c += LANES)
                FN(max_channels)(out + c, index + c, image + c, channels, height, width, h_start, w_start, LANES);
            if (c < channels)
                FN(max_channels)
            (out + c, index + c, image + c, channels, height, width, h_start, w_start, channels - c);
        }
    }
}

/* Within a plane one thread adds window after window, in their order. */
static void FN(max_backward_planes)(REAL *grad_input, const REAL *grad_output, const int64_t *indices,
                                    const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const int64_t input_plane = (int64_t)pool->height.input * pool->width.input;
    const int64_t output_plane = (int64_t)pool->height.output * pool->width.output;
    for (int64_t plane = begin; plane < end; plane++) {
        REAL *restrict grad_in = grad_input + plane * input_plane;
        const REAL *restrict grad_out = grad_output + plane * output_plane;
        const int64_t *restrict index = indices + plane * output_plane;
        memset(grad_in, 0, (size_t)input_plane * sizeof(REAL));
        for (int64_t i = 0; i < output_plane; i++)
            if ((uint64_t)index[i] < (uint64_t)input_plane)
                grad_in[index[i]] += grad_out[i];
    }
}

/* A row of the input gathers from the windows over it: rows share windows, and nothing is written by two threads. */
CUDA_OPS_SIMD static void FN(max_backward_rows)(REAL *grad_input, const REAL *grad_output, const int64_t *indices,
                                                const cuda_ops_pool2d *pool, int64_t begin, int64_t end)
{
    const cuda_ops_pool_axis height = pool->height, width = pool->width;
    const int64_t channels = pool->channels;
    for (int64_t row = begin; row < end; row++) {
        const int64_t n = row / height.input;
        const int32_t h = (int32_t)(row % height.input);
        const int32_t h_begin = cuda_ops_pool_first_window(height, h), h_end = cuda_ops_pool_end_window(height, h);
        for (int32_t w = 0; w < width.input; w++) {
            const int32_t w_begin = cuda_ops_pool_first_window(width, w), w_end = cuda_ops_pool_end_window(width, w);
            const int64_t position = (int64_t)h * width.input + w;
            REAL *restrict grad_in = grad_input + (row * width.input + w) * channels;
            memset(grad_in, 0, (size_t)channels * sizeof(REAL));
            for (int32_t i = h_begin; i < h_end; i++)
                for (int32_t j = w_begin; j < w_end; j++) {
                    const int64_t window = ((n * height.output + i) * width.output + j) * channels;
                    const REAL *restrict grad_out = grad_output + window;
                    const int64_t *restrict index = indices + window;
                    for (int64_t c = 0; c < channels; c++)
                        grad_in[c] += index[c] == position ? grad_out[c] : (REAL)0;
                }
        }
    }
}

#endif
