// skinny_gemm: the products of a slice, by mma.sync in 16 bits and TF32, and on the CUDA cores.
#ifndef CUDA_OPS_COMMON_SKINNY_GEMM_MULTIPLY_CUH
#define CUDA_OPS_COMMON_SKINNY_GEMM_MULTIPLY_CUH

#include "common/skinny_gemm/load.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

// ---- tensor cores ----

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

template <typename E, bool K_MAJOR, int LINES>
__device__ __forceinline__ void load_a_fragment(unsigned int (&fragment)[4], const E *slice, int line, int step,
                                                int lane)
{
    constexpr int ROWS = K_MAJOR ? LINES : 64, CHUNKS = K_MAJOR ? 8 : LINES / 8;
    const int row = K_MAJOR ? line + lane % 16 : step * 16 + lane % 8 + lane / 16 * 8;
    const int chunk = K_MAJOR ? step * 2 + lane / 16 : line / 8 + lane / 8 % 2;
    load_matrices_4<!K_MAJOR>(fragment, slice + chunk_index<ROWS, CHUNKS>(row, chunk) * 8);
}

// Adds a slice's products to a warp's sums. row_sums: of a times a matrix of ones, whose columns are all the same.
template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool MASKED, bool ROW_SUMS>
__device__ __forceinline__ void multiply_slice_tensor(float (&sums)[Shape::WARP_M / 16][Shape::WARP_N / 8][4],
                                                      float (&row_sums)[Shape::WARP_M / 16][4],
                                                      const typename Shape::E *a, const typename Shape::E *mask,
                                                      const typename Shape::E *b, int first_m, int first_n, int lane)
{
    typedef typename Shape::E E;
    constexpr int M = Shape::WARP_M / 16, N = Shape::WARP_N / 8;
    constexpr int B_ROWS = B_K_MAJOR ? Shape::TILE_N : 64, B_CHUNKS = B_K_MAJOR ? 8 : Shape::TILE_N / 8;
    constexpr unsigned int TWO_ONES = std::is_same<E, __nv_bfloat16>::value ? 0x3f803f80u : 0x3c003c00u;
#pragma unroll
    for (int step = 0; step < Shape::DEPTH / 16; step++) {
        unsigned int left[M][4], right[N][2];
#pragma unroll
        for (int i = 0; i < M; i++) {
            load_a_fragment<E, A_K_MAJOR, Shape::TILE_M>(left[i], a, first_m + i * 16, step, lane);
            if constexpr (MASKED) {
                unsigned int kept[4];
                load_a_fragment<E, A_K_MAJOR, Shape::TILE_M>(kept, mask, first_m + i * 16, step, lane);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    left[i][r] = masked_pair<E>(left[i][r], kept[r]);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const int line = first_n + j * 8;
            if constexpr (N % 2 == 0) {
                const int row = B_K_MAJOR ? line + lane % 8 + lane / 16 * 8 : step * 16 + lane % 16;
                const int chunk = B_K_MAJOR ? step * 2 + lane / 8 % 2 : line / 8 + lane / 16;
                unsigned int both[4];
                load_matrices_4<!B_K_MAJOR>(both, b + chunk_index<B_ROWS, B_CHUNKS>(row, chunk) * 8);
                right[j][0] = both[0], right[j][1] = both[1];
                right[j + 1][0] = both[2], right[j + 1][1] = both[3];
            } else {
                static_assert(N % 2 == 0 || N == 1, "one or pairs");
                const int row = B_K_MAJOR ? line + lane % 8 : step * 16 + lane % 16;
                const int chunk = B_K_MAJOR ? step * 2 + lane / 8 % 2 : line / 8;
                const uint32_t from = shared_address(b + chunk_index<B_ROWS, B_CHUNKS>(row, chunk) * 8);
                if constexpr (B_K_MAJOR)
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

// The line of an MN-major operand that is line `i` of its fragments. They are permuted by 32: a fragment of 8 has the
// lines of chunks c and c + 4, so that four rows of k, whose chunks are XORed with 0 to 3, meet different banks.
template <bool K_MAJOR>
__device__ __forceinline__ int tf32_line(int i)
{
    return K_MAJOR ? i : i / 32 * 32 + i / 8 % 4 * 4 + i / 4 % 2 * 16 + i % 4;
}

// One word of an MN-major slice.
template <int LINES>
__device__ __forceinline__ unsigned int load_tf32(const float *slice, int line, int depth)
{
    return __float_as_uint(slice[chunk_index<32, LINES / 4>(depth, line / 4) * 4 + line % 4]);
}

template <bool K_MAJOR, int LINES>
__device__ __forceinline__ void load_a_fragment_tf32(unsigned int (&fragment)[4], const float *slice, int line,
                                                     int step, int lane)
{
    if constexpr (K_MAJOR) {
        load_matrices_4<false>(fragment, slice + chunk_index<LINES, 8>(line + lane % 16, step * 2 + lane / 16) * 4);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
            fragment[r] =
                load_tf32<LINES>(slice, tf32_line<false>(line + lane / 4 + r % 2 * 8), step * 8 + lane % 4 + r / 2 * 4);
    }
}

template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool MASKED, bool ROW_SUMS>
__device__ __forceinline__ void
multiply_slice_tf32(float (&sums)[Shape::WARP_M / 16][Shape::WARP_N / 8][4], float (&row_sums)[Shape::WARP_M / 16][4],
                    const float *a, const float *mask, const float *b, int first_m, int first_n, int lane)
{
    constexpr int M = Shape::WARP_M / 16, N = Shape::WARP_N / 8;
    static_assert((A_K_MAJOR || Shape::WARP_M % 32 == 0) && Shape::WARP_N % (B_K_MAJOR ? 16 : 32) == 0, "whole");
    constexpr unsigned int ONE = 0x3f800000u;
#pragma unroll
    for (int step = 0; step < Shape::DEPTH / 8; step++) {
        unsigned int left[M][4], right[N][2];
#pragma unroll
        for (int i = 0; i < M; i++) {
            load_a_fragment_tf32<A_K_MAJOR, Shape::TILE_M>(left[i], a, first_m + i * 16, step, lane);
            if constexpr (MASKED) {
                unsigned int kept[4];
                load_a_fragment_tf32<A_K_MAJOR, Shape::TILE_M>(kept, mask, first_m + i * 16, step, lane);
#pragma unroll
                for (int r = 0; r < 4; r++)
                    left[i][r] = __uint_as_float(kept[r]) <= 0.0f ? 0u : left[i][r];
            }
        }
        if constexpr (B_K_MAJOR) {
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

// ---- CUDA cores: a warp is 4 (m) x 8 (n) threads, each with WARP_M / 4 x WARP_N / 8 sums ----

// The i-th line of a thread. K-major lines are LANES apart, so that a warp reads adjacent rows; MN-major ones come in
// whole chunks.
template <bool K_MAJOR, int CHUNK, int LANES>
__device__ __forceinline__ int thread_line(int lane, int i)
{
    return K_MAJOR ? lane + LANES * i : (i / CHUNK * LANES + lane) * CHUNK + i % CHUNK;
}

// Loads a thread's R lines, chunk `group` of the slice's k.
template <typename E, bool K_MAJOR, int LINES, int R, int LANES>
__device__ __forceinline__ void load_register_lines(E (&values)[R][16 / sizeof(E)], const E *slice, int first,
                                                    int group, int lane)
{
    constexpr int CHUNK = 16 / (int)sizeof(E);
    static_assert(K_MAJOR || R % CHUNK == 0, "whole chunks");
    if constexpr (K_MAJOR) {
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

template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool MASKED, bool ROW_SUMS>
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
        load_register_lines<E, A_K_MAJOR, Shape::TILE_M, M, 4>(left, a, first_m, group, lane / 8);
        load_register_lines<E, B_K_MAJOR, Shape::TILE_N, N, 8>(right, b, first_n, group, lane % 8);
        if constexpr (MASKED) {
            E kept[M][CHUNK];
            load_register_lines<E, A_K_MAJOR, Shape::TILE_M, M, 4>(kept, mask, first_m, group, lane / 8);
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

#endif
