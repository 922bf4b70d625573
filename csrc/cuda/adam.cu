// adam: Adam's step, or AdamW's, over a list of parameters (see adam.h).
// One launch for the whole list, or for 440 parameters of it: addresses travel in the kernel's arguments, of which
// there may be 32 KB, in shorter ones where they are few; the parameters are cut into chunks, and a block finds the
// parameter of its chunk by bisection. Bound by memory: 4 streams read and 3 written, with amsgrad 5 and 4. Where steps
// are counted on the device, a kernel of one block goes ahead: it moves the counters and leaves their powers in the
// workspace, since one in double takes as long as a chunk.
#include "cuda_ops/adam.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/prefetch.cuh"
#include "common/tensor_list.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t CHUNK = 2048;
static constexpr int FEW_TENSORS = 56, MOST_TENSORS = 440; // of a launch

// What a parameter's step depends on by its number: 1 - beta1^step and 1 / sqrt(1 - beta2^step).
template <typename A>
struct AdamCorrections {
    A first, second;
};

template <typename T, typename S, int TENSORS>
struct AdamList {
    T *params[TENSORS];
    T *grads[TENSORS];
    S *exp_avgs[TENSORS];
    S *exp_avg_sqs[TENSORS];
    S *max_exp_avg_sqs[TENSORS];
    int64_t counts[TENSORS];
    AdamCorrections<accumulate_type<T>> corrections[TENSORS]; // unless steps are counted on the device
    int32_t first_chunk[TENSORS];                             // of all the list's chunks, this parameter's first
    bool aligned[TENSORS];                                    // its arrays take 16-byte loads
    int32_t tensors, chunks;
};

template <typename A>
struct AdamScalars {
    A lr, weight_decay, beta1, fresh1, beta2, fresh2, eps; // fresh = 1 - beta
    const void *device_lr;
    const float *grad_scale, *found_inf, *grad_norm;
    double max_grad_norm;
    const AdamCorrections<double> *corrections; // of steps that are counted on the device
    bool device_lr_is_double, amsgrad, decoupled, maximize;
};
static_assert(sizeof(AdamList<double, double, FEW_TENSORS>) + sizeof(AdamScalars<double>) <= 4096,
              "short arguments have 4 KB");
static_assert(sizeof(AdamList<double, double, MOST_TENSORS>) + sizeof(AdamScalars<double>) <= 32764,
              "kernels' arguments have less than 32 KB");

template <typename A>
__host__ __device__ static inline AdamCorrections<A> corrections_of(double beta1, double beta2, double step)
{
    return {(A)(1 - pow(beta1, step)), (A)(1 / sqrt(1 - pow(beta2, step)))};
}

// What a chunk's elements have in common.
template <typename A>
struct AdamStep {
    A size, decay, factor, scale, clip;
};

template <typename A>
__device__ __forceinline__ void adam_element(A &param, A &grad, A &exp_avg, A &exp_avg_sq, A &max_exp_avg_sq,
                                             const AdamScalars<A> &scalars, const AdamStep<A> &step)
{
    if (scalars.grad_scale)
        grad /= step.scale;
    A g = (scalars.maximize ? -grad : grad) * step.clip;
    if (scalars.weight_decay != A(0) && !scalars.decoupled)
        g += scalars.weight_decay * param;
    // In the form of torch.lerp, by which infinities differ: from the nearer end.
    exp_avg = scalars.fresh1 < A(0.5) ? exp_avg + scalars.fresh1 * (g - exp_avg) : g - (g - exp_avg) * scalars.beta1;
    exp_avg_sq = scalars.beta2 * exp_avg_sq + scalars.fresh2 * g * g;
    A largest = exp_avg_sq;
    if (scalars.amsgrad) {
        largest = largest > max_exp_avg_sq || largest != largest ? largest : max_exp_avg_sq;
        max_exp_avg_sq = largest;
    }
    param = param * step.decay - step.size * (exp_avg / (sqrt(largest) * step.factor + scalars.eps));
}

template <typename T, typename S, int TENSORS>
__global__ void __launch_bounds__(THREADS, 4)
    adam_kernel(const __grid_constant__ AdamList<T, S, TENSORS> list,
                const __grid_constant__ AdamScalars<accumulate_type<T>> scalars)
{
    typedef accumulate_type<T> A;
    constexpr int SIZE = vector16<T>::size;
    typedef aligned_vector<S, SIZE> States;
    release_successor();
    int32_t chunk = blockIdx.x;
    if (chunk < list.chunks) { // these were last used long ago, and nobody but this kernel writes them
        const int tensor = tensor_of(list, chunk);
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK, left = list.counts[tensor] - begin;
        const int64_t count = left < CHUNK ? left : CHUNK;
        prefetch_lines(list.params[tensor] + begin, count * (int64_t)sizeof(T));
        prefetch_lines(list.exp_avgs[tensor] + begin, count * (int64_t)sizeof(S));
        prefetch_lines(list.exp_avg_sqs[tensor] + begin, count * (int64_t)sizeof(S));
    }
    wait_for_predecessor();
    if (scalars.found_inf && *scalars.found_inf != 0.0f)
        return;
    AdamStep<A> step;
    A lr = scalars.lr;
    if (scalars.device_lr)
        lr = scalars.device_lr_is_double ? A(*(const double *)scalars.device_lr) : A(*(const float *)scalars.device_lr);
    step.decay = scalars.decoupled ? A(1) - lr * scalars.weight_decay : A(1);
    step.scale = scalars.grad_scale ? A(*scalars.grad_scale) : A(1);
    step.clip = A(1);
    if (scalars.grad_norm) {
        const double clip = scalars.max_grad_norm / ((double)*scalars.grad_norm + 1e-6);
        if (!(clip >= 1)) // NaN stays
            step.clip = A(clip);
    }

    for (; chunk < list.chunks; chunk += gridDim.x) {
        const int tensor = tensor_of(list, chunk);
        T *const param = list.params[tensor], *const grad = list.grads[tensor];
        S *const exp_avg = list.exp_avgs[tensor], *const exp_avg_sq = list.exp_avg_sqs[tensor];
        S *const max_exp_avg_sq = list.max_exp_avg_sqs[tensor];
        AdamCorrections<A> corrections = list.corrections[tensor];
        if (scalars.corrections)
            corrections = {A(scalars.corrections[tensor].first), A(scalars.corrections[tensor].second)};
        step.size = lr / corrections.first;
        step.factor = corrections.second;
        const int64_t begin = (chunk - list.first_chunk[tensor]) * CHUNK;
        const int64_t end = begin + CHUNK < list.counts[tensor] ? begin + CHUNK : list.counts[tensor];
        int64_t vectors_end = begin;
        if (list.aligned[tensor]) {
            vectors_end = begin + (end - begin) / SIZE * SIZE;
            for (int64_t i = begin + (int64_t)threadIdx.x * SIZE; i < vectors_end; i += THREADS * SIZE) {
                const vector16<T> p = *reinterpret_cast<const vector16<T> *>(param + i);
                const vector16<T> g = *reinterpret_cast<const vector16<T> *>(grad + i);
                const States m = *reinterpret_cast<const States *>(exp_avg + i);
                const States v = *reinterpret_cast<const States *>(exp_avg_sq + i);
                States largest = v;
                if (scalars.amsgrad)
                    largest = *reinterpret_cast<const States *>(max_exp_avg_sq + i);
                A params[SIZE], grads[SIZE], firsts[SIZE], seconds[SIZE], maxima[SIZE];
#pragma unroll
                for (int e = 0; e < SIZE; e++) {
                    params[e] = element_of(p, e), grads[e] = element_of(g, e);
                    firsts[e] = element_of(m, e), seconds[e] = element_of(v, e), maxima[e] = element_of(largest, e);
                    adam_element(params[e], grads[e], firsts[e], seconds[e], maxima[e], scalars, step);
                }
                *reinterpret_cast<vector16<T> *>(param + i) = vector_of<T>(params);
                *reinterpret_cast<States *>(exp_avg + i) = vector_of<S>(firsts);
                *reinterpret_cast<States *>(exp_avg_sq + i) = vector_of<S>(seconds);
                if (scalars.amsgrad)
                    *reinterpret_cast<States *>(max_exp_avg_sq + i) = vector_of<S>(maxima);
                if (scalars.grad_scale)
                    *reinterpret_cast<vector16<T> *>(grad + i) = vector_of<T>(grads);
            }
        }
        for (int64_t i = vectors_end + threadIdx.x; i < end; i += THREADS) {
            A p = load_as_accumulate(param[i]), g = load_as_accumulate(grad[i]), m = load_as_accumulate(exp_avg[i]);
            A v = load_as_accumulate(exp_avg_sq[i]);
            A largest = scalars.amsgrad ? load_as_accumulate(max_exp_avg_sq[i]) : A(0);
            adam_element(p, g, m, v, largest, scalars, step);
            param[i] = store_from_accumulate<T>(p);
            exp_avg[i] = store_from_accumulate<S>(m);
            exp_avg_sq[i] = store_from_accumulate<S>(v);
            if (scalars.amsgrad)
                max_exp_avg_sq[i] = store_from_accumulate<S>(largest);
            if (scalars.grad_scale)
                grad[i] = store_from_accumulate<T>(g);
        }
    }
}

// --- counters on the device -----------------------------------------------------------------------------------------

template <int TENSORS>
struct AdamCounters {
    void *steps[TENSORS];
    double beta1, beta2;
    const float *found_inf;
    AdamCorrections<double> *corrections;
    int32_t tensors;
    bool is_double;
};

// One thread a parameter.
template <int TENSORS>
__global__ void __launch_bounds__(TENSORS) adam_steps_kernel(const __grid_constant__ AdamCounters<TENSORS> counters)
{
    wait_for_predecessor();
    release_successor();
    const int i = threadIdx.x;
    if (i >= counters.tensors || (counters.found_inf && *counters.found_inf != 0.0f))
        return;
    double step;
    if (counters.is_double)
        step = *(double *)counters.steps[i] += 1;
    else
        step = *(float *)counters.steps[i] += 1;
    counters.corrections[i] = corrections_of<double>(counters.beta1, counters.beta2, step);
}

// --- launchers ------------------------------------------------------------------------------------------------------

template <typename T, typename S, int TENSORS>
static cuda_ops_status launch(const AdamList<T, S, TENSORS> &list, const AdamCounters<TENSORS> &counters,
                              const AdamScalars<accumulate_type<T>> &scalars, cudaStream_t stream)
{
    if (list.tensors == 0)
        return CUDA_OPS_SUCCESS;
    if (scalars.corrections) {
        launch_dependent(adam_steps_kernel<TENSORS>, dim3(1), dim3(TENSORS), 0, stream, counters);
        const cuda_ops_status status = launch_status();
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    if (list.chunks == 0) // parameters without elements, whose counters move all the same
        return CUDA_OPS_SUCCESS;
    launch_dependent(adam_kernel<T, S, TENSORS>, clamp_grid(list.chunks), THREADS, 0, stream, list, scalars);
    return launch_status();
}

template <int TENSORS, typename T, typename S>
static cuda_ops_status adam(const cuda_ops_adam_list &tensors, const cuda_ops_adam_device_scalars &device,
                            void *workspace, const cuda_ops_adam_options &options, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    AdamScalars<A> scalars;
    scalars.lr = (A)options.lr;
    scalars.weight_decay = (A)options.weight_decay;
    scalars.beta1 = (A)options.beta1;
    scalars.fresh1 = (A)(1 - options.beta1);
    scalars.beta2 = (A)options.beta2;
    scalars.fresh2 = (A)(1 - options.beta2);
    scalars.eps = (A)options.eps;
    scalars.device_lr = device.lr;
    scalars.device_lr_is_double = device.lr_dtype == CUDA_OPS_FLOAT64;
    scalars.grad_scale = device.grad_scale;
    scalars.found_inf = device.found_inf;
    scalars.grad_norm = device.grad_norm;
    scalars.max_grad_norm = device.max_grad_norm;
    scalars.corrections = nullptr;
    scalars.amsgrad = options.amsgrad;
    scalars.decoupled = options.decoupled;
    scalars.maximize = options.maximize;
    AdamCounters<TENSORS> counters = {};
    counters.beta1 = options.beta1;
    counters.beta2 = options.beta2;
    counters.found_inf = device.found_inf;
    counters.is_double = device.step_dtype == CUDA_OPS_FLOAT64;

    AdamList<T, S, TENSORS> list = {};
    int64_t launched = 0; // of the workspace's entries, those that earlier launches have
    const auto flush = [&] {
        if (tensors.device_steps)
            scalars.corrections = counters.corrections = (AdamCorrections<double> *)workspace + launched;
        counters.tensors = list.tensors;
        launched += list.tensors;
        const cuda_ops_status status = launch(list, counters, scalars, stream);
        list.tensors = list.chunks = 0;
        return status;
    };
    for (int64_t i = 0; i < tensors.tensors; i++) {
        const int64_t count = tensors.counts[i];
        if (count == 0 && !tensors.device_steps)
            continue;
        const int64_t chunks = ceil_div(count, CHUNK);
        // Chunks are counted in 32 bits: 2^42 elements a launch.
        if (chunks > INT32_MAX - MAX_GRID)
            return CUDA_OPS_INVALID_ARGUMENT;
        if (list.tensors == TENSORS || list.chunks > INT32_MAX - MAX_GRID - chunks) {
            const cuda_ops_status status = flush();
            if (status != CUDA_OPS_SUCCESS)
                return status;
        }
        const int at = list.tensors++;
        list.params[at] = (T *)tensors.params[i];
        list.grads[at] = (T *)tensors.grads[i];
        list.exp_avgs[at] = (S *)tensors.exp_avgs[i];
        list.exp_avg_sqs[at] = (S *)tensors.exp_avg_sqs[i];
        list.max_exp_avg_sqs[at] = options.amsgrad ? (S *)tensors.max_exp_avg_sqs[i] : nullptr;
        list.counts[at] = count;
        if (tensors.device_steps)
            counters.steps[at] = tensors.device_steps[i];
        else
            list.corrections[at] = corrections_of<A>(options.beta1, options.beta2, tensors.steps[i]);
        list.first_chunk[at] = list.chunks;
        // A missing one has address 0, which is aligned.
        list.aligned[at] = is_aligned_16(list.params[at]) && is_aligned_16(list.grads[at]) &&
                           is_aligned_16(list.exp_avgs[at]) && is_aligned_16(list.exp_avg_sqs[at]) &&
                           is_aligned_16(list.max_exp_avg_sqs[at]);
        list.chunks += (int32_t)chunks;
    }
    return flush();
}

template <typename T, typename S>
static cuda_ops_status adam_of(const cuda_ops_adam_list &tensors, const cuda_ops_adam_device_scalars &device,
                               void *workspace, const cuda_ops_adam_options &options, cudaStream_t stream)
{
    return tensors.tensors <= FEW_TENSORS ? adam<FEW_TENSORS, T, S>(tensors, device, workspace, options, stream)
                                          : adam<MOST_TENSORS, T, S>(tensors, device, workspace, options, stream);
}

extern "C" size_t cuda_ops_adam_workspace_cuda(int64_t tensors, int steps_on_device)
{
    return steps_on_device ? (size_t)tensors * sizeof(AdamCorrections<double>) : 0;
}

extern "C" cuda_ops_status cuda_ops_adam_cuda(const cuda_ops_adam_list *list,
                                              const cuda_ops_adam_device_scalars *scalars, void *workspace,
                                              const cuda_ops_adam_options *options, cuda_ops_dtype dtype,
                                              cuda_ops_dtype state_dtype, cuda_ops_stream stream)
{
    const auto is_number = [](cuda_ops_dtype type) { return type == CUDA_OPS_FLOAT32 || type == CUDA_OPS_FLOAT64; };
    if ((scalars->lr && !is_number(scalars->lr_dtype)) || (list->device_steps && !is_number(scalars->step_dtype)) ||
        (list->steps == nullptr) == (list->device_steps == nullptr))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (state_dtype != dtype) {
        if (state_dtype == CUDA_OPS_FLOAT32 && dtype == CUDA_OPS_FLOAT16)
            return adam_of<__half, float>(*list, *scalars, workspace, *options, stream);
        if (state_dtype == CUDA_OPS_FLOAT32 && dtype == CUDA_OPS_BFLOAT16)
            return adam_of<__nv_bfloat16, float>(*list, *scalars, workspace, *options, stream);
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    }
    CUDA_OPS_DISPATCH(dtype, T, return adam_of<T, T>(*list, *scalars, workspace, *options, stream));
    return CUDA_OPS_SUCCESS;
}
