// conv2d with a kernel of 1x1, stride 1 and no padding, channels_last: products of matrices as they lie, by gemm.cu's
// ladder.
//
//   output [places][o] = input [places][c] weight^T
//   grad_input = grad_output weight
//   grad_weight = grad_output^T input
//
// No kernel of its own.
#include "conv2d_choice.h"
#include "cuda_ops/gemm.h"

static cuda_ops_gemm_problem problem_of(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t places = s.batch * s.in_height * s.in_width, c = s.in_channels, o = s.out_channels;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    cuda_ops_gemm_problem p = {};
    p.m = weight ? o : places;
    p.n = forward ? o : c;
    p.k = weight ? places : forward ? c : o;
    p.batch = 1;
    p.transpose_a = weight;
    p.transpose_b = forward;
    p.lda = weight ? p.m : p.k;
    p.ldb = forward ? p.k : p.n;
    p.ldd = p.n;
    p.alpha = 1;
    p.dtype = p.output_dtype = p.bias_dtype = call.dtype;
    p.allow_tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    return p;
}

bool conv2d_gemm_supports(const ConvCall &call, ConvDevice)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool one_pixel = s.in_height * s.in_width == 1; // then both orders are one
    const bool channels_last = (one_pixel || s.input_channels_last || s.in_channels == 1) &&
                               (one_pixel || s.output_channels_last || s.out_channels == 1);
    if (s.kernel_height != 1 || s.kernel_width != 1 || s.stride_height != 1 || s.stride_width != 1 ||
        s.padding_top != 0 || s.padding_left != 0 || s.out_height != s.in_height || s.out_width != s.in_width ||
        s.groups != 1 || s.batch < 1 || s.in_channels < 1 || s.out_channels < 1 || !channels_last)
        return false;
    const cuda_ops_gemm_problem p = problem_of(call);
    return cuda_ops_gemm_rung_cuda(&p, CUDA_OPS_GEMM_FASTEST) >= 0;
}

// All but TF32's weight gradient, both of whose operands are stored along the wrong axis for wgmma: the tensor path
// turns one of them around, and the GEMM is slower at it.
bool conv2d_gemm_is_fast(const ConvCall &call, ConvDevice device)
{
    return !(call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT && call.dtype == CUDA_OPS_FLOAT32 &&
             conv2d_tensor_supports(call, device));
}

size_t conv2d_gemm_workspace(const ConvCall &call, ConvDevice)
{
    const cuda_ops_gemm_problem p = problem_of(call);
    return (size_t)cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
}

cuda_ops_status conv2d_gemm(const ConvCall &call, ConvDevice)
{
    const cuda_ops_gemm_problem p = problem_of(call);
    const bool weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const void *const a = weight || call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? call.output : call.input;
    const void *const b = weight ? call.input : call.weight;
    return cuda_ops_gemm_cuda(call.result, a, b, call.bias, call.workspace, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
}
