/* conv_block on the CPU. conv_block/kernel.h does the work on images; this file compiles it once per instruction set,
 * picks the widest that the processor has, and does the work per channel, in double.
 *
 * Bound by the multiply-adds of the matrix products: at 14 x 14, 32 -> 64 channels 4.8 million an image forward and
 * backward, where direct convolution takes 10.8 million. */
#include "cuda_ops/conv_block.h"

#include "common/common.h"
#include "conv_block/block.h"
#include "conv_block/tap_moments.h"
#include "cuda_ops/cpu_isa.h"
#include "gemm/tiles.h"

/* Any x86-64 or 64-bit Arm has 16 vector registers of 16 bytes. */
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#define TARGET(name) name##_any
#define LARGER_OR_NAN(a, b) (((a) > (b)) | ((a) != (a)))
#define CHOOSE(flags, a, b) ((vector_any)(((flags) & (mask_any)(a)) | (~(flags) & (mask_any)(b))))
typedef int32_t flags_any __attribute__((vector_size(16)));
#define BROADCAST(x) ((vector_any){(x), (x), (x), (x)})
#define MULTIPLY_ADD(a, b, sum) ((a) * (b) + (sum))
#define STORE_BYTES(to, value) (*(bytes_any *)(to) = __builtin_convertvector(value, bytes_any))
#include "conv_block/kernel.h"

#if CUDA_OPS_WITH_TARGETS
#include "common/transpose.h"

/* In blocks of 4 rows x a vector. The last blocks overlap the ones before; smaller matrices take transpose_any. */
#define DEFINE_TRANSPOSE(isa, length)                                                                                  \
    static void transpose_##isa(float *restrict target, const float *restrict source, int64_t rows, int64_t columns)   \
    {                                                                                                                  \
        if (rows < 4 || columns < (length)) {                                                                          \
            transpose_any(target, source, rows, columns);                                                              \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t i0 = 0; i0 < rows; i0 += 4)                                                                       \
            for (int64_t j0 = 0; j0 < columns; j0 += (length)) {                                                       \
                const int64_t i = min_i64(i0, rows - 4), j = min_i64(j0, columns - (length));                          \
                transpose_rows_f32_##isa(target + j * rows + i, rows, source + i * columns + j, columns);              \
            }                                                                                                          \
    }

#pragma GCC push_options
#pragma GCC target("avx2,fma")
/* Intrinsics, since GCC scalarises __builtin_convertvector from 32 to 8 bits. */
static inline __attribute__((always_inline)) void store_bytes_avx2(uint8_t *to, __m256i value)
{
    const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                         4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(value, low);
    _mm_storel_epi64((__m128i *)(void *)to,
                     _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
DEFINE_TRANSPOSE(avx2, 8)
#define VECTOR_BYTES 32
#define TILE_ROWS 6 /* 16 registers: 12 accumulators, 2 of b, 1 of a */
#define TARGET(name) name##_avx2
#define LARGER_OR_NAN(a, b) (((a) > (b)) | ((a) != (a)))
#define CHOOSE(flags, a, b) ((vector_avx2)_mm256_blendv_ps((__m256)(b), (__m256)(a), (__m256)(flags)))
typedef int32_t flags_avx2 __attribute__((vector_size(32)));
#define BROADCAST(x) ((vector_avx2)_mm256_set1_ps(x))
#define MULTIPLY_ADD(a, b, sum) ((vector_avx2)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(sum)))
#define STORE_BYTES(to, value) store_bytes_avx2(to, (__m256i)(value))
#include "conv_block/kernel.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma")
DEFINE_TRANSPOSE(avx512, 16)
#define VECTOR_BYTES 64
#define TILE_ROWS 12 /* 32 registers: 24 accumulators, 2 of b */
#define TARGET(name) name##_avx512
/* Intrinsics, since GCC compiles a selection to three operations. */
#define LARGER_OR_NAN(a, b)                                                                                            \
    (_mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GT_OQ) |                                                        \
     _mm512_cmp_ps_mask((__m512)(a), (__m512)(a), _CMP_UNORD_Q))
#define CHOOSE(flags, a, b) ((vector_avx512)_mm512_mask_blend_ps(flags, (__m512)(b), (__m512)(a)))
typedef __mmask16 flags_avx512;
#define BROADCAST(x) ((vector_avx512)_mm512_set1_ps(x))
#define MULTIPLY_ADD(a, b, sum) ((vector_avx512)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(sum)))
#define STORE_BYTES(to, value) _mm_storeu_si128((__m128i *)(void *)(to), _mm512_cvtepi32_epi8((__m512i)(value)))
#include "conv_block/kernel.h"
#pragma GCC pop_options
#endif

#if CUDA_OPS_WITH_AMX
#include "gemm/tile_packing.h"

#include "conv_block/tiled.h"
#endif

static const struct kernels *choose(void)
{
#if CUDA_OPS_WITH_TARGETS
    const cuda_ops_cpu_isa isa = cuda_ops_cpu_isa_current();
    if (isa >= CUDA_OPS_CPU_AVX512)
        return &kernels_avx512;
    if (isa == CUDA_OPS_CPU_AVX2)
        return &kernels_avx2;
#endif
    return &kernels_any;
}

static bool read_sizes(struct block *b, const cuda_ops_conv_block_sizes *s)
{
    if (s->batch < 1 || s->height < 2 || s->width < 2 || s->height % 2 || s->width % 2 || s->in_channels < 1 ||
        (s->in_channels != 1 && s->in_channels % 16) || s->out_channels < 16 || s->out_channels % 16)
        return false;
    const int64_t channels = max_i64(s->in_channels, s->out_channels);
    if (s->height > LARGEST || s->width > LARGEST || channels > LARGEST || s->height * s->width > LARGEST / channels ||
        s->in_channels * s->out_channels > LARGEST || s->batch > INT64_MAX / (16 * LARGEST))
        return false;
    *b = (struct block){.batch = s->batch,
                        .in_channels = s->in_channels,
                        .out_channels = s->out_channels,
                        .height = s->height,
                        .width = s->width,
                        .rows = s->height / 2,
                        .columns = s->width / 2,
                        .windows = s->height / 2 * (s->width / 2),
                        .chunks = min_i64(s->batch, CHUNKS),
                        .input_channels_last = s->input_channels_last,
                        .output_channels_last = s->output_channels_last,
                        .dtype = s->dtype,
                        .pitch = s->width + 2,
                        .padded = (s->height + 2) * (s->width + 2)};
    return true;
}

/* Whether conv_block/tiled.h takes it. */
static bool by_tiles(const struct block *b)
{
#if CUDA_OPS_WITH_AMX
    return is_tiled(b);
#else
    (void)b;
    return false;
#endif
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* The next `count` elements of `bytes` bytes, `offset` bytes behind `memory`, which may be NULL. */
static void *take(char *memory, size_t *offset, int64_t count, size_t bytes)
{
    char *const result = memory ? memory + *offset : NULL;
    *offset += aligned((size_t)count * bytes);
    return result;
}

/* Divides `memory` into the workspace's buffers; returns its size, for which memory may be NULL. */
static size_t lay_out_workspace(struct workspace *w, char *memory, const struct block *b)
{
    const int64_t C = b->in_channels, K = b->out_channels, T = b->windows;
    const int64_t transformed = 16 * T * max_i64(C, K);
    const bool tiled = by_tiles(b), winograd = C > 1 && !tiled, wide = b->dtype != CUDA_OPS_FLOAT32;
    size_t offset = 0;
    w->staged_input = take(memory, &offset, tiled ? 0 : b->padded * C, sizeof(float));
    w->staged_grad = take(memory, &offset, tiled ? 0 : b->padded * K, sizeof(float));
    w->v = take(memory, &offset, winograd ? transformed : 0, sizeof(float));
    w->m = take(memory, &offset, winograd ? transformed : 0, sizeof(float));
    w->u = take(memory, &offset, winograd ? 16 * C * K : 0, sizeof(float));
    w->pooled = take(memory, &offset, T * K, sizeof(float));
    w->channel = take(memory, &offset, 10 * K, sizeof(float));
    w->wide_input = take(memory, &offset, wide && !tiled ? 4 * T * C : 0, sizeof(float));
    w->wide_conv_output = take(memory, &offset, wide ? 4 * T * K : 0, sizeof(float));
    w->wide_output = take(memory, &offset, wide ? T * K : 0, sizeof(float));
    w->wide_maximum = take(memory, &offset, wide ? T * K : 0, sizeof(float));
#if CUDA_OPS_WITH_AMX
    if (tiled) {
        w->pixels = take(memory, &offset, staged_pixels(b) * C, sizeof(uint16_t));
        w->grads = take(memory, &offset, staged_pixels(b) * K, sizeof(uint16_t));
        w->channels = take(memory, &offset, channel_pitch(b) * C, sizeof(uint16_t));
        w->pairs = take(memory, &offset, panel_pixels(b) * K, sizeof(uint16_t));
        w->tile_sums = take(memory, &offset, panel_pixels(b) * max_i64(C, K), sizeof(float));
    }
#endif
    return offset;
}

cuda_ops_status cuda_ops_conv_block_plan_cpu(cuda_ops_conv_block_plan *plan, const cuda_ops_conv_block_sizes *sizes)
{
    struct block b;
    struct workspace w;
    if (sizes->dtype != CUDA_OPS_FLOAT32 && sizes->dtype != CUDA_OPS_FLOAT16 && sizes->dtype != CUDA_OPS_BFLOAT16)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    if (!read_sizes(&b, sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool one = b.in_channels == 1;
    const size_t K = (size_t)b.out_channels, C = (size_t)b.in_channels, chunks = (size_t)b.chunks;
    const size_t pooled = (size_t)(b.batch * b.windows) * K;
    const size_t element = b.dtype == CUDA_OPS_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
    size_t prepared = (one ? TAPS : 32 * C) * K * sizeof(float);
#if CUDA_OPS_WITH_AMX
    if (is_tiled(&b))
        prepared = 2 * (size_t)prepared_weight(&b) * sizeof(uint16_t);
#endif
    *plan = (cuda_ops_conv_block_plan){
        .chunks = b.chunks,
        .prepared_bytes = prepared,
        .conv_output_bytes = one ? 0 : 4 * pooled * element,
        .argmax_bytes = pooled,
        .maximum_bytes = one ? 0 : pooled * element,
        .moments_bytes = chunks * (one ? TAPS + PAIRS : 2 * K) * sizeof(double),
        .partials_bytes = chunks * (one ? 10 : 2) * K * sizeof(double),
        .weights_bytes = one ? 0 : chunks * TAPS * C * K * sizeof(float),
        .workspace_bytes = lay_out_workspace(&w, NULL, &b),
    };
    return CUDA_OPS_SUCCESS;
}

enum { LANE_BLOCK = 16 };

/* u = G w G^T for LANE_BLOCK weights side by side; u[i] is stored at target + i * stride. */
CUDA_OPS_SIMD static void transform_weights(float *restrict target, int64_t stride, float w[9][LANE_BLOCK])
{
    float t[4][3][LANE_BLOCK];
    for (int j = 0; j < 3; j++)
        for (int l = 0; l < LANE_BLOCK; l++) {
            const float ends = w[j][l] + w[6 + j][l];
            t[0][j][l] = w[j][l];
            t[1][j][l] = 0.5f * (ends + w[3 + j][l]);
            t[2][j][l] = 0.5f * (ends - w[3 + j][l]);
            t[3][j][l] = w[6 + j][l];
        }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANE_BLOCK; l++) {
            const float ends = t[i][0][l] + t[i][2][l];
            target[(4 * i + 0) * stride + l] = t[i][0][l];
            target[(4 * i + 1) * stride + l] = 0.5f * (ends + t[i][1][l]);
            target[(4 * i + 2) * stride + l] = 0.5f * (ends - t[i][1][l]);
            target[(4 * i + 3) * stride + l] = t[i][2][l];
        }
}

cuda_ops_status cuda_ops_conv_block_prepare_cpu(void *prepared, const float *weight, int backward,
                                                const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end)
{
    struct block b;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.out_channels / LANE_BLOCK)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t C = b.in_channels, K = b.out_channels;
#if CUDA_OPS_WITH_AMX
    if (is_tiled(&b)) {
        for (int64_t i = begin; i < end; i++)
            tiled_prepare(prepared, weight, backward, &b, i * SIDE);
        return CUDA_OPS_SUCCESS;
    }
#endif
    float *const forward = prepared, *const transposed = forward + 16 * C * K;
    float w[9][LANE_BLOCK];
    for (int64_t k = begin * LANE_BLOCK; k < end * LANE_BLOCK; k += LANE_BLOCK) {
        for (int64_t c = 0; c < C && !(backward && C > 1); c++) {
            for (int64_t l = 0; l < LANE_BLOCK; l++)
                for (int i = 0; i < 9; i++)
                    w[i][l] = weight[((k + l) * C + c) * 9 + i];
            if (C > 1)
                transform_weights(forward + c * K + k, C * K, w);
            else
                for (int i = 0; i < 9; i++)
                    memcpy(forward + i * K + k, w[i], sizeof w[i]);
        }
        for (int64_t l = 0; backward && C > 1 && l < LANE_BLOCK; l++)
            for (int64_t c = 0; c < C; c += LANE_BLOCK) {
                for (int64_t z = 0; z < LANE_BLOCK; z++)
                    for (int i = 0; i < 9; i++)
                        w[8 - i][z] = weight[((k + l) * C + c + z) * 9 + i];
                transform_weights(transposed + (k + l) * C + c, K * C, w);
            }
    }
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv_block_convolve_cpu(void *conv_output, void *moments, const void *input,
                                                 const void *prepared, const float *bias,
                                                 const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                                 void *workspace)
{
    struct block b;
    struct workspace w;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.chunks)
        return CUDA_OPS_INVALID_ARGUMENT;
    lay_out_workspace(&w, workspace, &b);
    if (b.in_channels == 1)
        tap_moments(moments, input, &b, begin, end, &w);
#if CUDA_OPS_WITH_AMX
    else if (is_tiled(&b))
        tiled_convolve(conv_output, moments, input, prepared, bias, &b, begin, end, &w);
#endif
    else
        choose()->convolve(conv_output, moments, input, prepared, bias, &b, begin, end, &w);
    return CUDA_OPS_SUCCESS;
}

/* Adds the chunks' sums to the first one's. */
static void add_chunks(double *moments, int64_t chunks, int64_t count)
{
    for (int64_t chunk = 1; chunk < chunks; chunk++)
        for (int64_t i = 0; i < count; i++)
            moments[i] += moments[chunk * count + i];
}

cuda_ops_status cuda_ops_conv_block_statistics_cpu(double *mean, double *variance, void *moments, const float *weight,
                                                   const float *bias, const cuda_ops_conv_block_sizes *sizes)
{
    struct block b;
    if (!read_sizes(&b, sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t K = b.out_channels;
    const double pixels = (double)(b.height * b.width), n = (double)b.batch * pixels;
    if (b.in_channels == 1) {
        double *const sums = moments, *const products = sums + TAPS;
        add_chunks(sums, b.chunks, TAPS + PAIRS);
        for (int64_t k = 0; k < K; k++) {
            const float *w = weight + k * TAPS;
            double first = 0, second = 0;
            for (int i = 0; i < TAPS; i++) {
                first += (double)w[i] * (sums[i] / n);
                for (int j = 0; j < TAPS; j++)
                    second += (double)w[i] * (double)w[j] * (products[i * TAPS + j] / n - sums[i] / n * (sums[j] / n));
            }
            mean[k] = first + (bias ? (double)bias[k] : 0.0);
            variance[k] = second < 0 ? 0 : second; /* by rounding alone; NaN stays */
        }
        return CUDA_OPS_SUCCESS;
    }
    for (int64_t k = 0; k < K; k++) {
        double count = 0, square = 0;
        mean[k] = 0;
        for (int64_t chunk = 0; chunk < b.chunks; chunk++) {
            const double *const part = (const double *)moments + 2 * chunk * K;
            const double more = pixels * (double)(first_of_chunk(&b, chunk + 1) - first_of_chunk(&b, chunk));
            const double distance = part[k] - mean[k], all = count + more;
            square += part[K + k] + distance * distance * count * more / all;
            mean[k] += distance * more / all;
            count = all;
        }
        variance[k] = square / n;
    }
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv_block_pool_cpu(void *output, uint8_t *argmax, void *maximum, const void *conv_output,
                                             const void *input, const void *prepared, const float *bias,
                                             const double *mean, const double *variance, const float *norm_weight,
                                             const float *norm_bias, double eps, const cuda_ops_conv_block_sizes *sizes,
                                             int64_t begin, int64_t end, void *workspace)
{
    struct block b;
    struct workspace w;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.chunks)
        return CUDA_OPS_INVALID_ARGUMENT;
    lay_out_workspace(&w, workspace, &b);
    const int64_t K = b.out_channels;
    /* normalised = (y - center) * scale + offset */
    float *const center = w.channel, *const scale = center + K, *const offset = scale + K;
    for (int64_t k = 0; k < K; k++) {
        const double factor = (norm_weight ? (double)norm_weight[k] : 1.0) / sqrt(variance[k] + eps);
        center[k] = (float)mean[k];
        scale[k] = (float)factor;
        offset[k] = (float)((norm_bias ? (double)norm_bias[k] : 0.0) + ((double)center[k] - mean[k]) * factor);
    }
    choose()->pool(output, argmax, b.in_channels == 1 ? NULL : maximum, conv_output, input, prepared, bias, center, &b,
                   begin, end, &w);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv_block_sums_cpu(void *partials, const void *grad_output, const uint8_t *argmax,
                                             const void *maximum, const void *input, const double *mean,
                                             const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                             void *workspace)
{
    struct block b;
    struct workspace w;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.chunks)
        return CUDA_OPS_INVALID_ARGUMENT;
    lay_out_workspace(&w, workspace, &b);
    float *const center = w.channel + 9 * b.out_channels; /* past the two sums per channel that `sums` writes */
    if (b.in_channels != 1)
        for (int64_t k = 0; k < b.out_channels; k++)
            center[k] = (float)mean[k];
    choose()->sums(partials, grad_output, argmax, maximum, input, center, &b, begin, end, &w);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv_block_prepare_backward_cpu(float *coefficients, float *grad_norm_weight,
                                                         float *grad_norm_bias, float *grad_weight,
                                                         const void *partials, const void *moments, const float *weight,
                                                         const float *bias, const double *mean, const double *variance,
                                                         const float *norm_weight, double eps,
                                                         const cuda_ops_conv_block_sizes *sizes)
{
    struct block b;
    if (!read_sizes(&b, sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t K = b.out_channels;
    const bool one = b.in_channels == 1;
    const int64_t count = (one ? 10 : 2) * K;
    const double n = (double)b.batch * (double)(b.height * b.width);
    for (int64_t k = 0; k < K; k++) {
        double total[10] = {0};
        for (int64_t chunk = 0; chunk < b.chunks; chunk++)
            for (int i = 0; i < (one ? 10 : 2); i++)
                total[i] += ((const double *)partials)[chunk * count + i * K + k];
        const double sum = total[0], rstd = 1 / sqrt(variance[k] + eps);
        const double scale = rstd * (norm_weight ? (double)norm_weight[k] : 1.0);
        double product = total[1] + ((double)(float)mean[k] - mean[k]) * sum;
        if (one)
            one_channel(grad_weight + k * TAPS, &product, total + 1, sum, moments, (const double *)moments + TAPS,
                        weight + k * TAPS, mean[k], bias ? (double)bias[k] : 0.0, rstd, scale, n);
        if (grad_norm_weight)
            grad_norm_weight[k] = (float)(product * rstd);
        if (grad_norm_bias)
            grad_norm_bias[k] = (float)sum;
        /* dy = scale * dz + constant + slope * (y - center) */
        const double slope = -scale * rstd * rstd * product / n;
        coefficients[k] = (float)mean[k];
        coefficients[K + k] = (float)scale;
        coefficients[2 * K + k] = (float)(-scale * sum / n + slope * ((double)(float)mean[k] - mean[k]));
        coefficients[3 * K + k] = (float)slope;
    }
    return CUDA_OPS_SUCCESS;
}

cuda_ops_status cuda_ops_conv_block_gradients_cpu(void *grad_input, void *weights, const void *grad_output,
                                                  const uint8_t *argmax, const void *conv_output, const void *input,
                                                  const void *prepared, const float *bias, const float *coefficients,
                                                  const cuda_ops_conv_block_sizes *sizes, int64_t begin, int64_t end,
                                                  void *workspace)
{
    struct block b;
    struct workspace w;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.chunks || (b.in_channels == 1 && !grad_input))
        return CUDA_OPS_INVALID_ARGUMENT;
    lay_out_workspace(&w, workspace, &b);
    if (b.in_channels == 1)
        choose()->gradients_one(grad_input, grad_output, argmax, input, prepared, bias, coefficients, &b, begin, end,
                                &w);
#if CUDA_OPS_WITH_AMX
    else if (is_tiled(&b))
        tiled_gradients(grad_input, weights, grad_output, argmax, conv_output, input, prepared, coefficients, &b, begin,
                        end, &w);
#endif
    else
        choose()->gradients(grad_input, weights, grad_output, argmax, conv_output, input, prepared, coefficients, &b,
                            begin, end, &w);
    return CUDA_OPS_SUCCESS;
}

/* The sums over the chunks of LANE_BLOCK neighbouring weights of each tap. */
CUDA_OPS_SIMD static void add_weights(float sums[TAPS][LANE_BLOCK], const float *restrict weights, int64_t tap_stride,
                                      int64_t chunks)
{
    for (int tap = 0; tap < TAPS; tap++) {
        float sum[LANE_BLOCK] = {0};
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int l = 0; l < LANE_BLOCK; l++)
                sum[l] += weights[(chunk * TAPS + tap) * tap_stride + l];
        memcpy(sums[tap], sum, sizeof sum);
    }
}

cuda_ops_status cuda_ops_conv_block_reduce_weight_cpu(float *grad_weight, const void *weights,
                                                      const cuda_ops_conv_block_sizes *sizes, int64_t begin,
                                                      int64_t end)
{
    struct block b;
    if (!read_sizes(&b, sizes) || begin < 0 || end > b.in_channels || b.in_channels == 1)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t C = b.in_channels, K = b.out_channels;
    for (int64_t c = begin; c < end; c++)
        for (int64_t k = 0; k < K; k += LANE_BLOCK) {
            float sums[TAPS][LANE_BLOCK];
            add_weights(sums, (const float *)weights + c * K + k, C * K, b.chunks);
            for (int64_t l = 0; l < LANE_BLOCK; l++)
                for (int tap = 0; tap < TAPS; tap++)
                    grad_weight[((k + l) * C + c) * TAPS + tap] = sums[tap][l];
        }
    return CUDA_OPS_SUCCESS;
}
