/* What a device provides: the layers, forward and backward, on the C API's CPU or CUDA backend.
 *
 * mnist/network.c calls them and knows no device; mnist/cpu.c and mnist/cuda.c implement them. All tensors are
 * float32 in the device's memory, images in the order batch, channels, height, width; outputs are written, not added
 * to. A layer that fails says why on stderr and ends the program with status 1. */
#ifndef MNIST_LAYERS_H
#define MNIST_LAYERS_H

#include <stdint.h>

#include "cuda_ops/conv_block.h"
#include "mnist/files.h"

typedef struct mnist_device mnist_device;

typedef struct mnist_norm_parameters {
    float *weight, *bias, *running_mean, *running_var;
} mnist_norm_parameters;

typedef struct mnist_linear_shape {
    int64_t rows, in_features, out_features;
} mnist_linear_shape;

/* Parameters and running statistics of a block from the convolution to the pooling, or the gradients of the former. */
typedef struct mnist_block_tensors {
    float *weight, *bias;
    mnist_norm_parameters norm;
} mnist_block_tensors;

/* The implementation's own data follow `public` in its struct. */
struct mnist_device {
    char name[256];          /* of the processor */
    const char *measured_by; /* the clock */
    int64_t allocated_bytes;

    void *(*allocate)(mnist_device *, int64_t bytes); /* zeroed, freed by `close` */
    void (*upload)(mnist_device *, void *target, const void *source, int64_t bytes);
    void (*download)(mnist_device *, void *target, const void *source, int64_t bytes);
    void (*close)(mnist_device *);

    /* The images `indices` of the set, normalised, and their labels. */
    void (*load)(mnist_device *, float *images, int64_t *labels, const mnist_set *, const uint32_t *indices,
                 int64_t count);

    /* Convolution, batch norm, ReLU and max-pooling, fused. `saved`: block_bytes, for what backward takes from forward.
     * The first block's output, which is the second one's input, is channels_last. */
    int64_t (*block_bytes)(mnist_device *, const cuda_ops_conv_block_sizes *);
    void (*block_forward)(mnist_device *, float *output, void *saved, const float *input, const mnist_block_tensors *,
                          const cuda_ops_conv_block_sizes *, int training);
    /* grad_input may be NULL. */
    void (*block_backward)(mnist_device *, float *grad_input, const mnist_block_tensors *gradients,
                           const float *grad_output, void *saved, const float *input, const mnist_block_tensors *,
                           const cuda_ops_conv_block_sizes *);

    void (*relu_forward)(mnist_device *, float *output, const float *input, int64_t count);
    void (*relu_backward)(mnist_device *, float *grad_input, const float *grad_output, const float *output,
                          int64_t count);
    void (*linear_forward)(mnist_device *, float *output, const float *input, const float *weight, const float *bias,
                           const mnist_linear_shape *);
    void (*linear_backward)(mnist_device *, float *grad_input, float *grad_weight, float *grad_bias,
                            const float *grad_output, const float *input, const float *weight,
                            const mnist_linear_shape *);
    /* The mean cross-entropy over `rows`; statistics: 3 * rows + 1 floats for backward. */
    void (*loss_forward)(mnist_device *, float *loss, float *statistics, const float *logits, const int64_t *labels,
                         int64_t rows);
    void (*loss_backward)(mnist_device *, float *grad_logits, const float *statistics, const float *logits,
                          const int64_t *labels, int64_t rows);
    void (*sgd)(mnist_device *, float *parameters, const float *gradients, int64_t count, double lr);

    /* Records the time at which all work issued so far is done. */
    void (*mark)(mnist_device *);
    /* Waits for the device. milliseconds[i]: from mark i to mark i + 1, since the last call; returns how many. */
    int64_t (*collect)(mnist_device *, double *milliseconds, int64_t most);
};

/* Marks between two calls of `collect`. */
enum { MNIST_MOST_MARKS = 128 };

mnist_device *mnist_open_cpu(int threads);
/* Fails (status 2) where the program is built without CUDA, or there is no GPU. */
mnist_device *mnist_open_cuda(void);

#endif
