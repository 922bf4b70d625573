/* Arrays of a file that includes itself once for each element type, bfloat16 among them: of STORED, which LOAD makes REAL and
 * STORE rounds. A pass for bfloat16 defines REAL as float, and AS_BFLOAT16, which this ends; conversions are made in
 * registers, where passes over tiles of float32 (csrc/torch/halves.h) take twice the time. Included in each pass, so that
 * it has no include guard.
 *
 * STORE_EACH(to, begin, end, load, value): to[i] = value for each i, where `load` declares what value takes. Rounded, results
 * wait in the first-level cache: in one loop GCC follows each case of a value into its rounding, and divides once for
 * each. */
#include "common/half.h"

#ifndef CUDA_OPS_CPU_COMMON_STORED_H
#define CUDA_OPS_CPU_COMMON_STORED_H
enum { STORED_PIECE = 128 };

/* As rounded_bfloat16, with fewer instructions, for what was widened or computed from that: the mantissa of such a NaN is
 * not in its lower half alone, so that it needs no rounding. */
CUDA_OPS_INLINE uint16_t stored_bfloat16(float x)
{
    const uint32_t bits = bits_of(x);
    return (uint16_t)((bits + (x != x ? 0 : 0x7fffu + (bits >> 16 & 1))) >> 16);
}
#endif

#undef STORED
#undef LOAD
#undef STORE
#undef STORE_EACH
#ifdef AS_BFLOAT16
#undef AS_BFLOAT16
#define STORED uint16_t
#define LOAD(x) widened_bfloat16(x)
#define STORE(x) stored_bfloat16(x)
#define STORE_EACH(to, begin, end, load, value)                                                                        \
    for (int64_t piece = begin; piece < end; piece += STORED_PIECE) {                                                  \
        REAL results[STORED_PIECE];                                                                                    \
        const int64_t last = min_i64(end, piece + STORED_PIECE);                                                       \
        _Pragma("omp simd") for (int64_t i = piece; i < last; i++)                                                     \
        {                                                                                                              \
            load;                                                                                                      \
            results[i - piece] = value;                                                                                \
        }                                                                                                              \
        _Pragma("omp simd") for (int64_t i = piece; i < last; i++) to[i] = STORE(results[i - piece]);                  \
    }
#else
#define STORED REAL
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_EACH(to, begin, end, load, value)                                                                        \
    _Pragma("omp simd") for (int64_t i = begin; i < end; i++)                                                          \
    {                                                                                                                  \
        load;                                                                                                          \
        to[i] = value;                                                                                                 \
    }
#endif
