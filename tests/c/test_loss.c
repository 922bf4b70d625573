#include "cuda_ops/loss.h"

#include "check.h"

int main(void)
{
    const int64_t target[] = {0, 4, -100, 5, -1, INT64_MIN, INT64_MAX};
    CHECK(cuda_ops_loss_find_bad_target_cpu(target, 0, 5, -100) == -1, "nothing is bad in nothing");
    CHECK(cuda_ops_loss_find_bad_target_cpu(target, 3, 5, -100) == -1, "all of these are good");
    CHECK(cuda_ops_loss_find_bad_target_cpu(target, 7, 5, -100) == 3, "5 of 5 classes");
    CHECK(cuda_ops_loss_find_bad_target_cpu(target, 7, 6, -100) == 4, "-1");
    CHECK(cuda_ops_loss_find_bad_target_cpu(target, 7, 6, -1) == 2, "-100, where -1 is ignored");
    CHECK(cuda_ops_loss_find_bad_target_cpu(target + 5, 2, 6, INT64_MIN) == 1, "the largest number there is");

    const double partials[] = {1, 2, 3, 0.5, -0.5, 1};
    FOR_CPU_DTYPES(dtype)
    {
        void *loss = guarded_new(1, dtype), *weight = guarded_new(1, dtype);
        CHECK_OK(cuda_ops_loss_reduce_cpu(loss, weight, partials, 3, CUDA_OPS_REDUCTION_SUM, dtype));
        CHECK_NEAR(loss, 0, 3.5, 0, dtype);
        CHECK_NEAR(weight, 0, 3.5, 0, dtype);
        CHECK_OK(cuda_ops_loss_reduce_cpu(loss, weight, partials, 2, CUDA_OPS_REDUCTION_MEAN, dtype));
        CHECK_NEAR(loss, 0, 1.6, rounding(dtype), dtype);
        CHECK_OK(cuda_ops_loss_reduce_cpu(loss, weight, partials, 0, CUDA_OPS_REDUCTION_MEAN, dtype));
        CHECK(isnan(get(loss, 0, dtype)), "the mean of nothing is NaN");
        CHECK_OK(cuda_ops_loss_reduce_cpu(loss, weight, partials, 0, CUDA_OPS_REDUCTION_SUM, dtype));
        CHECK_NEAR(loss, 0, 0, 0, dtype);
        guarded_free(loss, 1, dtype);
        guarded_free(weight, 1, dtype);
    }
    CHECK_STATUS(cuda_ops_loss_reduce_cpu(NULL, NULL, partials, 1, CUDA_OPS_REDUCTION_SUM, CUDA_OPS_FLOAT16),
                 CUDA_OPS_UNSUPPORTED_DTYPE);
    return 0;
}
