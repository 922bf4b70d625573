// amax, amin, argmax, argmin and norms of an infinite p: the largest f(x) = x, -x, |x| or -|x|, and where it first is.
#include <math_constants.h>

#include "reduction/kernels.cuh"

struct Extreme {
    template <typename A>
    struct State {
        A value;
        int64_t index;
    };
    static constexpr bool USES_ORIGIN = false;
    static constexpr int VECTORS = 1;
    static constexpr int64_t NOWHERE = INT64_MAX;
    bool smallest, absolute;

    // Nothing is above -inf where nothing was taken: then all are -inf, and the first one is the largest.
    template <typename A>
    __device__ __forceinline__ State<A> none() const
    {
        return {-A(CUDART_INF), NOWHERE};
    }

    // Elements come in their order, so that of equal ones, and of NaN, the first one stays.
    template <int SIZE, typename A, int N>
    __device__ __forceinline__ void add(State<A> &state, const A (&v)[N], int64_t at, int64_t stride) const
    {
#pragma unroll
        for (int j = 0; j < N; j++) {
            A x = absolute ? fabs(v[j]) : v[j];
            x = smallest ? -x : x;
            if (!(x <= state.value) && state.value == state.value) {
                state.value = x;
                state.index = at + j / SIZE * stride + j % SIZE;
            }
        }
    }

    template <typename A>
    __device__ __forceinline__ State<A> merge(const State<A> &a, const State<A> &b) const
    {
        const bool nan_a = a.value != a.value, nan_b = b.value != b.value;
        const bool equal = a.value == b.value || (nan_a && nan_b);
        const bool second = equal ? b.index < a.index : nan_b || (!nan_a && b.value > a.value);
        return second ? b : a;
    }

    template <typename A>
    __device__ __forceinline__ State<double> from_origin(const State<A> &state, double) const
    {
        return {(double)state.value, state.index};
    }

    __device__ __forceinline__ void store(const State<double> &state, const ReductionOutput &output, int64_t at) const
    {
        output.store(at, smallest ? -state.value : state.value, state.index == NOWHERE ? 0 : state.index);
    }
};

cuda_ops_status reduction_extreme(const ReductionCall &call)
{
    const bool norm = call.kind == CUDA_OPS_NORM;
    const Extreme extreme = {call.kind == CUDA_OPS_AMIN || call.kind == CUDA_OPS_ARGMIN || (norm && call.parameter < 0),
                             norm};
    return launch_reduction(extreme, call, call.kind == CUDA_OPS_ARGMAX || call.kind == CUDA_OPS_ARGMIN);
}
