// The XOR swizzle of shared memory that TMA writes and wgmma reads (ptx/wgmma.cuh), and that kernels with ldmatrix use
// too. Rows have 128 or 64 bytes, and a tile is aligned to eight rows. The 16-byte vectors of a row are permuted by XOR
// of their index with the row's, modulo 8; of 64 bytes two rows at a time, modulo 4. A vector of eight consecutive rows
// then meets different banks.
#ifndef CUDA_OPS_COMMON_SWIZZLE_CUH
#define CUDA_OPS_COMMON_SWIZZLE_CUH

// Where vector `vector` of row `row` lies in the row. A tile's offset is row * ROW_BYTES + 16 * this; it is written out
// where it is used, since the order of the additions changes the machine code.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled_vector(int row, int vector)
{
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "the swizzles of 128 and 64 bytes");
    return vector ^ (ROW_BYTES == 128 ? row & 7 : row >> 1 & 3);
}

#endif
