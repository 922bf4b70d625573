// Winograd's transforms of one axis, and of two: transform(to, from) is named by its extents.
//
//   windows     4 -> 4, 6 -> 6   B^T d        tiles of a gradient     2 -> 4, 4 -> 6   A y
//   kernels     3 -> 4, 3 -> 6   G g          gradients of kernels    4 -> 3, 6 -> 3   G^T u
//   products    4 -> 2, 6 -> 4   A^T m
//
// F(2, 3) interpolates at 0, 1, -1 and infinity, as in Lavin and Gray, "Fast Algorithms for Convolutional Neural
// Networks" (2016). For F(4, 3) they take 0, +-1, +-2; here it is 0, +-P, +-Q with P = 5/8 and Q = 3/2, whose powers
// differ less: the error is half as large (benchmarks/notes/conv2d_winograd.md), at the same number of operations.
// P, Q and their powers are exact in float32.
#ifndef CUDA_OPS_CONV2D_WINOGRAD_TRANSFORMS_CUH
#define CUDA_OPS_CONV2D_WINOGRAD_TRANSFORMS_CUH

#include "common/common.cuh"

static constexpr float WINOGRAD_P = 0.625f, WINOGRAD_Q = 1.5f;
static constexpr float WINOGRAD_P2 = WINOGRAD_P * WINOGRAD_P, WINOGRAD_Q2 = WINOGRAD_Q * WINOGRAD_Q;
// 1 / the product of a point's distances to the other finite ones.
static constexpr float WINOGRAD_AT_0 = (float)(1 / (0.390625 * 2.25));
static constexpr float WINOGRAD_AT_P = (float)(1 / (2 * 0.390625 * (0.390625 - 2.25)));
static constexpr float WINOGRAD_AT_Q = (float)(1 / (2 * 2.25 * (2.25 - 0.390625)));

__device__ __forceinline__ void transform(float (&v)[4], const float (&d)[4])
{
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[1] - d[3];
}

__device__ __forceinline__ void transform(float (&v)[6], const float (&d)[6])
{
    constexpr float P = WINOGRAD_P, Q = WINOGRAD_Q, P2 = WINOGRAD_P2, Q2 = WINOGRAD_Q2;
    const float even_p = d[4] - Q2 * d[2], odd_p = P * (d[3] - Q2 * d[1]);
    const float even_q = d[4] - P2 * d[2], odd_q = Q * (d[3] - P2 * d[1]);
    v[0] = P2 * Q2 * d[0] - (P2 + Q2) * d[2] + d[4];
    v[1] = even_p + odd_p;
    v[2] = even_p - odd_p;
    v[3] = even_q + odd_q;
    v[4] = even_q - odd_q;
    v[5] = P2 * Q2 * d[1] - (P2 + Q2) * d[3] + d[5];
}

__device__ __forceinline__ void transform(float (&u)[4], const float (&g)[3])
{
    const float even = 0.5f * (g[0] + g[2]), odd = 0.5f * g[1];
    u[0] = g[0];
    u[1] = even + odd;
    u[2] = even - odd;
    u[3] = g[2];
}

__device__ __forceinline__ void transform(float (&u)[6], const float (&g)[3])
{
    const float even_p = WINOGRAD_AT_P * (g[0] + WINOGRAD_P2 * g[2]), odd_p = WINOGRAD_AT_P * WINOGRAD_P * g[1];
    const float even_q = WINOGRAD_AT_Q * (g[0] + WINOGRAD_Q2 * g[2]), odd_q = WINOGRAD_AT_Q * WINOGRAD_Q * g[1];
    u[0] = WINOGRAD_AT_0 * g[0];
    u[1] = even_p + odd_p;
    u[2] = even_p - odd_p;
    u[3] = even_q + odd_q;
    u[4] = even_q - odd_q;
    u[5] = g[2];
}

__device__ __forceinline__ void transform(float (&y)[2], const float (&m)[4])
{
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
}

__device__ __forceinline__ void transform(float (&y)[4], const float (&m)[6])
{
    constexpr float P = WINOGRAD_P, Q = WINOGRAD_Q, P2 = WINOGRAD_P2, Q2 = WINOGRAD_Q2;
    const float even_p = m[1] + m[2], odd_p = P * (m[1] - m[2]);
    const float even_q = m[3] + m[4], odd_q = Q * (m[3] - m[4]);
    y[0] = m[0] + even_p + even_q;
    y[1] = odd_p + odd_q;
    y[2] = P2 * even_p + Q2 * even_q;
    y[3] = P2 * odd_p + Q2 * odd_q + m[5];
}

__device__ __forceinline__ void transform(float (&m)[4], const float (&y)[2])
{
    m[0] = y[0];
    m[1] = y[0] + y[1];
    m[2] = y[0] - y[1];
    m[3] = -y[1];
}

__device__ __forceinline__ void transform(float (&m)[6], const float (&y)[4])
{
    constexpr float P = WINOGRAD_P, Q = WINOGRAD_Q, P2 = WINOGRAD_P2, Q2 = WINOGRAD_Q2;
    const float even_p = y[0] + P2 * y[2], odd_p = P * (y[1] + P2 * y[3]);
    const float even_q = y[0] + Q2 * y[2], odd_q = Q * (y[1] + Q2 * y[3]);
    m[0] = y[0];
    m[1] = even_p + odd_p;
    m[2] = even_p - odd_p;
    m[3] = even_q + odd_q;
    m[4] = even_q - odd_q;
    m[5] = y[3];
}

__device__ __forceinline__ void transform(float (&g)[3], const float (&u)[4])
{
    const float even = 0.5f * (u[1] + u[2]);
    g[0] = u[0] + even;
    g[1] = 0.5f * (u[1] - u[2]);
    g[2] = even + u[3];
}

__device__ __forceinline__ void transform(float (&g)[3], const float (&u)[6])
{
    const float even_p = WINOGRAD_AT_P * (u[1] + u[2]), odd_p = WINOGRAD_AT_P * WINOGRAD_P * (u[1] - u[2]);
    const float even_q = WINOGRAD_AT_Q * (u[3] + u[4]), odd_q = WINOGRAD_AT_Q * WINOGRAD_Q * (u[3] - u[4]);
    g[0] = WINOGRAD_AT_0 * u[0] + even_p + even_q;
    g[1] = odd_p + odd_q;
    g[2] = WINOGRAD_P2 * even_p + WINOGRAD_Q2 * even_q + u[5];
}

// Both axes: columns, then rows.
template <int TO, int FROM>
__device__ __forceinline__ void transform(float (&to)[TO][TO], const float (&from)[FROM][FROM])
{
    float half[TO][FROM];
#pragma unroll
    for (int x = 0; x < FROM; x++) {
        float column[FROM], transformed[TO];
#pragma unroll
        for (int y = 0; y < FROM; y++)
            column[y] = from[y][x];
        transform(transformed, column);
#pragma unroll
        for (int y = 0; y < TO; y++)
            half[y][x] = transformed[y];
    }
#pragma unroll
    for (int y = 0; y < TO; y++)
        transform(to[y], half[y]);
}

#endif
