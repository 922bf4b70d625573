// The split of float32 in two numbers of TF32, x = upper + lower, of the operand of gemm's sm90_3xtf32 that wgmma reads from
// shared memory: a copy of each part, K-major, with zeros up to whole groups of 32 along k. A block takes 32 lines and
// 128 of k; a warp stores 32 numbers of a line at a time. Where k is not contiguous they come through shared memory, else
// from the other lanes. Bound by memory: 4 bytes are read and 8 written an element.
#include "common/common.cuh"
#include "gemm/sm90_3xtf32/split.cuh"
#include "gemm/sm90_3xtf32/tile.h"
#include "ptx/wgmma.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE, LINES = 32, GROUPS = 4, DEPTH = GROUPS * SPLIT_GROUP;

struct SplitWork {
    const float *from;
    float *to;
    int64_t lines, k, pitch, stride, to_pitch;
    int64_t across, blocks; // blocks along k, and those of a matrix
};

template <bool K_CONTIGUOUS, bool PERMUTED>
__global__ void __launch_bounds__(THREADS) gemm_split_kernel(const __grid_constant__ SplitWork work)
{
    __shared__ float tile[K_CONTIGUOUS ? 1 : DEPTH][LINES + 1];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t matrix = blockIdx.x / work.blocks, block = blockIdx.x - matrix * work.blocks;
    const int64_t first_line = block / work.across * LINES, first_k = block % work.across * DEPTH;
    const float *const from = work.from + matrix * work.stride;
    float *const upper = work.to + 2 * matrix * work.lines * work.to_pitch;
    float *const lower = upper + work.lines * work.to_pitch;
    // Which of its group's numbers this lane stores.
    const int source = PERMUTED ? split_position(lane) : lane;
    wait_for_predecessor();
    release_successor();
    if constexpr (!K_CONTIGUOUS) {
#pragma unroll
        for (int i = 0; i < DEPTH / WARPS; i++) {
            const int64_t k = first_k + warp + i * WARPS, line = first_line + lane;
            tile[warp + i * WARPS][lane] = k < work.k && line < work.lines ? from[k * work.pitch + line] : 0.0f;
        }
        __syncthreads();
    }
    float x[LINES / WARPS][GROUPS];
#pragma unroll
    for (int i = 0; i < LINES / WARPS; i++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int in = warp + i * WARPS;
            const int64_t line = first_line + in, k = first_k + group * SPLIT_GROUP + lane;
            if constexpr (K_CONTIGUOUS)
                x[i][group] = k < work.k && line < work.lines ? from[line * work.pitch + k] : 0.0f;
            else
                x[i][group] = tile[group * SPLIT_GROUP + source][in];
        }
#pragma unroll
    for (int i = 0; i < LINES / WARPS; i++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int64_t line = first_line + warp + i * WARPS, to = first_k + group * SPLIT_GROUP;
            const float value = K_CONTIGUOUS && PERMUTED ? __shfl_sync(FULL_WARP, x[i][group], source) : x[i][group];
            if (line >= work.lines || to >= work.to_pitch)
                continue;
            const Parts parts = split(value);
            upper[line * work.to_pitch + to + lane] = __uint_as_float(parts.upper);
            lower[line * work.to_pitch + to + lane] = __uint_as_float(parts.lower);
        }
}

cuda_ops_status split_operand(const SplitOperand &operand, cudaStream_t stream)
{
    SplitWork work = {};
    work.from = (const float *)operand.from, work.to = operand.to;
    work.lines = operand.lines, work.k = operand.k;
    work.pitch = operand.pitch, work.stride = operand.stride;
    work.to_pitch = split_pitch(operand.k);
    work.across = ceil_div(work.to_pitch, DEPTH);
    work.blocks = work.across * ceil_div(operand.lines, LINES);
    const int64_t blocks = work.blocks * operand.matrices;
    if (!HAS_SM90A || blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = operand.k_contiguous
                            ? operand.permuted ? gemm_split_kernel<true, true> : gemm_split_kernel<true, false>
                        : operand.permuted ? gemm_split_kernel<false, true>
                                           : gemm_split_kernel<false, false>;
    launch_dependent(kernel, dim3((unsigned int)blocks), THREADS, 0, stream, work);
    return launch_status();
}
