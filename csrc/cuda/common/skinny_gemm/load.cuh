// skinny_gemm: a product's operands and sizes, and the copies of slices to shared memory.
#ifndef CUDA_OPS_COMMON_SKINNY_GEMM_LOAD_CUH
#define CUDA_OPS_COMMON_SKINNY_GEMM_LOAD_CUH

#include <type_traits>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/shared_memory.cuh"

// Stands for float, fp16 and bf16 where the type is known at run time only.
struct any_float {
};

__device__ __forceinline__ float float_of_bits(unsigned int bits, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 ? __half2float(__ushort_as_half((unsigned short)bits))
                                     : __uint_as_float(bits << (dtype == CUDA_OPS_BFLOAT16 ? 16 : 0));
}

// The pointer to any_float. Indices count elements.
struct any_pointer {
    char *at;
    cuda_ops_dtype dtype;

    __device__ __forceinline__ any_pointer operator+(int64_t elements) const
    {
        return {at + elements * (dtype == CUDA_OPS_FLOAT32 ? 4 : 2), dtype};
    }
    __device__ __forceinline__ unsigned int bits(int64_t i) const
    {
        return dtype == CUDA_OPS_FLOAT32 ? ((const unsigned int *)at)[i] : ((const unsigned short *)at)[i];
    }
    __device__ __forceinline__ float operator[](int64_t i) const
    {
        return float_of_bits(bits(i), dtype);
    }
    __host__ __device__ __forceinline__ explicit operator bool() const
    {
        return at != nullptr;
    }
};

template <typename T>
struct pointers {
    typedef T *to;
    typedef const T *to_const;
};
template <>
struct pointers<any_float> {
    typedef any_pointer to, to_const;
};

template <typename T>
__device__ __forceinline__ void store_element(T *to, int64_t i, accumulate_type<T> value)
{
    to[i] = store_from_accumulate<T>(value);
}
__device__ __forceinline__ void store_element(any_pointer to, int64_t i, float value)
{
    if (to.dtype == CUDA_OPS_FLOAT32)
        ((float *)to.at)[i] = value;
    else if (to.dtype == CUDA_OPS_FLOAT16)
        ((__half *)to.at)[i] = __float2half_rn(value);
    else
        ((__nv_bfloat16 *)to.at)[i] = __float2bfloat16_rn(value);
}

// A product's operands and epilogue.
template <typename TA, typename TB, typename TC, typename TP>
struct skinny_product {
    typename pointers<TC>::to output;
    typename pointers<TA>::to_const a;
    typename pointers<TA>::to_const mask; // stored as a: a counts as zero where mask is <= 0; null for none
    typename pointers<TB>::to_const b;
    typename pointers<TP>::to_const bias; // n, or null
    typename pointers<TP>::to row_sums;   // m: the sums over k of (masked) a, or null
    int64_t m, n, k, a_pitch, b_pitch, output_pitch;
    int64_t chunk; // k of each split, a multiple of a slice's
    int splits;
    bool relu, accumulate, aligned; // accumulate: output += instead of =
};

// A kernel's tile. E: the element type in shared memory. TF32: float by tensor cores. SLICE_SUMS, for the CUDA cores:
// each slice is summed by itself, and then added. Equal terms are rounded the same way every time, and in one long sum
// of a thousand of them such errors would add up.
template <typename E_, int TILE_M_, int TILE_N_, int WARPS_M_, int WARPS_N_, int STAGES_, bool SLICE_SUMS_ = false,
          bool TF32_ = false>
struct skinny_shape {
    typedef E_ E;
    static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP_SIZE;
    static constexpr int CHUNK = 16 / (int)sizeof(E); // elements in 16 bytes
    static constexpr int DEPTH = 8 * CHUNK;           // k of a slice: 128 bytes
    static constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
    static constexpr bool TF32 = TF32_, TENSOR_CORES = sizeof(E) == 2 || TF32, SLICE_SUMS = SLICE_SUMS_;
    static_assert(!TF32 || std::is_same<E, float>::value, "only float is rounded to TF32");
    // A fragment's two adjacent sums of eight rows are stored at once: this pitch spreads them over the banks.
    static constexpr int SUM_PITCH = TILE_N + 8;
    static constexpr int SUM_BYTES = (TILE_M * SUM_PITCH + TILE_M) * (int)sizeof(accumulate_type<E>);

    static __host__ __device__ constexpr int stage_bytes(bool masked)
    {
        return (TILE_M * (masked ? 2 : 1) + TILE_N) * 128;
    }
    static __host__ __device__ constexpr int shared_bytes(bool masked)
    {
        return stage_bytes(masked) * STAGES > SUM_BYTES ? stage_bytes(masked) * STAGES : SUM_BYTES;
    }
};

// Copies 16 bytes, of which the first `bytes` come from global memory; the rest is zero.
template <typename E>
__device__ __forceinline__ void copy_chunk(E *to, const E *from, int bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    cp_async<16>(shared_address(to), from, bytes);
#else
    vector16<E> value = {};
    if (bytes == 16)
        value = *reinterpret_cast<const vector16<E> *>(from);
    else
        for (int e = 0; e < vector16<E>::size; e++)
            if (e * (int)sizeof(E) < bytes)
                value.element[e] = from[e];
    *reinterpret_cast<vector16<E> *>(to) = value;
#endif
}

// The index of a chunk in a slice of ROWS rows. Rows are split into blocks of 8 chunks (128 bytes), the blocks of one
// column lying together; chunks are XORed with the row, so that neither copies nor ldmatrix have bank conflicts.
template <int ROWS, int CHUNKS>
__device__ __forceinline__ int chunk_index(int row, int chunk)
{
    if constexpr (CHUNKS < 8)
        return row * CHUNKS + (chunk ^ (row & (CHUNKS - 1)));
    return (chunk / 8 * ROWS + row) * 8 + (chunk % 8 ^ (row & 7));
}

template <typename E, typename S>
__device__ __forceinline__ E convert_element(S value)
{
    return store_from_accumulate<E>(load_as_accumulate(value));
}

// What a thread needs to copy its share of one operand's slices: LINES lines (of m or n) by the slice's k, by THREADS
// threads. S is the type in global memory; where that is E too, copies are asynchronous. Otherwise `fetch` leaves the
// elements in registers, and `deposit` converts and stores them while the next slice is multiplied.
template <typename E, typename S, bool K_MAJOR, int LINES, int THREADS>
struct skinny_loader {
    static constexpr int CHUNK = 16 / (int)sizeof(E), DEPTH = 8 * CHUNK;
    static constexpr int ROWS = K_MAJOR ? LINES : DEPTH, CHUNKS = K_MAJOR ? 8 : LINES / CHUNK;
    // A thread's chunks are ROWS_APART rows apart, in the same column.
    static constexpr int ROWS_APART = THREADS / CHUNKS, COUNT = (ROWS + ROWS_APART - 1) / ROWS_APART;
    static constexpr bool DIRECT = std::is_same<E, S>::value, ANY = std::is_same<S, any_float>::value;
    static constexpr int RAW = DIRECT ? 1 : COUNT; // chunks a thread keeps in registers
    static_assert(THREADS % CHUNKS == 0, "a thread keeps its column");
    typedef typename std::conditional<ANY, unsigned int, S>::type Raw; // bits of any_float
    typedef aligned_vector<Raw, CHUNK> raw_chunk;

    typename pointers<S>::to_const from; // the thread's first chunk of the next slice
    int64_t apart, advance;              // elements between its chunks, and between slices
    int row, lines_left; // its first row; lines from there (K-major) or from its chunk (MN-major) to the operand's end
    int target;          // its first chunk's offset in the slice
};

template <typename E, typename S, bool K_MAJOR, int LINES, int THREADS>
__device__ __forceinline__ skinny_loader<E, S, K_MAJOR, LINES, THREADS>
make_loader(typename pointers<S>::to_const source, int64_t first_line, int64_t lines, int64_t pitch, int64_t begin)
{
    typedef skinny_loader<E, S, K_MAJOR, LINES, THREADS> L;
    const int row = threadIdx.x / L::CHUNKS, chunk = threadIdx.x % L::CHUNKS;
    const int64_t left = lines - first_line - (K_MAJOR ? row : chunk * L::CHUNK);
    L l;
    l.from =
        source + ((K_MAJOR ? first_line : begin) + row) * pitch + (K_MAJOR ? begin : first_line) + chunk * L::CHUNK;
    l.apart = L::ROWS_APART * pitch;
    l.advance = K_MAJOR ? L::DEPTH : L::DEPTH * pitch;
    l.row = row;
    l.lines_left = left < LINES ? (int)left : LINES;
    l.target = chunk_index<L::ROWS, L::CHUNKS>(row, chunk) * L::CHUNK;
    return l;
}

// The offset of the thread's i-th chunk in a slice, in elements.
template <typename E, typename S, bool K_MAJOR, int LINES, int THREADS>
__device__ __forceinline__ int chunk_target(const skinny_loader<E, S, K_MAJOR, LINES, THREADS> &l, int i)
{
    typedef skinny_loader<E, S, K_MAJOR, LINES, THREADS> L;
    if constexpr (L::ROWS_APART % 8 == 0)
        return l.target + i * L::ROWS_APART * (L::CHUNKS < 8 ? L::CHUNKS : 8) * L::CHUNK;
    return chunk_index<L::ROWS, L::CHUNKS>(l.row + i * L::ROWS_APART, threadIdx.x % L::CHUNKS) * L::CHUNK;
}

// Copies the next slice, of which `left` (> 0) values of k are in bounds. ALIGNED: 16-byte loads are allowed, and an
// operand that is converted consists of whole chunks.
template <bool ALIGNED, typename E, typename S, bool K_MAJOR, int LINES, int THREADS>
__device__ __forceinline__ void fetch_slice(E *slice,
                                            typename skinny_loader<E, S, K_MAJOR, LINES, THREADS>::raw_chunk *raw,
                                            skinny_loader<E, S, K_MAJOR, LINES, THREADS> &l, int64_t left)
{
    typedef skinny_loader<E, S, K_MAJOR, LINES, THREADS> L;
    typedef typename L::raw_chunk raw_chunk;
    const int depth_left = left < L::DEPTH ? (int)left : L::DEPTH;
    const int across = K_MAJOR ? depth_left - (int)(threadIdx.x % L::CHUNKS) * L::CHUNK : l.lines_left;
    const int valid = across <= 0         ? 0
                      : across < L::CHUNK ? across
                                          : L::CHUNK,
              down = K_MAJOR ? l.lines_left : depth_left - l.row;
#pragma unroll
    for (int i = 0; i < L::COUNT; i++) {
        if (L::ROWS % L::ROWS_APART != 0 && l.row + i * L::ROWS_APART >= L::ROWS)
            break;
        const int count = i * L::ROWS_APART < down ? valid : 0;
        const auto from = l.from + i * l.apart;
        if constexpr (L::DIRECT && ALIGNED) {
            copy_chunk(slice + chunk_target(l, i), from, count * (int)sizeof(E));
        } else if constexpr (L::DIRECT) {
            vector16<E> value;
#pragma unroll
            for (int e = 0; e < L::CHUNK; e++)
                value.element[e] = e < count ? from[e] : convert_element<E>(accumulate_type<E>(0));
            *reinterpret_cast<vector16<E> *>(slice + chunk_target(l, i)) = value;
        } else if constexpr (ALIGNED) {
            raw[i] = {};
            if (count > 0)
                raw[i] = *reinterpret_cast<const raw_chunk *>(from);
        } else if constexpr (L::ANY) {
#pragma unroll
            for (int e = 0; e < L::CHUNK; e++)
                raw[i].element[e] = e < count ? from.bits(e) : 0; // zero, whatever the type
        } else {
#pragma unroll
            for (int e = 0; e < L::CHUNK; e++)
                raw[i].element[e] = e < count ? from[e] : store_from_accumulate<S>(0);
        }
    }
    l.from = l.from + l.advance;
}

template <typename E, typename S, bool K_MAJOR, int LINES, int THREADS>
__device__ __forceinline__ void
deposit_slice(E *slice, const typename skinny_loader<E, S, K_MAJOR, LINES, THREADS>::raw_chunk *raw,
              const skinny_loader<E, S, K_MAJOR, LINES, THREADS> &l)
{
    typedef skinny_loader<E, S, K_MAJOR, LINES, THREADS> L;
    if constexpr (!L::DIRECT) {
#pragma unroll
        for (int i = 0; i < L::COUNT; i++) {
            if (L::ROWS % L::ROWS_APART != 0 && l.row + i * L::ROWS_APART >= L::ROWS)
                break;
            vector16<E> value;
#pragma unroll
            for (int e = 0; e < L::CHUNK; e++) {
                if constexpr (L::ANY)
                    value.element[e] = float_of_bits(raw[i].element[e], l.from.dtype);
                else
                    value.element[e] = convert_element<E>(raw[i].element[e]);
            }
            *reinterpret_cast<vector16<E> *>(slice + chunk_target(l, i)) = value;
        }
    }
}

// Rounds the thread's own chunks of a slice to TF32 in place (to nearest, ties away from zero); the tensor cores would
// truncate.
template <bool K_MAJOR, int LINES, int THREADS>
__device__ __forceinline__ void round_slice(float *slice, const skinny_loader<float, float, K_MAJOR, LINES, THREADS> &l)
{
    typedef skinny_loader<float, float, K_MAJOR, LINES, THREADS> L;
#pragma unroll
    for (int i = 0; i < L::COUNT; i++) {
        if (L::ROWS % L::ROWS_APART != 0 && l.row + i * L::ROWS_APART >= L::ROWS)
            break;
        vector16<float> *const at = reinterpret_cast<vector16<float> *>(slice + chunk_target(l, i));
        vector16<float> value = *at;
#pragma unroll
        for (int e = 0; e < 4; e++)
            value.element[e] = __uint_as_float(cvt_rna_tf32(value.element[e]));
        *at = value;
    }
}

#endif
