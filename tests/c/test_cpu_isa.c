#define _GNU_SOURCE /* setenv */
#include "cuda_ops/cpu_isa.h"

#include "check.h"

int main(void)
{
    /* The variable is read once, at the first question. */
    CHECK(setenv("CUDA_OPS_CPU_ISA", "portable", 1) == 0, "setenv");
    CHECK_OK(cuda_ops_cpu_isa_check());
    CHECK(cuda_ops_cpu_isa_current() == CUDA_OPS_CPU_PORTABLE, "the variable was not obeyed");
    CHECK(setenv("CUDA_OPS_CPU_ISA", "avx3", 1) == 0, "setenv");
    CHECK_STATUS(cuda_ops_cpu_isa_check(), CUDA_OPS_INVALID_ARGUMENT);
    CHECK(cuda_ops_cpu_isa_current() == CUDA_OPS_CPU_PORTABLE, "a variable set later was obeyed");
    CHECK(setenv("CUDA_OPS_CPU_ISA", "", 1) == 0, "setenv");
    CHECK_OK(cuda_ops_cpu_isa_check());

    CHECK_STATUS(cuda_ops_cpu_isa_select("Portable"), CUDA_OPS_INVALID_ARGUMENT);
    const cuda_ops_cpu_isa widest = cuda_ops_cpu_isa_widest();
    for (int isa = 0; cuda_ops_cpu_isa_name((cuda_ops_cpu_isa)isa); isa++) {
        const char *name = cuda_ops_cpu_isa_name((cuda_ops_cpu_isa)isa);
        CHECK_STATUS(cuda_ops_cpu_isa_select(name), isa <= (int)widest ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT);
        CHECK((int)cuda_ops_cpu_isa_current() == (isa <= (int)widest ? isa : (int)widest), "set %s", name);
    }
    CHECK_OK(cuda_ops_cpu_isa_select("portable"));
    CHECK_OK(cuda_ops_cpu_isa_select(NULL));
    int multiplies_pairs_fast = 0; /* where avx512_bf16 need not be named */
#if defined(__x86_64__)
    __builtin_cpu_init();
    multiplies_pairs_fast = __builtin_cpu_is("amd");
#endif
    const cuda_ops_cpu_isa standard =
        widest == CUDA_OPS_CPU_AVX512_BF16 && !multiplies_pairs_fast ? CUDA_OPS_CPU_AVX512 : widest;
    CHECK(cuda_ops_cpu_isa_current() == standard, "NULL is not the default");
    CHECK(cuda_ops_cpu_isa_name((cuda_ops_cpu_isa)-1) == NULL, "a set of number -1");
    printf("%s\n", cuda_ops_cpu_isa_name(widest));
    return 0;
}
