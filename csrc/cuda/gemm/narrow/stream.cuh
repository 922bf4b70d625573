// What narrow's two kernels share: a warp's own pipeline of runs of rows, by cp.async. The rows of an operand follow
// one another without a gap, so that RUN of them are one stretch of memory that begins at a multiple of 16 bytes,
// whatever the length of a row: it is copied as it lies, 16 bytes a lane. No warp waits for another.
#ifndef CUDA_OPS_GEMM_NARROW_STREAM_CUH
#define CUDA_OPS_GEMM_NARROW_STREAM_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/narrow/narrow.h"
#include "gemm/paths.h"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int RUN = NARROW_RUN, WARPS = NARROW_WARPS, THREADS = WARPS * WARP_SIZE;

// Asks for run `run` of an operand whose rows have `row_bytes`, `rows` in all; beyond the last row come zeros.
__device__ __forceinline__ void copy_run(char *to, const char *from, int64_t run, int row_bytes, int64_t rows, int lane)
{
    const int bytes = RUN * row_bytes;
    const char *const first = from + run * bytes;
    const int64_t left = rows * row_bytes - run * bytes;
    const uint32_t shared = shared_address(to);
    if (left >= bytes) {
        for (int at = 16 * lane; at < bytes; at += 16 * WARP_SIZE)
            cp_async_16(shared + at, first + at);
        return;
    }
    for (int at = 16 * lane; at < bytes; at += 16 * WARP_SIZE) {
        if (left - at >= 16) {
            cp_async_16(shared + at, first + at);
            continue;
        }
        // The last bytes of all, and zeros: a copy of fewer than 16 would name 16, some of which are not the operand's.
        // The barrier of wait_for_run shows them to the other lanes.
        for (int byte = at; byte < at + 16; byte += 2)
            *(unsigned short *)(to + byte) = byte < left ? *(const unsigned short *)(first + byte) : (unsigned short)0;
    }
}

// Until the oldest of `stages` runs on their way is there.
__device__ __forceinline__ void wait_for_run(int stages)
{
    if (stages == 4)
        cp_async_wait_group<3>();
    else if (stages == 3)
        cp_async_wait_group<2>();
    else
        cp_async_wait_group<1>();
    __syncwarp();
}

#endif
