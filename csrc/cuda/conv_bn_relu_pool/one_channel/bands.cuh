// What kernels B and C of one_channel.cu share: images in shared memory.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_BANDS_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_ONE_CHANNEL_BANDS_CUH

#include "common/aligned_vector.cuh"
#include "conv_bn_relu_pool/one_channel/moments.cuh"

static constexpr int GRADIENT_SUMS = TAPS + 1; // of a channel in C: S and sum(dz)

// A unit of work is a band: some rows of windows of one image, with all pixels under them. A block takes several.
struct band_grid {
    int window_rows, window_columns; // of an image
    int rows, bands;                 // rows of windows in a band; bands in an image
    int pitch, tile;                 // pixels of a row and of a band in shared memory
    int units;                       // of a block
    int64_t all_units;
    unsigned int blocks;
};

static constexpr int WANTED_BLOCKS = 264;             // two, which fit, for each multiprocessor of the largest GPUs
static constexpr int MOST_BLOCKS = 2 * WANTED_BLOCKS; // of the kernels on CUDA cores, of which four fit
static constexpr int TILE_BYTES = 24 << 10;

// The largest divisor of `number` that is not above `most`.
static int divisor(int number, int most)
{
    while (number % most != 0)
        most--;
    return most;
}

static band_grid band_grid_of(const one_sizes &s, int element_size, int64_t most_blocks)
{
    band_grid b;
    b.window_rows = s.height / 2;
    b.window_columns = s.width / 2;
    b.pitch = (s.width + 2 + 1) / 2 * 2;
    // Bands of equal height, so that the windows of consecutive units are consecutive. Small batches get smaller bands.
    const int most_rows = (TILE_BYTES / element_size / b.pitch - 2) / 2;
    b.rows = divisor(b.window_rows, b.window_rows < most_rows ? b.window_rows : most_rows);
    while (b.rows > 4 && s.batch * (b.window_rows / b.rows) < WANTED_BLOCKS / 2)
        b.rows = divisor(b.window_rows, b.rows - 1);
    b.bands = b.window_rows / b.rows;
    b.tile = (2 * b.rows + 2) * b.pitch;
    b.all_units = s.batch * b.bands;
    const int64_t most = TILE_BYTES / element_size / b.tile > 0 ? TILE_BYTES / element_size / b.tile : 1;
    // One wave of blocks, each with the same number of rounds: a second wave, or a round that only some blocks have,
    // leaves multiprocessors idle.
    // Few units are not split among more blocks, each of which begins with the coefficients.
    const int64_t wanted = b.all_units > most_blocks ? most_blocks : WANTED_BLOCKS;
    const int64_t each = ceil_div(b.all_units, wanted), rounds = ceil_div(each, most);
    b.units = (int)ceil_div(each, rounds);
    b.blocks = (unsigned int)ceil_div(b.all_units, b.units * rounds);
    return b;
}

// Zeros the padding's columns, which no load overwrites.
template <typename U>
__device__ __forceinline__ void clear_border(U *tiles, const one_sizes &s, const band_grid &b)
{
    for (int line = threadIdx.x; line < b.units * (2 * b.rows + 2); line += THREADS) {
        tiles[line * b.pitch] = store_from_accumulate<U>(0.0f);
        for (int column = s.width + 1; column < b.pitch; column++)
            tiles[line * b.pitch + column] = store_from_accumulate<U>(0.0f);
    }
}

// Loads units [first, first + units) as aligned vectors of N pixels, `runs` to a line, and converts them to U. A thread
// has several loads in flight, since this is bound by their latency.
template <int N, typename U, typename T>
__device__ __forceinline__ void load_runs(U *tiles, const T *input, int64_t first, unsigned int runs,
                                          const one_sizes &s, const band_grid &b)
{
    typedef aligned_vector<T, N> run;
    constexpr unsigned int AT_ONCE = 4;
    const unsigned int tile_rows = 2 * b.rows + 2, count = b.units * tile_rows * runs;
    const int64_t first_image = first / b.bands;
    const unsigned int first_band = (unsigned int)(first - first_image * b.bands);
    const unsigned int units = (unsigned int)(b.all_units - first < b.units ? b.all_units - first : b.units);
    for (unsigned int begin = threadIdx.x; begin < count; begin += AT_ONCE * THREADS) {
        run value[AT_ONCE];
        U *target[AT_ONCE];
#pragma unroll
        for (unsigned int i = 0; i < AT_ONCE; i++) {
            const unsigned int index = begin + i * THREADS, line = index / runs, column = (index - line * runs) * N;
            const unsigned int unit = line / tile_rows, row = line - unit * tile_rows;
            const unsigned int band = first_band + unit, image = band / b.bands;
            const int y = (int)((band - image * b.bands) * 2 * b.rows + row) - 1;
            target[i] = index < count ? tiles + unit * b.tile + row * b.pitch + 1 + column : nullptr;
#pragma unroll
            for (int e = 0; e < N; e++)
                value[i].element[e] = store_from_accumulate<T>(0.0f);
            if (index < count && unit < units && y >= 0 && y < s.height)
                value[i] = *(const run *)(input + ((first_image + image) * s.height + y) * s.width + column);
        }
#pragma unroll
        for (unsigned int i = 0; i < AT_ONCE; i++)
            if (target[i])
#pragma unroll
                for (int e = 0; e < N; e++)
                    target[i][e] = store_from_accumulate<U>(load_as_accumulate(value[i].element[e]));
    }
}

// Pixels of units [first, first + units). Begins and ends with a barrier.
template <typename U, typename T>
__device__ __forceinline__ void load_tiles(U *tiles, const T *input, int64_t first, const one_sizes &s,
                                           const band_grid &b)
{
    __syncthreads(); // what was here before has been read
    if (s.width % 4 == 0 && reinterpret_cast<uintptr_t>(input) % (4 * sizeof(T)) == 0)
        load_runs<4>(tiles, input, first, s.width / 4, s, b);
    else
        load_runs<1>(tiles, input, first, s.width, s, b);
    __syncthreads();
}

struct one_strides {
    int64_t image, window, channel; // of output and argmax
};

static one_strides strides_of(const one_sizes &s, const band_grid &b)
{
    const int64_t windows = (int64_t)b.window_rows * b.window_columns;
    if (s.output_channels_last)
        return {windows * s.channels, s.channels, 1};
    return {windows * s.channels, 1, windows};
}

// The largest of a window's four values, and its position as one bit of a byte, 0x80 >> position: shifted left by
// `position`, the byte's sign is then a mask for C. Of equal values the first. (A byte of 0 says that relu gave 0.)
__device__ __forceinline__ float largest(float y0, float y1, float y2, float y3, unsigned int &position)
{
    const bool right = y1 > y0, lower_right = y3 > y2;
    const float upper = right ? y1 : y0, lower = lower_right ? y3 : y2;
    const bool down = lower > upper;
    position = down ? (lower_right ? 0x10u : 0x20u) : (right ? 0x40u : 0x80u);
    return down ? lower : upper;
}

#endif
