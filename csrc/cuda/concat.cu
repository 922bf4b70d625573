// concat: output's columns are those of the inputs, one behind the other. One launch for up to CUDA_OPS_CONCAT_INPUTS
// inputs, whose addresses travel as the kernel's argument, in a shorter one where they are few; a block copies a chunk of
// one of them, found by bisection, in words of up to 16 bytes, as large as that input's runs and addresses allow. Bound by
// memory: one read and one write; of small inputs by the launches.
#include "cuda_ops/concat.h"

#include "common/common.cuh"
#include "common/wide_division.cuh"

static constexpr int THREADS = 256;
static constexpr int IN_FLIGHT = 4;
static constexpr int CHUNK = THREADS * IN_FLIGHT; // words
static constexpr int FEW_INPUTS = 64;

struct ConcatInput {
    const void *from;
    int64_t first_chunk, words, offset; // words in all, and of output before the first run
    int64_t run;                        // words
    Divider by_run;
    int word_bytes;
};

template <int INPUTS>
struct ConcatPlan {
    int64_t chunks;
    int64_t pitch; // bytes from run to run
    int count;
    ConcatInput inputs[INPUTS];
};
static_assert(sizeof(ConcatPlan<CUDA_OPS_CONCAT_INPUTS>) <= 32764 - 64, "kernels' arguments have less than 32 KB");

template <typename Word>
__device__ __forceinline__ void copy_chunk(void *output, const ConcatInput &input, int64_t pitch, int64_t chunk)
{
    const int64_t first = (chunk - input.first_chunk) * CHUNK + threadIdx.x;
    Word word[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
        if (first + k * THREADS < input.words)
            word[k] = ((const Word *)input.from)[first + k * THREADS];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++) {
        const int64_t at = first + k * THREADS;
        if (at >= input.words)
            break;
        const int64_t row = input.run == input.words ? 0 : divided(at, input.run, input.by_run);
        ((Word *)output)[input.offset + row * (pitch - input.run) + at] = word[k];
    }
}

template <int INPUTS>
__global__ void __launch_bounds__(THREADS) concat_kernel(void *output, const __grid_constant__ ConcatPlan<INPUTS> plan)
{
    release_successor();
    for (int64_t chunk = blockIdx.x; chunk < plan.chunks; chunk += gridDim.x) {
        int low = 0, high = plan.count - 1; // the last input that begins at the chunk or before
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (plan.inputs[middle].first_chunk <= chunk)
                low = middle;
            else
                high = middle - 1;
        }
        const ConcatInput &input = plan.inputs[low];
        wait_for_predecessor();
        if (input.word_bytes == 16)
            copy_chunk<uint4>(output, input, plan.pitch / 16, chunk);
        else if (input.word_bytes == 8)
            copy_chunk<uint2>(output, input, plan.pitch / 8, chunk);
        else if (input.word_bytes == 4)
            copy_chunk<uint32_t>(output, input, plan.pitch / 4, chunk);
        else
            copy_chunk<uint16_t>(output, input, plan.pitch / 2, chunk);
    }
}

template <int INPUTS>
static cuda_ops_status concat(void *output, const void *const *inputs, const int64_t *cols, int64_t count,
                              int64_t outer, int64_t inner, int element_bytes, cudaStream_t stream)
{
    ConcatPlan<INPUTS> plan = {};
    int64_t offset = 0; // bytes
    for (int64_t i = 0; i < count; i++)
        plan.pitch += cols[i] * inner * element_bytes;
    for (int64_t i = 0; i < count; i++) {
        const int64_t run = cols[i] * inner * element_bytes;
        if (run * outer > 0) {
            ConcatInput &input = plan.inputs[plan.count++];
            // Of one run only the address and the length matter, of several also what lies between them.
            const uintptr_t all = (uintptr_t)inputs[i] | (uintptr_t)output | (uintptr_t)offset | (uintptr_t)run |
                                  (outer > 1 ? (uintptr_t)plan.pitch : 0);
            int word = 16;
            while (all % (uintptr_t)word != 0)
                word /= 2;
            input = {inputs[i], plan.chunks, run * outer / word, offset / word, run / word, wide_divider_by(run / word),
                     word};
            plan.chunks += ceil_div(input.words, CHUNK);
        }
        offset += run;
        if (plan.count == INPUTS || (i == count - 1 && plan.count > 0)) {
            launch_dependent(concat_kernel<INPUTS>, dim3(clamp_grid(plan.chunks)), dim3(THREADS), 0, stream, output,
                             plan);
            const cuda_ops_status status = launch_status();
            if (status != CUDA_OPS_SUCCESS)
                return status;
            plan.count = 0;
            plan.chunks = 0;
        }
    }
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_concat_cuda(void *output, const void *const *inputs, const int64_t *cols,
                                                int64_t count, int64_t outer, int64_t inner, int element_bytes,
                                                cuda_ops_stream stream)
{
    if (element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    return count <= FEW_INPUTS
               ? concat<FEW_INPUTS>(output, inputs, cols, count, outer, inner, element_bytes, stream)
               : concat<CUDA_OPS_CONCAT_INPUTS>(output, inputs, cols, count, outer, inner, element_bytes, stream);
}
