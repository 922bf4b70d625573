/* The block of conv_block.h for one instruction set (see conv_block.c, which includes it).
 *
 * Inside, everything has channels last, so that a vector is a few channels of one position, and transforms are sums of
 * vectors. With several input channels an image's data are, with T windows, C input and K output channels:
 *
 *     staged   (height + 2) x (width + 2) x C, the image with its frame of zeros
 *     V        16 x T x C    B^T d B of the 4x4 positions d around each window
 *     U        16 x C x K    G w G^T
 *     M        16 x T x K    V U, a matrix product for each of the 16
 *     output   T x 4 x K     A^T m A: the four positions of a window side by side, as the pooling wants them
 *
 * Backward, the gradient at a window's positions is A dy A^T for the weights (16 x T x K; V^T times it is a gradient of
 * U), and staged for grad_input, which is the forward pass of the transposed weight. */

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

/* output[i][j] (+)= sum over p < depth of a[i][p] * b[p][j], for `rows` x (vectors * LANES) elements in registers. a is
 * read at i * a_stride + p, or if `transposed` at p * a_stride + i. rows, vectors and transposed are constants where
 * this is inlined. */
CUDA_OPS_INLINE void TARGET(tile)(const int rows, const int vectors, const bool transposed, float *output,
                                  int64_t output_row, const float *restrict a, int64_t a_stride,
                                  const float *restrict b, int64_t b_row, int64_t depth)
{
    TARGET(vector) sum[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = transposed ? TARGET(load)(output + i * output_row + v * LANES) : BROADCAST(0.0f);
    for (int64_t p = 0; p < depth; p++) {
        TARGET(vector) right[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            right[v] = TARGET(load)(b + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[i][v] = MULTIPLY_ADD(BROADCAST(transposed ? a[i] : a[i * a_stride]), right[v], sum[i][v]);
        a += transposed ? a_stride : 1;
        b += b_row;
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            TARGET(store)(output + i * output_row + v * LANES, sum[i][v]);
}

#if TILE_ROWS > 6
#define LARGE_TILES(vectors)                                                                                           \
    case 12:                                                                                                           \
        TARGET(tile)(12, vectors, transposed, target, n, left, a_stride, right, n, depth);                             \
        break;                                                                                                         \
    case 11:                                                                                                           \
        TARGET(tile)(11, vectors, transposed, target, n, left, a_stride, right, n, depth);                             \
        break;                                                                                                         \
    case 10:                                                                                                           \
        TARGET(tile)(10, vectors, transposed, target, n, left, a_stride, right, n, depth);                             \
        break;                                                                                                         \
    case 9:                                                                                                            \
        TARGET(tile)(9, vectors, transposed, target, n, left, a_stride, right, n, depth);                              \
        break;                                                                                                         \
    case 8:                                                                                                            \
        TARGET(tile)(8, vectors, transposed, target, n, left, a_stride, right, n, depth);                              \
        break;                                                                                                         \
    case 7:                                                                                                            \
        TARGET(tile)(7, vectors, transposed, target, n, left, a_stride, right, n, depth);                              \
        break;
#else
#define LARGE_TILES(vectors)
#endif
#if TILE_ROWS > 4
#define MIDDLE_TILES(vectors)                                                                                          \
    case 6:                                                                                                            \
        TARGET(tile)(6, vectors, transposed, target, n, left, a_stride, right, n, depth);                              \
        break;                                                                                                         \
    case 5:                                                                                                            \
        TARGET(tile)(5, vectors, transposed, target, n, left, a_stride, right, n, depth);                              \
        break;
#else
#define MIDDLE_TILES(vectors)
#endif

/* `vectors` columns of vectors of output (m x n) from column j on. The rows are cut into tiles of nearly the same
 * height: a last one of a single row would wait for its own sums. */
CUDA_OPS_INLINE void TARGET(tile_column)(const int vectors, const bool transposed, float *output, const float *a,
                                         int64_t a_stride, const float *b, int64_t m, int64_t n, int64_t j,
                                         int64_t depth)
{
    const int64_t tiles = (m + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t i = m * tile / tiles, rows = m * (tile + 1) / tiles - i;
        float *target = output + i * n + j;
        const float *left = a + (transposed ? i : i * a_stride), *right = b + j;
        switch (rows) {
            LARGE_TILES(vectors)
            MIDDLE_TILES(vectors)
        case 4:
            TARGET(tile)(4, vectors, transposed, target, n, left, a_stride, right, n, depth);
            break;
        case 3:
            TARGET(tile)(3, vectors, transposed, target, n, left, a_stride, right, n, depth);
            break;
        case 2:
            TARGET(tile)(2, vectors, transposed, target, n, left, a_stride, right, n, depth);
            break;
        default:
            TARGET(tile)(1, vectors, transposed, target, n, left, a_stride, right, n, depth);
        }
    }
}

/* output (m x n) = a (m x depth) * b (depth x n), all dense; n is a multiple of 16. */
static void TARGET(product)(float *output, const float *a, const float *b, int64_t m, int64_t n, int64_t depth)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        TARGET(tile_column)(2, false, output, a, depth, b, m, n, j, depth);
    for (; j < n; j += LANES)
        TARGET(tile_column)(1, false, output, a, depth, b, m, n, j, depth);
}

/* output (m x n) += a^T * b, a being depth x m. */
static void TARGET(product_turned)(float *output, const float *a, const float *b, int64_t m, int64_t n, int64_t depth)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        TARGET(tile_column)(2, true, output, a, m, b, m, n, j, depth);
    for (; j < n; j += LANES)
        TARGET(tile_column)(1, true, output, a, m, b, m, n, j, depth);
}

#undef LARGE_TILES
#undef MIDDLE_TILES

/* V = B^T d B of each window, d being its 4x4 surroundings in `staged` of `channels` channels. */
static void TARGET(transform_input)(float *restrict v, const float *restrict staged, int64_t rows, int64_t columns,
                                    int64_t channels)
{
    const int64_t pitch = (2 * columns + 2) * channels, plane = rows * columns * channels;
    for (int64_t y = 0; y < rows; y++)
        for (int64_t x = 0; x < columns; x++) {
            const float *from = staged + 2 * y * pitch + 2 * x * channels;
            float *to = v + (y * columns + x) * channels;
            for (int64_t c = 0; c < channels; c += LANES) {
                TARGET(vector) t[4][4];
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const float *column = from + j * channels + c;
                    const TARGET(vector) d0 = TARGET(load)(column), d1 = TARGET(load)(column + pitch);
                    const TARGET(vector) d2 = TARGET(load)(column + 2 * pitch);
                    const TARGET(vector) d3 = TARGET(load)(column + 3 * pitch);
                    t[0][j] = d0 - d2;
                    t[1][j] = d1 + d2;
                    t[2][j] = d2 - d1;
                    t[3][j] = d1 - d3;
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    TARGET(store)(to + c + (4 * i + 0) * plane, t[i][0] - t[i][2]);
                    TARGET(store)(to + c + (4 * i + 1) * plane, t[i][1] + t[i][2]);
                    TARGET(store)(to + c + (4 * i + 2) * plane, t[i][2] - t[i][1]);
                    TARGET(store)(to + c + (4 * i + 3) * plane, t[i][1] - t[i][3]);
                }
            }
        }
}

/* y[0 ... 3] = A^T m A for one window and vector of channels. */
CUDA_OPS_INLINE void TARGET(inverse)(TARGET(vector) y[4], const float *m, int64_t plane)
{
    TARGET(vector) t[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const TARGET(vector) m1 = TARGET(load)(m + (4 + j) * plane), m2 = TARGET(load)(m + (8 + j) * plane);
        t[0][j] = TARGET(load)(m + j * plane) + m1 + m2;
        t[1][j] = m1 - m2 - TARGET(load)(m + (12 + j) * plane);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        y[2 * i] = t[i][0] + t[i][1] + t[i][2];
        y[2 * i + 1] = t[i][1] - t[i][2] - t[i][3];
    }
}

/* The image into the middle of `staged`, whose frame is zero already. */
static void TARGET(stage)(float *restrict staged, const float *restrict image, int64_t height, int64_t width,
                          int64_t channels, int channels_last)
{
    for (int64_t y = 0; y < height; y++) {
        float *to = staged + ((y + 1) * (width + 2) + 1) * channels;
        if (channels_last || channels == 1)
            memcpy(to, image + y * width * channels, (size_t)(width * channels) * sizeof(float));
        else
            for (int64_t x = 0; x < width; x++)
                for (int64_t c = 0; c < channels; c++)
                    to[x * channels + c] = image[(c * height + y) * width + x];
    }
}

/* One image's convolution (T x 4 x K), with bias, and the sums of its channels. */
static void TARGET(convolve_picture)(float *restrict output, float *restrict sums, const float *restrict m,
                                     const float *bias, int64_t windows, int64_t channels)
{
    for (int64_t k = 0; k < channels; k++)
        sums[k] = 0;
    for (int64_t t = 0; t < windows; t++)
        for (int64_t k = 0; k < channels; k += LANES) {
            TARGET(vector) y[4];
            TARGET(inverse)(y, m + t * channels + k, windows * channels);
            const TARGET(vector) b = bias ? TARGET(load)(bias + k) : BROADCAST(0.0f);
            float *to = output + 4 * t * channels + k;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                y[i] += b;
                TARGET(store)(to + i * channels, y[i]);
            }
            TARGET(store)(sums + k, TARGET(load)(sums + k) + ((y[0] + y[1]) + (y[2] + y[3])));
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

static void TARGET(convolve)(float *conv_output, double *moments, const float *input, const float *prepared,
                             const float *bias, const struct block *b, int64_t begin, int64_t end,
                             const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows;
    memset(w->staged_input, 0, (size_t)((b->height + 2) * (b->width + 2) * C) * sizeof(float));
    for (int64_t chunk = begin; chunk < end; chunk++) {
        double *const mean = moments + 2 * chunk * K, *const square = mean + K;
        double count = 0;
        for (int64_t k = 0; k < 2 * K; k++)
            mean[k] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            float *const output = conv_output + n * 4 * T * K;
            TARGET(stage)(w->staged_input, input + n * C * b->height * b->width, b->height, b->width, C,
                          b->input_channels_last);
            TARGET(transform_input)(w->v, w->staged_input, b->rows, b->columns, C);
            for (int i = 0; i < 16; i++)
                TARGET(product)(w->m + i * T * K, w->v + i * T * C, prepared + i * C * K, T, K, C);
            float *const sums = w->channel, *const center = sums + K, *const squares = center + K;
            TARGET(convolve_picture)(output, sums, w->m, bias, T, K);
            for (int64_t k = 0; k < K; k++)
                center[k] = sums[k] / (float)(4 * T);
            TARGET(squares)(squares, output, center, 4 * T, K);
            /* The image's moments join the chunk's, as two samples do. */
            const double more = (double)(4 * T), all = count + more;
            for (int64_t k = 0; k < K; k++) {
                /* center is rounded: the squares are about it, and the sum is not quite more * center. */
                const double exact = (double)sums[k] / more, off = exact - (double)center[k];
                const double distance = exact - mean[k];
                square[k] += (double)squares[k] - more * off * off + distance * distance * count * more / all;
                mean[k] += distance * more / all;
            }
            count = all;
        }
    }
}

/* The largest of four values, normalised, and relu. `index`: of the first such value, 255 where relu gave 0; `value`:
 * what it was before. */
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
    const TARGET(mask) active = ~(best <= BROADCAST(0.0f)); /* NaN is */
    *index = (active & where) | (~active & 255);
    *value = taken;
    return (TARGET(vector))(active & (TARGET(mask))best);
}

/* conv 3x3 at the four positions of a window, from its 4x4 surroundings. */
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

/* One image of T x 4 x K, or with one input channel straight from `staged`. output: T x K. */
static void TARGET(pool_picture)(float *restrict output, uint8_t *restrict argmax, float *restrict maximum,
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

static void TARGET(pool)(float *output, uint8_t *argmax, float *maximum, const float *conv_output, const float *input,
                         const float *prepared, const float *bias, const float *coefficients, const struct block *b,
                         int64_t begin, int64_t end, const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows;
    const bool recompute = b->in_channels == 1;
    if (recompute)
        memset(w->staged_input, 0, (size_t)((b->height + 2) * (b->width + 2)) * sizeof(float));
    for (int64_t n = first_of_chunk(b, begin); n < first_of_chunk(b, end); n++) {
        float *const pooled = b->output_channels_last ? output + n * T * K : w->pooled;
        if (recompute)
            TARGET(stage)(w->staged_input, input + n * b->height * b->width, b->height, b->width, 1, 1);
        TARGET(pool_picture)(pooled, argmax ? argmax + n * T * K : NULL, maximum ? maximum + n * T * K : NULL,
                             conv_output + (recompute ? 0 : n * 4 * T * K), recompute ? w->staged_input : NULL,
                             prepared, bias, coefficients, b);
        if (!b->output_channels_last)
            TARGET(transpose)(output + n * T * K, pooled, T, K);
    }
}

/* Of one image: sums[k] += dz, products[k] += dz * (maximum - center), dz being grad where a window is active. */
static void TARGET(sums_picture)(float *restrict sums, float *restrict products, const float *restrict grad,
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

/* One input channel: sums[k] = sum of dz, products[tap][k] = sum of dz * the input at that tap of the maximum. */
static void TARGET(products_picture)(float *restrict sums, float *restrict products, const float *restrict grad,
                                     const uint8_t *restrict argmax, const float *restrict staged,
                                     const struct block *b)
{
    const int64_t K = b->out_channels, pitch = b->width + 2;
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

static void TARGET(sums)(double *partials, const float *grad_output, const uint8_t *argmax, const float *maximum,
                         const float *input, const float *center, const struct block *b, int64_t begin, int64_t end,
                         const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows;
    const bool one = b->in_channels == 1;
    const int64_t count = (one ? 10 : 2) * K;
    if (one)
        memset(w->staged_input, 0, (size_t)((b->height + 2) * (b->width + 2)) * sizeof(float));
    for (int64_t chunk = begin; chunk < end; chunk++) {
        double *const partial = partials + chunk * count;
        for (int64_t i = 0; i < count; i++)
            partial[i] = 0;
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *grad = grad_output + n * T * K;
            if (!b->output_channels_last) {
                TARGET(transpose)(w->pooled, grad, K, T);
                grad = w->pooled;
            }
            if (one) {
                TARGET(stage)(w->staged_input, input + n * b->height * b->width, b->height, b->width, 1, 1);
                TARGET(products_picture)(w->channel, w->channel + K, grad, argmax + n * T * K, w->staged_input, b);
            } else {
                TARGET(sums_picture)(w->channel, w->channel + K, grad, argmax + n * T * K, maximum + n * T * K, center,
                                     T, K);
            }
            for (int64_t i = 0; i < count; i++)
                partial[i] += (double)w->channel[i];
        }
    }
}

/* The gradient of the convolution's output: A dy A^T into `transformed` (16 x T x K), and into `staged` unless NULL. */
static void TARGET(grad_picture)(float *restrict transformed, float *restrict staged, const float *restrict grad,
                                 const uint8_t *restrict argmax, const float *restrict conv_output,
                                 const float *restrict coefficients, const struct block *b)
{
    const int64_t K = b->out_channels, plane = b->windows * K, pitch = (b->width + 2) * K;
    for (int64_t row = 0; row < b->rows; row++)
        for (int64_t column = 0; column < b->columns; column++) {
            const int64_t t = row * b->columns + column;
            for (int64_t k = 0; k < K; k += LANES) {
                const TARGET(vector) center = TARGET(load)(coefficients + k);
                const TARGET(vector) scale = TARGET(load)(coefficients + K + k);
                const TARGET(vector) constant = TARGET(load)(coefficients + 2 * K + k);
                const TARGET(vector) slope = TARGET(load)(coefficients + 3 * K + k);
                const TARGET(mask) index =
                    __builtin_convertvector(*(const TARGET(bytes) *)(argmax + t * K + k), TARGET(mask));
                const TARGET(vector) g = TARGET(load)(grad + t * K + k) * scale;
                TARGET(vector) d[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const TARGET(vector) y = TARGET(load)(conv_output + (4 * t + i) * K + k) - center;
                    d[i] = MULTIPLY_ADD(y, slope, (TARGET(vector))((index == i) & (TARGET(mask))g) + constant);
                }
                if (staged) {
                    float *const to = staged + (2 * row + 1) * pitch + (2 * column + 1) * K + k;
                    TARGET(store)(to, d[0]);
                    TARGET(store)(to + K, d[1]);
                    TARGET(store)(to + pitch, d[2]);
                    TARGET(store)(to + pitch + K, d[3]);
                }
                const TARGET(vector)
                    t4[4][2] = {{d[0], d[1]}, {d[0] + d[2], d[1] + d[3]}, {d[0] - d[2], d[1] - d[3]}, {-d[2], -d[3]}};
                float *const to = transformed + t * K + k;
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    TARGET(store)(to + (4 * i + 0) * plane, t4[i][0]);
                    TARGET(store)(to + (4 * i + 1) * plane, t4[i][0] + t4[i][1]);
                    TARGET(store)(to + (4 * i + 2) * plane, t4[i][0] - t4[i][1]);
                    TARGET(store)(to + (4 * i + 3) * plane, -t4[i][1]);
                }
            }
        }
}

/* m (16 x T x C) to an image of grad_input, dense in height, width, channels. */
static void TARGET(grad_input_picture)(float *restrict output, const float *restrict m, const struct block *b)
{
    const int64_t C = b->in_channels, pitch = b->width * C;
    for (int64_t row = 0; row < b->rows; row++)
        for (int64_t column = 0; column < b->columns; column++) {
            const float *from = m + (row * b->columns + column) * C;
            float *to = output + 2 * row * pitch + 2 * column * C;
            for (int64_t c = 0; c < C; c += LANES) {
                TARGET(vector) y[4];
                TARGET(inverse)(y, from + c, b->windows * C);
                TARGET(store)(to + c, y[0]);
                TARGET(store)(to + C + c, y[1]);
                TARGET(store)(to + pitch + c, y[2]);
                TARGET(store)(to + pitch + C + c, y[3]);
            }
        }
}

/* weights (9 x C x K) = G^T u G. */
static void TARGET(inverse_weight)(float *restrict weights, const float *restrict u, int64_t elements)
{
    const TARGET(vector) half = BROADCAST(0.5f);
    for (int64_t e = 0; e < elements; e += LANES) {
        TARGET(vector) t[3][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const TARGET(vector) u0 = TARGET(load)(u + j * elements + e);
            const TARGET(vector) u1 = TARGET(load)(u + (4 + j) * elements + e);
            const TARGET(vector) u2 = TARGET(load)(u + (8 + j) * elements + e);
            const TARGET(vector) u3 = TARGET(load)(u + (12 + j) * elements + e);
            t[0][j] = u0 + half * (u1 + u2);
            t[1][j] = half * (u1 - u2);
            t[2][j] = half * (u1 + u2) + u3;
        }
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) {
            const TARGET(vector) sum = half * (t[i][1] + t[i][2]);
            TARGET(store)(weights + (3 * i + 0) * elements + e, t[i][0] + sum);
            TARGET(store)(weights + (3 * i + 1) * elements + e, half * (t[i][1] - t[i][2]));
            TARGET(store)(weights + (3 * i + 2) * elements + e, sum + t[i][3]);
        }
    }
}

/* One input channel: the gradient of the convolution, which is computed anew, into `staged`. */
static void TARGET(grad_picture_one)(float *restrict staged, const float *restrict grad, const uint8_t *restrict argmax,
                                     const float *restrict staged_input, const float *restrict weight,
                                     const float *bias, const float *restrict coefficients, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = (b->width + 2) * K;
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
                TARGET(convolve_window)(y, staged_input + 2 * row * (b->width + 2) + 2 * column, b->width + 2, w,
                                        shift);
                for (int i = 0; i < 4; i++)
                    TARGET(store)(staged + (2 * row + 1 + i / 2) * pitch + (2 * column + 1 + i % 2) * K + k,
                                  MULTIPLY_ADD(y[i] - center, slope,
                                               (TARGET(vector))((index == i) & (TARGET(mask))g) + constant));
            }
    }
}

/* Its gradient of the input: each position's sum over the taps and the output channels. */
static void TARGET(grad_input_picture_one)(float *restrict output, const float *restrict staged,
                                           const float *restrict weight, const struct block *b)
{
    const int64_t K = b->out_channels, pitch = (b->width + 2) * K;
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

static void TARGET(gradients_one)(float *grad_input, const float *grad_output, const uint8_t *argmax,
                                  const float *input, const float *prepared, const float *bias,
                                  const float *coefficients, const struct block *b, int64_t begin, int64_t end,
                                  const struct workspace *w)
{
    const int64_t K = b->out_channels, T = b->windows, pixels = b->height * b->width;
    const int64_t framed = (b->height + 2) * (b->width + 2);
    memset(w->staged_input, 0, (size_t)framed * sizeof(float));
    memset(w->staged_grad, 0, (size_t)(framed * K) * sizeof(float));
    for (int64_t n = first_of_chunk(b, begin); n < first_of_chunk(b, end); n++) {
        const float *grad = grad_output + n * T * K;
        if (!b->output_channels_last) {
            TARGET(transpose)(w->pooled, grad, K, T);
            grad = w->pooled;
        }
        TARGET(stage)(w->staged_input, input + n * pixels, b->height, b->width, 1, 1);
        TARGET(grad_picture_one)(w->staged_grad, grad, argmax + n * T * K, w->staged_input, prepared, bias,
                                 coefficients, b);
        TARGET(grad_input_picture_one)(grad_input + n * pixels, w->staged_grad, prepared, b);
    }
}

static void TARGET(gradients)(float *grad_input, float *weights, const float *grad_output, const uint8_t *argmax,
                              const float *conv_output, const float *input, const float *prepared,
                              const float *coefficients, const struct block *b, int64_t begin, int64_t end,
                              const struct workspace *w)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows;
    const int64_t framed = (b->height + 2) * (b->width + 2), pixels = b->height * b->width;
    const float *const turned_weight = prepared + 16 * C * K;
    memset(w->staged_input, 0, (size_t)(framed * C) * sizeof(float));
    memset(w->staged_grad, 0, (size_t)(framed * K) * sizeof(float));
    for (int64_t chunk = begin; chunk < end; chunk++) {
        memset(w->u, 0, (size_t)(16 * C * K) * sizeof(float));
        for (int64_t n = first_of_chunk(b, chunk); n < first_of_chunk(b, chunk + 1); n++) {
            const float *grad = grad_output + n * T * K;
            if (!b->output_channels_last) {
                TARGET(transpose)(w->pooled, grad, K, T);
                grad = w->pooled;
            }
            TARGET(grad_picture)(w->m, grad_input ? w->staged_grad : NULL, grad, argmax + n * T * K,
                                 conv_output + n * 4 * T * K, coefficients, b);
            TARGET(stage)(w->staged_input, input + n * C * pixels, b->height, b->width, C, b->input_channels_last);
            TARGET(transform_input)(w->v, w->staged_input, b->rows, b->columns, C);
            for (int i = 0; i < 16; i++)
                TARGET(product_turned)(w->u + i * C * K, w->v + i * T * C, w->m + i * T * K, C, K, T);
            if (!grad_input)
                continue;
            TARGET(transform_input)(w->v, w->staged_grad, b->rows, b->columns, K);
            for (int i = 0; i < 16; i++)
                TARGET(product)(w->m + i * T * C, w->v + i * T * K, turned_weight + i * K * C, T, C, K);
            float *const target = grad_input + n * C * pixels;
            /* v is free again */
            TARGET(grad_input_picture)(b->input_channels_last ? target : w->v, w->m, b);
            if (!b->input_channels_last)
                TARGET(transpose)(target, w->v, pixels, C);
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
