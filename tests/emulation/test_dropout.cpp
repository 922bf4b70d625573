// dropout, dropout_add and dropout's backward against the CPU's, which draws the same words.
#include "cases.h"
#include "cuda_ops/dropout.h"

using namespace emulation;

static void dropout(int64_t number)
{
    const cuda_ops_dtype dtype = DTYPES[random_below(4)];
    const int64_t count = random_size(9000);
    const double p = one_in(8) ? (double)random_in(0, 1) : (double)random_in(1, 9) / 10;
    const Array input = Array(count, dtype).random(), residual = Array(count, dtype).random(), output(count, dtype);
    const Array grad(count, dtype);
    int64_t *const state = (int64_t *)device_memory(16, 0);
    int64_t *const given = (int64_t *)device_memory(16, 0);
    const bool adds = one_in(2), captured = one_in(3), in_place = one_in(4);
    given[0] = (int64_t)(random_below(1 << 30) << 32 | random_below(1 << 30)), given[1] = 4 * random_in(0, 1 << 20);
    cuda_ops_philox_state host = {(uint64_t)given[0], (uint64_t)given[1] + 8, nullptr, nullptr}, philox = host;
    if (captured)
        philox = {0, 8, given, given + 1};
    describe("case %lld: %lld of dtype %d, p %g%s%s%s", (long long)number, (long long)count, dtype, p,
             adds ? ", residual" : "", captured ? ", captured" : "", in_place ? ", in place" : "");
    std::vector<double> x, r, expected((size_t)count);
    for (int64_t i = 0; i < count; i++)
        x.push_back(input[i]), r.push_back(residual[i]);
    if (adds)
        expect_success(
            cuda_ops_dropout_add_cpu(expected.data(), x.data(), r.data(), 0, count, p, host, CUDA_OPS_FLOAT64));
    else
        expect_success(cuda_ops_dropout_cpu(expected.data(), x.data(), 0, count, p, host, CUDA_OPS_FLOAT64));
    void *const to = in_place ? input.data : output.data;
    if (adds)
        expect_success(
            cuda_ops_dropout_add_forward_cuda(to, state, input.data, residual.data, count, p, philox, dtype, nullptr));
    else
        expect_success(cuda_ops_dropout_forward_cuda(to, state, input.data, count, p, philox, dtype, nullptr));
    for (int64_t i = 0; i < count; i++)
        expect_near("output", i, get(to, i, dtype), expected[(size_t)i],
                    rounding_of(dtype) * (fabs(expected[(size_t)i]) + fabs(r[(size_t)i]) * 2));
    if (state[0] != (int64_t)host.seed || state[1] != (int64_t)host.offset)
        fail("the state is %lld, %lld", (long long)state[0], (long long)state[1]);
    expect_success(cuda_ops_dropout_cpu(expected.data(), r.data(), 0, count, p, host, CUDA_OPS_FLOAT64));
    expect_success(cuda_ops_dropout_backward_cuda(grad.data, residual.data, state, count, p, dtype, nullptr));
    for (int64_t i = 0; i < count; i++)
        expect_near("grad_input", i, grad[i], expected[(size_t)i], rounding_of(dtype) * fabs(expected[(size_t)i]));
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "dropout", dropout);
}
