// permute_contiguous: sizes, orders, gaps between rows, element sizes and alignments at random, bit by bit.
#include "cases.h"
#include "cuda_ops/permute_contiguous.h"

using namespace emulation;

static void permute(int64_t number)
{
    const int dims = (int)random_in(1, 5), bytes = 2 << random_in(0, 2);
    int64_t sizes[5], strides[5], left = 60000;
    int order[5];
    for (int i = 0; i < dims; i++) {
        sizes[i] = one_in(4) ? random_in(1, 9) : random_size(left < 700 ? left : 700);
        if (sizes[i] > left)
            sizes[i] = left;
        left /= sizes[i];
        order[i] = i;
    }
    for (int i = dims - 1; i > 0; i--) {
        const int j = (int)random_in(0, i), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
    int64_t step = 1, extent = 1, count = 1; // order: which dimension is innermost in input
    for (int i = 0; i < dims; i++) {
        const int d = order[i];
        strides[d] = step;
        step *= sizes[d];
        if (one_in(8))
            step += random_in(0, 3) * (one_in(2) ? 8 : 1);
        extent += (sizes[d] - 1) * strides[d];
        count *= sizes[d];
    }
    if (count > 70000)
        return;
    cuda_ops_permutation p = {};
    if (!cuda_ops_permute_collapse(&p, dims, sizes, strides))
        fail("too many dimensions");
    const size_t in_phase = random_phase(bytes), out_phase = random_phase(bytes);
    unsigned char *const input = (unsigned char *)device_memory((size_t)(extent * bytes), in_phase);
    unsigned char *const output = (unsigned char *)device_memory((size_t)(count * bytes), out_phase);
    for (int64_t i = 0; i < extent * bytes; i++)
        input[i] = (unsigned char)random_below(256);
    char text[512];
    int at = 0;
    for (int i = 0; i < p.dims; i++)
        at +=
            snprintf(text + at, sizeof text - (size_t)at, " %lld@%lld", (long long)p.sizes[i], (long long)p.strides[i]);
    describe("case %lld: %d bytes at %zu to %zu,%s", (long long)number, bytes, in_phase, out_phase, text);
    expect_success(cuda_ops_permute_contiguous_cuda(output, input, &p, bytes, nullptr));
    std::vector<unsigned char> expected((size_t)(count * bytes));
    expect_success(cuda_ops_permute_contiguous_cpu(expected.data(), input, &p, 0, count, bytes));
    for (int64_t i = 0; i < count * bytes; i++)
        if (output[i] != expected[(size_t)i])
            fail("byte %lld of element %lld is wrong", (long long)(i % bytes), (long long)(i / bytes));
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "permute_contiguous", permute);
}
