/* What is special to one input channel, for one instruction set (see conv_block/kernel.h): the convolution is computed
 * wherever it is needed, and never stored. */

/* The 3x3 convolution at the four positions of a window, from the 4x4 input tile around it. */
CUDA_OPS_INLINE void TARGET(convolve_window)(TARGET(vector) y[4], const float *staged, int64_t pitch,
                                             const TARGET(vector) weight[9], TARGET(vector) bias)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        y[i] = bias;
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            const TARGET(vector) x = BROADCAST(staged[r * pitch + s]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int tap_y = r - i / 2, tap_x = s - i % 2;
                if (0 <= tap_y && tap_y < 3 && 0 <= tap_x && tap_x < 3)
                    y[i] = MULTIPLY_ADD(x, weight[3 * tap_y + tap_x], y[i]);
            }
        }
}

/* sums[k] = sum of dz, products[tap][k] = sum of dz * the input at that tap of the window's maximum. */
#if VECTOR_BYTES == 64
/* The window's 4x4 input tile is one vector, from which each channel takes what lies at its maximum's tap: nine
 * multiply-adds, where all four positions of the window have 36, most of them with zeros. `vectors` of channels from k
 * on. */
CUDA_OPS_INLINE void TARGET(products_columns)(const int vectors, float *restrict sums, float *restrict products,
                                              const float *restrict grad, const uint8_t *restrict argmax,
                                              const float *restrict staged, int64_t k, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = b->pitch;
    __m512 total[2], sum[2][9];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        total[v] = _mm512_setzero_ps();
#pragma GCC unroll 9
        for (int i = 0; i < 9; i++)
            sum[v][i] = _mm512_setzero_ps();
    }
    for (int64_t row = 0; row < b->rows; row++)
        for (int64_t column = 0; column < b->columns; column++) {
            const float *const from = staged + 2 * row * pitch + 2 * column;
            __m512 tile = _mm512_castps128_ps512(_mm_loadu_ps(from));
            tile = _mm512_insertf32x4(tile, _mm_loadu_ps(from + pitch), 1);
            tile = _mm512_insertf32x4(tile, _mm_loadu_ps(from + 2 * pitch), 2);
            tile = _mm512_insertf32x4(tile, _mm_loadu_ps(from + 3 * pitch), 3);
            const int64_t at = (row * b->columns + column) * K + k;
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                const __m512i index =
                    _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(argmax + at + v * LANES)));
                const __mmask16 active = _mm512_cmpneq_epi32_mask(index, _mm512_set1_epi32(255));
                const __m512 dz = _mm512_maskz_loadu_ps(active, grad + at + v * LANES);
                /* 0, 1, 2 and 3 begin at elements 0, 1, 4 and 5 of the tile. */
                const __m512i first = _mm512_add_epi32(index, _mm512_and_epi32(index, _mm512_set1_epi32(2)));
                total[v] = _mm512_add_ps(total[v], dz);
#pragma GCC unroll 9
                for (int i = 0; i < 9; i++) {
                    const __m512i tap = _mm512_add_epi32(first, _mm512_set1_epi32(i / 3 * 4 + i % 3));
                    sum[v][i] = _mm512_fmadd_ps(_mm512_permutexvar_ps(tap, tile), dz, sum[v][i]);
                }
            }
        }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        _mm512_storeu_ps(sums + k + v * LANES, total[v]);
#pragma GCC unroll 9
        for (int i = 0; i < 9; i++)
            _mm512_storeu_ps(products + i * K + k + v * LANES, sum[v][i]);
    }
}

static void TARGET(products_image)(float *restrict sums, float *restrict products, const float *restrict grad,
                                   const uint8_t *restrict argmax, const float *restrict staged, const struct block *b)
{
    int64_t k = 0;
    for (; k + 2 * LANES <= b->out_channels; k += 2 * LANES)
        TARGET(products_columns)(2, sums, products, grad, argmax, staged, k, b);
    for (; k < b->out_channels; k += LANES)
        TARGET(products_columns)(1, sums, products, grad, argmax, staged, k, b);
}
#else
static void TARGET(products_image)(float *restrict sums, float *restrict products, const float *restrict grad,
                                   const uint8_t *restrict argmax, const float *restrict staged, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = b->pitch;
    for (int64_t k = 0; k < K; k += LANES) {
        TARGET(vector) total = BROADCAST(0.0f), sum[9];
#pragma GCC unroll 9
        for (int i = 0; i < 9; i++)
            sum[i] = BROADCAST(0.0f);
        for (int64_t row = 0; row < b->rows; row++)
            for (int64_t column = 0; column < b->columns; column++) {
                const int64_t at = (row * b->columns + column) * K + k;
                const float *const from = staged + 2 * row * pitch + 2 * column;
                const TARGET(mask) index = __builtin_convertvector(*(const TARGET(bytes) *)(argmax + at), TARGET(mask));
                const TARGET(mask) g = (TARGET(mask))TARGET(load)(grad + at);
                TARGET(vector) dz[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    dz[i] = (TARGET(vector))((index == i) & g);
                    total += dz[i];
                }
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
                    for (int s = 0; s < 4; s++) {
                        const TARGET(vector) x = BROADCAST(from[r * pitch + s]);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; i++) {
                            const int tap_y = r - i / 2, tap_x = s - i % 2;
                            if (0 <= tap_y && tap_y < 3 && 0 <= tap_x && tap_x < 3)
                                sum[3 * tap_y + tap_x] = MULTIPLY_ADD(x, dz[i], sum[3 * tap_y + tap_x]);
                        }
                    }
            }
        TARGET(store)(sums + k, total);
#pragma GCC unroll 9
        for (int i = 0; i < 9; i++)
            TARGET(store)(products + i * K + k, sum[i]);
    }
}
#endif

/* The gradient of the convolution's output, which is recomputed, into `staged`. */
static void TARGET(grad_image_one)(float *restrict staged, const float *restrict grad, const uint8_t *restrict argmax,
                                   const float *restrict staged_input, const float *restrict weight, const float *bias,
                                   const float *restrict coefficients, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = (b->pitch) * K;
    for (int64_t k = 0; k < K; k += LANES) {
        const TARGET(vector) center = TARGET(load)(coefficients + k), scale = TARGET(load)(coefficients + K + k);
        const TARGET(vector) constant = TARGET(load)(coefficients + 2 * K + k);
        const TARGET(vector) slope = TARGET(load)(coefficients + 3 * K + k);
        const TARGET(vector) shift = bias ? TARGET(load)(bias + k) : BROADCAST(0.0f);
        TARGET(vector) w[9];
        for (int i = 0; i < 9; i++)
            w[i] = TARGET(load)(weight + i * K + k);
        for (int64_t row = 0; row < b->rows; row++)
            for (int64_t column = 0; column < b->columns; column++) {
                const int64_t at = (row * b->columns + column) * K + k;
                const TARGET(mask) index = __builtin_convertvector(*(const TARGET(bytes) *)(argmax + at), TARGET(mask));
                const TARGET(vector) g = TARGET(load)(grad + at) * scale;
                TARGET(vector) y[4];
                TARGET(convolve_window)(y, staged_input + 2 * row * (b->pitch) + 2 * column, b->pitch, w, shift);
                for (int i = 0; i < 4; i++)
                    TARGET(store)(staged + (2 * row + 1 + i / 2) * pitch + (2 * column + 1 + i % 2) * K + k,
                                  MULTIPLY_ADD(y[i] - center, slope,
                                               (TARGET(vector))((index == i) & (TARGET(mask))g) + constant));
            }
    }
}

/* The gradient of the input from that: for each position the sum over taps and output channels. */
static void TARGET(grad_input_image_one)(float *restrict output, const float *restrict staged,
                                         const float *restrict weight, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = (b->pitch) * K;
    for (int64_t row = 0; row < b->height; row++)
        for (int64_t column = 0; column < b->width; column++) {
            TARGET(vector) sum[3] = {BROADCAST(0.0f), BROADCAST(0.0f), BROADCAST(0.0f)};
            for (int64_t k = 0; k < K; k += LANES)
                for (int r = 0; r < 3; r++)
                    for (int s = 0; s < 3; s++)
                        sum[s] = MULTIPLY_ADD(TARGET(load)(staged + (row + r) * pitch + (column + s) * K + k),
                                              TARGET(load)(weight + (8 - 3 * r - s) * K + k), sum[s]);
            const TARGET(vector) all = sum[0] + sum[1] + sum[2];
            float total = 0;
            for (int l = 0; l < LANES; l++)
                total += all[l];
            output[row * b->width + column] = total;
        }
}
