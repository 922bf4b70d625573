/* The network of `python -m cuda_ops mnist` on a device:
 *
 *     conv 3x3 (1 -> 32), batch norm, ReLU, max-pool 2, conv 3x3 (32 -> 64), batch norm, ReLU, max-pool 2,
 *     linear (3136 -> 128), ReLU, linear (128 -> 10)
 */
#ifndef MNIST_NETWORK_H
#define MNIST_NETWORK_H

#include "mnist/layers.h"

typedef struct mnist_network mnist_network;

/* With room for batches of up to `largest_batch` images and the losses of `steps` steps. */
mnist_network *mnist_make_network(mnist_device *device, const mnist_start *start, int64_t largest_batch);

/* The phases of one step of training, to be called in this order. */
void mnist_load(mnist_network *network, const mnist_set *set, const uint32_t *indices, int64_t count);
void mnist_forward(mnist_network *network, int64_t step);
void mnist_backward(mnist_network *network);
void mnist_update(mnist_network *network, double lr);

/* Of steps [begin, end), into host memory. */
void mnist_losses(mnist_network *network, float *losses, int64_t begin, int64_t end);

/* How many of the set's images are classified correctly, with the running statistics. */
int64_t mnist_count_right(mnist_network *network, const mnist_set *set, int64_t batch_size);

#endif
