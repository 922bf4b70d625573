// to[a][t][b] = from[a][t][b]: a weight in the order that a tensor-core path takes, with zeros between groups.
//
// A block of 256 threads transposes tiles of 32 x 32 through shared memory: read along the axis of the smaller stride,
// written along b. Bound by memory.
#include "conv2d/relayout.h"

static constexpr int TILE = 32, TILE_ROWS = 8;

// The offset of an axis' element in `from`, or -1 where it is not there.
__device__ __forceinline__ int64_t offset_in(const RelayoutAxis &axis, int64_t index)
{
    if (index >= axis.extent)
        return -1;
    if (axis.group == axis.taken)
        return index * axis.stride;
    const int group = (int)index / (int)axis.group, in = (int)index - group * (int)axis.group;
    return in < axis.taken ? (group * axis.taken + in) * axis.stride : -1;
}

template <typename T>
__global__ void __launch_bounds__(TILE *TILE_ROWS)
    conv2d_relayout_kernel(T *to, const T *from, const __grid_constant__ Relayout r)
{
    __shared__ T tile[TILE][TILE + 1];
    const bool along_a = r.a.stride < r.b.stride;
    const int64_t across = ceil_div(r.b.extent, TILE), tiles = across * ceil_div(r.a.extent, TILE);
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles * r.t; index += gridDim.x) {
        const int64_t t = index / tiles, a = index % tiles / across * TILE, b = index % tiles % across * TILE;
#pragma unroll
        for (int i = y; i < TILE; i += TILE_ROWS) {
            const int da = along_a ? x : i, db = along_a ? i : x;
            const int64_t in_a = offset_in(r.a, a + da), in_b = offset_in(r.b, b + db);
            tile[da][db] = in_a < 0 || in_b < 0 ? store_from_accumulate<T>(0) : from[in_a + t * r.t_stride + in_b];
        }
        __syncthreads();
#pragma unroll
        for (int i = y; i < TILE; i += TILE_ROWS)
            if (a + i < r.a.extent && b + x < r.b.extent)
                to[((a + i) * r.t + t) * r.pitch + b + x] = tile[i][x];
        __syncthreads();
    }
}

cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &r, cuda_ops_dtype dtype,
                                cudaStream_t stream)
{
    const dim3 grid(clamp_grid(ceil_div(r.a.extent, TILE) * ceil_div(r.b.extent, TILE) * r.t));
    CUDA_OPS_DISPATCH(
        dtype, T,
        launch_dependent(conv2d_relayout_kernel<T>, grid, TILE * TILE_ROWS, 0, stream, (T *)to, (const T *)from, r));
    return launch_status();
}
