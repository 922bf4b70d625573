// transpose_images. Images from contiguous to channels_last and back: each is a matrix, [channel][pixel] or
// [pixel][channel], and the copy is its transpose.
//
// A block of 256 threads takes a tile of 64 x 64 elements: reads rows of it by vectors of 16 bytes, keeps it in shared
// memory, and writes rows of the transposed tile by vectors of 16 bytes, which it gathers down the columns. Rows that are
// no whole aligned vectors (49 pixels of 2 bytes) are read or written element by element, still side by side. Bound by
// memory: all of a thread's loads are in flight before the first is stored.
#include "cuda_ops/transpose_images.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/launch.cuh"

static constexpr int TILE = 64, THREADS = 256;

// T: an unsigned integer of the element's size. LOAD, STORE: elements at a time.
template <typename T, int LOAD, int STORE>
__global__ void __launch_bounds__(THREADS)
    transpose_images_kernel(T *to, const T *from, int rows, int columns, int across, int64_t tiles_of_image)
{
    typedef aligned_vector<T, LOAD> In;
    typedef aligned_vector<T, STORE> Out;
    constexpr int LOADS = TILE * TILE / LOAD / THREADS, STORES = TILE * TILE / STORE / THREADS;
    constexpr int LOAD_LANES = TILE / LOAD, STORE_LANES = TILE / STORE;
    // Rows four bytes beyond a multiple of the banks.
    __shared__ __align__(16) T tile[TILE][TILE + (sizeof(T) < 4 ? 4 / (int)sizeof(T) : 1)];
    const int64_t image = blockIdx.x / tiles_of_image;
    const int place = (int)(blockIdx.x % tiles_of_image), row = place / across * TILE, column = place % across * TILE;
    const T *const source = from + image * rows * columns;
    T *const target = to + image * rows * columns;
    wait_for_predecessor();
    release_successor();
    In in[LOADS];
    const int load_x = (int)threadIdx.x % LOAD_LANES * LOAD, load_y = (int)threadIdx.x / LOAD_LANES;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int y = load_y + i * (THREADS / LOAD_LANES);
        // A vector is inside or outside as a whole.
        if (row + y < rows && column + load_x < columns)
            in[i] = *(const In *)(source + (int64_t)(row + y) * columns + column + load_x);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int y = load_y + i * (THREADS / LOAD_LANES);
        if constexpr (sizeof(T) == 2 && LOAD > 1) {
#pragma unroll
            for (int e = 0; e < LOAD; e += 2)
                *(uint32_t *)&tile[y][load_x + e] = ((const uint32_t *)in[i].element)[e / 2];
        } else {
#pragma unroll
            for (int e = 0; e < LOAD; e++)
                tile[y][load_x + e] = in[i].element[e];
        }
    }
    __syncthreads();
    const int store_x = (int)threadIdx.x % STORE_LANES * STORE, store_y = (int)threadIdx.x / STORE_LANES;
#pragma unroll
    for (int i = 0; i < STORES; i++) {
        const int y = store_y + i * (THREADS / STORE_LANES);
        Out out;
#pragma unroll
        for (int e = 0; e < STORE; e++)
            out.element[e] = tile[store_x + e][y];
        if (column + y < columns && row + store_x < rows)
            *(Out *)(target + (int64_t)(column + y) * rows + row + store_x) = out;
    }
}

template <typename T>
static cuda_ops_status transpose(void *to, const void *from, int64_t images, int64_t rows, int64_t columns,
                                 cudaStream_t stream)
{
    constexpr int WIDE = 16 / (int)sizeof(T);
    const int64_t across = ceil_div(columns, TILE), tiles = across * ceil_div(rows, TILE);
    if (rows > INT32_MAX - TILE || columns > INT32_MAX - TILE || tiles > INT32_MAX / images)
        return CUDA_OPS_INVALID_ARGUMENT;
    const bool wide_load = is_aligned_16(from) && columns % WIDE == 0,
               wide_store = is_aligned_16(to) && rows % WIDE == 0;
    const auto kernel =
        wide_load ? (wide_store ? transpose_images_kernel<T, WIDE, WIDE> : transpose_images_kernel<T, WIDE, 1>)
                  : (wide_store ? transpose_images_kernel<T, 1, WIDE> : transpose_images_kernel<T, 1, 1>);
    launch_dependent(kernel, dim3((unsigned int)(tiles * images)), dim3(THREADS), 0, stream, (T *)to, (const T *)from,
                     (int)rows, (int)columns, (int)across, tiles);
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_transpose_images_cuda(void *to, const void *from, int64_t images, int64_t rows,
                                                          int64_t columns, cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (images == 0 || rows == 0 || columns == 0)
        return CUDA_OPS_SUCCESS;
    switch (dtype) {
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        return transpose<uint16_t>(to, from, images, rows, columns, stream);
    case CUDA_OPS_FLOAT32:
        return transpose<uint32_t>(to, from, images, rows, columns, stream);
    case CUDA_OPS_FLOAT64:
        return transpose<uint64_t>(to, from, images, rows, columns, stream);
    default:
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
}
