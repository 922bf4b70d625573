// wgmma (sm_90a): d (64 x n) = a * b, or d + a * b, asynchronously, by a warpgroup, four consecutive warps of which
// warp w has rows 16 w to 16 w + 15. With g = lane / 4 and t = lane % 4, a lane holds of its warp's rows
//     d[i]: row g + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 t + i % 2, in fp32
//     a of 16 bits, where it comes from registers: (g, k 2 t and 2 t + 1), (g + 8, the same), (g, 2 t + 8 and 2 t + 9),
//         (g + 8, the same): four of d over 16 columns, packed, are the a of a product whose k are these columns
//     a of TF32: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
// Other operands lie in shared memory, swizzled, and are described. The words of PTX's manual are kept: "K-major" means
// that neighbours along k are neighbours in memory, "MN-major" that neighbours along m (of a) or n (of b) are.
#ifndef CUDA_OPS_PTX_WGMMA_CUH
#define CUDA_OPS_PTX_WGMMA_CUH

#include <stdint.h>

#include "common/half.cuh"

// Machine code for sm_90a is made: kernels that take its instructions are empty otherwise, and are not launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUDA_OPS_HOPPER_CODE 1
#endif

// Whether this build has such code, which the host asks before it launches.
#if defined(CUDA_OPS_SM90A)
static constexpr bool HAS_SM90A = true;
#else
static constexpr bool HAS_SM90A = false;
#endif

static constexpr int WARPGROUP = 128;

// ---- operands in shared memory ----

// A row of a swizzled tile; its eight 16-byte vectors are permuted by exclusive or of their index with address bits 7
// to 9: vector v of row r lies at 128 r + 16 * (v ^ r % 8).
static constexpr int SWIZZLE_ROW = 128;
static constexpr int SWIZZLE_ATOM = 8 * SWIZZLE_ROW; // the pattern's period, and the alignment of every tile

// With 64 bytes a row the four vectors of each half of 128 bytes are permuted, by address bits 7 and 8.
enum { WGMMA_SWIZZLE_128 = 1, WGMMA_SWIZZLE_64 = 2 };

// Describes a tile to wgmma, whose rows (of m or n where it is K-major, else of k) have 128 or 64 bytes; `stride` bytes
// from one group of 8 rows to the next. MN-major: `leading` bytes from one column of such rows to the next; K-major:
// of no meaning. The pattern is one of addresses: the tile's memory begins at a multiple of 1024 or 512 bytes, but
// `address` may be that of any row, and 32 bytes (of k) apart within it.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int swizzle, uint32_t stride,
                                                     uint32_t leading = 16)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)swizzle << 62;
}
// The same tile, so many bytes on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes)
{
    return descriptor + (bytes >> 4);
}

// ---- order ----

// Before the first wgmma of a batch: registers written by ordinary instructions become visible to it.
__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most PENDING of this warpgroup's latest groups are still running: of those before, d may be touched, and a
// in registers be overwritten.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: d is complete here, or is about to be handed to wgmma. What reads or writes it is not moved past a
// wait or an issue, of whose effect on these registers the compiler's front end knows nothing.
template <int COUNT>
__device__ __forceinline__ void wgmma_pin(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}
// No instruction: d holds nothing of use, and a product that overwrites it is about to come. Without it the registers
// would be kept from the last use to then, since asm cannot say that d is read only where the product accumulates.
template <int COUNT>
__device__ __forceinline__ void wgmma_forget(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "=f"(d[i])::"memory");
}
template <int ROWS>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[ROWS][4])
{
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// ---- wgmma.mma_async ----

// The instruction names every register of d, n / 2 a thread: as text, by tens, and as operands.
#define WGMMA_TEN(t)                                                                                                   \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define WGMMA_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_TEXT_10 WGMMA_TEXT_8 ", %8, %9"
#define WGMMA_TEXT_16 WGMMA_TEXT_10 ", %10, %11, %12, %13, %14, %15"
#define WGMMA_TEXT_30 WGMMA_TEXT_10 ", " WGMMA_TEN(1) ", " WGMMA_TEN(2)
#define WGMMA_TEXT_32 WGMMA_TEXT_30 ", %30, %31"
#define WGMMA_TEXT_40 WGMMA_TEXT_30 ", " WGMMA_TEN(3)
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_TEXT_60 WGMMA_TEXT_40 ", " WGMMA_TEN(4) ", " WGMMA_TEN(5)
#define WGMMA_TEXT_64 WGMMA_TEXT_60 ", %60, %61, %62, %63"
#define WGMMA_TEXT_80 WGMMA_TEXT_60 ", " WGMMA_TEN(6) ", " WGMMA_TEN(7)
#define WGMMA_TEXT_90 WGMMA_TEXT_80 ", " WGMMA_TEN(8)
#define WGMMA_TEXT_96 WGMMA_TEXT_90 ", %90, %91, %92, %93, %94, %95"
#define WGMMA_TEXT_110 WGMMA_TEXT_90 ", " WGMMA_TEN(9) ", " WGMMA_TEN(10)
#define WGMMA_TEXT_112 WGMMA_TEXT_110 ", %110, %111"
#define WGMMA_TEXT_120 WGMMA_TEXT_110 ", " WGMMA_TEN(11)
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SIXTEEN(i) WGMMA_FOUR(i), WGMMA_FOUR(i + 4), WGMMA_FOUR(i + 8), WGMMA_FOUR(i + 12)
#define WGMMA_OPERANDS_8 WGMMA_FOUR(0), WGMMA_FOUR(4)
#define WGMMA_OPERANDS_16 WGMMA_SIXTEEN(0)
#define WGMMA_OPERANDS_32 WGMMA_OPERANDS_16, WGMMA_SIXTEEN(16)
#define WGMMA_OPERANDS_40 WGMMA_OPERANDS_32, WGMMA_FOUR(32), WGMMA_FOUR(36)
#define WGMMA_OPERANDS_48 WGMMA_OPERANDS_32, WGMMA_SIXTEEN(32)
#define WGMMA_OPERANDS_64 WGMMA_OPERANDS_48, WGMMA_SIXTEEN(48)
#define WGMMA_OPERANDS_80 WGMMA_OPERANDS_64, WGMMA_SIXTEEN(64)
#define WGMMA_OPERANDS_96 WGMMA_OPERANDS_80, WGMMA_SIXTEEN(80)
#define WGMMA_OPERANDS_112 WGMMA_OPERANDS_96, WGMMA_SIXTEEN(96)
#define WGMMA_OPERANDS_120 WGMMA_OPERANDS_112, WGMMA_FOUR(112), WGMMA_FOUR(116)
#define WGMMA_OPERANDS_128 WGMMA_OPERANDS_112, WGMMA_SIXTEEN(112)

// FORM for every n that some kernel asks for: n, the number of d's registers, which is that of the first operand after
// them too, and the numbers of those that follow.
#define WGMMA_EACH_N(FORM, KIND)                                                                                       \
    FORM(16, 8, 9, 10, 11, 12, 13, 14, KIND)                                                                           \
    FORM(32, 16, 17, 18, 19, 20, 21, 22, KIND)                                                                         \
    FORM(64, 32, 33, 34, 35, 36, 37, 38, KIND)                                                                         \
    FORM(80, 40, 41, 42, 43, 44, 45, 46, KIND)                                                                         \
    FORM(96, 48, 49, 50, 51, 52, 53, 54, KIND)                                                                         \
    FORM(128, 64, 65, 66, 67, 68, 69, 70, KIND)                                                                        \
    FORM(160, 80, 81, 82, 83, 84, 85, 86, KIND)                                                                        \
    FORM(192, 96, 97, 98, 99, 100, 101, 102, KIND)                                                                     \
    FORM(224, 112, 113, 114, 115, 116, 117, 118, KIND)                                                                 \
    FORM(240, 120, 121, 122, 123, 124, 125, 126, KIND)                                                                 \
    FORM(256, 128, 129, 130, 131, 132, 133, 134, KIND)
template <int n>
static constexpr bool wgmma_has_n = n == 16 || n == 32 || n == 64 || n == 80 || n == 96 || n == 128 || n == 160 ||
                                    n == 192 || n == 224 || n == 240 || n == 256;

#define WGMMA_FROM_SHARED(N, P0, P1, P2, P3, P4, P5, P6, KIND)                                                         \
    if constexpr (n == N)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" WGMMA_TEXT_##P0              \
                     "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}"                                          \
                     : WGMMA_OPERANDS_##P0                                                                             \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(A_MN_MAJOR), "n"(B_MN_MAJOR));
#define WGMMA_FROM_SHARED_TF32(N, P0, P1, P2, P3, P4, P5, P6, KIND)                                                    \
    if constexpr (n == N)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32." KIND "." KIND " {" WGMMA_TEXT_##P0               \
                     "}, %" #P0 ", %" #P1 ", p, 1, 1;\n}"                                                              \
                     : WGMMA_OPERANDS_##P0                                                                             \
                     : "l"(a), "l"(b), "r"(accumulate));

// 32 bytes of k: 16 of __half or __nv_bfloat16, 8 of float, of which wgmma takes TF32's bits. Both operands described;
// MN-major where that is 1, which TF32 cannot be. accumulate = 0 overwrites d.
template <typename T, int n, int A_MN_MAJOR, int B_MN_MAJOR>
__device__ __forceinline__ void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)
{
    static_assert(wgmma_has_n<n>, "columns with a text");
    if constexpr (sizeof(T) == 4) {
        static_assert(!A_MN_MAJOR && !B_MN_MAJOR, "TF32 is K-major");
        WGMMA_EACH_N(WGMMA_FROM_SHARED_TF32, "tf32")
    } else if constexpr (is_bfloat16<T>) {
        WGMMA_EACH_N(WGMMA_FROM_SHARED, "bf16")
    } else {
        WGMMA_EACH_N(WGMMA_FROM_SHARED, "f16")
    }
}

#define WGMMA_FROM_REGISTERS(N, P0, P1, P2, P3, P4, P5, P6, KIND)                                                      \
    if constexpr (n == N)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" WGMMA_TEXT_##P0              \
                     "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";\n}"                    \
                     : WGMMA_OPERANDS_##P0                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(B_MN_MAJOR));
#define WGMMA_FROM_REGISTERS_TF32(N, P0, P1, P2, P3, P4, P5, P6, KIND)                                                 \
    if constexpr (n == N)                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32." KIND "." KIND " {" WGMMA_TEXT_##P0               \
                     "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1;\n}"                              \
                     : WGMMA_OPERANDS_##P0                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));

// The same with a in registers.
template <typename T, int n, int B_MN_MAJOR>
__device__ __forceinline__ void wgmma(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate)
{
    static_assert(wgmma_has_n<n>, "columns with a text");
    if constexpr (sizeof(T) == 4) {
        static_assert(!B_MN_MAJOR, "TF32 is K-major");
        WGMMA_EACH_N(WGMMA_FROM_REGISTERS_TF32, "tf32")
    } else if constexpr (is_bfloat16<T>) {
        WGMMA_EACH_N(WGMMA_FROM_REGISTERS, "bf16")
    } else {
        WGMMA_EACH_N(WGMMA_FROM_REGISTERS, "f16")
    }
}

#endif
