// 16 bytes from an even address: the aligned vectors around it are loaded, and the bytes are cut out of them.
#ifndef CUDA_OPS_COMMON_UNALIGNED_VECTOR_CUH
#define CUDA_OPS_COMMON_UNALIGNED_VECTOR_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// The two vectors around 16 bytes, which begin `behind` bytes after the first one's start. Apart from the cut, so that
// several can be in flight.
struct VectorsAround {
    uint4 low, high;
    int behind;
};

// Whether those around the 16 bytes at `from` lie in [begin, end), what may be read.
__device__ __forceinline__ bool are_readable_around(const void *from, const void *begin, const void *end)
{
    const int behind = (int)((uintptr_t)from % 16);
    const char *const aligned = (const char *)from - behind;
    return aligned >= (const char *)begin && aligned + (behind ? 32 : 16) <= (const char *)end;
}

// Zeros, and nothing is read, unless `there`.
__device__ __forceinline__ VectorsAround load_around(const void *from, bool there)
{
    VectorsAround around = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), (int)((uintptr_t)from % 16)};
    if (there) {
        const uint4 *const aligned = (const uint4 *)((const char *)from - around.behind);
        around.low = aligned[0];
        if (around.behind)
            around.high = aligned[1];
    }
    return around;
}

__device__ __forceinline__ uint4 cut(const VectorsAround &around)
{
    uint32_t word[8] = {around.low.x,  around.low.y,  around.low.z,  around.low.w,
                        around.high.x, around.high.y, around.high.z, around.high.w};
    if (around.behind & 8)
#pragma unroll
        for (int i = 0; i < 6; i++)
            word[i] = word[i + 2];
    if (around.behind & 4)
#pragma unroll
        for (int i = 0; i < 5; i++)
            word[i] = word[i + 1];
    const int bits = around.behind % 4 * 8;
    return make_uint4(__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
                      __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits));
}

#endif
