// csrc/cuda/ptx/mma.cuh, emulated: m16n8k16 of halves, m16n8k8 of TF32.
#ifndef CUDA_OPS_PTX_MMA_CUH
#define CUDA_OPS_PTX_MMA_CUH

#include "common/half.cuh"

template <typename T>
static inline void mma_sync(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    uint64_t low[32], high[32], right[32];
    emulation::exchange(0xffffffffu, (uint64_t)a[1] << 32 | a[0], low);
    emulation::exchange(0xffffffffu, (uint64_t)a[3] << 32 | a[2], high);
    emulation::exchange(0xffffffffu, (uint64_t)b1 << 32 | b0, right);
    const auto value = [](uint64_t registers, int which) { // of four halves in two registers
        const uint16_t bits = (uint16_t)(registers >> 16 * which);
        return std::is_same_v<T, __half> ? cvt_f32_f16(bits) : cvt_f32_bf16(bits);
    };
    const int g = emulation::lane() / 4, t = emulation::lane() % 4;
    const auto single = [](uint64_t registers, int which) {
        return __uint_as_float((uint32_t)(registers >> 32 * which) & ~0x1fffu); // 19 bits are read
    };
    for (int i = 0; i < 4; i++) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float sum = d[i];
        if (sizeof(T) == 4) {
            for (int k = 0; k < 8; k++)
                sum += single((k < 4 ? low : high)[row % 8 * 4 + k % 4], row / 8) *
                       single(right[column * 4 + k % 4], k / 4);
            d[i] = sum;
            continue;
        }
        for (int k = 0; k < 16; k++) {
            const uint64_t *const halves = k < 8 ? low : high;
            const uint64_t left = halves[row % 8 * 4 + k % 8 / 2];
            sum += value(left, row / 8 * 2 + k % 2) * value(right[column * 4 + k % 8 / 2], k / 8 * 2 + k % 2);
        }
        d[i] = sum;
    }
}

template <typename T>
static inline void mma_sync(float &d0, float &d1, float &d2, float &d3, const uint32_t (&a)[4], uint32_t b0,
                            uint32_t b1)
{
    float d[4] = {d0, d1, d2, d3};
    mma_sync<T>(d, a, b0, b1);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

#endif
