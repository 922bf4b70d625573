// conv2d's grouped path on Hopper: forward and backward_input by wgmma, in 16 bits.
//
// Tiles and slabs are those of forward_backward_input_sm80.cu, but the halo lies in shared memory as [vector of 16
// bytes][pixel], its pixels sorted by the remainders of their rows and columns, without a swizzle: what 64 pixels of
// the grid read of a tap are 64 neighbours, from any of them on, and so a matrix that wgmma takes as it is, m being
// pixels, a few of which are discarded at the ends of rows, n 32 columns of a group and k two vectors, each of a tap
// that may be another one's. So no product is of another group, and no thread loads a fragment. Bound by the copies of
// the halo and by what a block waits for between its tiles.
#include "conv2d/grouped/tiles.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/wgmma.cuh"

#if defined(CUDA_OPS_HOPPER_CODE)

static constexpr int COLUMNS = 32, ROWS = 64; // of a product

// Where a pixel of the halo is in each plane of vectors.
__device__ __forceinline__ int plane_slot(const GroupedTiles &t, int row, int column)
{
    const int y = row / t.step_y, x = column / t.step_x;
    const int remainder = (row - y * t.step_y) * t.step_x + column - x * t.step_x;
    return (remainder * t.rows_of_remainder + y) * t.slots_of_remainder + x;
}

// Lists the pixels of a plane as list_halo does; those that no pixel reads are at -1.
template <typename T>
__device__ __forceinline__ void list_plane(const GroupedTiles &t, int2 *halo)
{
    const int of_remainder = t.rows_of_remainder * t.slots_of_remainder;
    for (int slot = threadIdx.x; slot < t.plane_pixels; slot += blockDim.x) {
        const int remainder = slot / of_remainder, rest = slot - remainder * of_remainder;
        const int y = rest / t.slots_of_remainder, x = rest - y * t.slots_of_remainder;
        const int remainder_y = remainder / t.step_x, remainder_x = remainder - remainder_y * t.step_x;
        const int row = y * t.step_y + remainder_y, column = x * t.step_x + remainder_x;
        const bool read = row < t.halo_height && column < t.halo_width;
        halo[slot] =
            make_int2(read ? (row * t.width + column) * (int)t.source_pixel * (int)sizeof(T) : -1, row << 16 | column);
    }
}

// copy_halo to planes, whose pitch is an odd number of vectors, so that those of a pixel lie in different banks.
template <typename T>
__device__ __forceinline__ void copy_planes(uint32_t to, const GroupedTiles &t, const int2 *halo, GroupedPlace place,
                                            int first_group, int vectors)
{
    const HaloVector v = halo_vector<T>(t, place, first_group);
    if (v.first >= v.at_once || v.vector >= vectors)
        return;
    to += v.vector * t.plane_bytes;
#pragma unroll 4
    for (int pixel = v.first; pixel < t.plane_pixels; pixel += v.at_once) {
        const int2 known = halo[pixel];
        v.copy(to + pixel * 16, t, known, known.x >= 0);
    }
}

// Of tap `tap` of a phase: how far its matrix is from the halo's first pixel, in vectors; and its number in the kernel.
__device__ __forceinline__ int tap_slot(const GroupedTiles &t, const GroupedPhase &phase, int tap)
{
    const int j = tap / phase.taps_x, k = tap - j * phase.taps_x;
    return plane_slot(t, phase.first_y + j * phase.back_y, phase.first_x + k * phase.back_x);
}
__device__ __forceinline__ int tap_number(const GroupedImages &work, const GroupedPhase &phase, int tap)
{
    const int j = tap / phase.taps_x, k = tap - j * phase.taps_x;
    return (phase.tap_y + j * phase.next_y) * work.kernel_width + phase.tap_x + k * phase.next_x;
}

// The order of k: of each step the first of its two vectors, and in the upper half how far the other one is from it, in
// vectors; 0: it is not there. Pairs are of a tap; of an odd number of vectors the last ones are paired with those of
// the tap that follows, the one that lies lower first, since a descriptor has no negative distances. positions: of each
// tap of the kernel the first of its vectors in k and the last; -1: no pixel of the result meets it.
__device__ __forceinline__ void list_steps(const GroupedImages &work, uint32_t *steps, int2 *positions)
{
    const GroupedTiles &t = work.tiles;
    const int pairs = t.vectors / 2, plane = t.plane_bytes / 16;
    const bool odd = t.vectors % 2 != 0;
    for (int tap = threadIdx.x; tap < work.taps; tap += blockDim.x)
        positions[tap] = make_int2(-1, -1);
    __syncthreads();
    for (int p = 0; p < work.phase_count; p++) {
        const GroupedPhase &phase = work.phases[p];
        const int taps = phase.taps_y * phase.taps_x;
        for (int i = threadIdx.x; i < phase.steps; i += blockDim.x) {
            int first, distance;
            if (i < taps * pairs) {
                const int tap = i / pairs;
                first = tap_slot(t, phase, tap) + (i - tap * pairs) * 2 * plane;
                distance = plane;
            } else {
                const int tap = (i - taps * pairs) * 2;
                first = tap_slot(t, phase, tap) + (t.vectors - 1) * plane;
                distance = 0;
                if (tap + 1 < taps) {
                    const int second = tap_slot(t, phase, tap + 1) + (t.vectors - 1) * plane;
                    distance = abs(second - first);
                    first = min(first, second);
                }
            }
            steps[phase.start / 2 + i] = (uint32_t)first | (uint32_t)distance << 16;
        }
        for (int tap = threadIdx.x; tap < taps; tap += blockDim.x) {
            const int first = phase.start + tap * pairs * 2;
            int last = first + t.vectors - 1;
            if (odd) {
                const int other = tap ^ 1;
                const bool higher = other < taps && tap_slot(t, phase, tap) > tap_slot(t, phase, other);
                last = phase.start + taps * pairs * 2 + tap / 2 * 2 + (higher ? 1 : 0);
            }
            positions[tap_number(work, phase, tap)] = make_int2(first, last);
        }
    }
}

// The weights of a slab as [group][vector of k][column]: a vector is of k, or where BY_CHANNEL (backward_input,
// whose columns are the weight's channels) of 8 columns, and 8 of k follow each other.
template <typename T, bool BY_CHANNEL>
__device__ __forceinline__ void fill_columns(char *weights, const GroupedImages &work, const int2 *positions,
                                             int first_group, int groups)
{
    static_assert(sizeof(T) == 2);
    constexpr int VECTOR = 8;
    const int channels = work.weight_channels, rows = groups * work.weight_outs, taps = work.taps;
    const int last_vector = work.tiles.vectors - 1, group_bytes = work.k_vectors * work.weight_pitch;
    const T *const from = (const T *)work.weight + (int64_t)first_group * work.weight_outs * channels * taps;
    const auto place = [&](int group, int column, int2 position, int k) {
        const int vector = k / VECTOR, at = vector == last_vector ? position.y : position.x + vector, rest = k % VECTOR;
        char *const in_group = weights + group * group_bytes + at * work.weight_pitch;
        if (BY_CHANNEL)
            return (T *)(in_group + column / VECTOR * 128 + rest * 16) + column % VECTOR;
        return (T *)(in_group + column * 16) + rest;
    };
    if (work.weight_last && channels % VECTOR == 0 && (uintptr_t)work.weight % 16 == 0) {
        const int row_vectors = channels / VECTOR;
#pragma unroll 4
        for (int index = threadIdx.x; index < rows * taps * row_vectors; index += blockDim.x) {
            const uint4 loaded = *(const uint4 *)(from + (int64_t)index * VECTOR);
            const int rest = (int)work.by_row_vectors.of((uint32_t)index), c = (index - rest * row_vectors) * VECTOR;
            const int row = (int)work.by_taps.of((uint32_t)rest);
            const int2 position = positions[rest - row * taps];
            const int group = (int)work.by_weight_outs.of((uint32_t)row), o = row - group * work.weight_outs;
            if (position.x < 0)
                continue;
            if (!work.transposed || BY_CHANNEL) {
                *(uint4 *)(work.transposed ? place(group, c, position, o) : place(group, o, position, c)) = loaded;
            } else {
#pragma unroll
                for (int e = 0; e < VECTOR; e++)
                    *place(group, c + e, position, o) = ((const T *)&loaded)[e];
            }
        }
        return;
    }
    const int channel_stride = work.weight_last ? 1 : taps, tap_stride = work.weight_last ? channels : 1;
    for (int index = threadIdx.x; index < rows * channels; index += blockDim.x) {
        const int row = index / channels, c = index - row * channels;
        const int group = (int)work.by_weight_outs.of((uint32_t)row), o = row - group * work.weight_outs;
        const T *const pair = from + ((int64_t)row * channels * taps + c * channel_stride);
#pragma unroll 3
        for (int tap = 0; tap < taps; tap++) {
            const int2 position = positions[tap];
            if (position.x >= 0)
                *(work.transposed ? place(group, c, position, o) : place(group, o, position, c)) =
                    pair[tap * tap_stride];
        }
    }
}

// An address as descriptors have it.
__device__ __forceinline__ uint32_t vectors_of(uint32_t address)
{
    return (address & 0x3ffff) >> 4;
}

// The steps of a phase. halo: of the group and the first of the pixels, in vectors; weights alike.
template <typename T, bool BY_CHANNEL>
__device__ __forceinline__ void add_steps(float (&sum)[COLUMNS / 2], const GroupedImages &work, const uint32_t *list,
                                          int steps, uint32_t halo, uint32_t zeros, uint32_t weights)
{
    const uint64_t a = (uint64_t)(128 >> 4) << 32, b = wgmma_descriptor(0, 0, 128, (uint32_t)work.weight_pitch);
    const uint32_t b_step = 2 * (uint32_t)(work.weight_pitch >> 4);
    int step = 0;
    constexpr int AT_ONCE = 3; // whose list is read before the first
    for (; step + AT_ONCE < steps; step += AT_ONCE) {
        uint32_t low[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            low[i] = list[step + i] + halo;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++, weights += b_step)
            wgmma<T, COLUMNS, 0, BY_CHANNEL>(sum, a | low[i], b + weights, 1);
    }
#pragma unroll 1
    for (; step < steps; step++, weights += b_step) { // of the last the second vector may not be there
        uint32_t low = list[step] + halo;
        if (low >> 16 == 0)
            low |= (zeros - low) << 16;
        wgmma<T, COLUMNS, 0, BY_CHANNEL>(sum, a | low, b + weights, 1);
    }
}

// 64 pixels and 32 columns of a group.
template <typename T, bool BY_CHANNEL>
__device__ __forceinline__ void multiply(const GroupedImages &work, const GroupedPhase &phase, const uint32_t *steps,
                                         uint32_t halo, uint32_t zeros, uint32_t weights, GroupedPlace place,
                                         int first_pixel, int first_column, int group)
{
    const GroupedTiles &t = work.tiles;
    const int lane = threadIdx.x % 32, channel = group * work.columns + first_column;
    const int columns = work.columns - first_column;
    float sum[COLUMNS / 2];
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = 8 * c + lane % 4 * 2 + e;
            const bool there = work.bias && column < columns;
            const float bias = there ? load_as_accumulate(((const T *)work.bias)[channel + column]) : 0.0f;
            sum[4 * c + e] = sum[4 * c + 2 + e] = bias;
        }
    // Where the lane's rows are in the result.
    T *to[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pixel = first_pixel + (int)threadIdx.x % WARPGROUP / 32 * 16 + lane / 4 + 8 * half;
        const int v = (int)t.by_slots.of((uint32_t)pixel), u = pixel - v * t.slots_of_remainder;
        const int y = phase.result_y + (place.v + v) * work.result_step_y;
        const int x = phase.result_x + (place.u + u) * work.result_step_x;
        const bool there = v < t.tile_height && u < t.tile_width && y < work.result_height && x < work.result_width;
        to[half] =
            there ? (T *)work.result +
                        (((int64_t)place.image * work.result_height + y) * work.result_width + x) * work.result_pixel +
                        channel
                  : nullptr;
    }
    wgmma_pin(sum); // complete before the first product: else ptxas would serialize them (C7515)
    wgmma_fence();
    add_steps<T, BY_CHANNEL>(sum, work, steps + phase.start / 2, phase.steps, halo, zeros, weights);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_pin(sum);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t word[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            word[c] = pack<T>(sum[4 * c + 2 * half], sum[4 * c + 2 * half + 1]);
        const uint4 vector = gather_vector(word, lane);
        const int column = lane % 4 * 8;
        if (to[half] && column < columns)
            *(uint4 *)(to[half] + column) = vector;
    }
}
#endif // CUDA_OPS_HOPPER_CODE

// blockIdx: first tile, slab.
template <typename T, bool BY_CHANNEL>
__global__ void __launch_bounds__(GROUPED_THREADS, 4)
    conv2d_grouped_sm90_kernel(const __grid_constant__ GroupedImages work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ __align__(128) char shared[]; // the lists, weights, halos, zeros
    const GroupedTiles &t = work.tiles;
    uint32_t *const steps = (uint32_t *)shared;
    int2 *const positions = (int2 *)(shared + work.positions_at), *const halo_list = (int2 *)(shared + t.halo_at);
    const int first_group = blockIdx.y * t.slab_groups, groups = min(t.slab_groups, t.groups - first_group);
    const int vectors = groups * t.vectors;
    const uint32_t begin = shared_address(shared), stages = begin + work.stages_at, zeros = begin + work.zeros_at;
    prefetch_weights<T>(work, first_group, groups);
    list_plane<T>(t, halo_list);
    __syncthreads();
    wait_for_predecessor();
    const int first_tile = blockIdx.x;
    copy_planes<T>(stages, t, halo_list, grouped_place(t, first_tile), first_group, vectors);
    cp_async_commit_group();
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int at = work.weight_at + threadIdx.x * 16; at < work.stages_at; at += blockDim.x * 16)
        *(uint4 *)(shared + at) = zero;
    for (int at = threadIdx.x * 16; at < ROWS * 16; at += blockDim.x * 16)
        *(uint4 *)(shared + work.zeros_at + at) = zero;
    list_steps(work, steps, positions);
    __syncthreads();
    fill_columns<T, BY_CHANNEL>(shared + work.weight_at, work, positions, first_group, groups);
    const int warpgroup = __shfl_sync(FULL_WARP, (int)threadIdx.x / WARPGROUP, 0);
    const int plane = t.plane_bytes >> 4;
    const int count = work.row_blocks * groups * work.column_blocks;
    int stage = 0;
    for (int tile = first_tile; tile < t.tiles; tile += gridDim.x) {
        cp_async_wait_group<0>();
        fence_proxy_async();
        __syncthreads(); // before the other halo is overwritten, too
        const int next = tile + (int)gridDim.x;
        if (next < t.tiles)
            copy_planes<T>(stages + (1 - stage) * work.stage_bytes, t, halo_list, grouped_place(t, next), first_group,
                           vectors);
        else
            release_successor();
        cp_async_commit_group();
        const GroupedPlace place = grouped_place(t, tile);
        for (int p = 0; p < work.phase_count; p++)
            for (int product = (warpgroup + p) % 2; product < count; product += 2) {
                const int columns_block = (int)work.by_row_blocks.of((uint32_t)product);
                const int row_block = product - columns_block * work.row_blocks;
                const int group = (int)work.by_column_blocks.of((uint32_t)columns_block);
                const int column_block = columns_block - group * work.column_blocks;
                const uint32_t halo =
                    vectors_of(stages + stage * work.stage_bytes) + group * t.vectors * plane + row_block * ROWS;
                const uint32_t weights = vectors_of(begin + work.weight_at) + column_block * COLUMNS +
                                         (group * work.k_vectors + work.phases[p].start) * (work.weight_pitch >> 4);
                multiply<T, BY_CHANNEL>(work, work.phases[p], steps, halo, vectors_of(zeros), weights, place,
                                        row_block * ROWS, column_block * COLUMNS, first_group + group);
            }
        stage = 1 - stage;
    }
#endif
}

bool conv2d_grouped_has_sm90(void)
{
    return HAS_SM90A;
}

static cuda_ops_status start(void (*kernel)(GroupedImages), const GroupedImages &work, dim3 grid, int shared_bytes,
                             cudaStream_t stream)
{
    allow_shared_memory(kernel, (size_t)shared_bytes);
    launch_dependent(kernel, grid, GROUPED_THREADS, (size_t)shared_bytes, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_16bit(const GroupedImages &work, dim3 grid, int shared_bytes, cudaStream_t stream)
{
    return start(work.transposed ? conv2d_grouped_sm90_kernel<T, true> : conv2d_grouped_sm90_kernel<T, false>, work,
                 grid, shared_bytes, stream);
}

cuda_ops_status conv2d_grouped_images_sm90(const GroupedImages &work, dim3 grid, int shared_bytes, cuda_ops_dtype dtype,
                                           cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch_16bit<__nv_bfloat16>(work, grid, shared_bytes, stream);
    case CUDA_OPS_FLOAT16:
        return launch_16bit<__half>(work, grid, shared_bytes, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
