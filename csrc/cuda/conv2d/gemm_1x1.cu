// conv2d with a 1x1 kernel and no padding as one call of gemm, channels_last:
//
//   output [pixels][o] = input [pixels][c] weight^T
//   grad_input         = grad_output weight
//   grad_weight        = grad_output^T input
//
// and both gradients of contiguous images, of each image a product:
//
//   grad_input [c][pixels] = weight^T grad_output [o][pixels]
//   grad_weight [o][c]     = grad_output input^T, summed over the images in the end
//
// With stride 1 the tensors are the matrices, and the GEMM chooses, also where TF32's wgmma wants its operands K-major.
// A larger stride is for the weight gradient in TF32 alone: input is transposed to [c][pixel] first, and that copy
// takes only the pixels that the stride reads. No kernel of its own.
#include "conv2d/choice.h"
#include "conv2d/paths.h"
#include "conv2d/relayout.h"
#include "conv2d/sm90/transpose.h"
#include "conv2d/split_k.h"
#include "gemm/paths.h"

// Whether both images are contiguous, and not channels_last as well.
bool conv2d_gemm_1x1_is_by_image(const cuda_ops_conv2d_sizes &s)
{
    const bool input = !s.input_channels_last || s.in_channels == 1 || s.in_height * s.in_width == 1;
    const bool output = !s.output_channels_last || s.out_channels == 1 || s.out_height * s.out_width == 1;
    return input && output && !conv2d_images_are_channels_last(s);
}

// Whether the images' products are added up.
static bool sums_images(const ConvCall &call)
{
    return conv2d_gemm_1x1_is_by_image(call.sizes) && call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT &&
           call.sizes.batch > 1;
}

// Of contiguous images.
static cuda_ops_gemm_problem problem_of_images(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t pixels = s.out_height * s.out_width, c = s.in_channels, o = s.out_channels;
    const bool weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    cuda_ops_gemm_problem p = {};
    p.m = weight ? o : c;
    p.n = weight ? c : pixels;
    p.k = weight ? pixels : o;
    p.batch = s.batch;
    p.transpose_a = !weight;
    p.transpose_b = weight;
    p.lda = weight ? pixels : c;
    p.ldb = pixels;
    p.ldd = p.n;
    p.stride_a = weight ? o * pixels : 0;
    p.stride_b = (weight ? c : o) * pixels;
    p.stride_d = p.m * p.n;
    p.alpha = 1;
    p.dtype = p.bias_dtype = call.dtype;
    p.output_dtype = sums_images(call) && call.dtype != CUDA_OPS_FLOAT64 ? CUDA_OPS_FLOAT32 : call.dtype;
    p.allow_tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    return p;
}

// pitch: of the transposed input; 0 where there is none.
static cuda_ops_gemm_problem problem_of(const ConvCall &call, int64_t pitch)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (conv2d_gemm_1x1_is_by_image(s))
        return problem_of_images(call);
    const int64_t pixels = s.batch * s.out_height * s.out_width, c = s.in_channels, o = s.out_channels;
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    cuda_ops_gemm_problem p = {};
    p.m = weight ? o : pixels;
    p.n = forward ? o : c;
    p.k = weight ? pixels : forward ? c : o;
    p.batch = 1;
    p.transpose_a = weight;
    p.transpose_b = forward || pitch > 0;
    p.lda = weight ? p.m : p.k;
    p.ldb = pitch > 0 ? pitch : forward ? p.k : p.n;
    p.ldd = p.n;
    p.alpha = 1;
    p.activation = conv2d_gemm_activation(call);
    p.dtype = p.output_dtype = p.bias_dtype = call.dtype;
    p.allow_tf32 = call.dtype == CUDA_OPS_FLOAT32 && s.allow_tf32;
    return p;
}

cuda_ops_gemm_problem conv2d_gemm_1x1_problem(const ConvCall &call)
{
    return problem_of(call, 0);
}

static bool reads_all_pixels(const cuda_ops_conv2d_sizes &s)
{
    return s.stride_height == 1 && s.stride_width == 1 && s.out_height == s.in_height && s.out_width == s.in_width;
}

// Whether input is transposed.
static bool transposes(const ConvCall &call, ConvDevice device)
{
    return call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT && !reads_all_pixels(call.sizes) &&
           conv2d_transposes_input(call, device);
}

// Of the images' products, before they are added up.
static size_t images_bytes(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t element = call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
    return sums_images(call) ? conv2d_round_to_256(s.batch * s.out_channels * s.in_channels * element) : 0;
}

Answer conv2d_gemm_1x1_supports(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    if (s.kernel_height != 1 || s.kernel_width != 1 || s.padding_top != 0 || s.padding_left != 0)
        return no("the kernel is not 1x1 without padding");
    if (s.groups != 1)
        return CONV_NEEDS_ONE_GROUP;
    // The GEMM adds a bias to columns, which are pixels where images are contiguous.
    const bool by_image = conv2d_gemm_1x1_is_by_image(s) && call.pass != CUDA_OPS_CONV2D_FORWARD && reads_all_pixels(s);
    if (!conv2d_images_are_channels_last(s) && !by_image)
        return CONV_NEEDS_CHANNELS_LAST;
    const bool reads_inside =
        (s.out_height - 1) * s.stride_height < s.in_height && (s.out_width - 1) * s.stride_width < s.in_width;
    if (!reads_all_pixels(s) && !(reads_inside && transposes(call, device)))
        return no("it leaves pixels of input out");
    const cuda_ops_gemm_problem p = problem_of(call, transposes(call, device) ? conv2d_transposed_input_pitch(s) : 0);
    return gemm_path_on(p, device) >= 0 ? YES : no("the GEMM has no kernel for the product");
}

// Where input is transposed, the sm90 path, if it can, transposes grad_output instead: less to copy where there are
// fewer output channels.
Answer conv2d_gemm_1x1_is_fast(const ConvCall &call, ConvDevice device)
{
    if (conv2d_gemm_1x1_is_by_image(call.sizes))
        return no("of contiguous images another path may take less time");
    ConvCall of_sizes = call; // as the query for the workspace has it, which knows no addresses
    of_sizes.input = of_sizes.weight = of_sizes.output = nullptr;
    of_sizes.result = nullptr;
    return !transposes(call, device) || call.sizes.in_channels < call.sizes.out_channels ||
                   !conv2d_sm90_supports(of_sizes, device)
               ? YES
               : no("the sm90 path copies less for TF32's gradient of weight");
}

size_t conv2d_gemm_1x1_workspace(const ConvCall &call, ConvDevice device)
{
    size_t bytes = 0;
    if (reads_all_pixels(call.sizes)) {
        const cuda_ops_gemm_problem p = problem_of(call, 0);
        bytes = images_bytes(call) + (size_t)cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
    }
    if (transposes(call, device)) {
        const cuda_ops_gemm_problem p = problem_of(call, conv2d_transposed_input_pitch(call.sizes));
        const size_t transposed =
            conv2d_transposed_input_bytes(call.sizes) + (size_t)cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
        bytes = transposed > bytes ? transposed : bytes;
    }
    return bytes;
}

// gemm's path narrow has relu alone: its product and batch_norm's pass apart are faster than another path.
bool conv2d_gemm_1x1_applies(const ConvCall &call)
{
    ConvCall product = call;
    product.sizes.activation = CUDA_OPS_CONV2D_NONE;
    return call.sizes.activation == CUDA_OPS_CONV2D_RELU ||
           gemm_path_on(problem_of(product, 0), current_device()) != GEMM_NARROW;
}

cuda_ops_status conv2d_gemm_1x1(const ConvCall &call, ConvDevice device)
{
    const bool forward = call.pass == CUDA_OPS_CONV2D_FORWARD, weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const bool by_image = conv2d_gemm_1x1_is_by_image(call.sizes);
    const void *const a = forward ? call.input : by_image && !weight ? call.weight : call.output;
    const void *b = weight ? call.input : by_image ? call.output : call.weight;
    char *workspace = (char *)call.workspace;
    int64_t pitch = 0;
    if (transposes(call, device)) {
        const cuda_ops_status status = conv2d_transpose_input(workspace, call);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        b = workspace;
        workspace += conv2d_transposed_input_bytes(call.sizes);
        pitch = conv2d_transposed_input_pitch(call.sizes);
    }
    const cuda_ops_gemm_problem p = problem_of(call, pitch);
    if (!sums_images(call))
        return cuda_ops_gemm_cuda(call.result, a, b, call.bias, workspace, &p, CUDA_OPS_GEMM_FASTEST, call.stream);
    void *const images = workspace;
    const cuda_ops_status status = cuda_ops_gemm_cuda(images, a, b, nullptr, workspace + images_bytes(call), &p,
                                                      CUDA_OPS_GEMM_FASTEST, call.stream);
    return status == CUDA_OPS_SUCCESS
               ? conv2d_sum_splits(call.result, images, p.m * p.n, p.batch, call.dtype, call.stream)
               : status;
}
