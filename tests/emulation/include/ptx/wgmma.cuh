// csrc/cuda/ptx/wgmma.cuh, emulated: of operands in shared memory without a swizzle, products at once instead of later.
#ifndef CUDA_OPS_PTX_WGMMA_CUH
#define CUDA_OPS_PTX_WGMMA_CUH

#include "common/half.cuh"
#include "ptx/shared_memory.cuh"

#define CUDA_OPS_HOPPER_CODE 1
static constexpr bool HAS_SM90A = true;
static constexpr int WARPGROUP = 128;

static inline uint64_t wgmma_descriptor(uint32_t address, int swizzle, uint32_t stride, uint32_t leading = 16)
{
    if (swizzle != 0 || stride % 16 != 0 || leading % 16 != 0)
        __builtin_trap();
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32;
}
static inline void wgmma_fence()
{
}
static inline void wgmma_commit_group()
{
}
template <int PENDING>
static inline void wgmma_wait_group()
{
}
template <int COUNT>
static inline void wgmma_pin(float (&)[COUNT])
{
}

namespace emulation
{
// Element (line, k) of an operand, line being m or n: matrices of 8 x 16 bytes, the next one of lines `stride` bytes
// from the first and the next one of k `leading` bytes.
template <typename T>
float wgmma_element(uint64_t descriptor, bool mn_major, int line, int k)
{
    constexpr int VECTOR = 16 / (int)sizeof(T);
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 14 & 3 || descriptor >> 30 & 3)
        __builtin_trap(); // an address or a distance that reaches beyond its bits
    const uint32_t address =
        start + (mn_major ? line / 8 * stride + k / 8 * leading + k % 8 * 16 + line % 8 * 2
                          : line / 8 * stride + k / VECTOR * leading + line % 8 * 16 + k % VECTOR * (int)sizeof(T));
    const void *const element = shared_pointer(address, sizeof(T));
    if constexpr (sizeof(T) == 4)
        return __uint_as_float(*(const uint32_t *)element);
    else
        return std::is_same_v<T, __half> ? cvt_f32_f16(*(const uint16_t *)element)
                                         : cvt_f32_bf16(*(const uint16_t *)element);
}
} // namespace emulation

template <typename T, int n, int A_MN_MAJOR, int B_MN_MAJOR>
static inline void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)
{
    const int lane = emulation::lane(), row = (int)(threadIdx.x % WARPGROUP) / 32 * 16 + lane / 4;
    for (int i = 0; i < n / 2; i++) {
        float sum = accumulate ? d[i] : 0;
        for (int k = 0; k < 32 / (int)sizeof(T); k++)
            sum += emulation::wgmma_element<T>(a, A_MN_MAJOR, row + 8 * (i / 2 % 2), k) *
                   emulation::wgmma_element<T>(b, B_MN_MAJOR, 8 * (i / 4) + 2 * (lane % 4) + i % 2, k);
        d[i] = sum;
    }
}

#endif
