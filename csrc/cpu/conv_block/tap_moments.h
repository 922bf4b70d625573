/* One input channel, in double: the moments of the nine taps, and what follows from them. Tap (r, s) at position (i, j)
 * is input[i + r - 1][j + s - 1], zero out of bounds. The convolution is linear in its taps, so that their sums and
 * products give its mean and variance, and with backward's sums its weight's gradient, without computing it. */
#ifndef CUDA_OPS_CPU_CONV_BLOCK_TAP_MOMENTS_H
#define CUDA_OPS_CPU_CONV_BLOCK_TAP_MOMENTS_H

#include "conv_block/block.h"
#include "cuda_ops/conv_block.h"

/* The sums of the nine taps, and of their products. */
enum { TAPS = 9, PAIRS = TAPS * TAPS };
_Static_assert(TAPS + PAIRS == CUDA_OPS_CONV_BLOCK_TAP_MOMENTS, "as the header says");

/* sums[2 + e] += sum over i < count of a[i] * b[i + e], for e = -2 ... 2. */
CUDA_OPS_SIMD static void shifted_products(double *sums, const double *a, const double *b, int64_t count)
{
    double p0 = 0, p1 = 0, p2 = 0, p3 = 0, p4 = 0;
#pragma omp simd reduction(+ : p0, p1, p2, p3, p4)
    for (int64_t i = 0; i < count; i++) {
        p0 += a[i] * b[i - 2];
        p1 += a[i] * b[i - 1];
        p2 += a[i] * b[i];
        p3 += a[i] * b[i + 1];
        p4 += a[i] * b[i + 2];
    }
    sums[0] += p0;
    sums[1] += p1;
    sums[2] += p2;
    sums[3] += p3;
    sums[4] += p4;
}

/* The same over `rows` rows of the zero-padded image, beginning at a and b; the share of sums[2] that the image's first
 * and last column have is added to sums[5] and sums[6]. */
enum { SHIFTS = 5, ROW_SUMS = SHIFTS + 2 };
static void row_products(double sums[ROW_SUMS], const double *a, const double *b, int64_t rows, int64_t pitch)
{
    shifted_products(sums, a, b, rows * pitch);
    for (int64_t row = 0; row < rows; row++, a += pitch, b += pitch) {
        sums[5] += a[1] * b[1];
        sums[6] += a[pitch - 2] * b[pitch - 2];
    }
}

/* products[s][z] += sum over the positions along the width of tap s times tap z, taps of two rows. Since the padding is
 * zero, that is the sum of all products of elements z - s apart, except that tap 0 never reads the last column and tap
 * 2 never the first. */
static void add_tap_products(double *products, const double sums[ROW_SUMS])
{
    const double same[3] = {sums[2] - sums[6], sums[2], sums[2] - sums[5]};
    for (int s = 0; s < 3; s++)
        for (int z = 0; z < 3; z++)
            products[s * TAPS + z] += s == z ? same[s] : sums[2 + z - s];
}

/* Adds one image's sums of taps, and of products of two taps, over all positions. Tap (r, s) at position (i, j) is
 * padded[i + r][j + s]. Products are written above the diagonal only. */
static void tap_products(double *restrict sums, double *restrict products, const double *restrict padded,
                         int64_t height, int64_t width)
{
    const int64_t pitch = width + 2;
    const double *const first_row = padded + pitch, *const last_row = padded + height * pitch;
    /* The first row, the rows between, the last row: taps of row 0 do not read the last, and taps of row 2 the
     * first. */
    double parts[3][ROW_SUMS] = {{0}}, totals[3][3] = {{0}};
    for (int64_t row = 0; row < height; row++) {
        const double *const pixels = first_row + row * pitch + 1;
        double *const total = totals[row == 0 ? 0 : row < height - 1 ? 1 : 2];
        double middle = 0;
#pragma omp simd reduction(+ : middle)
        for (int64_t j = 1; j < width - 1; j++)
            middle += pixels[j];
        total[0] += pixels[0] + middle;
        total[1] += pixels[0] + middle + pixels[width - 1];
        total[2] += middle + pixels[width - 1];
    }
    row_products(parts[0], first_row, first_row, 1, pitch);
    row_products(parts[1], first_row + pitch, first_row + pitch, height - 2, pitch);
    row_products(parts[2], last_row, last_row, 1, pitch);
    for (int r = 0; r < 3; r++)
        for (int part = r == 2; part < 3 - (r == 0); part++) {
            for (int s = 0; s < 3; s++)
                sums[3 * r + s] += totals[part][s];
            add_tap_products(products + 3 * r * TAPS + 3 * r, parts[part]);
        }
    for (int d = 1; d < 3; d++) {
        double apart[ROW_SUMS] = {0};
        row_products(apart, first_row, first_row + d * pitch, height - d, pitch);
        for (int r = 0; r + d < 3; r++)
            add_tap_products(products + 3 * r * TAPS + 3 * (r + d), apart);
    }
}

static void tap_moments(double *moments, const void *input, const struct block *b, int64_t begin, int64_t end,
                        const struct workspace *w)
{
    double *const padded = (double *)(void *)w->staged_grad; /* padded x K floats */
    const int64_t pixels = b->height * b->width, pitch = b->width + 2;
    for (int64_t i = 0; i < (b->height + 2) * pitch; i++)
        padded[i] = 0;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        double *const sums = moments + chunk * (TAPS + PAIRS), *const products = sums + TAPS;
        for (int64_t i = 0; i < TAPS + PAIRS; i++)
            sums[i] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *const image = as_float(b, input, n * pixels, pixels, w->wide_input);
            for (int64_t y = 0; y < b->height; y++)
                for (int64_t x = 0; x < b->width; x++)
                    padded[(y + 1) * pitch + 1 + x] = (double)image[y * b->width + x];
            tap_products(sums, products, padded, b->height, b->width);
        }
        for (int i = 0; i < TAPS; i++)
            for (int j = 0; j < i; j++)
                products[i * TAPS + j] = products[j * TAPS + i];
    }
}

/* The gradients of one output channel, from sum = sum of dz, about[tap] = sum of dz * input at the maximum's tap, and
 * the taps' moments over all positions. With y - mean = sum over taps of weight * (tap - its mean):
 *
 *     sum of dz * (y - mean) = sum over taps of weight * about - (mean - bias) * sum
 *
 * and likewise the sum over all positions of dy * tap, dy being the gradient of y. */
static void one_channel(float *grad_weight, double *product, const double *about, double sum, const double *sums,
                        const double *products, const float *weight, double mean, double bias, double rstd,
                        double scale, double n)
{
    *product = (bias - mean) * sum;
    for (int i = 0; i < TAPS; i++)
        *product += (double)weight[i] * about[i];
    for (int i = 0; i < TAPS; i++) {
        double y_tap = 0; /* sum of (y - mean) * tap */
        for (int j = 0; j < TAPS; j++)
            y_tap += (double)weight[j] * (products[i * TAPS + j] - sums[i] * (sums[j] / n));
        grad_weight[i] = (float)(scale * (about[i] - sum / n * sums[i] - rstd * rstd * *product / n * y_tap));
    }
}

#endif
