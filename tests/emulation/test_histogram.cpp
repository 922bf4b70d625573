// histc, bincount with and without weights, and the range of keys.
#include "cases.h"
#include "cuda_ops/histogram.h"

using namespace emulation;

static void histogram(int64_t number)
{
    const int64_t count = random_size(6000), bins = one_in(4) ? random_size(9000) : random_size(300);
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    describe("case %lld: %lld elements, %lld bins, dtype %d", (long long)number, (long long)count, (long long)bins,
             dtype);
    const Array input = Array(count, dtype).random(), output(bins, dtype);
    const double low = -1.0, high = 1.5;
    std::vector<int64_t> expected((size_t)bins), counted((size_t)bins);
    for (int64_t i = 0; i < count; i++) {
        const double v = input[i], place = (v - low) * (double)bins / (high - low);
        if (v >= low && v <= high)
            expected[(size_t)(place < (double)bins ? (int64_t)place : bins - 1)]++;
    }
    void *const workspace = device_memory(cuda_ops_histc_workspace_cuda(bins), 0);
    expect_success(cuda_ops_histc_cuda(output.data, workspace, input.data, count, bins, low, high, dtype, nullptr));
    double sum = 0, difference = 0; // an element at an edge may be on its other side in float
    for (int64_t i = 0; i < bins; i++)
        sum += output[i] - (double)expected[(size_t)i], difference += fabs(output[i] - (double)expected[(size_t)i]);
    if (dtype != CUDA_OPS_BFLOAT16 && (sum != 0 || difference > (double)count / 4))
        fail("histc differs by %g, and in all by %g", difference, sum);

    const int key_bytes = one_in(3) ? 1 : one_in(2) ? 4 : 8, deterministic = one_in(2);
    const cuda_ops_dtype weight_type = one_in(2) ? CUDA_OPS_FLOAT32 : CUDA_OPS_FLOAT64;
    void *const keys = device_memory((size_t)(count * key_bytes), random_phase(key_bytes));
    const Array weights = Array(count, weight_type).random(), sums(bins, weight_type);
    std::vector<double> expected_sums((size_t)bins), sizes((size_t)bins);
    std::fill(expected.begin(), expected.end(), 0);
    int64_t least = INT64_MAX, most = -1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t key =
            one_in(3) ? 0 : random_in(0, key_bytes == 1 && bins > 200 ? 255 : bins + 2) & (key_bytes == 1 ? 255 : -1);
        if (key_bytes == 1)
            ((uint8_t *)keys)[i] = (uint8_t)key;
        else if (key_bytes == 4)
            ((int32_t *)keys)[i] = (int32_t)key;
        else
            ((int64_t *)keys)[i] = key;
        least = key < least ? key : least, most = key > most ? key : most;
        if (key < bins) {
            expected[(size_t)key]++;
            expected_sums[(size_t)key] += weights[i], sizes[(size_t)key] += fabs(weights[i]);
        }
    }
    int64_t *const counts = (int64_t *)device_memory((size_t)(8 * bins), 0), *const range =
                                                                                 (int64_t *)device_memory(16, 0);
    expect_success(cuda_ops_bincount_cuda(counts, keys, key_bytes, count, bins, nullptr));
    for (int64_t i = 0; i < bins; i++)
        if (counts[i] != expected[(size_t)i])
            fail("%lld of bin %lld, not %lld", (long long)counts[i], (long long)i, (long long)expected[(size_t)i]);
    expect_success(cuda_ops_bincount_range_cuda(range, keys, key_bytes, count, nullptr));
    if (range[1] != most)
        fail("the largest key is %lld, not %lld", (long long)range[1], (long long)most);
    void *const room =
        device_memory(cuda_ops_bincount_weights_workspace_cuda(count, bins, weight_type, deterministic), 0);
    expect_success(cuda_ops_bincount_weights_cuda(sums.data, room, keys, key_bytes, weights.data, count, bins,
                                                  weight_type, deterministic, nullptr));
    for (int64_t i = 0; i < bins; i++)
        expect_near("sums", i, sums[i], expected_sums[(size_t)i],
                    (weight_type == CUDA_OPS_FLOAT64 ? 1e-13 : 1e-5) * sizes[(size_t)i]);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "histogram", histogram);
}
