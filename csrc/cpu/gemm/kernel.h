/* The matrix multiplication for one instruction set and element type (see gemm.c, which includes it).
 *
 * The usual blocking for three levels of cache. b is cut into blocks of BLOCK_DEPTH rows, a into blocks of BLOCK_DEPTH
 * columns and BLOCK_A_BYTES. Each block is packed into panels, in the order in which the micro-kernel reads them; the
 * micro-kernel sums a micro-tile of TILE_ROWS x 2 vectors in registers over the whole depth of a block before it
 * touches the output. Every element is summed in the order of p, block by block, so that neither the position of its
 * tile nor any of the choices below changes its bits.
 *
 * Packing an element costs about as much as ten multiply-adds, which matters for skinny products:
 *   - a is not packed if few panels of b meet it, or if its rows are as close in memory as packed ones would be;
 *   - b is not packed if its rows are contiguous and few tiles of rows read it. Else a panel is packed just before it
 *     is read (if rows of b are contiguous, by the first micro-kernel that reads it), while the next one is prefetched.
 *     If one block holds all rows of a, all panels share one buffer, which stays in the first-level cache;
 *   - if b is transposed and there are few rows, the transposed product is computed, output^T = b^T a^T: the rows of
 *     the long operand are broadcast, and only a few vectors of the short one are packed.
 *
 * With ROWS_FIRST, products of more than a few panels of b go by rows: a tile's rows of a are packed into the first-level
 * cache and multiplied with all panels of a block of b, which fills half of the second. The output is written in its
 * order then, which counts where it is large or the sums are short, and a is packed once for a thousand columns. Without
 * an instruction that multiplies by one element (EXPANDS) each element of a is packed as a vector of copies: in registers
 * it would cost as much as half of its multiplications with a panel.
 *
 * m = 1 and n = 1 are matrix-vector products, and m = 2 with b transposed is two of them: gemm/gemv.h.
 *
 * Ragged edges: the last columns take a tile of one vector or of zero-padded ones, of which only the columns that exist
 * are stored; the last rows take tiles of 8, 4, 2 and 1 rows, so that no work is done on rows that do not exist. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define QUAD ((int)(16 / sizeof(REAL))) /* elements in 16 bytes */

/* A vector in a register or on the stack, and an unaligned one in an array. */
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
                const int64_t l = min_i64(next, lanes - QUAD); /* the last QUAD rows, some twice */
                const REAL *from = source + p + l * lane_stride;
                for (int i = 0; i < QUAD; i++)
                    PREFETCH(from + i * lane_stride + 4 * LANES);
                TRANSPOSE_ROWS(target + p * width + l, width, from, lane_stride);
            }
        for (; p + QUAD <= depth; p += QUAD) {
            int64_t l = 0;
            for (; l + QUAD <= lanes; l += QUAD)
                TRANSPOSE_QUAD(target + p * width + l, width, source + p + l * lane_stride, lane_stride);
            if (l < lanes && lanes >= QUAD) { /* likewise */
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
            /* Rows are too far apart for the hardware prefetcher. */
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

/* Where a micro-tile is stored, and how. */
struct FN(destination) {
    REAL *output;
    int64_t row; /* stride of the output's rows, of its columns if transposed */
    int64_t columns;
    bool transposed, accumulate;
};

/* Element [i][j] of the tile goes to output[j * row + i]. */
static void FN(store_transposed)(const struct FN(destination) * to, int rows, const REAL *tile, int pitch)
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

/* Stores a tile that is transposed, or of which some columns do not exist, by way of memory. Not inlined: as part of
 * the micro-kernels of all heights it would take most of this file's compile time. */
NOINLINE static void FN(store_edge)(const struct FN(destination) * to, REAL *output, int rows, const REAL *edge)
{
    if (to->transposed) {
        struct FN(destination) tile_to = *to;
        tile_to.output = output;
        FN(store_transposed)(&tile_to, rows, edge, 2 * LANES);
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

/* One micro-tile: rows x (vectors * LANES) elements of output, of which to->columns exist. If `packing`, b is read
 * unpacked and packed on the way: the stores are free beside the multiply-adds. rows, vectors, factors and packing are
 * constants wherever this is inlined, so that `sum` is in registers. */
CUDA_OPS_INLINE void FN(micro_kernel)(const int rows, const int vectors, const enum factors factors, const bool packing,
                                      const struct FN(destination) * to, REAL *output, const REAL *restrict a,
                                      int64_t a_stride, const REAL *restrict b, int64_t b_row, int64_t depth,
                                      REAL *restrict packed)
{
    FN(lane_vector) sum[TILE_ROWS][2];
    const REAL *left[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        if (factors == BY_ROWS)
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
            if (factors == BY_COLUMNS) /* else it gained nothing, and cost a few percent where all is in cache */
                PREFETCH(a + STEPS_AHEAD * a_stride);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                right[v] = *(const FN(vector) *)(b + v * LANES);
                if (packing) {
                    *(FN(vector) *)(packed + v * LANES) = right[v];
                    PREFETCH(b + STEPS_AHEAD * b_row + v * LANES);
#if ROWS_FIRST
                    PREFETCH_FAR(b + (vectors + v) * LANES);
#endif
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
#if EXPANDS
                if (factors == EXPANDED) {
                    const FN(lane_vector) copies = *(const FN(lane_vector) *)(a + i * LANES);
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; v++)
                        sum[i][v] = MULTIPLY_ADD(copies, right[v], sum[i][v]);
                    continue;
                }
#endif
                const REAL factor = factors == BY_ROWS ? left[i][p] : a[i];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    sum[i][v] = MULTIPLY_ADD(factor, right[v], sum[i][v]);
            }
            if (packing)
                packed += vectors * LANES;
            a += a_stride;
            b += b_row;
        }
        /* The output's cache lines are prefetched late enough that they are still in the first-level cache when they
         * are written: one for each 64 bytes of a row. */
        if (!to->transposed && p < depth)
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v += 64 / VECTOR_BYTES)
                    PREFETCH_WRITE(output + i * to->row + v * LANES);
    }
    if (to->columns == vectors * LANES && !to->transposed) {
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

/* The product of a block of a, `rows` rows packed (a_row is 0) or not, and a panel of b, one micro-tile wide. */
struct FN(panel) {
    struct FN(destination) to;
    const REAL *a, *b;
    int64_t rows, depth, a_row, a_column, b_row;
    REAL *packed;     /* where the first micro-kernel packs b; NULL: it does not */
    const REAL *next; /* the panel that is packed next, to be prefetched; NULL if there is none */
    int64_t next_row;
};

/* Instantiated for each vectors and factors below; each has micro-kernels of five heights. */
CUDA_OPS_INLINE void FN(panel_product)(const int vectors, const enum factors factors, const struct FN(panel) * panel)
{
    const struct FN(destination) to = panel->to;
    const int64_t rows = panel->rows, depth = panel->depth, a_row = panel->a_row;
    const REAL *b = panel->b, *next = panel->next;
    int64_t b_row = panel->b_row;
    /* Beside each tile a few rows of the next panel are prefetched, so that packing does not wait for memory. */
    const int64_t ahead = next ? 1 + depth * TILE_ROWS / rows : 0;
    for (int64_t i = 0, prefetched = 0; i < rows;) {
        const int count = FN(tile_rows)(rows - i);
        REAL *output = to.output + i * (to.transposed ? 1 : to.row);
        const REAL *left = panel->a + i * (a_row ? a_row : depth);
        const int64_t stride = factors == BY_ROWS ? a_row : a_row ? panel->a_column : count;
        for (const int64_t stop = min_i64(depth, prefetched + ahead); prefetched < stop; prefetched++)
            for (int line = 0; line < 2 * LANES; line += (int)(64 / sizeof(REAL)))
                PREFETCH_FAR(next + prefetched * panel->next_row + line);
        if (vectors == 2 && i == 0 && panel->packed) {
            FN(micro_kernel)(TILE_ROWS, 2, factors, true, &to, output, left, stride, b, b_row, depth, panel->packed);
            b = panel->packed;
            b_row = 2 * LANES;
        } else if (count == TILE_ROWS)
            FN(micro_kernel)(TILE_ROWS, vectors, factors, false, &to, output, left, stride, b, b_row, depth, NULL);
#if TILE_ROWS > 8
        else if (count == 8)
            FN(micro_kernel)(8, vectors, factors, false, &to, output, left, stride, b, b_row, depth, NULL);
#endif
#if TILE_ROWS > 4
        else if (count == 4)
            FN(micro_kernel)(4, vectors, factors, false, &to, output, left, stride, b, b_row, depth, NULL);
#endif
        else if (count == 2)
            FN(micro_kernel)(2, vectors, factors, false, &to, output, left, stride, b, b_row, depth, NULL);
        else
            FN(micro_kernel)(1, vectors, factors, false, &to, output, left, stride, b, b_row, depth, NULL);
        i += count;
    }
}

/* Not inlined: with twenty micro-kernels in one function, fewer registers are left for addresses. */
NOINLINE static void FN(wide_by_rows)(const struct FN(panel) * panel)
{
    FN(panel_product)(2, BY_ROWS, panel);
}

NOINLINE static void FN(wide)(const struct FN(panel) * panel)
{
    FN(panel_product)(2, BY_COLUMNS, panel);
}

NOINLINE static void FN(narrow_by_rows)(const struct FN(panel) * panel)
{
    FN(panel_product)(1, BY_ROWS, panel);
}

NOINLINE static void FN(narrow)(const struct FN(panel) * panel)
{
    FN(panel_product)(1, BY_COLUMNS, panel);
}

/* The size of equal blocks, multiples of `unit` and at most `most`: a small last block would hardly be worth
 * packing. */
CUDA_OPS_INLINE int64_t FN(even_block)(int64_t size, int64_t most, int64_t unit)
{
    const int64_t blocks = (size + most - 1) / most;
    return ((size + blocks - 1) / blocks + unit - 1) / unit * unit;
}

/* It determines the order of summation, and depends on k alone. */
CUDA_OPS_INLINE int64_t FN(block_depth)(int64_t k)
{
    return FN(even_block)(k, BLOCK_DEPTH, 1);
}

#if EXPANDS
#define TILE_FACTORS EXPANDED
#define FACTOR_COPIES LANES
/* to[p][i][...] = copies of element p of row i of a. */
static void FN(pack_tile)(REAL *restrict to, const REAL *restrict a, int64_t a_row, int64_t a_column, int rows,
                          int64_t depth)
{
    for (int64_t p = 0; p < depth; p++, to += rows * LANES)
        for (int i = 0; i < rows; i++)
            *(FN(lane_vector) *)(to + i * LANES) = COPIES(a[i * a_row + p * a_column]);
}
#elif ROWS_FIRST
#define TILE_FACTORS BY_COLUMNS
#define FACTOR_COPIES 1
static void FN(pack_tile)(REAL *restrict to, const REAL *restrict a, int64_t a_row, int64_t a_column, int rows,
                          int64_t depth)
{
    FN(pack)(to, rows, a, a_row, a_column, rows, depth);
}
#endif

#if ROWS_FIRST
/* The product of a tile's rows of a, packed, and a block of b. */
struct FN(tile_product) {
    struct FN(destination) to;
    const REAL *a, *b;
    int64_t columns, depth, b_row, b_column;
    REAL *packed;  /* the panels of b */
    bool first;    /* they are to be packed */
    bool in_place; /* full ones are not packed at all */
};

CUDA_OPS_INLINE void FN(tile_panels)(const int rows, const struct FN(tile_product) * product)
{
    const int64_t width = 2 * LANES, depth = product->depth, a_stride = rows * FACTOR_COPIES;
    struct FN(destination) to = product->to;
    for (int64_t j = 0; j < product->columns; j += width) {
        const REAL *b = product->b + j * product->b_column;
        REAL *const packed = product->packed + j * depth;
        REAL *const output = to.output + j * (to.transposed ? to.row : 1);
        to.columns = min_i64(width, product->columns - j);
        const bool full = to.columns == width, narrow = to.columns <= LANES, in_place = full && product->in_place;
        if (rows == TILE_ROWS && full && !in_place && product->first && product->b_column == 1) {
            FN(micro_kernel)(TILE_ROWS, 2, TILE_FACTORS, true, &to, output, product->a, a_stride, b, product->b_row,
                             depth, packed);
            continue;
        }
        int64_t b_row = product->b_row;
        if (!in_place) {
            const int64_t panel = narrow ? LANES : width;
            if (product->first)
                FN(pack)(packed, panel, b, product->b_column, b_row, to.columns, depth);
            b = packed;
            b_row = panel;
        }
        if (narrow)
            FN(micro_kernel)(rows, 1, TILE_FACTORS, false, &to, output, product->a, a_stride, b, b_row, depth, NULL);
        else
            FN(micro_kernel)(rows, 2, TILE_FACTORS, false, &to, output, product->a, a_stride, b, b_row, depth, NULL);
    }
}

/* As FN(product), of more than a few panels: rows first. */
static void FN(product_rows_first)(REAL *output, int64_t output_row, bool transposed, const REAL *a, int64_t a_row,
                                   int64_t a_column, const REAL *b, int64_t b_row, int64_t b_column, int64_t m,
                                   int64_t n, int64_t k, bool accumulate, void *workspace)
{
    const int64_t block_depth = FN(block_depth)(k), width = 2 * LANES;
    const int64_t most_columns = ROWS_FIRST_B_BYTES / (int64_t)sizeof(REAL) / block_depth / width * width;
    const int64_t block_columns = FN(even_block)(n, most_columns, width);
    REAL *const tile = workspace;
    struct FN(tile_product) product = {.to = {.row = output_row, .transposed = transposed},
                                       .a = tile,
                                       .b_row = b_row,
                                       .b_column = b_column,
                                       .packed = tile + BLOCK_DEPTH * TILE_ROWS * FACTOR_COPIES,
                                       .in_place = b_column == 1 && m <= 3 * TILE_ROWS};
    for (int64_t j0 = 0; j0 < n; j0 += block_columns)
        for (int64_t p0 = 0; p0 < k; p0 += block_depth) {
            product.columns = min_i64(block_columns, n - j0);
            product.depth = min_i64(block_depth, k - p0);
            product.b = b + p0 * b_row + j0 * b_column;
            product.to.accumulate = accumulate || p0 > 0;
            for (int64_t i = 0; i < m;) {
                const int rows = FN(tile_rows)(m - i);
                FN(pack_tile)(tile, a + i * a_row + p0 * a_column, a_row, a_column, rows, product.depth);
                product.to.output = output + (transposed ? j0 * output_row + i : i * output_row + j0);
                product.first = i == 0;
                switch (rows) {
                case TILE_ROWS:
                    FN(tile_panels)(TILE_ROWS, &product);
                    break;
#if TILE_ROWS > 8
                case 8:
                    FN(tile_panels)(8, &product);
                    break;
#endif
#if TILE_ROWS > 4
                case 4:
                    FN(tile_panels)(4, &product);
                    break;
#endif
                case 2:
                    FN(tile_panels)(2, &product);
                    break;
                default:
                    FN(tile_panels)(1, &product);
                }
                i += rows;
            }
        }
}
#endif

/* If `transposed`, the caller has exchanged a and b, and output is stored transposed. */
static void FN(product)(REAL *output, int64_t output_row, bool transposed, const REAL *a, int64_t a_row,
                        int64_t a_column, const REAL *b, int64_t b_row, int64_t b_column, int64_t m, int64_t n,
                        int64_t k, bool accumulate, void *workspace)
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
#if ROWS_FIRST
    if (!few_tiles && (TILE_FACTORS == EXPANDED || m > 3 * TILE_ROWS)) {
        FN(product_rows_first)(output, output_row, transposed, a, a_row, a_column, b, b_row, b_column, m, n, k,
                               accumulate, workspace);
        return;
    }
#endif
    const int64_t close =
        VECTOR_BYTES == 64 ? 2 * CLOSE_BYTES : CLOSE_BYTES; /* AVX-512 processors have larger caches */
    /* An expanded a (a_row is 0) is packed: to a panel, a_row of 0 says that it is. */
    const bool by_rows = a_column == 1 && a_row != 0 && (few_tiles || a_row * (int64_t)sizeof(REAL) <= close);
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
                    struct FN(panel) panel = {.to = {.output = transposed ? output + (j0 + j) * output_row + i0
                                                                          : output + i0 * output_row + j0 + j,
                                                     .row = output_row,
                                                     .columns = lanes,
                                                     .transposed = transposed,
                                                     .accumulate = accumulate || p0 > 0},
                                              .a = a_in_place ? a_block : packed_a,
                                              .b = b_block + j * b_column,
                                              .rows = rows,
                                              .depth = depth,
                                              .a_row = a_in_place ? a_row : 0,
                                              .a_column = a_column,
                                              .b_row = b_row};
                    /* Packed at the first block of rows, by the first micro-kernel if the panel is full. With one block
                     * of rows all panels share one buffer, which stays in the first-level cache. */
                    REAL *const packed = packed_b + (m > block_rows ? j * depth : 0);
                    const bool pack = i0 == 0 && (!b_in_place || lanes < width);
                    if (pack && b_column == 1 && j + 2 * width <= columns) {
                        panel.next = panel.b + width;
                        panel.next_row = b_row;
                    }
                    if (pack && b_column == 1 && lanes == width && rows >= TILE_ROWS) {
                        panel.packed = packed;
                    } else if (pack || i0 > 0) {
                        if (pack)
                            FN(pack)(packed, narrow ? LANES : width, panel.b, b_column, b_row, lanes, depth);
                        panel.b = packed;
                        panel.b_row = narrow ? LANES : width;
                    }
                    if (by_rows)
                        (narrow ? FN(narrow_by_rows) : FN(wide_by_rows))(&panel);
                    else
                        (narrow ? FN(narrow) : FN(wide))(&panel);
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
    if (m == 2 && b_row == 1 && b_column != 1 &&
        FN(times_two_vectors)(output, output_row, b, b_column, a, a_row, a_column, n, k, accumulate))
        return;
    if (b_row == 1 && b_column != 1 && m <= TRANSPOSED_ROWS)
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
#undef TRANSPOSE_BLOCK
#undef MULTIPLY_ADD
#undef COPIES
#undef TILE_FACTORS
#undef FACTOR_COPIES
