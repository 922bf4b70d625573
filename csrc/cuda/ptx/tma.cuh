// What Hopper's kernels are built from, one PTX instruction a function: bulk tensor copies (TMA), wgmma, the hand-over
// of registers; mbarrier.cuh has mbarriers and clusters. Rungs 12 and 13 include it. The words of PTX's manual are
// kept: "K-major" means that neighbours along k are neighbours in memory, "MN-major" that neighbours along m (of A) or
// n (of B) are.
#ifndef CUDA_OPS_PTX_TMA_CUH
#define CUDA_OPS_PTX_TMA_CUH

#include <cuda.h> // CUtensorMap; nothing of the driver is linked

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUDA_OPS_HOPPER_CODE 1
#endif

static constexpr int WARPGROUP = 128;
// A row of a tile in shared memory: what the 128-byte swizzle permutes 16-byte pieces within.
static constexpr int SWIZZLE_ROW = 128;
static constexpr int SWIZZLE_ATOM = 8 * SWIZZLE_ROW; // the pattern's period, and the alignment of every tile

// ---- bulk tensor copies; coordinates are (inner, outer, batch) in elements ----

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_in(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner, int outer,
                                        int batch)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(outer), "r"(batch)
                 : "memory");
}
// The same into each block of the cluster whose bit is set in `blocks`, at the same address, with its own barrier told.
__device__ __forceinline__ void copy_in_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier, int inner,
                                                  int outer, int batch, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(inner), "r"(outer), "r"(batch), "h"(blocks)
                 : "memory");
}
// From a map of make_pixel_map: pixels, one after the other as the map walks them, from (x, y, image) on, each moved by
// the offsets, which are a tap's place in the kernel; of each pixel the channels from `channel` on.
__device__ __forceinline__ void copy_in_pixels(uint32_t to, const CUtensorMap *map, uint32_t barrier, int channel,
                                               int x, int y, int image, int offset_x, int offset_y)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(image), "h"((uint16_t)offset_x),
                 "h"((uint16_t)offset_y)
                 : "memory");
}
__device__ __forceinline__ void copy_in_pixels_multicast(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                                         int channel, int x, int y, int image, int offset_x,
                                                         int offset_y, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(image), "h"((uint16_t)offset_x),
                 "h"((uint16_t)offset_y), "h"(blocks)
                 : "memory");
}
__device__ __forceinline__ void copy_out(const CUtensorMap *map, uint32_t from, int inner, int outer, int batch)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(inner), "r"(outer), "r"(batch)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the last `pending` copies out of shared memory have read it.
template <int pending>
__device__ __forceinline__ void wait_copied_out()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Between ordinary stores to shared memory and the copy engine's or wgmma's reading of it.
__device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- warps, warpgroups ----

// Barrier number 1 to 15 among `threads` threads.
__device__ __forceinline__ void named_barrier(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

#if defined(CUDA_OPS_HOPPER_CODE)

template <int registers>
__device__ __forceinline__ void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Four 8 x 8 matrices of 16-bit elements from registers to shared memory; lane l gives the address of row l.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// The same of each matrix transposed: lane l gives the address of column l.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// ---- wgmma ----

// Describes a tile in 128-byte swizzle to wgmma. K-major: rows (of m or n) of 128 bytes, `stride` between groups of 8
// of them, `leading` of no meaning. MN-major: rows (of k) of 128 bytes of m or n, `stride` between groups of 8 of them,
// `leading` between one such column of 128 bytes of m or n and the next.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t leading, uint32_t stride)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}
// The same tile, so many bytes on.
__device__ __forceinline__ uint64_t advance(uint64_t description, uint32_t bytes)
{
    return description + (bytes >> 4);
}

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The accumulators as text and as operands. wgmma names every register of its 64 x N results, N / 2 a thread.
#define WGMMA_TEN(t)                                                                                                   \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define WGMMA_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_TEXT_10 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define WGMMA_TEXT_30 WGMMA_TEXT_10 WGMMA_TEN(1) WGMMA_TEN(2)
#define WGMMA_TEXT_40 WGMMA_TEXT_30 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_TEXT_48 WGMMA_TEXT_30 WGMMA_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_TEXT_60 WGMMA_TEXT_30 WGMMA_TEN(3) WGMMA_TEN(4) WGMMA_TEN(5)
#define WGMMA_TEXT_90 WGMMA_TEXT_60 WGMMA_TEN(6) WGMMA_TEN(7) WGMMA_TEN(8)
#define WGMMA_TEXT_120 WGMMA_TEXT_90 WGMMA_TEN(9) WGMMA_TEN(10) WGMMA_TEN(11)
#define WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(i) WGMMA_FOUR(i), WGMMA_FOUR(i + 4), WGMMA_FOUR(i + 8), WGMMA_FOUR(i + 12)
#define WGMMA_OPERANDS_8 WGMMA_FOUR(0), WGMMA_FOUR(4)
#define WGMMA_OPERANDS_16 WGMMA_16(0)
#define WGMMA_OPERANDS_32 WGMMA_16(0), WGMMA_16(16)
#define WGMMA_OPERANDS_40 WGMMA_OPERANDS_32, WGMMA_FOUR(32), WGMMA_FOUR(36)
#define WGMMA_OPERANDS_48 WGMMA_OPERANDS_32, WGMMA_16(32)
#define WGMMA_OPERANDS_64 WGMMA_OPERANDS_32, WGMMA_16(32), WGMMA_16(48)
#define WGMMA_OPERANDS_80 WGMMA_OPERANDS_64, WGMMA_16(64)
#define WGMMA_OPERANDS_96 WGMMA_OPERANDS_80, WGMMA_16(80)
#define WGMMA_OPERANDS_128 WGMMA_OPERANDS_96, WGMMA_16(96), WGMMA_16(112)

// One instruction for n columns: KIND is its text after "n<columns>", A and B operands' numbers follow the
// accumulators.
#define WGMMA_SHARED(N, KIND, TEXT, OPERANDS, A, B, C, TAIL)                                                           \
    if constexpr (n == N)                                                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" TEXT "}, %" #A ", %" #B ", p, 1, 1" TAIL ";\n}"      \
                 : OPERANDS                                                                                            \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(a_mn_major), "n"(b_mn_major))
#define WGMMA_SHARED_ALL(KIND, TAIL_8, TAIL_16, TAIL_32, TAIL_40, TAIL_48, TAIL_64, TAIL_80, TAIL_96, TAIL_128)        \
    WGMMA_SHARED(16, KIND, WGMMA_TEXT_8, WGMMA_OPERANDS_8, 8, 9, 10, TAIL_8);                                          \
    WGMMA_SHARED(32, KIND, WGMMA_TEXT_16, WGMMA_OPERANDS_16, 16, 17, 18, TAIL_16);                                     \
    WGMMA_SHARED(64, KIND, WGMMA_TEXT_30 "%30, %31", WGMMA_OPERANDS_32, 32, 33, 34, TAIL_32);                          \
    WGMMA_SHARED(80, KIND, WGMMA_TEXT_40, WGMMA_OPERANDS_40, 40, 41, 42, TAIL_40);                                     \
    WGMMA_SHARED(96, KIND, WGMMA_TEXT_48, WGMMA_OPERANDS_48, 48, 49, 50, TAIL_48);                                     \
    WGMMA_SHARED(128, KIND, WGMMA_TEXT_60 "%60, %61, %62, %63", WGMMA_OPERANDS_64, 64, 65, 66, TAIL_64);               \
    WGMMA_SHARED(160, KIND, WGMMA_TEXT_60 WGMMA_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",             \
                 WGMMA_OPERANDS_80, 80, 81, 82, TAIL_80);                                                              \
    WGMMA_SHARED(192, KIND, WGMMA_TEXT_90 "%90, %91, %92, %93, %94, %95", WGMMA_OPERANDS_96, 96, 97, 98, TAIL_96);     \
    WGMMA_SHARED(256, KIND, WGMMA_TEXT_120 "%120, %121, %122, %123, %124, %125, %126, %127", WGMMA_OPERANDS_128, 128,  \
                 129, 130, TAIL_128)

// d (64 x n) = a * b, or d + a * b with `accumulate`, of 32 bytes of k; both operands described, in shared memory. One
// warpgroup, asynchronous: d is not to be touched before wgmma_wait. float operands are read as TF32, and K-major.
template <typename T, int n, int a_mn_major, int b_mn_major>
__device__ __forceinline__ void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate)
{
    static_assert(n == 16 || n == 32 || n == 64 || n == 80 || n == 96 || n == 128 || n == 160 || n == 192 || n == 256,
                  "columns with a text");
    if constexpr (sizeof(T) == 4) {
        static_assert(!a_mn_major && !b_mn_major, "TF32 is K-major");
        WGMMA_SHARED_ALL("k8.f32.tf32.tf32", "", "", "", "", "", "", "", "", "");
    } else if constexpr (is_bfloat16<T>) {
        WGMMA_SHARED_ALL("k16.f32.bf16.bf16", ", %11, %12", ", %19, %20", ", %35, %36", ", %43, %44", ", %51, %52",
                         ", %67, %68", ", %83, %84", ", %99, %100", ", %131, %132");
    } else {
        WGMMA_SHARED_ALL("k16.f32.f16.f16", ", %11, %12", ", %19, %20", ", %35, %36", ", %43, %44", ", %51, %52",
                         ", %67, %68", ", %83, %84", ", %99, %100", ", %131, %132");
    }
}

// The same for TF32 with a in registers: a thread's four are rows g and g + 8 (g its quad in the warp) at k = t (t its
// place in the quad), then both at k = t + 4. Nor are they to be touched before wgmma_wait.
#define WGMMA_LEFT(N, TEXT, OPERANDS, A0, A1, A2, A3, B, C)                                                            \
    if constexpr (n == N)                                                                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" TEXT "}, {%" #A0 ", %" #A1 ", %" #A2      \
                 ", %" #A3 "}, %" #B ", p, 1, 1;\n}"                                                                   \
                 : OPERANDS                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
template <int n>
__device__ __forceinline__ void wgmma_tf32(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate)
{
    static_assert(n == 64 || n == 128 || n == 256, "columns that there is text for");
    WGMMA_LEFT(64, WGMMA_TEXT_30 "%30, %31", WGMMA_OPERANDS_32, 32, 33, 34, 35, 36, 37);
    WGMMA_LEFT(128, WGMMA_TEXT_60 "%60, %61, %62, %63", WGMMA_OPERANDS_64, 64, 65, 66, 67, 68, 69);
    WGMMA_LEFT(256, WGMMA_TEXT_120 "%120, %121, %122, %123, %124, %125, %126, %127", WGMMA_OPERANDS_128, 128, 129, 130,
               131, 132, 133);
}

#endif // CUDA_OPS_HOPPER_CODE

// ---- host: tensor maps ----

// A map of `batch` row-major matrices of outer x inner elements, rows `pitch` apart, matrices `stride`, in elements,
// cut into boxes of box_outer x box_inner. box_inner is SWIZZLE_ROW bytes or half of it, and swizzled over as much.
// Elements outside read as zero and are not written. False where the copy engine cannot do it (see map_possible), or
// the driver is too old.
bool make_map(CUtensorMap *map, const void *matrix, cuda_ops_dtype dtype, bool round_to_tf32, int64_t inner,
              int64_t outer, int64_t batch, int64_t pitch, int64_t stride, int box_inner, int box_outer);
// A map of a channels_last picture in the copy engine's im2col mode. It walks a grid of grid_height x grid_width places
// of every image, the first at (start_y, start_x), `step` apart, row by row and image by image; a place may lie outside
// of the picture, where all is zero. A copy takes `pixels` places and of each `channels` channels, SWIZZLE_ROW bytes or
// half of it. False as above, or where a figure is beyond what the mode has bits for.
struct PixelGrid {
    int64_t images, height, width, channels; // of the picture
    int64_t grid_height, grid_width;
    int64_t start_y, start_x, step_y, step_x;
};
bool pixel_map_possible(const PixelGrid &grid, const void *picture, int64_t element_size);
bool make_pixel_map(CUtensorMap *map, const void *picture, cuda_ops_dtype dtype, bool round_to_tf32,
                    const PixelGrid &grid, int channels, int pixels);
// The copy engine wants addresses and pitches in multiples of 16 bytes, and sizes below 2^31 or so.
bool map_possible(const void *matrix, int64_t element_size, int64_t inner, int64_t outer, int64_t batch, int64_t pitch,
                  int64_t stride);

#endif
