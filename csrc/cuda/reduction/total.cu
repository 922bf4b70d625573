// sum, mean, prod and norms of a finite p: a total of each element's f(x), or their product. One family, whose f is
// looked at once for each four vectors, and so costs no bandwidth.
#include "reduction/kernels.cuh"

enum class Map { IDENTITY, ABSOLUTE, SQUARE, NONZERO, PRODUCT };
enum class Finish { NONE, DIVIDE, ROOT, POWER };

// POWERS: of |x|^p, in kernels of their own, since pow takes registers of all.
template <bool POWERS>
struct Total {
    template <typename A>
    struct State {
        A value;
    };
    static constexpr bool USES_ORIGIN = false;
    static constexpr int VECTORS = POWERS ? 1 : 4;
    Map map;
    Finish finish;
    double p, count;

    template <typename A>
    __device__ __forceinline__ State<A> none() const
    {
        return {map == Map::PRODUCT ? A(1) : A(0)};
    }

    // In four chains, which do not wait for each other.
    template <typename A, int N, typename Of>
    static __device__ __forceinline__ A sum(const A (&v)[N], Of of)
    {
        constexpr int CHAINS = N < 4 ? N : 4;
        A chain[CHAINS];
#pragma unroll
        for (int j = 0; j < N; j++)
            chain[j % CHAINS] = j < CHAINS ? of(v[j]) : chain[j % CHAINS] + of(v[j]);
        A total = chain[0];
#pragma unroll
        for (int j = 1; j < CHAINS; j++)
            total += chain[j];
        return total;
    }

    template <int SIZE, typename A, int N>
    __device__ __forceinline__ void add(State<A> &state, const A (&v)[N], int64_t, int64_t) const
    {
        if constexpr (POWERS) {
#pragma unroll
            for (int j = 0; j < N; j++)
                state.value += pow(fabs(v[j]), (A)p);
            return;
        }
        switch (map) {
        case Map::IDENTITY:
            state.value += sum(v, [](A x) { return x; });
            break;
        case Map::ABSOLUTE:
            state.value += sum(v, [](A x) { return fabs(x); });
            break;
        case Map::SQUARE:
            state.value += sum(v, [](A x) { return x * x; });
            break;
        case Map::NONZERO:
            state.value += sum(v, [](A x) { return x != A(0) ? A(1) : A(0); });
            break;
        case Map::PRODUCT:
#pragma unroll
            for (int j = 0; j < N; j++)
                state.value *= v[j];
        }
    }

    template <typename A>
    __device__ __forceinline__ State<A> merge(const State<A> &a, const State<A> &b) const
    {
        return {map == Map::PRODUCT ? a.value * b.value : a.value + b.value};
    }

    template <typename A>
    __device__ __forceinline__ State<double> from_origin(const State<A> &state, double) const
    {
        return {(double)state.value};
    }

    __device__ __forceinline__ void store(const State<double> &state, const ReductionOutput &output, int64_t at) const
    {
        double value = state.value;
        if (finish == Finish::DIVIDE)
            value /= count;
        else if (finish == Finish::ROOT)
            value = sqrt(value);
        else if (finish == Finish::POWER)
            value = pow(value, 1 / p);
        output.store(at, value, 0);
    }
};

cuda_ops_status reduction_total(const ReductionCall &call)
{
    const double p = call.parameter, count = (double)(call.sizes.batch * call.sizes.cols);
    Map map = Map::IDENTITY;
    Finish finish = Finish::NONE;
    if (call.kind == CUDA_OPS_MEAN) {
        finish = Finish::DIVIDE;
    } else if (call.kind == CUDA_OPS_PROD) {
        map = Map::PRODUCT;
    } else if (call.kind == CUDA_OPS_NORM) {
        if (p != 0 && p != 1 && p != 2)
            return launch_reduction(Total<true>{map, Finish::POWER, p, count}, call, false);
        map = p == 0 ? Map::NONZERO : p == 1 ? Map::ABSOLUTE : Map::SQUARE;
        finish = p == 2 ? Finish::ROOT : Finish::NONE;
    }
    return launch_reduction(Total<false>{map, finish, p, count}, call, false);
}
