// What the skinny path's two files share: tiles, and how they are chosen.
#ifndef CUDA_OPS_LINEAR_RELU_SKINNY_TILES_CUH
#define CUDA_OPS_LINEAR_RELU_SKINNY_TILES_CUH

#include "common/skinny_gemm.cuh"
#include "linear_relu/paths.h"

// The shapes of tiles, by element type in shared memory. Forward's small tile has the many blocks that few rows need.
// Where a GPU has too little shared memory for a shape, it takes the one before, or PLAIN: Turing has 64 KB a block,
// Ampere's and Ada's smaller GPUs have 99.
template <typename E>
struct tiles {
    typedef skinny_shape<E, 32, 16, 2, 2, 4> SMALL;
    typedef skinny_shape<E, 64, 64, 2, 2, 3> MEDIUM;
    typedef skinny_shape<E, 128, 128, 2, 4, 3> LARGE;
};
template <>
struct tiles<float> {
    typedef skinny_shape<float, 32, 32, 2, 2, 4> SMALL;
    typedef skinny_shape<float, 64, 64, 2, 2, 3> MEDIUM;
    typedef skinny_shape<float, 64, 64, 2, 2, 2> PLAIN;
    typedef skinny_shape<float, 128, 128, 4, 2, 3> LARGE;
};
// Of float, on tensor cores.
struct tf32_tiles {
    typedef skinny_shape<float, 32, 32, 2, 2, 4, false, true> SMALL;
    typedef skinny_shape<float, 64, 64, 2, 2, 3, false, true> MEDIUM;
    typedef skinny_shape<float, 128, 128, 2, 4, 3, false, true> LARGE;
};
// One for all that is float64, whose precision is what it is for.
template <>
struct tiles<double> {
    typedef skinny_shape<double, 64, 64, 2, 2, 2> PLAIN;
};
static_assert(tiles<float>::MEDIUM::shared_bytes(false) <= 64 << 10 &&
                  tiles<float>::PLAIN::shared_bytes(true) <= 64 << 10 &&
                  tiles<double>::PLAIN::shared_bytes(true) <= 64 << 10,
              "what Turing runs fits into its shared memory");
static_assert(tiles<__half>::LARGE::shared_bytes(false) <= 99 << 10 &&
                  tiles<__half>::MEDIUM::shared_bytes(true) <= 99 << 10,
              "so does what other GPUs with tensor cores run");

enum tile_size { TILE_SMALL, TILE_MEDIUM, TILE_LARGE };

struct skinny_choice {
    tile_size tile;
    int splits; // blocks of a cluster, at most 8
};

// Which tile and how many splits, by rows: measured for 3136 -> 128 features; other shapes by the number of tiles.
static constexpr int LARGEST_CLUSTER = 8;
static constexpr int64_t WANTED_BLOCKS = 132; // a large GPU's multiprocessors; a constant, so that sums are cut alike

static inline int splits_for(int64_t tiles)
{
    const int64_t splits = WANTED_BLOCKS / (tiles > 0 ? tiles : 1);
    return splits < 1 ? 1 : splits > LARGEST_CLUSTER ? LARGEST_CLUSTER : (int)splits;
}

#endif
