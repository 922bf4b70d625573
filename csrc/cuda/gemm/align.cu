// Copies of operands whose rows begin at multiples of 16 bytes: to[row][column] = from[row][column], or transposed.
// Plain, a thread stores two vectors of 16 bytes. They begin at any even address in `from`, so that each is cut from the
// two aligned vectors around it (common/unaligned_vector.cuh); its neighbour loads the second one again, from the L1
// cache. Only what lies beside the first and the last element of all is left out. Transposed, a block takes tiles of 32 x 32 through shared memory. Bound
// by memory: each byte is read and written once.
#include "gemm/align.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "common/unaligned_vector.cuh"

static constexpr int THREADS = 256, VECTORS = 2; // of a thread
static constexpr int TILE = 32, TILE_ROWS = THREADS / TILE;

// A copy as the kernel takes it; pitches and strides in bytes.
struct AlignedCopyWork {
    const char *from, *end; // the first element, and behind the last one
    char *to;
    int64_t pitch, stride, to_pitch;
    uint32_t rows, columns, row_vectors, vectors; // vectors: of all matrices
    Divider by_row_vectors, by_rows;
    int64_t tiles; // transposed: of all matrices; else 0
};

struct AlignedCopies {
    AlignedCopyWork copy[2];
    unsigned int first_blocks; // blocks of the first copy
};

__device__ __forceinline__ void copy_vectors(const AlignedCopyWork &work, unsigned int block)
{
    const char *from[VECTORS];
    VectorsAround around[VECTORS];
    bool whole[VECTORS];
    const uint32_t first = block * THREADS * VECTORS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) { // all loads before the first use
        const uint32_t index = first + i * THREADS, line = work.by_row_vectors.of(index);
        const uint32_t matrix = work.by_rows.of(line);
        from[i] = work.from + matrix * work.stride + (line - matrix * work.rows) * work.pitch +
                  (int64_t)(index - line * work.row_vectors) * 16;
        whole[i] = index < work.vectors && are_readable_around(from[i], work.from, work.end);
        around[i] = load_around(from[i], whole[i]);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const uint32_t index = first + i * THREADS;
        if (index >= work.vectors)
            break;
        uint4 *const to = reinterpret_cast<uint4 *>(work.to) + index;
        if (whole[i])
            *to = cut(around[i]);
        else
            for (int e = 0; e < 8; e++) {
                const uint16_t *const element = reinterpret_cast<const uint16_t *>(from[i]) + e;
                if ((const char *)element < work.end)
                    reinterpret_cast<uint16_t *>(to)[e] = *element;
            }
    }
}

__device__ __forceinline__ void copy_tile(const AlignedCopyWork &work, unsigned int block)
{
    __shared__ float tile[TILE][TILE + 1];
    const int64_t across = ceil_div((int64_t)work.columns, TILE), all = across * ceil_div((int64_t)work.rows, TILE);
    const int64_t matrix = block / all, in = block - matrix * all;
    const int64_t row = in / across * TILE, column = in % across * TILE;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    const char *const from = work.from + matrix * work.stride;
    char *const to = work.to + matrix * work.columns * work.to_pitch;
#pragma unroll
    for (int i = y; i < TILE; i += TILE_ROWS)
        if (row + i < work.rows && column + x < work.columns)
            tile[i][x] = reinterpret_cast<const float *>(from + (row + i) * work.pitch)[column + x];
    __syncthreads();
#pragma unroll
    for (int i = y; i < TILE; i += TILE_ROWS)
        if (column + i < work.columns && row + x < work.rows)
            reinterpret_cast<float *>(to + (column + i) * work.to_pitch)[row + x] = tile[x][i];
}

__global__ void __launch_bounds__(THREADS) gemm_align_kernel(const __grid_constant__ AlignedCopies copies)
{
    wait_for_predecessor();
    release_successor();
    const bool second = blockIdx.x >= copies.first_blocks;
    const AlignedCopyWork &work = copies.copy[second];
    const unsigned int block = second ? blockIdx.x - copies.first_blocks : blockIdx.x;
    if (work.tiles > 0)
        copy_tile(work, block);
    else
        copy_vectors(work, block);
}

int64_t aligned_copy_pitch(const AlignedCopy &copy)
{
    // Of whole lines, or else of one or two whole sectors, where rows do not become much longer for it: TMA is slower
    // on rows that begin anywhere else (row_nanoseconds in gemm.cu).
    const int64_t row = (copy.transposes ? copy.rows : copy.columns) * copy.size;
    int64_t unit = 128;
    while (unit > 16 && (ceil_div(row, unit) * unit - row) * 8 > row)
        unit /= 2;
    return ceil_div(row, unit) * unit / copy.size;
}

int64_t aligned_copy_bytes(const AlignedCopy &copy)
{
    const int64_t lines = copy.transposes ? copy.columns : copy.rows;
    return ceil_div(lines * aligned_copy_pitch(copy) * copy.size * copy.matrices, 256) * 256;
}

bool can_copy_aligned(const AlignedCopy &copy)
{
    // Also of the indices beside the last vector that the last block's threads begin with.
    return copy.rows <= INT32_MAX && copy.columns <= INT32_MAX && copy.matrices <= INT32_MAX &&
           aligned_copy_bytes(copy) / 16 < INT32_MAX - THREADS * VECTORS;
}

static AlignedCopyWork work_of(const AlignedCopy &copy)
{
    AlignedCopyWork work = {};
    work.from = (const char *)copy.from;
    work.end =
        work.from + ((copy.matrices - 1) * copy.stride + (copy.rows - 1) * copy.pitch + copy.columns) * copy.size;
    work.to = (char *)copy.to;
    work.pitch = copy.pitch * copy.size, work.stride = copy.stride * copy.size;
    work.to_pitch = aligned_copy_pitch(copy) * copy.size;
    work.rows = (uint32_t)copy.rows, work.columns = (uint32_t)copy.columns;
    if (copy.transposes) {
        work.tiles = ceil_div(copy.rows, TILE) * ceil_div(copy.columns, TILE) * copy.matrices;
    } else {
        work.row_vectors = (uint32_t)(work.to_pitch / 16);
        work.vectors = (uint32_t)(work.row_vectors * copy.rows * copy.matrices);
        work.by_row_vectors = divider_by(work.row_vectors);
        work.by_rows = divider_by(work.rows);
    }
    return work;
}

static int64_t blocks_of(const AlignedCopyWork &work)
{
    return work.tiles > 0 ? work.tiles : ceil_div((int64_t)work.vectors, THREADS * VECTORS);
}

cuda_ops_status copy_aligned(const AlignedCopy *copies, int count, cudaStream_t stream)
{
    AlignedCopies all = {};
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        if (!can_copy_aligned(copies[i]))
            return CUDA_OPS_INVALID_ARGUMENT;
        all.copy[i] = work_of(copies[i]);
        blocks += blocks_of(all.copy[i]);
        if (i == 0)
            all.first_blocks = (unsigned int)blocks;
    }
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(gemm_align_kernel, dim3((unsigned int)blocks), THREADS, 0, stream, all);
    return launch_status();
}
