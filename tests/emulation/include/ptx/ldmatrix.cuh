// csrc/cuda/ptx/ldmatrix.cuh, emulated: lane i gives the address of a row of matrix i / 8, and gets its elements 2 * (i % 4)
// and the next of row i / 4 of each matrix, or, transposed, of that column.
#ifndef CUDA_OPS_PTX_LDMATRIX_CUH
#define CUDA_OPS_PTX_LDMATRIX_CUH

#include "ptx/shared_memory.cuh"

namespace emulation
{
template <int COUNT, bool TRANSPOSED>
void load_matrices(uint32_t (&m)[COUNT], uint32_t address)
{
    uint64_t addresses[32];
    exchange(0xffffffffu, address, addresses);
    const int row = lane() / 4, column = lane() % 4 * 2;
    for (int i = 0; i < COUNT; i++) {
        uint16_t pair[2];
        for (int e = 0; e < 2; e++) {
            const uint32_t line = (uint32_t)addresses[8 * i + (TRANSPOSED ? column + e : row)];
            if (line % 16 != 0)
                __builtin_trap();
            pair[e] = ((const uint16_t *)shared_pointer(line, 16))[TRANSPOSED ? row : column + e];
        }
        m[i] = (uint32_t)pair[1] << 16 | pair[0];
    }
}
} // namespace emulation

static inline void ldmatrix_x4(uint32_t (&m)[4], uint32_t address)
{
    emulation::load_matrices<4, false>(m, address);
}
static inline void ldmatrix_x4_trans(uint32_t (&m)[4], uint32_t address)
{
    emulation::load_matrices<4, true>(m, address);
}
static inline void ldmatrix_x2(uint32_t &m0, uint32_t &m1, uint32_t address)
{
    uint32_t m[2];
    emulation::load_matrices<2, false>(m, address);
    m0 = m[0], m1 = m[1];
}
static inline void ldmatrix_x2_trans(uint32_t &m0, uint32_t &m1, uint32_t address)
{
    uint32_t m[2];
    emulation::load_matrices<2, true>(m, address);
    m0 = m[0], m1 = m[1];
}

#endif
