/* The layers on the CPU: the C API's functions work on ranges, and OpenMP spreads the ranges over threads. */
#include <string.h>

#include "app.h"
#include "cpu.h"
#include "cuda_ops/batch_norm.h"
#include "cuda_ops/cross_entropy.h"
#include "cuda_ops/relu.h"
#include "cuda_ops/sgd.h"
#include "mnist/layers.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;

typedef struct cpu {
    mnist_device public;
    app_cpu base;
    float normalised[256]; /* of each value of a pixel */
} cpu;

#define SPREAD(...) APP_SPREAD(&self->base, __VA_ARGS__)

static void *cpu_allocate(mnist_device *device, int64_t bytes)
{
    return app_cpu_allocate(&((cpu *)device)->base, bytes);
}

static void cpu_copy(mnist_device *device, void *target, const void *source, int64_t bytes)
{
    (void)device;
    memcpy(target, source, (size_t)bytes);
}

static void cpu_close(mnist_device *device)
{
    app_cpu_close(&((cpu *)device)->base);
    app_free(device);
}

static cuda_ops_status load_range(const cpu *self, float *images, int64_t *labels, const mnist_set *set,
                                  const uint32_t *indices, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const uint8_t *pixels = set->images + (int64_t)indices[i] * MNIST_PIXELS;
        for (int p = 0; p < MNIST_PIXELS; p++)
            images[i * MNIST_PIXELS + p] = self->normalised[pixels[p]];
        labels[i] = set->labels[indices[i]];
    }
    return CUDA_OPS_SUCCESS;
}

static void cpu_load(mnist_device *device, float *images, int64_t *labels, const mnist_set *set,
                     const uint32_t *indices, int64_t count)
{
    cpu *self = (cpu *)device;
    SPREAD("load", count, APP_ELEMENT_GRAIN / MNIST_PIXELS, load_range(self, images, labels, set, indices, begin, end));
}

/* The buffers in a block's `saved`, each aligned to 64 bytes. */
typedef struct block_buffers {
    char *prepared, *conv_output, *argmax, *maximum, *moments, *partials, *weights;
    double *mean, *variance;
    float *coefficients;
    int64_t bytes;
} block_buffers;

static char *take(int64_t *offset, char *memory, size_t bytes)
{
    char *const begin = memory ? memory + *offset : NULL;
    *offset += ((int64_t)bytes + 63) / 64 * 64;
    return begin;
}

static cuda_ops_conv_block_plan block_plan(const cuda_ops_conv_block_sizes *sizes)
{
    cuda_ops_conv_block_plan plan;
    app_check("conv_block", cuda_ops_conv_block_plan_cpu(&plan, sizes));
    return plan;
}

static block_buffers divide_block(char *memory, const cuda_ops_conv_block_plan *plan,
                                  const cuda_ops_conv_block_sizes *sizes)
{
    const size_t channels = (size_t)sizes->out_channels;
    block_buffers p;
    int64_t offset = 0;
    p.prepared = take(&offset, memory, plan->prepared_bytes);
    p.conv_output = take(&offset, memory, plan->conv_output_bytes);
    p.argmax = take(&offset, memory, plan->argmax_bytes);
    p.maximum = take(&offset, memory, plan->maximum_bytes);
    p.moments = take(&offset, memory, plan->moments_bytes);
    p.partials = take(&offset, memory, plan->partials_bytes);
    p.weights = take(&offset, memory, plan->weights_bytes);
    p.mean = (double *)(void *)take(&offset, memory, channels * sizeof(double));
    p.variance = (double *)(void *)take(&offset, memory, channels * sizeof(double));
    p.coefficients = (float *)(void *)take(&offset, memory, 4 * channels * sizeof(float));
    p.bytes = offset;
    return p;
}

static int64_t cpu_block_bytes(mnist_device *device, const cuda_ops_conv_block_sizes *sizes)
{
    (void)device;
    const cuda_ops_conv_block_plan plan = block_plan(sizes);
    return divide_block(NULL, &plan, sizes).bytes;
}

static void cpu_block_forward(mnist_device *device, float *output, void *saved, const float *input,
                              const mnist_block_tensors *t, const cuda_ops_conv_block_sizes *s, int training)
{
    cpu *self = (cpu *)device;
    const char *const op = "conv_block";
    const cuda_ops_conv_block_plan plan = block_plan(s);
    const block_buffers p = divide_block(saved, &plan, s);
    char *const workspace = app_cpu_workspace(&self->base, (int64_t)plan.workspace_bytes);
    const int64_t stride = app_cpu_padded((int64_t)plan.workspace_bytes);
    SPREAD(op, s->out_channels / 16, 2, cuda_ops_conv_block_prepare_cpu(p.prepared, t->weight, 0, s, begin, end));
    SPREAD(op, plan.chunks, 1,
           cuda_ops_conv_block_convolve_cpu(p.conv_output, p.moments, input, p.prepared, t->bias, s, begin, end,
                                            workspace + thread * stride));
    if (training) {
        app_check(op, cuda_ops_conv_block_statistics_cpu(p.mean, p.variance, p.moments, t->weight, t->bias, s));
        app_check("batch_norm",
                  cuda_ops_batch_norm_update_cpu(t->norm.running_mean, t->norm.running_var, p.mean, p.variance,
                                                 s->out_channels, s->batch * s->height * s->width, 0.1, F32));
    }
    for (int64_t k = 0; !training && k < s->out_channels; k++) {
        p.mean[k] = (double)t->norm.running_mean[k];
        p.variance[k] = (double)t->norm.running_var[k];
    }
    SPREAD(op, plan.chunks, 1,
           cuda_ops_conv_block_pool_cpu(output, training ? (uint8_t *)p.argmax : NULL, training ? p.maximum : NULL,
                                        p.conv_output, input, p.prepared, t->bias, p.mean, p.variance, t->norm.weight,
                                        t->norm.bias, 1e-5, s, begin, end, workspace + thread * stride));
}

static void cpu_block_backward(mnist_device *device, float *grad_input, const mnist_block_tensors *gradients,
                               const float *grad_output, void *saved, const float *input, const mnist_block_tensors *t,
                               const cuda_ops_conv_block_sizes *s)
{
    cpu *self = (cpu *)device;
    const char *const op = "conv_block backward";
    const cuda_ops_conv_block_plan plan = block_plan(s);
    const block_buffers p = divide_block(saved, &plan, s);
    const uint8_t *const argmax = (const uint8_t *)p.argmax;
    char *const workspace = app_cpu_workspace(&self->base, (int64_t)plan.workspace_bytes);
    const int64_t stride = app_cpu_padded((int64_t)plan.workspace_bytes);
    SPREAD(op, plan.chunks, 1,
           cuda_ops_conv_block_sums_cpu(p.partials, grad_output, argmax, p.maximum, input, p.mean, s, begin, end,
                                        workspace + thread * stride));
    app_check(op, cuda_ops_conv_block_prepare_backward_cpu(p.coefficients, gradients->norm.weight, gradients->norm.bias,
                                                           gradients->weight, p.partials, p.moments, t->weight, t->bias,
                                                           p.mean, p.variance, t->norm.weight, 1e-5, s));
    memset(gradients->bias, 0, (size_t)s->out_channels * sizeof(float)); /* batch norm subtracts the bias again */
    if (s->in_channels == 1 && !grad_input)
        return;
    if (grad_input)
        SPREAD(op, s->out_channels / 16, 2, cuda_ops_conv_block_prepare_cpu(p.prepared, t->weight, 1, s, begin, end));
    SPREAD(op, plan.chunks, 1,
           cuda_ops_conv_block_gradients_cpu(grad_input, p.weights, grad_output, argmax, p.conv_output, input,
                                             p.prepared, t->bias, p.coefficients, s, begin, end,
                                             workspace + thread * stride));
    if (s->in_channels > 1)
        SPREAD(op, s->in_channels, 4,
               cuda_ops_conv_block_reduce_weight_cpu(gradients->weight, p.weights, s, begin, end));
}

static void cpu_relu_forward(mnist_device *device, float *output, const float *input, int64_t count)
{
    cpu *self = (cpu *)device;
    SPREAD("relu", count, APP_ELEMENT_GRAIN, cuda_ops_relu_forward_cpu(output, input, begin, end, F32));
}

static void cpu_relu_backward(mnist_device *device, float *grad_input, const float *grad_output, const float *output,
                              int64_t count)
{
    cpu *self = (cpu *)device;
    SPREAD("relu backward", count, APP_ELEMENT_GRAIN,
           cuda_ops_relu_backward_cpu(grad_input, grad_output, output, begin, end, F32));
}

static void cpu_linear_forward(mnist_device *device, float *output, const float *input, const float *weight,
                               const float *bias, const mnist_linear_shape *s)
{
    app_cpu_linear_forward(&((cpu *)device)->base, output, input, weight, bias, s->rows, s->in_features,
                           s->out_features);
}

static void cpu_linear_backward(mnist_device *device, float *grad_input, float *grad_weight, float *grad_bias,
                                const float *grad_output, const float *input, const float *weight,
                                const mnist_linear_shape *s)
{
    app_cpu_linear_backward(&((cpu *)device)->base, grad_input, grad_weight, grad_bias, grad_output, input, weight,
                            s->rows, s->in_features, s->out_features);
}

static void cpu_loss_forward(mnist_device *device, float *loss, float *statistics, const float *logits,
                             const int64_t *labels, int64_t rows)
{
    /* Blocks of rows whose size does not depend on the number of threads; at this size one thread computes all. */
    enum { ROWS = 1024 };
    (void)device;
    double partials[2];
    double sums[2] = {0, 0};
    for (int64_t begin = 0; begin < rows; begin += ROWS) {
        const int64_t end = begin + ROWS < rows ? begin + ROWS : rows;
        app_check("cross_entropy",
                  cuda_ops_cross_entropy_forward_cpu(NULL, partials, statistics, logits, labels, NULL, NULL, rows,
                                                     MNIST_CLASSES, 1, begin, end, -100, 0.0, F32));
        sums[0] += partials[0];
        sums[1] += partials[1];
    }
    app_check("cross_entropy",
              cuda_ops_loss_reduce_cpu(loss, statistics + 3 * rows, sums, 1, CUDA_OPS_REDUCTION_MEAN, F32));
}

static void cpu_loss_backward(mnist_device *device, float *grad_logits, const float *statistics, const float *logits,
                              const int64_t *labels, int64_t rows)
{
    (void)device;
    const float one = 1.0f;
    app_check("cross_entropy backward",
              cuda_ops_cross_entropy_backward_cpu(grad_logits, &one, logits, labels, NULL, NULL, statistics,
                                                  statistics + 3 * rows, rows, MNIST_CLASSES, 1, 0, rows, -100, 0.0,
                                                  CUDA_OPS_REDUCTION_MEAN, F32));
}

static void cpu_sgd(mnist_device *device, float *parameters, const float *gradients, int64_t count, double lr)
{
    cpu *self = (cpu *)device;
    const cuda_ops_sgd_options options = {.lr = lr};
    SPREAD("sgd", count, APP_ELEMENT_GRAIN,
           cuda_ops_sgd_cpu(parameters, gradients, NULL, 0, &options, begin, end, F32));
}

static void cpu_mark(mnist_device *device)
{
    app_cpu_mark(&((cpu *)device)->base);
}

static int64_t cpu_collect(mnist_device *device, double *milliseconds, int64_t room)
{
    return app_cpu_collect(&((cpu *)device)->base, milliseconds, room);
}

mnist_device *mnist_open_cpu(int threads)
{
    cpu *self = app_allocate(1, sizeof *self);
    /* In the order of Python's side: x.sub_(mean).div_(std), each rounded to float. */
    for (int i = 0; i < 256; i++)
        self->normalised[i] = ((float)i - (float)(0.1307 * 255)) / (float)(0.3081 * 255);
    mnist_device *d = &self->public;
    app_cpu_open(&self->base, threads, d->name, sizeof d->name, &d->allocated_bytes);
    d->measured_by = "the host's clock between the phases";
    d->allocate = cpu_allocate;
    d->upload = cpu_copy;
    d->download = cpu_copy;
    d->close = cpu_close;
    d->load = cpu_load;
    d->block_bytes = cpu_block_bytes;
    d->block_forward = cpu_block_forward;
    d->block_backward = cpu_block_backward;
    d->relu_forward = cpu_relu_forward;
    d->relu_backward = cpu_relu_backward;
    d->linear_forward = cpu_linear_forward;
    d->linear_backward = cpu_linear_backward;
    d->loss_forward = cpu_loss_forward;
    d->loss_backward = cpu_loss_backward;
    d->sgd = cpu_sgd;
    d->mark = cpu_mark;
    d->collect = cpu_collect;
    return d;
}
