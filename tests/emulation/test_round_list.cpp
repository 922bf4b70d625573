// round_list: up to 270 arrays of random sizes and alignments, bit by bit what the CPU rounds each to.
#include "cases.h"
#include "cuda_ops/halves_cpu.h"
#include "cuda_ops/round_list.h"

using namespace emulation;

static void round_list(int64_t number)
{
    const cuda_ops_dtype dtype = one_in(2) ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16;
    const int64_t count = one_in(10) ? (one_in(2) ? random_in(120, 135) : random_in(250, 270)) : random_in(1, 6);
    std::vector<Array> from, to;
    std::vector<const float *> inputs;
    std::vector<void *> outputs;
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < count; i++) {
        counts.push_back(one_in(10) ? 0 : random_size(20000 / count + 1));
        from.push_back(Array(counts.back(), CUDA_OPS_FLOAT32));
        for (int64_t k = 0; k < counts.back(); k++)
            ((float *)from.back().data)[k] = (float)random_in(-1 << 24, 1 << 24) * exp2f((float)random_in(-40, -8));
        to.push_back(Array(counts.back(), dtype));
        inputs.push_back((const float *)from.back().data);
        outputs.push_back(to.back().data);
    }
    describe("case %lld: %lld arrays, dtype %d", (long long)number, (long long)count, dtype);
    expect_success(cuda_ops_round_list_cuda(outputs.data(), inputs.data(), counts.data(), count, dtype, nullptr));
    for (int64_t i = 0; i < count; i++) {
        std::vector<uint16_t> expected((size_t)counts[(size_t)i] + 1);
        expect_success(cuda_ops_round_cpu(expected.data(), inputs[(size_t)i], counts[(size_t)i], dtype));
        for (int64_t k = 0; k < counts[(size_t)i]; k++)
            if (((const uint16_t *)outputs[(size_t)i])[k] != expected[(size_t)k])
                fail("element %lld of array %lld is wrong", (long long)k, (long long)i);
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "round_list", round_list);
}
