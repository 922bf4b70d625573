// Plans of products that were planned before. Planning goes through all tiles of all paths, which takes the host as long
// as several launches do, and a model makes the same products in every step. A plan depends on nothing but what stands in
// its key. Thread-safe.
#ifndef CUDA_OPS_GEMM_KNOWN_PLANS_H
#define CUDA_OPS_GEMM_KNOWN_PLANS_H

#include <string.h>

#include <mutex>
#include <unordered_map>

#include "gemm/paths.h"
#include "gemm/sm90_3xtf32/sm90_3xtf32.h"

struct PlanKey {
    static constexpr int WORDS = 16;
    uint64_t words[WORDS];
};

// Whether there is an address, and what kernels may ask about its alignment.
static inline uint64_t alignment_bits(const void *address)
{
    return address ? 0x100 | ((uintptr_t)address & 0xff) : 0;
}

static inline PlanKey plan_key(const GemmCall &call, GemmDevice device, int only)
{
    const cuda_ops_gemm_problem &p = call.problem;
    uint64_t alpha;
    memcpy(&alpha, &p.alpha, sizeof alpha);
    const uint64_t kind = (uint64_t)p.dtype | (uint64_t)p.output_dtype << 4 | (uint64_t)p.bias_dtype << 8 |
                          (uint64_t)p.activation << 12 | (uint64_t)(p.transpose_a != 0) << 16 |
                          (uint64_t)(p.transpose_b != 0) << 17 | (uint64_t)(p.allow_tf32 != 0) << 18 |
                          (uint64_t)(p.unaligned_a != 0) << 19 | (uint64_t)(p.unaligned_b != 0) << 20 |
                          (uint64_t)gemm_sm90_3xtf32_is_allowed() << 21 | (uint64_t)(unsigned char)only << 24;
    const uint64_t addresses = alignment_bits(call.d) | alignment_bits(call.a) << 9 | alignment_bits(call.b) << 18 |
                               alignment_bits(call.bias) << 27 | alignment_bits(call.workspace) << 36 |
                               alignment_bits(p.preactivation) << 45;
    return {{(uint64_t)p.m, (uint64_t)p.n, (uint64_t)p.k, (uint64_t)p.batch, (uint64_t)p.lda, (uint64_t)p.ldb,
             (uint64_t)p.ldd, (uint64_t)p.stride_a, (uint64_t)p.stride_b, (uint64_t)p.stride_d, alpha, kind, addresses,
             (uint64_t)device.capability, (uint64_t)device.multiprocessors, (uint64_t)device.shared_bytes}};
}

struct PlanKeyHash {
    size_t operator()(const PlanKey &key) const
    {
        uint64_t hash = 0;
        for (const uint64_t word : key.words) {
            hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
            hash ^= hash >> 32;
        }
        return (size_t)hash;
    }
};

static inline bool operator==(const PlanKey &a, const PlanKey &b)
{
    return memcmp(a.words, b.words, sizeof a.words) == 0;
}

struct KnownPlans {
    // Several times what the largest models ask for: some hundred products, each in a few ways.
    static constexpr size_t MOST = 4096;

    std::mutex mutex;
    std::unordered_map<PlanKey, GemmPlan, PlanKeyHash> plans;

    bool find(const PlanKey &key, GemmPlan *plan)
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto known = plans.find(key);
        if (known == plans.end())
            return false;
        *plan = known->second;
        return true;
    }

    void keep(const PlanKey &key, const GemmPlan &plan)
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (plans.size() >= MOST) // sizes keep changing: plans are not used again
            plans.clear();
        plans.emplace(key, plan);
    }
};

#endif
