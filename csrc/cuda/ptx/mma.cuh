// mma.sync: d += a * b on the tensor cores, by a warp. With g = lane / 4 and t = lane % 4, a lane holds
//     m16n8k16, 16 bits:  a: (row g, k 2 t and 2 t + 1), (g + 8, the same), (g, 2 t + 8 and 2 t + 9), (g + 8, the same)
//                         b: (k 2 t and 2 t + 1, column g), (k 2 t + 8 and 2 t + 9, g)
//     m16n8k8,   TF32:    a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)    b: (t, g), (t + 4, g)
//     both:               d: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1), in fp32
//     m16n8k8,   fp64:    a, b and d like TF32's
//     m16n8k4,   fp64:    a: (g, t), (g + 8, t)    b: (t, g)    d as above
//     m8n8k4,    fp64:    a: (g, t)    b: (t, g)    d: (g, 2 t), (g, 2 t + 1)
// The 16-bit kinds, TF32 and m8n8k4 are there from sm_80 on, fp64's m16 from sm_90 on. Before sm_80 the functions do
// nothing: a kernel that runs there computes otherwise.
#ifndef CUDA_OPS_PTX_MMA_CUH
#define CUDA_OPS_PTX_MMA_CUH

#include <stdint.h>

#include "common/half.cuh"

#define CUDA_OPS_MMA_SYNC(KIND)                                                                                        \
    asm volatile("mma.sync.aligned." KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// m16n8k16 of __half or __nv_bfloat16, m16n8k8 of float as TF32. The tensor cores read TF32's upper 19 bits and cut off
// the others: cvt_rna_tf32 rounds.
template <typename T>
__device__ __forceinline__ void mma_sync(float &d0, float &d1, float &d2, float &d3, const uint32_t (&a)[4],
                                         uint32_t b0, uint32_t b1)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (sizeof(T) == 4)
        CUDA_OPS_MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32");
    else if constexpr (is_bfloat16<T>)
        CUDA_OPS_MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32");
    else
        CUDA_OPS_MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32");
#else
    (void)d0, (void)d1, (void)d2, (void)d3, (void)a, (void)b0, (void)b1;
#endif
}
template <typename T>
__device__ __forceinline__ void mma_sync(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma_sync<T>(d[0], d[1], d[2], d[3], a, b0, b1);
}
#undef CUDA_OPS_MMA_SYNC

__device__ __forceinline__ void mma_sync_m16n8k8_f64(double (&d)[4], const double (&a)[4], const double (&b)[2])
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
__device__ __forceinline__ void mma_sync_m16n8k4_f64(double (&d)[4], const double (&a)[2], double b)
{
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(b));
}
__device__ __forceinline__ void mma_sync_m8n8k4_f64(double &d0, double &d1, double a, double b)
{
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d0), "+d"(d1)
                 : "d"(a), "d"(b));
}

#endif
