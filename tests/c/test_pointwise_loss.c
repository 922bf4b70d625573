#include "cuda_ops/pointwise_loss.h"

#include "check.h"

static double softplus(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static double loss_of(cuda_ops_pointwise_loss loss, double x, double t, double pos, double p)
{
    const double z = fabs(x - t);
    switch (loss) {
    case CUDA_OPS_POINTWISE_LOSS_MSE:
        return z * z;
    case CUDA_OPS_POINTWISE_LOSS_L1:
        return z;
    case CUDA_OPS_POINTWISE_LOSS_SMOOTH_L1:
        return z < p ? z * z / (2 * p) : z - p / 2;
    case CUDA_OPS_POINTWISE_LOSS_HUBER:
        return z < p ? z * z / 2 : p * (z - p / 2);
    case CUDA_OPS_POINTWISE_LOSS_BCE_WITH_LOGITS:
        return pos * t * softplus(-x) + (1 - t) * softplus(x);
    case CUDA_OPS_POINTWISE_LOSS_KL_DIV:
        return t * (log(t) - x);
    default:
        return exp(t) * (t - x);
    }
}

/* Derivatives by differences: good to h^2 where the function is smooth, which it is not within h of a kink. */
static const double H = 1e-5;

static void check_loss(cuda_ops_pointwise_loss loss, int64_t count, bool factors_given, cuda_ops_dtype dtype)
{
    const double parameter = 0.7, tolerance = dtype == CUDA_OPS_FLOAT32 ? 1e-5 : 1e-8;
    void *input = guarded_numbers(count, 1, dtype), *target = guarded_numbers(count, 2, dtype);
    for (int64_t i = 0; i < count; i++)
        set(target, i, 0.25 * get(target, i, dtype) + 0.75, dtype); /* from 0.25 to 1.25 */
    void *weight = guarded_numbers(3, 3, dtype), *pos = guarded_numbers(count, 4, dtype);
    const cuda_ops_loss_factors none = {{NULL, 1, 1}, {NULL, 1, 1}}, given = {{weight, 2, 3}, {pos, 1, 0}};
    const cuda_ops_loss_factors *factors = factors_given ? &given : &none;
    void *losses = guarded_new(count, dtype), *gradient = guarded_new(count, dtype);
    void *grad_output = guarded_numbers(count, 5, dtype);
    double partial[2], sum = 0;
    IN_TWO_PIECES(
        count, begin, end,
        cuda_ops_pointwise_loss_forward_cpu(losses, NULL, input, target, factors, begin, end, loss, parameter, dtype));
    CHECK_OK(
        cuda_ops_pointwise_loss_forward_cpu(NULL, partial, input, target, factors, 0, count, loss, parameter, dtype));
    for (int64_t i = 0; i < count; i++) {
        const double w = factors_given ? get(weight, i / 2 % 3, dtype) : 1, q = factors_given ? get(pos, i, dtype) : 1;
        const double expected = w * loss_of(loss, get(input, i, dtype), get(target, i, dtype), q, parameter);
        CHECK_NEAR(losses, i, expected, rounding(dtype), dtype);
        sum += expected;
    }
    CHECK(fabs(partial[0] - sum) <= rounding(dtype) * (double)count * 4, "sum %g, expected %g", partial[0], sum);
    CHECK(partial[1] == (double)count, "%g elements", partial[1]);
    for (int by_target = 0; by_target < 2; by_target++)
        for (int mean = 0; mean < 2; mean++) {
            IN_TWO_PIECES(count, begin, end,
                          cuda_ops_pointwise_loss_backward_cpu(
                              gradient, grad_output, input, target, factors, count, begin, end, loss, parameter,
                              by_target, mean ? CUDA_OPS_REDUCTION_MEAN : CUDA_OPS_REDUCTION_NONE, dtype));
            for (int64_t i = 0; i < count; i++) {
                const double x = get(input, i, dtype), t = get(target, i, dtype);
                const double z = fabs(x - t);
                if (z < 2 * H || fabs(z - parameter) < 2 * H)
                    continue;
                const double w = factors_given ? get(weight, i / 2 % 3, dtype) : 1;
                const double q = factors_given ? get(pos, i, dtype) : 1, dx = by_target ? 0 : H, dt = by_target ? H : 0;
                const double slope =
                    (loss_of(loss, x + dx, t + dt, q, parameter) - loss_of(loss, x - dx, t - dt, q, parameter)) /
                    (2 * H);
                const double g = mean ? get(grad_output, 0, dtype) / (double)count : get(grad_output, i, dtype);
                CHECK_NEAR(gradient, i, g * w * slope, tolerance, dtype);
            }
        }
    guarded_free(input, count, dtype);
    guarded_free(target, count, dtype);
    guarded_free(weight, 3, dtype);
    guarded_free(pos, count, dtype);
    guarded_free(losses, count, dtype);
    guarded_free(gradient, count, dtype);
    guarded_free(grad_output, count, dtype);
}

int main(void)
{
    FOR_CPU_DTYPES(dtype)
    {
        const int64_t sizes[] = {1, 6, 255, 600};
        for (cuda_ops_pointwise_loss loss = CUDA_OPS_POINTWISE_LOSS_MSE; loss <= CUDA_OPS_POINTWISE_LOSS_KL_DIV_OF_LOG;
             loss++)
            for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
                check_loss(loss, sizes[s], false, dtype);
                check_loss(loss, sizes[s], true, dtype);
            }
        const cuda_ops_loss_factors none = {{NULL, 1, 1}, {NULL, 1, 1}};
        double partial[2];
        CHECK_OK(cuda_ops_pointwise_loss_forward_cpu(NULL, partial, NULL, NULL, &none, 0, 0,
                                                     CUDA_OPS_POINTWISE_LOSS_MSE, 0, dtype));
        CHECK_STATUS(cuda_ops_pointwise_loss_forward_cpu(NULL, partial, NULL, NULL, &none, 0, 0,
                                                         (cuda_ops_pointwise_loss)9, 0, dtype),
                     CUDA_OPS_INVALID_ARGUMENT);
    }
    return 0;
}
