// How long the tiles of rungs 11 and 13 to 15 take, which the choice in gemm.cu goes by. Measured and written by
// `python benchmarks/tune_gemm.py` on an NVIDIA H200; not to be edited by hand.
//     microseconds = start + waves * (sum * k / 1024 + rest), a wave being as many blocks as the GPU holds at once
// m x n: the tile; cluster: its blocks that make neighbouring tiles, m and n; blocks: that share an SM, rung 14's tiles
// alone and by two; splits: the most pieces that k may be cut in, and `split` what a cut costs: rung 13's beside the
// bytes of the pieces, rung 14's for each piece but the first.
#ifndef CUDA_OPS_GEMM_TIMES_H
#define CUDA_OPS_GEMM_TIMES_H

struct GemmTime {
    int rung, tile, m, n, cluster_m, cluster_n, blocks, splits;
    double start, sum, rest, split;
};

// clang-format off
static const GemmTime HALVES_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.58, 10.13,  1.60,  4.32},
    { 13,   1, 128, 128,   2,   1,   1,  32,  2.98,  5.27,  0.29,  2.38},
    { 13,   2, 128, 192,   2,   1,   1,  32,  3.62,  7.62,  0.36,  3.44},
    { 13,   3, 128,  64,   1,   2,   1,  32,  2.38,  3.13,  0.60,  1.00},
    { 13,   4, 128,  80,   2,   1,   1,  32,  1.88,  4.31,  1.25,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  1.93,  0.87,  0.18},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  2.51,  2.14,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.00,  2.00,  0.93,  0.52},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  3.54,  2.58,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.10,  2.58,  1.10,  1.28},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00,  4.64,  3.69,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.61,  2.60,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  2.52, 30.80, 15.32,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.85, 20.03,  3.74,  3.16},
    { 13,   1, 128, 128,   2,   1,   1,  32,  4.62, 11.50,  0.00,  1.11},
    { 13,   2, 128, 192,   2,   1,   1,  32,  4.72, 15.67,  0.51,  2.22},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.20,  2.59,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  4.17,  0.87,  0.10},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  6.99,  2.12,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.11,  4.32,  1.11,  0.47},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  9.28,  2.47,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.26,  5.23,  1.26,  1.81},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00, 11.67,  3.38,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  9.05,  1.65,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  6.02, 100.29,  8.54,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.39, 20.34,  4.53,  4.90},
    { 13,   1, 128, 128,   2,   1,   1,  32,  8.85, 15.39,  0.00,  1.00},
    { 13,   2, 128,  64,   2,   1,   1,  32,  2.15,  7.67,  1.38,  1.37},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.14, 11.73,  1.47,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  4.70, 95.77,  9.17,  8.00},
};
// clang-format on

#endif
