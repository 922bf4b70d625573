// concat: up to 270 inputs of random widths, alignments and element sizes, byte by byte.
#include "cases.h"
#include "cuda_ops/concat.h"

using namespace emulation;

static void concat(int64_t number)
{
    const int bytes = 2 << random_in(0, 2);
    const int64_t count = one_in(10) ? (one_in(2) ? random_in(60, 70) : random_in(250, 270)) : random_in(1, 6),
                  outer = one_in(3) ? 1 : random_size(40);
    const int64_t inner = one_in(3) ? 1 : random_size(24), most = 20000 / (count * outer * inner) + 1;
    std::vector<int64_t> cols;
    std::vector<const void *> inputs;
    int64_t all = 0;
    for (int64_t i = 0; i < count; i++) {
        cols.push_back(one_in(10) ? 0 : random_size(most));
        all += cols.back();
        const size_t size = (size_t)(outer * cols.back() * inner * bytes);
        unsigned char *const input = (unsigned char *)device_memory(size, random_phase(bytes));
        for (size_t k = 0; k < size; k++)
            input[k] = (unsigned char)random_below(256);
        inputs.push_back(input);
    }
    const int64_t size = outer * all * inner;
    unsigned char *const output = (unsigned char *)device_memory((size_t)(size * bytes), random_phase(bytes));
    describe("case %lld: %lld inputs of %lld columns in all, outer %lld, inner %lld, %d bytes", (long long)number,
             (long long)count, (long long)all, (long long)outer, (long long)inner, bytes);
    expect_success(cuda_ops_concat_cuda(output, inputs.data(), cols.data(), count, outer, inner, bytes, nullptr));
    std::vector<unsigned char> expected((size_t)(size * bytes));
    expect_success(
        cuda_ops_concat_cpu(expected.data(), inputs.data(), cols.data(), count, outer, inner, 0, size, bytes));
    for (int64_t i = 0; i < size * bytes; i++)
        if (output[i] != expected[(size_t)i])
            fail("byte %lld is wrong", (long long)i);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "concat", concat);
}
