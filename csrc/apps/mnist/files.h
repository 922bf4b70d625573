/* The files that the MNIST program reads: the data set, and the start of a run that Python wrote.
 *
 * Both are untrusted. What is wrong with a file is said in one line on stderr, and the program ends with status 2.
 */
#ifndef MNIST_FILES_H
#define MNIST_FILES_H

#include <stdint.h>

enum { MNIST_SIDE = 28, MNIST_PIXELS = MNIST_SIDE * MNIST_SIDE, MNIST_CLASSES = 10 };

typedef struct mnist_set {
    int64_t count;
    uint8_t *images; /* count x MNIST_PIXELS */
    uint8_t *labels; /* count, each below MNIST_CLASSES */
} mnist_set;

/* Reads DIRECTORY/MNIST/raw/PREFIX-{images-idx3,labels-idx1}-ubyte, or where there is none, its .gz. `prefix` is
 * "train" or "t10k". `limit`: only the first so many images, 0: all; the whole files are checked in any case. */
mnist_set mnist_read_set(const char *directory, const char *prefix, int64_t limit);

/* One parameter or running statistic of the network, in the order of the state_dict. */
typedef struct mnist_tensor {
    const char *name;
    int64_t count;
    int64_t fan_in; /* of its layer, for the first weights; 0: batch norm's */
    int trainable;
    float first; /* of batch norm's tensors */
} mnist_tensor;
enum { MNIST_TENSORS = 16 };
extern const mnist_tensor mnist_tensors[MNIST_TENSORS];

/* How a run begins: the initial weights, and the images of each batch. */
typedef struct mnist_start {
    int64_t images, batch_size, epochs;
    int64_t steps;                 /* epochs * (images / batch_size) */
    float *tensors[MNIST_TENSORS]; /* mnist_tensors[i].count elements each */
    uint32_t *order;               /* steps * batch_size, each below `images` */
} mnist_start;

/* Reads what `python -m cuda_ops mnist --save-start FILE` writes. All numbers are little-endian, nothing is padded:
 *
 *     char[8]  "CUOPSTRT"
 *     uint32   1, the version of this layout
 *     uint32   tensors, 16
 *     uint64   images in the training set
 *     uint64   images in a batch
 *     uint64   epochs
 *     for each tensor, in the order of the model's state_dict (without num_batches_tracked):
 *         char[32]  its name, filled up with zeros
 *         uint64    elements
 *         float32[elements]
 *     uint32[epochs * (images / batch * batch)]   image indices, batch after batch, each epoch with its own shuffle
 *
 * and the file ends there. */
mnist_start mnist_read_start(const char *path);

/* The start that `seed` gives without such a file: initial weights of PyTorch's distribution (uniform up to
 * 1 / sqrt(fan_in)) and a shuffle, by another generator than PyTorch's, hence with other numbers. */
mnist_start mnist_make_start(int64_t images, int64_t batch_size, int64_t epochs, uint64_t seed);

void mnist_free_set(mnist_set *set);
void mnist_free_start(mnist_start *start);

#endif
