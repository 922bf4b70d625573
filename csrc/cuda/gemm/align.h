// Copies of operands whose rows begin at multiples of 16 bytes, as TMA wants them (gemm/align.cu).
#ifndef CUDA_OPS_GEMM_ALIGN_H
#define CUDA_OPS_GEMM_ALIGN_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda_ops/core.h"

// `matrices` matrices of rows x columns, rows `pitch` apart and matrices `stride`, in elements of `size` bytes (2 or
// 4). to: aligned to 16 bytes; dense but for rows that are rounded up to 16 bytes or more, of which the rest is
// undefined.
struct AlignedCopy {
    const void *from;
    void *to;
    int64_t rows, columns, matrices, pitch, stride;
    int size;
    bool transposes; // to[matrix][column][row] instead of to[matrix][row][column]; of 4 bytes alone
};

// The pitch of the copy's rows, in elements, and the bytes of the copy, a multiple of 256.
int64_t aligned_copy_pitch(const AlignedCopy &copy);
int64_t aligned_copy_bytes(const AlignedCopy &copy);

// Whether its numbers fit the kernel's 32 bits.
bool can_copy_aligned(const AlignedCopy &copy);

// One or two copies, by one launch.
cuda_ops_status copy_aligned(const AlignedCopy *copies, int count, cudaStream_t stream);

#endif
