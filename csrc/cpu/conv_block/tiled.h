/* The convolution and its gradients in bfloat16 by AMX's tile registers, or vectors of AVX512-BF16
 * (gemm/tile_packing.h), summed as they stand: 10.8 million multiply-adds an image at 14 x 14, 32 -> 64 channels, where
 * Winograd's products have 4.8, but of up to 16 times the rate, and nothing is transformed.
 *
 * Pixels are counted through rows of width + 2, the padding behind each, in panels of 32, whose sums are two tiles of
 * rows; those of the padding are computed and not used. One image's data, P being the panels' pixels:
 *
 *     pixels     the zero-padded image, a pixel's channels side by side: a row of a tile, and a tap is an address
 *     grads      the gradient of the convolution's output, likewise
 *     channels   C x channel_pitch, the image again with a channel's pixels side by side: a row of a tile of the
 *                weight's gradient, whose depth are pixels
 *     pairs      K / 16 x P / 2 x 16 x 2, the gradient in pairs of neighbouring pixels, zero in the padding
 *     tile_sums  P x max(C, K), sums in float32
 *
 * The prepared weight: for each tap and 32 of depth, tiles of 16 target channels; of forward, then of grad_input.
 *
 * Bound by the tile registers' multiply-adds (1,512 instructions of 16 cycles an image as above) and by vector work on
 * the sums. */

enum { PANEL = 2 * SIDE };

static bool is_tiled(const struct block *b)
{
    return b->dtype == CUDA_OPS_BFLOAT16 && b->in_channels % STEP == 0 && b->out_channels % STEP == 0 &&
           cuda_ops_has_tiles(CUDA_OPS_BFLOAT16);
}

static int64_t panel_pixels(const struct block *b)
{
    return (b->height * b->pitch + PANEL - 1) / PANEL * PANEL;
}

/* Of `pixels` and `grads`: all that the last panel's taps read. */
static int64_t staged_pixels(const struct block *b)
{
    return panel_pixels(b) + 2 * b->pitch + 3;
}

/* In lines of the cache, an odd number of them, so that a tile's rows are in different sets. */
static int64_t channel_pitch(const struct block *b)
{
    return (staged_pixels(b) + STEP - 1) / STEP / 2 * 2 * STEP + STEP;
}

/* Elements of the prepared weight, of one direction. */
static int64_t prepared_weight(const struct block *b)
{
    return TAPS * b->in_channels * b->out_channels;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

/* How 32 numbers, two vectors one behind the other, are put in pairs of one of each. */
CUDA_OPS_INLINE __m512i order_of_pairs(void)
{
    uint16_t order[PANEL];
    for (int l = 0; l < SIDE; l++)
        order[2 * l] = (uint16_t)l, order[2 * l + 1] = (uint16_t)(SIDE + l);
    return _mm512_loadu_si512(order);
}

/* A tile's row of pairs: one of a pair is at from[lane * stride], the other `other` behind it. */
CUDA_OPS_INLINE void prepare_pairs(uint16_t *to, const float *from, __m512i lanes, int64_t other, __m512i order)
{
    const __m512 first = _mm512_i32gather_ps(lanes, from, 4), second = _mm512_i32gather_ps(lanes, from + other, 4);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
}

/* 16 output channels from k on, of all input channels. */
static void tiled_prepare(uint16_t *prepared, const float *weight, bool backward, const struct block *b, int64_t k)
{
    const int64_t C = b->in_channels, K = b->out_channels;
    uint16_t *const transposed = prepared + prepared_weight(b);
    const __m512i order = order_of_pairs();
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i outputs = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)(C * TAPS)));
    const __m512i inputs = _mm512_mullo_epi32(lane, _mm512_set1_epi32(TAPS));
    for (int64_t tap = 0; tap < TAPS; tap++) {
        for (int64_t c = 0; c < C && !backward; c += 2)
            prepare_pairs(prepared + ((tap * C / STEP + c / STEP) * K + k) * STEP + c % STEP / 2 * STEP,
                          weight + (k * C + c) * TAPS + tap, outputs, TAPS, order);
        for (int64_t l = k; l < k + SIDE && backward; l += 2)
            for (int64_t c = 0; c < C; c += SIDE)
                prepare_pairs(transposed + (((TAPS - 1 - tap) * K / STEP + l / STEP) * C + c) * STEP +
                                  l % STEP / 2 * STEP,
                              weight + (l * C + c) * TAPS + tap, inputs, C * TAPS, order);
    }
}

/* Copies image n among its padding, which is zero already. */
static void stage_bfloat16(uint16_t *restrict staged, const void *restrict input, int64_t n, const struct block *b)
{
    const int64_t C = b->in_channels, W = b->width, pixels = b->height * W;
    const uint16_t *const image = (const uint16_t *)input + n * C * pixels;
    for (int64_t y = 0; y < b->height; y++) {
        uint16_t *const row = staged + ((y + 1) * b->pitch + 1) * C;
        if (b->input_channels_last) {
            memcpy(row, image + y * W * C, (size_t)(W * C) * sizeof(uint16_t));
            continue;
        }
        for (int64_t c = 0; c < C; c++)
            for (int64_t x = 0; x < W; x++)
                row[x * C + c] = image[c * pixels + y * W + x];
    }
}

/* The same pixels channel by channel. */
static void turn_channels(uint16_t *restrict channels, const uint16_t *restrict staged, const struct block *b)
{
    const int64_t C = b->in_channels, pitch = channel_pitch(b);
    for (int64_t p = 0; p < b->padded; p += STEP)
        for (int64_t c = 0; c < C; c += PANEL) {
            uint16_t tiles[2 * TILE] __attribute__((aligned(64)));
            pack_streams(CUDA_OPS_BFLOAT16, false, false, tiles, TILE, staged + p * C + c, 1, C, PANEL,
                         min_i64(STEP, b->padded - p));
            for (int64_t i = 0; i < PANEL; i++)
                _mm512_storeu_si512(channels + (c + i) * pitch + p, _mm512_loadu_si512(tiles + i * STEP));
        }
}

/* Two tiles of rows, or of columns: where the first and the second are, and how far apart the rows of a are in bytes. */
struct operand {
    const uint16_t *first, *second;
    size_t pitch;
};

/* A run of steps: so many, and how far apart they are in a and b. */
struct run {
    int64_t steps, next_a, next_b;
};

CUDA_OPS_INLINE struct operand moved(struct operand operand, int64_t elements)
{
    operand.first += elements, operand.second += elements;
    return operand;
}

/* sums (32 rows x 32 columns, `columns` floats apart) = or, if add, += `runs` runs of steps of a times b, which begin
 * at offsets in a and one behind the other in b. */
static void multiply_runs(float *sums, int64_t columns, bool add, struct operand a, struct operand b, struct run run,
                          const int64_t *offsets, int runs)
{
    const size_t sums_pitch = (size_t)columns * sizeof(float);
    if (!has_tile_registers()) {
        for (int row = 0; row < PANEL; row += rows_at_once(true)) {
            const struct operand rows = moved(a, row * (int64_t)(a.pitch / 2));
            struct operand of_b = b;
            __m512 vectors[VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++)
                vectors[i] = add ? _mm512_loadu_ps(sums + (row + i / 2) * columns + i % 2 * SIDE) : _mm512_setzero_ps();
            for (int n = 0; n < runs; n++)
                for (int64_t s = 0; s < run.steps; s++, of_b = moved(of_b, run.next_b))
                    add_pairs(true, vectors, rows.first + offsets[n] + s * run.next_a, rows.pitch, of_b.first,
                              of_b.second);
#pragma GCC unroll 16
            for (int i = 0; i < VECTORS; i++)
                _mm512_storeu_ps(sums + (row + i / 2) * columns + i % 2 * SIDE, vectors[i]);
        }
        return;
    }
    /* GCC's tile loads do not declare that they read memory, nor its stores that they write it. */
    __asm__ volatile("" : : : "memory");
    if (add) {
        _tile_loadd(0, sums, sums_pitch);
        _tile_loadd(1, sums + SIDE, sums_pitch);
        _tile_loadd(2, sums + SIDE * columns, sums_pitch);
        _tile_loadd(3, sums + SIDE * columns + SIDE, sums_pitch);
    } else {
        begin_sums(NULL, false);
    }
    for (int n = 0; n < runs; n++)
        for (int64_t s = 0; s < run.steps; s++, b = moved(b, run.next_b))
            add_square(true, true, false, false, a.first + offsets[n] + s * run.next_a, a.pitch,
                       a.second + offsets[n] + s * run.next_a, a.pitch, 0, b.first, b.second);
    _tile_stored(0, sums, sums_pitch);
    _tile_stored(1, sums + SIDE, sums_pitch);
    _tile_stored(2, sums + SIDE * columns, sums_pitch);
    _tile_stored(3, sums + SIDE * columns + SIDE, sums_pitch);
    __asm__ volatile("" : : : "memory");
}

/* tile_sums (P x columns) = the convolution of `staged`, of `depth` channels. */
static void tiled_product(float *tile_sums, const uint16_t *staged, const uint16_t *prepared, int64_t depth,
                          int64_t columns, const struct block *b)
{
    const struct run run = {depth / STEP, STEP, columns * STEP};
    int64_t offsets[TAPS];
    for (int tap = 0; tap < TAPS; tap++)
        offsets[tap] = (tap / 3 * b->pitch + tap % 3) * depth;
    for (int64_t k = 0; k < columns; k += PANEL)
        for (int64_t p = 0; p < panel_pixels(b); p += PANEL) {
            const struct operand rows = {staged + p * depth, staged + (p + SIDE) * depth,
                                         (size_t)depth * sizeof(uint16_t)};
            const struct operand weight = {prepared + k * STEP, prepared + (k + SIDE) * STEP, 64};
            multiply_runs(tile_sums + p * columns + k, columns, false, rows, weight, run, offsets, TAPS);
        }
}

/* weights (TAPS x C x K) = or, if add, += the image's products with the gradient. */
static void tiled_weights(float *weights, bool add, const uint16_t *channels, const uint16_t *pairs,
                          const struct block *b)
{
    const int64_t C = b->in_channels, K = b->out_channels, line = channel_pitch(b), stream = panel_pixels(b) * SIDE;
    const struct run run = {panel_pixels(b) / STEP, STEP, TILE};
    for (int64_t k = 0; k < K; k += PANEL)
        for (int64_t c = 0; c < C; c += PANEL)
            for (int tap = 0; tap < TAPS; tap++) {
                const struct operand rows = {channels + c * line, channels + (c + SIDE) * line,
                                             (size_t)line * sizeof(uint16_t)};
                const struct operand columns = {pairs + k / SIDE * stream, pairs + (k / SIDE + 1) * stream, 64};
                const int64_t offset = tap / 3 * b->pitch + tap % 3;
                multiply_runs(weights + (tap * C + c) * K + k, K, add, rows, columns, run, &offset, 1);
            }
}

/* One image's sums of each channel, and with their mean, which becomes `center`, the squares about it, and the
 * convolution rounded, T x 4 x K. */
static void tiled_output(uint16_t *restrict output, float *restrict sums, float *restrict center,
                         float *restrict squares, const float *restrict tile_sums, const float *bias,
                         const struct block *b)
{
    const int64_t K = b->out_channels, W = b->width, pitch = b->pitch * K;
    const __m512 count = _mm512_set1_ps((float)(b->height * W));
    for (int64_t k = 0; k < K; k += PANEL) {
        __m512 total[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t y = 0; y < b->height; y++)
            for (int64_t x = 0; x < W; x += 2)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    total[i] = _mm512_add_ps(
                        total[i], _mm512_loadu_ps(tile_sums + y * pitch + (x + i / 2) * K + k + i % 2 * SIDE));
        __m512 shift[2], middle[2];
        for (int i = 0; i < 2; i++) {
            shift[i] = bias ? _mm512_loadu_ps(bias + k + i * SIDE) : _mm512_setzero_ps();
            const __m512 sum = _mm512_fmadd_ps(shift[i], count, _mm512_add_ps(total[i], total[2 + i]));
            middle[i] = _mm512_div_ps(sum, count);
            _mm512_storeu_ps(sums + k + i * SIDE, sum);
            _mm512_storeu_ps(center + k + i * SIDE, middle[i]);
            total[i] = total[2 + i] = _mm512_setzero_ps();
        }
        int64_t to = k;
        for (int64_t row = 0; row < b->rows; row++)
            for (int64_t column = 0; column < b->columns; column++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++, to += K) {
                    const float *const from = tile_sums + (2 * row + i / 2) * pitch + (2 * column + i % 2) * K + k;
                    const __m512 y0 = _mm512_add_ps(_mm512_loadu_ps(from), shift[0]);
                    const __m512 y1 = _mm512_add_ps(_mm512_loadu_ps(from + SIDE), shift[1]);
                    const __m512 d0 = _mm512_sub_ps(y0, middle[0]), d1 = _mm512_sub_ps(y1, middle[1]);
                    total[i % 2 * 2] = _mm512_fmadd_ps(d0, d0, total[i % 2 * 2]);
                    total[i % 2 * 2 + 1] = _mm512_fmadd_ps(d1, d1, total[i % 2 * 2 + 1]);
                    _mm512_storeu_si512(output + to, (__m512i)_mm512_cvtne2ps_pbh(y1, y0));
                }
        for (int i = 0; i < 2; i++)
            _mm512_storeu_ps(squares + k + i * SIDE, _mm512_add_ps(total[i], total[2 + i]));
    }
}

static void tiled_convolve(void *conv_output, double *moments, const void *input, const void *prepared,
                           const float *bias, const struct block *b, int64_t begin, int64_t end,
                           const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, pixels = b->height * b->width;
    float *const sums = w->channel, *const center = sums + K, *const squares = center + K;
    struct tile_configuration before;
    configure_tiles(&before);
    memset(w->pixels, 0, (size_t)(staged_pixels(b) * C) * sizeof(uint16_t));
    for (int64_t chunk = end - 1; chunk >= begin; chunk--) {
        double *const moments_of_chunk = moments + 2 * chunk * K;
        double count = 0;
        for (int64_t k = 0; k < 2 * K; k++)
            moments_of_chunk[k] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            stage_bfloat16(w->pixels, input, n, b);
            tiled_product(w->tile_sums, w->pixels, prepared, C, K, b);
            tiled_output((uint16_t *)conv_output + n * K * pixels, sums, center, squares, w->tile_sums, bias, b);
            merge_moments(moments_of_chunk, &count, sums, center, squares, pixels, K);
        }
    }
    release_tiles(&before);
}

/* dy, the gradient of the convolution's output, rounded, into `pairs` and, unless that is NULL, `grads`. */
static void tiled_grad_image(uint16_t *restrict pairs, uint16_t *restrict grads, const float *restrict grad,
                             const uint8_t *restrict argmax, const uint16_t *restrict conv_output,
                             const float *restrict coefficients, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = b->pitch, stream = panel_pixels(b) * SIDE;
    const __m512i order = order_of_pairs();
    for (int64_t k = 0; k < K; k += SIDE) {
        const __m512 center = _mm512_loadu_ps(coefficients + k), scale = _mm512_loadu_ps(coefficients + K + k);
        const __m512 slope = _mm512_loadu_ps(coefficients + 3 * K + k);
        const __m512 constant = _mm512_loadu_ps(coefficients + 2 * K + k);
        for (int64_t row = 0; row < b->rows; row++)
            for (int64_t column = 0; column < b->columns; column++) {
                const int64_t t = row * b->columns + column;
                const __m512i index =
                    _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(argmax + t * K + k)));
                const __m512 g = _mm512_mul_ps(_mm512_loadu_ps(grad + t * K + k), scale);
                __m512 d[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const int64_t at = (4 * t + i) * K + k;
                    const __m512 y =
                        widened_pairs(_mm256_loadu_si256((const __m256i *)(const void *)(conv_output + at)));
                    const __mmask16 taken = _mm512_cmpeq_epi32_mask(index, _mm512_set1_epi32(i));
                    d[i] = _mm512_fmadd_ps(_mm512_sub_ps(y, center), slope,
                                           _mm512_mask_add_ps(constant, taken, constant, g));
                }
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const int64_t pixel = (2 * row + i) * pitch + 2 * column;
                    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(d[2 * i + 1], d[2 * i]);
                    _mm512_storeu_si512(pairs + k / SIDE * stream + pixel * SIDE,
                                        _mm512_permutexvar_epi16(order, both));
                    if (!grads)
                        continue;
                    uint16_t *const to = grads + (pixel + pitch + 1) * K + k;
                    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(both));
                    _mm256_storeu_si256((__m256i *)(void *)(to + K), _mm512_extracti64x4_epi64(both, 1));
                }
            }
    }
}

/* One image of grad_input, rounded, from tile_sums (P x C). */
static void tiled_grad_input(uint16_t *restrict output, const float *restrict tile_sums, const struct block *b)
{
    const int64_t C = b->in_channels, W = b->width, pixels = b->height * W;
    for (int64_t y = 0; y < b->height; y++)
        for (int64_t x = 0; x < W; x++)
            for (int64_t c = 0; c < C; c += PANEL) {
                const float *const from = tile_sums + (y * b->pitch + x) * C + c;
                const int64_t pixel = y * W + x;
                const __m512i values =
                    (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
                if (b->input_channels_last) {
                    _mm512_storeu_si512(output + pixel * C + c, values);
                    continue;
                }
                uint16_t lanes[PANEL];
                _mm512_storeu_si512(lanes, values);
                for (int l = 0; l < PANEL; l++)
                    output[(c + l) * pixels + pixel] = lanes[l];
            }
}

static void tiled_gradients(void *grad_input, float *weights, const void *grad_output, const uint8_t *argmax,
                            const void *conv_output, const void *input, const void *prepared, const float *coefficients,
                            const struct block *b, int64_t begin, int64_t end, const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows, pixels = b->height * b->width;
    const uint16_t *const transposed_weight = grad_input ? (const uint16_t *)prepared + prepared_weight(b) : NULL;
    struct tile_configuration before;
    configure_tiles(&before);
    memset(w->pixels, 0, (size_t)(staged_pixels(b) * C) * sizeof(uint16_t));
    memset(w->grads, 0, (size_t)(staged_pixels(b) * K) * sizeof(uint16_t));
    memset(w->pairs, 0, (size_t)(panel_pixels(b) * K) * sizeof(uint16_t));
    memset(w->channels, 0, (size_t)(channel_pitch(b) * C) * sizeof(uint16_t));
    for (int64_t chunk = begin; chunk < end; chunk++)
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *const grad = grad_of_image_avx512(grad_output, n, b, w);
            tiled_grad_image(w->pairs, grad_input ? w->grads : NULL, grad, argmax + n * T * K,
                             (const uint16_t *)conv_output + n * 4 * T * K, coefficients, b);
            stage_bfloat16(w->pixels, input, n, b);
            turn_channels(w->channels, w->pixels, b);
            tiled_weights(weights + chunk * TAPS * C * K, n > first_of_chunk(b, chunk), w->channels, w->pairs, b);
            if (!grad_input)
                continue;
            tiled_product(w->tile_sums, w->grads, transposed_weight, K, C, b);
            tiled_grad_input((uint16_t *)grad_input + n * C * pixels, w->tile_sums, b);
        }
    release_tiles(&before);
}

#pragma GCC pop_options
