// What the kernels use of CUDA C++, for a host's compiler: tests/emulation/README.md. A CUDA thread is a fiber
// (emulator.cpp); what threads do together (barriers, shuffles, votes) switches to another one.
#ifndef EMULATION_CUDA_RUNTIME_H
#define EMULATION_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <type_traits>

#define __CUDA_ARCH__ 900
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
struct uint3 {
    unsigned int x, y, z;
};
struct dim3 {
    unsigned int x, y, z;
    dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z)
    {
    }
};
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}
static inline int2 make_int2(int x, int y)
{
    return {x, y};
}
static inline double2 make_double2(double x, double y)
{
    return {x, y};
}
static inline uint2 make_uint2(unsigned int x, unsigned int y)
{
    return {x, y};
}
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w)
{
    return {x, y, z, w};
}

// ---- the host's part of the runtime ----

typedef struct CUstream_st *cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaMemcpyDeviceToDevice = 3 };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned int x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned int numAttrs;
};

namespace emulation
{
// Runs the kernel to its end.
void launch(const cudaLaunchConfig_t &config, const std::function<void()> &kernel);

// kernel<<<grid, block, shared, stream>>>(...), as translate.py writes it.
struct Configured {
    dim3 grid, block;
    size_t shared_bytes = 0;
    cudaStream_t stream = nullptr;

    template <typename Kernel, typename... Arguments>
    void operator()(Kernel kernel, Arguments... arguments) const
    {
        launch({grid, block, shared_bytes, stream, nullptr, 0}, [=] { kernel(arguments...); });
    }
};

// A __shared__ variable: `site` tells it from others of its kernel. As dynamic shared memory: site is NULL.
void *shared_memory(const char *site, size_t bytes, size_t alignment);
template <typename T>
T &shared(const char *site)
{
    return *static_cast<T *>(shared_memory(site, sizeof(T), alignof(T) < 16 ? 16 : alignof(T)));
}

} // namespace emulation

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

template <typename... Parameters, typename... Arguments>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                                             Arguments... arguments)
{
    emulation::launch(*config, [=] { kernel(arguments...); });
    return cudaSuccess;
}
static inline cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t)
{
    memset(to, value, bytes);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, cudaStream_t)
{
    memcpy(to, from, bytes);
    return cudaSuccess;
}

// ---- what threads do together ----

namespace emulation
{
// Waits for the lanes of `mask`; values[lane] is what each of them gave.
void exchange(unsigned int mask, uint64_t value, uint64_t values[32]);
int lane();
int barrier_sum(int value); // __syncthreads, and a sum over the block
void yield();               // another thread may go on

template <typename T>
T shuffle(unsigned int mask, T value, int from, bool there)
{
    static_assert(sizeof(T) <= 8, "a register or two");
    uint64_t bits = 0, values[32];
    memcpy(&bits, &value, sizeof value);
    exchange(mask, bits, values);
    if (there)
        memcpy(&value, &values[from], sizeof value);
    return value;
}
} // namespace emulation

static inline void __syncthreads()
{
    emulation::barrier_sum(0);
}
static inline int __syncthreads_or(int value)
{
    return emulation::barrier_sum(value != 0) != 0;
}
static inline int __syncthreads_count(int value)
{
    return emulation::barrier_sum(value != 0);
}
static inline void __syncwarp(unsigned int mask = 0xffffffffu)
{
    uint64_t values[32];
    emulation::exchange(mask, 0, values);
}
template <typename T>
static inline T __shfl_sync(unsigned int mask, T value, int from, int width = 32)
{
    return emulation::shuffle(mask, value, (emulation::lane() & -width) + (from & (width - 1)), true);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned int mask, T value, int with, int width = 32)
{
    const int from = emulation::lane() ^ with;
    return emulation::shuffle(mask, value, from, from < (emulation::lane() & -width) + width);
}
template <typename T>
static inline T __shfl_down_sync(unsigned int mask, T value, unsigned int by, int width = 32)
{
    const int from = emulation::lane() + (int)by;
    return emulation::shuffle(mask, value, from, from < (emulation::lane() & -width) + width);
}
template <typename T>
static inline T __shfl_up_sync(unsigned int mask, T value, unsigned int by, int width = 32)
{
    const int from = emulation::lane() - (int)by;
    return emulation::shuffle(mask, value, from, from >= (emulation::lane() & -width));
}
static inline unsigned int __ballot_sync(unsigned int mask, int value)
{
    uint64_t values[32];
    emulation::exchange(mask, value != 0, values);
    unsigned int votes = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && values[i])
            votes |= 1u << i;
    return votes;
}
static inline int __any_sync(unsigned int mask, int value)
{
    return __ballot_sync(mask, value) != 0;
}
static inline int __all_sync(unsigned int mask, int value)
{
    return __ballot_sync(mask, value) == mask;
}
template <typename T>
static inline unsigned int __match_any_sync(unsigned int mask, T value)
{
    uint64_t bits = 0, values[32];
    memcpy(&bits, &value, sizeof value);
    emulation::exchange(mask, bits, values);
    unsigned int same = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && values[i] == bits)
            same |= 1u << i;
    return same;
}
static inline unsigned int __activemask()
{
    return 1u << emulation::lane();
}

// ---- memory ----

static inline void __threadfence()
{
}
static inline void __threadfence_system()
{
}
static inline void __threadfence_block()
{
}
template <typename T>
static inline T __ldg(const T *from)
{
    return *from;
}
template <typename T>
static inline T __ldcg(const T *from)
{
    return *(const volatile T *)from;
}
template <typename T>
static inline T __ldcs(const T *from)
{
    return *from;
}
template <typename T, typename F>
static inline T emulation_atomic(T *at, F function)
{
    emulation::yield();
    const T before = *at;
    *at = function(before);
    return before;
}
template <typename T>
static inline T atomicAdd(T *at, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T before) { return (T)(before + value); });
}
template <typename T>
static inline T atomicMax(T *at, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T before) { return before > value ? before : value; });
}
template <typename T>
static inline T atomicMin(T *at, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T before) { return before < value ? before : value; });
}
template <typename T>
static inline T atomicOr(T *at, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T before) { return before | value; });
}
template <typename T>
static inline T atomicExch(T *at, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T) { return value; });
}
template <typename T>
static inline T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> value)
{
    return emulation_atomic(at, [=](T before) { return before == expected ? value : before; });
}

// ---- arithmetic ----

template <typename To, typename From>
static inline To emulation_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
#define EMULATION_BITS(name, To, From)                                                                                 \
    static inline To name(From value)                                                                                  \
    {                                                                                                                  \
        return emulation_bits<To>(value);                                                                              \
    }
EMULATION_BITS(__float_as_uint, unsigned int, float)
EMULATION_BITS(__float_as_int, int, float)
EMULATION_BITS(__uint_as_float, float, unsigned int)
EMULATION_BITS(__int_as_float, float, int)
EMULATION_BITS(__double_as_longlong, long long, double)
EMULATION_BITS(__longlong_as_double, double, long long)
static inline float __saturatef(float x)
{
    return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; // and 0 of NaN
}
static inline unsigned int __umulhi(unsigned int a, unsigned int b)
{
    return (unsigned int)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline int __clz(int value)
{
    return value == 0 ? 32 : __builtin_clz((unsigned int)value);
}
static inline int __clzll(long long value)
{
    return value == 0 ? 64 : __builtin_clzll((unsigned long long)value);
}
static inline int __ffs(int value)
{
    return __builtin_ffs(value);
}
static inline int __popc(unsigned int value)
{
    return __builtin_popcount(value);
}
static inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift)
{
    return (unsigned int)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned int result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned int)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static inline long long __double2ll_rn(double value)
{
    return llrint(value);
}
#define __logf logf // whose names the host's library has too
#define __expf expf
#define __sincosf sincosf
static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}
static inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
static inline float __fdividef(float a, float b)
{
    return a / b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline int min(int a, int b)
{
    return a < b ? a : b;
}
static inline int max(int a, int b)
{
    return a > b ? a : b;
}

#endif
