// var and std: count, mean and sum of squared differences from it, of up to 32 elements at a time in registers, merged by
// Chan's formula: one division for each of these times. Elements are taken relative to one of their row, so that a mean
// far larger than the deviation loses no digits.
#include "common/moments.cuh"
#include "reduction/kernels.cuh"

struct Moments {
    template <typename A>
    using State = moments<A>;
    static constexpr bool USES_ORIGIN = true;
    static constexpr int VECTORS = 4;
    double correction;
    bool root;

    template <typename A>
    __device__ __forceinline__ State<A> none() const
    {
        return {A(0), A(0), A(0)};
    }

    template <int SIZE, typename A, int N>
    __device__ __forceinline__ void add(State<A> &state, const A (&v)[N], int64_t, int64_t) const
    {
        A sum = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += v[j];
        const A mean = sum * (A(1) / A(N));
        A squares = 0;
#pragma unroll
        for (int j = 0; j < N; j++)
            squares += (v[j] - mean) * (v[j] - mean);
        const State<A> more = {A(N), mean, squares};
        state = ::merge(state, more);
    }

    template <typename A>
    __device__ __forceinline__ State<A> merge(const State<A> &a, const State<A> &b) const
    {
        return ::merge(a, b);
    }

    template <typename A>
    __device__ __forceinline__ State<double> from_origin(const State<A> &state, double origin) const
    {
        return {(double)state.count, origin + (double)state.mean, (double)state.squares};
    }

    __device__ __forceinline__ void store(const State<double> &state, const ReductionOutput &output, int64_t at) const
    {
        const double rest = state.count - correction, variance = state.squares / (rest > 0 ? rest : 0.0);
        output.store(at, root ? sqrt(variance) : variance, 0);
    }
};

cuda_ops_status reduction_moments(const ReductionCall &call)
{
    const Moments moments = {call.parameter, call.kind == CUDA_OPS_STD};
    return launch_reduction(moments, call, false);
}
