// Vectors of a few elements that one load or store moves, and their elements in the accumulation type. fp16 and bf16
// are converted by pairs, as they lie in registers: element by element, each would be moved to a register of its own as
// soon as it is loaded, which costs instructions and, above all, registers.
#ifndef CUDA_OPS_COMMON_ALIGNED_VECTOR_CUH
#define CUDA_OPS_COMMON_ALIGNED_VECTOR_CUH

#include "common/common.cuh"
#include "ptx/global_memory.cuh"

// Aligned to its size, or to 16 bytes, the most that one instruction moves.
template <typename T, int COUNT>
struct __align__(COUNT * sizeof(T) < 16 ? COUNT * sizeof(T) : 16) aligned_vector {
    static constexpr int size = COUNT;
    T element[COUNT];
};

// 16 bytes of T. Only for pointers that is_aligned_16 holds for.
template <typename T>
using vector16 = aligned_vector<T, 16 / sizeof(T)>;

static inline bool is_aligned_16(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Element e of a vector; e is a constant where the loop around it is unrolled.
template <typename T, int COUNT>
__device__ __forceinline__ accumulate_type<T> element_of(const aligned_vector<T, COUNT> &p, int e)
{
    if constexpr (is_bfloat16<T> && COUNT % 2 == 0) {
        const unsigned int pair = reinterpret_cast<const unsigned int *>(p.element)[e / 2];
        return __uint_as_float(e % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
        return load_as_accumulate(p.element[e]);
    }
}

template <typename T, int COUNT>
__device__ __forceinline__ aligned_vector<T, COUNT> vector_of(const accumulate_type<T> (&values)[COUNT])
{
    aligned_vector<T, COUNT> p;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        if constexpr (sizeof(T) == 2 && COUNT % 2 == 0) {
            if (e % 2 == 1)
                continue;
            if constexpr (is_bfloat16<T>)
                reinterpret_cast<__nv_bfloat162 *>(p.element)[e / 2] = __floats2bfloat162_rn(values[e], values[e + 1]);
            else
                reinterpret_cast<__half2 *>(p.element)[e / 2] = __floats2half2_rn(values[e], values[e + 1]);
        } else {
            p.element[e] = store_from_accumulate<T>(values[e]);
        }
    }
    return p;
}

template <typename T, int COUNT>
__device__ __forceinline__ aligned_vector<T, COUNT> vector_of_equal(accumulate_type<T> value)
{
    accumulate_type<T> values[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        values[e] = value;
    return vector_of<T>(values);
}

// The vector at `from` if it is `there`, else `otherwise`.
template <typename T, int COUNT>
__device__ __forceinline__ aligned_vector<T, COUNT> load_vector_or(const aligned_vector<T, COUNT> *from, bool there,
                                                                   const aligned_vector<T, COUNT> &otherwise)
{
    aligned_vector<T, COUNT> p;
    if constexpr (sizeof(p) == sizeof(uint4)) {
        uint4 words = reinterpret_cast<const uint4 &>(otherwise);
        if (there)
            words = *reinterpret_cast<const uint4 *>(from);
        reinterpret_cast<uint4 &>(p) = words;
    } else {
        p = there ? *from : otherwise;
    }
    return p;
}

// Stores by one instruction, where the compiler would store 16 bytes in words, as it does with vectors that are
// computed under a condition. No other memory access may be moved across it.
template <typename T, int COUNT>
__device__ __forceinline__ void store_vector(aligned_vector<T, COUNT> *to, const aligned_vector<T, COUNT> &p)
{
    if constexpr (sizeof(p) == sizeof(uint4)) {
        const uint4 words = reinterpret_cast<const uint4 &>(p);
        st_global_v4(to, words.x, words.y, words.z, words.w);
    } else {
        *to = p;
    }
}

#endif
