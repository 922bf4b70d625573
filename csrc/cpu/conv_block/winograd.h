/* Winograd's transforms for one instruction set (see conv_block/kernel.h, whose names V, U, M, T, C and K these
 * are). */

/* V = B^T d B of each window, d being the 4x4 input tile of `channels` channels around it in `staged`. */
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

/* One image's convolution (T x 4 x K) from M, with bias, and the sum of each channel. */
static void TARGET(output_image)(float *restrict output, float *restrict sums, const float *restrict m,
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

/* dy, the gradient of the convolution's output: A dy A^T goes to `transformed` (16 x T x K), dy itself to `staged`
 * unless that is NULL. */
static void TARGET(grad_image)(float *restrict transformed, float *restrict staged, const float *restrict grad,
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

/* One image of grad_input, height x width x C, from m (16 x T x C). */
static void TARGET(grad_input_image)(float *restrict output, const float *restrict m, const struct block *b)
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
