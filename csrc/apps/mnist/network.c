#include "mnist/network.h"

#include <stdlib.h>
#include <string.h>

#include "app.h"
#include "cuda_ops/core.h"

enum { CHANNELS1 = 32, CHANNELS2 = 64, SIDE2 = MNIST_SIDE / 2, SIDE3 = SIDE2 / 2, FEATURES = 3136, HIDDEN = 128 };
_Static_assert(FEATURES == CHANNELS2 * SIDE3 * SIDE3, "what the first linear layer takes is what the last block gives");

/* The tensors in mnist_tensors' order. */
enum {
    CONV1_WEIGHT,
    CONV1_BIAS,
    NORM1_WEIGHT,
    NORM1_BIAS,
    NORM1_RUNNING_MEAN,
    NORM1_RUNNING_VAR,
    CONV2_WEIGHT,
    CONV2_BIAS,
    NORM2_WEIGHT,
    NORM2_BIAS,
    NORM2_RUNNING_MEAN,
    NORM2_RUNNING_VAR,
    LINEAR1_WEIGHT,
    LINEAR1_BIAS,
    LINEAR2_WEIGHT,
    LINEAR2_BIAS
};

/* Convolution to pooling: the shapes of one block, and its buffers. */
typedef struct block {
    int64_t in_channels, channels, side;
    float *pooled, *grad_pooled;
    void *saved; /* what backward takes from forward */
    int weight;  /* index of the convolution's weight; the block's other tensors follow it */
} block;

struct mnist_network {
    mnist_device *device;
    int64_t batch, largest_batch, trainable;
    float *parameters, *gradients; /* the trainable ones are contiguous, so that one call updates them */
    float *tensor[MNIST_TENSORS], *gradient[MNIST_TENSORS];
    float *images, *hidden, *logits, *statistics, *losses;
    float *grad_hidden, *grad_logits;
    int64_t *labels;
    block block1, block2;
};

static int64_t padded(int64_t count)
{
    return (count + 15) / 16 * 16;
}

static void *floats(mnist_device *device, int64_t count)
{
    return device->allocate(device, count * (int64_t)sizeof(float));
}

/* channels_last between the blocks; the linear layers read the second one's output in the order of channels. */
static cuda_ops_conv_block_sizes block_sizes(const block *b, int64_t batch)
{
    return (cuda_ops_conv_block_sizes){.batch = batch,
                                       .in_channels = b->in_channels,
                                       .out_channels = b->channels,
                                       .height = b->side,
                                       .width = b->side,
                                       .input_channels_last = b->weight != CONV1_WEIGHT,
                                       .output_channels_last = b->weight == CONV1_WEIGHT,
                                       .dtype = CUDA_OPS_FLOAT32};
}

static mnist_block_tensors block_tensors(float *const *tensor)
{
    return (mnist_block_tensors){tensor[0], tensor[1], {tensor[2], tensor[3], tensor[4], tensor[5]}};
}

static block make_block(mnist_device *device, int64_t batch, int64_t in_channels, int64_t channels, int64_t side,
                        int weight)
{
    const int64_t pooled = batch * channels * (side / 2) * (side / 2);
    block b = {.in_channels = in_channels, .channels = channels, .side = side, .weight = weight};
    b.pooled = floats(device, pooled);
    b.grad_pooled = floats(device, pooled);
    const cuda_ops_conv_block_sizes sizes = block_sizes(&b, batch);
    b.saved = device->allocate(device, device->block_bytes(device, &sizes));
    return b;
}

mnist_network *mnist_make_network(mnist_device *device, const mnist_start *start, int64_t largest_batch)
{
    mnist_network *n = app_allocate(1, sizeof *n);
    n->device = device;
    n->largest_batch = largest_batch;
    int64_t all = 0;
    int64_t offset[MNIST_TENSORS];
    /* Each tensor is aligned to 64 bytes; the padding between always has the gradient zero. */
    for (int trainable = 1; trainable >= 0; trainable--) {
        for (int i = 0; i < MNIST_TENSORS; i++)
            if (mnist_tensors[i].trainable == trainable) {
                offset[i] = all;
                all += padded(mnist_tensors[i].count);
            }
        if (trainable)
            n->trainable = all;
    }
    n->parameters = floats(device, all);
    n->gradients = floats(device, n->trainable);
    for (int i = 0; i < MNIST_TENSORS; i++) {
        n->tensor[i] = n->parameters + offset[i];
        n->gradient[i] = mnist_tensors[i].trainable ? n->gradients + offset[i] : NULL;
        device->upload(device, n->tensor[i], start->tensors[i], mnist_tensors[i].count * (int64_t)sizeof(float));
    }
    n->images = floats(device, largest_batch * MNIST_PIXELS);
    n->labels = device->allocate(device, largest_batch * (int64_t)sizeof(int64_t));
    n->hidden = floats(device, largest_batch * HIDDEN);
    n->logits = floats(device, largest_batch * MNIST_CLASSES);
    n->grad_hidden = floats(device, largest_batch * HIDDEN);
    n->grad_logits = floats(device, largest_batch * MNIST_CLASSES);
    n->statistics = floats(device, 3 * largest_batch + 1);
    n->losses = floats(device, start->steps);
    n->block1 = make_block(device, largest_batch, 1, CHANNELS1, MNIST_SIDE, CONV1_WEIGHT);
    n->block2 = make_block(device, largest_batch, CHANNELS1, CHANNELS2, SIDE2, CONV2_WEIGHT);
    return n;
}

static void block_forward(mnist_network *n, block *b, const float *input, int training)
{
    const mnist_block_tensors tensors = block_tensors(n->tensor + b->weight);
    const cuda_ops_conv_block_sizes sizes = block_sizes(b, n->batch);
    n->device->block_forward(n->device, b->pooled, b->saved, input, &tensors, &sizes, training);
}

/* From b->grad_pooled. */
static void block_backward(mnist_network *n, block *b, float *grad_input, const float *input)
{
    const mnist_block_tensors tensors = block_tensors(n->tensor + b->weight);
    const mnist_block_tensors gradients = block_tensors(n->gradient + b->weight);
    const cuda_ops_conv_block_sizes sizes = block_sizes(b, n->batch);
    n->device->block_backward(n->device, grad_input, &gradients, b->grad_pooled, b->saved, input, &tensors, &sizes);
}

static mnist_linear_shape linear1(const mnist_network *n)
{
    return (mnist_linear_shape){n->batch, FEATURES, HIDDEN};
}

static mnist_linear_shape linear2(const mnist_network *n)
{
    return (mnist_linear_shape){n->batch, HIDDEN, MNIST_CLASSES};
}

static void logits(mnist_network *n, int training)
{
    mnist_device *device = n->device;
    const mnist_linear_shape shape1 = linear1(n), shape2 = linear2(n);
    block_forward(n, &n->block1, n->images, training);
    block_forward(n, &n->block2, n->block1.pooled, training);
    device->linear_forward(device, n->hidden, n->block2.pooled, n->tensor[LINEAR1_WEIGHT], n->tensor[LINEAR1_BIAS],
                           &shape1);
    device->relu_forward(device, n->hidden, n->hidden, n->batch * HIDDEN);
    device->linear_forward(device, n->logits, n->hidden, n->tensor[LINEAR2_WEIGHT], n->tensor[LINEAR2_BIAS], &shape2);
}

void mnist_load(mnist_network *n, const mnist_set *set, const uint32_t *indices, int64_t count)
{
    n->batch = count;
    n->device->load(n->device, n->images, n->labels, set, indices, count);
}

void mnist_forward(mnist_network *n, int64_t step)
{
    logits(n, 1);
    n->device->loss_forward(n->device, n->losses + step, n->statistics, n->logits, n->labels, n->batch);
}

void mnist_backward(mnist_network *n)
{
    mnist_device *device = n->device;
    const mnist_linear_shape shape1 = linear1(n), shape2 = linear2(n);
    device->loss_backward(device, n->grad_logits, n->statistics, n->logits, n->labels, n->batch);
    device->linear_backward(device, n->grad_hidden, n->gradient[LINEAR2_WEIGHT], n->gradient[LINEAR2_BIAS],
                            n->grad_logits, n->hidden, n->tensor[LINEAR2_WEIGHT], &shape2);
    device->relu_backward(device, n->grad_hidden, n->grad_hidden, n->hidden, n->batch * HIDDEN);
    device->linear_backward(device, n->block2.grad_pooled, n->gradient[LINEAR1_WEIGHT], n->gradient[LINEAR1_BIAS],
                            n->grad_hidden, n->block2.pooled, n->tensor[LINEAR1_WEIGHT], &shape1);
    block_backward(n, &n->block2, n->block1.grad_pooled, n->block1.pooled);
    block_backward(n, &n->block1, NULL, n->images);
}

void mnist_update(mnist_network *n, double lr)
{
    n->device->sgd(n->device, n->parameters, n->gradients, n->trainable, lr);
}

void mnist_losses(mnist_network *n, float *losses, int64_t begin, int64_t end)
{
    n->device->download(n->device, losses, n->losses + begin, (end - begin) * (int64_t)sizeof(float));
}

int64_t mnist_count_right(mnist_network *n, const mnist_set *set, int64_t batch_size)
{
    uint32_t *indices = app_allocate(batch_size, sizeof(uint32_t));
    float *host = app_allocate(batch_size * MNIST_CLASSES, sizeof(float));
    int64_t right = 0;
    for (int64_t first = 0; first < set->count; first += batch_size) {
        const int64_t count = set->count - first < batch_size ? set->count - first : batch_size;
        for (int64_t i = 0; i < count; i++)
            indices[i] = (uint32_t)(first + i);
        mnist_load(n, set, indices, count);
        logits(n, 0);
        n->device->download(n->device, host, n->logits, count * MNIST_CLASSES * (int64_t)sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            const float *row = host + i * MNIST_CLASSES;
            int best = 0;
            for (int k = 1; k < MNIST_CLASSES; k++)
                if (row[k] > row[best])
                    best = k;
            right += best == set->labels[first + i];
        }
    }
    app_free(indices);
    app_free(host);
    return right;
}
