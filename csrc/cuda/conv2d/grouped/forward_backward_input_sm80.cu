// conv2d's grouped path: forward and backward_input.
//
// A block has the weights of a slab of groups in shared memory, and walks over tiles of pixels, of which it copies the
// next one's halo while it multiplies. A warp makes 64 pixels by 8, 16 or 32 columns of a group: rows of the fragments
// of A are pixels, k is (tap, channel) without gaps in vectors of 16 bytes, two a step, each anywhere in the halo.
#include "conv2d/grouped/tiles.cuh"

// The order of k in shared memory: of each vector its place in the halo, or -1 for the zeros at the end of a phase;
// and of each tap the vector that begins it, or -1 where no pixel of the result meets it.
__device__ __forceinline__ void list_vectors(const GroupedImages &work, int *offsets, int *positions)
{
    const GroupedTiles &t = work.tiles;
    for (int tap = threadIdx.x; tap < work.taps; tap += blockDim.x)
        positions[tap] = -1;
    __syncthreads();
    for (int p = 0; p < work.phase_count; p++) {
        const GroupedPhase &phase = work.phases[p];
        for (int i = threadIdx.x; i < 2 * phase.steps; i += blockDim.x) {
            const int tap = i / t.vectors, vector = i - tap * t.vectors;
            const int j = tap / phase.taps_x, k = tap - j * phase.taps_x;
            int offset = -1;
            if (j < phase.taps_y) {
                offset = ((phase.first_y + j * phase.back_y) * t.halo_slots +
                          grouped_slot(t, phase.first_x + k * phase.back_x)) *
                             t.pixel_bytes +
                         vector * 16;
                if (vector == 0)
                    positions[(phase.tap_y + j * phase.next_y) * work.kernel_width + phase.tap_x + k * phase.next_x] =
                        phase.start + i;
            }
            offsets[phase.start + i] = offset;
        }
    }
}

// The weights of a slab as [group][column][vector of k]. Of channels_last weights of whole vectors a thread reads
// those, else the taps of a pair of channels, so that neither has much to compute for an element.
template <typename T>
__device__ __forceinline__ void fill_weights(char *weights, const GroupedImages &work, const int *positions,
                                             int first_group, int groups)
{
    constexpr int VECTOR = 16 / (int)sizeof(T);
    const int channels = work.weight_channels, rows = groups * work.weight_outs, taps = work.taps;
    const T *const from = (const T *)work.weight + (int64_t)first_group * work.weight_outs * channels * taps;
    const auto place = [&](int group, int column, int position, int k) {
        return (T *)(weights + (group * work.weight_rows + column) * work.weight_pitch + (position + k / VECTOR) * 16 +
                     k % VECTOR * (int)sizeof(T));
    };
    if (work.weight_last && channels % VECTOR == 0 && (uintptr_t)work.weight % 16 == 0) {
        const int row_vectors = channels / VECTOR;
#pragma unroll 4
        for (int index = threadIdx.x; index < rows * taps * row_vectors; index += blockDim.x) {
            const uint4 loaded = *(const uint4 *)(from + (int64_t)index * VECTOR);
            const int rest = index / row_vectors, c = (index - rest * row_vectors) * VECTOR;
            const int row = rest / taps, position = positions[rest - row * taps];
            const int group = row / work.weight_outs, o = row - group * work.weight_outs;
            if (position < 0)
                continue;
            if (!work.transposed) {
                *(uint4 *)place(group, o, position, c) = loaded;
            } else {
                char *const to = (char *)place(group, c, position, o);
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    *(T *)(to + e * work.weight_pitch) = ((const T *)&loaded)[e];
            }
        }
        return;
    }
    const int channel_stride = work.weight_last ? 1 : taps, tap_stride = work.weight_last ? channels : 1;
    for (int index = threadIdx.x; index < rows * channels; index += blockDim.x) {
        const int row = index / channels, c = index - row * channels;
        const int group = row / work.weight_outs, o = row - group * work.weight_outs;
        const T *const pair = from + ((int64_t)row * channels * taps + c * channel_stride);
        T *const to = work.transposed ? place(group, c, 0, o) : place(group, o, 0, c);
#pragma unroll 9
        for (int tap = 0; tap < taps; tap++)
            if (positions[tap] >= 0)
                to[positions[tap] * VECTOR] = pair[tap * tap_stride];
    }
}

// Stores two neighbours of a row of the result by one instruction.
template <typename T>
__device__ __forceinline__ void store_pair(T *to, float x, float y)
{
    if constexpr (sizeof(T) == 4) {
        *(float2 *)to = make_float2(x, y);
    } else {
        const T pair[2] = {store_from_accumulate<T>(x), store_from_accumulate<T>(y)};
        *(uint32_t *)to = (uint32_t)__builtin_bit_cast(unsigned short, pair[0]) |
                          (uint32_t)__builtin_bit_cast(unsigned short, pair[1]) << 16;
    }
}

// The pixels of a warp's products: where each row of a lane begins in the halo, and in an image of the result; -1: it
// is not there. In tensor cores' fragments a lane reads rows lane % 16 of four times 16, and holds rows lane / 4 and
// lane / 4 + 8 of each; of float32 as it is it has rows lane of four times 32.
template <int RESULTS>
struct WarpPixels {
    int from[GROUPED_ROWS], to[RESULTS];
};

template <int RESULTS>
__device__ __forceinline__ void find_pixels(WarpPixels<RESULTS> &at, const GroupedImages &work,
                                            const GroupedPhase &phase, GroupedPlace place, int first_pixel)
{
    constexpr bool FRAGMENTS = RESULTS != GROUPED_ROWS;
    const GroupedTiles &t = work.tiles;
    const int lane = threadIdx.x % 32, pixels = t.tile_height * t.tile_width;
#pragma unroll
    for (int i = 0; i < GROUPED_ROWS; i++) {
        const int pixel = min(first_pixel + (FRAGMENTS ? 16 * i + lane % 16 : 32 * i + lane), pixels - 1);
        const int v = (int)t.by_tile_width.of((uint32_t)pixel), u = pixel - v * t.tile_width;
        at.from[i] = (v * t.step_y * t.halo_slots + u) * t.pixel_bytes;
    }
#pragma unroll
    for (int i = 0; i < RESULTS; i++) {
        const int pixel = first_pixel + (FRAGMENTS ? 8 * i + lane / 4 : 32 * i + lane);
        const int v = (int)t.by_tile_width.of((uint32_t)pixel), u = pixel - v * t.tile_width;
        const int y = phase.result_y + (place.v + v) * work.result_step_y;
        const int x = phase.result_x + (place.u + u) * work.result_step_x;
        const bool there = pixel < pixels && y < work.result_height && x < work.result_width;
        at.to[i] = there ? (y * work.result_width + x) * (int)work.result_pixel : -1;
    }
}

// float32 as it is, by multiply-adds: of a warp 128 pixels and 8 columns of a group.
__device__ __forceinline__ void multiply_float32(const GroupedImages &work, const GroupedPhase &phase,
                                                 const WarpPixels<GROUPED_ROWS> &at, const int *offsets, uint32_t halo,
                                                 uint32_t weights, float *result, int first_column, int group)
{
    const int channel = group * work.columns + first_column, columns = work.columns - first_column;
    float sum[4][8];
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const float bias = work.bias && c < columns ? ((const float *)work.bias)[channel + c] : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i][c] = bias;
    }
    const uint32_t column = weights + first_column * work.weight_pitch + phase.start * 16;
    const int *const list = offsets + phase.start;
    for (int k = 0; k < 2 * phase.steps; k++) {
        const int offset = list[k];
        if (offset < 0)
            break;
        float4 in[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            in[i] = ld_shared_v4_f32(halo + at.from[i] + offset);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float4 w = ld_shared_v4_f32(column + c * work.weight_pitch + k * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) { // four multiply-adds, in the order of the sum
                sum[i][c] += in[i].x * w.x;
                sum[i][c] += in[i].y * w.y;
                sum[i][c] += in[i].z * w.z;
                sum[i][c] += in[i].w * w.w;
            }
        }
    }
    const bool whole = columns >= 8 && work.result_pixel % 4 == 0 && channel % 4 == 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (at.to[i] < 0)
            continue;
        float *const to = result + at.to[i] + channel;
        if (whole) {
            *(float4 *)to = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
            *(float4 *)(to + 4) = make_float4(sum[i][4], sum[i][5], sum[i][6], sum[i][7]);
        } else {
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c < columns)
                    to[c] = sum[i][c];
        }
    }
}

// A warp's sums of whole vectors of 16 bytes: words of [pixel][column / 8], each of two columns, those of a pixel's 8 in the
// four lanes that hold it. They put together those of four, of one pixel or of several, and each stores one: a sector
// that is written in parts costs the L2 cache more than one.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_columns(const WarpPixels<2 * GROUPED_ROWS> &at,
                                              const uint32_t (&word)[2 * GROUPED_ROWS][COLUMNS], T *result, int columns)
{
    const int lane = threadIdx.x % 32, column = lane % 4 % COLUMNS * 8;
    T *const to = result + column;
#pragma unroll
    for (int first = 0; first < 2 * GROUPED_ROWS * COLUMNS; first += 4) {
        uint32_t four[4];
        int offset = 0;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            four[m] = word[(first + m) / COLUMNS][(first + m) % COLUMNS];
            if (m == 0 || lane % 4 == m)
                offset = at.to[(first + m) / COLUMNS];
        }
        const uint4 vector = gather_vector(four, lane);
        if (offset >= 0 && column < columns)
            *(uint4 *)(to + offset) = vector;
    }
}

// What becomes of a product of 8 columns: it is stored, or kept for the next one's, which are the next 8 columns.
enum Turn { ALONE, FIRST_OF_PAIR, SECOND_OF_PAIR };

// On tensor cores: of a warp 64 pixels and COLUMNS times 8 columns of a group.
template <typename T, int COLUMNS>
__device__ __forceinline__ void multiply(const GroupedImages &work, const GroupedPhase &phase,
                                         const WarpPixels<2 * GROUPED_ROWS> &at, const int *offsets, uint32_t halo,
                                         uint32_t weights, uint32_t zeros, T *result, int first_column, int group,
                                         Turn turn, uint32_t (&kept)[2 * GROUPED_ROWS])
{
    const int lane = threadIdx.x % 32;
    uint32_t column[(COLUMNS + 1) / 2];
#pragma unroll
    for (int c = 0; c < (COLUMNS + 1) / 2; c++) {
        const int line = COLUMNS == 1 ? lane % 8 : lane % 8 + lane / 16 * 8 + 16 * c;
        // Columns past the group's are multiplied, and not stored.
        column[c] = weights + min(first_column + line, work.weight_rows - 1) * work.weight_pitch +
                    (phase.start + lane / 8 % 2) * 16;
    }
    float sum[GROUPED_ROWS][COLUMNS][4] = {};
    const int *const list = offsets + phase.start + lane / 16;
    const auto multiply_step = [&](int step, int offset, bool is_gap) {
        uint32_t right[(COLUMNS + 1) / 2][4];
#pragma unroll
        for (int c = 0; c < (COLUMNS + 1) / 2; c++) {
            if constexpr (COLUMNS == 1)
                ldmatrix_x2(right[c][0], right[c][1], column[c] + step * 32);
            else
                ldmatrix_x4(right[c], column[c] + step * 32);
#pragma unroll
            for (int e = 0; e < (COLUMNS == 1 ? 2 : 4); e++)
                right[c][e] = grouped_operand<T>(right[c][e]);
        }
        uint32_t left[GROUPED_ROWS][4];
#pragma unroll
        for (int i = 0; i < GROUPED_ROWS; i++)
            ldmatrix_x4(left[i], is_gap ? zeros : halo + at.from[i] + offset);
#pragma unroll
        for (int i = 0; i < GROUPED_ROWS; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                left[i][e] = grouped_operand<T>(left[i][e]);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                mma_sync<T>(sum[i][c], left[i], right[c / 2][c % 2 * 2], right[c / 2][c % 2 * 2 + 1]);
        }
    };
    const int last = phase.steps - 1; // whose second vector may not be there
    for (int step = 0; step < last; step++)
        multiply_step(step, list[2 * step], false);
    if (last >= 0)
        multiply_step(last, list[2 * last], list[2 * last] < 0);

    // A thread holds two neighbours of each 8 columns.
    const int channel = group * work.columns;
    const bool paired = work.result_pixel % 2 == 0 && channel % 2 == 0 && (uintptr_t)work.result % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int column_at = first_column + 8 * c + lane % 4 * 2;
        const bool first = column_at < work.columns, second = column_at + 1 < work.columns;
        if (work.bias) {
            const T *const bias = (const T *)work.bias + channel + column_at;
            const float x = first ? load_as_accumulate(bias[0]) : 0.0f, y = second ? load_as_accumulate(bias[1]) : 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPED_ROWS; i++)
                sum[i][c][0] += x, sum[i][c][1] += y, sum[i][c][2] += x, sum[i][c][3] += y;
        }
        T *const to = result + channel + column_at;
        if (work.stores_vectors) // of all columns together, below
            continue;
        if (paired && first_column + 8 * c + 8 <= work.columns) { // of the whole warp
#pragma unroll
            for (int i = 0; i < 2 * GROUPED_ROWS; i++)
                if (at.to[i] >= 0)
                    store_pair(to + at.to[i], sum[i / 2][c][i % 2 * 2], sum[i / 2][c][i % 2 * 2 + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * GROUPED_ROWS; i++) {
                if (at.to[i] >= 0 && first)
                    to[at.to[i]] = store_from_accumulate<T>(sum[i / 2][c][i % 2 * 2]);
                if (at.to[i] >= 0 && second)
                    to[at.to[i] + 1] = store_from_accumulate<T>(sum[i / 2][c][i % 2 * 2 + 1]);
            }
        }
    }
    if constexpr (sizeof(T) == 2)
        if (work.stores_vectors) {
            uint32_t word[2 * GROUPED_ROWS][COLUMNS];
#pragma unroll
            for (int i = 0; i < 2 * GROUPED_ROWS; i++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    word[i][c] = pack<T>(sum[i / 2][c][i % 2 * 2], sum[i / 2][c][i % 2 * 2 + 1]);
            if (COLUMNS > 1 || turn == ALONE) {
                store_columns<T>(at, word, result + channel + first_column, work.columns - first_column);
            } else if (turn == FIRST_OF_PAIR) {
#pragma unroll
                for (int i = 0; i < 2 * GROUPED_ROWS; i++)
                    kept[i] = word[i][0];
            } else {
                uint32_t pair[2 * GROUPED_ROWS][2];
#pragma unroll
                for (int i = 0; i < 2 * GROUPED_ROWS; i++)
                    pair[i][0] = kept[i], pair[i][1] = word[i][0];
                store_columns<T>(at, pair, result + channel + first_column - 8, 16);
            }
        }
}

// blockIdx: first tile, slab. COLUMNS is 0 for float32 as it is.
template <typename T, int COLUMNS>
__global__ void __launch_bounds__(GROUPED_THREADS, COLUMNS == 1 ? 3 : 2)
    conv2d_grouped_kernel(const __grid_constant__ GroupedImages work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) char shared[]; // zeros, the lists, weights, two halos
    const GroupedTiles &t = work.tiles;
    int *const offsets = (int *)(shared + 16), *const positions = (int *)(shared + work.positions_at);
    int2 *const halo_list = (int2 *)(shared + t.halo_at);
    const int first_group = blockIdx.y * t.slab_groups, groups = min(t.slab_groups, t.groups - first_group);
    const int vectors = groups * t.vectors;
    const uint32_t stages = shared_address(shared) + work.stages_at;
    prefetch_weights<T>(work, first_group, groups);
    list_halo<T>(t, halo_list);
    __syncthreads();
    wait_for_predecessor();
    copy_halo<T>(stages, t, halo_list, grouped_place(t, blockIdx.x), first_group, vectors);
    cp_async_commit_group();
    const uint4 zero = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0)
        *(uint4 *)shared = zero;
    for (int at = work.weight_at + threadIdx.x * 16; at < work.stages_at; at += blockDim.x * 16)
        *(uint4 *)(shared + at) = zero;
    list_vectors(work, offsets, positions);
    __syncthreads();
    fill_weights<T>(shared + work.weight_at, work, positions, first_group, groups);

    constexpr int RESULTS = COLUMNS == 0 ? GROUPED_ROWS : 2 * GROUPED_ROWS;
    constexpr int PIXELS = COLUMNS == 0 ? 128 : 16 * GROUPED_ROWS, WIDE = COLUMNS == 0 ? 8 : 8 * COLUMNS;
    const int warp = threadIdx.x / 32, of_pixels = groups * work.column_blocks;
    int stage = 0;
    for (int tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
        const int next = tile + (int)gridDim.x;
        if (next < t.tiles)
            copy_halo<T>(stages + (1 - stage) * work.stage_bytes, t, halo_list, grouped_place(t, next), first_group,
                         vectors);
        else
            release_successor();
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        const GroupedPlace place = grouped_place(t, tile);
        T *const result =
            (T *)work.result + (int64_t)place.image * work.result_height * work.result_width * work.result_pixel;
        // A warp has neighbours among the products of a phase, which have their pixels alike.
        for (int p = 0; p < work.phase_count; p++) {
            const GroupedPhase &phase = work.phases[p];
            const int count = work.row_blocks * of_pixels, part = (warp + p) % GROUPED_WARPS;
            // Two products of 8 columns each fill sectors of the result, where no warp has more of them for it.
            const int pairs = (count / 2 + GROUPED_WARPS - 1) / GROUPED_WARPS;
            const int together = COLUMNS == 1 && sizeof(T) == 2 && work.stores_vectors && of_pixels % 2 == 0 &&
                                         2 * pairs <= (count + GROUPED_WARPS - 1) / GROUPED_WARPS
                                     ? 2
                                     : 1;
            const int end = count / together * (part + 1) / GROUPED_WARPS * together;
            WarpPixels<RESULTS> at;
            uint32_t kept[2 * GROUPED_ROWS];
            int found = -1;
            for (int product = count / together * part / GROUPED_WARPS * together; product < end; product++) {
                const int row_block = product / of_pixels, rest = product - row_block * of_pixels;
                const int group = rest / work.column_blocks, column_block = rest - group * work.column_blocks;
                if (row_block != found)
                    find_pixels(at, work, phase, place, row_block * PIXELS);
                found = row_block;
                const uint32_t halo = stages + stage * work.stage_bytes + group * t.vectors * 16;
                const uint32_t weights =
                    shared_address(shared) + work.weight_at + group * work.weight_rows * work.weight_pitch;
                if constexpr (COLUMNS == 0)
                    multiply_float32(work, phase, at, offsets, halo, weights, result, column_block * WIDE,
                                     first_group + group);
                else
                    multiply<T, COLUMNS>(work, phase, at, offsets, halo, weights, shared_address(shared), result,
                                         column_block * WIDE, first_group + group,
                                         together == 1   ? ALONE
                                         : rest % 2 == 0 ? FIRST_OF_PAIR
                                                         : SECOND_OF_PAIR,
                                         kept);
            }
        }
        __syncthreads(); // before the halo is overwritten
        stage = 1 - stage;
    }
#endif
}

static cuda_ops_status start(void (*kernel)(GroupedImages), const GroupedImages &work, dim3 grid, int shared_bytes,
                             cudaStream_t stream)
{
    allow_shared_memory(kernel, (size_t)shared_bytes);
    launch_dependent(kernel, grid, GROUPED_THREADS, (size_t)shared_bytes, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch(const GroupedImages &work, int columns, dim3 grid, int shared_bytes, cudaStream_t stream)
{
    return start(columns == 4   ? conv2d_grouped_kernel<T, 4>
                 : columns == 2 ? conv2d_grouped_kernel<T, 2>
                                : conv2d_grouped_kernel<T, 1>,
                 work, grid, shared_bytes, stream);
}

cuda_ops_status conv2d_grouped_images(const GroupedImages &work, int columns, dim3 grid, int shared_bytes,
                                      cuda_ops_dtype dtype, cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16>(work, columns, grid, shared_bytes, stream);
    case CUDA_OPS_FLOAT16:
        return launch<__half>(work, columns, grid, shared_bytes, stream);
    case CUDA_OPS_FLOAT32:
        if (columns == 0)
            return start(conv2d_grouped_kernel<float, 0>, work, grid, shared_bytes, stream);
        return launch<float>(work, columns, grid, shared_bytes, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
