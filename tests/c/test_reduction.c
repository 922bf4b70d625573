#include "cuda_ops/halves_cpu.h"
#include "cuda_ops/reduction.h"

#include "check.h"

static double expected_value(const void *input, cuda_ops_reduction_sizes s, int64_t o, int64_t i,
                             cuda_ops_reduction_kind kind, double parameter, cuda_ops_dtype dtype)
{
    const double n = (double)(s.batch * s.cols);
    double sum = 0, product = 1, power = 0, largest = (double)-INFINITY, smallest = (double)INFINITY, squares = 0;
    double most = 0, least = (double)INFINITY;
    int64_t where[2] = {0, 0};
    for (int pass = 0; pass < 2; pass++)
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t c = 0; c < s.cols; c++) {
                const double x = get(input, ((b * s.outer + o) * s.cols + c) * s.inner + i, dtype);
                if (pass == 1) {
                    squares += (x - sum / n) * (x - sum / n);
                    continue;
                }
                sum += x;
                product *= x;
                power += parameter == 0 ? x != 0 : pow(fabs(x), parameter);
                most = fmax(most, fabs(x));
                least = fmin(least, fabs(x));
                if (x > largest) {
                    largest = x;
                    where[0] = c;
                }
                if (x < smallest) {
                    smallest = x;
                    where[1] = c;
                }
            }
    const double variance = squares / fmax(n - parameter, 0);
    switch (kind) {
    case CUDA_OPS_SUM:
        return sum;
    case CUDA_OPS_MEAN:
        return sum / n;
    case CUDA_OPS_PROD:
        return product;
    case CUDA_OPS_NORM:
        return isinf(parameter) ? (parameter > 0 ? most : least) : parameter == 0 ? power : pow(power, 1 / parameter);
    case CUDA_OPS_AMAX:
        return largest;
    case CUDA_OPS_AMIN:
        return smallest;
    case CUDA_OPS_ARGMAX:
        return (double)where[0];
    case CUDA_OPS_ARGMIN:
        return (double)where[1];
    case CUDA_OPS_VAR:
        return variance;
    default:
        return sqrt(variance);
    }
}

/* `offset` moves all values: where it is large, a variance as E[x^2] - E[x]^2 would be worthless. */
static void check_reduction(cuda_ops_reduction_sizes s, cuda_ops_reduction_kind kind, double parameter, double offset,
                            cuda_ops_dtype dtype)
{
    const int64_t count = s.batch * s.outer * s.cols * s.inner, results = s.outer * s.inner;
    const bool index = kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
    void *input = guarded_numbers(count, 1, dtype);
    /* argmax's are int64, as many bytes as a double */
    const cuda_ops_dtype to = index ? CUDA_OPS_FLOAT64 : dtype;
    void *output = guarded_new(results, to);
    for (int64_t i = 0; i < count; i++)
        set(input, i, (kind == CUDA_OPS_PROD ? 0.05 : 1) * get(input, i, dtype) + offset, dtype);
    const int64_t bytes = cuda_ops_reduction_workspace_cpu(s), units = cuda_ops_reduction_units_cpu(s);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    memset(workspace, 0xff, (size_t)bytes);
    IN_TWO_PIECES(units, begin, end,
                  cuda_ops_reduction_accumulate_cpu(workspace, input, s, kind, parameter, begin, end, dtype));
    IN_TWO_PIECES(results, begin, end,
                  cuda_ops_reduction_finish_cpu(output, workspace, s, kind, parameter, begin, end, dtype));
    const double n = (double)(s.batch * s.cols);
    /* The reference adds one after the other, and its own rounding grows with their number. */
    double tolerance = rounding(dtype) * (1 + sqrt(n));
    if (offset > 0) /* of the numbers themselves, which are no better than offset's rounding */
        tolerance *= dtype == CUDA_OPS_FLOAT64 ? 1000 : 1;
    for (int64_t at = 0; at < results; at++) {
        const double e = expected_value(input, s, at / s.inner, at % s.inner, kind, parameter, dtype);
        if (index)
            CHECK(((int64_t *)output)[at] == (int64_t)e, "index %lld, expected %g", (long long)((int64_t *)output)[at],
                  e);
        else
            CHECK_NEAR(output, at, e, tolerance, dtype);
    }
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);
    guarded_free(input, count, dtype);
    guarded_free(output, results, to);
}

/* Of one output: what its elements get of a gradient of 1. */
static double expected_slope(const void *input, cuda_ops_reduction_sizes s, int64_t o, int64_t i, int64_t at,
                             double output, cuda_ops_reduction_kind kind, double parameter, cuda_ops_dtype dtype)
{
    const double x = get(input, at, dtype), n = (double)(s.batch * s.cols);
    double sum = 0, others = 1, equal = 0;
    for (int64_t b = 0; b < s.batch; b++)
        for (int64_t c = 0; c < s.cols; c++) {
            const int64_t place = ((b * s.outer + o) * s.cols + c) * s.inner + i;
            sum += get(input, place, dtype);
            others *= place == at ? 1 : get(input, place, dtype);
            equal += get(input, place, dtype) == output;
        }
    switch (kind) {
    case CUDA_OPS_PROD:
        return others;
    case CUDA_OPS_NORM:
        return output == 0 ? 0 : x / output;
    case CUDA_OPS_VAR:
        return 2 * (x - sum / n) / (n - parameter);
    case CUDA_OPS_STD:
        return output == 0 ? 0 : (x - sum / n) / (n - parameter) / output;
    default:
        return x == output ? 1 / equal : 0;
    }
}

/* zeros: of prod, how many elements of the first row are 0. */
static void check_backward(cuda_ops_reduction_sizes s, cuda_ops_reduction_kind kind, double parameter, int zeros,
                           cuda_ops_dtype dtype)
{
    const int64_t count = s.batch * s.outer * s.cols * s.inner, outputs = s.outer * s.inner;
    void *input = guarded_numbers(count, 1, dtype), *grad_output = guarded_numbers(outputs, 2, dtype);
    void *output = guarded_new(outputs, dtype), *mean = guarded_new(outputs, dtype);
    void *grad_input = guarded_new(count, dtype);
    double *factors = guarded_new(3 * outputs, CUDA_OPS_FLOAT64);
    for (int64_t i = 0; i < count && kind >= CUDA_OPS_AMAX; i++) /* of which some are equal */
        set(input, i, floor(4 * get(input, i, dtype)), dtype);
    for (int i = 0; i < zeros; i++)
        set(input, i, 0, dtype);
    for (int64_t at = 0; at < outputs; at++) {
        const int64_t o = at / s.inner, i = at % s.inner;
        set(output, at, expected_value(input, s, o, i, kind, parameter, dtype), dtype);
        set(mean, at, expected_value(input, s, o, i, CUDA_OPS_MEAN, 0, dtype), dtype);
    }
    IN_TWO_PIECES(outputs, begin, end,
                  cuda_ops_reduction_backward_factors_cpu(factors, grad_output, output, mean, input, s, kind, parameter,
                                                          begin, end, dtype));
    IN_TWO_PIECES(count, begin, end,
                  cuda_ops_reduction_backward_cpu(grad_input, input, factors, s, kind, begin, end, dtype));
    for (int64_t at = 0; at < count; at++) {
        const int64_t i = at % s.inner, o = at / s.inner / s.cols % s.outer;
        const double slope =
            expected_slope(input, s, o, i, at, get(output, o * s.inner + i, dtype), kind, parameter, dtype);
        CHECK_NEAR(grad_input, at, slope * get(grad_output, o * s.inner + i, dtype),
                   rounding(dtype) * (1 + sqrt((double)(s.batch * s.cols))), dtype);
    }
    guarded_free(input, count, dtype);
    guarded_free(grad_output, outputs, dtype);
    guarded_free(output, outputs, dtype);
    guarded_free(mean, outputs, dtype);
    guarded_free(grad_input, count, dtype);
    guarded_free(factors, 3 * outputs, CUDA_OPS_FLOAT64);
}

static void check_all_backward(cuda_ops_dtype dtype)
{
    const cuda_ops_reduction_sizes all[] = {
        {1, 1, 1, 1}, {1, 3, 100, 1}, {1, 1, 3000, 1}, {3, 2, 7, 19}, {1, 1, 5, 300}};
    const cuda_ops_reduction_sizes rows = {1, 4, 9, 1};
    for (size_t a = 0; a < sizeof(all) / sizeof(all[0]); a++) {
        check_backward(all[a], CUDA_OPS_NORM, 2, 0, dtype);
        if (all[a].batch * all[a].cols > 1) {
            check_backward(all[a], CUDA_OPS_VAR, 1, 0, dtype);
            check_backward(all[a], CUDA_OPS_STD, 0, 0, dtype);
        }
        if (all[a].inner > 1)
            continue;
        check_backward(all[a], CUDA_OPS_AMAX, 0, 0, dtype);
        check_backward(all[a], CUDA_OPS_AMIN, 0, 0, dtype);
    }
    for (int zeros = 0; zeros <= 3; zeros++)
        check_backward(rows, CUDA_OPS_PROD, 0, zeros, dtype);
    CHECK(!cuda_ops_reduction_has_backward_cpu(all[3], CUDA_OPS_AMAX, 0), "no rows");
    CHECK(!cuda_ops_reduction_has_backward_cpu(rows, CUDA_OPS_NORM, 3), "no square root");
    CHECK_STATUS(
        cuda_ops_reduction_backward_factors_cpu(NULL, NULL, NULL, NULL, NULL, rows, CUDA_OPS_SUM, 0, 0, 0, dtype),
        CUDA_OPS_INVALID_ARGUMENT);
}

/* NaN, infinities, equal elements, and no elements. */
static void check_corners(cuda_ops_dtype dtype)
{
    enum { COLS = 70000 }; /* three parts of a row */
    void *x = guarded_new(COLS, dtype), *y = guarded_new(1, dtype);
    int64_t index;
    const cuda_ops_reduction_sizes row = {1, 1, COLS, 1}, empty = {1, 1, 0, 1};
    const int64_t bytes = cuda_ops_reduction_workspace_cpu(row), units = cuda_ops_reduction_units_cpu(row);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    for (int round = 0; round < 4; round++) {
        for (int64_t c = 0; c < COLS; c++)
            set(x, c, round == 0 ? (double)-INFINITY : 1, dtype);
        if (round >= 2) { /* two parts have one, and the first counts */
            set(x, 40000, round == 2 ? 2 : (double)NAN, dtype);
            set(x, 69999, round == 2 ? 2 : (double)NAN, dtype);
            set(x, 69998, 1.5, dtype);
        }
        CHECK_OK(cuda_ops_reduction_accumulate_cpu(workspace, x, row, CUDA_OPS_ARGMAX, 0, 0, units, dtype));
        CHECK_OK(cuda_ops_reduction_finish_cpu(&index, workspace, row, CUDA_OPS_ARGMAX, 0, 0, 1, dtype));
        CHECK(index == (round < 2 ? 0 : 40000), "round %d: the largest is at %lld", round, (long long)index);
        CHECK_OK(cuda_ops_reduction_accumulate_cpu(workspace, x, row, CUDA_OPS_AMIN, 0, 0, units, dtype));
        CHECK_OK(cuda_ops_reduction_finish_cpu(y, workspace, row, CUDA_OPS_AMIN, 0, 0, 1, dtype));
        const double least = get(y, 0, dtype);
        CHECK(round == 3 ? isnan(least) : least == (round == 0 ? (double)-INFINITY : 1), "round %d: %g", round, least);
    }
    CHECK(cuda_ops_reduction_units_cpu(empty) == 0, "units of no elements");
    CHECK_OK(cuda_ops_reduction_finish_cpu(y, NULL, empty, CUDA_OPS_SUM, 0, 0, 1, dtype));
    CHECK(get(y, 0, dtype) == 0, "the sum of nothing is %g", get(y, 0, dtype));
    CHECK_OK(cuda_ops_reduction_finish_cpu(y, NULL, empty, CUDA_OPS_PROD, 0, 0, 1, dtype));
    CHECK(get(y, 0, dtype) == 1, "the product of nothing is %g", get(y, 0, dtype));
    CHECK_OK(cuda_ops_reduction_finish_cpu(y, NULL, empty, CUDA_OPS_VAR, 1, 0, 1, dtype));
    CHECK(isnan(get(y, 0, dtype)), "the variance of nothing is %g", get(y, 0, dtype));
    CHECK_STATUS(cuda_ops_reduction_finish_cpu(y, NULL, empty, CUDA_OPS_AMAX, 0, 0, 1, dtype),
                 CUDA_OPS_INVALID_ARGUMENT);
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);
    guarded_free(x, COLS, dtype);
    guarded_free(y, 1, dtype);
}

/* Halves give what their values give as floats: of rows the same bits, but of columns, and of rows of bfloat16, sums that
 * are cut in other places. */
static void check_halves(cuda_ops_reduction_sizes s, cuda_ops_reduction_kind kind, double parameter)
{
    enum { MOST = 40000, MOST_RESULTS = 700 };
    static uint16_t x[MOST];
    static float wide[MOST], y[MOST_RESULTS], expected[MOST_RESULTS];
    static int64_t at[MOST_RESULTS], expected_at[MOST_RESULTS];
    const bool is_index = kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN;
    const int64_t count = s.batch * s.outer * s.cols * s.inner, results = s.outer * s.inner;
    const int64_t bytes = cuda_ops_reduction_workspace_cpu(s), units = cuda_ops_reduction_units_cpu(s);
    void *workspace = guarded_bytes((bytes + 7) / 8, 8);
    const cuda_ops_dtype dtypes[] = {CUDA_OPS_FLOAT16, CUDA_OPS_BFLOAT16};
    for (int i = 0; i < 2; i++) {
        for (int64_t k = 0; k < count; k++)
            wide[k] = (float)number((uint64_t)k);
        CHECK_OK(cuda_ops_round_cpu(x, wide, count, dtypes[i]));
        CHECK_OK(cuda_ops_widen_cpu(wide, x, count, dtypes[i]));
        CHECK_OK(cuda_ops_reduction_accumulate_cpu(workspace, wide, s, kind, parameter, 0, units, CUDA_OPS_FLOAT32));
        CHECK_OK(cuda_ops_reduction_finish_cpu(is_index ? (void *)expected_at : (void *)expected, workspace, s, kind,
                                               parameter, 0, results, CUDA_OPS_FLOAT32));
        CHECK_OK(cuda_ops_reduction_accumulate_cpu(workspace, x, s, kind, parameter, 0, units, dtypes[i]));
        CHECK_OK(cuda_ops_reduction_finish_cpu(is_index ? (void *)at : (void *)y, workspace, s, kind, parameter, 0,
                                               results, CUDA_OPS_FLOAT32));
        const bool is_sum = kind == CUDA_OPS_SUM || kind == CUDA_OPS_MEAN || (kind == CUDA_OPS_NORM && parameter == 2);
        const bool same_bits = s.inner == 1 && !(is_sum && dtypes[i] == CUDA_OPS_BFLOAT16);
        for (int64_t k = 0; k < results; k++)
            if (is_index)
                CHECK(at[k] == expected_at[k], "index %lld: %lld, expected %lld", (long long)k, (long long)at[k],
                      (long long)expected_at[k]);
            else
                CHECK(same_bits ? y[k] == expected[k] : fabsf(y[k] - expected[k]) <= 1e-5f * fabsf(expected[k]) + 1e-5f,
                      "result %lld: %g, expected %g", (long long)k, (double)y[k], (double)expected[k]);
    }
    guarded_free_bytes(workspace, (bytes + 7) / 8, 8);
}

int main(void)
{
    /* batch, outer, cols, inner: rows shorter and longer than a sum's 256, of several parts; columns of a tile and more,
     * of several parts */
    const int64_t sizes[][4] = {{1, 1, 1, 1},     {1, 7, 1, 5},    {1, 5, 257, 1}, {3, 4, 31, 1},
                                {1, 1, 33000, 1}, {1, 2, 40, 300}, {2, 3, 5, 7},   {1, 1, 1100, 3}};
    FOR_CPU_DTYPES(dtype)
    {
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            const cuda_ops_reduction_sizes s = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3]};
            for (int kind = CUDA_OPS_SUM; kind <= CUDA_OPS_STD; kind++) {
                if ((kind == CUDA_OPS_ARGMAX || kind == CUDA_OPS_ARGMIN) && s.batch > 1)
                    continue;
                if (kind == CUDA_OPS_NORM) {
                    const double p[] = {0, 1, 2, 3.5, (double)INFINITY, (double)-INFINITY};
                    for (int k = 0; k < 6; k++) {
                        check_reduction(s, CUDA_OPS_NORM, p[k], 0, dtype);
                        check_halves(s, CUDA_OPS_NORM, p[k]);
                    }
                } else if (kind == CUDA_OPS_PROD) {
                    check_reduction(s, CUDA_OPS_PROD, 0, 1, dtype);
                } else if (kind < CUDA_OPS_VAR || s.batch * s.cols > 1) {
                    check_halves(s, (cuda_ops_reduction_kind)kind, kind < CUDA_OPS_VAR ? 0 : 1);
                    check_reduction(s, (cuda_ops_reduction_kind)kind, kind < CUDA_OPS_VAR ? 0 : 1, 0, dtype);
                }
            }
        }
        check_reduction((cuda_ops_reduction_sizes){1, 2, 3000, 1}, CUDA_OPS_VAR, 1, 10000, dtype);
        check_reduction((cuda_ops_reduction_sizes){2, 1, 3000, 3}, CUDA_OPS_STD, 0, 10000, dtype);
        check_corners(dtype);
        check_all_backward(dtype);
    }
    const cuda_ops_reduction_sizes one = {1, 1, 1, 1}, two = {2, 1, 1, 1};
    CHECK_STATUS(cuda_ops_reduction_accumulate_cpu(NULL, NULL, one, CUDA_OPS_SUM, 0, 0, 0, (cuda_ops_dtype)99),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_reduction_finish_cpu(NULL, NULL, one, CUDA_OPS_SUM, 0, 0, 0, CUDA_OPS_BFLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    CHECK_STATUS(cuda_ops_reduction_accumulate_cpu(NULL, NULL, two, CUDA_OPS_ARGMAX, 0, 0, 0, CUDA_OPS_FLOAT32),
                 CUDA_OPS_INVALID_ARGUMENT);
    CHECK_STATUS(
        cuda_ops_reduction_accumulate_cpu(NULL, NULL, one, (cuda_ops_reduction_kind)10, 0, 0, 0, CUDA_OPS_FLOAT32),
        CUDA_OPS_INVALID_ARGUMENT);
    return 0;
}
