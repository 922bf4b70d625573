// adaptive_avg_pool2d and adaptive_max_pool2d forward: windows of any size, and means of whole planes, which have kernels
// of their own.
#include "cases.h"
#include "cuda_ops/adaptive_pool2d.h"

using namespace emulation;

static void adaptive_pool2d(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const bool whole = one_in(2), max = one_in(3), large = one_in(4);
    cuda_ops_adaptive_pool2d pool = {};
    pool.height.input = (int32_t)random_in(1, large ? 70 : 17),
    pool.width.input = (int32_t)random_in(1, large ? 70 : 17);
    pool.height.output = whole ? 1 : (int32_t)random_in(1, 5);
    pool.width.output = whole || one_in(3) ? 1 : (int32_t)random_in(1, 5);
    pool.batch = random_in(1, 3), pool.channels = random_size(large ? 120 : 300);
    pool.channels_last = one_in(4);
    const int64_t planes = pool.batch * pool.channels, plane = (int64_t)pool.height.input * pool.width.input;
    const int64_t windows = (int64_t)pool.height.output * pool.width.output;
    const Array input = Array(planes * plane, dtype).random(), output(planes * windows, dtype);
    int64_t *const indices = (int64_t *)device_memory((size_t)(planes * windows) * 8, 0);
    describe("case %lld: %s of %lld x %lld x %d x %d to %d x %d%s, dtype %d, %d resident", (long long)number,
             max ? "max" : "avg", (long long)pool.batch, (long long)pool.channels, pool.height.input, pool.width.input,
             pool.height.output, pool.width.output, pool.channels_last ? ", channels_last" : "", dtype,
             resident_blocks);
    if (max) {
        expect_success(
            cuda_ops_adaptive_max_pool2d_forward_cuda(output.data, indices, input.data, &pool, dtype, nullptr));
    } else {
        void *const workspace = device_memory((size_t)cuda_ops_adaptive_avg_pool2d_workspace_cuda(&pool, dtype), 0);
        expect_success(
            cuda_ops_adaptive_avg_pool2d_forward_cuda(output.data, workspace, input.data, &pool, dtype, nullptr));
    }
    const double rounding = rounding_of(dtype),
                 sums = rounding_of(dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32);
    for (int64_t p = 0; p < planes; p++)
        for (int32_t i = 0; i < pool.height.output; i++)
            for (int32_t j = 0; j < pool.width.output; j++) {
                const int64_t image = p / pool.channels, channel = p % pool.channels;
                double sum = 0, size = 0, largest = -1e30;
                int64_t count = 0, index = -1;
                for (int32_t h = cuda_ops_adaptive_start(pool.height, i); h < cuda_ops_adaptive_end(pool.height, i);
                     h++)
                    for (int32_t w = cuda_ops_adaptive_start(pool.width, j); w < cuda_ops_adaptive_end(pool.width, j);
                         w++) {
                        const int64_t at = (int64_t)h * pool.width.input + w;
                        const double x =
                            input[pool.channels_last ? (image * plane + at) * pool.channels + channel : p * plane + at];
                        sum += x, size += fabs(x), count++;
                        if (x > largest)
                            largest = x, index = at;
                    }
                const int64_t window = (int64_t)i * pool.width.output + j;
                const int64_t to =
                    pool.channels_last ? (image * windows + window) * pool.channels + channel : p * windows + window;
                const double mean = sum / (double)count;
                if (max) {
                    expect_near("output", to, output[to], largest, 0);
                    expect_near("indices", to, (double)indices[to], (double)index, 0);
                } else {
                    expect_near("output", to, output[to], mean,
                                rounding * fabs(mean) + sums * 8 * size / (double)count);
                }
            }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "adaptive_pool2d", adaptive_pool2d);
}
