// Sums by channel where channels are innermost in memory: a block's threads are `groups` groups of neighbouring threads,
// and thread i of each group adds up values of the same channel.
#ifndef CUDA_OPS_COMMON_GROUP_SUMS_CUH
#define CUDA_OPS_COMMON_GROUP_SUMS_CUH

// Adds the groups' sums pairwise, and so in a fixed order: add(half) adds what the thread `half` groups on has in shared
// memory to this thread's. Threads of group 0 then have the totals, which they wrote themselves.
template <typename Add>
__device__ __forceinline__ void add_groups(int group, int groups, Add add)
{
    for (int half = groups / 2; half > 0; half /= 2) {
        __syncthreads();
        if (group < half)
            add(half);
    }
}

#endif
