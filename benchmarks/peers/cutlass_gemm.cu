// D = A B of row-major matrices by CUTLASS, as one of its users would have it: a handful of kernels a dtype, from the
// collective builder for Hopper (TMA, wgmma, producer and consumer warps) where it has any, from the device-level API
// of CUTLASS 2 for the rest (float32 without tensor cores, float64, and lines that are no multiple of 16 bytes, which
// TMA does not read). cutlass_gemm.py compiles this once for each dtype, times the candidates and keeps the fastest.
//
// Compiled with one of CUTLASS_GEMM_BFLOAT16, _FLOAT16, _TF32, _FLOAT32, _FLOAT64, for sm_90a.
#include <cuda_runtime.h>
#include <stdint.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/version.h"

using cutlass::Status;
using cutlass::gemm::GemmUniversalMode;
using cutlass::layout::RowMajor;

struct Problem {
    void *d;
    const void *a, *b;
    int m, n, k;
    /* Hopper's kernels: the largest swizzle of the tile order; CUTLASS 2's: splits of k, added serially. */
    int option;
};

/* With workspace_bytes it writes there what a launch needs and launches nothing. */
typedef Status (*Function)(const Problem &problem, void *workspace, size_t *workspace_bytes, cudaStream_t stream);

template <typename Gemm>
static Status launch(const typename Gemm::Arguments &arguments, void *workspace, size_t *workspace_bytes,
                     cudaStream_t stream)
{
    if (workspace_bytes) {
        *workspace_bytes = 0;
        Status status = Gemm::can_implement(arguments);
        if (status == Status::kSuccess) {
            *workspace_bytes = Gemm::get_workspace_size(arguments);
        }
        return status;
    }
    Gemm gemm;
    Status status = gemm.initialize(arguments, workspace, stream);
    return status == Status::kSuccess ? gemm.run(stream) : status;
}

using Cooperative = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using PingPong = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Persistent = cutlass::gemm::PersistentScheduler;
using StreamK = cutlass::gemm::StreamKScheduler;

/* Of the matrix whose lines are so many elements apart. */
template <typename Stride>
static Stride stride_of(int64_t distance)
{
    Stride stride{};
    if constexpr (cute::is_static<decltype(cute::get<0>(stride))>::value) {
        cute::get<1>(stride) = distance;
    } else {
        cute::get<0>(stride) = distance;
    }
    return stride;
}

/* Tile and cluster are cute::Shape<m, n, k> of the block's tile in elements and of the cluster in blocks.

   In 32 bits wgmma reads both operands along k alone, and B lies along n. CUTLASS's builder accepts that, and transposes it
   in shared memory; but by those kernels some products were NaN, and one by stream-K did not end (4.2.0, on an H200).
   So there D^T = B^T A^T is asked for, in which B^T goes through registers: all three matrices are column-major then,
   and a tile's m is along n of D. */
template <typename Element, typename Tile, typename Cluster, typename Schedule, typename Scheduler>
static Status hopper(const Problem &problem, void *workspace, size_t *workspace_bytes, cudaStream_t stream)
{
    constexpr bool turned = sizeof(Element) == 4;
    constexpr int alignment = 16 / sizeof(Element);
    using Layout = cute::conditional_t<turned, cutlass::layout::ColumnMajor, RowMajor>;
    using EpilogueSchedule =
        cute::conditional_t<cute::is_same_v<Schedule, Cooperative>, cutlass::epilogue::TmaWarpSpecializedCooperative,
                            cutlass::epilogue::TmaWarpSpecialized>;
    // C is void: nothing is read and added to the product.
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Layout, alignment, Element, Layout,
        alignment, EpilogueSchedule>::CollectiveOp;
    using Stages =
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Mainloop =
        typename cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
                                                              Element, Layout, alignment, Element, Layout, alignment,
                                                              float, Tile, Cluster, Stages, Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    // Asked for once: the answer takes longer than a small product, and the GPUs of a machine are alike.
    static const cutlass::KernelHardwareInfo hardware =
        cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(0);
    const Element *a = static_cast<const Element *>(problem.a), *b = static_cast<const Element *>(problem.b);
    const int m = problem.m, n = problem.n, k = problem.k;
    typename Gemm::Arguments arguments{GemmUniversalMode::kGemm,
                                       {turned ? n : m, turned ? m : n, k, 1},
                                       {turned ? b : a, stride_of<typename Kernel::StrideA>(turned ? n : k),
                                        turned ? a : b, stride_of<typename Kernel::StrideB>(turned ? k : n)},
                                       {{1.0f, 0.0f},
                                        nullptr,
                                        stride_of<typename Kernel::StrideC>(n),
                                        static_cast<Element *>(problem.d),
                                        stride_of<typename Kernel::StrideD>(n)},
                                       hardware};
    arguments.scheduler.max_swizzle_size = problem.option;
    return launch<Gemm>(arguments, workspace, workspace_bytes, stream);
}

/* CUTLASS 2: Block, Warp and Instruction are cutlass::gemm::GemmShape. Reads single elements, so that any size will do.
   Output is what is stored: of TF32 operands the sums are float. */
template <typename Element, typename Output, typename Sum, typename Class, typename Arch, typename Block, typename Warp,
          typename Instruction, int stages>
static Status ampere(const Problem &problem, void *workspace, size_t *workspace_bytes, cudaStream_t stream)
{
    using Epilogue = cutlass::epilogue::thread::LinearCombination<Output, 1, Sum, Sum>;
    using Gemm = cutlass::gemm::device::GemmUniversal<
        Element, RowMajor, Element, RowMajor, Output, RowMajor, Sum, Class, Arch, Block, Warp, Instruction, Epilogue,
        cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, stages, 1, 1>;
    typename Gemm::Arguments arguments(GemmUniversalMode::kGemm, {problem.m, problem.n, problem.k}, problem.option,
                                       {Sum(1), Sum(0)}, problem.a, problem.b, problem.d, problem.d, 0, 0, 0, 0,
                                       problem.k, problem.n, problem.n, problem.n);
    return launch<Gemm>(arguments, workspace, workspace_bytes, stream);
}

struct Candidate {
    const char *name;
    Function function;
    int option;
};

template <int m, int n, int k>
using Shape = cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>;
template <int m, int n, int k>
using Gemm2Shape = cutlass::gemm::GemmShape<m, n, k>;
using Simt = cutlass::arch::OpClassSimt;
using TensorOp = cutlass::arch::OpClassTensorOp;
using cutlass::arch::Sm80;
using cutlass::arch::Sm90;

// clang-format off
#if defined(CUTLASS_GEMM_BFLOAT16) || defined(CUTLASS_GEMM_FLOAT16)
#ifdef CUTLASS_GEMM_BFLOAT16
using Half = cutlass::bfloat16_t;
#else
using Half = cutlass::half_t;
#endif
static const Function wide = hopper<Half, Shape<128, 256, 64>, Shape<2, 1, 1>, Cooperative, Persistent>;
static const Function square = hopper<Half, Shape<128, 128, 64>, Shape<2, 1, 1>, PingPong, Persistent>;
static const Function narrow = hopper<Half, Shape<128, 64, 64>, Shape<2, 1, 1>, Cooperative, Persistent>;
static const Function stream_k = hopper<Half, Shape<128, 128, 64>, Shape<2, 1, 1>, Cooperative, StreamK>;
static const Function small = hopper<Half, Shape<64, 64, 128>, Shape<1, 1, 1>, PingPong, Persistent>;
static const Function odd = ampere<Half, Half, float, TensorOp, Sm80, Gemm2Shape<64, 64, 32>, Gemm2Shape<32, 32, 32>,
                                   Gemm2Shape<16, 8, 16>, 2>;
static const Candidate candidates[] = {
    {"128x256x64, clusters of 2x1, cooperative", wide, 1},
    {"128x256x64, clusters of 2x1, cooperative, swizzle 8", wide, 8},
    {"128x128x64, clusters of 2x1, ping-pong", square, 1},
    {"128x128x64, clusters of 2x1, ping-pong, swizzle 8", square, 8},
    {"128x64x64, clusters of 2x1, cooperative", narrow, 1},
    {"128x128x64, clusters of 2x1, stream-K", stream_k, 1},
    {"64x64x128, ping-pong", small, 1},
    {"64x64x32, mma.sync", odd, 1},
    {"64x64x32, mma.sync, 8 splits of k", odd, 8},
};
#elif defined(CUTLASS_GEMM_TF32)
using TF32 = cutlass::tfloat32_t;
static const Function wide = hopper<float, Shape<128, 256, 32>, Shape<2, 1, 1>, Cooperative, Persistent>;
static const Function square = hopper<float, Shape<128, 128, 32>, Shape<2, 1, 1>, PingPong, Persistent>;
static const Function narrow = hopper<float, Shape<128, 64, 32>, Shape<2, 1, 1>, Cooperative, Persistent>;
static const Function small = hopper<float, Shape<64, 64, 32>, Shape<1, 1, 1>, PingPong, Persistent>;
static const Function odd = ampere<TF32, float, float, TensorOp, Sm80, Gemm2Shape<64, 64, 16>, Gemm2Shape<32, 32, 16>,
                                   Gemm2Shape<16, 8, 8>, 4>;
static const Candidate candidates[] = {
    {"128x256x32, clusters of 2x1, cooperative", wide, 1},
    {"128x256x32, clusters of 2x1, cooperative, swizzle 8", wide, 8},
    {"128x128x32, clusters of 2x1, ping-pong", square, 1},
    {"128x128x32, clusters of 2x1, ping-pong, swizzle 8", square, 8},
    {"128x64x32, clusters of 2x1, cooperative", narrow, 1},
    {"64x64x32, ping-pong", small, 1},
    {"64x64x16, mma.sync", odd, 1},
    {"64x64x16, mma.sync, 8 splits of k", odd, 8},
};
#elif defined(CUTLASS_GEMM_FLOAT32)
template <typename Block, typename Warp, int stages>
static const Function simt = ampere<float, float, float, Simt, Sm80, Block, Warp, Gemm2Shape<1, 1, 1>, stages>;
static const Function wide = simt<Gemm2Shape<256, 128, 8>, Gemm2Shape<64, 64, 8>, 4>;
static const Function square = simt<Gemm2Shape<128, 128, 8>, Gemm2Shape<32, 64, 8>, 5>;
static const Function narrow = simt<Gemm2Shape<128, 64, 8>, Gemm2Shape<64, 32, 8>, 5>;
static const Function small = simt<Gemm2Shape<64, 64, 8>, Gemm2Shape<32, 64, 8>, 5>;
static const Candidate candidates[] = {
    {"256x128x8", wide, 1},
    {"128x128x8", square, 1},
    {"128x128x8, 4 splits of k", square, 4},
    {"128x64x8", narrow, 1},
    {"128x64x8, 4 splits of k", narrow, 4},
    {"64x64x8", small, 1},
    {"64x64x8, 16 splits of k", small, 16},
};
#elif defined(CUTLASS_GEMM_FLOAT64)
template <typename Block, typename Warp, int stages>
static const Function tensor =
    ampere<double, double, double, TensorOp, Sm90, Block, Warp, Gemm2Shape<16, 8, 4>, stages>;
static const Function square = tensor<Gemm2Shape<128, 128, 16>, Gemm2Shape<32, 64, 16>, 3>;
static const Function narrow = tensor<Gemm2Shape<128, 64, 16>, Gemm2Shape<64, 32, 16>, 3>;
static const Function small = tensor<Gemm2Shape<64, 64, 16>, Gemm2Shape<32, 32, 16>, 4>;
static const Candidate candidates[] = {
    {"128x128x16, mma.sync", square, 1},
    {"128x64x16, mma.sync", narrow, 1},
    {"64x64x16, mma.sync", small, 1},
    {"64x64x16, mma.sync, 8 splits of k", small, 8},
};
#else
#error "define one of CUTLASS_GEMM_BFLOAT16, CUTLASS_GEMM_FLOAT16, CUTLASS_GEMM_TF32, CUTLASS_GEMM_FLOAT32, CUTLASS_GEMM_FLOAT64"
#endif
// clang-format on

extern "C" {

/* CUTLASS's version, as 420 for 4.2.0. */
int cutlass_gemm_version(void)
{
    return CUTLASS_VERSION;
}

int cutlass_gemm_candidates(void)
{
    return sizeof(candidates) / sizeof(candidates[0]);
}

const char *cutlass_gemm_name(int candidate)
{
    return candidates[candidate].name;
}

/* Bytes of workspace, 256-byte aligned, that this candidate wants for the problem; -1 where it cannot do it. */
int64_t cutlass_gemm_workspace(int candidate, int m, int n, int k)
{
    // The addresses count for their alignment alone.
    void *aligned = reinterpret_cast<void *>(uintptr_t(256));
    const Problem problem = {aligned, aligned, aligned, m, n, k, candidates[candidate].option};
    size_t bytes = 0;
    const Status status = candidates[candidate].function(problem, nullptr, &bytes, nullptr);
    return status == Status::kSuccess ? int64_t(bytes) : -1;
}

/* d (m x n) = a (m x k) b (k x n), row-major; 0, or a cutlass::Status. */
int cutlass_gemm(int candidate, void *d, const void *a, const void *b, int m, int n, int k, void *workspace,
                 cudaStream_t stream)
{
    const Problem problem = {d, a, b, m, n, k, candidates[candidate].option};
    return int(candidates[candidate].function(problem, workspace, nullptr, stream));
}

const char *cutlass_gemm_status(int status)
{
    return cutlassGetStatusString(Status(status));
}
}
