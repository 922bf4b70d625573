#include "cuda_ops/excitation.h"

#include <math.h>

#include "check.h"

static double excited(double x, cuda_ops_excitation_activation activation)
{
    if (activation == CUDA_OPS_EXCITATION_SILU)
        return x / (1 + exp(-x));
    if (activation == CUDA_OPS_EXCITATION_HARDSWISH)
        return x * fmin(fmax(x + 3, 0), 6) / 6;
    return fmax(x, 0);
}

/* Images [begin, end); the others must not be touched. */
static void check_images(int64_t images, int64_t channels, int64_t squeezed, int64_t outputs, bool biases,
                         cuda_ops_excitation_activation activation, int64_t begin, int64_t end, cuda_ops_dtype dtype)
{
    void *input = guarded_numbers(images * channels, 1, dtype), *w1 = guarded_numbers(squeezed * channels, 2, dtype);
    void *w2 = guarded_numbers(outputs * squeezed, 3, dtype);
    void *b1 = guarded_numbers(squeezed, 4, dtype), *b2 = guarded_numbers(outputs, 5, dtype);
    void *output = guarded_new(images * outputs, dtype), *hidden = guarded_new(images * squeezed, dtype);
    const cuda_ops_excitation call = {input,  w1,       biases ? b1 : NULL, w2,      biases ? b2 : NULL,
                                      images, channels, squeezed,           outputs, activation};
    CHECK_OK(cuda_ops_excitation_forward_cpu(output, hidden, &call, begin, end, dtype));
    for (int64_t n = 0; n < images; n++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = biases ? get(b2, o, dtype) : 0, size = 1;
            for (int64_t s = 0; s < squeezed; s++) {
                double z = biases ? get(b1, s, dtype) : 0, terms = 1;
                for (int64_t c = 0; c < channels; c++) {
                    const double product = get(input, n * channels + c, dtype) * get(w1, s * channels + c, dtype);
                    z += product, terms += fabs(product);
                }
                sum += excited(z, activation) * get(w2, o * squeezed + s, dtype);
                size += 2 * terms * fabs(get(w2, o * squeezed + s, dtype));
            }
            if (begin <= n && n < end)
                CHECK_NEAR(output, n * outputs + o, sum, 16 * rounding(dtype) * size, dtype);
            else
                CHECK_UNWRITTEN(output, n * outputs + o, dtype);
        }
    guarded_free(input, images * channels, dtype);
    guarded_free(w1, squeezed * channels, dtype);
    guarded_free(w2, outputs * squeezed, dtype);
    guarded_free(b1, squeezed, dtype);
    guarded_free(b2, outputs, dtype);
    guarded_free(output, images * outputs, dtype);
    guarded_free(hidden, images * squeezed, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        for (int activation = CUDA_OPS_EXCITATION_RELU; activation <= CUDA_OPS_EXCITATION_HARDSWISH; activation++) {
            check_images(1, 1, 1, 1, true, activation, 0, 1, dtype);
            check_images(4, 33, 7, 20, true, activation, 1, 3, dtype);
            check_images(3, 48, 16, 5, false, activation, 0, 3, dtype);
            check_images(2, 5, 3, 2, true, activation, 1, 1, dtype);
        }
    }
    CHECK_STATUS(cuda_ops_excitation_forward_cpu(NULL, NULL, NULL, 0, 1, CUDA_OPS_FLOAT16), CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
