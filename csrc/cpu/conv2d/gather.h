/* Blocks of an image's pixels as a matrix, for one instruction set and element type (gathered.c includes this). Rows of
 * an image are shorter than most vectors' worth of pixels, so that what counts is instructions a row: a run is at most
 * a vector of pixels of one row, of which `bits` exist in the source; it is loaded under a mask, with zeros for the
 * padding, and stored whole. What it stores too much is stored over by the next run. Which runs there are depends on
 * the tap and not on the channel, so that they are listed once for all channels. */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))

typedef REAL FN(lane_vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL FN(vector) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef INDEX FN(index) __attribute__((vector_size(VECTOR_BYTES)));

/* Lanes whose bit is set; the others are zero and not read. */
CUDA_OPS_INLINE FN(vector) FN(load_bits)(const REAL *from, uint32_t bits)
{
#ifdef LOAD_BITS
    return LOAD_BITS(from, bits);
#else
    if (bits == (1u << LANES) - 1)
        return *(const FN(vector) *)from;
    FN(vector) value = {0};
    for (int l = 0; l < LANES; l++)
        if (bits >> l & 1)
            value[l] = from[l];
    return value;
#endif
}

struct FN(run) {
    int64_t from;
    int32_t to;
    uint32_t bits, left, right; /* for a step of two: the bits of the two vectors that are loaded */
};

/* The runs of a tap for pixels [begin, end); returns how many. */
static int FN(list_runs)(struct FN(run) * runs, const struct lattice *l, int64_t tap, int64_t begin, int64_t end)
{
    const int64_t dy = l->first_y + tap / l->tap_columns * l->tap_y;
    const int64_t dx = l->first_x + tap % l->tap_columns * l->tap_x;
    int64_t v = begin % l->v_count, u = begin / l->v_count % l->u_count, image = begin / l->v_count / l->u_count;
    int count = 0;
    for (int64_t pixel = begin; pixel < end; count++) {
        const int64_t length = min_i64(min_i64(l->v_count - v, end - pixel), LANES);
        const int64_t y = u * l->step_y + dy, x = v * l->step_x + dx;
        struct FN(run) run = {.to = (int32_t)(pixel - begin)};
        if (0 <= y && y < l->height) {
            const int64_t first = x >= 0 ? 0 : min_i64(ceil_div_i64(-x, l->step_x), length);
            const int64_t last =
                x >= l->width ? first : max_i64(first, min_i64(length, (l->width - 1 - x) / l->step_x + 1));
            run.bits = ((1u << last) - 1) & ~((1u << first) - 1);
            run.from = image * l->source.image + y * l->source.row + x * l->source.column;
            for (int q = 0; q < LANES; q++) {
                const uint32_t bit = run.bits >> q & 1;
                if (q < LANES / 2)
                    run.left |= bit << 2 * q;
                else
                    run.right |= bit << (2 * q - LANES);
            }
        }
        runs[count] = run;
        pixel += length;
        v += length;
        if (v == l->v_count) {
            v = 0;
            if (++u == l->u_count) {
                u = 0;
                image++;
            }
        }
    }
    return count;
}

/* to[(k - k_begin) * pitch + pixel - begin] for k = channel * taps + tap in [k_begin, k_end). Up to LANES - 1 elements
 * after the end of a row are written too. */
static void FN(gather_rows)(REAL *restrict to, int64_t pitch, const REAL *restrict source, const struct lattice *l,
                            int64_t k_begin, int64_t k_end, int64_t begin, int64_t end)
{
    struct FN(run) runs[MOST_PIXELS];
    const int64_t taps = l->tap_rows * l->tap_columns, step = l->step_x * l->source.column;
    for (int64_t tap = 0; tap < taps; tap++) {
        const int64_t first = ceil_div_i64(max_i64(0, k_begin - tap), taps);
        if (first * taps + tap >= k_end)
            continue;
        const int count = FN(list_runs)(runs, l, tap, begin, end);
        for (int64_t k = first * taps + tap; k < k_end; k += taps) {
            const REAL *const from = source + k / taps * l->source.channel;
            REAL *const row = to + (k - k_begin) * pitch;
            if (step == 1) {
                for (int i = 0; i < count; i++)
                    *(FN(vector) *)(row + runs[i].to) = FN(load_bits)(from + runs[i].from, runs[i].bits);
#if defined(__GNUC__) && !defined(__clang__)
            } else if (step == 2) {
                FN(index) even = {0};
#pragma GCC unroll 16
                for (int q = 0; q < LANES; q++)
                    even[q] = 2 * q;
                for (int i = 0; i < count; i++) {
                    const FN(vector) left = FN(load_bits)(from + runs[i].from, runs[i].left);
                    const FN(vector) right = FN(load_bits)(from + runs[i].from + LANES, runs[i].right);
                    *(FN(vector) *)(row + runs[i].to) = __builtin_shuffle(left, right, even);
                }
#endif
            } else {
                for (int i = 0; i < count; i++)
                    for (int q = 0; q < LANES; q++)
                        row[runs[i].to + q] = runs[i].bits >> q & 1 ? from[runs[i].from + q * step] : 0;
            }
        }
    }
}

/* Both write whole vectors, and so up to LANES - 1 elements too many: what belongs there is written later. */
CUDA_OPS_INLINE void FN(copy_values)(REAL *restrict to, const REAL *restrict from, int64_t count)
{
    for (; count >= LANES; count -= LANES, to += LANES, from += LANES)
        *(FN(vector) *)to = *(const FN(vector) *)from;
    if (count > 0)
        *(FN(vector) *)to = FN(load_bits)(from, (1u << count) - 1);
}

CUDA_OPS_INLINE void FN(copy_zeros)(REAL *to, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        *(FN(vector) *)(to + i) = (FN(vector)){0};
}

/* to[(pixel - begin) * pitch + k - k_begin] for k = tap * channels + channel in [k_begin, k_end), of channels_last. Up
 * to LANES - 1 elements after the end of a row are written too. */
static void FN(gather_pixels)(REAL *restrict to, int64_t pitch, const REAL *restrict source, const struct lattice *l,
                              int64_t k_begin, int64_t k_end, int64_t begin, int64_t end)
{
    const int64_t channels = l->channels;
    /* Taps of a kernel's row that lie side by side are one run. */
    const bool dense = l->source.column == channels && l->tap_x == 1;
    const int64_t columns = dense ? 1 : l->tap_columns, width = dense ? l->tap_columns * channels : channels;
    int64_t v = begin % l->v_count, u = begin / l->v_count % l->u_count, image = begin / l->v_count / l->u_count;
    for (int64_t pixel = begin; pixel < end; pixel++, to += pitch) {
        const int64_t x0 = v * l->step_x + l->first_x;
        int64_t tap = k_begin / width, k = k_begin;
        for (int64_t i = tap / columns, j = tap % columns; k < k_end;) {
            const int64_t y = u * l->step_y + l->first_y + i * l->tap_y, x = x0 + j * l->tap_x;
            const int64_t first = k - tap * width, last = min_i64(width, k_end - tap * width);
            REAL *const row = to + k - k_begin - first; /* element c of this run goes to row[c] */
            int64_t copy_begin = first, copy_end = last;
            if (y < 0 || y >= l->height)
                copy_end = copy_begin;
            else if (dense) {
                copy_begin = x >= 0 ? first : min_i64(last, max_i64(first, -x * channels));
                copy_end = max_i64(copy_begin, min_i64(last, (l->width - x) * channels));
            } else if (x < 0 || x >= l->width)
                copy_end = copy_begin;
            FN(copy_zeros)(row + first, copy_begin - first);
            if (copy_begin < copy_end)
                FN(copy_values)(row + copy_begin,
                                source + image * l->source.image + y * l->source.row + x * l->source.column +
                                    copy_begin,
                                copy_end - copy_begin);
            FN(copy_zeros)(row + copy_end, last - copy_end);
            tap++;
            k = tap * width;
            if (++j == columns) {
                j = 0;
                i++;
            }
        }
        if (++v == l->v_count) {
            v = 0;
            if (++u == l->u_count) {
                u = 0;
                image++;
            }
        }
    }
}

#include "conv2d/indirect.h"
#include "conv2d/prepare.h"

#undef LANES
#undef LOAD_BITS
