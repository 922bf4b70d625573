/* What lies in tile registers, made of matrices in memory: for products of halves (tiles.h, conv2d/tiled.c). Included
 * by files that are compiled if CUDA_OPS_WITH_AMX. Without AMX, vectors of AVX512-BF16 multiply the same tiles (add_rows),
 * in the same order.
 *
 * A stream is 16 lines (rows of a, or columns of b) along the depth: for each step of 32 of depth a tile of 1 KB, and
 * behind it, if split, one of the low parts. As a: 16 rows of 32 of depth. As b: 16 rows, each a pair of depth for
 * every line. The one is the other transposed, as a matrix of pairs. */
#ifndef CUDA_OPS_CPU_GEMM_TILE_PACKING_H
#define CUDA_OPS_CPU_GEMM_TILE_PACKING_H

#include <immintrin.h>

#include "common/common.h"
#include "common/half.h"
#include "common/transpose_16.h"
#include "cuda_ops/cpu_isa.h"

enum {
    SIDE = 16,         /* lines of a tile */
    STEP = 32,         /* of depth, of a tile */
    TILE = SIDE * STEP /* elements of a tile */
};

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")

static inline int64_t element_bytes(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
}

static inline float element_of(const void *data, int64_t index, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT32 ? ((const float *)data)[index]
                                     : widened_half(((const uint16_t *)data)[index], dtype);
}

/* The configuration that a thread had before: PyTorch's kernels may have left one. */
struct tile_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_configuration) == 64, "the processor reads 64 bytes");

static inline bool has_tile_registers(void)
{
    return cuda_ops_cpu_isa_current() == CUDA_OPS_CPU_AMX;
}

/* All eight tiles 16 rows of 64 bytes; nothing where there are no tile registers. Not _tile_loadconfig: before GCC 14 it declares a read of eight bytes only, and
 * the other stores are dropped. */
static inline void configure_tiles(struct tile_configuration *before)
{
    struct tile_configuration ours = {.palette = 1};
    if (!has_tile_registers())
        return;
    for (int t = 0; t < 8; t++) {
        ours.row_bytes[t] = 64;
        ours.rows[t] = SIDE;
    }
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
    __asm__ volatile("ldtilecfg %0" : : "m"(ours));
}

/* Released tiles are not saved and restored with every context switch. */
static inline void release_tiles(const struct tile_configuration *before)
{
    if (!has_tile_registers())
        return;
    if (before->palette)
        __asm__ volatile("ldtilecfg %0" : : "m"(*before));
    else
        __asm__ volatile("tilerelease");
}

CUDA_OPS_INLINE __m512 widened_pairs(__m256i bfloat16)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

/* 32 numbers as bfloat16, and what is left of them. */
struct parts {
    __m512i high, low;
};

/* `special` becomes true if something is not finite: that is packed as 0 if it is split. */
CUDA_OPS_INLINE struct parts load_parts(const cuda_ops_dtype dtype, const bool split, const void *from, __mmask32 mask,
                                        bool *special)
{
    if (dtype == CUDA_OPS_BFLOAT16)
        return (struct parts){_mm512_maskz_loadu_epi16(mask, from), _mm512_setzero_si512()};
    __m512 first, second;
    if (dtype == CUDA_OPS_FLOAT16) {
        const __m512i x = _mm512_maskz_loadu_epi16(mask, from);
        first = _mm512_cvtph_ps(_mm512_castsi512_si256(x)), second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
    } else {
        first = _mm512_maskz_loadu_ps((__mmask16)mask, from);
        second = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), (const float *)from + SIDE);
    }
    if (!split)
        return (struct parts){(__m512i)_mm512_cvtne2ps_pbh(second, first), _mm512_setzero_si512()};
    const __mmask16 one = _mm512_fpclass_ps_mask(first, 0x99), other = _mm512_fpclass_ps_mask(second, 0x99);
    *special |= (one | other) != 0;
    first = _mm512_maskz_mov_ps((__mmask16)~one, first), second = _mm512_maskz_mov_ps((__mmask16)~other, second);
    const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    first = _mm512_sub_ps(first, widened_pairs(_mm512_castsi512_si256(high)));
    second = _mm512_sub_ps(second, widened_pairs(_mm512_extracti64x4_epi64(high, 1)));
    return (struct parts){high, (__m512i)_mm512_cvtne2ps_pbh(second, first)};
}

CUDA_OPS_INLINE void turn_tile(uint16_t *tile)
{
    transpose_16((uint32_t *)tile, SIDE, (const uint32_t *)tile, SIDE);
}

CUDA_OPS_INLINE __mmask32 first_lanes_32(int64_t count)
{
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

/* Packs `lines` (at most 16) along `depth`, which is contiguous, as a, or as_b. */
CUDA_OPS_INLINE bool pack_lines(const cuda_ops_dtype dtype, const bool split, const bool as_b, uint16_t *to,
                                const char *from, int64_t line, int64_t lines, int64_t depth)
{
    const int64_t size = element_bytes(dtype), next = split ? 2 * TILE : TILE;
    bool special = false;
    for (int64_t p = 0; p < depth; p += STEP, to += next) {
        const __mmask32 mask = first_lanes_32(depth - p);
        for (int64_t i = 0; i < SIDE; i++) {
            struct parts x = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            if (i < lines)
                x = load_parts(dtype, split, from + (i * line + p) * size, mask, &special);
            _mm512_storeu_si512(to + i * STEP, x.high);
            if (split)
                _mm512_storeu_si512(to + TILE + i * STEP, x.low);
        }
        if (as_b) {
            turn_tile(to);
            if (split)
                turn_tile(to + TILE);
        }
    }
    return special;
}

/* Packs `lines` (at most 32, of two streams, `stream` elements apart) that are contiguous beside each other. */
CUDA_OPS_INLINE bool pack_columns(const cuda_ops_dtype dtype, const bool split, const bool as_b, uint16_t *to,
                                  int64_t stream, const char *from, int64_t row, int64_t lines, int64_t depth)
{
    const int64_t size = element_bytes(dtype), next = split ? 2 * TILE : TILE;
    const __mmask32 mask = first_lanes_32(lines);
    uint16_t left[32], right[32];
    for (int q = 0; q < SIDE; q++) {
        left[2 * q] = (uint16_t)q, left[2 * q + 1] = (uint16_t)(32 + q);
        right[2 * q] = (uint16_t)(16 + q), right[2 * q + 1] = (uint16_t)(48 + q);
    }
    const __m512i take_left = _mm512_loadu_si512(left), take_right = _mm512_loadu_si512(right);
    const bool two = lines > SIDE;
    bool special = false;
    for (int64_t p = 0; p < depth; p += STEP, to += next) {
        for (int64_t q = 0; q < SIDE; q++) {
            const char *const pair = from + (p + 2 * q) * row * size;
            if (p + STEP + 2 * q + 1 < depth) { /* rows may lie too far apart for the processor to foresee them */
                __builtin_prefetch(pair + STEP * row * size);
                __builtin_prefetch(pair + (STEP + 1) * row * size);
            }
            struct parts x = {_mm512_setzero_si512(), _mm512_setzero_si512()}, y = x;
            if (p + 2 * q < depth)
                x = load_parts(dtype, split, pair, mask, &special);
            if (p + 2 * q + 1 < depth)
                y = load_parts(dtype, split, pair + row * size, mask, &special);
            _mm512_storeu_si512(to + q * STEP, _mm512_permutex2var_epi16(x.high, take_left, y.high));
            if (split)
                _mm512_storeu_si512(to + TILE + q * STEP, _mm512_permutex2var_epi16(x.low, take_left, y.low));
            if (two) {
                _mm512_storeu_si512(to + stream + q * STEP, _mm512_permutex2var_epi16(x.high, take_right, y.high));
                if (split)
                    _mm512_storeu_si512(to + stream + TILE + q * STEP,
                                        _mm512_permutex2var_epi16(x.low, take_right, y.low));
            }
        }
        if (!as_b) {
            turn_tile(to);
            if (split)
                turn_tile(to + TILE);
            if (two) {
                turn_tile(to + stream);
                if (split)
                    turn_tile(to + stream + TILE);
            }
        }
    }
    return special;
}

CUDA_OPS_INLINE bool pack_of_dtype(const cuda_ops_dtype dtype, const bool split, bool as_b, uint16_t *to,
                                   int64_t stream, const char *from, int64_t line, int64_t along, int64_t lines,
                                   int64_t depth)
{
    const int64_t size = element_bytes(dtype);
    bool special = false;
    if (line == 1 && along != 1)
        return as_b ? pack_columns(dtype, split, true, to, stream, from, along, lines, depth)
                    : pack_columns(dtype, split, false, to, stream, from, along, lines, depth);
    for (int64_t first = 0; first < lines; first += SIDE, to += stream, from += SIDE * line * size) {
        const int64_t count = min_i64(SIDE, lines - first);
        if (along == 1) {
            special |= as_b ? pack_lines(dtype, split, true, to, from, line, count, depth)
                            : pack_lines(dtype, split, false, to, from, line, count, depth);
            continue;
        }
        /* Neither is contiguous: step by step by way of a copy. */
        for (int64_t p = 0; p < depth; p += STEP) {
            uint32_t copy[SIDE * STEP];
            const int64_t length = min_i64(STEP, depth - p);
            for (int64_t i = 0; i < count; i++)
                for (int64_t q = 0; q < length; q++)
                    memcpy((char *)copy + (i * STEP + q) * size, from + (i * line + (p + q) * along) * size,
                           (size_t)size);
            uint16_t *const tile = to + p / STEP * (split ? 2 * TILE : TILE);
            special |= as_b ? pack_lines(dtype, split, true, tile, (const char *)copy, STEP, count, length)
                            : pack_lines(dtype, split, false, tile, (const char *)copy, STEP, count, length);
        }
    }
    return special;
}

/* Packs `lines` (at most 32) from `from` on, with strides `line` and `along` the depth, as one stream or two, `stream`
 * elements apart. Returns whether something split is not finite. */
static bool pack_streams(cuda_ops_dtype dtype, bool split, bool as_b, uint16_t *to, int64_t stream, const void *from,
                         int64_t line, int64_t along, int64_t lines, int64_t depth)
{
    if (dtype == CUDA_OPS_BFLOAT16)
        return pack_of_dtype(CUDA_OPS_BFLOAT16, false, as_b, to, stream, from, line, along, lines, depth);
    if (dtype == CUDA_OPS_FLOAT16)
        return pack_of_dtype(CUDA_OPS_FLOAT16, true, as_b, to, stream, from, line, along, lines, depth);
    if (split)
        return pack_of_dtype(CUDA_OPS_FLOAT32, true, as_b, to, stream, from, line, along, lines, depth);
    return pack_of_dtype(CUDA_OPS_FLOAT32, false, as_b, to, stream, from, line, along, lines, depth);
}

/* Tiles of sums, 16 x 16 floats each: that of row tile r and column tile c is the (2 r + c)th, or if tall the r-th. */
enum { SUMS = 4 * SIDE * SIDE };

CUDA_OPS_INLINE void begin_sums(const float *sums, bool add)
{
    if (add) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 1 * SIDE * SIDE, 64);
        _tile_loadd(2, sums + 2 * SIDE * SIDE, 64);
        _tile_loadd(3, sums + 3 * SIDE * SIDE, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
}

CUDA_OPS_INLINE void end_sums(float *sums)
{
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 1 * SIDE * SIDE, 64);
    _tile_stored(2, sums + 2 * SIDE * SIDE, 64);
    _tile_stored(3, sums + 3 * SIDE * SIDE, 64);
}

/* Tile registers 4 and 5 times 6 and 7. */
CUDA_OPS_INLINE void add_four(const bool lower, const bool right)
{
    _tile_dpbf16ps(0, 4, 6);
    if (right)
        _tile_dpbf16ps(1, 4, 7);
    if (lower)
        _tile_dpbf16ps(2, 5, 6);
    if (lower && right)
        _tile_dpbf16ps(3, 5, 7);
}

/* Two row tiles (one unless `lower`) times two column tiles (one unless `right`). The low parts of a are `low` elements
 * behind the high ones. Tile registers 0 to 3 are the sums, 4 and 5 a, 6 and 7 b. Of split operands low * high is added
 * first, and high * low last; `reversed` the other way round, for a and b that have been exchanged. */
CUDA_OPS_INLINE void add_square(const bool lower, const bool right, const bool split, const bool reversed,
                                const uint16_t *a0, size_t pitch0, const uint16_t *a1, size_t pitch1, int64_t low,
                                const uint16_t *b0, const uint16_t *b1)
{
    const int64_t first_a = split && !reversed ? low : 0, first_b = split && reversed ? TILE : 0;
    _tile_loadd(6, b0 + first_b, 64);
    if (right)
        _tile_loadd(7, b1 + first_b, 64);
    _tile_loadd(4, a0 + first_a, pitch0);
    if (lower)
        _tile_loadd(5, a1 + first_a, pitch1);
    add_four(lower, right);
    if (!split)
        return;
    if (reversed) {
        _tile_loadd(6, b0, 64);
        if (right)
            _tile_loadd(7, b1, 64);
    } else {
        _tile_loadd(4, a0, pitch0);
        if (lower)
            _tile_loadd(5, a1, pitch1);
    }
    add_four(lower, right);
    if (reversed) {
        _tile_loadd(4, a0 + low, pitch0);
        if (lower)
            _tile_loadd(5, a1 + low, pitch1);
    } else {
        _tile_loadd(6, b0 + TILE, 64);
        if (right)
            _tile_loadd(7, b1 + TILE, 64);
    }
    add_four(lower, right);
}

/* Without tile registers: 16 vectors of sums, which are eight rows of two tiles beside each other, or 16 of one if there
 * is none to the right. `from` and `to` are where the first of these rows begins in the first tile. */
enum { VECTORS = 16 };

CUDA_OPS_INLINE int rows_at_once(const bool right)
{
    return right ? VECTORS / 2 : VECTORS;
}

CUDA_OPS_INLINE void begin_rows(const bool right, __m512 *sums, const float *from, bool add)
{
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; n++)
        sums[n] =
            add ? _mm512_loadu_ps(from + (right ? n / 2 * SIDE + n % 2 * SIDE * SIDE : n * SIDE)) : _mm512_setzero_ps();
}

CUDA_OPS_INLINE void end_rows(const bool right, const __m512 *sums, float *to)
{
#pragma GCC unroll 16
    for (int n = 0; n < VECTORS; n++)
        _mm512_storeu_ps(to + (right ? n / 2 * SIDE + n % 2 * SIDE * SIDE : n * SIDE), sums[n]);
}

/* Where nothing is added to, tiles of sums that are not there are zeros, as tile registers leave them. */
CUDA_OPS_INLINE void clear_others(const bool lower, const bool right, float *sums)
{
    enum { BYTES = SIDE * SIDE * (int)sizeof(float) };
    if (!right)
        memset(sums + SIDE * SIDE, 0, BYTES);
    if (!lower)
        memset(sums + 2 * SIDE * SIDE, 0, BYTES);
    if (!lower || !right)
        memset(sums + 3 * SIDE * SIDE, 0, BYTES);
}

/* A step of rows of a, `pitch` bytes apart, times one column tile or two: pairs of a, broadcast, times vectors of pairs of
 * b. */
CUDA_OPS_INLINE void add_pairs(const bool right, __m512 *sums, const uint16_t *a, size_t pitch, const uint16_t *b0,
                               const uint16_t *b1)
{
#pragma GCC unroll 2
    for (int q = 0; q < SIDE; q++, a += 2, b0 += STEP, b1 += STEP) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(b0);
        const __m512bh second = right ? (__m512bh)_mm512_loadu_si512(b1) : first;
#pragma GCC unroll 16
        for (int r = 0; r < rows_at_once(right); r++) {
            int32_t pair;
            memcpy(&pair, (const char *)a + (size_t)r * pitch, sizeof(pair));
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            if (right) {
                sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], factor, first);
                sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], factor, second);
            } else {
                sums[r] = _mm512_dpbf16_ps(sums[r], factor, first);
            }
        }
    }
}

/* add_square's step of these rows, in its order. */
CUDA_OPS_INLINE void add_rows(const bool right, const bool split, const bool reversed, __m512 *sums, const uint16_t *a,
                              size_t pitch, int64_t low, const uint16_t *b0, const uint16_t *b1)
{
    if (split)
        add_pairs(right, sums, a + (reversed ? 0 : low), pitch, b0 + (reversed ? TILE : 0), b1 + (reversed ? TILE : 0));
    add_pairs(right, sums, a, pitch, b0, b1);
    if (split)
        add_pairs(right, sums, a + (reversed ? low : 0), pitch, b0 + (reversed ? 0 : TILE), b1 + (reversed ? 0 : TILE));
}

#pragma GCC pop_options

#endif
