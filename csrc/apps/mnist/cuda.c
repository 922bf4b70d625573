/* The layers on a GPU: the launchers of the C API on one stream, buffers from cudaMalloc. Without CUDA_OPS_WITH_CUDA
 * only the message that says so. */
#include "cuda.h"

#include "mnist/layers.h"

#ifndef CUDA_OPS_WITH_CUDA

mnist_device *mnist_open_cuda(void)
{
    app_fail_without_cuda();
}

#else

#include <string.h>

#include "cuda_ops/conv_bn_relu_pool.h"
#include "cuda_ops/cross_entropy.h"
#include "cuda_ops/linear.h"
#include "cuda_ops/relu.h"
#include "cuda_ops/sgd.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;
_Static_assert((int)MNIST_MOST_MARKS == (int)APP_MOST_MARKS, "the list of marks is the programs' common one");

typedef struct cuda {
    mnist_device public;
    app_cuda base;
    /* Two batches in pinned memory: one is filled while the other is copied to the device. */
    float *host_images[2];
    int64_t *host_labels[2];
    cudaEvent_t copied[2];
    int64_t capacity; /* images that each of them holds */
    int slot;
    float normalised[256];
} cuda;

static void check_cuda(const char *what, cudaError_t error)
{
    app_cuda_check(what, error);
}

static void check(const char *op, cuda_ops_status status)
{
    app_cuda_check_status(op, status);
}

static void *workspace(cuda *self, int64_t bytes)
{
    return app_cuda_workspace(&self->base, bytes);
}

static void *cuda_allocate(mnist_device *device, int64_t bytes)
{
    return app_cuda_allocate(&((cuda *)device)->base, bytes);
}

static void cuda_upload(mnist_device *device, void *target, const void *source, int64_t bytes)
{
    app_cuda_upload(&((cuda *)device)->base, target, source, bytes);
}

static void cuda_download(mnist_device *device, void *target, const void *source, int64_t bytes)
{
    app_cuda_download(&((cuda *)device)->base, target, source, bytes);
}

static void cuda_close(mnist_device *device)
{
    cuda *self = (cuda *)device;
    check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(self->base.stream));
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(self->host_images[i]);
        cudaFreeHost(self->host_labels[i]);
        cudaEventDestroy(self->copied[i]);
    }
    app_cuda_close(&self->base);
    app_free(self);
}

static void make_room(cuda *self, int64_t count)
{
    if (count <= self->capacity)
        return;
    check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(self->base.stream));
    for (int i = 0; i < 2; i++) {
        check_cuda("cudaFreeHost", cudaFreeHost(self->host_images[i]));
        check_cuda("cudaFreeHost", cudaFreeHost(self->host_labels[i]));
        check_cuda("cudaMallocHost",
                   cudaMallocHost((void **)&self->host_images[i], (size_t)count * MNIST_PIXELS * sizeof(float)));
        check_cuda("cudaMallocHost", cudaMallocHost((void **)&self->host_labels[i], (size_t)count * sizeof(int64_t)));
    }
    self->capacity = count;
}

static void cuda_load(mnist_device *device, float *images, int64_t *labels, const mnist_set *set,
                      const uint32_t *indices, int64_t count)
{
    cuda *self = (cuda *)device;
    make_room(self, count);
    const int slot = self->slot ^= 1;
    check_cuda("cudaEventSynchronize", cudaEventSynchronize(self->copied[slot]));
    float *host_images = self->host_images[slot];
    int64_t *host_labels = self->host_labels[slot];
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *pixels = set->images + (int64_t)indices[i] * MNIST_PIXELS;
        for (int p = 0; p < MNIST_PIXELS; p++)
            host_images[i * MNIST_PIXELS + p] = self->normalised[pixels[p]];
        host_labels[i] = set->labels[indices[i]];
    }
    check_cuda("copy", cudaMemcpyAsync(images, host_images, (size_t)count * MNIST_PIXELS * sizeof(float),
                                       cudaMemcpyHostToDevice, self->base.stream));
    check_cuda("copy", cudaMemcpyAsync(labels, host_labels, (size_t)count * sizeof(int64_t), cudaMemcpyHostToDevice,
                                       self->base.stream));
    check_cuda("cudaEventRecord", cudaEventRecord(self->copied[slot], self->base.stream));
}

/* A block as conv_bn_relu_pool.h describes it; float32 products stay float32, without TF32. */
static cuda_ops_conv_bn_relu_pool_sizes block_sizes(const cuda_ops_conv_block_sizes *s)
{
    const cuda_ops_pool_axis height = {
        .input = (int32_t)s->height, .output = (int32_t)s->height / 2, .kernel = 2, .stride = 2, .dilation = 1};
    const cuda_ops_pool_axis width = {
        .input = (int32_t)s->width, .output = (int32_t)s->width / 2, .kernel = 2, .stride = 2, .dilation = 1};
    return (cuda_ops_conv_bn_relu_pool_sizes){.conv = {.batch = s->batch,
                                                       .groups = 1,
                                                       .in_channels = s->in_channels,
                                                       .in_height = s->height,
                                                       .in_width = s->width,
                                                       .out_channels = s->out_channels,
                                                       .out_height = s->height,
                                                       .out_width = s->width,
                                                       .kernel_height = 3,
                                                       .kernel_width = 3,
                                                       .stride_height = 1,
                                                       .stride_width = 1,
                                                       .padding_top = 1,
                                                       .padding_left = 1,
                                                       .dilation_height = 1,
                                                       .dilation_width = 1,
                                                       .input_channels_last = s->input_channels_last,
                                                       .output_channels_last = s->output_channels_last},
                                              .pool = {.batch = s->batch,
                                                       .channels = s->out_channels,
                                                       .height = height,
                                                       .width = width,
                                                       .channels_last = s->output_channels_last}};
}

/* What forward keeps for backward; NULL: the path does not keep it. */
typedef struct block_buffers {
    void *conv_output, *maximum;
    uint8_t *argmax;
    double *statistics;
    int64_t bytes;
} block_buffers;

static char *take(int64_t *offset, char *memory, int64_t bytes)
{
    char *const begin = memory && bytes > 0 ? memory + *offset : NULL;
    *offset += (bytes + 255) / 256 * 256;
    return begin;
}

static block_buffers divide_block(char *memory, const cuda_ops_conv_bn_relu_pool_sizes *sizes)
{
    cuda_ops_conv_bn_relu_pool_plan plan;
    check("conv_bn_relu_pool", cuda_ops_conv_bn_relu_pool_plan_cuda(&plan, sizes, F32));
    const int64_t convolved = sizes->conv.batch * sizes->conv.out_channels * sizes->conv.out_height *
                              sizes->conv.out_width * (int64_t)sizeof(float);
    const int64_t pooled =
        sizes->pool.batch * sizes->pool.channels * sizes->pool.height.output * sizes->pool.width.output;
    block_buffers p;
    int64_t offset = 0;
    p.statistics = (double *)(void *)take(&offset, memory, plan.statistics * (int64_t)sizeof(double));
    p.conv_output = take(&offset, memory, plan.keeps_conv_output ? convolved : 0);
    p.maximum = take(&offset, memory, plan.keeps_maximum ? pooled * (int64_t)sizeof(float) : 0);
    p.argmax = (uint8_t *)take(&offset, memory, pooled);
    p.bytes = offset;
    return p;
}

static int64_t cuda_block_bytes(mnist_device *device, const cuda_ops_conv_block_sizes *s)
{
    (void)device;
    const cuda_ops_conv_bn_relu_pool_sizes sizes = block_sizes(s);
    return divide_block(NULL, &sizes).bytes;
}

/* The convolution, then batch norm by the running statistics with the rest. */
static void block_inference(cuda *self, float *output, const float *input, const mnist_block_tensors *t,
                            const cuda_ops_norm_parameters *norm, const cuda_ops_conv_bn_relu_pool_sizes *sizes)
{
    const cuda_ops_conv2d_sizes *const c = &sizes->conv;
    const int path = CUDA_OPS_CONV2D_FASTEST;
    const int64_t convolved =
        (c->batch * c->out_channels * c->out_height * c->out_width * (int64_t)sizeof(float) + 255) / 256 * 256;
    const int64_t conv = (int64_t)cuda_ops_conv2d_workspace_cuda(CUDA_OPS_CONV2D_FORWARD, c, F32, path);
    const int64_t pool = cuda_ops_conv_bn_relu_pool_pool_workspace_cuda(&sizes->pool);
    char *const conv_output = workspace(self, convolved + (conv > pool ? conv : pool)), *const space =
                                                                                            conv_output + convolved;
    check("conv2d",
          cuda_ops_conv2d_forward_cuda(conv_output, input, t->weight, t->bias, c, space, path, F32, self->base.stream));
    check("conv_bn_relu_pool", cuda_ops_conv_bn_relu_pool_pool_forward_cuda(
                                   output, NULL, NULL, space, NULL, conv_output, t->norm.running_mean,
                                   t->norm.running_var, norm, &sizes->pool, F32, F32, self->base.stream));
}

static void cuda_block_forward(mnist_device *device, float *output, void *saved, const float *input,
                               const mnist_block_tensors *t, const cuda_ops_conv_block_sizes *s, int training)
{
    cuda *self = (cuda *)device;
    const cuda_ops_conv_bn_relu_pool_sizes sizes = block_sizes(s);
    const cuda_ops_norm_parameters norm = {t->norm.weight, t->norm.bias, F32, 1e-5};
    if (!training) {
        block_inference(self, output, input, t, &norm, &sizes);
        return;
    }
    const cuda_ops_running_statistics running = {t->norm.running_mean, t->norm.running_var, F32, NULL, 0.1};
    const block_buffers p = divide_block(saved, &sizes);
    void *const space = workspace(self, cuda_ops_conv_bn_relu_pool_workspace_cuda(&sizes, F32));
    check("conv_bn_relu_pool", cuda_ops_conv_bn_relu_pool_forward_cuda(
                                   output, p.conv_output, p.argmax, p.maximum, p.statistics, space, &running, input,
                                   t->weight, t->bias, &norm, &sizes, F32, F32, self->base.stream));
}

static void cuda_block_backward(mnist_device *device, float *grad_input, const mnist_block_tensors *gradients,
                                const float *grad_output, void *saved, const float *input, const mnist_block_tensors *t,
                                const cuda_ops_conv_block_sizes *s)
{
    cuda *self = (cuda *)device;
    const cuda_ops_conv_bn_relu_pool_sizes sizes = block_sizes(s);
    const cuda_ops_norm_parameters norm = {t->norm.weight, t->norm.bias, F32, 1e-5};
    const block_buffers p = divide_block(saved, &sizes);
    void *const space = workspace(self, cuda_ops_conv_bn_relu_pool_workspace_cuda(&sizes, F32));
    check("conv_bn_relu_pool backward",
          cuda_ops_conv_bn_relu_pool_backward_cuda(grad_input, gradients->weight, gradients->bias,
                                                   gradients->norm.weight, gradients->norm.bias, space, grad_output,
                                                   p.argmax, p.maximum, p.conv_output, p.statistics, input, t->weight,
                                                   &norm, &sizes, F32, F32, self->base.stream));
}

static void cuda_relu_forward(mnist_device *device, float *output, const float *input, int64_t count)
{
    cuda *self = (cuda *)device;
    check("relu", cuda_ops_relu_forward_cuda(output, input, count, F32, self->base.stream));
}

static void cuda_relu_backward(mnist_device *device, float *grad_input, const float *grad_output, const float *output,
                               int64_t count)
{
    cuda *self = (cuda *)device;
    check("relu backward", cuda_ops_relu_backward_cuda(grad_input, grad_output, output, count, F32, self->base.stream));
}

static void cuda_linear_forward(mnist_device *device, float *output, const float *input, const float *weight,
                                const float *bias, const mnist_linear_shape *s)
{
    cuda *self = (cuda *)device;
    void *space =
        workspace(self, cuda_ops_linear_forward_workspace_cuda(s->rows, s->in_features, s->out_features, F32));
    check("linear", cuda_ops_linear_forward_cuda(output, input, weight, bias, space, s->rows, s->in_features,
                                                 s->out_features, F32, self->base.stream));
}

static void cuda_linear_backward(mnist_device *device, float *grad_input, float *grad_weight, float *grad_bias,
                                 const float *grad_output, const float *input, const float *weight,
                                 const mnist_linear_shape *s)
{
    cuda *self = (cuda *)device;
    const char *const op = "linear backward";
    const int64_t rows = s->rows, in_features = s->in_features, out_features = s->out_features;
    void *space = workspace(self, cuda_ops_linear_backward_input_workspace_cuda(rows, in_features, out_features, F32));
    check(op, cuda_ops_linear_backward_input_cuda(grad_input, grad_output, weight, space, rows, in_features,
                                                  out_features, F32, self->base.stream));
    space = workspace(self, cuda_ops_linear_backward_weight_workspace_cuda(rows, in_features, out_features, F32));
    check(op, cuda_ops_linear_backward_weight_cuda(grad_weight, grad_output, input, space, rows, in_features,
                                                   out_features, F32, self->base.stream));
    space = workspace(self, cuda_ops_linear_backward_bias_workspace_cuda(rows, out_features, F32));
    check(op, cuda_ops_linear_backward_bias_cuda(grad_bias, grad_output, space, rows, out_features, F32, F32,
                                                 self->base.stream));
}

static void cuda_loss_forward(mnist_device *device, float *loss, float *statistics, const float *logits,
                              const int64_t *labels, int64_t rows)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, (int64_t)cuda_ops_cross_entropy_workspace_cuda(rows, MNIST_CLASSES, 1));
    /* Labels were checked when their file was read, so that no record of bad ones is given. */
    check("cross_entropy", cuda_ops_cross_entropy_forward_cuda(loss, statistics, statistics + 3 * rows, space, NULL,
                                                               logits, labels, NULL, NULL, rows, MNIST_CLASSES, 1, -100,
                                                               0.0, CUDA_OPS_REDUCTION_MEAN, F32, self->base.stream));
}

static void cuda_loss_backward(mnist_device *device, float *grad_logits, const float *statistics, const float *logits,
                               const int64_t *labels, int64_t rows)
{
    cuda *self = (cuda *)device;
    check("cross_entropy backward",
          cuda_ops_cross_entropy_backward_cuda(grad_logits, self->base.allocations[0], logits, labels, NULL, NULL,
                                               statistics, statistics + 3 * rows, rows, MNIST_CLASSES, 1, -100, 0.0,
                                               CUDA_OPS_REDUCTION_MEAN, F32, self->base.stream));
}

static void cuda_sgd(mnist_device *device, float *parameters, const float *gradients, int64_t count, double lr)
{
    cuda *self = (cuda *)device;
    const cuda_ops_sgd_options options = {.lr = lr};
    void *const params[] = {parameters};
    const void *const grads[] = {gradients};
    const uint8_t first[] = {0};
    check("sgd", cuda_ops_sgd_cuda(params, grads, NULL, &count, first, 1, &options, NULL, F32, F32, self->base.stream));
}

static void cuda_mark(mnist_device *device)
{
    app_cuda_mark(&((cuda *)device)->base);
}

static int64_t cuda_collect(mnist_device *device, double *milliseconds, int64_t room)
{
    return app_cuda_collect(&((cuda *)device)->base, milliseconds, room);
}

mnist_device *mnist_open_cuda(void)
{
    cuda *self = app_allocate(1, sizeof *self);
    mnist_device *d = &self->public;
    app_cuda_open(&self->base, d->name, sizeof d->name, &d->allocated_bytes);
    for (int i = 0; i < 2; i++)
        check_cuda("cudaEventCreate", cudaEventCreateWithFlags(&self->copied[i], cudaEventDisableTiming));
    /* In the order of Python's side: x.sub_(mean).div_(std), each rounded to float. */
    for (int i = 0; i < 256; i++)
        self->normalised[i] = ((float)i - (float)(0.1307 * 255)) / (float)(0.3081 * 255);
    d->measured_by = "CUDA events on the stream between the phases";
    d->allocate = cuda_allocate;
    d->upload = cuda_upload;
    d->download = cuda_download;
    d->close = cuda_close;
    d->load = cuda_load;
    d->block_bytes = cuda_block_bytes;
    d->block_forward = cuda_block_forward;
    d->block_backward = cuda_block_backward;
    d->relu_forward = cuda_relu_forward;
    d->relu_backward = cuda_relu_backward;
    d->linear_forward = cuda_linear_forward;
    d->linear_backward = cuda_linear_backward;
    d->loss_forward = cuda_loss_forward;
    d->loss_backward = cuda_loss_backward;
    d->sgd = cuda_sgd;
    d->mark = cuda_mark;
    d->collect = cuda_collect;
    /* The first allocation: the gradient of the loss with respect to itself. */
    const float one = 1.0f;
    cuda_upload(d, cuda_allocate(d, sizeof one), &one, sizeof one);
    return d;
}

#endif
