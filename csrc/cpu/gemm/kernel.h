/* The matrix multiplication for one instruction set and element type (see gemm.c, which includes it).
 *
 * The classic scheme of three blocks. b is cut into blocks of BLOCK_DEPTH rows, a into blocks of BLOCK_DEPTH columns
 * and BLOCK_A_BYTES; each is packed into the order in which the innermost loop reads it, and a register tile of
 * TILE_ROWS x 2 vectors is summed over the whole depth of a block before it touches the output. Every element is summed
 * in the order of p, block by block, so that neither where a tile lies nor any of the choices below makes a difference
 * to the bits.
 *
 * Packing costs about as much as ten multiply-adds an element, which a large product forgets and a skinny one does not:
 *   - a is read where it lies if few tiles of columns read it, or if its rows lie as close as packed ones would;
 *   - b is read where it lies if its rows are contiguous and few tiles of rows read it. Else a column of tiles is
 *     packed just before it is read, by its first tile on the way if rows of b are contiguous, while the column after
 *     it is asked for; if one block has all rows of a, always in the same place, in the first-level cache;
 *   - if b is the transposed one and there are few rows, the transposed product is computed, output^T = b^T a^T, in
 *     which the long operand is one whose rows are broadcast, and nothing but a few vectors of the short one is packed.
 *
 * A vector, m = 1 or n = 1, has no use for tiles: gemm/gemv.h.
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
    if (step == 1 && lane_stride != 1) {
        for (; p + LANES <= depth && lanes >= QUAD; p += LANES)
            for (int64_t next = 0; next < lanes; next += QUAD) {
                const int64_t l = min_i64(next, lanes - QUAD); /* the last rows once more, rather than one by one */
                const REAL *from = source + p + l * lane_stride;
                for (int i = 0; i < QUAD; i++)
                    PREFETCH(from + i * lane_stride + 4 * LANES);
                TRANSPOSE_ROWS(target + p * width + l, width, from, lane_stride);
            }
        for (; p + QUAD <= depth; p += QUAD) {
            int64_t l = 0;
            for (; l + QUAD <= lanes; l += QUAD)
                TRANSPOSE_QUAD(target + p * width + l, width, source + p + l * lane_stride, lane_stride);
            if (l < lanes && lanes >= QUAD) { /* once more over some that are there already, rather than one by one */
                l = lanes - QUAD;
                TRANSPOSE_QUAD(target + p * width + l, width, source + p + l * lane_stride, lane_stride);
                l = lanes;
            }
            for (; l < lanes; l++)
                for (int q = 0; q < QUAD; q++)
                    target[(p + q) * width + l] = source[p + q + l * lane_stride];
        }
    }
    for (; p < depth; p++) {
        const REAL *from = source + p * step;
        REAL *to = target + p * width;
        int64_t l = 0;
        if (lane_stride == 1) {
            /* Rows lie too far apart for the processor to see it coming. */
            for (int64_t line = 0; line < lanes; line += (int64_t)(64 / sizeof(REAL)))
                PREFETCH(from + 16 * step + line);
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

/* What becomes of a register tile. */
struct FN(destination) {
    REAL *output;
    int64_t row; /* distance of the output's rows, of its columns if turned */
    int64_t columns;
    bool turned, accumulate;
};

/* Element [i][j] of the tile goes to output[j * row + i]. */
static void FN(store_turned)(const struct FN(destination) * to, int rows, const REAL *tile, int pitch)
{
    int64_t j = 0;
    if (!to->accumulate && rows >= QUAD)
        for (; j + QUAD <= to->columns; j += QUAD) {
            for (int i = 0; i + QUAD <= rows; i += QUAD)
                TRANSPOSE_QUAD(to->output + j * to->row + i, to->row, tile + i * pitch + j, pitch);
            if (rows % QUAD) {
                const int i = rows - QUAD;
                TRANSPOSE_QUAD(to->output + j * to->row + i, to->row, tile + i * pitch + j, pitch);
            }
        }
    for (; j < to->columns; j++) {
        REAL *target = to->output + j * to->row;
        for (int i = 0; i < rows; i++)
            target[i] = to->accumulate ? target[i] + tile[i * pitch + j] : tile[i * pitch + j];
    }
}

/* Stores a tile that is turned, or ends before its last column, from memory. A function of its own: inlined into tiles
 * of all heights, it would be most of the time that this file takes to compile. */
NOINLINE static void FN(store_edge)(const struct FN(destination) * to, REAL *output, int rows, const REAL *edge)
{
    if (to->turned) {
        struct FN(destination) here = *to;
        here.output = output;
        FN(store_turned)(&here, rows, edge, 2 * LANES);
        return;
    }
    for (int i = 0; i < rows; i++) {
        const REAL *source = edge + i * 2 * LANES;
        REAL *target = output + i * to->row;
        int64_t j = 0;
        if (!to->accumulate)
            for (; j + QUAD <= to->columns; j += QUAD)
                memcpy(target + j, source + j, 16);
        for (; j < to->columns; j++)
            target[j] = to->accumulate ? target[j] + source[j] : source[j];
    }
}

/* One register tile: rows x (vectors * LANES) elements of output, of which to->columns exist. Element p of row i of a
 * lies at a[i + p * a_stride], or if `by_rows` at a[i * a_stride + p]. If `packing`, b is read where it lies and
 * written to `packed` on the way: stores beside multiply-adds are free. rows, vectors, by_rows and packing are
 * constants wherever this is inlined, so that `sum` is registers. */
CUDA_OPS_INLINE void FN(tile)(const int rows, const int vectors, const bool by_rows, const bool packing,
                              const struct FN(destination) * to, REAL *output, const REAL *restrict a, int64_t a_stride,
                              const REAL *restrict b, int64_t b_row, int64_t depth, REAL *restrict packed)
{
    FN(lane_vector) sum[TILE_ROWS][2];
    const REAL *left[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        if (by_rows)
            left[i] = a + i * a_stride;
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = (FN(lane_vector)){0};
    }
    int64_t p = 0;
    for (int64_t stop = max_i64(depth - STEPS_LEFT, 0); p < depth; stop = depth) {
#pragma GCC unroll 4
        for (; p < stop; p++) {
            FN(lane_vector) right[2];
            if (!by_rows) /* in place it gained nothing, and took a few percent where all is near */
                PREFETCH(a + STEPS_AHEAD * a_stride);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                right[v] = *(const FN(vector) *)(b + v * LANES);
                if (packing) {
                    *(FN(vector) *)(packed + v * LANES) = right[v];
                    PREFETCH(b + STEPS_AHEAD * b_row + v * LANES);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                const REAL factor = by_rows ? left[i][p] : a[i];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    sum[i][v] = MULTIPLY_ADD(factor, right[v], sum[i][v]);
            }
            if (packing)
                packed += vectors * LANES;
            a += a_stride;
            b += b_row;
        }
        /* The lines of the tile are asked for so late that they are still in the first-level cache when they are
         * written, and every line of a row: a vector of 64 bytes is one. */
        if (!to->turned && p < depth)
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v += 64 / VECTOR_BYTES)
                    PREFETCH_WRITE(output + i * to->row + v * LANES);
    }
    if (to->columns == vectors * LANES && !to->turned) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                FN(vector) *target = (FN(vector) *)(output + i * to->row + v * LANES);
                if (to->accumulate)
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
    FN(store_edge)(to, output, rows, edge[0]);
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

/* A column of tiles: `rows` rows of a, packed (a_row is 0) or where they lie, against one tile's width of b. */
struct FN(column) {
    struct FN(destination) to;
    const REAL *a, *b;
    int64_t rows, depth, a_row, a_column, b_row;
    REAL *packed;     /* where the first tile packs b, NULL if b is read as it is */
    const REAL *next; /* what is packed next, to be asked for by now; NULL if nothing is */
    int64_t next_row;
};

/* The constants make four functions of it, each with tiles of five heights. */
CUDA_OPS_INLINE void FN(tile_column)(const int vectors, const bool by_rows, const struct FN(column) * column)
{
    const struct FN(destination) to = column->to;
    const int64_t rows = column->rows, depth = column->depth, a_row = column->a_row;
    const REAL *b = column->b, *next = column->next;
    int64_t b_row = column->b_row;
    /* With each tile a few rows of what is packed next, so that packing does not wait for memory. */
    const int64_t ahead = next ? 1 + depth * TILE_ROWS / rows : 0;
    for (int64_t i = 0, asked = 0; i < rows;) {
        const int count = FN(tile_rows)(rows - i);
        REAL *output = to.output + i * (to.turned ? 1 : to.row);
        const REAL *left = column->a + i * (a_row ? a_row : depth);
        const int64_t stride = by_rows ? a_row : a_row ? column->a_column : count;
        for (const int64_t stop = min_i64(depth, asked + ahead); asked < stop; asked++)
            for (int line = 0; line < 2 * LANES; line += (int)(64 / sizeof(REAL)))
                PREFETCH_FAR(next + asked * column->next_row + line);
        if (vectors == 2 && i == 0 && column->packed) {
            FN(tile)(TILE_ROWS, 2, by_rows, true, &to, output, left, stride, b, b_row, depth, column->packed);
            b = column->packed;
            b_row = 2 * LANES;
        } else if (count == TILE_ROWS)
            FN(tile)(TILE_ROWS, vectors, by_rows, false, &to, output, left, stride, b, b_row, depth, NULL);
#if TILE_ROWS > 8
        else if (count == 8)
            FN(tile)(8, vectors, by_rows, false, &to, output, left, stride, b, b_row, depth, NULL);
#endif
#if TILE_ROWS > 4
        else if (count == 4)
            FN(tile)(4, vectors, by_rows, false, &to, output, left, stride, b, b_row, depth, NULL);
#endif
        else if (count == 2)
            FN(tile)(2, vectors, by_rows, false, &to, output, left, stride, b, b_row, depth, NULL);
        else
            FN(tile)(1, vectors, by_rows, false, &to, output, left, stride, b, b_row, depth, NULL);
        i += count;
    }
}

/* Not inlined: four times five tiles in one function have fewer registers for addresses. */
NOINLINE static void FN(wide_by_rows)(const struct FN(column) * column)
{
    FN(tile_column)(2, true, column);
}

NOINLINE static void FN(wide)(const struct FN(column) * column)
{
    FN(tile_column)(2, false, column);
}

NOINLINE static void FN(narrow_by_rows)(const struct FN(column) * column)
{
    FN(tile_column)(1, true, column);
}

NOINLINE static void FN(narrow)(const struct FN(column) * column)
{
    FN(tile_column)(1, false, column);
}

/* Blocks of about the same size, at most `most`, of multiples of `unit`: rather than a last one that is hardly worth
 * its packing. */
CUDA_OPS_INLINE int64_t FN(even_block)(int64_t size, int64_t most, int64_t unit)
{
    const int64_t blocks = (size + most - 1) / most;
    return ((size + blocks - 1) / blocks + unit - 1) / unit * unit;
}

/* That of the depth makes the order of summation, and follows from k alone. */
CUDA_OPS_INLINE int64_t FN(block_depth)(int64_t k)
{
    return FN(even_block)(k, BLOCK_DEPTH, 1);
}

/* As it is if `turned` is not set, and with a and b exchanged by the caller if it is. */
static void FN(product)(REAL *output, int64_t output_row, bool turned, const REAL *a, int64_t a_row, int64_t a_column,
                        const REAL *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                        bool accumulate, void *workspace)
{
    const int64_t block_depth = FN(block_depth)(k);
    const int64_t width = 2 * LANES;
    const int64_t most_columns = BLOCK_B_BYTES / (int64_t)sizeof(REAL) / block_depth / width * width;
    const int64_t most_rows = BLOCK_A_BYTES / (int64_t)sizeof(REAL) / block_depth / TILE_ROWS * TILE_ROWS;
    const int64_t block_rows = FN(even_block)(m, most_rows, TILE_ROWS);
    const int64_t block_columns = m <= block_rows ? n : FN(even_block)(n, most_columns, width);
    REAL *const packed_a = workspace;
    REAL *const packed_b = packed_a + BLOCK_A_BYTES / sizeof(REAL);
    const bool b_in_place = b_column == 1 && m <= 3 * TILE_ROWS;
    const bool few_tiles = n <= FEW_TILES * width;
    const int64_t close = VECTOR_BYTES == 64 ? 2 * CLOSE_BYTES : CLOSE_BYTES; /* such processors' caches are larger */
    const bool by_rows = a_column == 1 && (few_tiles || a_row * (int64_t)sizeof(REAL) <= close);
    const bool a_in_place = by_rows || (a_row == 1 && few_tiles);

    for (int64_t j0 = 0; j0 < n; j0 += block_columns) {
        const int64_t columns = min_i64(block_columns, n - j0);
        for (int64_t p0 = 0; p0 < k; p0 += block_depth) {
            const int64_t depth = min_i64(block_depth, k - p0);
            const REAL *const b_block = b + p0 * b_row + j0 * b_column;
            for (int64_t i0 = 0; i0 < m; i0 += block_rows) {
                const int64_t rows = min_i64(block_rows, m - i0);
                const REAL *const a_block = a + i0 * a_row + p0 * a_column;
                for (int64_t i = 0; i < rows && !a_in_place;) {
                    const int count = FN(tile_rows)(rows - i);
                    FN(pack)(packed_a + i * depth, count, a_block + i * a_row, a_row, a_column, count, depth);
                    i += count;
                }
                for (int64_t j = 0; j < columns; j += width) {
                    const int64_t lanes = min_i64(width, columns - j);
                    const bool narrow = lanes <= LANES;
                    struct FN(column) column = {.to = {.output = turned ? output + (j0 + j) * output_row + i0
                                                                        : output + i0 * output_row + j0 + j,
                                                       .row = output_row,
                                                       .columns = lanes,
                                                       .turned = turned,
                                                       .accumulate = accumulate || p0 > 0},
                                                .a = a_in_place ? a_block : packed_a,
                                                .b = b_block + j * b_column,
                                                .rows = rows,
                                                .depth = depth,
                                                .a_row = a_in_place ? a_row : 0,
                                                .a_column = a_column,
                                                .b_row = b_row};
                    /* Packed when it is first read, by the first tile if it is as wide as that. One block of rows packs
                     * all columns in the same place, which stays in the first-level cache. */
                    REAL *const packed = packed_b + (m > block_rows ? j * depth : 0);
                    const bool pack = i0 == 0 && (!b_in_place || lanes < width);
                    if (pack && b_column == 1 && j + 2 * width <= columns) {
                        column.next = column.b + width;
                        column.next_row = b_row;
                    }
                    if (pack && b_column == 1 && lanes == width && rows >= TILE_ROWS) {
                        column.packed = packed;
                    } else if (pack || i0 > 0) {
                        if (pack)
                            FN(pack)(packed, narrow ? LANES : width, column.b, b_column, b_row, lanes, depth);
                        column.b = packed;
                        column.b_row = narrow ? LANES : width;
                    }
                    if (by_rows)
                        (narrow ? FN(narrow_by_rows) : FN(wide_by_rows))(&column);
                    else
                        (narrow ? FN(narrow) : FN(wide))(&column);
                }
            }
        }
    }
}

#include "gemm/gemv.h"

static void FN(gemm)(REAL *output, int64_t output_row, const REAL *a, int64_t a_row, int64_t a_column, const REAL *b,
                     int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k, bool accumulate, void *workspace)
{
    if (k == 0 && !accumulate)
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                output[i * output_row + j] = 0;
    if (m == 0 || n == 0 || k == 0)
        return;
    if (m == 1 && FN(times_vector)(output, 1, b, b_column, b_row, a, a_column, n, k, accumulate))
        return;
    if (n == 1 && FN(times_vector)(output, output_row, a, a_row, a_column, b, b_row, m, k, accumulate))
        return;
    if (b_row == 1 && b_column != 1 && m <= TURNED_ROWS)
        FN(product)(output, output_row, true, b, b_column, b_row, a, a_column, a_row, n, m, k, accumulate, workspace);
    else
        FN(product)(output, output_row, false, a, a_row, a_column, b, b_row, b_column, m, n, k, accumulate, workspace);
}

#undef LANES
#undef QUAD
#undef REAL
#undef FN
#undef TRANSPOSE_QUAD
#undef TRANSPOSE_ROWS
#undef TRANSPOSE_SQUARE
#undef MULTIPLY_ADD
