// What backward_input and its stride-2 variant share: a patch of grad_output in shared memory, a chunk of its channels,
// and how a warp reads it, by mma.sync or by FMA.
#ifndef CUDA_OPS_CONV2D_FEW_CHANNELS_BACKWARD_INPUT_CUH
#define CUDA_OPS_CONV2D_FEW_CHANNELS_BACKWARD_INPUT_CUH

#include "conv2d/few_channels/problem.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"

// A patch is [row][column][8] words. The two 16-byte halves of these 32 bytes are swapped in every other four columns,
// so that ldmatrix reads the rows of a fragment from different banks.
static constexpr int WORDS = 8;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
// Starts copying the channels from `first` on of the p.rows x p.columns pixels whose corner is row `top`, column
// `left`, a multiple of four, of an image of grad_output; zeros out of bounds.
template <typename T>
__device__ __forceinline__ void few_fetch_grad(uint32_t *patch, const FewProblem &p, const T *image, int first, int top,
                                               int left)
{
    constexpr int PER_WORD = 4 / sizeof(T); // output channels
    const int thread = threadIdx.x, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE;
    // Offsets from the patch's corner fit in 32 bits; few_patch_fits checks that.
    const int row_stride = (int)p.out.y;
    const T *const corner = image + (int64_t)top * p.out.y + (int64_t)left * p.out.x;
    if (p.out.c == 1) {
        const T *const channels = corner + first;
        const int pixel = (int)p.out.x, valid = p.out_channels - first;
        constexpr int RUN = 16 / sizeof(T);
        const int vectors = p.rows * p.columns * 2;
#pragma unroll 4
        for (int i = thread; i < vectors; i += FEW_THREADS) {
            const int half = i % 2, at = i / 2, row = quotient(at, p.by_columns), column = at - row * p.columns;
            const int o = half * RUN; // from `first` on
            const bool inside = (unsigned int)(top + row) < (unsigned int)p.out_height &&
                                (unsigned int)(left + column) < (unsigned int)p.out_width && o < valid;
            uint32_t *const to = patch + at * WORDS + (half ^ (column / 4 % 2)) * 4;
            const T *const from = channels + (row * row_stride + column * pixel + o);
            if (p.vector == 16)
                copy_to_shared<16>(to, inside ? from : image, inside);
            else {
#pragma unroll
                for (int e = 0; e < RUN; e++)
                    ((T *)to)[e] = inside && o + e < valid ? from[e] : store_from_accumulate<T>(0.0f);
            }
        }
    } else {
        // A lane copies four columns (a quad) of a word; a warp 8 words by 4 quads. The order in which a lane stores
        // its columns depends on the quad, so that lanes store to different banks.
        const int quads = p.columns / 4, quad_lane = lane / 8, word = lane % 8;
        const int o = first + word * PER_WORD;
        const T *const channel = corner + o * p.out.c;
        const int units = p.rows * ((quads + 3) / 4);
        constexpr int IN_FLIGHT = PER_WORD == 1 ? 4 : 3; // as many as registers allow
#pragma unroll IN_FLIGHT
        for (int unit = warp; unit < units; unit += FEW_WARPS) {
            const int row = quotient(unit, p.by_rows), quad = (unit - row * ((quads + 3) / 4)) * 4 + quad_lane;
            if (quad >= quads)
                continue;
            const int x = left + 4 * quad;
            const T *const from = channel + (row * row_stride + 4 * quad);
            const bool inside_y = (unsigned int)(top + row) < (unsigned int)p.out_height;
            uint32_t v[4];
            if (p.vector == 16) { // all four are inside, or none
                const bool inside = inside_y && (unsigned int)x < (unsigned int)p.out_width;
                if constexpr (PER_WORD == 1) {
                    uint4 all = make_uint4(0, 0, 0, 0);
                    if (inside && o < p.out_channels)
                        all = *(const uint4 *)from;
                    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
                } else {
                    uint2 even = make_uint2(0, 0), odd = make_uint2(0, 0);
                    if (inside && o < p.out_channels)
                        even = *(const uint2 *)from;
                    if (inside && o + 1 < p.out_channels)
                        odd = *(const uint2 *)(from + p.out.c);
                    v[0] = __byte_perm(even.x, odd.x, 0x5410), v[1] = __byte_perm(even.x, odd.x, 0x7632);
                    v[2] = __byte_perm(even.y, odd.y, 0x5410), v[3] = __byte_perm(even.y, odd.y, 0x7632);
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const bool inside = inside_y && (unsigned int)(x + e) < (unsigned int)p.out_width;
                    v[e] = inside && o < p.out_channels ? bits_of(from[e]) : 0;
                    if (PER_WORD == 2 && inside && o + 1 < p.out_channels)
                        v[e] |= bits_of(from[p.out.c + e]) << 16;
                }
            }
            // v rotated by quad_lane
            if (quad_lane & 1) {
                const uint32_t was = v[0];
                v[0] = v[1], v[1] = v[2], v[2] = v[3], v[3] = was;
            }
            if (quad_lane & 2) {
                const uint32_t was = v[0], was1 = v[1];
                v[0] = v[2], v[1] = v[3], v[2] = was, v[3] = was1;
            }
            uint32_t *const to = patch + (row * p.columns + 4 * quad) * WORDS + (word ^ (quad % 2 * 4));
#pragma unroll
            for (int e = 0; e < 4; e++)
                to[(e + quad_lane) % 4 * WORDS] = v[e];
        }
    }
}

// The weight as [chunk][s][r][channel][word % 4][2], with rows and columns reversed where `mirrored`. Once per block;
// several loads in flight per thread.
template <typename T, int MATH>
__device__ __forceinline__ void few_arrange_weight(uint32_t *weights, const FewProblem &p, int chunks, bool mirrored)
{
    constexpr int PER_WORD = 4 / sizeof(T), IN_FLIGHT = 8;
    const int kernel = p.kernel_height * p.kernel_width, count = chunks * kernel * 32;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += IN_FLIGHT * FEW_THREADS) {
        uint32_t words[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const int i = first + k * FEW_THREADS, half = i % 2, word = i / 2 % 4, c = i / 8 % 4;
            const int chunk = i / 32 / kernel, tap = i / 32 - chunk * kernel;
            int s = tap / p.kernel_height, r = tap - s * p.kernel_height;
            if (mirrored)
                s = p.kernel_width - 1 - s, r = p.kernel_height - 1 - r;
            const int o = chunk * WORDS * PER_WORD + (half * 4 + word) * PER_WORD;
            const T *const from = (const T *)p.weight + c * p.w.c + r * p.w.y + s * p.w.x;
            words[k] = 0;
            if (i < count && c < p.channels && o < p.out_channels) {
                words[k] = few_operand<MATH>(bits_of(from[o * p.w.n]));
                if (PER_WORD == 2 && o + 1 < p.out_channels)
                    words[k] |= bits_of(from[(o + 1) * p.w.n]) << 16;
            }
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (first + k * FEW_THREADS < count)
                weights[first + k * FEW_THREADS] = words[k];
    }
}

// A fragment of 16 columns of a row of the patch; `address` is few_grad_address's.
template <int MATH>
__device__ __forceinline__ void few_load_grad(uint32_t (&a)[4], uint32_t address)
{
    ldmatrix_x4(a, address);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = few_operand<MATH>(a[i]);
}

// A lane's ldmatrix address for the 16 columns from `column` on in a row of the patch: lanes 0 to 15 address the first
// halves of the columns' words, lanes 16 to 31 the second halves.
__device__ __forceinline__ uint32_t few_grad_address(const uint32_t *patch, const FewProblem &p, int row, int column)
{
    const int lane = threadIdx.x % WARP_SIZE;
    column += lane % 16;
    return shared_address(patch + (row * p.columns + column) * WORDS + (lane / 16 ^ (column / 4 % 2)) * 4);
}
#endif

// What a tap weighs of the input's channels, zero past the last of CHANNELS, for output channel `out`.
template <int CHANNELS>
__device__ __forceinline__ float4 few_filter_tap(const FewProblem &p, int out, int r, int s)
{
    const float *const from = (const float *)p.weight + out * p.w.n + r * p.w.y + s * p.w.x;
    float v[4] = {};
#pragma unroll
    for (int c = 0; c < CHANNELS; c++)
        if (c < p.channels)
            v[c] = from[c * p.w.c];
    return make_float4(v[0], v[1], v[2], v[3]);
}

// By FMA a patch is [output channel][row][column] of FMA_CHANNELS channels. Starts copying those from `first` on, of
// which `valid` are there: channels_last, by aligned rows, and by single elements.
static constexpr int FMA_CHANNELS = 4;

__device__ __forceinline__ void few_fetch_planes(float *patch, const FewProblem &p, const float *image, int first,
                                                 int valid, int top, int aligned_left)
{
    const int plane = p.rows * p.columns;
    if (p.out.c == 1) {
#pragma unroll 4
        for (int i = threadIdx.x; i < plane; i += FEW_THREADS) {
            const int row = quotient(i, p.by_columns), column = i - row * p.columns;
            const int y = top + row, x = aligned_left + column;
            const bool inside =
                (unsigned int)y < (unsigned int)p.out_height && (unsigned int)x < (unsigned int)p.out_width;
            const float *const from = image + y * p.out.y + x * p.out.x + first;
            float4 v = make_float4(0, 0, 0, 0);
            if (p.vector == 16) {
                if (inside)
                    v = *(const float4 *)from;
            } else if (inside) {
                v.x = from[0];
                if (valid > 1)
                    v.y = from[1];
                if (valid > 2)
                    v.z = from[2];
                if (valid > 3)
                    v.w = from[3];
            }
            patch[i] = v.x;
            patch[plane + i] = v.y;
            patch[2 * plane + i] = v.z;
            patch[3 * plane + i] = v.w;
        }
    } else if (p.vector == 16) {
        const int quads = p.columns / 4;
        for (int o = 0; o < valid; o++)
            for (int i = threadIdx.x; i < p.rows * quads; i += FEW_THREADS) {
                const int row = quotient(i, p.by_rows), column = (i - row * quads) * 4;
                const int y = top + row, x = aligned_left + column;
                const bool inside =
                    (unsigned int)y < (unsigned int)p.out_height && (unsigned int)x < (unsigned int)p.out_width;
                copy_to_shared<16>(patch + o * plane + row * p.columns + column,
                                   inside ? image + (first + o) * p.out.c + y * p.out.y + x : image, inside);
            }
    } else {
        for (int o = 0; o < valid; o++)
            for (int i = threadIdx.x; i < plane; i += FEW_THREADS) {
                const int row = quotient(i, p.by_columns), y = top + row, x = aligned_left + i - row * p.columns;
                const bool inside =
                    (unsigned int)y < (unsigned int)p.out_height && (unsigned int)x < (unsigned int)p.out_width;
                copy_to_shared<4>(patch + o * plane + i,
                                  inside ? image + (first + o) * p.out.c + y * p.out.y + x : image, inside);
            }
    }
}

static inline bool few_patch_fits(const FewProblem &p, int64_t rows, int64_t columns)
{
    return rows * p.out.y + columns * p.out.x <= INT_MAX;
}

#endif
