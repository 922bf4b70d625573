// excitation: rows and columns around those of a warp and a block, vectors and elements, parameters of both dtypes.
#include "cases.h"
#include "cuda_ops/excitation.h"

using namespace emulation;

static double excited(double x, int activation)
{
    if (activation == CUDA_OPS_EXCITATION_SILU)
        return x / (1 + exp(-x));
    if (activation == CUDA_OPS_EXCITATION_HARDSWISH)
        return x * fmin(fmax(x + 3, 0), 6) / 6;
    return fmax(x, 0);
}

static void excitation(int64_t number)
{
    const cuda_ops_dtype type = DTYPES[random_below(4)];
    const bool is_half = type == CUDA_OPS_FLOAT16 || type == CUDA_OPS_BFLOAT16;
    const cuda_ops_dtype of_parameters = is_half && one_in(2) ? CUDA_OPS_FLOAT32 : type;
    const int activation = (int)random_below(3);
    const int64_t images = random_size(20), channels = random_size(300), squeezed = random_size(30);
    const int64_t outputs = random_size(60);
    const bool biases = !one_in(4);
    const Array input = Array(images * channels, type).random();
    const Array w1 = Array(squeezed * channels, of_parameters).random(), b1 = Array(squeezed, of_parameters).random();
    const Array w2 = Array(outputs * squeezed, of_parameters).random(), b2 = Array(outputs, of_parameters).random();
    const Array output(images * outputs, type), hidden(images * squeezed, type);
    describe("case %lld: %lld images, %lld to %lld to %lld, activation %d, dtypes %d and %d", (long long)number,
             (long long)images, (long long)channels, (long long)squeezed, (long long)outputs, activation, type,
             of_parameters);
    const cuda_ops_excitation call = {input.data,
                                      w1.data,
                                      biases ? b1.data : nullptr,
                                      w2.data,
                                      biases ? b2.data : nullptr,
                                      images,
                                      channels,
                                      squeezed,
                                      outputs,
                                      (cuda_ops_excitation_activation)activation};
    expect_success(cuda_ops_excitation_forward_cuda(output.data, hidden.data, &call, of_parameters, type, nullptr));
    const double inside = type == CUDA_OPS_FLOAT64 ? 1e-14 : 4e-6;
    for (int64_t n = 0; n < images; n++) {
        for (int64_t s = 0; s < squeezed; s++) {
            double z = biases ? b1[s] : 0, size = 1;
            for (int64_t c = 0; c < channels; c++) {
                z += input[n * channels + c] * w1[s * channels + c];
                size += fabs(input[n * channels + c] * w1[s * channels + c]);
            }
            const double expected = excited(z, activation);
            expect_near("hidden", n * squeezed + s, hidden[n * squeezed + s], expected,
                        rounding_of(type) * fabs(expected) + inside * size);
        }
        for (int64_t o = 0; o < outputs; o++) {
            double sum = biases ? b2[o] : 0, size = 1;
            for (int64_t s = 0; s < squeezed; s++) {
                sum += hidden[n * squeezed + s] * w2[o * squeezed + s];
                size += fabs(hidden[n * squeezed + s] * w2[o * squeezed + s]);
            }
            expect_near("output", n * outputs + o, output[n * outputs + o], sum,
                        rounding_of(type) * fabs(sum) + inside * size);
        }
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "excitation", excitation);
}
