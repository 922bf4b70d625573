// Matrix products with one short side, the linear layers of small networks:
//     output[i][j] = epilogue(sum over p of a[i][p] * b[p][j])        output m x n, sum over k
// Either operand may be stored "by depth" (its lines along k: a as m x k, b as n x k) or "by lines" (k x m, k x n), so
// that the three products of a linear layer are one kernel:
//     forward      input (by depth), weight (by depth)         NT
//     grad_input   grad_output (by depth), weight (by lines)   NN
//     grad_weight  grad_output (by lines), input (by lines)    TN
//
// A block makes a tile of output from slices of k that lie in shared memory, copied there asynchronously some slices
// ahead. Rows of a slice are 16-byte chunks whose order is XORed with the row's number, so that neither the copies nor
// ldmatrix meet a bank twice. Halves are multiplied by tensor cores (mma.sync m16n8k16), as is float where it may be
// rounded to TF32 (m16n8k8: each thread rounds what it copied, before the barrier behind which others read it); float
// otherwise, and double, on the CUDA cores from register tiles.
//
// Few tiles do not fill a GPU. Then k is split among the blocks of a thread-block cluster, which leave their sums in
// shared memory and add up each other's in the order of their ranks: one launch, no workspace, bits that repeat. Before
// Hopper, which has no clusters, k is not split.
//
// Operands in float beside halves (a layer's parameters) are converted on their way to shared memory. What tensor cores
// do not take is multiplied as float by one kernel for all dtypes (any_float): a kernel for each mix of them would be
// minutes of compiling.
#ifndef CUDA_OPS_COMMON_SKINNY_GEMM_CUH
#define CUDA_OPS_COMMON_SKINNY_GEMM_CUH

#include <type_traits>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

// Stands for float and the halves where the type is looked up at run time.
struct any_float {
};

__device__ __forceinline__ float float_of_bits(unsigned int bits, cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 ? __half2float(__ushort_as_half((unsigned short)bits))
                                     : __uint_as_float(bits << (dtype == CUDA_OPS_BFLOAT16 ? 16 : 0));
}

// What is a pointer for other types. Indices count elements.
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

// Where a product's operands are and what becomes of its sums.
template <typename TA, typename TB, typename TC, typename TP>
struct skinny_product {
    typename pointers<TC>::to output;
    typename pointers<TA>::to_const a;
    typename pointers<TA>::to_const mask; // stored as a: a counts as zero where mask is <= 0; null for none
    typename pointers<TB>::to_const b;
    typename pointers<TP>::to_const bias; // n, or null
    typename pointers<TP>::to row_sums;   // m: the sums over k of (masked) a, or null
    int64_t m, n, k, a_pitch, b_pitch, output_pitch;
    int64_t chunk; // of k for each split, a multiple of the slices' depth
    int splits;
    bool relu, accumulate, aligned; // accumulate: output += instead of =
};

// Sizes of a kernel. E: element type in shared memory. SLICE_SUMS: each slice is summed by itself, and then added:
// terms that are alike are rounded the same way every time, and in one long sum of a thousand of them such errors grow
// to many places. For the CUDA cores. TF32: float by tensor cores.
template <typename E_, int TILE_M_, int TILE_N_, int WARPS_M_, int WARPS_N_, int STAGES_, bool SLICE_SUMS_ = false,
          bool TF32_ = false>
struct skinny_shape {
    typedef E_ E;
    static constexpr int TILE_M = TILE_M_, TILE_N = TILE_N_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, STAGES = STAGES_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP_SIZE;
    static constexpr int CHUNK = 16 / (int)sizeof(E); // elements of 16 bytes
    static constexpr int DEPTH = 8 * CHUNK;           // of a slice: 128 bytes
    static constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
    static constexpr bool TF32 = TF32_, TENSOR_CORES = sizeof(E) == 2 || TF32, SLICE_SUMS = SLICE_SUMS_;
    static_assert(!TF32 || std::is_same<E, float>::value, "only float is rounded to TF32");
    // Two neighbouring sums of eight rows of a fragment are stored at once: this pitch spreads them over the banks.
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

// 16 bytes of which the first `bytes` come from global memory; the rest is zero.
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

// Number of a chunk in a slice of ROWS rows. Rows are cut into blocks of 8 chunks (128 bytes), the blocks of one column
// lying together.
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

// One operand's way into shared memory: LINES lines (of m or n) by the slice's depth, by THREADS threads.
// S is its type in global memory; where that is E too, copies are asynchronous, else `fetch` leaves the elements in
// registers and `deposit`, a slice's computation later, converts and stores them.
template <typename E, typename S, bool BY_DEPTH, int LINES, int THREADS>
struct skinny_loader {
    static constexpr int CHUNK = 16 / (int)sizeof(E), DEPTH = 8 * CHUNK;
    static constexpr int ROWS = BY_DEPTH ? LINES : DEPTH, CHUNKS = BY_DEPTH ? 8 : LINES / CHUNK;
    // A thread's chunks are ROWS_APART rows apart, in the same place of the row.
    static constexpr int ROWS_APART = THREADS / CHUNKS, COUNT = (ROWS + ROWS_APART - 1) / ROWS_APART;
    static constexpr bool DIRECT = std::is_same<E, S>::value, ANY = std::is_same<S, any_float>::value;
    static constexpr int RAW = DIRECT ? 1 : COUNT; // chunks a thread keeps in registers
    static_assert(THREADS % CHUNKS == 0, "a thread keeps its place in the row");
    typedef typename std::conditional<ANY, unsigned int, S>::type Raw; // bits of any_float
    typedef aligned_vector<Raw, CHUNK> raw_chunk;

    typename pointers<S>::to_const from; // the thread's first chunk of the present slice
    int64_t apart, advance;              // elements from one of its chunks to the next, and from one slice to the next
    int row, lines_left; // its first row; lines from there (by depth) or from its chunk (by lines) to the operand's end
    int target;          // the first chunk's place in the slice
};

template <typename E, typename S, bool BY_DEPTH, int LINES, int THREADS>
__device__ __forceinline__ skinny_loader<E, S, BY_DEPTH, LINES, THREADS>
make_loader(typename pointers<S>::to_const source, int64_t first_line, int64_t lines, int64_t pitch, int64_t begin)
{
    typedef skinny_loader<E, S, BY_DEPTH, LINES, THREADS> L;
    const int row = threadIdx.x / L::CHUNKS, chunk = threadIdx.x % L::CHUNKS;
    const int64_t left = lines - first_line - (BY_DEPTH ? row : chunk * L::CHUNK);
    L l;
    l.from =
        source + ((BY_DEPTH ? first_line : begin) + row) * pitch + (BY_DEPTH ? begin : first_line) + chunk * L::CHUNK;
    l.apart = L::ROWS_APART * pitch;
    l.advance = BY_DEPTH ? L::DEPTH : L::DEPTH * pitch;
    l.row = row;
    l.lines_left = left < LINES ? (int)left : LINES;
    l.target = chunk_index<L::ROWS, L::CHUNKS>(row, chunk) * L::CHUNK;
    return l;
}

// Where the thread's chunk number i is in a slice, in elements.
template <typename E, typename S, bool BY_DEPTH, int LINES, int THREADS>
__device__ __forceinline__ int chunk_target(const skinny_loader<E, S, BY_DEPTH, LINES, THREADS> &l, int i)
{
    typedef skinny_loader<E, S, BY_DEPTH, LINES, THREADS> L;
    if constexpr (L::ROWS_APART % 8 == 0)
        return l.target + i * L::ROWS_APART * (L::CHUNKS < 8 ? L::CHUNKS : 8) * L::CHUNK;
    return chunk_index<L::ROWS, L::CHUNKS>(l.row + i * L::ROWS_APART, threadIdx.x % L::CHUNKS) * L::CHUNK;
}

// The next slice, of which `left` (> 0) is in range. ALIGNED: 16-byte loads are allowed, and an operand that is
// converted has nothing but whole chunks.
template <bool ALIGNED, typename E, typename S, bool BY_DEPTH, int LINES, int THREADS>
__device__ __forceinline__ void fetch_slice(E *slice,
                                            typename skinny_loader<E, S, BY_DEPTH, LINES, THREADS>::raw_chunk *raw,
                                            skinny_loader<E, S, BY_DEPTH, LINES, THREADS> &l, int64_t left)
{
    typedef skinny_loader<E, S, BY_DEPTH, LINES, THREADS> L;
    typedef typename L::raw_chunk raw_chunk;
    const int depth_left = left < L::DEPTH ? (int)left : L::DEPTH;
    const int across = BY_DEPTH ? depth_left - (int)(threadIdx.x % L::CHUNKS) * L::CHUNK : l.lines_left;
    const int valid = across <= 0         ? 0
                      : across < L::CHUNK ? across
                                          : L::CHUNK,
              down = BY_DEPTH ? l.lines_left : depth_left - l.row;
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

template <typename E, typename S, bool BY_DEPTH, int LINES, int THREADS>
__device__ __forceinline__ void
deposit_slice(E *slice, const typename skinny_loader<E, S, BY_DEPTH, LINES, THREADS>::raw_chunk *raw,
              const skinny_loader<E, S, BY_DEPTH, LINES, THREADS> &l)
{
    typedef skinny_loader<E, S, BY_DEPTH, LINES, THREADS> L;
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

// The thread's own chunks of a slice, rounded to TF32 (to the nearest, ties away from zero) where they are: the tensor
// cores would cut off what is too long.
template <bool BY_DEPTH, int LINES, int THREADS>
__device__ __forceinline__ void round_slice(float *slice,
                                            const skinny_loader<float, float, BY_DEPTH, LINES, THREADS> &l)
{
    typedef skinny_loader<float, float, BY_DEPTH, LINES, THREADS> L;
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

// Tensor cores

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices_4(unsigned int (&registers)[4], const void *row)
{
    if constexpr (TRANSPOSED)
        ldmatrix_x4_trans(registers, shared_address(row));
    else
        ldmatrix_x4(registers, shared_address(row));
}

// Two elements of `value`, each zero where that of `mask` is <= 0 (a NaN there lets it pass, as in relu's backward).
template <typename E>
__device__ __forceinline__ unsigned int masked_pair(unsigned int value, unsigned int mask)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same<E, __nv_bfloat16>::value) {
        __nv_bfloat162 pair;
        memcpy(&pair, &mask, sizeof pair);
        return value & ~__hle2_mask(pair, __floats2bfloat162_rn(0.0f, 0.0f));
    } else {
        __half2 pair;
        memcpy(&pair, &mask, sizeof pair);
        return value & ~__hle2_mask(pair, __floats2half2_rn(0.0f, 0.0f));
    }
#else
    return value;
#endif
}

template <typename E, bool BY_DEPTH, int LINES>
__device__ __forceinline__ void load_a_fragment(unsigned int (&fragment)[4], const E *slice, int line, int step,
                                                int lane)
{
    constexpr int ROWS = BY_DEPTH ? LINES : 64, CHUNKS = BY_DEPTH ? 8 : LINES / 8;
    const int row = BY_DEPTH ? line + lane % 16 : step * 16 + lane % 8 + lane / 16 * 8;
    const int chunk = BY_DEPTH ? step * 2 + lane / 16 : line / 8 + lane / 8 % 2;
    load_matrices_4<!BY_DEPTH>(fragment, slice + chunk_index<ROWS, CHUNKS>(row, chunk) * 8);
}

// A slice's part of a warp's sums. row_sums: those of a times a matrix of ones, whose columns are all the same.
template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool MASKED, bool ROW_SUMS>
__device__ __forceinline__ void multiply_slice_tensor(float (&sums)[Shape::WARP_M / 16][Shape::WARP_N / 8][4],
                                                      float (&row_sums)[Shape::WARP_M / 16][4],
                                                      const typename Shape::E *a, const typename Shape::E *mask,
                                                      const typename Shape::E *b, int first_m, int first_n, int lane)
{
    typedef typename Shape::E E;
    constexpr int M = Shape::WARP_M / 16, N = Shape::WARP_N / 8;
    constexpr int B_ROWS = B_BY_DEPTH ? Shape::TILE_N : 64, B_CHUNKS = B_BY_DEPTH ? 8 : Shape::TILE_N / 8;
    constexpr unsigned int TWO_ONES = std::is_same<E, __nv_bfloat16>::value ? 0x3f803f80u : 0x3c003c00u;
#pragma unroll
    for (int step = 0; step < Shape::DEPTH / 16; step++) {
        unsigned int left[M][4], right[N][2];
#pragma unroll
        for (int i = 0; i < M; i++) {
            load_a_fragment<E, A_BY_DEPTH, Shape::TILE_M>(left[i], a, first_m + i * 16, step, lane);
            if constexpr (MASKED) {
                unsigned int kept[4];
                load_a_fragment<E, A_BY_DEPTH, Shape::TILE_M>(kept, mask, first_m + i * 16, step, lane);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    left[i][r] = masked_pair<E>(left[i][r], kept[r]);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const int line = first_n + j * 8;
            if constexpr (N % 2 == 0) {
                const int row = B_BY_DEPTH ? line + lane % 8 + lane / 16 * 8 : step * 16 + lane % 16;
                const int chunk = B_BY_DEPTH ? step * 2 + lane / 8 % 2 : line / 8 + lane / 16;
                unsigned int both[4];
                load_matrices_4<!B_BY_DEPTH>(both, b + chunk_index<B_ROWS, B_CHUNKS>(row, chunk) * 8);
                right[j][0] = both[0], right[j][1] = both[1];
                right[j + 1][0] = both[2], right[j + 1][1] = both[3];
            } else {
                static_assert(N % 2 == 0 || N == 1, "one or pairs");
                const int row = B_BY_DEPTH ? line + lane % 8 : step * 16 + lane % 16;
                const int chunk = B_BY_DEPTH ? step * 2 + lane / 8 % 2 : line / 8;
                const uint32_t from = shared_address(b + chunk_index<B_ROWS, B_CHUNKS>(row, chunk) * 8);
                if constexpr (B_BY_DEPTH)
                    ldmatrix_x2(right[j][0], right[j][1], from);
                else
                    ldmatrix_x2_trans(right[j][0], right[j][1], from);
            }
        }
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                mma_sync<E>(sums[i][j], left[i], right[j][0], right[j][1]);
        if constexpr (ROW_SUMS) {
#pragma unroll
            for (int i = 0; i < M; i++)
                mma_sync<E>(row_sums[i], left[i], TWO_ONES, TWO_ONES);
        }
    }
}

// Which line of an operand that is stored by lines is number `i` of fragments of 8. They are permuted by 32: a fragment
// has the lines of chunks c and c + 4, so that four depths in a row, whose chunks are permuted by the exclusive or with
// 0 to 3, lie in different banks.
template <bool BY_DEPTH>
__device__ __forceinline__ int tf32_line(int i)
{
    return BY_DEPTH ? i : i / 32 * 32 + i / 8 % 4 * 4 + i / 4 % 2 * 16 + i % 4;
}

// One word of a slice by lines.
template <int LINES>
__device__ __forceinline__ unsigned int load_tf32(const float *slice, int line, int depth)
{
    return __float_as_uint(slice[chunk_index<32, LINES / 4>(depth, line / 4) * 4 + line % 4]);
}

template <bool BY_DEPTH, int LINES>
__device__ __forceinline__ void load_a_fragment_tf32(unsigned int (&fragment)[4], const float *slice, int line,
                                                     int step, int lane)
{
    if constexpr (BY_DEPTH) {
        load_matrices_4<false>(fragment, slice + chunk_index<LINES, 8>(line + lane % 16, step * 2 + lane / 16) * 4);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
            fragment[r] =
                load_tf32<LINES>(slice, tf32_line<false>(line + lane / 4 + r % 2 * 8), step * 8 + lane % 4 + r / 2 * 4);
    }
}

template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool MASKED, bool ROW_SUMS>
__device__ __forceinline__ void
multiply_slice_tf32(float (&sums)[Shape::WARP_M / 16][Shape::WARP_N / 8][4], float (&row_sums)[Shape::WARP_M / 16][4],
                    const float *a, const float *mask, const float *b, int first_m, int first_n, int lane)
{
    constexpr int M = Shape::WARP_M / 16, N = Shape::WARP_N / 8;
    static_assert((A_BY_DEPTH || Shape::WARP_M % 32 == 0) && Shape::WARP_N % (B_BY_DEPTH ? 16 : 32) == 0, "whole");
    constexpr unsigned int ONE = 0x3f800000u;
#pragma unroll
    for (int step = 0; step < Shape::DEPTH / 8; step++) {
        unsigned int left[M][4], right[N][2];
#pragma unroll
        for (int i = 0; i < M; i++) {
            load_a_fragment_tf32<A_BY_DEPTH, Shape::TILE_M>(left[i], a, first_m + i * 16, step, lane);
            if constexpr (MASKED) {
                unsigned int kept[4];
                load_a_fragment_tf32<A_BY_DEPTH, Shape::TILE_M>(kept, mask, first_m + i * 16, step, lane);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    left[i][r] = __uint_as_float(kept[r]) <= 0.0f ? 0u : left[i][r];
            }
        }
        if constexpr (B_BY_DEPTH) {
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                unsigned int both[4];
                load_matrices_4<false>(both,
                                       b + chunk_index<Shape::TILE_N, 8>(first_n + j * 8 + lane % 8 + lane / 16 * 8,
                                                                         step * 2 + lane / 8 % 2) *
                                               4);
                right[j][0] = both[0], right[j][1] = both[1];
                right[j + 1][0] = both[2], right[j + 1][1] = both[3];
            }
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    right[j][r] = load_tf32<Shape::TILE_N>(b, tf32_line<false>(first_n + j * 8 + lane / 4),
                                                           step * 8 + lane % 4 + r * 4);
        }
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                mma_sync<float>(sums[i][j], left[i], right[j][0], right[j][1]);
        if constexpr (ROW_SUMS) {
#pragma unroll
            for (int i = 0; i < M; i++)
                mma_sync<float>(row_sums[i], left[i], ONE, ONE);
        }
    }
}

// CUDA cores. A warp is 4 (m) x 8 (n) threads; each has REGISTERS_M x REGISTERS_N sums.

// Line number `i` of those a thread works on. By depth they are LANES apart, so that a warp reads neighbouring rows; by
// lines they come in whole chunks.
template <bool BY_DEPTH, int CHUNK, int LANES>
__device__ __forceinline__ int thread_line(int lane, int i)
{
    return BY_DEPTH ? lane + LANES * i : (i / CHUNK * LANES + lane) * CHUNK + i % CHUNK;
}

// A thread's elements of its R lines, chunk number `group` of the depth.
template <typename E, bool BY_DEPTH, int LINES, int R, int LANES>
__device__ __forceinline__ void load_register_lines(E (&values)[R][16 / sizeof(E)], const E *slice, int first,
                                                    int group, int lane)
{
    constexpr int CHUNK = 16 / (int)sizeof(E);
    static_assert(BY_DEPTH || R % CHUNK == 0, "whole chunks");
    if constexpr (BY_DEPTH) {
#pragma unroll
        for (int i = 0; i < R; i++) {
            const int row = first + thread_line<true, CHUNK, LANES>(lane, i);
            const vector16<E> v =
                *reinterpret_cast<const vector16<E> *>(slice + chunk_index<LINES, 8>(row, group) * CHUNK);
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
                values[i][e] = v.element[e];
        }
    } else {
#pragma unroll
        for (int p = 0; p < CHUNK; p++)
#pragma unroll
            for (int i = 0; i < R; i += CHUNK) {
                const int chunk = (first + thread_line<false, CHUNK, LANES>(lane, i)) / CHUNK;
                const vector16<E> v = *reinterpret_cast<const vector16<E> *>(
                    slice + chunk_index<8 * CHUNK, LINES / CHUNK>(group * CHUNK + p, chunk) * CHUNK);
#pragma unroll
                for (int e = 0; e < CHUNK; e++)
                    values[i + e][p] = v.element[e];
            }
    }
}

template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool MASKED, bool ROW_SUMS>
__device__ __forceinline__ void
    multiply_slice_registers(typename Shape::E (&sums)[Shape::WARP_M / 4][Shape::WARP_N / 8],
                             typename Shape::E (&row_sums)[Shape::WARP_M / 4], const typename Shape::E *a,
                             const typename Shape::E *mask, const typename Shape::E *b, int first_m, int first_n,
                             int lane)
{
    typedef typename Shape::E E;
    constexpr int M = Shape::WARP_M / 4, N = Shape::WARP_N / 8, CHUNK = Shape::CHUNK;
#pragma unroll 1
    for (int group = 0; group < 8; group++) {
        E left[M][CHUNK], right[N][CHUNK];
        load_register_lines<E, A_BY_DEPTH, Shape::TILE_M, M, 4>(left, a, first_m, group, lane / 8);
        load_register_lines<E, B_BY_DEPTH, Shape::TILE_N, N, 8>(right, b, first_n, group, lane % 8);
        if constexpr (MASKED) {
            E kept[M][CHUNK];
            load_register_lines<E, A_BY_DEPTH, Shape::TILE_M, M, 4>(kept, mask, first_m, group, lane / 8);
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int e = 0; e < CHUNK; e++)
                    left[i][e] = kept[i][e] <= E(0) ? E(0) : left[i][e];
        }
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sums[i][j] += left[i][e] * right[j][e];
        if constexpr (ROW_SUMS) {
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
#pragma unroll
                for (int i = 0; i < M; i++)
                    row_sums[i] += left[i][e];
        }
    }
}

// Clusters

// Sums of all splits for neighbouring elements, in the order of the splits. Four splits are under way at a time: each
// is a trip to another multiprocessor.
template <typename A, int COUNT>
__device__ __forceinline__ void add_splits(A (&values)[COUNT], const A *own, int splits)
{
    constexpr int STEP = 16 / (int)sizeof(A), VECTORS = COUNT / STEP, TOGETHER = 4;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        values[e] = 0;
    for (int first = 0; first < splits; first += TOGETHER) {
        vector16<A> v[TOGETHER][VECTORS];
#pragma unroll
        for (int s = 0; s < TOGETHER; s++) {
            const A *const from = mapa(own, first + s < splits ? first + s : 0);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                v[s][i] = reinterpret_cast<const vector16<A> *>(from)[i];
        }
#pragma unroll
        for (int s = 0; s < TOGETHER; s++)
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                values[e] += first + s < splits ? v[s][e / STEP].element[e % STEP] : A(0);
    }
}

template <typename TA, typename TB, typename TC, typename TP>
__device__ __forceinline__ bool has_aligned_output(const skinny_product<TA, TB, TC, TP> &p)
{
    if constexpr (std::is_same<TC, any_float>::value)
        return false;
    else
        return reinterpret_cast<uintptr_t>(p.output) % 16 == 0 && p.output_pitch * sizeof(TC) % 16 == 0;
}

// The tile's sums, in shared memory, out to global memory: this split's share of them.
template <typename Shape, typename TA, typename TB, typename TC, typename TP>
__device__ __forceinline__ void write_tile(const skinny_product<TA, TB, TC, TP> &p, int64_t row, int64_t column,
                                           int split, bool with_row_sums,
                                           const accumulate_type<typename Shape::E> *sums)
{
    typedef accumulate_type<typename Shape::E> A;
    typedef typename std::conditional<std::is_same<TC, any_float>::value, A, TC>::type C;
    constexpr int COUNT = 16 / (int)sizeof(C), ACROSS = Shape::TILE_N / COUNT, DOWN = Shape::THREADS / ACROSS;
    static_assert(Shape::THREADS % ACROSS == 0, "a thread keeps its columns");
    const int j = threadIdx.x % ACROSS * COUNT, first = threadIdx.x / ACROSS;
    const int64_t columns_left = p.n - column - j, rows_left = p.m - row;
    const int valid = columns_left >= COUNT ? COUNT : columns_left > 0 ? (int)columns_left : 0;
    const int last = valid == 0 ? 0 : rows_left < Shape::TILE_M ? (int)rows_left : Shape::TILE_M;
    const bool vectors = has_aligned_output(p) && valid == COUNT;
    A bias[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        bias[e] = p.bias && e < valid ? (A)load_as_accumulate(p.bias[column + j + e]) : A(0);
    const auto finish = [&](int i, A(&values)[COUNT]) {
        const auto to = p.output + ((row + i) * p.output_pitch + column + j);
        vector16<C> result;
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            values[e] += bias[e];
            if (p.relu)
                values[e] = values[e] <= A(0) ? A(0) : values[e];
            if (p.accumulate && e < valid)
                values[e] += (A)load_as_accumulate(to[e]);
            result.element[e] = store_from_accumulate<C>((accumulate_type<C>)values[e]);
        }
        if constexpr (std::is_same<TC, any_float>::value) {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < valid)
                    store_element(to, e, values[e]);
        } else if (vectors) {
            *reinterpret_cast<vector16<TC> *>(to) = result;
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < valid)
                    to[e] = result.element[e];
        }
    };
    if (p.splits == 1) {
#pragma unroll 4
        for (int i = first; i < last; i += DOWN) {
            A values[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                values[e] = sums[i * Shape::SUM_PITCH + j + e];
            finish(i, values);
        }
    } else {
        for (int i = first + split * DOWN; i < last; i += p.splits * DOWN) {
            A values[COUNT];
            add_splits(values, sums + i * Shape::SUM_PITCH + j, p.splits);
            finish(i, values);
        }
    }
    if (with_row_sums) {
        for (int i = split * Shape::THREADS + threadIdx.x; i < Shape::TILE_M; i += p.splits * Shape::THREADS) {
            if (row + i >= p.m)
                continue;
            const A *const own = sums + Shape::TILE_M * Shape::SUM_PITCH + i;
            A sum = 0;
            for (int s = 0; s < p.splits; s++)
                sum += p.splits > 1 ? *mapa(own, s) : *own;
            if (p.accumulate)
                sum += (A)load_as_accumulate(p.row_sums[row + i]);
            store_element(p.row_sums, row + i, (accumulate_type<TP>)sum);
        }
    }
}

// n = 0 leaves a column of tiles for row_sums.
template <typename Shape, typename TA, typename TB, typename TC, typename TP>
__host__ __device__ __forceinline__ int64_t skinny_tile_columns(const skinny_product<TA, TB, TC, TP> &p)
{
    return p.n > 0 ? ceil_div(p.n, Shape::TILE_N) : 1;
}

// Where a block's share of a product is.
struct skinny_place {
    int64_t row, column, begin, end; // of the tile, and of k
    int split;
};

// The sums of a place, left in shared memory behind a barrier that is still to come.
template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool MASKED, bool ROW_SUMS, bool ALIGNED, typename TA,
          typename TB, typename TC, typename TP>
__device__ __forceinline__ void sum_tile(const skinny_product<TA, TB, TC, TP> &p, const skinny_place &place,
                                         unsigned char *shared)
{
    typedef typename Shape::E E;
    typedef accumulate_type<E> A;
    typedef skinny_loader<E, TA, A_BY_DEPTH, Shape::TILE_M, Shape::THREADS> LoadA;
    typedef skinny_loader<E, TB, B_BY_DEPTH, Shape::TILE_N, Shape::THREADS> LoadB;
    constexpr int STAGES = Shape::STAGES, DEPTH = Shape::DEPTH;
    constexpr int A_ELEMENTS = Shape::TILE_M * DEPTH, B_ELEMENTS = Shape::TILE_N * DEPTH;
    constexpr int STAGE_ELEMENTS = Shape::stage_bytes(MASKED) / (int)sizeof(E);
    const int64_t depth = place.end - place.begin;
    const int steps = depth > 0 ? (int)ceil_div(depth, DEPTH) : 0;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_m = warp / Shape::WARPS_N * Shape::WARP_M, first_n = warp % Shape::WARPS_N * Shape::WARP_N;
    E *const slices = reinterpret_cast<E *>(shared);

    LoadA load_a =
        make_loader<E, TA, A_BY_DEPTH, Shape::TILE_M, Shape::THREADS>(p.a, place.row, p.m, p.a_pitch, place.begin);
    LoadA load_mask = load_a;
    if constexpr (MASKED)
        load_mask = make_loader<E, TA, A_BY_DEPTH, Shape::TILE_M, Shape::THREADS>(p.mask, place.row, p.m, p.a_pitch,
                                                                                  place.begin);
    LoadB load_b =
        make_loader<E, TB, B_BY_DEPTH, Shape::TILE_N, Shape::THREADS>(p.b, place.column, p.n, p.b_pitch, place.begin);
    typename LoadA::raw_chunk raw_a[STAGES - 1][LoadA::RAW], raw_mask[STAGES - 1][MASKED ? LoadA::RAW : 1];
    typename LoadB::raw_chunk raw_b[STAGES - 1][LoadB::RAW];
    const auto fetch = [&](int step, E *stage, int slot) {
        const int64_t left = depth - (int64_t)step * DEPTH;
        fetch_slice<ALIGNED>(stage, raw_a[slot], load_a, left);
        if constexpr (MASKED)
            fetch_slice<ALIGNED>(stage + A_ELEMENTS + B_ELEMENTS, raw_mask[slot], load_mask, left);
        fetch_slice<ALIGNED>(stage + A_ELEMENTS, raw_b[slot], load_b, left);
    };
    const auto deposit = [&](E *stage, int slot) {
        deposit_slice(stage, raw_a[slot], load_a);
        if constexpr (MASKED)
            deposit_slice(stage + A_ELEMENTS + B_ELEMENTS, raw_mask[slot], load_mask);
        deposit_slice(stage + A_ELEMENTS, raw_b[slot], load_b);
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps)
            fetch(step, slices + step * STAGE_ELEMENTS, step);
        cp_async_commit_group();
    }
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps)
            deposit(slices + step * STAGE_ELEMENTS, step);

    constexpr int M = Shape::TENSOR_CORES ? Shape::WARP_M / 16 : Shape::WARP_M / 4, N = Shape::WARP_N / 8;
    constexpr int FRAGMENT = Shape::TENSOR_CORES ? 4 : 1;
    typedef typename std::conditional<Shape::TENSOR_CORES, A[M][N][FRAGMENT], A[M][N]>::type Sums;
    typedef typename std::conditional<Shape::TENSOR_CORES, A[M][FRAGMENT], A[M]>::type RowSums;
    Sums sums = {};
    RowSums row_sums = {};
    int reading = 0, writing = (STAGES - 1) * STAGE_ELEMENTS; // the stages' places, going round
    for (int step = 0; step < steps; step++) {
        cp_async_wait_group<STAGES - 2>();
        if constexpr (Shape::TF32) {
            round_slice(slices + reading, load_a);
            round_slice(slices + reading + A_ELEMENTS, load_b);
        }
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps)
            fetch(next, slices + writing, 0);
        cp_async_commit_group();
        const E *const stage = slices + reading;
        if constexpr (Shape::TF32)
            multiply_slice_tf32<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        else if constexpr (Shape::TENSOR_CORES)
            multiply_slice_tensor<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        else if constexpr (Shape::SLICE_SUMS) {
            Sums slice_sums = {};
            RowSums slice_row_sums = {};
            multiply_slice_registers<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, ROW_SUMS>(
                slice_sums, slice_row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m,
                first_n, lane);
#pragma unroll
            for (int i = 0; i < M; i++) {
                row_sums[i] += slice_row_sums[i];
#pragma unroll
                for (int j = 0; j < N; j++)
                    sums[i][j] += slice_sums[i][j];
            }
        } else
            multiply_slice_registers<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        if (next < steps)
            deposit(slices + writing, 0);
        reading = reading == (STAGES - 1) * STAGE_ELEMENTS ? 0 : reading + STAGE_ELEMENTS;
        writing = writing == (STAGES - 1) * STAGE_ELEMENTS ? 0 : writing + STAGE_ELEMENTS;
    }
    cp_async_wait_group<0>();
    __syncthreads(); // the slices are overwritten by the sums

    A *const shared_sums = reinterpret_cast<A *>(shared);
    A *const shared_row_sums = shared_sums + Shape::TILE_M * Shape::SUM_PITCH;
#pragma unroll
    for (int i = 0; i < M; i++) {
        if constexpr (Shape::TENSOR_CORES) {
            constexpr bool M_IN_ORDER = !Shape::TF32 || A_BY_DEPTH, N_IN_ORDER = !Shape::TF32 || B_BY_DEPTH;
            const int line = tf32_line<M_IN_ORDER>(first_m + i * 16 + lane / 4);
            const int other = tf32_line<M_IN_ORDER>(first_m + i * 16 + lane / 4 + 8);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int column = tf32_line<N_IN_ORDER>(first_n + j * 8 + lane % 4 * 2);
                const float *const from = sums[i][j];
                *reinterpret_cast<float2 *>(shared_sums + line * Shape::SUM_PITCH + column) =
                    make_float2(from[0], from[1]);
                *reinterpret_cast<float2 *>(shared_sums + other * Shape::SUM_PITCH + column) =
                    make_float2(from[2], from[3]);
            }
            if (ROW_SUMS && first_n == 0 && lane % 4 == 0) {
                shared_row_sums[line] = row_sums[i][0];
                shared_row_sums[other] = row_sums[i][2];
            }
        } else {
            constexpr int CHUNK = Shape::CHUNK;
            const int line = first_m + thread_line<A_BY_DEPTH, CHUNK, 4>(lane / 8, i);
#pragma unroll
            for (int j = 0; j < N; j++)
                shared_sums[line * Shape::SUM_PITCH + first_n + thread_line<B_BY_DEPTH, CHUNK, 8>(lane % 8, j)] =
                    sums[i][j];
            if (ROW_SUMS && first_n == 0 && lane % 8 == 0)
                shared_row_sums[line] = row_sums[i];
        }
    }
}

// Work item number `item` of a product: tiles along n first, the splits of a tile next to each other.
// WITH_ROW_SUMS: whether p.row_sums is looked at. ALIGNED: p.aligned, known when compiling.
template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool MASKED, bool WITH_ROW_SUMS, bool ALIGNED, typename TA,
          typename TB, typename TC, typename TP>
__device__ __forceinline__ void make_tile(const skinny_product<TA, TB, TC, TP> &p, int64_t item, unsigned char *shared)
{
    const int64_t columns = skinny_tile_columns<Shape>(p), tile = item / p.splits;
    skinny_place place;
    place.split = (int)(item % p.splits);
    place.row = tile / columns * Shape::TILE_M;
    place.column = tile % columns * Shape::TILE_N;
    place.begin = place.split * p.chunk;
    place.end = place.begin + p.chunk < p.k ? place.begin + p.chunk : p.k;
    const bool row_sums = WITH_ROW_SUMS && p.row_sums && place.column == 0;
    if constexpr (WITH_ROW_SUMS && ALIGNED) {
        // The choice is made here, and not where it matters, to keep the loops free of branches.
        if (row_sums)
            sum_tile<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, true, true>(p, place, shared);
        else
            sum_tile<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, false, true>(p, place, shared);
    } else { // slow anyway, and compiled once
        sum_tile<Shape, A_BY_DEPTH, B_BY_DEPTH, MASKED, WITH_ROW_SUMS, ALIGNED>(p, place, shared);
    }
    if (p.splits > 1)
        cluster_sync();
    else
        __syncthreads();
    write_tile<Shape>(p, place.row, place.column, place.split, row_sums,
                      reinterpret_cast<const accumulate_type<typename Shape::E> *>(shared));
    if (p.splits > 1)
        cluster_sync(); // a block's shared memory must outlive its neighbours' reads
}

// Host

// Cuts k for clusters of at most `splits` blocks.
static inline void split_skinny(int64_t *chunk, int *splits, int64_t k, int depth, int wanted)
{
    const int64_t steps = ceil_div(k, depth), each = ceil_div(steps, wanted > 1 ? wanted : 1);
    *splits = steps > 0 ? (int)ceil_div(steps, each) : 1;
    *chunk = steps > 0 ? each * depth : depth;
}

template <typename Shape, typename TA, typename TB, typename TC, typename TP>
static inline int64_t skinny_tiles(const skinny_product<TA, TB, TC, TP> &p)
{
    return ceil_div(p.m, Shape::TILE_M) * skinny_tile_columns<Shape>(p);
}

// Whether 16-byte accesses fit both operands (and the mask).
template <typename TA, typename TB, typename TC, typename TP>
static inline bool is_skinny_aligned(const skinny_product<TA, TB, TC, TP> &p)
{
    return is_aligned_16(p.a) && is_aligned_16(p.b) && is_aligned_16(p.mask) && p.a_pitch * sizeof(TA) % 16 == 0 &&
           p.b_pitch * sizeof(TB) % 16 == 0;
}

// Whether tensor cores may do it: an operand that is converted must consist of whole chunks, too.
template <bool B_BY_DEPTH, typename TA, typename TB, typename TC, typename TP>
static inline bool fits_tensor_cores(const skinny_product<TA, TB, TC, TP> &p)
{
    return current_device().capability >= 80 && is_skinny_aligned(p) &&
           (std::is_same<TA, TB>::value || (B_BY_DEPTH ? p.k : p.n) % 8 == 0);
}

// Before Ampere halves are multiplied as float, and a block has 64 KB. Kernels for tensor cores, or more, are empty.
template <typename Shape>
__host__ __device__ constexpr bool is_compiled(bool masked)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return !Shape::TENSOR_CORES && Shape::shared_bytes(masked) <= 64 << 10;
#else
    (void)masked;
    return true;
#endif
}

template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool WITH_ROW_SUMS, bool ALIGNED, typename TA, typename TB,
          typename TC, typename TP>
__global__ void __launch_bounds__(Shape::THREADS) skinny_gemm_kernel(skinny_product<TA, TB, TC, TP> p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (is_compiled<Shape>(false)) {
        release_successor();
        wait_for_predecessor();
        make_tile<Shape, A_BY_DEPTH, B_BY_DEPTH, false, WITH_ROW_SUMS, ALIGNED>(p, blockIdx.x, shared);
    }
}

// A product without a mask in one launch; k is cut into at most `splits` pieces, for which the GPU must have clusters.
// ALIGNED: p.aligned is true.
template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool WITH_ROW_SUMS, bool ALIGNED, typename TA, typename TB,
          typename TC, typename TP>
static cuda_ops_status launch_skinny(skinny_product<TA, TB, TC, TP> p, int splits, cudaStream_t stream)
{
    split_skinny(&p.chunk, &p.splits, p.k, Shape::DEPTH, splits);
    const int64_t blocks = skinny_tiles<Shape>(p) * p.splits;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent_clusters(skinny_gemm_kernel<Shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS, ALIGNED, TA, TB, TC, TP>,
                              (unsigned int)blocks, Shape::THREADS, p.splits, Shape::shared_bytes(false), stream, p);
    return launch_status();
}

template <typename T>
static inline any_pointer any_pointer_to(const T *pointer)
{
    constexpr cuda_ops_dtype dtype = std::is_same<T, float>::value    ? CUDA_OPS_FLOAT32
                                     : std::is_same<T, __half>::value ? CUDA_OPS_FLOAT16
                                                                      : CUDA_OPS_BFLOAT16;
    static_assert(sizeof(T) <= sizeof(float), "doubles would be rounded");
    return {(char *)pointer, dtype};
}

// The product for kernels of any_float.
template <typename TA, typename TB, typename TC, typename TP>
static inline skinny_product<any_float, any_float, any_float, any_float>
any_product(const skinny_product<TA, TB, TC, TP> &p)
{
    return {any_pointer_to(p.output),
            any_pointer_to(p.a),
            any_pointer_to(p.mask),
            any_pointer_to(p.b),
            any_pointer_to(p.bias),
            any_pointer_to(p.row_sums),
            p.m,
            p.n,
            p.k,
            p.a_pitch,
            p.b_pitch,
            p.output_pitch,
            p.chunk,
            p.splits,
            p.relu,
            p.accumulate,
            p.aligned};
}

// A product that is not aligned, or of halves that tensor cores do not take, on the CUDA cores.
template <typename Shape, bool A_BY_DEPTH, bool B_BY_DEPTH, bool WITH_ROW_SUMS, typename TA, typename TB, typename TC,
          typename TP>
static cuda_ops_status launch_plain(const skinny_product<TA, TB, TC, TP> &p, int splits, cudaStream_t stream)
{
    if constexpr (std::is_same<TA, double>::value)
        return launch_skinny<Shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS, false>(p, splits, stream);
    else
        return launch_skinny<Shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS, false>(any_product(p), splits, stream);
}

// Runs the statement with T and P for the types of activations and parameters.
#define CUDA_OPS_MIXED_DISPATCH(dtype, parameter_dtype, T, P, ...)                                                     \
    do {                                                                                                               \
        if ((parameter_dtype) == (dtype)) {                                                                            \
            CUDA_OPS_DISPATCH(dtype, T, typedef T P; __VA_ARGS__)                                                      \
        } else if ((parameter_dtype) == CUDA_OPS_FLOAT32 && (dtype) == CUDA_OPS_FLOAT16) {                             \
            typedef __half T;                                                                                          \
            typedef float P;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else if ((parameter_dtype) == CUDA_OPS_FLOAT32 && (dtype) == CUDA_OPS_BFLOAT16) {                            \
            typedef __nv_bfloat16 T;                                                                                   \
            typedef float P;                                                                                           \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (false)

#endif
