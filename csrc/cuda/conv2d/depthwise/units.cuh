// What the unrolled kernels of the depthwise path share, channels_last: units of pixels, where a thread's is, the filters
// in shared memory, and the products of a row of the input.
#ifndef CUDA_OPS_CONV2D_DEPTHWISE_UNITS_CUH
#define CUDA_OPS_CONV2D_DEPTHWISE_UNITS_CUH

#include "common/prefetch.cuh"
#include "conv2d/activation.cuh"
#include "conv2d/depthwise/channel_vector.cuh"

static constexpr int THREADS = 256;
static constexpr int CHANNELS = 32;        // of a block, at most
static constexpr int PITCH = CHANNELS + 4; // of a tap's weights: few bank conflicts where they are stored
static constexpr int UNIT_ROWS = 2;

// Columns of a unit, in outputs.
__host__ __device__ static constexpr int unit_columns(int vector, int stride, bool forward)
{
    return vector == 4 && (forward ? stride == 2 : true) ? 2 : 4;
}

// A block's tile: units of an image, or of several. `lanes` threads have neighbouring vectors of channels.
struct UnitTiles {
    int lanes, channel_tiles, units_x, units_y, tiles_x, tiles_y, images, threads;
    struct Divisor by_lanes, by_units_x, by_units;
};

// Microseconds of an H100, fitted to 66 products that unrolled.cu and staged_sm80.cu both made, of each: to start, of 1000
// instructions of warps and of 1000 bytes from the L2 of the busiest multiprocessor, and of a MB that there is. Off by
// 7 % in the mean; by them 1.8 % was lost to the better of the two.
struct UnitTimes {
    double start, instructions, l2_bytes, megabyte;
};
static inline double unit_microseconds(const UnitTimes &of, double instructions, double l2_bytes,
                                       const DepthwiseProblem &p, int bytes)
{
    const double pixels = (double)p.height * p.width + (double)p.out_height * p.out_width;
    return of.start + (of.instructions * instructions + of.l2_bytes * l2_bytes) / 1e3 +
           of.megabyte * bytes * pixels * (double)p.batch * (double)p.channels / 1e6;
}
enum UnitKind { HALVES, FLOATS, STRIDED };
static inline UnitKind unit_kind(const DepthwiseProblem &p, int bytes)
{
    return p.stride_width == 2 ? STRIDED : bytes == 2 ? HALVES : FLOATS;
}

static inline void set_divisors(UnitTiles &t)
{
    t.by_lanes = make_divisor((uint32_t)t.lanes);
    t.by_units_x = make_divisor((uint32_t)t.units_x);
    t.by_units = make_divisor((uint32_t)(t.units_x * t.units_y));
}

// Asks for the filters that keep_filters() reads, while the kernel before still runs.
template <typename T, int K>
static __device__ __forceinline__ void prefetch_filters(const DepthwiseProblem &p, int64_t first, int width)
{
    prefetch_lines((const T *)p.weight + first * (K * K),
                   min((int64_t)width, p.channels - first) * (K * K * (int)sizeof(T)));
}

// The filters of a block's channels, from `first` on, to shared memory as float, [tap][channel]. They lie one behind the
// other, and come in aligned vectors, all of a thread's at once: read one by one, those of a small block would be several
// trips to memory. What of the tensor's ends is no whole vector comes by elements.
template <typename T, int K>
static __device__ __forceinline__ void keep_filters(float *filters, const DepthwiseProblem &p, int64_t first, int width)
{
    constexpr int TAPS = K * K, SIZE = 16 / (int)sizeof(T), AT_ONCE = 4;
    const int count = (int)min((int64_t)width, p.channels - first) * TAPS;
    const int rest = (int)min(p.channels - first, (int64_t)INT_MAX / TAPS) * TAPS; // to the end of the tensor
    const T *const from = (const T *)p.weight + first * TAPS;
    // Vectors begin at elements begin + i * SIZE, which may be another block's.
    const int past = (int)((uintptr_t)from % 16 / sizeof(T));
    const int begin = past == 0 ? 0 : first == 0 ? SIZE - past : -past;
    const int vectors = min(count - begin + SIZE - 1, rest - begin) / SIZE;
    const int step = p.flipped ? -PITCH : PITCH, wrap = 1 - TAPS * step;
    const auto store = [&](int index, T value) {
        const int channel = index / TAPS, tap = index - channel * TAPS;
        filters[(p.flipped ? TAPS - 1 - tap : tap) * PITCH + channel] = load_as_accumulate(value);
    };
    // Before the first vector, and behind the last.
    const int edge = (int)threadIdx.x < SIZE ? (int)threadIdx.x : begin + (vectors - 1) * SIZE + (int)threadIdx.x;
    const bool at_edge = (int)threadIdx.x < SIZE ? edge < begin : threadIdx.x < 2 * SIZE && edge < count;
    const T single = at_edge ? from[edge] : store_from_accumulate<T>(0.0f);
    for (int i0 = threadIdx.x; i0 < vectors; i0 += (int)blockDim.x * AT_ONCE) {
        uint4 loaded[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = i0 + j * (int)blockDim.x;
            loaded[j] = i < vectors ? *(const uint4 *)(from + begin + i * SIZE) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = i0 + j * (int)blockDim.x, index = begin + i * SIZE;
            if (i >= vectors)
                break;
            const int channel = index >= 0 ? index / TAPS : -1;
            int tap = index - channel * TAPS, at = channel + (p.flipped ? TAPS - 1 - tap : tap) * PITCH;
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                if (index + e >= 0 && index + e < count)
                    filters[at] = load_as_accumulate(((const T *)&loaded[j])[e]);
                at += step;
                if (++tap == TAPS)
                    tap = 0, at += wrap;
            }
        }
    }
    if (at_edge)
        store(edge, single);
}

template <int VECTOR>
static __device__ __forceinline__ void filter_tap(float (&w)[VECTOR], const float *from)
{
    if constexpr (VECTOR == 4) {
        const float4 four = *(const float4 *)from;
        w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
    } else if constexpr (VECTOR == 2) {
        const float2 two = *(const float2 *)from;
        w[0] = two.x, w[1] = two.y;
    } else
        w[0] = *from;
}

// The products of row `row` of a unit's window, `value`, with the thread's filters.
template <int K, int STRIDE, int COLUMNS, int UNIT_COLUMNS, int VECTOR>
static __device__ __forceinline__ void add_forward_row(float (&sum)[UNIT_ROWS][UNIT_COLUMNS][VECTOR],
                                                       const float (&value)[COLUMNS][VECTOR], const float *own, int row)
{
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; i++) {
        const int r = row - i * STRIDE;
        if (r >= 0 && r < K)
#pragma unroll
            for (int s = 0; s < K; s++) {
                float w[VECTOR];
                filter_tap(w, own + (r * K + s) * PITCH);
#pragma unroll
                for (int j = 0; j < UNIT_COLUMNS; j++)
#pragma unroll
                    for (int k = 0; k < VECTOR; k++)
                        sum[i][j][k] += w[k] * value[j * STRIDE + s][k];
            }
    }
}

// The same of backward_input of stride 2. Taps of a pixel along a dimension are s = phase, phase + 2, ..., where phase is
// that of the pixel and the padding together, and meet grad_output at half of their sum - s / 2.
template <int K, int COLUMNS, int PIXELS, int VECTOR>
static __device__ __forceinline__ void
add_backward_row(float (&sum)[2][PIXELS][VECTOR], const float (&value)[COLUMNS][VECTOR], const float *own, int row)
{
    constexpr int BACK = (K - 1) / 2;
#pragma unroll
    for (int phase = 0; phase < 2; phase++) {
        const int r = phase + 2 * (BACK - row);
        if (r < K)
#pragma unroll
            for (int s = 0; s < K; s++) {
                float w[VECTOR];
                filter_tap(w, own + (r * K + s) * PITCH);
#pragma unroll
                for (int j = 0; j < PIXELS / 2; j++)
#pragma unroll
                    for (int k = 0; k < VECTOR; k++)
                        sum[phase][2 * j + s % 2][k] += w[k] * value[j + BACK - s / 2][k];
            }
    }
}

// Stores a unit's pixels, of which (0, 0) is (y, x) of an image of `height` x `width` pixels, where they are inside.
template <typename T, int ROWS, int COLUMNS, int VECTOR>
static __device__ __forceinline__ void store_unit(T *image, const DirectStrides &strides,
                                                  const float (&sum)[ROWS][COLUMNS][VECTOR], int y, int x, int height,
                                                  int width)
{
    T *const result = image + y * strides.y + x * strides.x;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if ((unsigned int)(y + i) < (unsigned int)height && (unsigned int)(x + j) < (unsigned int)width)
                store_channels(result + i * strides.y + j * strides.x, sum[i][j]);
}

#endif
