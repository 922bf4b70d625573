/* The transpositions of transpose.h for one instruction set: TARGET(name), MM(intrinsic), VECTOR_F32 and VECTOR_F64,
 * which end here. No include guard: transpose.h includes it once for each set. */
#define LANES ((int)(sizeof(VECTOR_F32) / 16))

CUDA_OPS_INLINE void TARGET(transpose_rows_f32)(float *target, int64_t target_stride, const float *source,
                                                int64_t source_stride)
{
    const VECTOR_F32 r0 = MM(loadu_ps)(source), r1 = MM(loadu_ps)(source + source_stride);
    const VECTOR_F32 r2 = MM(loadu_ps)(source + 2 * source_stride), r3 = MM(loadu_ps)(source + 3 * source_stride);
    const VECTOR_F64 low01 = MM(castps_pd)(MM(unpacklo_ps)(r0, r1)), high01 = MM(castps_pd)(MM(unpackhi_ps)(r0, r1));
    const VECTOR_F64 low23 = MM(castps_pd)(MM(unpacklo_ps)(r2, r3)), high23 = MM(castps_pd)(MM(unpackhi_ps)(r2, r3));
    const VECTOR_F64 transposed[4] = {MM(unpacklo_pd)(low01, low23), MM(unpackhi_pd)(low01, low23),
                                      MM(unpacklo_pd)(high01, high23), MM(unpackhi_pd)(high01, high23)};
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++)
        TARGET(store_lanes_f32)(target + q * target_stride, 4 * target_stride, MM(castpd_ps)(transposed[q]));
}

CUDA_OPS_INLINE void TARGET(transpose_rows_f64)(double *target, int64_t target_stride, const double *source,
                                                int64_t source_stride)
{
    const VECTOR_F64 r0 = MM(loadu_pd)(source), r1 = MM(loadu_pd)(source + source_stride);
    TARGET(store_lanes_f64)(target, 2 * target_stride, MM(unpacklo_pd)(r0, r1));
    TARGET(store_lanes_f64)(target + target_stride, 2 * target_stride, MM(unpackhi_pd)(r0, r1));
}

/* A row is read to its end before the next one, since rows a power of two apart map to the same few cache sets. */
CUDA_OPS_INLINE void TARGET(transpose_block_f32)(void *block, const float *source, int64_t row)
{
    VECTOR_F32 *const columns = block;
    VECTOR_F32 rows[LANES][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int c = 0; c < LANES; c++)
            rows[c][r] = TARGET(load_lanes_f32)(source + r * row + 4 * c, 4 * row);
#pragma GCC unroll 4
    for (int c = 0; c < LANES; c++) {
        const VECTOR_F32 low01 = MM(unpacklo_ps)(rows[c][0], rows[c][1]);
        const VECTOR_F32 high01 = MM(unpackhi_ps)(rows[c][0], rows[c][1]);
        const VECTOR_F32 low23 = MM(unpacklo_ps)(rows[c][2], rows[c][3]);
        const VECTOR_F32 high23 = MM(unpackhi_ps)(rows[c][2], rows[c][3]);
        columns[4 * c] = MM(shuffle_ps)(low01, low23, 0x44);
        columns[4 * c + 1] = MM(shuffle_ps)(low01, low23, 0xee);
        columns[4 * c + 2] = MM(shuffle_ps)(high01, high23, 0x44);
        columns[4 * c + 3] = MM(shuffle_ps)(high01, high23, 0xee);
    }
}

CUDA_OPS_INLINE void TARGET(transpose_block_f64)(void *block, const double *source, int64_t row)
{
    VECTOR_F64 *const columns = block;
    VECTOR_F64 rows[LANES][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 4
        for (int c = 0; c < LANES; c++)
            rows[c][r] = TARGET(load_lanes_f64)(source + r * row + 2 * c, 2 * row);
#pragma GCC unroll 4
    for (int c = 0; c < LANES; c++) {
        columns[2 * c] = MM(unpacklo_pd)(rows[c][0], rows[c][1]);
        columns[2 * c + 1] = MM(unpackhi_pd)(rows[c][0], rows[c][1]);
    }
}

#undef LANES
#undef TARGET
#undef MM
#undef VECTOR_F32
#undef VECTOR_F64
