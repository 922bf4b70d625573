// What the skinny path's two files share: the tile shapes, and how one is chosen.
#ifndef CUDA_OPS_LINEAR_RELU_SKINNY_TILES_CUH
#define CUDA_OPS_LINEAR_RELU_SKINNY_TILES_CUH

#include "common/skinny_gemm.cuh"
#include "linear_relu/paths.h"

// Tile shapes, by element type in shared memory. SMALL gives few rows enough blocks (forward). A GPU with too little
// shared memory for a shape takes the next smaller one, or PLAIN: Turing has 64 KB a block, Ampere's and Ada's smaller
// GPUs 99.
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
// float on tensor cores, as TF32.
struct tf32_tiles {
    typedef skinny_shape<float, 32, 32, 2, 2, 4, false, true> SMALL;
    typedef skinny_shape<float, 64, 64, 2, 2, 3, false, true> MEDIUM;
    typedef skinny_shape<float, 128, 128, 2, 4, 3, false, true> LARGE;
};
// float64 is for precision rather than speed: one shape.
template <>
struct tiles<double> {
    typedef skinny_shape<double, 64, 64, 2, 2, 2> PLAIN;
};
static_assert(tiles<float>::MEDIUM::shared_bytes(false) <= 64 << 10 &&
                  tiles<float>::PLAIN::shared_bytes(true) <= 64 << 10 &&
                  tiles<double>::PLAIN::shared_bytes(true) <= 64 << 10,
              "Turing's shapes fit into its shared memory");
static_assert(tiles<__half>::LARGE::shared_bytes(false) <= 99 << 10 &&
                  tiles<__half>::MEDIUM::shared_bytes(true) <= 99 << 10,
              "and so do those of the smaller GPUs with tensor cores");

enum tile_size { TILE_SMALL, TILE_MEDIUM, TILE_LARGE };

struct skinny_choice {
    tile_size tile;
    int splits; // blocks of a cluster, at most 8
};

// Tile and splits by rows were measured for 3136 -> 128 features; other shapes go by the number of tiles.
static constexpr int LARGEST_CLUSTER = 8;
static constexpr int64_t WANTED_BLOCKS = 132; // a large GPU's; a constant, so that k is split alike on all

static inline int splits_for(int64_t tiles)
{
    const int64_t splits = WANTED_BLOCKS / (tiles > 0 ? tiles : 1);
    return splits < 1 ? 1 : splits > LARGEST_CLUSTER ? LARGEST_CLUSTER : (int)splits;
}

#endif
