/* Dense matrix products with the accumulators in registers, for one instruction set (see conv_block/kernel.h). */

/* The micro-kernel: output[i][j] (+)= sum over p < depth of a[i][p] * b[p][j], for `rows` x (vectors * LANES) elements
 * in registers. a[i][p] is at i * a_stride + p, or if `transposed` at p * a_stride + i. rows, vectors and transposed
 * are constants where this is inlined. */
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

/* `vectors` vectors of columns of output (m x n) from column j on. The rows are cut into tiles of nearly the same
 * height: a last tile of a single row would be bound by the latency of its multiply-adds. */
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
static void TARGET(product_transposed)(float *output, const float *a, const float *b, int64_t m, int64_t n,
                                       int64_t depth)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
        TARGET(tile_column)(2, true, output, a, m, b, m, n, j, depth);
    for (; j < n; j += LANES)
        TARGET(tile_column)(1, true, output, a, m, b, m, n, j, depth);
}

#undef LARGE_TILES
#undef MIDDLE_TILES
