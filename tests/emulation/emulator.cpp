// A CUDA thread is a fiber; those of some blocks are resident and take turns, in random order, each until it has to wait
// (for a barrier, a warp, a copy) or ends. So what is not ordered by a barrier comes in many orders, and memory that is
// read too early holds its initial bytes. Shared variables lie in allocations of their own, device memory too, so that the
// address sanitizer finds what is read or written beside them; memory is poisoned for threads that have not yet waited for
// the kernel before, where one may still run.
#include "emulator.h"

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <vector>

#include "cuda_runtime.h"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation
{
int resident_blocks = 3;
int64_t threads_run = 0;

static constexpr size_t STACK_BYTES = 128 << 10;

struct Fiber;

// One after the other: of the threads that meet there, those that have come.
struct Meeting {
    std::vector<Fiber *> waiting;
    int sum = 0;
};

struct Warp {
    unsigned int arrived = 0;
    uint64_t values[32] = {};
    Fiber *lanes[32] = {};
};

struct Variable {
    void *memory;
    size_t bytes;
};

struct Cluster;
struct Block {
    Cluster *cluster;
    uint32_t rank;
    uint3 index;
    int threads, alive;
    Meeting barrier;
    std::map<int, Meeting> named; // barriers 1 to 15
    std::vector<Warp> warps;
    std::map<uint32_t, Variable> variables; // by the number of its site
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    int threads = 0, alive = 0;
    Meeting barrier;
};

struct Copy {
    uint32_t to;
    const void *from;
    int bytes, valid;
};

struct Fiber {
    void *stack_pointer;
    char *stack;
    void *fake_stack;
    Block *block;
    uint3 place;
    int thread; // in the block
    bool waited;
    bool arrived_at_cluster;
    int result;
    uint64_t values[32];
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

struct Store {
    Block *block;
    uint32_t to, barrier;
    std::vector<char> bytes;
};

struct Buffer {
    char *memory, *begin;
    size_t bytes;
};

struct BarrierState { // 8 bytes, as an mbarrier
    uint16_t expected, pending : 15, phase : 1;
    int32_t bytes;
};
static_assert(sizeof(BarrierState) == 8, "an mbarrier");

static std::vector<Buffer> buffers;
static std::vector<Fiber *> ready, idle;
static std::vector<Fiber *> early; // those that are ready, and have not waited for the kernel before: they go first
static std::vector<Store> stores;
static std::map<const BarrierState *, std::vector<Fiber *>> waiting; // for a phase of an mbarrier to end
static std::map<const char *, uint32_t> sites;
static Fiber *running;
static Fiber scheduler;
static const cudaLaunchConfig_t *launched;
static const std::function<void()> *kernel;
static bool dependent, some_waited, poisoned;
static char description[1024];

// ---- failures and random numbers ----

void describe(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(description, sizeof description, format, arguments);
    va_end(arguments);
}

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAILED: %s\n  ", description);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    if (running)
        fprintf(stderr, "  block %u, %u, %u, thread %u, %u, %u\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                threadIdx.y, threadIdx.z);
    abort();
}

extern "C" const char *__asan_default_options()
{
    return "detect_leaks=0"; // fibers are kept
}

extern "C" const char *__ubsan_default_options()
{
    return "print_stacktrace=1:halt_on_error=1";
}

extern "C" void __asan_on_error()
{
    fprintf(stderr, "FAILED: %s\n", description);
    if (running)
        fprintf(stderr, "  block %u, %u, %u, thread %u, %u, %u%s\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                threadIdx.y, threadIdx.z, dependent && !running->waited ? ", before wait_for_predecessor()" : "");
}

static uint64_t state = 1;
uint64_t random_below(uint64_t bound)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % bound;
}
void seed_random(uint64_t seed)
{
    state = seed * 2 + 1;
}

// ---- device memory ----

void *device_memory(size_t bytes, size_t phase, int fill)
{
    char *memory = nullptr;
    if (posix_memalign((void **)&memory, 256, bytes + phase + 1) != 0)
        abort();
    memset(memory, fill, bytes + phase + 1);
    __asan_poison_memory_region(memory, phase);
    __asan_poison_memory_region(memory + phase + bytes, 1);
    buffers.push_back({memory, memory + phase, bytes});
    return memory + phase;
}

void free_all()
{
    for (const Buffer &buffer : buffers) {
        __asan_unpoison_memory_region(buffer.memory, buffer.begin - buffer.memory + buffer.bytes + 1);
        free(buffer.memory);
    }
    buffers.clear();
}

static void poison(bool on)
{
    if (on == poisoned)
        return;
    poisoned = on;
    for (const Buffer &buffer : buffers)
        (on ? __asan_poison_memory_region : __asan_unpoison_memory_region)(buffer.begin, buffer.bytes);
}

// ---- fibers ----

static void make_ready(Fiber *fiber)
{
    (dependent && !fiber->waited ? early : ready).push_back(fiber);
}

// Saves the registers that a function preserves, and goes on with another stack.
extern "C" void emulation_switch(void **from, void *to);
asm(R"(
.text
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void start_fiber();

static void ended(Fiber *fiber);

static const void *scheduler_stack;
static size_t scheduler_stack_bytes;

__attribute__((noinline)) static void to_scheduler(bool for_ever)
{
    Fiber *const me = running;
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &me->fake_stack, scheduler_stack, scheduler_stack_bytes);
    emulation_switch(&me->stack_pointer, scheduler.stack_pointer);
    __sanitizer_finish_switch_fiber(me->fake_stack, nullptr, nullptr);
}

__attribute__((noinline)) static void to_fiber(Fiber *fiber)
{
    running = fiber;
    threadIdx = fiber->place, blockIdx = fiber->block->index;
    blockDim = launched->blockDim, gridDim = launched->gridDim;
    poison(dependent && !fiber->waited);
    __sanitizer_start_switch_fiber(&scheduler.fake_stack, fiber->stack, STACK_BYTES);
    emulation_switch(&scheduler.stack_pointer, fiber->stack_pointer);
    __sanitizer_finish_switch_fiber(scheduler.fake_stack, nullptr, nullptr);
    running = nullptr;
}

static void start_fiber()
{
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    (*kernel)();
    ended(running);
    to_scheduler(true);
    abort();
}

static Fiber *new_fiber()
{
    Fiber *fiber;
    if (idle.empty()) {
        fiber = new Fiber;
        void *const stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED)
            abort();
        fiber->stack = (char *)stack;
    } else {
        fiber = idle.back();
        idle.pop_back();
    }
    __asan_unpoison_memory_region(fiber->stack + STACK_BYTES - 4096, 4096); // what the last one's end has left
    void **top = (void **)(fiber->stack + STACK_BYTES) - 2;
    *--top = nullptr; // where start_fiber would return to
    *--top = (void *)start_fiber;
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    fiber->stack_pointer = top;
    fiber->fake_stack = nullptr;
    fiber->waited = fiber->arrived_at_cluster = false;
    fiber->groups.clear();
    fiber->open.clear();
    threads_run++;
    return fiber;
}

void yield()
{
    make_ready(running);
    to_scheduler(false);
}

// ---- what threads do together ----

static void release(Meeting &meeting)
{
    for (Fiber *fiber : meeting.waiting) {
        fiber->result = meeting.sum;
        make_ready(fiber);
    }
    meeting.waiting.clear();
    meeting.sum = 0;
}

int barrier_sum(int value)
{
    Block &block = *running->block;
    block.barrier.sum += value;
    block.barrier.waiting.push_back(running);
    if ((int)block.barrier.waiting.size() == block.alive)
        release(block.barrier);
    to_scheduler(false);
    return running->result;
}

static void arrive(int barrier, int threads, bool waits)
{
    Meeting &meeting = running->block->named[barrier];
    meeting.sum++;
    if (waits)
        meeting.waiting.push_back(running);
    if (meeting.sum == threads)
        release(meeting);
    if (waits)
        to_scheduler(false);
}

void bar_sync(int barrier, int threads)
{
    arrive(barrier, threads, true);
}

void bar_arrive(int barrier, int threads)
{
    arrive(barrier, threads, false);
}

int lane()
{
    return running->thread % 32;
}

void exchange(unsigned int mask, uint64_t value, uint64_t values[32])
{
    Fiber *const me = running;
    Warp &warp = me->block->warps[me->thread / 32];
    const unsigned int bit = 1u << lane();
    if (!(mask & bit))
        fail("lane %d is not in its mask, %08x", lane(), mask);
    warp.arrived |= bit;
    warp.values[lane()] = value;
    warp.lanes[lane()] = me;
    if ((warp.arrived & mask) == mask) {
        warp.arrived &= ~mask;
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) {
                memcpy(warp.lanes[i]->values, warp.values, sizeof warp.values);
                make_ready(warp.lanes[i]);
            }
    }
    to_scheduler(false);
    memcpy(values, me->values, sizeof me->values);
}

static void ended(Fiber *fiber)
{
    Block &block = *fiber->block;
    Cluster &cluster = *block.cluster;
    some_waited = some_waited || fiber->waited;
    bool copies = !fiber->open.empty();
    for (const std::vector<Copy> &group : fiber->groups)
        copies = copies || !group.empty();
    if (copies)
        fail("a thread ends without waiting for its copies");
    block.alive--;
    cluster.alive--;
    if (block.alive > 0 && (int)block.barrier.waiting.size() == block.alive)
        release(block.barrier);
    if (cluster.alive > 0 && (int)cluster.barrier.waiting.size() == cluster.alive)
        release(cluster.barrier);
    if (block.alive == 0) { // its shared memory is gone, also for the others of its cluster
        for (const Store &store : stores)
            if (store.block == &block)
                fail("a block ends before what was sent to it has come");
        for (auto &variable : block.variables)
            free(variable.second.memory);
        block.variables.clear();
    }
    idle.push_back(fiber);
}

// ---- shared memory: addresses are of 10 bits of a site, 4 of a block's rank, and 18 of an offset ----

static Variable &variable_of(Block &block, uint32_t site, size_t bytes, size_t alignment)
{
    const auto found = block.variables.find(site);
    if (found != block.variables.end())
        return found->second;
    Variable variable = {nullptr, bytes};
    if (posix_memalign(&variable.memory, alignment, bytes > 0 ? bytes : 1) != 0)
        abort();
    memset(variable.memory, 0xff, bytes);
    return block.variables[site] = variable;
}

void *shared_memory(const char *site, size_t bytes, size_t alignment)
{
    if (site == nullptr)
        bytes = launched->dynamicSmemBytes, alignment = 1024;
    // 0 is the memory that a launch asks for: its addresses are those that wgmma's descriptors hold without a number.
    const uint32_t number = site == nullptr ? 0 : sites.emplace(site, (uint32_t)sites.size() + 1).first->second;
    if (number >= 1 << 10 || bytes > 1 << 18)
        fail("too many shared variables");
    return variable_of(*running->block, number, bytes, alignment).memory;
}

} // namespace emulation

using namespace emulation;

uint32_t shared_address(const void *pointer)
{
    for (const auto &[site, variable] : running->block->variables) {
        const char *const begin = (const char *)variable.memory;
        if (pointer >= begin && pointer < begin + variable.bytes)
            return site << 22 | running->block->rank << 18 | (uint32_t)((const char *)pointer - begin);
    }
    fail("not an address of shared memory");
}

void *shared_pointer(uint32_t address, size_t bytes)
{
    Block &block = *running->block->cluster->blocks[address >> 18 & 15];
    if (block.alive == 0)
        fail("shared memory of a block of the cluster that has ended");
    const auto found = block.variables.find(address >> 22);
    const size_t offset = address & ((1 << 18) - 1);
    if (found == block.variables.end())
        fail("shared memory of a block of the cluster that has not yet begun");
    if (offset + bytes > found->second.bytes)
        fail("bytes %zu to %zu of a shared variable of %zu", offset, offset + bytes, found->second.bytes);
    return (char *)found->second.memory + offset;
}

uint32_t mapa(uint32_t address, uint32_t rank)
{
    if (rank >= running->block->cluster->blocks.size())
        fail("block %u of a cluster of %zu", rank, running->block->cluster->blocks.size());
    return (address & ~(15u << 18)) | rank << 18;
}

uint32_t cluster_ctarank()
{
    return running->block->rank;
}

void cluster_arrive_aligned()
{
    if (running->arrived_at_cluster)
        fail("arrives twice at the barrier of the cluster");
    running->arrived_at_cluster = true;
}

void cluster_wait_aligned()
{
    if (!running->arrived_at_cluster)
        fail("waits for the cluster without having arrived");
    running->arrived_at_cluster = false;
    Cluster &cluster = *running->block->cluster;
    cluster.barrier.waiting.push_back(running);
    if ((int)cluster.barrier.waiting.size() == cluster.alive)
        release(cluster.barrier);
    to_scheduler(false);
}

// ---- copies ----

namespace emulation
{
void copy_later(uint32_t to, const void *from, int bytes, int valid)
{
    if (to % (uint32_t)bytes != 0 || (uintptr_t)from % (uintptr_t)bytes != 0)
        fail("cp.async of %d bytes, misaligned", bytes);
    running->open.push_back({to, from, bytes, valid});
}

static void make(const std::vector<Copy> &copies)
{
    for (const Copy &copy : copies) {
        char *const to = (char *)shared_pointer(copy.to, (size_t)copy.bytes);
        memcpy(to, copy.from, (size_t)copy.valid);
        memset(to + copy.valid, 0, (size_t)(copy.bytes - copy.valid));
    }
}

void commit_copies()
{
    running->groups.push_back(running->open);
    running->open.clear();
}

void wait_for_copies(int pending)
{
    std::vector<std::vector<Copy>> &groups = running->groups;
    while ((int)groups.size() > (pending < 0 ? 0 : pending)) {
        make(groups.front());
        groups.erase(groups.begin());
    }
    if (pending < 0) {
        make(running->open);
        running->open.clear();
    }
}
} // namespace emulation

static void end_phase(BarrierState &barrier)
{
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.expected & 0x7fff;
        barrier.phase ^= 1;
        for (Fiber *const fiber : waiting[&barrier])
            make_ready(fiber);
        waiting.erase(&barrier);
    }
}

static BarrierState &barrier_at(uint32_t address)
{
    return *(BarrierState *)shared_pointer(address, 8);
}

void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    barrier_at(barrier) = {(uint16_t)arrivals, (uint16_t)(arrivals & 0x7fff), 0, 0};
}

void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes)
{
    BarrierState &b = barrier_at(barrier);
    if (b.pending == 0)
        fail("more arrive at an mbarrier than it expects");
    b.bytes += (int32_t)bytes;
    b.pending--;
    end_phase(b);
}

void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    BarrierState &b = barrier_at(barrier);
    while (b.phase == parity) {
        waiting[&b].push_back(running);
        to_scheduler(false);
    }
}

void st_async_bytes(uint32_t to, const void *bytes, uint32_t count, uint32_t barrier)
{
    if (to % count != 0 || (to >> 18 & 15) != (barrier >> 18 & 15))
        fail("st.async: misaligned, or to another block than its barrier");
    shared_pointer(to, count), shared_pointer(barrier, 8);
    const char *const begin = (const char *)bytes;
    Block *const block = running->block->cluster->blocks[to >> 18 & 15].get();
    stores.push_back({block, to, barrier, std::vector<char>(begin, begin + count)});
}

// One of the stores on their way comes.
static void land()
{
    const size_t which = random_below(stores.size());
    const Store store = stores[which];
    stores.erase(stores.begin() + (long)which);
    const auto at = [&](uint32_t address) {
        return (char *)store.block->variables.at(address >> 22).memory + (address & ((1 << 18) - 1));
    };
    memcpy(at(store.to), store.bytes.data(), store.bytes.size());
    BarrierState &barrier = *(BarrierState *)at(store.barrier);
    barrier.bytes -= (int32_t)store.bytes.size();
    end_phase(barrier);
}

void wait_for_predecessor()
{
    running->waited = true;
    if (dependent)
        yield();
}

// ---- launches ----

namespace emulation
{
static std::unique_ptr<Cluster> start_cluster(const cudaLaunchConfig_t &config, int64_t first, int size)
{
    std::unique_ptr<Cluster> cluster(new Cluster);
    const dim3 b = config.blockDim, g = config.gridDim;
    for (int rank = 0; rank < size; rank++) {
        const int64_t index = first + rank;
        std::unique_ptr<Block> block(new Block);
        block->cluster = cluster.get();
        block->rank = (uint32_t)rank;
        block->index = {(unsigned int)(index % g.x), (unsigned int)(index / g.x % g.y),
                        (unsigned int)(index / g.x / g.y)};
        block->threads = block->alive = (int)(b.x * b.y * b.z);
        block->warps.resize((size_t)(block->threads + 31) / 32);
        for (int i = 0; i < block->threads; i++) {
            Fiber *const fiber = new_fiber();
            fiber->block = block.get();
            fiber->thread = i;
            const unsigned int t = (unsigned int)i;
            fiber->place = {t % b.x, t / b.x % b.y, t / b.x / b.y};
            make_ready(fiber);
        }
        cluster->threads += block->threads;
        cluster->alive += block->threads;
        cluster->blocks.push_back(std::move(block));
    }
    return cluster;
}

void launch(const cudaLaunchConfig_t &config, const std::function<void()> &run)
{
    if (running)
        fail("a kernel launches another");
    int cluster_size = 1;
    dependent = some_waited = false;
    for (unsigned int i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
            cluster_size = (int)config.attrs[i].val.clusterDim.x;
        else if (config.attrs[i].val.programmaticStreamSerializationAllowed)
            dependent = true;
    const int64_t blocks = (int64_t)config.gridDim.x * config.gridDim.y * config.gridDim.z;
    const int64_t threads = (int64_t)config.blockDim.x * config.blockDim.y * config.blockDim.z;
    if (blocks == 0 || config.gridDim.y > 65535 || config.gridDim.z > 65535 || threads == 0 || threads > 1024 ||
        config.gridDim.x % (unsigned int)cluster_size != 0 || cluster_size > 16 || config.dynamicSmemBytes > 227 << 10)
        fail("a launch of %lld blocks (clusters of %d), %lld threads, %zu bytes", (long long)blocks, cluster_size,
             (long long)threads, config.dynamicSmemBytes);
    launched = &config;
    kernel = &run;
    std::vector<std::unique_ptr<Cluster>> clusters;
    for (int64_t next = 0; next < blocks || !clusters.empty();) {
        for (size_t i = 0; i < clusters.size();)
            if (clusters[i]->alive == 0)
                clusters.erase(clusters.begin() + (long)i);
            else
                i++;
        while (next < blocks && (clusters.empty() || (int64_t)clusters.size() * cluster_size < resident_blocks)) {
            clusters.push_back(start_cluster(config, next, cluster_size));
            next += cluster_size;
        }
        while (!early.empty() || !ready.empty() || !stores.empty()) {
            std::vector<Fiber *> &next_ones = early.empty() ? ready : early;
            if (!stores.empty() && (next_ones.empty() || random_below(8) == 0)) {
                land();
                continue;
            }
            const size_t which = random_below(next_ones.size());
            Fiber *const fiber = next_ones[which];
            next_ones[which] = next_ones.back();
            next_ones.pop_back();
            const Cluster *const cluster = fiber->block->cluster;
            to_fiber(fiber);
            if (cluster->alive == 0 && next < blocks)
                break; // others may start
        }
        if (early.empty() && ready.empty())
            for (const auto &cluster : clusters)
                if (cluster->alive > 0)
                    for (const auto &block : cluster->blocks)
                        if (block->alive > 0)
                            fail("the %d threads of block %u wait for ever, %zu of them at its barrier", block->alive,
                                 block->index.x, block->barrier.waiting.size());
    }
    // The kernel after it waits for this one alone.
    if (dependent && !some_waited)
        fail("a dependent launch without wait_for_predecessor()");
    poison(false);
    dependent = false;
}
} // namespace emulation
