/* The matrix multiplication for one instruction set and element type (see gemm.c, which includes it).
 *
 * The classic scheme of three blocks. b is cut into blocks of BLOCK_DEPTH rows, a into blocks of BLOCK_DEPTH columns
 * and BLOCK_ROWS rows; each is packed into the order in which the innermost loop reads it, and a register tile of
 * TILE_ROWS x 2 vectors is summed over the whole depth of a block before it touches the output. Every element is summed
 * in the order of p, block by block, so that where a tile lies makes no difference to the bits.
 *
 * Ragged edges: the last columns take a tile of one vector or of zero-padded ones, of which only the columns that exist
 * are stored; the last rows take tiles of 8, 4, 2 and 1 rows, so that no work is done on rows that do not exist. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define QUAD ((int)(16 / sizeof(REAL)))

/* A vector in a register or on the stack, and one anywhere in an array. */
typedef REAL FN(lane_vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL FN(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

/* target[p * width + l] = source[p * step + l * lane_stride], zero for lanes <= l < width. */
static void FN(pack)(REAL *restrict target, int64_t width, const REAL *restrict source, int64_t lane_stride,
                     int64_t step, int64_t lanes, int64_t depth)
{
    int64_t p = 0;
    if (step == 1 && lane_stride != 1)
        for (; p + QUAD <= depth; p += QUAD) {
            int64_t l = 0;
            for (; l + QUAD <= lanes; l += QUAD)
                TRANSPOSE_QUAD(target + p * width + l, width, source + p + l * lane_stride, lane_stride);
            for (; l < lanes; l++)
                for (int q = 0; q < QUAD; q++)
                    target[(p + q) * width + l] = source[p + q + l * lane_stride];
        }
    for (; p < depth; p++) {
        const REAL *from = source + p * step;
        REAL *to = target + p * width;
        int64_t l = 0;
        if (lane_stride == 1) {
            for (; l + LANES <= lanes; l += LANES)
                *(FN(vector) *)(to + l) = *(const FN(vector) *)(from + l);
            for (; l + QUAD <= lanes; l += QUAD)
                memcpy(to + l, from + l, 16);
        }
        for (; l < lanes; l++)
            to[l] = from[l * lane_stride];
    }
    if (lanes < width)
        for (p = 0; p < depth; p++)
            for (int64_t l = lanes; l < width; l++)
                target[p * width + l] = 0;
}

/* One register tile: rows x (vectors * LANES) elements of output, of which `columns` exist. rows and vectors are
 * constants wherever this is inlined, so that `sum` is registers. */
CUDA_OPS_INLINE void FN(tile)(const int rows, const int vectors, REAL *output, int64_t output_row, int64_t columns,
                              const REAL *restrict a, const REAL *restrict b, int64_t b_row, int64_t depth,
                              bool accumulate)
{
    FN(lane_vector) sum[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = (FN(lane_vector)){0};
    for (int64_t p = 0; p < depth; p++) {
        FN(lane_vector) right[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            right[v] = *(const FN(vector) *)(b + v * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[i][v] = MULTIPLY_ADD(a[i], right[v], sum[i][v]);
        a += rows;
        b += b_row;
    }
    if (columns == vectors * LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                FN(vector) *target = (FN(vector) *)(output + i * output_row + v * LANES);
                if (accumulate)
                    sum[i][v] += *target;
                *target = sum[i][v];
            }
        return;
    }
    REAL edge[TILE_ROWS][2 * VECTOR_BYTES / sizeof(REAL)];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FN(vector) *)(edge[i] + v * LANES) = sum[i][v];
    for (int i = 0; i < rows; i++) {
        REAL *target = output + i * output_row;
        int64_t j = 0;
        if (!accumulate)
            for (; j + QUAD <= columns; j += QUAD)
                memcpy(target + j, edge[i] + j, 16);
        for (; j < columns; j++)
            target[j] = accumulate ? target[j] + edge[i][j] : edge[i][j];
    }
}

/* Rows of the tile that starts with `remaining` rows left. */
CUDA_OPS_INLINE int FN(tile_rows)(int64_t remaining)
{
    return remaining >= TILE_ROWS            ? TILE_ROWS
           : TILE_ROWS > 8 && remaining >= 8 ? 8
           : TILE_ROWS > 4 && remaining >= 4 ? 4
           : remaining >= 2                  ? 2
                                             : 1;
}

/* All tiles of one column of tiles: `rows` rows of packed a against one tile's width of b. */
CUDA_OPS_INLINE void FN(tile_column)(const int vectors, REAL *output, int64_t output_row, int64_t columns, int64_t rows,
                                     const REAL *a, const REAL *b, int64_t b_row, int64_t depth, bool accumulate)
{
    for (int64_t i = 0; i < rows;) {
        const int count = FN(tile_rows)(rows - i);
        REAL *target = output + i * output_row;
        const REAL *left = a + i * depth;
        if (count == TILE_ROWS)
            FN(tile)(TILE_ROWS, vectors, target, output_row, columns, left, b, b_row, depth, accumulate);
#if TILE_ROWS > 8
        else if (count == 8)
            FN(tile)(8, vectors, target, output_row, columns, left, b, b_row, depth, accumulate);
#endif
#if TILE_ROWS > 4
        else if (count == 4)
            FN(tile)(4, vectors, target, output_row, columns, left, b, b_row, depth, accumulate);
#endif
        else if (count == 2)
            FN(tile)(2, vectors, target, output_row, columns, left, b, b_row, depth, accumulate);
        else
            FN(tile)(1, vectors, target, output_row, columns, left, b, b_row, depth, accumulate);
        i += count;
    }
}

static void FN(gemm)(REAL *output, int64_t output_row, const REAL *a, int64_t a_row, int64_t a_column, const REAL *b,
                     int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k, bool accumulate, void *workspace)
{
    if (k == 0 && !accumulate)
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                output[i * output_row + j] = 0;

    const int64_t width = 2 * LANES;
    const int64_t block_columns = BLOCK_B_BYTES / (int64_t)sizeof(REAL) / BLOCK_DEPTH / width * width;
    REAL *const packed_a = workspace;
    REAL *const packed_b = packed_a + BLOCK_ROWS * BLOCK_DEPTH;
    /* For a few tiles of rows packing b would cost more than it saves. */
    const bool b_in_place = b_column == 1 && m <= 3 * TILE_ROWS;

    for (int64_t j0 = 0; j0 < n; j0 += block_columns) {
        const int64_t columns = min_i64(block_columns, n - j0);
        for (int64_t p0 = 0; p0 < k; p0 += BLOCK_DEPTH) {
            const int64_t depth = min_i64(BLOCK_DEPTH, k - p0);
            const REAL *const b_block = b + p0 * b_row + j0 * b_column;
            for (int64_t j = 0; j < columns; j += width) {
                const int64_t lanes = min_i64(width, columns - j);
                if (!b_in_place || lanes < width)
                    FN(pack)(packed_b + j * depth, lanes <= LANES ? LANES : width, b_block + j * b_column, b_column,
                             b_row, lanes, depth);
            }
            for (int64_t i0 = 0; i0 < m; i0 += BLOCK_ROWS) {
                const int64_t rows = min_i64(BLOCK_ROWS, m - i0);
                for (int64_t i = 0; i < rows;) {
                    const int count = FN(tile_rows)(rows - i);
                    FN(pack)(packed_a + i * depth, count, a + (i0 + i) * a_row + p0 * a_column, a_row, a_column, count,
                             depth);
                    i += count;
                }
                for (int64_t j = 0; j < columns; j += width) {
                    const int64_t lanes = min_i64(width, columns - j);
                    REAL *target = output + i0 * output_row + j0 + j;
                    const bool add = accumulate || p0 > 0;
                    if (lanes <= LANES)
                        FN(tile_column)(1, target, output_row, lanes, rows, packed_a, packed_b + j * depth, LANES,
                                        depth, add);
                    else if (b_in_place && lanes == width)
                        FN(tile_column)(2, target, output_row, lanes, rows, packed_a, b_block + j, b_row, depth, add);
                    else
                        FN(tile_column)(2, target, output_row, lanes, rows, packed_a, packed_b + j * depth, width,
                                        depth, add);
                }
            }
        }
    }
}

#undef LANES
#undef QUAD
#undef REAL
#undef FN
#undef TRANSPOSE_QUAD
#undef MULTIPLY_ADD
