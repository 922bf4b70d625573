// mnist_step: whole training steps of the MNIST CNN (mnist_step.h has the layers) in one persistent cooperative kernel.
// At batch 64 a step is microseconds of arithmetic, and separate kernels wait for memory and for each other most of the
// time. Here 128 blocks stay on their multiprocessors for all steps of a call, keep what they can in shared memory and
// registers, and meet at eight grid barriers a step (see mnist_step_kernel). Up to 64 images a cluster of two blocks
// shares each; up to 256 a block has one or two (whole_forward.cuh); up to 1024 it takes them in rounds of two
// (rounds.cuh). Products are mma.sync and wgmma in bf16. Sums over blocks are added in a fixed order, so that results
// repeat bitwise. Bound by latency: of 25.2 us at 64 images (H200) about half are barriers and the trips to the L2
// around them; 45.1 us at 256, there by convolution 2's gradients on the tensor cores and by linear1
// (benchmarks/notes/mnist.md).
#include "cuda_ops/mnist_step.h"

#include "common/paths.h"
#include "mnist_step/backward.cuh"
#include "mnist_step/batch.cuh"
#include "mnist_step/forward.cuh"
#include "mnist_step/linear.cuh"
#include "mnist_step/linear_rounds.cuh"
#include "mnist_step/rounds.cuh"
#include "mnist_step/whole_backward.cuh"
#include "mnist_step/whole_forward.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Zeroes shared memory, of which some is never written again; loads the parameters that stay in the block, and the
// first batch.
template <class L>
__device__ __forceinline__ void start(Thread<L> &t, float (&linear1)[4][4], float &weight2)
{
    for (int i = t.thread; i < L::AT_SMALL / 16; i += THREADS)
        ((uint4 *)shared)[i] = make_uint4(0, 0, 0, 0);
    if constexpr (L::MEMBERS == 1)
        fence_proxy_async(); // before the bulk copy of the weights
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    Small<L> &s = t.small;
    if (t.thread < CHANNELS1) {
        const int c = t.thread;
        s.running_mean1[c] = p.block1.running_mean[c], s.running_variance1[c] = p.block1.running_variance[c];
    }
    if (t.thread < L::CHANNELS) {
        const int c = t.thread, second = t.member * L::CHANNELS + c;
        s.running_mean2[c] = p.block2.running_mean[second];
        s.running_variance2[c] = p.block2.running_variance[second];
        s.norm_weight2[c] = p.block2.norm_weight[second], s.norm_bias2[c] = p.block2.norm_bias[second];
        s.bias2[c] = p.block2.bias ? p.block2.bias[second] : 0.0f;
    }
    if (t.thread < CHANNELS1 * KERNEL1 / 8)
        ((uint4 *)t.small.kernel1)[t.thread] = make_uint4(0, 0, 0, 0);
    static_assert(CHANNELS1 * KERNEL1 / 8 <= THREADS, "");
    if (t.thread == 0) {
        mbarrier_init_fenced(shared_address(&t.small.arrived));
        mbarrier_init_fenced(shared_address(&t.small.mapped));
        mbarrier_init_fenced(shared_address(&t.small.first_made), WARPGROUP);
        mbarrier_init_fenced(shared_address(&t.small.all_made), WARPGROUP);
        if constexpr (L::ROUNDS > 1) {
            mbarrier_init_fenced(shared_address(&t.small.multiplied), WARPGROUP);
            mbarrier_init_fenced(shared_address(&t.small.exchanged));
            for (int i = 0; i < WARPGROUPS; i++) {
                mbarrier_init_fenced(shared_address(&t.small.group_made[i]), WARPGROUP);
                mbarrier_init_fenced(shared_address(&t.small.tiles_loaded[i]));
                mbarrier_init_fenced(shared_address(&t.small.argmax_loaded[i]));
                mbarrier_init_fenced(shared_address(&t.small.gradient_made[i]), WARPGROUP);
                mbarrier_init_fenced(shared_address(&t.small.weights_made[i]), WARPGROUP);
            }
        }
    }
    look_up(t, 0);
    __syncthreads();
    for (int i = t.thread; i < L::AT_ONCE * L::ARGMAX_BYTES / 4; i += THREADS)
        ((uint32_t *)(shared + L::AT_ARGMAX))[i] = 0x04040404u; // no argmax, where there is no window
    if (t.thread < OWN_WEIGHTS2) {
        const int at = t.block * OWN_WEIGHTS2 + t.thread;
        weight2 = p.block2.weight[parameter_of_weight2(at)];
        t.template workspace<__nv_bfloat16>(WS_WEIGHTS2)[weight2_of<L>(at)] = __float2bfloat16_rn(weight2);
        if constexpr (L::MEMBERS == 1)
            fence_proxy_async_global();
    }
    if (t.block < SLICES) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 pair = *(const float2 *)(p.linear1_weight + (16 * t.warp + t.row + 8 * half) * FEATURES +
                                                      t.block * SLICE + 8 * n + 2 * t.quad);
                linear1[n][2 * half] = pair.x, linear1[n][2 * half + 1] = pair.y;
            }
        store_linear1(t, linear1);
    }
    if constexpr (L::ROUNDS == 1) {
        Images<L> images;
        images.load(t, 0);
        images.store(t, 0);
    }
    __syncthreads();
    if constexpr (L::ROUNDS > 1)
        first_grams(t);
    else
        gram(t, 0);
    t.arrive();
    t.wait();
    if (t.block == MOMENTS_BLOCK)
        add_grams(t);
    t.arrive();
    t.wait();
}

template <class L>
__device__ __forceinline__ void finish(const Thread<L> &t, const float (&linear1)[4][4], float weight2)
{
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    const Small<L> &s = t.small;
    if (t.block < SLICES)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(p.linear1_weight + (16 * t.warp + t.row + 8 * half) * FEATURES + t.block * SLICE + 8 * n +
                            2 * t.quad) = make_float2(linear1[n][2 * half], linear1[n][2 * half + 1]);
    if (t.thread < OWN_WEIGHTS2)
        p.block2.weight[parameter_of_weight2(t.block * OWN_WEIGHTS2 + t.thread)] = weight2;
    if (t.owner == 0 && t.thread < L::CHANNELS) {
        const int c = t.thread, second = t.member * L::CHANNELS + c;
        p.block2.running_mean[second] = s.running_mean2[c];
        p.block2.running_variance[second] = s.running_variance2[c];
        p.block2.norm_weight[second] = s.norm_weight2[c], p.block2.norm_bias[second] = s.norm_bias2[c];
        if (t.member == 0 && c < CHANNELS1) {
            p.block1.running_mean[c] = s.running_mean1[c];
            p.block1.running_variance[c] = s.running_variance1[c];
            if (c == 0) {
                if (p.block1.batches)
                    *p.block1.batches += t.a.steps;
                if (p.block2.batches)
                    *p.block2.batches += t.a.steps;
            }
        }
    }
    // The last block to leave resets the grid barrier, which nobody waits at any more.
    if (t.thread == 0) {
        unsigned int *barrier = t.template workspace<unsigned int>(WS_BARRIER);
        if (atomicAdd(barrier + 1, 1) == BLOCKS - 1)
            barrier[0] = barrier[1] = 0;
    }
}

#endif

// A step's phases, each named for what the grid barrier before it has made complete:
//     weights     new weights, moments of this batch     -> convolution 1 + pooling, convolution 2, its sums
//     statistics  sums of y over the batch               -> batch norm, ReLU, max-pool
//     pooled      all images' features                   -> a split of linear1's k
//     partials    all splits of that product             -> hidden units, logits, loss, their gradients
//     hidden      all images' gradients of the hidden    -> gradient of a slice of the features, update of linear1
//     features    all slices of that gradient            -> through max-pool and ReLU, sums for batch norm
//     sums        those sums over the batch              -> gradient of y, of convolution 2, of convolution 1
//     gradients   all images' weight gradients           -> their sum, update of the convolutions
// A block arrives at a barrier when it has written what others wait for. What nobody waits for (linear1's update,
// linear2, the next batch's images and moments) is done between arriving and waiting. The first convolution's batch
// norm needs no pass over its output: its statistics follow from the mean and covariance of the nine pixels under the
// filter (conv_bn_relu_pool/one_channel/one_channel.cu has the formulas).
//
// A step runs through all of its instructions once, so they must fit into the instruction cache: loops are unrolled
// only where registers require it. At 256 images 9,900 instructions took 48.1 us, 8,400 took 44.7.
//
// The pair's phases stand here in full: in functions of their own their machine code differs.
template <class L>
__global__ void __launch_bounds__(THREADS, 1) mnist_step_kernel(const __grid_constant__ Arguments a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static constexpr bool pair = L::MEMBERS == 2, rounds = L::ROUNDS > 1;
    Thread<L> t = thread_of<L>(a);
    float linear1[4][4], weight2 = 0;
    start(t, linear1, weight2);

    for (int64_t step = 0; step < a.steps; step++) {
        const float conv_rate = a.rates[2 * step], linear_rate = a.rates[2 * step + 1];
        const bool more = step + 1 < a.steps;
        std::conditional_t<pair, Kept, KeptWhole> kept;

        // weights -> statistics
        if constexpr (rounds) {
            forward_rounds(t, step);
        } else {
            statistics1(t);
            uint32_t weights[8 * GROUPS1<L>][2];
            weights_of_forward1(t, weights);
            forward1(t, step, t.warp / WARPS1<L>, t.images * ROWS1<L>, WARPS / WARPS1<L>, weights);
            cp_async_wait_group<0>();
            if constexpr (!pair)
                fence_proxy_async();
            if (t.images)
                mbarrier_wait(shared_address(&t.small.mapped), step & 1);
            __syncthreads();
        }
        if constexpr (!pair && !rounds) {
            float first[2] = {0, 0}, second[2] = {0, 0};
            convolve2(t, t.images, first, second, nullptr, 0);
            sum_over_images(t, first, second, t.template workspace<float>(WS_STATISTICS));
        } else if constexpr (pair) {
            float first[8] = {}, second[8] = {};
            if (t.images && t.warp < CONV_WARPS) {
                float y[32], center[8];
                forward2(t, y);
#pragma unroll
                for (int c = 0; c < 8; c++)
                    center[c] = center2(t, c / 2 * 8 + 2 * t.quad + c % 2);
#pragma unroll
                for (int j = 0; j < 32; j++) {
                    const float d = is_pixel(t, j) ? y[j] - center[j / 4 % 4 * 2 + j % 2] : 0;
                    first[j / 4 % 4 * 2 + j % 2] += d;
                    second[j / 4 % 4 * 2 + j % 2] += d * d;
                }
                kept.pack(y);
            }
            sum_over_pixels(t, first, second, t.template workspace<float>(WS_STATISTICS));
        }
        t.arrive();
        if (more)
            look_up(t, step + 1);
        t.wait();

        // statistics -> pooled
        statistics2(t);
        if constexpr (pair) {
            if (t.images && t.warp < CONV_WARPS) {
                float y[32];
                kept.unpack(y);
                kept.largest = pool2(t, y, (__nv_bfloat16 *)(shared + L::AT_STAGE));
            }
            __syncthreads();
            if (t.images && t.thread < L::STAGE_BYTES / 16)
                ((uint4 *)(t.template workspace<char>(WS_POOLED) + (int64_t)t.owner * FEATURES * 2 +
                           t.member * L::STAGE_BYTES))[t.thread] = ((const uint4 *)(shared + L::AT_STAGE))[t.thread];
        } else if constexpr (rounds) {
            pool_rounds(t);
        } else {
            pool_whole(t, kept);
        }
        t.arrive();
        if constexpr (rounds) {
            if (has_split(t))
                start_split(t);
        } else {
            Images<L> images;
            Linear2 linear2;
            if (t.block < SLICES)
                start_linear1(t);
            if (more)
                images.load(t, step + 1);
            linear2.load(t);
            if (more)
                images.store(t, step + 1);
            linear2.store(t);
        }
        t.wait();

        // pooled -> partials
        if constexpr (rounds) {
            if (has_split(t))
                forward_split(t);
            t.arrive();
            Linear2 linear2;
            linear2.load(t);
            linear2.store(t);
        } else {
            if (t.block < SLICES)
                forward_linear1(t);
            t.arrive();
        }
        if (more && !rounds)
            gram(t, step + 1);
        t.wait();

        // partials -> hidden
        if constexpr (rounds) {
            head_of_warp(t, step);
        } else {
            float4 values[HEAD_PARTS];
            if (t.member < t.images)
                load_partials(t, t.owner + t.member * L::OWNERS, values);
            for (int i = t.member; i < t.images; i += L::MEMBERS) {
                if (i >= L::MEMBERS)
                    __syncthreads();
                const int image = t.owner + i * L::OWNERS;
                head(t, image, t.small.label[step % 2][i], image + L::MEMBERS * L::OWNERS, values);
            }
        }
        t.arrive();
        if (rounds && t.block < SLICES)
            start_backward_linear1(t);
        t.wait();

        // hidden -> features
        if (t.block < SLICES) {
            if constexpr (rounds)
                backward_linear1_rounds(t); // calls arrive()
            else
                backward_linear1(t, linear1, linear_rate); // calls arrive()
        } else {
            t.arrive();
            if (t.block < LINEAR2_BLOCKS + CLASSES)
                update_linear2(t, t.block - LINEAR2_BLOCKS, step, linear_rate);
            else if (t.block == BIAS1_BLOCK)
                update_bias1(t, linear_rate);
            else if (t.block == MOMENTS_BLOCK && more && !rounds)
                add_grams(t);
        }
        t.wait();

        // features -> sums
        if constexpr (rounds) {
            sums_rounds(t);
        } else if constexpr (!pair) {
            sums_whole(t, kept);
        } else {
            load_stage(t);
            float first[8] = {}, second[8] = {};
            if (t.images && t.warp < CONV_WARPS) {
                float y[32];
                kept.unpack(y);
                const uint32_t largest = kept.largest;
                const __nv_bfloat16 *stage = (const __nv_bfloat16 *)(shared + L::AT_STAGE);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float2 mean = *(const float2 *)(t.small.mean2 + 8 * n + 2 * t.quad);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float gradient = staged(t, stage, n, e);
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            const int at = 16 * m + 4 * n + e;
                            const float dz = largest >> at & 1 ? gradient : 0.0f;
                            first[2 * n + e % 2] += dz;
                            second[2 * n + e % 2] += dz * (y[at] - (e % 2 ? mean.y : mean.x));
                        }
                    }
                }
            }
            sum_over_pixels(t, first, second, t.template workspace<float>(WS_SUMS2));
        }
        t.arrive();
        if constexpr (rounds) {
            if (t.block < SLICES)
                update_linear1_rounds(t, step, linear1, linear_rate);
            fence_proxy_async(); // before convolution 2's weights are copied over it again
        }
        t.wait();

        // sums -> gradients
        if constexpr (rounds) {
            start_weights2(t);
            start_stage(t);
        }
        coefficients2(t, conv_rate);
        if constexpr (pair)
            backward_conv2(t, (int)(step % 2), kept);
        else if constexpr (rounds)
            backward_rounds(t, step, more);
        else
            backward_whole(t, (int)(step % 2), kept);
        t.arrive();
        t.wait();

        // gradients -> weights
        update_convolutions(t, weight2, t.block - CONV1_BLOCKS, conv_rate);
        if (rounds && t.block == 0 && more) { // which has no channel of the first convolution
            __syncthreads();
            add_grams(t);
        }
        t.arrive();
        t.wait();
    }
    finish(t, linear1, weight2);
#else
    (void)a; // never launched there
#endif
}

// A launcher's arguments.
struct StepCall {
    const Arguments *arguments; // NULL where only the sizes are asked about
    int64_t batch;
    cudaStream_t stream;
};

// What all layouts need: a multiprocessor for every block.
static Answer step_supports(const StepCall &call, const Device &device, int64_t most)
{
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability / 10 != 9)
        return NEEDS_90;
    if (device.multiprocessors < BLOCKS)
        return no("needs 128 multiprocessors");
    return call.batch >= 1 && call.batch <= most ? YES : no("the batch is empty or too large");
}

template <typename L>
static cuda_ops_status step(const StepCall &call, const Device &)
{
#ifdef CUDA_OPS_SM90A
    allow_shared_memory(mnist_step_kernel<L>, SHARED_BYTES<L>);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeCooperative; // all blocks at once, or none
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = BLOCKS / CLUSTERS;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = BLOCKS;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = SHARED_BYTES<L>;
    config.stream = call.stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaLaunchKernelEx(&config, mnist_step_kernel<L>, *call.arguments);
    return launch_status();
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT; // never chosen
#endif
}

static Answer pair_supports(const StepCall &call, const Device &device)
{
    return step_supports(call, device, Pair::OWNERS);
}
static Answer whole_supports(const StepCall &call, const Device &device)
{
    return step_supports(call, device, WHOLE_MOST);
}
static Answer rounds_supports(const StepCall &call, const Device &device)
{
    return step_supports(call, device, CUDA_OPS_MNIST_STEP_MOST);
}

static int64_t tiles_workspace(const StepCall &, const Device &)
{
    return WS_TILES;
}
static int64_t rounds_workspace(const StepCall &, const Device &)
{
    return WORKSPACE_BYTES;
}

static PathTable<StepCall, 3> table = {
    {"CUDA_OPS_MNIST_STEP_PATH"},
    {{"pair", "mnist_step/sm90.cu", "mnist_step_kernel", pair_supports, nullptr, tiles_workspace, step<Pair>},
     {"whole", "mnist_step/sm90.cu", "mnist_step_kernel", whole_supports, nullptr, tiles_workspace, step<Whole>},
     {"rounds", "mnist_step/sm90.cu", "mnist_step_kernel", rounds_supports, nullptr, rounds_workspace, step<Rounds>}}};

int cuda_ops_mnist_step_supported(int64_t batch)
{
    return rounds_supports({nullptr, batch, nullptr}, current_device());
}

int cuda_ops_mnist_step_paths_cuda(cuda_ops_path_report *reports, int room, int64_t batch,
                                   const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table, StepCall{nullptr, batch, nullptr}, device);
}

int64_t cuda_ops_mnist_step_workspace(int64_t batch)
{
    const StepCall call = {nullptr, batch, nullptr};
    const Device device = current_device();
    const int row = find_path(table, call, device);
    return row == 3 ? 0 : table.rows[row].workspace(call, device);
}

cuda_ops_status cuda_ops_mnist_step_cuda(float *losses, const cuda_ops_mnist_parameters *parameters, void *workspace,
                                         cuda_ops_index_error *error, const uint8_t *images, const int64_t *labels,
                                         int64_t count, const int64_t *indices, const float *rates, int64_t steps,
                                         int64_t batch, double mean, double std, double label_smoothing,
                                         cuda_ops_stream stream)
{
    if (!cuda_ops_mnist_step_supported(batch) || steps < 0 || steps > MOST_STEPS || (uintptr_t)images % 4 != 0 ||
        (uintptr_t)workspace % 256 != 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (steps == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    const Arguments arguments = {losses,
                                 *parameters,
                                 (char *)workspace,
                                 error,
                                 images,
                                 labels,
                                 indices,
                                 rates,
                                 count,
                                 steps,
                                 (int)batch,
                                 (float)(255 * mean),
                                 (float)(1 / (255 * std)),
                                 (float)label_smoothing};
    return run_path(table, StepCall{&arguments, batch, stream});
#else
    (void)losses, (void)parameters, (void)error, (void)labels, (void)count, (void)indices, (void)rates, (void)mean;
    (void)std, (void)label_smoothing, (void)stream;
    return CUDA_OPS_UNSUPPORTED_DTYPE;
#endif
}
