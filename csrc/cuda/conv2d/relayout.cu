// to[a][t][b] = from[a * a_stride + t * t_stride + b * b_stride]: a weight in the order that a tensor-core path takes.
//
// A block of 256 threads transposes tiles of 32 x 32 through shared memory: read along the axis of the smaller stride,
// written along b. Bound by memory.
#include "conv2d/relayout.h"

static constexpr int TILE = 32, TILE_ROWS = 8;

template <typename T>
__global__ void __launch_bounds__(TILE *TILE_ROWS)
    conv2d_relayout_kernel(T *to, const T *from, const __grid_constant__ Relayout r)
{
    __shared__ T tile[TILE][TILE + 1];
    const bool along_a = r.a_stride < r.b_stride;
    const int64_t across = ceil_div(r.b, TILE), tiles = across * ceil_div(r.a, TILE);
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles * r.t; index += gridDim.x) {
        const int64_t t = index / tiles, a = index % tiles / across * TILE, b = index % tiles % across * TILE;
#pragma unroll
        for (int i = y; i < TILE; i += TILE_ROWS) {
            const int da = along_a ? x : i, db = along_a ? i : x;
            if (a + da < r.a && b + db < r.b)
                tile[da][db] = from[(a + da) * r.a_stride + t * r.t_stride + (b + db) * r.b_stride];
        }
        __syncthreads();
#pragma unroll
        for (int i = y; i < TILE; i += TILE_ROWS)
            if (a + i < r.a && b + x < r.b)
                to[((a + i) * r.t + t) * r.pitch + b + x] = tile[i][x];
        __syncthreads();
    }
}

cuda_ops_status conv2d_relayout(void *to, const void *from, const Relayout &r, cuda_ops_dtype dtype,
                                cudaStream_t stream)
{
    const dim3 grid(clamp_grid(ceil_div(r.a, TILE) * ceil_div(r.b, TILE) * r.t));
    CUDA_OPS_DISPATCH(
        dtype, T,
        launch_dependent(conv2d_relayout_kernel<T>, grid, TILE * TILE_ROWS, 0, stream, (T *)to, (const T *)from, r));
    return launch_status();
}
