// Hopper's warpgroup matrix multiply (wgmma, sm_90a): thin wrappers, A from registers, B from shared memory.
// A warpgroup is four consecutive warps; warp w holds rows 16 w .. 16 w + 15 of A and D. With r = lane / 4, q = lane %
// 4:
//     D[i]: row r + 8 * ((i / 2) % 2), column 8 * (i / 4) + 2 * q + i % 2
//     A[0], A[1], A[2], A[3]: two neighbouring elements of (row r, depth 2q), (r + 8, 2q), (r, 2q + 8), (r + 8, 2q + 8)
// so that four registers of D over 16 columns, packed, are the A of a product whose depth is those columns.
// B lies in shared memory without swizzle, in core matrices of 8 x 16 bytes, each 128 contiguous bytes:
//     depth-contiguous ("K-major"): 8 columns x 8 depths; `wgmma_*`
//     column-contiguous ("MN-major"): 8 depths x 8 columns; `wgmma_*_transposed`
// Core matrices need 16-byte alignment only: a picture stored as [channels / 8][pixel][8 channels] can be read at any
// pixel offset, which is what makes a convolution out of shifted products.
#ifndef CUDA_OPS_PTX_WGMMA_CUH
#define CUDA_OPS_PTX_WGMMA_CUH

#include "ptx/mbarrier.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__) // the host pass parses, and emits nothing

// Before the first wgmma of a batch: registers written by ordinary instructions become visible to it.
__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of this warpgroup's latest groups are still running.
template <int pending>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Shared memory written by ordinary stores (cp.async and stmatrix too) becomes visible to wgmma and bulk copies; each
// writing thread calls it, then a barrier follows.
__device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Operand B in a swizzle of 64 or 128 bytes: rows of that many bytes (a row is a column of B with its depths where B is
// depth-contiguous, else a depth with its columns), `group_bytes` from one group of 8 rows to the next. The 16-byte
// vectors of a row are permuted by exclusive or of their index with address bits 7 and up (2 or 3 bits), so the whole
// has to begin at a multiple of 512 or 1024 bytes, but `address` may be that of any row, and 32 bytes (16 depths) apart
// within it.
enum { WGMMA_SWIZZLE_128 = 1, WGMMA_SWIZZLE_64 = 2 };
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int swizzle, uint32_t group_bytes)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(group_bytes >> 4) << 32 |
           (uint64_t)swizzle << 62;
}

// The operand `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes)
{
    return descriptor + (bytes >> 4);
}
// `value` is the same in the whole warp, and the compiler is to know it: descriptors made of it stay in uniform
// registers, where wgmma wants them. Else each is moved there first, and the tensor cores wait.
__device__ __forceinline__ int warp_uniform(int value)
{
    return __shfl_sync(FULL_WARP, value, 0);
}

// The register lists of the instructions below.
#define WGMMA_F8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define WGMMA_F16(i) WGMMA_F8(i), WGMMA_F8(i + 8)
#define WGMMA_F32 WGMMA_F16(0), WGMMA_F16(16)
#define WGMMA_F64 WGMMA_F16(0), WGMMA_F16(16), WGMMA_F16(32), WGMMA_F16(48)
#define WGMMA_F112                                                                                                     \
    WGMMA_F16(0), WGMMA_F16(16), WGMMA_F16(32), WGMMA_F16(48), WGMMA_F16(64), WGMMA_F16(80), WGMMA_F16(96)
#define WGMMA_F120 WGMMA_F112, WGMMA_F8(112)
#define WGMMA_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_N32 WGMMA_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_N64                                                                                                      \
    WGMMA_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,"  \
              "%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_N112                                                                                                     \
    WGMMA_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,"  \
              "%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"   \
              "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,"   \
              "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_N120 WGMMA_N112 ",%112,%113,%114,%115,%116,%117,%118,%119"

// d (+)= A * B for T in {__half, __nv_bfloat16}, columns = 2 * registers; accumulate = 0 overwrites d. `first` to
// `sixth`: the operands' numbers after those of d; the rest: d's list.
#define WGMMA_DEFINE(name, shape, type, registers, numbers, transpose, first, second, third, fourth, fifth, sixth,     \
                     ...)                                                                                              \
    __device__ __forceinline__ void name(float(&d)[registers], const uint32_t(&a)[4], uint64_t descriptor,             \
                                         int accumulate, type)                                                         \
    {                                                                                                                  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " sixth ", 0;\n"                                                   \
                     "wgmma.mma_async.sync.aligned." shape " {" numbers "}, {" first "," second "," third "," fourth   \
                     "}, " fifth ", p, 1, 1, " transpose ";}"                                                          \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(accumulate));                  \
    }
#define WGMMA_BOTH_TYPES(name, size, ...)                                                                              \
    WGMMA_DEFINE(name, size ".f32.bf16.bf16", __nv_bfloat16, __VA_ARGS__)                                              \
    WGMMA_DEFINE(name, size ".f32.f16.f16", __half, __VA_ARGS__)

WGMMA_BOTH_TYPES(wgmma_m64n128k16, "m64n128k16", 64, WGMMA_N64, "0", "%64", "%65", "%66", "%67", "%68", "%69",
                 WGMMA_F64)
WGMMA_BOTH_TYPES(wgmma_m64n224k16, "m64n224k16", 112, WGMMA_N112, "0", "%112", "%113", "%114", "%115", "%116", "%117",
                 WGMMA_F112)
WGMMA_BOTH_TYPES(wgmma_m64n240k16, "m64n240k16", 120, WGMMA_N120, "0", "%120", "%121", "%122", "%123", "%124", "%125",
                 WGMMA_F120)
WGMMA_BOTH_TYPES(wgmma_m64n64k16, "m64n64k16", 32, WGMMA_N32, "0", "%32", "%33", "%34", "%35", "%36", "%37", WGMMA_F32)
WGMMA_BOTH_TYPES(wgmma_m64n64k16_transposed, "m64n64k16", 32, WGMMA_N32, "1", "%32", "%33", "%34", "%35", "%36", "%37",
                 WGMMA_F32)
WGMMA_BOTH_TYPES(wgmma_m64n32k16_transposed, "m64n32k16", 16, WGMMA_N16, "1", "%16", "%17", "%18", "%19", "%20", "%21",
                 WGMMA_F16(0))

#undef WGMMA_BOTH_TYPES
#undef WGMMA_DEFINE
#undef WGMMA_F8
#undef WGMMA_F16
#undef WGMMA_F32
#undef WGMMA_F64
#undef WGMMA_F112
#undef WGMMA_F120
#undef WGMMA_N16
#undef WGMMA_N32
#undef WGMMA_N64
#undef WGMMA_N112
#undef WGMMA_N120

// Four 8 x 8 matrices of 16-bit elements from fragments to shared memory, transposed: fragment column c of matrix m
// goes to the 16 bytes at the address that lane 8 m + c gives.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2,
                                                          uint32_t m3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

// The way back: four 8 x 8 matrices, lane 8 m + c giving the address of row c of matrix m; plain or transposed.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// Named barriers 1 .. 15 among `threads` threads: sync waits, arrive does not.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Bulk copies, counted by an mbarrier: one thread announces the bytes (barrier_expect) and starts them, and every
// reader waits for the phase (barrier_wait). Of threads, each of `arrivals` arrives once a phase.
__device__ __forceinline__ void bulk_barrier_init(uint32_t barrier, int arrivals = 1)
{
    barrier_init(barrier, arrivals);
    fence_barrier_init();
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// The way back, by one thread: it commits a group, and waits until its groups' sources may be overwritten, or their
// targets be loaded by further copies of its own.
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_stores_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void bulk_stores_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_stores_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
#endif
