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
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.26, 10.16,  1.91,  3.63},
    { 13,   1, 128, 128,   2,   1,   1,  32,  2.65,  5.29,  0.58,  2.17},
    { 13,   2, 128, 192,   2,   1,   1,  32,  3.37,  7.57,  0.58,  2.72},
    { 13,   3, 128,  64,   1,   2,   1,  32,  2.15,  3.06,  0.89,  1.00},
    { 13,   4, 128,  80,   2,   1,   1,  32,  1.89,  4.20,  1.31,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  1.97,  0.89,  0.18},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  2.53,  2.12,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.00,  2.08,  0.94,  0.64},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  3.66,  2.64,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.15,  2.48,  1.15,  1.32},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00,  4.54,  3.73,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.67,  2.59,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  1.90, 31.12, 15.51,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.82, 20.20,  3.81,  1.03},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.43, 10.93,  0.71,  1.00},
    { 13,   2, 128, 192,   2,   1,   1,  32,  2.88, 15.88,  1.59,  4.35},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.50,  1.75,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  4.40,  0.91,  0.10},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  7.32,  2.20,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.11,  4.38,  1.11,  0.46},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  9.45,  2.41,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.28,  5.43,  1.28,  1.81},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00, 11.98,  3.27,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.20,  9.10,  1.53,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  5.68, 101.31,  8.52,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.00, 20.27,  5.87,  4.99},
    { 13,   1, 128, 128,   2,   1,   1,  32,  6.11, 14.96,  0.00,  1.00},
    { 13,   2, 128,  64,   2,   1,   1,  32,  1.61,  7.70,  1.66,  1.00},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.19, 11.91,  1.39,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  5.75, 96.02,  8.71,  8.00},
};
// The CUDA cores: rung 15 (rung 10's times, by a model of its own, are beside it), in float64 with rung 11 too. These two
// tables are not the tuner's yet: rung 15's rows are fitted to the times of 24 products in float32 and 6 in float64, of
// 60 ways each (benchmarks/notes/gemm.md), rungs 10 and 11 estimates.
static const GemmTime FLOAT32_TIMES[] = {
    { 15,   0,  16,  16,   1,   1,   1,  16,  1.00,  4.12,  0.92,  0.20},
    { 15,   0,  16,  16,   1,   1,   4,  16,  1.00, 13.18,  2.88,  0.67},
    { 15,   1,  16,  32,   1,   1,   1,  16,  1.00,  5.93,  0.90,  0.21},
    { 15,   1,  16,  32,   1,   1,   2,  16,  1.00, 10.10,  1.44,  0.10},
    { 15,   2,  32,  32,   1,   1,   1,  16,  1.03,  9.44,  1.03,  0.32},
    { 15,   2,  32,  32,   1,   1,   2,  16,  1.00, 16.94,  1.74,  0.26},
    { 15,   3,  32,  32,   1,   1,   1,  16,  1.02, 12.36,  1.02,  0.10},
    { 15,   3,  32,  32,   1,   1,   3,  16,  2.20, 25.42,  1.24,  0.18},
    { 15,   4,  16,  64,   1,   1,   1,  16,  1.01,  9.57,  1.01,  0.42},
    { 15,   5,  64,  16,   1,   1,   1,  16,  1.08, 10.20,  1.08,  0.41},
    { 15,   5,  64,  16,   1,   1,   2,  16,  1.00, 22.28,  1.42,  0.48},
};
static const GemmTime FLOAT64_TIMES[] = {
    { 15,   0,  16,  16,   1,   1,   1,  16,  1.00,  9.12,  0.85,  0.18},
    { 15,   1,  16,  32,   1,   1,   1,  16,  1.00, 10.62,  1.00,  0.40},
    { 15,   2,  32,  32,   1,   1,   1,  16,  1.37, 16.63,  1.37,  0.26},
    { 15,   3,  32,  32,   1,   1,   1,  16,  1.30, 23.50,  1.30,  0.22},
    { 15,   4,  16,  64,   1,   1,   1,  16,  1.34, 16.70,  1.34,  0.31},
    { 15,   5,  64,  16,   1,   1,   1,  16,  1.40, 17.93,  1.40,  0.10},
    { 11,   0,  64, 128,   1,   1,   1,  32,  2.99, 35.74,  1.75,  8.00},
    { 10,   0, 128,  64,   1,   1,   1,   1,  1.24, 103.29,  4.02,  8.00},
};
// clang-format on

#endif
