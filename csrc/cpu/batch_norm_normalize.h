/* batch_norm's last step forward: rows of an image and channel, or of an image's channels, with the coefficients that were
 * prepared. Included in batch_norm.c's passes, and once for bfloat16 as it lies, whose coefficients are float32. */
#include "common/stored.h"

CUDA_OPS_SIMD static void FN(normalize)(STORED *restrict output, const REAL *restrict coefficients,
                                        const STORED *restrict input, shape s, int64_t begin, int64_t end)
{
    const REAL *center = coefficients, *scale = center + s.channels, *offset = scale + s.channels;
    if (s.inner == 1) {
        for (int64_t row = begin; row < end; row++) {
            const STORED *x = input + row * s.channels;
            STORED *y = output + row * s.channels;
            for (int64_t c = 0; c < s.channels; c++)
                y[c] = STORE((LOAD(x[c]) - center[c]) * scale[c] + offset[c]);
        }
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        const int64_t c = row % s.channels;
        const REAL m = center[c], a = scale[c], b = offset[c];
        const STORED *x = input + row * s.inner;
        STORED *y = output + row * s.inner;
        for (int64_t i = 0; i < s.inner; i++)
            y[i] = STORE((LOAD(x[i]) - m) * a + b);
    }
}
