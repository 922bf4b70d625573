// How long the tiles of rungs 10, 11 and 13 to 15 take, which the choice in gemm.cu goes by. Measured and written by
// `python benchmarks/tune_gemm.py` on an NVIDIA H200; not to be edited by hand.
//     microseconds = start + waves * (sum * k / 1024 + rest), a wave being as many blocks as the GPU holds at once
// m x n: the tile; cluster: its blocks that make neighbouring tiles, m and n; blocks: that share an SM, rung 14's tiles
// alone and by two, rung 15's alone and with others; splits: the most pieces that k may be cut in, and `split` what a
// cut costs: rung 13's beside the bytes of the pieces, those of rungs 14 and 15 for each piece but the first.
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
// The CUDA cores: rung 15 (rung 10's times, by a model of its own, are beside it), in float64 with rung 11 too. These two
// tables are not the tuner's yet: rung 15's rows are fitted to the times of 24 products in float32 and 6 in float64, of
// 60 ways each (benchmarks/notes/gemm.md), rungs 10 and 11 estimates.
static const GemmTime FLOAT32_TIMES[] = {
    { 15,   0,  16,  16,   1,   1,   1,  16,  2.67,  4.12,  0.58,  0.07},
    { 15,   0,  16,  16,   1,   1,   4,  16,  1.98, 14.28,  2.39,  0.31},
    { 15,   1,  16,  32,   1,   1,   1,  16,  2.47,  6.42,  0.81,  0.10},
    { 15,   1,  16,  32,   1,   1,   2,  16,  2.37, 11.37,  1.23,  0.28},
    { 15,   2,  32,  32,   1,   1,   1,  16,  2.17,  9.66,  1.19,  0.10},
    { 15,   2,  32,  32,   1,   1,   2,  16,  2.01, 17.30,  2.08,  0.57},
    { 15,   3,  32,  32,   1,   1,   1,  16,  2.98, 12.28,  0.42,  0.08},
    { 15,   3,  32,  32,   1,   1,   3,  16,  3.36, 18.45,  1.70,  0.02},
    { 15,   4,  16,  64,   1,   1,   1,  16,  2.48, 10.07,  0.93,  0.09},
    { 15,   5,  64,  16,   1,   1,   1,  16,  2.36,  9.74,  1.02,  0.21},
    { 15,   5,  64,  16,   1,   1,   2,  16,  0.36, 21.85,  3.43,  0.73},
};
static const GemmTime FLOAT64_TIMES[] = {
    { 15,   0,  16,  16,   1,   1,   1,  16,  1.87, 11.17,  0.25,  0.28},
    { 15,   1,  16,  32,   1,   1,   1,  16,  2.77, 10.12,  0.46,  0.56},
    { 15,   2,  32,  32,   1,   1,   1,  16,  3.12, 16.66,  0.76,  0.24},
    { 15,   3,  32,  32,   1,   1,   1,  16,  0.46, 30.33,  2.70,  0.11},
    { 15,   4,  16,  64,   1,   1,   1,  16,  2.20, 16.81,  1.19,  0.42},
    { 15,   5,  64,  16,   1,   1,   1,  16,  3.10, 16.90,  0.81,  0.41},
    { 11,   0,  64, 128,   1,   1,   1,  32,  2.00, 36.50,  2.00,  8.00},
    { 10,   0, 128,  64,   1,   1,   1,   1,  4.00, 90.00,  2.00,  8.00},
};
// clang-format on

#endif
