/* A convolution of channels_last that gathers nothing, for one instruction set and element type (gathered.c includes
 * this): a tile of pixels takes each tap's channels from where they lie, or from zeros. For weights that stay in the
 * second-level cache: of few output channels, where gathering a pixel's taps takes as long as a third of its
 * multiply-adds, most of all. */

#define TILE_PIXELS (VECTOR_BYTES == 64 ? 12 : VECTOR_BYTES == 32 ? 6 : 4) /* as in gemm.c, and for its reasons */

#define WEIGHT_ROWS (VECTOR_BYTES == 64 ? 16 : TILE_PIXELS)

static const REAL FN(zeros)[INDIRECT_DEPTH];

/* out[i][0 ... columns) = start + sum over taps and channels of from[tap][i][offset + channel] * weight[tap][channel].
 * pixels and vectors are constants wherever this is inlined, so that `sum` is in registers. */
CUDA_OPS_INLINE void FN(tap_tile)(const int pixels, const int vectors, REAL *const *out, const REAL *const *from,
                                  int64_t offset, int64_t taps, int64_t channels, const REAL *restrict weight,
                                  int64_t pitch, const REAL *start, int64_t columns)
{
    FN(lane_vector) sum[TILE_PIXELS][2];
#pragma GCC unroll 16
    for (int i = 0; i < pixels; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = *(const FN(vector) *)(start + v * LANES);
    for (int64_t tap = 0; tap < taps; tap++, from += TILE_PIXELS) {
        const REAL *left[TILE_PIXELS];
#pragma GCC unroll 16
        for (int i = 0; i < pixels; i++)
            left[i] = from[i] + offset;
#pragma GCC unroll 4
        for (int64_t c = 0; c < channels; c++, weight += pitch) {
            /* Two names, since GCC keeps an array of them in memory. */
            const FN(lane_vector) right = (FN(lane_vector)) * (const FN(vector) *)weight;
            const FN(lane_vector) next =
                vectors == 2 ? (FN(lane_vector)) * (const FN(vector) *)(weight + LANES) : right;
#pragma GCC unroll 16
            for (int i = 0; i < pixels; i++) {
                sum[i][0] = MULTIPLY_ADD(left[i][c], right, sum[i][0]);
                if (vectors == 2)
                    sum[i][1] = MULTIPLY_ADD(left[i][c], next, sum[i][1]);
            }
        }
    }
    if (columns == vectors * LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < pixels; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                *(FN(vector) *)(out[i] + v * LANES) = sum[i][v];
        return;
    }
    REAL edge[TILE_PIXELS][2 * VECTOR_BYTES / sizeof(REAL)]; /* of its own: `sum` would be kept in memory */
#pragma GCC unroll 16
    for (int i = 0; i < pixels; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FN(vector) *)(edge[i] + v * LANES) = sum[i][v];
    for (int i = 0; i < pixels; i++)
        memcpy(out[i], edge[i], (size_t)columns * sizeof(REAL));
}

/* Whole tiles are functions of their own: beside others GCC keeps parts of them in memory. */
NOINLINE static void FN(wide_tile)(REAL *const *out, const REAL *const *from, int64_t offset, int64_t taps,
                                   int64_t channels, const REAL *weight, int64_t pitch, const REAL *start,
                                   int64_t columns)
{
    FN(tap_tile)(TILE_PIXELS, 2, out, from, offset, taps, channels, weight, pitch, start, columns);
}

NOINLINE static void FN(narrow_tile)(REAL *const *out, const REAL *const *from, int64_t offset, int64_t taps,
                                     int64_t channels, const REAL *weight, int64_t pitch, const REAL *start,
                                     int64_t columns)
{
    FN(tap_tile)(TILE_PIXELS, 1, out, from, offset, taps, channels, weight, pitch, start, columns);
}

CUDA_OPS_INLINE int FN(tile_pixels)(int64_t remaining)
{
    return remaining >= TILE_PIXELS            ? TILE_PIXELS
           : TILE_PIXELS > 8 && remaining >= 8 ? 8
           : TILE_PIXELS > 4 && remaining >= 4 ? 4
           : remaining >= 2                    ? 2
                                               : 1;
}

/* A tile in all output channels of some groups, which lie side by side; `columns` are one's. */
CUDA_OPS_INLINE void FN(tap_panels)(const int pixels, REAL **out, const REAL *const *from, int64_t groups, int64_t taps,
                                    int64_t channels, const REAL *weight, int64_t pitch, const REAL *bias,
                                    int64_t columns)
{
    for (int64_t g = 0; g < groups; g++, weight += taps * channels * pitch)
        for (int64_t j = 0; j < columns;) {
            const int64_t lanes = min_i64(2 * LANES, columns - j);
            REAL start[2 * VECTOR_BYTES / sizeof(REAL)] = {0};
            if (bias)
                memcpy(start, bias + g * columns + j, (size_t)lanes * sizeof(REAL));
            if (pixels == TILE_PIXELS)
                (lanes > LANES ? FN(wide_tile) : FN(narrow_tile))(out, from, g * channels, taps, channels, weight + j,
                                                                  pitch, start, lanes);
            else if (lanes > LANES)
                FN(tap_tile)(pixels, 2, out, from, g * channels, taps, channels, weight + j, pitch, start, lanes);
            else
                FN(tap_tile)(pixels, 1, out, from, g * channels, taps, channels, weight + j, pitch, start, lanes);
            j += lanes;
            for (int i = 0; i < pixels; i++)
                out[i] += lanes;
        }
}

/* Where a pixel of the target is. */
struct FN(place) {
    int64_t image, u, v;
};

CUDA_OPS_INLINE void FN(advance)(struct FN(place) * at, const struct lattice *l, int64_t pixels)
{
    at->v += pixels;
    if (at->v == l->v_count) {
        at->v = 0;
        if (++at->u == l->u_count) {
            at->u = 0;
            at->image++;
        }
    }
}

/* from[tap][i] of one pixel. */
CUDA_OPS_INLINE void FN(point_pixel)(const REAL **from, const REAL *source, const struct lattice *l,
                                     const struct FN(place) * at)
{
    for (int64_t r = 0; r < l->tap_rows; r++) {
        const int64_t y = at->u * l->step_y + l->first_y + r * l->tap_y;
        const REAL *const row = source + at->image * l->source.image + y * l->source.row;
        int64_t x = at->v * l->step_x + l->first_x;
        for (int64_t s = 0; s < l->tap_columns; s++, x += l->tap_x, from += TILE_PIXELS)
            *from = 0 <= y && y < l->height && 0 <= x && x < l->width ? row + x * l->source.column : FN(zeros);
    }
}

/* Of neighbours in a row of which all columns that they read exist: a tap's pointers are equally far apart. */
CUDA_OPS_INLINE void FN(point_neighbours)(const REAL **from, const REAL *source, const struct lattice *l,
                                          const struct FN(place) * at, int pixels)
{
    const int64_t x = at->v * l->step_x + l->first_x;
    for (int64_t r = 0; r < l->tap_rows; r++) {
        const int64_t y = at->u * l->step_y + l->first_y + r * l->tap_y;
        const bool exists = 0 <= y && y < l->height;
        const REAL *tap =
            exists ? source + at->image * l->source.image + y * l->source.row + x * l->source.column : FN(zeros);
        const int64_t pixel = exists ? l->step_x * l->source.column : 0,
                      column = exists ? l->tap_x * l->source.column : 0;
        for (int64_t s = 0; s < l->tap_columns; s++, tap += column, from += TILE_PIXELS)
            for (int i = 0; i < pixels; i++)
                from[i] = tap + i * pixel;
    }
}

/* Pixels [begin, end) of a phase, in some groups. weight[group][tap][channel] are `pitch` apart, of which `columns` are wanted; pixels of the
 * target are where `target` says for images, rows and columns. */
static void FN(multiply_taps)(REAL *to, struct image_layout target, const REAL *source, const struct lattice *l,
                              const REAL *weight, int64_t pitch, const REAL *bias, int64_t groups, int64_t columns,
                              int64_t begin, int64_t end)
{
    const REAL *from[MOST_INDIRECT_TAPS * TILE_PIXELS];
    REAL *out[TILE_PIXELS];
    const int64_t taps = l->tap_rows * l->tap_columns;
    const int64_t span = (l->tap_columns - 1) * l->tap_x; /* from a pixel's first tap of a row to its last */
    struct FN(place) at = {begin / l->v_count / l->u_count, begin / l->v_count % l->u_count, begin % l->v_count};
    for (int64_t pixel = begin; pixel < end;) {
        const int pixels = FN(tile_pixels)(end - pixel);
        const int64_t x = at.v * l->step_x + l->first_x;
        if (at.v + pixels <= l->v_count && x + min_i64(0, span) >= 0 &&
            x + (pixels - 1) * l->step_x + max_i64(0, span) < l->width) {
            FN(point_neighbours)(from, source, l, &at, pixels);
            REAL *const first = to + at.image * target.image + at.u * target.row + at.v * target.column;
            for (int i = 0; i < pixels; i++)
                out[i] = first + i * target.column;
            FN(advance)(&at, l, pixels);
        } else {
            for (int i = 0; i < pixels; i++) {
                FN(point_pixel)(from + i, source, l, &at);
                out[i] = to + at.image * target.image + at.u * target.row + at.v * target.column;
                FN(advance)(&at, l, 1);
            }
        }
        switch (pixels) {
        case TILE_PIXELS:
            FN(tap_panels)(TILE_PIXELS, out, from, groups, taps, l->channels, weight, pitch, bias, columns);
            break;
#if VECTOR_BYTES == 64
        case 8:
            FN(tap_panels)(8, out, from, groups, taps, l->channels, weight, pitch, bias, columns);
            break;
#endif
#if VECTOR_BYTES > 16
        case 4:
            FN(tap_panels)(4, out, from, groups, taps, l->channels, weight, pitch, bias, columns);
            break;
#endif
        case 2:
            FN(tap_panels)(2, out, from, groups, taps, l->channels, weight, pitch, bias, columns);
            break;
        default:
            FN(tap_panels)(1, out, from, groups, taps, l->channels, weight, pitch, bias, columns);
        }
        pixel += pixels;
    }
}

#ifdef LOAD_BITS
/* The weight's gradient for one tap, `rows` output channels and `vectors` vectors of input channels, of which the last
 * has `bits`, over rows [begin, end) of all images: to[o][c] (+)= sum over pixels of grad[pixel][o] * source[pixel][c].
 * Of a row pixels [v_begin, v_end) reach the source. */
CUDA_OPS_INLINE void FN(weight_tile)(const int rows, const int vectors, REAL *to, int64_t to_row, int64_t columns,
                                     const REAL *grad, const struct image_layout *target, const REAL *source,
                                     const struct lattice *l, int64_t dy, int64_t dx, int64_t v_begin, int64_t v_end,
                                     int64_t begin, int64_t end, bool accumulate)
{
    const uint32_t bits = (1u << (columns - (vectors - 1) * LANES)) - 1;
    FN(lane_vector) sum[WEIGHT_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = !accumulate       ? (FN(lane_vector)){0}
                        : v < vectors - 1 ? (FN(lane_vector)) * (const FN(vector) *)(to + i * to_row)
                                          : (FN(lane_vector))FN(load_bits)(to + i * to_row + v * LANES, bits);
    const int64_t step = l->step_x * l->source.column;
    int64_t u = begin % l->u_count, image = begin / l->u_count;
    for (int64_t row = begin; row < end; row++) {
        const int64_t y = u * l->step_y + dy;
        if (0 <= y && y < l->height) {
            const REAL *x =
                source + image * l->source.image + y * l->source.row + v_begin * step + dx * l->source.column;
            const REAL *g = grad + image * target->image + u * target->row + v_begin * target->column;
            for (int64_t v = v_begin; v < v_end; v++, x += step, g += target->column) {
                FN(lane_vector) right[2];
                right[0] = vectors == 1 ? FN(load_bits)(x, bits) : *(const FN(vector) *)x;
                if (vectors == 2)
                    right[1] = FN(load_bits)(x + LANES, bits);
#pragma GCC unroll 16
                for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
                    for (int q = 0; q < vectors; q++)
                        sum[i][q] = MULTIPLY_ADD(g[i], right[q], sum[i][q]);
            }
        }
        if (++u == l->u_count) {
            u = 0;
            image++;
        }
    }
    REAL edge[WEIGHT_ROWS][2 * VECTOR_BYTES / sizeof(REAL)];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            *(FN(vector) *)(edge[i] + v * LANES) = sum[i][v];
    for (int i = 0; i < rows; i++)
        memcpy(to + i * to_row, edge[i], (size_t)columns * sizeof(REAL));
}

/* A few rows of grad_weight[o][tap][c], which are `to_row` apart. */
CUDA_OPS_INLINE void FN(weight_panels)(const int rows, REAL *to, int64_t to_row, const REAL *grad,
                                       const struct image_layout *target, const REAL *source, const struct lattice *l,
                                       int64_t dy, int64_t dx, int64_t v_begin, int64_t v_end, int64_t begin,
                                       int64_t end, bool accumulate)
{
    for (int64_t c = 0, columns; c < l->channels; c += columns) {
        columns = min_i64(2 * LANES, l->channels - c);
        if (columns > LANES)
            FN(weight_tile)(rows, 2, to + c, to_row, columns, grad, target, source + c, l, dy, dx, v_begin, v_end,
                            begin, end, accumulate);
        else
            FN(weight_tile)(rows, 1, to + c, to_row, columns, grad, target, source + c, l, dy, dx, v_begin, v_end,
                            begin, end, accumulate);
    }
}

/* All of grad_weight from rows [begin, end) of all images, in which channels of grad_output are side by side too. */
static void FN(weight_of_rows)(REAL *to, int64_t to_row, const REAL *grad, const struct image_layout *target,
                               int64_t channels, const REAL *source, const struct lattice *l, int64_t begin,
                               int64_t end, bool accumulate)
{
    for (int64_t tap = 0; tap < l->tap_rows * l->tap_columns; tap++) {
        const int64_t dy = l->first_y + tap / l->tap_columns * l->tap_y;
        const int64_t dx = l->first_x + tap % l->tap_columns * l->tap_x;
        const int64_t v_begin = dx >= 0 ? 0 : min_i64(l->v_count, ceil_div_i64(-dx, l->step_x));
        const int64_t v_end =
            dx >= l->width ? v_begin : max_i64(v_begin, min_i64(l->v_count, (l->width - 1 - dx) / l->step_x + 1));
        for (int64_t o = 0; o < channels;) {
            /* With one vector of channels sixteen sums, so that none waits for another. */
            const int rows =
                l->channels <= LANES && channels - o >= WEIGHT_ROWS ? WEIGHT_ROWS : FN(tile_pixels)(channels - o);
            REAL *const at = to + o * to_row + tap * l->channels;
            switch (rows) {
#if VECTOR_BYTES == 64
            case WEIGHT_ROWS:
                FN(weight_panels)(WEIGHT_ROWS, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin,
                                  end, accumulate);
                break;
#endif
            case TILE_PIXELS:
                FN(weight_panels)(TILE_PIXELS, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin,
                                  end, accumulate);
                break;
#if VECTOR_BYTES == 64
            case 8:
                FN(weight_panels)(8, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin, end,
                                  accumulate);
                break;
#endif
            case 4:
                FN(weight_panels)(4, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin, end,
                                  accumulate);
                break;
            case 2:
                FN(weight_panels)(2, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin, end,
                                  accumulate);
                break;
            default:
                FN(weight_panels)(1, at, to_row, grad + o, target, source, l, dy, dx, v_begin, v_end, begin, end,
                                  accumulate);
            }
            o += rows;
        }
    }
}
#endif

#undef TILE_PIXELS
#undef WEIGHT_ROWS
