/* The steps of conv_block.h for one instruction set (see conv_block.c, which includes it). product.h has the matrix
 * products, winograd.h the transforms, one_channel.h what is special to one input channel.
 *
 * Inside, everything is channels-last, so that a vector is a few channels of one position, and transforms are sums of
 * vectors. With several input channels an image's data are, with T windows, C input and K output channels:
 *
 *     staged   (height + 2) x (width + 2) x C, the zero-padded image
 *     V        16 x T x C    B^T d B of the 4x4 input tile d around each window
 *     U        16 x C x K    G w G^T
 *     M        16 x T x K    V U, a matrix product for each of the 16
 *     output   T x 4 x K     A^T m A: the four positions of a window side by side, as the pooling reads them
 *
 * convolve and sums take the last images first, pool and the gradients the first: what the pass before, of this block or
 * of the one that it follows, wrote last is still in the second-level cache.
 *
 * Backward, with dy the gradient of a window's four positions: V^T times A dy A^T (16 x T x K) is the gradient of U,
 * and grad_input is the forward pass on the zero-padded dy with the transposed weight. */

#define LANES ((int)(VECTOR_BYTES / sizeof(float)))

typedef float TARGET(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef float TARGET(unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t TARGET(mask) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t TARGET(bytes) __attribute__((vector_size(VECTOR_BYTES / 4), aligned(1), may_alias));

CUDA_OPS_INLINE TARGET(vector) TARGET(load)(const float *from)
{
    return *(const TARGET(unaligned) *)from;
}

CUDA_OPS_INLINE void TARGET(store)(float *to, TARGET(vector) value)
{
    *(TARGET(unaligned) *)to = value;
}

#include "conv_block/product.h"

#include "conv_block/winograd.h"

#include "conv_block/one_channel.h"

/* Copies image n into `staged`, whose padding is zero already. */
static void TARGET(stage)(float *restrict staged, const void *input, int64_t n, const struct block *b,
                          const struct workspace *w)
{
    const int64_t height = b->height, width = b->width, channels = b->in_channels, count = channels * height * width;
    const float *restrict const image = as_float(b, input, n * count, count, w->wide_input);
    for (int64_t y = 0; y < height; y++) {
        float *to = staged + ((y + 1) * b->pitch + 1) * channels;
        if (b->input_channels_last || channels == 1)
            memcpy(to, image + y * width * channels, (size_t)(width * channels) * sizeof(float));
        else
            for (int64_t x = 0; x < width; x++)
                for (int64_t c = 0; c < channels; c++)
                    to[x * channels + c] = image[(c * height + y) * width + x];
    }
}

/* squares[k] = sum of (output - center)^2. */
static void TARGET(squares)(float *restrict squares, const float *restrict output, const float *restrict center,
                            int64_t positions, int64_t channels)
{
    for (int64_t k = 0; k < channels; k += LANES) {
        const TARGET(vector) middle = TARGET(load)(center + k);
        TARGET(vector) even = BROADCAST(0.0f), odd = even;
        for (int64_t p = 0; p < positions; p += 2) {
            const TARGET(vector) a = TARGET(load)(output + p * channels + k) - middle;
            const TARGET(vector) b = TARGET(load)(output + (p + 1) * channels + k) - middle;
            even = MULTIPLY_ADD(a, a, even);
            odd = MULTIPLY_ADD(b, b, odd);
        }
        TARGET(store)(squares + k, even + odd);
    }
}

static void TARGET(convolve)(void *conv_output, double *moments, const void *input, const float *prepared,
                             const float *bias, const struct block *b, int64_t begin, int64_t end,
                             const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows, pixels = b->height * b->width;
    memset(w->staged_input, 0, (size_t)(b->padded * C) * sizeof(float));
    for (int64_t chunk = end - 1; chunk >= begin; chunk--) {
        double *const moments_of_chunk = moments + 2 * chunk * K;
        double count = 0;
        for (int64_t k = 0; k < 2 * K; k++)
            moments_of_chunk[k] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            float *const output = room_for(b, conv_output, n * 4 * T * K, w->wide_conv_output);
            TARGET(stage)(w->staged_input, input, n, b, w);
            TARGET(transform_input)(w->v, w->staged_input, b->rows, b->columns, C);
            for (int i = 0; i < 16; i++)
                TARGET(product)(w->m + i * T * K, w->v + i * T * C, prepared + i * C * K, T, K, C);
            float *const sums = w->channel, *const center = sums + K, *const squares = center + K;
            TARGET(output_image)(output, sums, w->m, bias, T, K);
            for (int64_t k = 0; k < K; k++)
                center[k] = sums[k] / (float)(4 * T);
            TARGET(squares)(squares, output, center, 4 * T, K);
            merge_moments(moments_of_chunk, &count, sums, center, squares, pixels, K);
            store_rounded(b, conv_output, n * 4 * T * K, output, 4 * T * K);
        }
    }
}

/* relu of the largest of four normalised values. `index`: which it is, the first of equals, or 255 where relu gave 0;
 * `value`: the same before normalisation. */
CUDA_OPS_INLINE TARGET(vector)
    TARGET(pool_window)(TARGET(mask) * index, TARGET(vector) * value, const TARGET(vector) y[4], TARGET(vector) center,
                        TARGET(vector) scale, TARGET(vector) offset)
{
    TARGET(vector) best = MULTIPLY_ADD(y[0] - center, scale, offset);
    TARGET(vector) taken = y[0];
    TARGET(mask) where = {0};
#pragma GCC unroll 3
    for (int i = 1; i < 4; i++) {
        const TARGET(vector) z = MULTIPLY_ADD(y[i] - center, scale, offset);
        const TARGET(flags) larger = LARGER_OR_NAN(z, best);
        best = CHOOSE(larger, z, best);
        taken = CHOOSE(larger, y[i], taken);
        where = (TARGET(mask))CHOOSE(larger, (TARGET(mask)){0} + i, where);
    }
    const TARGET(mask) active = ~(best <= BROADCAST(0.0f)); /* NaN is active */
    *index = (active & where) | (~active & 255);
    *value = taken;
    return (TARGET(vector))(active & (TARGET(mask))best);
}

/* One image's windows: conv_output (T x 4 x K), or with one input channel computed from `staged`, to output (T x K). */
static void TARGET(pool_image)(float *restrict output, uint8_t *restrict argmax, float *restrict maximum,
                               const float *restrict conv_output, const float *restrict staged,
                               const float *restrict weight, const float *bias, const float *restrict coefficients,
                               const struct block *b)
{
    const int64_t K = b->out_channels;
    for (int64_t k = 0; k < K; k += LANES) {
        const TARGET(vector) center = TARGET(load)(coefficients + k), scale = TARGET(load)(coefficients + K + k);
        const TARGET(vector) offset = TARGET(load)(coefficients + 2 * K + k);
        const TARGET(vector) shift = bias ? TARGET(load)(bias + k) : BROADCAST(0.0f);
        TARGET(vector) w[9];
        if (staged)
#pragma GCC unroll 9
            for (int i = 0; i < 9; i++)
                w[i] = TARGET(load)(weight + i * K + k);
        for (int64_t row = 0; row < b->rows; row++)
            for (int64_t column = 0; column < b->columns; column++) {
                const int64_t t = row * b->columns + column;
                TARGET(vector) y[4], taken;
                TARGET(mask) index;
                if (staged)
                    TARGET(convolve_window)(y, staged + 2 * row * (b->width + 2) + 2 * column, b->width + 2, w, shift);
                else
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++)
                        y[i] = TARGET(load)(conv_output + (4 * t + i) * K + k);
                TARGET(store)(output + t * K + k, TARGET(pool_window)(&index, &taken, y, center, scale, offset));
                if (argmax)
                    STORE_BYTES(argmax + t * K + k, index);
                if (maximum)
                    TARGET(store)(maximum + t * K + k, taken);
            }
    }
}

static void TARGET(pool)(void *output, uint8_t *argmax, void *maximum, const void *conv_output, const void *input,
                         const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                         int64_t begin, int64_t end, const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows;
    const bool recompute = b->in_channels == 1;
    if (recompute)
        memset(w->staged_input, 0, (size_t)b->padded * sizeof(float));
    for (int64_t n = first_of_chunk(b, begin); n < first_of_chunk(b, end); n++) {
        float *const to = room_for(b, output, n * T * K, w->wide_output);
        float *const pooled = b->output_channels_last ? to : w->pooled;
        float *const largest = maximum ? room_for(b, maximum, n * T * K, w->wide_maximum) : NULL;
        const float *const y =
            recompute ? NULL : as_float(b, conv_output, n * 4 * T * K, 4 * T * K, w->wide_conv_output);
        if (recompute)
            TARGET(stage)(w->staged_input, input, n, b, w);
        TARGET(pool_image)(pooled, argmax ? argmax + n * T * K : NULL, largest, y, recompute ? w->staged_input : NULL,
                           prepared, bias, coefficients, b);
        if (!b->output_channels_last)
            TARGET(transpose)(to, pooled, T, K);
        store_rounded(b, output, n * T * K, to, T * K);
        if (maximum)
            store_rounded(b, maximum, n * T * K, largest, T * K);
    }
}

/* Of one image: sums[k] += dz, products[k] += dz * (maximum - center), dz being grad where a window is active. */
static void TARGET(sums_image)(float *restrict sums, float *restrict products, const float *restrict grad,
                               const uint8_t *restrict argmax, const float *restrict maximum,
                               const float *restrict center, int64_t windows, int64_t channels)
{
    for (int64_t k = 0; k < channels; k += LANES) {
        const TARGET(vector) middle = TARGET(load)(center + k);
        TARGET(vector) sum = BROADCAST(0.0f), product = sum;
        for (int64_t t = 0; t < windows; t++) {
            const int64_t at = t * channels + k;
            const TARGET(mask) index = __builtin_convertvector(*(const TARGET(bytes) *)(argmax + at), TARGET(mask));
            const TARGET(vector) dz = (TARGET(vector))((index != 255) & (TARGET(mask))TARGET(load)(grad + at));
            sum += dz;
            product = MULTIPLY_ADD(dz, TARGET(load)(maximum + at) - middle, product);
        }
        TARGET(store)(sums + k, sum);
        TARGET(store)(products + k, product);
    }
}

/* One image's gradient of the output, T x K. */
CUDA_OPS_INLINE const float *TARGET(grad_of_image)(const void *grad_output, int64_t n, const struct block *b,
                                                   const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows;
    const float *const grad = as_float(b, grad_output, n * T * K, T * K, w->wide_output);
    if (b->output_channels_last)
        return grad;
    TARGET(transpose)(w->pooled, grad, K, T);
    return w->pooled;
}

static void TARGET(sums)(double *partials, const void *grad_output, const uint8_t *argmax, const void *maximum,
                         const void *input, const float *center, const struct block *b, int64_t begin, int64_t end,
                         const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows;
    const bool one = b->in_channels == 1;
    const int64_t count = (one ? 10 : 2) * K;
    if (one)
        memset(w->staged_input, 0, (size_t)b->padded * sizeof(float));
    for (int64_t chunk = end - 1; chunk >= begin; chunk--) {
        double *const partial = partials + chunk * count;
        for (int64_t i = 0; i < count; i++)
            partial[i] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *const grad = TARGET(grad_of_image)(grad_output, n, b, w);
            if (one) {
                TARGET(stage)(w->staged_input, input, n, b, w);
                TARGET(products_image)(w->channel, w->channel + K, grad, argmax + n * T * K, w->staged_input, b);
            } else {
                TARGET(sums_image)(w->channel, w->channel + K, grad, argmax + n * T * K,
                                   as_float(b, maximum, n * T * K, T * K, w->wide_maximum), center, T, K);
            }
            for (int64_t i = 0; i < count; i++)
                partial[i] += (double)w->channel[i];
        }
    }
}

static void TARGET(gradients_one)(void *grad_input, const void *grad_output, const uint8_t *argmax, const void *input,
                                  const float *prepared, const float *bias, const float *coefficients,
                                  const struct block *b, int64_t begin, int64_t end, const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows, pixels = b->height * b->width;
    memset(w->staged_input, 0, (size_t)b->padded * sizeof(float));
    memset(w->staged_grad, 0, (size_t)(b->padded * K) * sizeof(float));
    for (int64_t n = first_of_chunk(b, begin); n < first_of_chunk(b, end); n++) {
        const float *const grad = TARGET(grad_of_image)(grad_output, n, b, w);
        TARGET(stage)(w->staged_input, input, n, b, w);
        TARGET(grad_image_one)(w->staged_grad, grad, argmax + n * T * K, w->staged_input, prepared, bias, coefficients,
                               b);
        float *const target = room_for(b, grad_input, n * pixels, w->wide_input);
        TARGET(grad_input_image_one)(target, w->staged_grad, prepared, b);
        store_rounded(b, grad_input, n * pixels, target, pixels);
    }
}

static void TARGET(gradients)(void *grad_input, float *weights, const void *grad_output, const uint8_t *argmax,
                              const void *conv_output, const void *input, const float *prepared,
                              const float *coefficients, const struct block *b, int64_t begin, int64_t end,
                              const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows, pixels = b->height * b->width;
    const float *const transposed_weight = grad_input ? prepared + 16 * C * K : NULL;
    memset(w->staged_input, 0, (size_t)(b->padded * C) * sizeof(float));
    memset(w->staged_grad, 0, (size_t)(b->padded * K) * sizeof(float));
    for (int64_t chunk = begin; chunk < end; chunk++) {
        memset(w->u, 0, (size_t)(16 * C * K) * sizeof(float));
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *const grad = TARGET(grad_of_image)(grad_output, n, b, w);
            const float *const y = as_float(b, conv_output, n * 4 * T * K, 4 * T * K, w->wide_conv_output);
            TARGET(grad_image)(w->m, grad_input ? w->staged_grad : NULL, grad, argmax + n * T * K, y, coefficients, b);
            TARGET(stage)(w->staged_input, input, n, b, w);
            TARGET(transform_input)(w->v, w->staged_input, b->rows, b->columns, C);
            for (int i = 0; i < 16; i++)
                TARGET(product_transposed)(w->u + i * C * K, w->v + i * T * C, w->m + i * T * K, C, K, T);
            if (!grad_input)
                continue;
            TARGET(transform_input)(w->v, w->staged_grad, b->rows, b->columns, K);
            for (int i = 0; i < 16; i++)
                TARGET(product)(w->m + i * T * C, w->v + i * T * K, transposed_weight + i * K * C, T, C, K);
            float *const target = room_for(b, grad_input, n * C * pixels, w->wide_input);
            /* v is no longer needed */
            TARGET(grad_input_image)(b->input_channels_last ? target : w->v, w->m, b);
            if (!b->input_channels_last)
                TARGET(transpose)(target, w->v, pixels, C);
            store_rounded(b, grad_input, n * C * pixels, target, C * pixels);
        }
        TARGET(inverse_weight)(weights + chunk * 9 * C * K, w->u, C * K);
    }
}

static const struct kernels TARGET(kernels) = {TARGET(convolve), TARGET(pool), TARGET(sums), TARGET(gradients),
                                               TARGET(gradients_one)};

#undef LANES
#undef VECTOR_BYTES
#undef TILE_ROWS
#undef TARGET
#undef BROADCAST
#undef MULTIPLY_ADD
#undef STORE_BYTES
#undef LARGER_OR_NAN
#undef CHOOSE
