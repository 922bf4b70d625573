/* Products of halves by AMX, or by vectors of AVX512-BF16 (gemm/tile_packing.h). A tile register holds 16 rows of 64 bytes: of a 16 rows x 32 of depth, of b 16 pairs of
 * depth x 16 columns, of output 16 x 16 sums. A micro-tile of output is 32 x 32, in four tile registers: four
 * instructions of 8,192 multiply-adds (16 cycles each) for four tile loads; or 64 x 16 where b has no more than 16
 * columns.
 *
 * Operands are packed (gemm/tile_packing.h); but bfloat16 rows of a that are contiguous along the depth are read where
 * they lie. a and b are exchanged, and output is stored transposed, where that leaves less to pack.
 *
 * Sums of a micro-tile are kept in 4 KB of their own, rounded (and transposed) from there, and stored once. Where the
 * depth is over a block's, all of a block's micro-tiles wait in the second-level cache.
 *
 * Bound by the tile registers' multiply-adds for large products, by packing and memory for small ones. */
#include "gemm/tiles.h"

#include "common/common.h"
#include "cuda_ops/cpu_isa.h"

#if CUDA_OPS_WITH_AMX
#include "gemm/tile_packing.h"

enum {
    ROWS = 256,        /* of a block of a */
    COLUMNS = 512,     /* and of b */
    DEPTH = 512,       /* of a block: two streams of b have 32 KB, part of the first-level cache */
    KEPT_DEPTH = 4096, /* of b's columns of a block, that stay packed for all blocks of a */
    PANEL = 2 * SIDE   /* rows or columns of a micro-tile */
};
enum {
    PACKED_A_BYTES = ROWS * DEPTH * 2,
    PACKED_B_BYTES = COLUMNS * KEPT_DEPTH * 2 * 2, /* with low parts */
    SUMS_BYTES = ROWS * COLUMNS * 4,
    LAST_BYTES = ROWS / SIDE * TILE * 2,
    WORKSPACE_BYTES = PACKED_A_BYTES + PACKED_B_BYTES + SUMS_BYTES + LAST_BYTES
};

bool cuda_ops_has_tiles(cuda_ops_dtype dtype)
{
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    /* A float16 takes three products by vectors, which are twice as fast as float32's. */
    return isa == CUDA_OPS_CPU_AMX || (isa == CUDA_OPS_CPU_AVX512_BF16 && dtype == CUDA_OPS_BFLOAT16);
}

int64_t cuda_ops_tiles_workspace(void)
{
    return WORKSPACE_BYTES;
}

/* What of a block is packed. */
struct block {
    uint16_t *a, *b, *last;
    float *sums;
    bool special_a[ROWS / PANEL], special_b[COLUMNS / PANEL]; /* whether something is not finite */
};

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

/* A stream, packed or where it lies: how far apart the rows of a tile are (in bytes) and the steps (in elements). The
 * last step may be elsewhere. */
struct stream {
    const uint16_t *data, *last;
    size_t pitch;
    int64_t step;
};

/* The four row tiles at `part`, times tile register 6 or, if `other`, 7. */
CUDA_OPS_INLINE void add_column(const bool other, const struct stream *a, int64_t part)
{
    _tile_loadd(4, a[0].data + part, a[0].pitch);
    if (other)
        _tile_dpbf16ps(0, 4, 7);
    else
        _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a[1].data + part, a[1].pitch);
    if (other)
        _tile_dpbf16ps(1, 5, 7);
    else
        _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, a[2].data + part, a[2].pitch);
    if (other)
        _tile_dpbf16ps(2, 4, 7);
    else
        _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, a[3].data + part, a[3].pitch);
    if (other)
        _tile_dpbf16ps(3, 5, 7);
    else
        _tile_dpbf16ps(3, 5, 6);
}

/* Four row tiles times one column tile, in add_square's order. */
CUDA_OPS_INLINE void add_tall(const bool split, const bool reversed, const struct stream *a, const uint16_t *b)
{
    _tile_loadd(6, b, 64);
    if (split) {
        _tile_loadd(7, b + TILE, 64);
        add_column(reversed, a, reversed ? 0 : TILE);
    }
    add_column(false, a, 0);
    if (split)
        add_column(!reversed, a, reversed ? TILE : 0);
}

CUDA_OPS_INLINE void square_product(const bool lower, const bool right, const bool split, const bool reversed,
                                    const struct stream *a, const struct stream *b, int64_t steps)
{
    const uint16_t *a0 = a[0].data, *a1 = a[1].data, *b0 = b[0].data, *b1 = b[1].data;
    const size_t pitch0 = a[0].pitch, pitch1 = a[1].pitch;
    const int64_t step0 = a[0].step, step1 = a[1].step, step = split ? 2 * TILE : TILE;
    const int64_t whole = a[0].last ? steps - 1 : steps;
    for (int64_t s = 0; s < whole; s++) {
        add_square(lower, right, split, reversed, a0, pitch0, a1, pitch1, TILE, b0, b1);
        a0 += step0, a1 += step1, b0 += step, b1 += step;
    }
    if (a[0].last)
        add_square(lower, right, split, reversed, a[0].last, 64, a[1].last, 64, TILE, b0, b1);
}

CUDA_OPS_INLINE void tall_product(const bool split, const bool reversed, const struct stream *a, const struct stream *b,
                                  int64_t steps)
{
    struct stream at[4] = {a[0], a[1], a[2], a[3]};
    const uint16_t *b0 = b[0].data;
    const int64_t whole = a[0].last ? steps - 1 : steps;
    for (int64_t s = 0; s < whole; s++, b0 += split ? 2 * TILE : TILE) {
        add_tall(split, reversed, at, b0);
        for (int t = 0; t < 4; t++)
            at[t].data += at[t].step;
    }
    if (!a[0].last)
        return;
    for (int t = 0; t < 4; t++)
        at[t] = (struct stream){.data = a[t].last, .pitch = 64};
    add_tall(split, reversed, at, b0);
}

CUDA_OPS_INLINE void product_of_streams(const bool split, const bool reversed, bool tall, const struct stream *a,
                                        const struct stream *b, int rows, int columns, int64_t steps)
{
    if (tall)
        tall_product(split, reversed, a, b, steps);
    else if (rows > 1 && columns > 1)
        square_product(true, true, split, reversed, a, b, steps);
    else if (rows > 1)
        square_product(true, false, split, reversed, a, b, steps);
    else if (columns > 1)
        square_product(false, true, split, reversed, a, b, steps);
    else
        square_product(false, false, split, reversed, a, b, steps);
}

/* product_of_streams without tile registers: eight or 16 rows of the micro-tile at a time, along all of the depth. */
CUDA_OPS_INLINE void rows_of_streams(const bool right, const bool split, const bool reversed, bool tall, float *sums,
                                     bool add, const struct stream *a, const struct stream *b, int rows, int64_t steps)
{
    const int64_t next = split ? 2 * TILE : TILE;
    for (int t = 0; t < rows; t++)
        for (int row = 0; row < SIDE; row += rows_at_once(right)) {
            float *const at = sums + (tall ? t : 2 * t) * SIDE * SIDE + row * SIDE;
            const int64_t whole = a[t].last ? steps - 1 : steps;
            const uint16_t *from = a[t].data + row * (int64_t)(a[t].pitch / 2), *b0 = b[0].data, *b1 = b[1].data;
            __m512 vectors[VECTORS];
            begin_rows(right, vectors, at, add);
            for (int64_t s = 0; s < whole; s++, from += a[t].step, b0 += next, b1 += next)
                add_rows(right, split, reversed, vectors, from, a[t].pitch, TILE, b0, b1);
            if (a[t].last)
                add_rows(right, split, reversed, vectors, a[t].last + row * STEP, 64, TILE, b0, b1);
            end_rows(right, vectors, at);
        }
}

/* sums = or, if add, += the products of streams: of two rows of tiles and two columns of them, or if tall of four and
 * one. `rows` and `columns` of tiles are there; of the others the streams must be readable. */
static void multiply_streams(bool tall, bool split, bool reversed, float *sums, bool add, const struct stream *a,
                             const struct stream *b, int rows, int columns, int64_t steps)
{
    if (!has_tile_registers()) {
        const bool right = columns > 1;
        if (right && !split)
            rows_of_streams(true, false, false, tall, sums, add, a, b, rows, steps);
        else if (right)
            rows_of_streams(true, true, reversed, tall, sums, add, a, b, rows, steps);
        else
            rows_of_streams(false, split, reversed, tall, sums, add, a, b, rows, steps);
        return;
    }
    /* GCC's tile loads do not declare that they read memory, nor its stores that they write it. */
    __asm__ volatile("" : : : "memory");
    begin_sums(sums, add);
    if (!split)
        product_of_streams(false, false, tall, a, b, rows, columns, steps);
    else if (reversed)
        product_of_streams(true, true, tall, a, b, rows, columns, steps);
    else
        product_of_streams(true, false, tall, a, b, rows, columns, steps);
    end_sums(sums);
    __asm__ volatile("" : : : "memory");
}

/* Rows of sums, `width` of them from two tiles (16 columns of each) beside each other, as rows of output from `row` and
 * `column` on. */
CUDA_OPS_INLINE void store_rows_of(const cuda_ops_dtype dtype, const struct tile_output *output, int64_t row,
                                   int64_t column, const float *first, const float *second, int64_t height,
                                   int64_t width)
{
    const __mmask32 mask = first_lanes_32(width);
    const __mmask16 lower = (__mmask16)mask, upper = (__mmask16)(mask >> SIDE);
    __m512 bias_lower = _mm512_setzero_ps(), bias_upper = bias_lower;
    if (output->bias && dtype == CUDA_OPS_FLOAT32) {
        bias_lower = _mm512_maskz_loadu_ps(lower, (const float *)output->bias + column);
        bias_upper = _mm512_maskz_loadu_ps(upper, (const float *)output->bias + column + SIDE);
    } else if (output->bias) {
        const __m512i bias = _mm512_maskz_loadu_epi16(mask, (const uint16_t *)output->bias + column);
        const __m256i low = _mm512_castsi512_si256(bias), high = _mm512_extracti64x4_epi64(bias, 1);
        bias_lower = dtype == CUDA_OPS_BFLOAT16 ? widened_pairs(low) : _mm512_cvtph_ps(low);
        bias_upper = dtype == CUDA_OPS_BFLOAT16 ? widened_pairs(high) : _mm512_cvtph_ps(high);
    }
    for (int64_t r = 0; r < height; r++) {
        __m512 low = _mm512_add_ps(_mm512_loadu_ps(first + r * SIDE), bias_lower);
        __m512 high = _mm512_add_ps(_mm512_loadu_ps(second + r * SIDE), bias_upper);
        const int64_t offset = (row + r) * output->row + column;
        if (output->relu) { /* of NaN the second operand stays */
            low = _mm512_max_ps(_mm512_setzero_ps(), low);
            high = _mm512_max_ps(_mm512_setzero_ps(), high);
        }
        if (dtype == CUDA_OPS_FLOAT32) {
            float *const to = (float *)output->data + offset;
            if (output->accumulate) {
                low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(lower, to));
                high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(upper, to + SIDE));
            }
            _mm512_mask_storeu_ps(to, lower, low);
            _mm512_mask_storeu_ps(to + SIDE, upper, high);
        } else if (dtype == CUDA_OPS_BFLOAT16) {
            _mm512_mask_storeu_epi16((uint16_t *)output->data + offset, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        } else {
            const __m512i halves = _mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
            _mm512_mask_storeu_epi16((uint16_t *)output->data + offset, mask,
                                     _mm512_inserti64x4(halves, _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1));
        }
    }
}

static void store_rows(const struct tile_output *output, int64_t row, int64_t column, const float *first,
                       const float *second, int64_t height, int64_t width)
{
    if (output->dtype == CUDA_OPS_FLOAT32)
        store_rows_of(CUDA_OPS_FLOAT32, output, row, column, first, second, height, width);
    else if (output->dtype == CUDA_OPS_BFLOAT16)
        store_rows_of(CUDA_OPS_BFLOAT16, output, row, column, first, second, height, width);
    else
        store_rows_of(CUDA_OPS_FLOAT16, output, row, column, first, second, height, width);
}

/* Stores a micro-tile of sums, `height` rows from i on and `width` columns from j on of a times b: of output transposed
 * if exchanged. */
static void store_sums(const struct tile_output *output, bool exchanged, bool tall, const float *sums, int64_t i,
                       int64_t j, int64_t height, int64_t width)
{
    const int next = SIDE * SIDE, below = tall ? next : 2 * next; /* to the next tile in a row, and in a column */
    if (!exchanged) {
        for (int64_t r = 0; r < height; r += SIDE, sums += below)
            store_rows(output, i + r, j, sums, width > SIDE ? sums + next : sums, min_i64(SIDE, height - r), width);
        return;
    }
    for (int64_t c = 0; c < width; c += SIDE)
        for (int64_t r = 0; r < height; r += 2 * SIDE) {
            const float *const from = sums + r / SIDE * below + c / SIDE * next;
            uint32_t turned[2][SIDE * SIDE] __attribute__((aligned(64)));
            transpose_16(turned[0], SIDE, (const uint32_t *)from, SIDE);
            if (height - r > SIDE)
                transpose_16(turned[1], SIDE, (const uint32_t *)(from + below), SIDE);
            store_rows(output, j + c, i + r, (const float *)turned[0], (const float *)turned[height - r > SIDE ? 1 : 0],
                       min_i64(SIDE, width - c), min_i64(2 * SIDE, height - r));
        }
}

/* Adds a tile's products with infinities and NaN, which were packed as zeros: as sums of two they would all be NaN. */
static void add_special(const struct tile_product *x, float *sums, int64_t i, int64_t j, int64_t p0, int64_t height,
                        int64_t width, int64_t depth)
{
    for (int64_t p = p0; p < p0 + depth; p++) {
        float left[SIDE], right[SIDE];
        bool special_left[SIDE], special_right[SIDE], any = false;
        for (int64_t r = 0; r < height; r++) {
            left[r] = element_of(x->a.data, (i + r) * x->a.line + p * x->a.depth, x->dtype);
            special_left[r] = !(fabsf(left[r]) < INFINITY);
            any = any || special_left[r];
        }
        for (int64_t c = 0; c < width; c++) {
            right[c] = element_of(x->b.data, (j + c) * x->b.line + p * x->b.depth, x->dtype);
            special_right[c] = !(fabsf(right[c]) < INFINITY);
            any = any || special_right[c];
        }
        for (int64_t r = 0; any && r < height; r++)
            for (int64_t c = 0; c < width; c++)
                if (special_left[r] || special_right[c])
                    sums[r * SIDE + c] += left[r] * right[c];
    }
}
#pragma GCC pop_options

/* Blocks of equal depth, whole steps. It determines the order of summation, and depends on k alone. */
static int64_t block_depth(int64_t k, bool split)
{
    const int64_t most = split ? DEPTH / 2 : DEPTH, blocks = (k + most - 1) / most;
    return ((k + blocks - 1) / blocks + STEP - 1) / STEP * STEP;
}

static const char *operand_at(const struct tile_operand *x, cuda_ops_dtype dtype, int64_t line, int64_t p)
{
    return (const char *)x->data + (line * x->line + p * x->depth) * (dtype == CUDA_OPS_FLOAT32 ? 4 : 2);
}

enum { FEW_COLUMNS = 128, SHALLOW = 128 };

/* Rows lie far apart, and where many columns read them they are better packed. */
static bool reads_in_place(const struct tile_product *x)
{
    return x->dtype == CUDA_OPS_BFLOAT16 && x->a.depth == 1 && x->n <= FEW_COLUMNS;
}

/* With one block of rows, packed columns are read once: a panel's just after it is packed, from the first-level cache.
 * */
static bool packs_late(const struct tile_product *x)
{
    return x->m <= ROWS && x->k > SHALLOW;
}

/* Columns [j, j + PANEL) of a block. */
static void pack_right(const struct tile_product *x, struct block *block, uint16_t *to, int64_t stream, int64_t j0,
                       int64_t j, int64_t p0, int64_t columns, int64_t depth)
{
    block->special_b[j / PANEL] =
        pack_streams(x->dtype, x->split, true, to, stream, operand_at(&x->b, x->dtype, j0 + j, p0), x->b.line,
                     x->b.depth, min_i64(PANEL, columns - j), depth);
}

/* Rows [i0, i0 + rows) times columns [j0, j0 + columns) over [p0, p0 + depth). */
static void multiply_block(const struct tile_product *x, bool exchanged, struct block *block, int64_t i0, int64_t j0,
                           int64_t p0, int64_t rows, int64_t columns, int64_t depth)
{
    const int64_t steps = (depth + STEP - 1) / STEP, stream = steps * TILE * (x->split ? 2 : 1);
    const bool one_block = depth == x->k, is_last = p0 + depth == x->k, late = packs_late(x);
    /* What is read where it lies: tiles that lack no row. Of a last step that lacks depth there are copies. */
    const int64_t in_place = reads_in_place(x) ? rows / SIDE * SIDE : 0, rest = in_place ? depth % STEP : 0;
    for (int64_t i = 0; i < in_place && rest; i += SIDE)
        pack_streams(x->dtype, false, false, block->last + i / SIDE * TILE, 0,
                     operand_at(&x->a, x->dtype, i0 + i, p0 + depth - rest), x->a.line, 1, SIDE, rest);
    for (int64_t i = in_place; i < rows; i += PANEL)
        block->special_a[i / PANEL] = pack_streams(x->dtype, x->split, false, block->a + i / SIDE * stream, stream,
                                                   operand_at(&x->a, x->dtype, i0 + i, p0), x->a.line, x->a.depth,
                                                   min_i64(PANEL, rows - i), depth);

    float tile[SUMS] __attribute__((aligned(64)));
    const bool tall = columns <= SIDE && rows > PANEL;
    const int64_t most_rows = tall ? 4 * SIDE : PANEL;
    const int64_t row_panels = (rows + most_rows - 1) / most_rows,
                  panels = row_panels * ((columns + PANEL - 1) / PANEL);
    /* Deep panels of columns stay in the first-level cache for all rows; of shallow products output is what counts, and
     * it is written row after row. */
    const bool by_rows = x->k <= SHALLOW && !exchanged;
    for (int64_t number = 0; number < panels; number++) {
        const int64_t column_panels = panels / row_panels;
        const int64_t i = (by_rows ? number / column_panels : number % row_panels) * most_rows;
        const int64_t j = (by_rows ? number % column_panels : number / row_panels) * PANEL;
        const int64_t height = min_i64(most_rows, rows - i), width = min_i64(PANEL, columns - j);
        const int row_tiles = (int)((height + SIDE - 1) / SIDE), column_tiles = width > SIDE ? 2 : 1;
        uint16_t *const right = late ? block->b : block->b + j / SIDE * stream;
        if (late && i == 0)
            pack_right(x, block, right, stream, j0, j, p0, columns, depth);
        const struct stream b[2] = {{.data = right}, {.data = column_tiles > 1 ? right + stream : right}};
        struct stream a[4];
        for (int t = 0; t < most_rows / SIDE; t++) {
            /* Of a tile that does not exist the first one is read, and its sums are not looked at. */
            const int64_t r = i + (t < row_tiles ? t * SIDE : 0);
            if (r < in_place) {
                a[t] = (struct stream){.data = (const uint16_t *)operand_at(&x->a, x->dtype, i0 + r, p0),
                                       .last = rest ? block->last + r / SIDE * TILE : NULL,
                                       .pitch = (size_t)x->a.line * sizeof(uint16_t),
                                       .step = STEP};
            } else {
                const uint16_t *const packed = block->a + r / SIDE * stream;
                a[t] = (struct stream){.data = packed,
                                       .last = rest ? packed + (steps - 1) * TILE : NULL,
                                       .pitch = 64,
                                       .step = x->split ? 2 * TILE : TILE};
            }
        }
        float *const sums = one_block ? tile : block->sums + (i * COLUMNS + j * most_rows);
        multiply_streams(tall, x->split, exchanged, sums, p0 > 0, a, b, row_tiles, column_tiles, steps);
        if (x->split && (block->special_a[i / PANEL] || (tall && block->special_a[(i + height - 1) / PANEL]) ||
                         block->special_b[j / PANEL]))
            for (int t = 0; t < row_tiles * column_tiles; t++) {
                const int64_t r = t / column_tiles, c = t % column_tiles;
                add_special(x, sums + (r * (tall ? 1 : 2) + c) * SIDE * SIDE, i0 + i + r * SIDE, j0 + j + c * SIDE, p0,
                            min_i64(SIDE, height - r * SIDE), min_i64(SIDE, width - c * SIDE), depth);
            }
        if (is_last)
            store_sums(&x->output, exchanged, tall, sums, i0 + i, j0 + j, height, width);
    }
}

/* What packing costs, about: as b pairs are made of rows, or rows are copied and transposed; as a the other way round,
 * but rows of bfloat16 are not packed. */
static int64_t packing_cost(const struct tile_operand *x, const struct tile_product *product, bool as_b, int64_t lines)
{
    const bool along = x->depth == 1;
    const int64_t cost = as_b ? (along ? 3 : 1) : along ? (product->dtype == CUDA_OPS_BFLOAT16 ? 0 : 1) : 3;
    return cost * lines;
}

static void fill_with_bias(const struct tile_product *x)
{
    const float zeros[SIDE * SIDE] = {0};
    for (int64_t i = 0; i < x->m; i += SIDE)
        for (int64_t j = 0; j < x->n; j += SIDE)
            store_rows(&x->output, i, j, zeros, zeros, min_i64(SIDE, x->m - i), min_i64(SIDE, x->n - j));
}

void cuda_ops_multiply_tiles(const struct tile_product *product, void *workspace)
{
    struct tile_product x = *product;
    if (x.m == 0 || x.n == 0)
        return;
    if (x.k == 0) {
        fill_with_bias(&x);
        return;
    }
    const int64_t as_it_is = packing_cost(&x.a, &x, false, x.m) + packing_cost(&x.b, &x, true, x.n);
    const int64_t the_other_way = packing_cost(&x.a, &x, true, x.m) + packing_cost(&x.b, &x, false, x.n);
    const bool exchanged = the_other_way < as_it_is;
    if (exchanged) {
        x.a = product->b, x.b = product->a;
        x.m = product->n, x.n = product->m;
    }
    uint16_t *const packed_b = (uint16_t *)((char *)workspace + PACKED_A_BYTES);
    struct block block = {.a = workspace,
                          .sums = (float *)((char *)packed_b + PACKED_B_BYTES),
                          .last = (uint16_t *)((char *)packed_b + PACKED_B_BYTES + SUMS_BYTES)};
    const int64_t most_depth = block_depth(x.k, x.split), parts = x.split ? 2 : 1;
    const bool keeps_b = x.k <= KEPT_DEPTH;
    /* By vectors b is read from the second-level cache four times as often, and AMD's has 1 MB. */
    const int64_t most_rows = has_tile_registers() || packs_late(&x) ? ROWS : ROWS / 2;
    struct tile_configuration before;
    configure_tiles(&before);
    for (int64_t j0 = 0; j0 < x.n; j0 += COLUMNS) {
        const int64_t columns = min_i64(COLUMNS, x.n - j0);
        bool special[KEPT_DEPTH / (DEPTH / 4) + 1][COLUMNS / PANEL] = {{false}};
        for (int64_t i0 = 0; i0 < x.m; i0 += most_rows)
            for (int64_t p0 = 0; p0 < x.k; p0 += most_depth) {
                const int64_t depth = min_i64(most_depth, x.k - p0), stream = (depth + STEP - 1) / STEP * TILE * parts;
                const int64_t kept = keeps_b ? p0 / most_depth : 0;
                block.b = packed_b + kept * (COLUMNS / SIDE) * (most_depth / STEP) * TILE * parts;
                memcpy(block.special_b, special[kept], sizeof(block.special_b));
                for (int64_t j = 0; j < columns && (!keeps_b || i0 == 0) && !packs_late(&x); j += PANEL)
                    pack_right(&x, &block, block.b + j / SIDE * stream, stream, j0, j, p0, columns, depth);
                memcpy(special[kept], block.special_b, sizeof(block.special_b));
                multiply_block(&x, exchanged, &block, i0, j0, p0, min_i64(most_rows, x.m - i0), columns, depth);
            }
    }
    release_tiles(&before);
}

#else

bool cuda_ops_has_tiles(cuda_ops_dtype dtype)
{
    (void)dtype;
    return false;
}

int64_t cuda_ops_tiles_workspace(void)
{
    return 0;
}

void cuda_ops_multiply_tiles(const struct tile_product *product, void *workspace)
{
    (void)product, (void)workspace;
}

#endif
