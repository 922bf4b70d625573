// conv2d's grouped path: backward_weight.
//
// A block walks over tiles of pixels of a slab of groups, of which it copies the next one's grad_output and halo while
// it multiplies. Rows of a warp's sums are 80 of a group's (tap, channel), columns 8, 16 or 32 of its outputs, and k
// are pixels: both operands are transposed on the way to registers, 16-bit ones by ldmatrix, TF32 element by element.
// Sums stay in registers until the end; blocks of the same slab are a cluster and add theirs in shared memory where they
// are few, and else leave them in the workspace.
#include "conv2d/grouped/tiles.cuh"
#include "ptx/cluster.cuh"

// Copies grad_output of a tile's pixels as [pixel][channel of the slab], zeros for those that are not there. places: of
// each pixel its place in the halo, and its row and column.
template <typename T>
__device__ __forceinline__ void copy_grad(uint32_t to, const GroupedWeight &work, const int2 *places,
                                          GroupedPlace place, int first_group, int vectors)
{
    const GroupedTiles &t = work.tiles;
    const int slab_vectors = t.slab_groups * work.out_vectors, first = (int)threadIdx.x / slab_vectors;
    const int vector = (int)threadIdx.x - first * slab_vectors, at_once = (int)blockDim.x / slab_vectors;
    if (first >= at_once)
        return;
    const char *const grad = (const char *)work.grad_output;
    const char *const from =
        grad +
        ((((int64_t)place.image * t.grid_height + place.v) * t.grid_width + place.u) * work.grad_pixel +
         (int64_t)first_group * work.outs) *
            (int)sizeof(T) +
        vector * 16;
    const int row_bytes = t.grid_width * (int)work.grad_pixel * (int)sizeof(T);
    const int column_bytes = (int)work.grad_pixel * (int)sizeof(T);
    const int height = vector < vectors ? min(t.tile_height, t.grid_height - place.v) : 0;
    const int width = min(t.tile_width, t.grid_width - place.u);
    to += first * work.grad_pixel_bytes + vector * 16;
#pragma unroll 4
    for (int pixel = first; pixel < work.pixels; pixel += at_once, to += at_once * work.grad_pixel_bytes) {
        const int at = places[pixel].y, v = at >> 16, u = at & 0xffff;
        const bool inside = (v < height) & (u < width);
        cp_async<16>(to, inside ? from + (v * row_bytes + u * column_bytes) : grad, inside ? 16 : 0);
    }
}

// Of row `row` of a group's sums, (tap, channel): its place in the halo. Rows past the last are computed like the
// first.
template <typename T>
__device__ __forceinline__ int place_of_row(const GroupedWeight &work, int row)
{
    const GroupedTiles &t = work.tiles;
    const int tap = row / t.channels, channel = row - tap * t.channels;
    if (tap >= work.taps)
        return 0;
    const int r = tap / work.kernel_width, s = tap - r * work.kernel_width;
    return (r * work.dilation_y * t.halo_slots + grouped_slot(t, s * work.dilation_x)) * t.pixel_bytes +
           channel * (int)sizeof(T);
}

// Both operands of a tile.
template <typename T>
__device__ __forceinline__ void copy_tile(const GroupedWeight &work, const int2 *places, const int2 *halo,
                                          GroupedPlace place, uint32_t to, int first_group, int groups)
{
    copy_halo<T>(to, work.tiles, halo, place, first_group, groups * work.tiles.vectors);
    copy_grad<T>(to + work.grad_at, work, places, place, first_group, groups * work.out_vectors);
}

// Where a tile's pixels are in the halo, and their rows and columns; those past the last have rows past it.
__device__ __forceinline__ void list_pixels(const GroupedWeight &work, int2 *places)
{
    const GroupedTiles &t = work.tiles;
    for (int pixel = threadIdx.x; pixel < work.pixels; pixel += blockDim.x) {
        const int v = (int)t.by_tile_width.of((uint32_t)pixel), u = pixel - v * t.tile_width;
        places[pixel] = make_int2((v * t.step_y * t.halo_slots + u) * t.pixel_bytes, v << 16 | u);
    }
}

// Stores the sum of row (tap, channel) and output o of a group, if there is one: of a split, or the result.
template <typename T>
__device__ __forceinline__ void store_sum(const GroupedWeight &work, int64_t split, int group, int row, int o,
                                          float value)
{
    const int channels = work.tiles.channels, rows = work.taps * channels;
    if (row >= rows || o >= work.outs)
        return;
    if (work.is_float) {
        ((float *)work.result)[((split * work.tiles.groups + group) * work.outs + o) * rows + row] = value;
        return;
    }
    const int tap = row / channels, channel = row - tap * channels;
    if (o >= work.result_outs || channel >= work.result_channels)
        return;
    const int64_t out = (int64_t)group * work.result_outs + o;
    const int64_t at = work.result_last ? (out * work.taps + tap) * work.result_channels + channel
                                        : (out * work.result_channels + channel) * work.taps + tap;
    ((T *)work.result)[at] = store_from_accumulate<T>(value);
}

// Adds what the blocks of a cluster have of the same tasks, each a share, and stores it. sums: [task][column][row], where
// the tiles were.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_cluster(const GroupedWeight &work, float *sums,
                                              const float (&sum)[GROUPED_WEIGHT_ROWS][COLUMNS][4], bool works,
                                              int first_group, int groups, int part)
{
    constexpr int ROWS = 16 * GROUPED_WEIGHT_ROWS, WIDE = 8 * COLUMNS, PITCH = GROUPED_SUM_PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cluster = gridDim.x, rank = blockIdx.x;
    if (works)
#pragma unroll
        for (int i = 0; i < GROUPED_WEIGHT_ROWS; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    sums[(warp * WIDE + 8 * c + lane % 4 * 2 + e % 2) * PITCH + 16 * i + lane / 4 + e / 2 * 8] =
                        sum[i][c][e];
    __syncwarp(); // barriers of clusters are whole warps'
    cluster_sync();
    const int blocks_of_group = work.row_blocks * work.column_blocks;
    for (int i = rank * blockDim.x + threadIdx.x; i < (int)blockDim.x / 32 * WIDE * ROWS; i += cluster * blockDim.x) {
        const int line = i / ROWS, row = i - line * ROWS, task = part * GROUPED_WARPS + line / WIDE;
        const int group = task / blocks_of_group, rest = task - group * blocks_of_group;
        if (task >= work.tasks || group >= groups)
            continue;
        float all = 0;
        for (int other = 0; other < cluster; other++)
            all += *mapa(sums + line * PITCH + row, other);
        store_sum<T>(work, 0, first_group + group, rest / work.column_blocks * ROWS + row,
                     rest % work.column_blocks * WIDE + line % WIDE, all);
    }
    __syncwarp();
    cluster_sync(); // others may still read this block's sums
}

// blockIdx: first tile; slab and part of its tasks.
template <typename T, int COLUMNS>
__global__ void __launch_bounds__(GROUPED_THREADS)
    conv2d_grouped_weight_kernel(const __grid_constant__ GroupedWeight work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int ROWS = GROUPED_WEIGHT_ROWS, K = 32 / (int)sizeof(T);
    extern __shared__ __align__(128) char shared[]; // zeros, the lists, two halos and grad_outputs
    const GroupedTiles &t = work.tiles;
    const int slab = blockIdx.y / work.parts, part = blockIdx.y - slab * work.parts;
    const int first_group = slab * t.slab_groups, groups = min(t.slab_groups, t.groups - first_group);
    const uint32_t zeros = shared_address(shared), stages = zeros + work.stages_at;
    int2 *const places = (int2 *)(shared + 16), *const halo_list = (int2 *)(shared + t.halo_at);
    if (threadIdx.x == 0)
        *(uint4 *)shared = make_uint4(0, 0, 0, 0);
    list_pixels(work, places);
    list_halo<T>(t, halo_list);
    __syncthreads();
    wait_for_predecessor();
    copy_tile<T>(work, places, halo_list, grouped_place(t, blockIdx.x), stages, first_group, groups);
    cp_async_commit_group();

    const int lane = threadIdx.x % 32, task = part * GROUPED_WARPS + (int)threadIdx.x / 32;
    const int blocks_of_group = work.row_blocks * work.column_blocks, group = task / blocks_of_group;
    const int rest = task - group * blocks_of_group, column_block = rest % work.column_blocks;
    const bool works = task < work.tasks && group < groups; // of the whole warp
    const int first_row = rest / work.column_blocks * ROWS * 16, first_column = column_block * COLUMNS * 8;
    // In 16 bits a lane has the row of a matrix that ldmatrix reads, else two rows of the fragment.
    int row_place[ROWS][sizeof(T) == 4 ? 2 : 1];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if constexpr (sizeof(T) == 4) {
            row_place[i][0] = place_of_row<T>(work, first_row + 16 * i + lane / 4);
            row_place[i][1] = place_of_row<T>(work, first_row + 16 * i + lane / 4 + 8);
        } else {
            row_place[i][0] = place_of_row<T>(work, first_row + 16 * i + lane / 8 % 2 * 8);
        }
    }
    float sum[ROWS][COLUMNS][4] = {};
    int stage = 0;
    for (int tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
        const int next = tile + (int)gridDim.x;
        if (next < t.tiles)
            copy_tile<T>(work, places, halo_list, grouped_place(t, next), stages + (1 - stage) * work.stage_bytes,
                         first_group, groups);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        const GroupedPlace place = grouped_place(t, tile);
        const int height = min(t.tile_height, t.grid_height - place.v),
                  width = min(t.tile_width, t.grid_width - place.u);
        const uint32_t halo = stages + stage * work.stage_bytes + group * t.vectors * 16;
        const uint32_t grad = stages + stage * work.stage_bytes + work.grad_at + group * work.out_vectors * 16;
        // Where a pixel that is not there has its zeros, the image may have an infinity.
        const auto pixel_at = [&](int pixel, bool &there) {
            const int2 known = places[pixel];
            there = known.y >> 16 < height && (known.y & 0xffff) < width;
            return halo + known.x;
        };
        for (int step = 0; works && step < work.pixels / K; step++) {
            uint32_t right[COLUMNS][2];
            if constexpr (sizeof(T) == 4) {
                const int pixel = step * K + lane % 4;
                bool there[2];
                const uint32_t at[2] = {pixel_at(pixel, there[0]), pixel_at(pixel + 4, there[1])};
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = min(first_column + 8 * c + lane / 4, work.outs - 1);
                        uint32_t bits;
                        ld_shared(bits, grad + (pixel + 4 * e) * work.grad_pixel_bytes + column * 4);
                        right[c][e] = grouped_operand<T>(bits);
                    }
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    uint32_t left[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        uint32_t bits;
                        ld_shared(bits, there[e / 2] ? at[e / 2] + row_place[i][e % 2] : zeros);
                        left[e] = grouped_operand<T>(bits);
                    }
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        mma_sync<T>(sum[i][c], left, right[c][0], right[c][1]);
                }
            } else {
                bool there;
                const uint32_t at = pixel_at(step * K + lane / 16 * 8 + lane % 8, there);
                const uint32_t row = grad + (step * K + lane % 16) * work.grad_pixel_bytes;
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if constexpr (COLUMNS == 1) {
                        ldmatrix_x2_trans(right[0][0], right[0][1], row + first_column * 2);
                    } else if (c % 2 == 0) {
                        const int vector = min(first_column / 8 + c + lane / 16, work.out_vectors - 1);
                        uint32_t four[4];
                        ldmatrix_x4_trans(four, row + vector * 16);
                        right[c][0] = four[0], right[c][1] = four[1];
                        right[c + 1][0] = four[2], right[c + 1][1] = four[3];
                    }
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    uint32_t left[4];
                    ldmatrix_x4_trans(left, there ? at + row_place[i][0] : zeros);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        mma_sync<T>(sum[i][c], left, right[c][0], right[c][1]);
                }
            }
        }
        __syncthreads(); // before both are overwritten
        stage = 1 - stage;
    }
    release_successor();
    if (work.cluster) {
        store_cluster<T>(work, (float *)(shared + work.stages_at), sum, works, first_group, groups, part);
        return;
    }
    if (!works)
        return;

#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store_sum<T>(work, blockIdx.x, first_group + group, first_row + 16 * i + lane / 4 + e / 2 * 8,
                             first_column + 8 * c + lane % 4 * 2 + e % 2, sum[i][c][e]);
#endif
}

// float32 as it is, by multiply-adds: a thread has four channels of a tap and eight outputs of a group, and every
// work.pixel_splits-th pixel. blockIdx as above.
__global__ void __launch_bounds__(GROUPED_THREADS, 2)
    conv2d_grouped_weight_float32_kernel(const __grid_constant__ GroupedWeight work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) char shared[]; // as above
    const GroupedTiles &t = work.tiles;
    const int slab = blockIdx.y / work.parts, part = blockIdx.y - slab * work.parts;
    const int first_group = slab * t.slab_groups, groups = min(t.slab_groups, t.groups - first_group);
    const uint32_t stages = shared_address(shared) + work.stages_at;
    int2 *const places = (int2 *)(shared + 16), *const halo_list = (int2 *)(shared + t.halo_at);
    list_pixels(work, places);
    list_halo<float>(t, halo_list);
    __syncthreads();
    wait_for_predecessor();
    copy_tile<float>(work, places, halo_list, grouped_place(t, blockIdx.x), stages, first_group, groups);
    cp_async_commit_group();

    const int pixel_split = part > 0 ? 0 : (int)threadIdx.x / work.tasks;
    const int task = part * GROUPED_THREADS + (int)threadIdx.x - pixel_split * work.tasks;
    const int rows = work.taps * t.channels, row_blocks = rows / 4;
    const int block = task / row_blocks, row = (task - block * row_blocks) * 4;
    const int group = block / work.column_blocks, first_column = (block - group * work.column_blocks) * 8;
    const bool works = task < work.tasks && group < groups && pixel_split < work.pixel_splits;
    const int row_place = place_of_row<float>(work, row) + group * t.vectors * 16;
    float sum[4][8] = {};
    int stage = 0;
    for (int tile = blockIdx.x; tile < t.tiles; tile += gridDim.x) {
        const int next = tile + (int)gridDim.x;
        if (next < t.tiles)
            copy_tile<float>(work, places, halo_list, grouped_place(t, next), stages + (1 - stage) * work.stage_bytes,
                             first_group, groups);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        const GroupedPlace place = grouped_place(t, tile);
        const int height = min(t.tile_height, t.grid_height - place.v);
        const int width = min(t.tile_width, t.grid_width - place.u);
        const uint32_t halo = stages + stage * work.stage_bytes + row_place;
        // The last outputs of a group may be fewer than eight: what follows them is multiplied, and not stored.
        const uint32_t grad =
            stages + stage * work.stage_bytes + work.grad_at + group * work.out_vectors * 16 + first_column * 4;
        for (int pixel = pixel_split; works && pixel < t.tile_height * t.tile_width; pixel += work.pixel_splits) {
            const int2 known = places[pixel];
            if (known.y >> 16 >= height || (known.y & 0xffff) >= width)
                continue;
            const float4 in = ld_shared_v4_f32(halo + known.x);
            const float4 low = ld_shared_v4_f32(grad + pixel * work.grad_pixel_bytes);
            const float4 high = ld_shared_v4_f32(grad + pixel * work.grad_pixel_bytes + 16);
            const float left[4] = {in.x, in.y, in.z, in.w};
            const float right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int c = 0; c < 8; c++)
                    sum[i][c] += left[i] * right[c];
        }
        __syncthreads();
        stage = 1 - stage;
    }
    release_successor();
    if (!works)
        return;
    const int64_t split = (int64_t)blockIdx.x * work.pixel_splits + pixel_split;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int c = 0; c < 8; c++)
            store_sum<float>(work, split, first_group + group, row + i, first_column + c, sum[i][c]);
#endif
}

static cuda_ops_status start(void (*kernel)(GroupedWeight), const GroupedWeight &work, dim3 grid, int threads,
                             int shared_bytes, cudaStream_t stream)
{
    allow_shared_memory(kernel, (size_t)shared_bytes);
    if (!work.cluster) {
        launch_dependent(kernel, grid, threads, (size_t)shared_bytes, stream, work);
        return launch_status();
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {grid.x, 1, 1}; // the blocks of a slab
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned int)threads);
    config.dynamicSmemBytes = (size_t)shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config, kernel, work); // its error is launch_status()'s
    return launch_status();
}

template <typename T>
static cuda_ops_status launch(const GroupedWeight &work, int columns, dim3 grid, int threads, int shared_bytes,
                              cudaStream_t stream)
{
    return start(columns == 4   ? conv2d_grouped_weight_kernel<T, 4>
                 : columns == 2 ? conv2d_grouped_weight_kernel<T, 2>
                                : conv2d_grouped_weight_kernel<T, 1>,
                 work, grid, threads, shared_bytes, stream);
}

cuda_ops_status conv2d_grouped_weight(const GroupedWeight &work, int columns, dim3 grid, int threads, int shared_bytes,
                                      cuda_ops_dtype dtype, cudaStream_t stream)
{
    switch (dtype) {
    case CUDA_OPS_BFLOAT16:
        return launch<__nv_bfloat16>(work, columns, grid, threads, shared_bytes, stream);
    case CUDA_OPS_FLOAT16:
        return launch<__half>(work, columns, grid, threads, shared_bytes, stream);
    case CUDA_OPS_FLOAT32:
        if (columns == 0)
            return start(conv2d_grouped_weight_float32_kernel, work, grid, threads, shared_bytes, stream);
        return launch<float>(work, columns, grid, threads, shared_bytes, stream);
    default:
        return CUDA_OPS_INVALID_ARGUMENT;
    }
}
