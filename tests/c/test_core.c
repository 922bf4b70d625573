#include "cuda_ops/core.h"

#include "check.h"

int main(void)
{
    const cuda_ops_status statuses[] = {CUDA_OPS_SUCCESS,    CUDA_OPS_INVALID_ARGUMENT, CUDA_OPS_UNSUPPORTED_DTYPE,
                                        CUDA_OPS_CUDA_ERROR, CUDA_OPS_CUDA_ERROR + 98,  -1};
    enum { COUNT = sizeof(statuses) / sizeof(statuses[0]) };
    for (int i = 0; i < COUNT; i++)
        CHECK(cuda_ops_status_string(statuses[i])[0] != '\0', "status %d", statuses[i]);
    for (int i = 1; i < 4; i++)
        CHECK(strcmp(cuda_ops_status_string(statuses[i - 1]), cuda_ops_status_string(statuses[i])) != 0, "%d", i);
    CHECK(strcmp(cuda_ops_version(), CUDA_OPS_VERSION) == 0, "library %s, header %s", cuda_ops_version(),
          CUDA_OPS_VERSION);
    return 0;
}
