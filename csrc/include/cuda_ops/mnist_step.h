/* mnist_step: whole training steps of the MNIST CNN (cuda_ops.models.MnistCNN) in one launch: gather a batch, forward,
 * backward, plain SGD, and on to the next batch.
 *
 *   conv 3x3 (1 -> 32) . batch norm . ReLU . max-pool 2 . conv 3x3 (32 -> 64) . batch norm . ReLU . max-pool 2 .
 *   flatten . linear (3136 -> 128) . ReLU . linear (128 -> 10) . mean cross-entropy with label smoothing
 *
 * Activations are bfloat16, parameters, their updates, statistics and sums float32 or wider: what torch.autocast with
 * bfloat16 makes of the network. Repeats bit by bit. CUDA alone, on Hopper with at least 128 multiprocessors that
 * nothing else occupies for good (the launch is cooperative).
 *
 *   images: [count][28][28] bytes, aligned to 4; labels: [count]
 *   indices: [steps][batch], the images of each step
 *   rates: [steps][2], the learning rate of convolutions and batch norms, and that of the linear layers
 *   losses: [steps]
 *   workspace: of cuda_ops_mnist_step_workspace(batch) bytes or more, aligned to 256; all zero before the first call,
 * and left such that the next may follow; of one call at a time
 *
 * An index outside of [0, count) is never used as an address: its image is NaN, as is the loss then, and it is
 * recorded in `error` (loss.h) unless that is NULL. The same holds for a label outside of [0, 10) but that nothing is
 * recorded.
 */
#ifndef CUDA_OPS_MNIST_STEP_H
#define CUDA_OPS_MNIST_STEP_H

#include "cuda_ops/core.h"
#include "cuda_ops/loss.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_OPS_MNIST_STEP_MOST = 1024 }; /* images a batch */

/* Of a convolution and its batch norm, in place. The convolution's bias is read (the running mean contains it) and
 * never changes: batch norm takes it away again, so that its gradient is zero. Linear layers have no norm. */
typedef struct cuda_ops_mnist_block {
    float *weight, *bias, *norm_weight, *norm_bias, *running_mean, *running_variance;
    int64_t *batches;
    float eps, momentum;
} cuda_ops_mnist_block;

typedef struct cuda_ops_mnist_parameters {
    cuda_ops_mnist_block block1, block2;
    float *linear1_weight, *linear1_bias, *linear2_weight, *linear2_bias;
} cuda_ops_mnist_parameters;

/* Whether the current device and this build can; `batch` is 1 to CUDA_OPS_MNIST_STEP_MOST. */
int cuda_ops_mnist_step_supported(int64_t batch);
int64_t cuda_ops_mnist_step_workspace(int64_t batch);
/* The table (paths.h): fills in at most `room` reports, and returns how many rows there are. device: NULL for the
 * current one. */
int cuda_ops_mnist_step_paths_cuda(cuda_ops_path_report *reports, int room, int64_t batch,
                                   const cuda_ops_device_facts *device);

cuda_ops_status cuda_ops_mnist_step_cuda(float *losses, const cuda_ops_mnist_parameters *parameters, void *workspace,
                                         cuda_ops_index_error *error, const uint8_t *images, const int64_t *labels,
                                         int64_t count, const int64_t *indices, const float *rates, int64_t steps,
                                         int64_t batch, double mean, double std, double label_smoothing,
                                         cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
