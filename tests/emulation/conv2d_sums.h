// What the tests of conv2d's paths share: a call of some operands, and the sums as they stand.
#ifndef EMULATION_CONV2D_SUMS_H
#define EMULATION_CONV2D_SUMS_H

#include "cases.h"
#include "conv2d/paths.h"

namespace emulation
{
static inline int64_t at4(int64_t channels, int64_t height, int64_t width, int last, int64_t n, int64_t c, int64_t y,
                          int64_t x)
{
    return last ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
}

// The arrays of a convolution. result is that of the pass, in whose call the array of the same place is NULL.
struct ConvOperands {
    const Array &input, &weight, &output;
    const Array *bias; // or NULL
    const Array &result;
};

// Elements of what each pass makes.
struct ConvSizes {
    int64_t of[3];
    ConvSizes(const cuda_ops_conv2d_sizes &s)
        : of{s.batch * s.out_channels * s.out_height * s.out_width, s.batch * s.in_channels * s.in_height * s.in_width,
             s.out_channels * (s.in_channels / s.groups) * s.kernel_height * s.kernel_width}
    {
    }
};

static inline ConvCall call_of(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &s, const ConvOperands &operands)
{
    return {pass,
            operands.result.data,
            pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? nullptr : operands.input.data,
            pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT ? nullptr : operands.weight.data,
            pass == CUDA_OPS_CONV2D_FORWARD ? nullptr : operands.output.data,
            operands.bias ? operands.bias->data : nullptr,
            nullptr,
            s,
            operands.result.dtype,
            nullptr,
            0,
            0};
}

// By a path; its workspace begins as NaN.
static inline void run(ConvCall &call, size_t (*workspace)(const ConvCall &, ConvDevice),
                       cuda_ops_status (*path)(const ConvCall &, ConvDevice))
{
    const ConvDevice device = current_device();
    const size_t bytes = workspace(call, device);
    call.workspace = device_memory(bytes, 0);
    memset(call.workspace, 0xff, bytes);
    expect_success(path(call, device));
}

// What forward's epilogue makes of a sum.
static inline double activated(double x, int activation)
{
    switch (activation) {
    case CUDA_OPS_CONV2D_RELU:
        return fmax(x, 0);
    case CUDA_OPS_CONV2D_RELU6:
        return fmin(fmax(x, 0), 6);
    case CUDA_OPS_CONV2D_HARDSWISH:
        return x * fmin(fmax(x + 3, 0), 6) / 6;
    case CUDA_OPS_CONV2D_SILU:
        return x / (1 + exp(-x));
    default:
        return x;
    }
}

// Of the result: its elements, and the sums of what is added without signs.
struct ConvSums {
    std::vector<double> values, magnitudes;
};

static inline ConvSums sums_of(cuda_ops_conv2d_pass pass, const cuda_ops_conv2d_sizes &s, const ConvOperands &operands)
{
    const int64_t C = s.in_channels, K = s.out_channels, c = C / s.groups, k = K / s.groups;
    const int64_t taps = s.kernel_height * s.kernel_width;
    ConvSums sums;
    sums.values.resize((size_t)operands.result.count), sums.magnitudes = sums.values;
    const auto add = [&](int64_t to, double value) {
        sums.values[(size_t)to] += value;
        sums.magnitudes[(size_t)to] += fabs(value);
    };
    for (int64_t n = 0; n < s.batch; n++)
        for (int64_t out = 0; out < K; out++)
            for (int64_t y = 0; y < s.out_height; y++)
                for (int64_t x = 0; x < s.out_width; x++) {
                    const int64_t o = at4(K, s.out_height, s.out_width, s.output_channels_last, n, out, y, x);
                    if (operands.bias)
                        add(o, (*operands.bias)[out]);
                    for (int64_t tap = 0; tap < taps; tap++) {
                        const int64_t row = tap / s.kernel_width, column = tap % s.kernel_width;
                        const int64_t iy = y * s.stride_height + row * s.dilation_height - s.padding_top;
                        const int64_t ix = x * s.stride_width + column * s.dilation_width - s.padding_left;
                        if (iy < 0 || iy >= s.in_height || ix < 0 || ix >= s.in_width)
                            continue;
                        for (int64_t in = 0; in < c; in++) {
                            const int64_t i =
                                at4(C, s.in_height, s.in_width, s.input_channels_last, n, out / k * c + in, iy, ix);
                            const int64_t w =
                                at4(c, s.kernel_height, s.kernel_width, s.weight_channels_last, out, in, row, column);
                            if (pass == CUDA_OPS_CONV2D_FORWARD)
                                add(o, operands.input[i] * operands.weight[w]);
                            else if (pass == CUDA_OPS_CONV2D_BACKWARD_INPUT)
                                add(i, operands.output[o] * operands.weight[w]);
                            else
                                add(w, operands.output[o] * operands.input[i]);
                        }
                    }
                }
    return sums;
}
} // namespace emulation

#endif
