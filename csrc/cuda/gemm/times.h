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
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.67, 10.02,  1.65,  4.01},
    { 13,   1, 128, 128,   2,   1,   1,  32,  2.93,  5.27,  0.37,  2.18},
    { 13,   2, 128, 192,   2,   1,   1,  32,  3.71,  7.56,  0.35,  3.08},
    { 13,   3, 128,  64,   1,   2,   1,  32,  2.43,  3.15,  0.62,  1.00},
    { 13,   4, 128,  80,   2,   1,   1,  32,  1.95,  3.48,  1.41,  1.16},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  1.95,  0.88,  0.24},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  2.51,  2.15,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.00,  2.01,  0.96,  0.57},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  3.48,  2.44,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.09,  2.62,  1.09,  1.36},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00,  4.65,  3.64,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.00,  8.64,  2.58,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  2.04, 31.17, 15.56,  8.00},
};
// TF32 where A is stored m x k and B n x k, and the other storage orders.
static const GemmTime TF32_NT_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  2.50, 19.77,  5.12,  3.05},
    { 13,   1, 128, 128,   2,   1,   1,  32,  3.56, 11.27,  1.32,  1.00},
    { 13,   2, 128, 160,   2,   1,   1,  32,  3.76, 13.04,  1.59,  1.00},
    { 13,   3, 128,  64,   2,   1,   1,  32,  1.00,  9.27,  2.67,  1.00},
    { 14,   0,  64,  16,   1,   1,   1,   4,  1.00,  3.90,  0.95,  0.32},
    { 14,   0,  64,  16,   1,   1,   2,   2,  1.00,  7.13,  2.09,  0.10},
    { 14,   1,  64,  32,   1,   1,   1,   4,  1.18,  4.06,  1.18,  0.69},
    { 14,   1,  64,  32,   1,   1,   2,   2,  1.00,  9.36,  2.55,  0.10},
    { 14,   2,  64,  64,   1,   1,   1,   2,  1.33,  5.24,  1.33,  1.73},
    { 14,   2,  64,  64,   1,   1,   2,   2,  1.00, 11.57,  3.39,  0.10},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.06,  9.00,  1.64,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  4.97, 100.96,  8.57,  8.00},
};
static const GemmTime TF32_TIMES[] = {
    { 13,   0, 128, 256,   2,   1,   1,  32,  1.63, 19.91,  4.80,  1.47},
    { 13,   1, 128, 128,   2,   1,   1,  32,  5.32, 15.43,  0.00,  1.00},
    { 13,   2, 128,  64,   2,   1,   1,  32,  2.10,  7.86,  1.35,  1.00},
    { 15,   0,  16,  16,   1,   1,   4,   1,  1.14, 11.84,  1.54,  0.00},
    { 11,   0, 128, 128,   1,   1,   2,  32,  4.78, 96.06,  9.31,  8.00},
};
// clang-format on

#endif
