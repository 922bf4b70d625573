// The times that are compared where one group's path is chosen: each path's own model times what that is off by, a
// product of powers of the sizes and of what the call moves. By ridge regression of the logarithms, to calls that were
// timed on an H100 by all paths that take them; benchmarks/notes/conv2d.md has how many, and how far off these times are.
#include <float.h>
#include <math.h>

#include "conv2d/choice.h"
#include "conv2d/relayout.h"

// Of an exponent: a constant, and for each feature of `features_of`.
static constexpr int FEATURES = 18;
struct Correction {
    int path;
    cuda_ops_conv2d_pass pass;
    double constant, weights[FEATURES];
};

#include "conv2d/corrections.h"

// No correction is larger, or smaller than its inverse.
static constexpr double MOST = 2.25;

static int64_t elements_of_a_vector(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT32 ? 4 : 8;
}

// Of so many in tiles of 64, the share that is there.
static double filled(int64_t count)
{
    return log2((double)count / (double)(ceil_div(count, 64) * 64));
}

// By binary logarithms. microseconds: what the path's model expects.
static void features_of(double (&x)[FEATURES], const ConvCall &call, double microseconds)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const bool words = call.dtype == CUDA_OPS_FLOAT32;
    const int64_t c = s.in_channels, o = s.out_channels, taps = s.kernel_height * s.kernel_width;
    const int64_t in_pixels = s.batch * s.in_height * s.in_width, out_pixels = s.batch * s.out_height * s.out_width;
    const double element = words ? 4e-6 : 2e-6; // megabytes
    const double input = (double)(in_pixels * c) * element, output = (double)(out_pixels * o) * element;
    const bool odd_in = c % elements_of_a_vector(call) != 0, odd_out = o % elements_of_a_vector(call) != 0;
    const double read = weight ? input + output : forward ? input : output;
    const double written = weight ? (double)(o * c * taps) * element : forward ? output : input;
    const double read_odd = weight                         ? (odd_in ? input : 0) + (odd_out ? output : 0)
                            : (forward ? odd_in : odd_out) ? read
                                                           : 0;
    const double written_odd = !weight && (forward ? odd_out : odd_in) ? written : 0;
    const int64_t m = weight ? o : forward ? out_pixels : in_pixels, n = weight ? c * taps : forward ? o : c;
    const double waves = (double)(ceil_div(m, 64) * ceil_div(n, 64)) / 132;
    const double all[FEATURES] = {log2(microseconds),
                                  log2((double)c),
                                  log2((double)o),
                                  log2((double)out_pixels),
                                  log2((double)taps),
                                  s.stride_height * s.stride_width > 1 ? 1.0 : 0.0,
                                  odd_in ? 1.0 : 0.0,
                                  odd_out ? 1.0 : 0.0,
                                  conv2d_images_are_channels_last(s) ? 0.0 : 1.0,
                                  filled(c),
                                  filled(o),
                                  words && s.allow_tf32 ? 1.0 : 0.0,
                                  words && !s.allow_tf32 ? 1.0 : 0.0,
                                  log2(1 + read / microseconds),
                                  log2(1 + written / microseconds),
                                  log2(1 + read_odd / microseconds),
                                  log2(1 + written_odd / microseconds),
                                  log2(1 + waves / microseconds)};
    for (int i = 0; i < FEATURES; i++)
        x[i] = all[i];
}

double conv2d_corrected_microseconds(int path, double microseconds, const ConvCall &call)
{
    if (!(microseconds > 0) || microseconds >= DBL_MAX)
        return DBL_MAX;
    for (const Correction &correction : CORRECTIONS) {
        if (correction.path != path || correction.pass != call.pass)
            continue;
        double x[FEATURES], exponent = correction.constant;
        features_of(x, call, microseconds);
        for (int i = 0; i < FEATURES; i++)
            exponent += correction.weights[i] * x[i];
        const double factor = exp2(exponent);
        return microseconds * (factor > MOST ? MOST : factor < 1 / MOST ? 1 / MOST : factor);
    }
    return microseconds;
}
