/* float16 and bfloat16 to float32 and back. bfloat16 is the upper half of a float: a shift, and an addition that rounds.
 * float16 has instructions from AVX2 on; elsewhere its exponent is moved by integer arithmetic, and denormal numbers are
 * made and unmade by an addition of floats whose last bit weighs what theirs does. Bound by memory. */
#include "cuda_ops/halves_cpu.h"

#include "common/common.h"
#include "common/half.h"
#include "cuda_ops/cpu_isa.h"

#if CUDA_OPS_WITH_TARGETS
#include <immintrin.h>
#endif

CUDA_OPS_SIMD static void widen_bfloat16(float *restrict output, const uint16_t *restrict input, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = widened_bfloat16(input[i]);
}

CUDA_OPS_SIMD static void round_bfloat16(uint16_t *restrict output, const float *restrict input, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = rounded_bfloat16(input[i]);
}

CUDA_OPS_SIMD static void widen_float16(float *restrict output, const uint16_t *restrict input, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = widened_float16(input[i]);
}

CUDA_OPS_SIMD static void round_float16(uint16_t *restrict output, const float *restrict input, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        output[i] = rounded_float16(input[i]);
}

#if CUDA_OPS_WITH_TARGETS
/* The upper halves of eight sums, in the lower halves of their places. */
__attribute__((target("avx2"))) static inline __m256i rounded_bfloat16_avx2(const float *input)
{
    const __m256 x = _mm256_loadu_ps(input);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, nan, _mm256_castps_si256(is_nan)), 16);
}

/* As the plain loop, which the compiler vectorises with twice as many instructions to make 16 bits of 32. */
__attribute__((target("avx2"))) static void round_bfloat16_avx2(uint16_t *restrict output, const float *restrict input,
                                                                int64_t count)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        /* packus goes lane by lane, and leaves the quarters in the order 0, 2, 1, 3. */
        const __m256i packed =
            _mm256_packus_epi32(rounded_bfloat16_avx2(input + i), rounded_bfloat16_avx2(input + i + 8));
        _mm256_storeu_si256((__m256i *)(output + i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    for (; i < count; i++)
        output[i] = rounded_bfloat16(input[i]);
}

__attribute__((target("avx2,f16c"))) static void widen_float16_avx2(float *restrict output,
                                                                    const uint16_t *restrict input, int64_t count)
{
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(output + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(input + i))));
    for (; i < count; i++)
        output[i] = _cvtsh_ss(input[i]);
}

__attribute__((target("avx2,f16c"))) static void round_float16_avx2(uint16_t *restrict output,
                                                                    const float *restrict input, int64_t count)
{
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(output + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(input + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; i++)
        output[i] = _cvtss_sh(input[i], _MM_FROUND_TO_NEAREST_INT);
}

/* Twice as wide; what is left over by masks. */
__attribute__((target("avx512f,avx512bw,avx512vl"))) static void
widen_float16_avx512(float *restrict output, const uint16_t *restrict input, int64_t count)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(output + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(input + i))));
    const __mmask16 rest = (__mmask16)((1u << (count - i)) - 1);
    if (rest)
        _mm512_mask_storeu_ps(output + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, input + i)));
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) static void
round_float16_avx512(uint16_t *restrict output, const float *restrict input, int64_t count)
{
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(output + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(input + i), _MM_FROUND_TO_NEAREST_INT));
    const __mmask16 rest = (__mmask16)((1u << (count - i)) - 1);
    if (rest)
        _mm256_mask_storeu_epi16(output + i, rest,
                                 _mm512_cvtps_ph(_mm512_maskz_loadu_ps(rest, input + i), _MM_FROUND_TO_NEAREST_INT));
}
#endif

cuda_ops_status cuda_ops_widen_cpu(float *output, const void *input, int64_t count, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT16 && dtype != CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (dtype == CUDA_OPS_BFLOAT16)
        widen_bfloat16(output, input, count);
#if CUDA_OPS_WITH_TARGETS
    else if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX512)
        widen_float16_avx512(output, input, count);
    else if (cuda_ops_cpu_isa_current() >= CUDA_OPS_CPU_AVX2)
        widen_float16_avx2(output, input, count);
#endif
    else
        widen_float16(output, input, count);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_round_cpu(void *output, const float *input, int64_t count, cuda_ops_dtype dtype)
{
    if (dtype != CUDA_OPS_FLOAT16 && dtype != CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (dtype == CUDA_OPS_BFLOAT16 && isa == CUDA_OPS_CPU_AVX2)
        round_bfloat16_avx2(output, input, count);
    else if (dtype == CUDA_OPS_FLOAT16 && isa >= CUDA_OPS_CPU_AVX512)
        round_float16_avx512(output, input, count);
    else if (dtype == CUDA_OPS_FLOAT16 && isa >= CUDA_OPS_CPU_AVX2)
        round_float16_avx2(output, input, count);
    else
#endif
        if (dtype == CUDA_OPS_BFLOAT16)
        round_bfloat16(output, input, count);
    else
        round_float16(output, input, count);
    return CUDA_OPS_SUCCESS;
}

CUDA_OPS_SIMD static bool are_finite(const uint16_t *input, int64_t count, uint16_t exponent)
{
    enum { AT_ONCE = 4096 };
    for (int64_t i = 0; i < count; i += AT_ONCE) {
        uint16_t special = 0;
        for (int64_t j = i; j < min_i64(count, i + AT_ONCE); j++)
            special |= (uint16_t)((input[j] & exponent) == exponent);
        if (special)
            return false;
    }
    return true;
}

int cuda_ops_are_finite_cpu(const void *input, int64_t count, cuda_ops_dtype dtype)
{
    return are_finite(input, count, dtype == CUDA_OPS_FLOAT16 ? 0x7c00 : 0x7f80);
}
