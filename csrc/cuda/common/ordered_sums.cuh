// Sums of values that go to places of their own, the same whatever order they arrive in: integers are added. Each place
// has the exponent of the largest of its values; relative to that the values are rounded to integers of up to 62 bits
// less those of `count`, 31 at the least, which atomics then add up. So a sum of float32 or halves is nearer to the exact
// one than one that is rounded at each step; of float64 a second integer has the bits below those of the first. NaN and
// infinities are only noted, and make the sum what they would make any.
//
// Source says what is added, and what becomes of the sums:
//     WIDE                      whether the values are float64
//     row(i)                    what memory says of where value i goes
//     place(i, row)             then where that is, or -1
//     value(i)                  value i as a double
//     finish(place, sum)        called once for each place that has been added a value other than 0
//
// Four passes, of which the first and the last go over the places, or over the values where these are fewer. Bound by
// random accesses: 16 bytes of a place for a value, in three passes.
//
// And the same sums by atomics on floats, whose last digits depend on the order in which values come: one pass, a third of
// the time.
#ifndef CUDA_OPS_COMMON_ORDERED_SUMS_CUH
#define CUDA_OPS_COMMON_ORDERED_SUMS_CUH

#include <math_constants.h>

#include "common/common.cuh"

static constexpr int ORDERED_SUMS_THREADS = 256;
static constexpr int NO_EXPONENT = 0, FIRST_EXPONENT = 1100, NOT_FINITE = 4000;
enum NotFinite { IS_NAN = 1, IS_INFINITY = 2, IS_MINUS_INFINITY = 4 };

// Sums of a place: one integer, and of float64 a second one `places` on.
struct OrderedSums {
    int *exponents; // of a place's largest value, above FIRST_EXPONENT; NO_EXPONENT of zeros alone
    unsigned long long *sums;
    int64_t places, count;
    int bits; // of a value's integer
    bool few; // values, so that the places are not gone over
};

static inline int64_t ordered_sums_bytes(int64_t places, bool wide)
{
    return ceil_div(4 * places, 16) * 16 + (wide ? 16 : 8) * places;
}

// Whether x is finite; else what it is.
__device__ __forceinline__ bool is_finite(double x)
{
    return x - x == 0;
}

__device__ __forceinline__ unsigned int not_finite(double x)
{
    return x != x ? IS_NAN : x > 0 ? IS_INFINITY : IS_MINUS_INFINITY;
}

// |x| < 2^(result - FIRST_EXPONENT)
__device__ __forceinline__ int exponent_of(double x)
{
    return !is_finite(x) ? NOT_FINITE : x == 0 ? NO_EXPONENT : ilogb(x) + 1 + FIRST_EXPONENT;
}

// Of the values, or of the places: calls function(place) for each that is there.
template <typename Source, typename F>
__device__ __forceinline__ void for_places(const Source &source, const OrderedSums &to, F function)
{
    const int64_t count = to.few ? to.count : to.places;
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count()) {
        const int64_t place = to.few ? source.place(i, source.row(i)) : i;
        if (place >= 0)
            function(place);
    }
}

template <typename Source>
__global__ void __launch_bounds__(ORDERED_SUMS_THREADS) clear_sums_kernel(const Source source, const OrderedSums to)
{
    wait_for_predecessor();
    release_successor();
    for_places(source, to, [&](int64_t place) {
        to.exponents[place] = NO_EXPONENT;
        to.sums[place] = 0;
        if (Source::WIDE)
            to.sums[to.places + place] = 0;
    });
}

template <typename Source>
__global__ void __launch_bounds__(ORDERED_SUMS_THREADS) find_exponents_kernel(const Source source, const OrderedSums to)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < to.count; i += global_thread_count()) {
        const int64_t place = source.place(i, source.row(i));
        if (place < 0)
            continue;
        const int exponent = exponent_of(source.value(i));
        if (exponent > __ldcg(&to.exponents[place])) // it only grows, so that an old value costs no more than an atomic
            atomicMax(&to.exponents[place], exponent);
    }
}

template <typename Source>
__global__ void __launch_bounds__(ORDERED_SUMS_THREADS) add_integers_kernel(const Source source, const OrderedSums to)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < to.count; i += global_thread_count()) {
        const int64_t place = source.place(i, source.row(i));
        if (place < 0)
            continue;
        const double value = source.value(i);
        const int exponent = __ldcg(&to.exponents[place]);
        if (exponent == NOT_FINITE) {
            if (!is_finite(value))
                atomicOr(&to.sums[place], (unsigned long long)not_finite(value));
            continue;
        }
        if (value == 0)
            continue;
        const double scaled = ldexp(value, to.bits - (exponent - FIRST_EXPONENT)), rounded = rint(scaled);
        if (rounded != 0)
            atomicAdd(&to.sums[place], (unsigned long long)(long long)rounded);
        if (Source::WIDE && scaled != rounded)
            atomicAdd(&to.sums[to.places + place],
                      (unsigned long long)__double2ll_rn(ldexp(scaled - rounded, to.bits)));
    }
}

template <typename Source>
__global__ void __launch_bounds__(ORDERED_SUMS_THREADS) finish_sums_kernel(const Source source, const OrderedSums to)
{
    wait_for_predecessor();
    release_successor();
    for_places(source, to, [&](int64_t place) {
        // Of several values of a place the first one to come takes it.
        const int exponent = to.few ? atomicExch(&to.exponents[place], NO_EXPONENT) : to.exponents[place];
        if (exponent == NO_EXPONENT)
            return;
        const unsigned long long sum = to.sums[place];
        double result;
        if (exponent == NOT_FINITE) {
            const bool is_nan = sum & IS_NAN || (sum & IS_INFINITY && sum & IS_MINUS_INFINITY);
            result = is_nan ? CUDART_NAN : sum & IS_INFINITY ? CUDART_INF : -CUDART_INF;
        } else {
            const int scale = exponent - FIRST_EXPONENT - to.bits;
            double value = (double)(long long)sum;
            if (Source::WIDE)
                value += ldexp((double)(long long)to.sums[to.places + place], -to.bits);
            result = ldexp(value, scale);
        }
        source.finish(place, result);
    });
}

// workspace: ordered_sums_bytes, aligned to 16. count and places are not 0.
template <typename Source>
static cuda_ops_status launch_ordered_sums(void *workspace, const Source &source, int64_t count, int64_t places,
                                           cudaStream_t stream)
{
    OrderedSums to = {
        (int *)workspace,  (unsigned long long *)((char *)workspace + ceil_div(4 * places, 16) * 16), places, count, 62,
        4 * count < places};
    while ((int64_t)1 << (62 - to.bits) < count)
        to.bits--;
    const dim3 block(ORDERED_SUMS_THREADS), by_value(clamp_grid(ceil_div(count, ORDERED_SUMS_THREADS)));
    const dim3 by_place(to.few ? by_value.x : clamp_grid(ceil_div(places, ORDERED_SUMS_THREADS)));
    launch_dependent(clear_sums_kernel<Source>, by_place, block, 0, stream, source, to);
    launch_dependent(find_exponents_kernel<Source>, by_value, block, 0, stream, source, to);
    launch_dependent(add_integers_kernel<Source>, by_value, block, 0, stream, source, to);
    launch_dependent(finish_sums_kernel<Source>, by_place, block, 0, stream, source, to);
    return launch_status();
}

// ---- by atomics ----------------------------------------------------------------------------------------------------

static constexpr int ATOMICS_IN_FLIGHT = 4; // values of a thread that are loaded together

// sums[place - first_place] += factor * value, of the `places` from first_place on; values of other places are left out.
template <typename Source, typename A>
__global__ void __launch_bounds__(ORDERED_SUMS_THREADS)
    add_atomically_kernel(const Source source, A *sums, A factor, int64_t count, int64_t first_place, int64_t places)
{
    wait_for_predecessor();
    release_successor();
    const int64_t step = (int64_t)gridDim.x * ORDERED_SUMS_THREADS * ATOMICS_IN_FLIGHT;
    for (int64_t first = (int64_t)blockIdx.x * ORDERED_SUMS_THREADS * ATOMICS_IN_FLIGHT + threadIdx.x; first < count;
         first += step) {
        int64_t row[ATOMICS_IN_FLIGHT];
        A value[ATOMICS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < ATOMICS_IN_FLIGHT; k++) {
            const int64_t i = first + k * ORDERED_SUMS_THREADS;
            if (i < count) {
                row[k] = source.row(i);
                value[k] = (A)source.value(i);
            }
        }
#pragma unroll
        for (int k = 0; k < ATOMICS_IN_FLIGHT; k++) {
            const int64_t i = first + k * ORDERED_SUMS_THREADS, place = i < count ? source.place(i, row[k]) : -1;
            if (place >= first_place && place - first_place < places)
                atomicAdd(&sums[place - first_place], factor * value[k]);
        }
    }
}

template <typename Source, typename A>
static cuda_ops_status launch_atomic_sums(A *sums, A factor, const Source &source, int64_t count, int64_t first_place,
                                          int64_t places, cudaStream_t stream)
{
    launch_dependent(add_atomically_kernel<Source, A>,
                     dim3(clamp_grid(ceil_div(count, ORDERED_SUMS_THREADS * ATOMICS_IN_FLIGHT))),
                     dim3(ORDERED_SUMS_THREADS), 0, stream, source, sums, factor, count, first_place, places);
    return launch_status();
}

#endif
