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
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.56, 10.06,  1.78,  3.70},
    { 13,   1, 128, 128,   2,   1,   1,  32,  2.82,  5.21,  0.53,  2.11},
    { 13,   2, 128, 192,   2,   1,   1,  32,  4.05,  7.52,  0.34,  3.42},
    { 13,   3, 128,  64,   1,   2,   1,  32,  2.19,  3.10,  0.85,  1.39},
    { 13,   4, 128,  80,   2,   1,   1,  32,  2.05,  3.98,  1.51,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  1.94,  0.91,  0.24},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  2.52,  2.02,  0.12},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.00,  2.01,  0.99,  0.57},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  3.50,  2.08,  0.32},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.07,  2.83,  1.07,  1.73},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00,  4.39,  3.64,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.75,  2.62,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  2.68, 31.20, 15.26,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.46, 19.67,  4.02,  3.69},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.95, 10.87,  0.76,  1.00},
    { 13,   2, 128, 192,   2,   1,   1,  32,  3.83, 15.51,  1.47,  1.78},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.63,  1.76,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  4.32,  1.00,  0.13},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  7.44,  2.19,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.40,  4.32,  1.40,  0.34},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  9.39,  2.57,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.23,  5.87,  1.23,  2.11},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00, 12.02,  3.16,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.04,  9.04,  1.65,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  5.41, 100.48,  8.74,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.06, 20.05,  5.02,  3.85},
    { 13,   1, 128, 128,   2,   1,   1,  32,  4.41, 15.47,  0.40,  1.00},
    { 13,   2, 128,  64,   2,   1,   1,  32,  1.97,  7.70,  1.53,  1.13},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.38, 11.80,  1.37,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  4.96, 95.78,  9.58,  8.00},
};
// clang-format on

#endif
