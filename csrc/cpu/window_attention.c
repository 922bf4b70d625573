/* window_attention on the CPU: a window and head at a time, of that a query at a time, whose row of scores is on the stack.
 * Dot products are taken in several sums, and weighted sums element by element. Bound by arithmetic. */
#ifndef REAL

#include "cuda_ops/window_attention.h"

#include "common/common.h"

#define REAL float
#define FN(name) name##_f32
#define EXP expf
#include "window_attention.c"

#include "common/undef_real.h"
#undef EXP
#define REAL double
#define FN(name) name##_f64
#define EXP exp
#include "window_attention.c"

#include "common/undef_real.h"

cuda_ops_status cuda_ops_window_attention_forward_cpu(void *output, const void *qkv, const void *bias,
                                                      const cuda_ops_windows *windows, int64_t begin, int64_t end,
                                                      cuda_ops_dtype dtype)
{
    if (cuda_ops_window_positions(windows) > CUDA_OPS_WINDOW_POSITIONS)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        window_attention_forward_f32(output, qkv, bias, windows, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        window_attention_forward_f64(output, qkv, bias, windows, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

cuda_ops_status cuda_ops_window_attention_backward_cpu(void *grad_qkv, void *partials, const void *grad_output,
                                                       const void *qkv, const void *bias,
                                                       const cuda_ops_windows *windows, int64_t chunks, int64_t begin,
                                                       int64_t end, cuda_ops_dtype dtype)
{
    if (cuda_ops_window_positions(windows) > CUDA_OPS_WINDOW_POSITIONS)
        return CUDA_OPS_INVALID_ARGUMENT;
    switch (dtype) {
    case CUDA_OPS_FLOAT32:
        window_attention_backward_f32(grad_qkv, partials, grad_output, qkv, bias, windows, chunks, begin, end);
        return CUDA_OPS_SUCCESS;
    case CUDA_OPS_FLOAT64:
        window_attention_backward_f64(grad_qkv, partials, grad_output, qkv, bias, windows, chunks, begin, end);
        return CUDA_OPS_SUCCESS;
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}

#else

#include "common/dot.h"

CUDA_OPS_INLINE void FN(add_scaled)(REAL *to, const REAL *from, REAL factor, int64_t count)
{
    for (int64_t d = 0; d < count; d++)
        to[d] += factor * from[d];
}

/* Where a window's positions are, and beyond which edges. */
static void FN(find_positions)(int64_t *pixel, int8_t *part, const cuda_ops_windows *w, int64_t number)
{
    const cuda_ops_window window = cuda_ops_window_at(w, number);
    for (int64_t y = 0, i = 0; y < w->window_height; y++)
        for (int64_t x = 0; x < w->window_width; x++, i++) {
            pixel[i] = cuda_ops_window_pixel(w, &window, y, x);
            part[i] = (int8_t)cuda_ops_window_part(&window, y, x);
        }
}

/* A row of softmax: weights of the keys for query i. */
CUDA_OPS_INLINE void FN(row_of_weights)(REAL *weights, const REAL *qkv, const REAL *bias, const int64_t *pixel,
                                        const int8_t *part, const cuda_ops_windows *w, int64_t head, int64_t i)
{
    const int64_t positions = cuda_ops_window_positions(w), size = w->head_dim, channels = w->heads * size;
    const REAL *const query = qkv + pixel[i] * 3 * channels + head * size;
    REAL largest = -(REAL)INFINITY, total = 0;
    for (int64_t j = 0; j < positions; j++) {
        const REAL *const key = qkv + (pixel[j] * 3 + 1) * channels + head * size;
        REAL score = FN(dot)(query, key, size) * (REAL)w->scale;
        if (bias)
            score += bias[(head * positions + i) * positions + j];
        if (part[i] != part[j])
            score += (REAL)CUDA_OPS_WINDOW_APART;
        weights[j] = score;
        largest = score > largest || score != score ? score : largest;
    }
    for (int64_t j = 0; j < positions; j++) {
        weights[j] = EXP(weights[j] - largest);
        total += weights[j];
    }
    for (int64_t j = 0; j < positions; j++)
        weights[j] /= total;
}

CUDA_OPS_SIMD static void FN(window_attention_forward)(REAL *output, const REAL *qkv, const REAL *bias,
                                                       const cuda_ops_windows *w, int64_t begin, int64_t end)
{
    const int64_t positions = cuda_ops_window_positions(w), size = w->head_dim, channels = w->heads * size;
    int64_t pixel[CUDA_OPS_WINDOW_POSITIONS];
    int8_t part[CUDA_OPS_WINDOW_POSITIONS];
    REAL weights[CUDA_OPS_WINDOW_POSITIONS];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t head = unit % w->heads;
        if (unit == begin || head == 0)
            FN(find_positions)(pixel, part, w, unit / w->heads);
        for (int64_t i = 0; i < positions; i++) {
            FN(row_of_weights)(weights, qkv, bias, pixel, part, w, head, i);
            REAL *const to = output + pixel[i] * channels + head * size;
            memset(to, 0, (size_t)size * sizeof(REAL));
            for (int64_t j = 0; j < positions; j++)
                FN(add_scaled)(to, qkv + (pixel[j] * 3 + 2) * channels + head * size, weights[j], size);
        }
    }
}

CUDA_OPS_SIMD static void FN(window_attention_backward)(REAL *grad_qkv, REAL *partials, const REAL *grad_output,
                                                        const REAL *qkv, const REAL *bias, const cuda_ops_windows *w,
                                                        int64_t chunks, int64_t begin, int64_t end)
{
    const int64_t positions = cuda_ops_window_positions(w), size = w->head_dim, channels = w->heads * size;
    const int64_t count = cuda_ops_window_count(w);
    int64_t pixel[CUDA_OPS_WINDOW_POSITIONS];
    int8_t part[CUDA_OPS_WINDOW_POSITIONS];
    REAL weights[CUDA_OPS_WINDOW_POSITIONS], slopes[CUDA_OPS_WINDOW_POSITIONS];
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t chunk = unit / w->heads, head = unit % w->heads;
        REAL *const partial = partials ? partials + unit * positions * positions : NULL;
        if (partial)
            memset(partial, 0, (size_t)(positions * positions) * sizeof(REAL));
        for (int64_t number = chunk * count / chunks; number < (chunk + 1) * count / chunks; number++) {
            FN(find_positions)(pixel, part, w, number);
            for (int64_t i = 0; i < positions; i++)
                for (int64_t array = 0; array < 3; array++)
                    memset(grad_qkv + (pixel[i] * 3 + array) * channels + head * size, 0, (size_t)size * sizeof(REAL));
            for (int64_t i = 0; i < positions; i++) {
                const REAL *const grad = grad_output + pixel[i] * channels + head * size;
                const REAL *const query = qkv + pixel[i] * 3 * channels + head * size;
                REAL *const grad_query = grad_qkv + pixel[i] * 3 * channels + head * size;
                REAL mean = 0;
                FN(row_of_weights)(weights, qkv, bias, pixel, part, w, head, i);
                for (int64_t j = 0; j < positions; j++) {
                    slopes[j] = FN(dot)(grad, qkv + (pixel[j] * 3 + 2) * channels + head * size, size);
                    mean += weights[j] * slopes[j];
                }
                for (int64_t j = 0; j < positions; j++) {
                    const REAL slope = weights[j] * (slopes[j] - mean), scaled = slope * (REAL)w->scale;
                    const int64_t key = (pixel[j] * 3 + 1) * channels + head * size;
                    if (partial)
                        partial[i * positions + j] += slope;
                    FN(add_scaled)(grad_query, qkv + key, scaled, size);
                    FN(add_scaled)(grad_qkv + key, query, scaled, size);
                    FN(add_scaled)(grad_qkv + key + channels, grad, weights[j], size);
                }
            }
        }
    }
}

#endif
