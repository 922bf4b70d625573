// attention's forward kernel on Hopper and its launcher, to be instantiated by dtype; attention/sm90/forward_bfloat16.cu
// says what they do.
#ifndef CUDA_OPS_ATTENTION_SM90_FORWARD_CUH
#define CUDA_OPS_ATTENTION_SM90_FORWARD_CUH

#include "attention/dropout.cuh"
#include "attention/sm90/added_mask.h"
#include "attention/sm90/band.h"
#include "attention/sm90/maps.h"
#include "attention/sm90/mask.h"
#include "attention/sm90/sequences.h"
#include "attention/sm90/sm90.h"
#include "common/common.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

// GROUPS consumer warpgroups of 64 queries each walk over blocks of N keys. Rows of queries and keys have D elements,
// those of values and the output VALUE_D.
template <typename T_, int D_, int VALUE_D_, int GROUPS_, int N_, bool DROPS_, bool PACKED_, MaskWay MASK>
struct ForwardTile {
    typedef T_ T;
    static constexpr bool DROPS = DROPS_, PACKED = PACKED_, MASKED = MASK == BOOLEAN_MASK, ADDED = MASK == ADDED_MASK;
    static constexpr int D = D_, VALUE_D = VALUE_D_, GROUPS = GROUPS_, N = N_;
    // Of long rows there is room for one tile of queries. Each warpgroup's are then a part with barriers of its own: the
    // next ones come as soon as it has no use for its place, while the other one is still at work.
    static constexpr bool SINGLE = D > 128;
    // Short rows: four warpgroups, of which each goes on to the next tile as soon as it is done. The strips of 64
    // queries that a tile has are dealt out to them one after the other.
    static constexpr bool SHORT = GROUPS == 4;
    // The producer tells consumers which tile there is.
    static constexpr bool ANNOUNCED = PACKED || SHORT;
    // Of short sequences a tile has one block of keys: two stages are too few to have the next ones on their way.
    static constexpr int KEY_STAGES = SHORT ? 8 : PACKED && D == 64 ? 3 : 2;
    static constexpr int QUERY_STAGES = SINGLE ? 1 : SHORT ? 3 : KEY_STAGES;
    static constexpr int QUERY_PARTS = SINGLE ? GROUPS : 1, QUERY_PLACES = QUERY_STAGES * QUERY_PARTS;
    static constexpr int M = 64 * GROUPS, THREADS = (GROUPS + 1) * WARPGROUP;
    static constexpr int COLUMNS = D / 64, VALUE_COLUMNS = VALUE_D / 64; // of 64 elements, SWIZZLE_ROW bytes
    static constexpr int BOX_BYTES = 64 * SWIZZLE_ROW, COLUMN_BYTES = N * SWIZZLE_ROW; // of queries, of keys
    static constexpr int QUERY_BYTES = GROUPS * COLUMNS * BOX_BYTES;
    static constexpr int KEY_BYTES = COLUMNS * COLUMN_BYTES, VALUE_BYTES = VALUE_COLUMNS * COLUMN_BYTES; // of a block
    static constexpr int KEYS_FROM = QUERY_STAGES * QUERY_BYTES, VALUES_FROM = KEYS_FROM + KEY_STAGES * KEY_BYTES;
    static constexpr int BARRIERS_FROM = VALUES_FROM + KEY_STAGES * VALUE_BYTES;
    static constexpr int TILE_BYTES = 48, TILES_FROM = BARRIERS_FROM + (2 * QUERY_PLACES + 4 * KEY_STAGES) * 8;
    static constexpr int SHARED_BYTES = TILES_FROM + (ANNOUNCED ? QUERY_PLACES * TILE_BYTES : 0) + SWIZZLE_ATOM;
    static_assert(TILES_FROM % 16 == 0, "read by 16 bytes");
    static constexpr int REGISTERS = GROUPS == 2 ? 232 : GROUPS == 3 ? 160 : 112;
    static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : GROUPS == 3 ? 32 : 24;
    // Two warpgroups have registers for the weights of two blocks: those of one are made beside the other's product.
    static constexpr bool AHEAD = GROUPS == 2 && VALUE_D / 2 + N <= 192 && !DROPS && MASK == NO_MASK;
    static_assert(2 <= GROUPS && GROUPS <= 4, "what the registers are divided by");
    static_assert(!SHORT || (!PACKED && D == 64), "the words that announce a tile, and a box a strip");
    // Who gives a stage back: a warpgroup's first thread. No turns hold the warps of SHORT tiles together: there each
    // gives back what it has waited for, so that no phase of a barrier can be over before it has seen it.
    static constexpr int RELEASING = SHORT ? WARP_SIZE : WARPGROUP, RELEASES = GROUPS * (WARPGROUP / RELEASING);
    static_assert(N % 16 == 0 && COLUMN_BYTES % SWIZZLE_ATOM == 0, "whole products, aligned to the swizzle");
    static_assert(VALUE_D <= D, "the output takes the queries' place");
    static_assert(SHARED_BYTES <= 232448, "an SM's shared memory");
};

struct ForwardWork {
    float *logsumexp;
    Band band;
    int heads, group;  // query heads, and how many of them share a key head
    int tiles_m;       // of a head
    int section;       // heads that are walked together, so that their keys and values stay in the L2
    int all_heads;     // batch * heads
    int together;      // tiles of a head that follow each other (order.h)
    int rows_before;   // of the first tile before the first query
    Schedule schedule; // of tiles, in sections of so many heads
    float scale_log2;  // scale * log2(e)
    DropoutWork dropout;
    PackedWork packed; // of packed sequences, which have no band, section or schedule of the whole call
    int whole;         // SHORT: heads of which a block takes all tiles before others come in sections
    MaskBits mask;     // where MASKED
    AddedMask added;   // where ADDED
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The keys that a tile's queries see, in blocks of N: `count` of them up to `last`, which are walked downwards, so that
// those that the diagonal and the end of the keys cut come first.
template <bool PACKED>
struct ForwardCoordinates {
    int first_row, head, batch, all_head;
    int last, count;
    int strips, first_group; // where SHORT: those of 64 queries, and which warpgroup has the first one
    PackedSequence sequence; // where PACKED

    __device__ __forceinline__ const Band &band(const ForwardWork &work) const
    {
        if constexpr (PACKED)
            return sequence.band;
        else
            return work.band;
    }
    __device__ __forceinline__ RowsPlace<PACKED> queries() const
    {
        if constexpr (PACKED)
            return {sequence.first_query, sequence.band.queries};
        else
            return {batch};
    }
    __device__ __forceinline__ RowsPlace<PACKED> keys() const
    {
        if constexpr (PACKED)
            return {sequence.first_key, sequence.band.keys};
        else
            return {batch};
    }
};

// Tile m of a head.
template <typename C>
__device__ __forceinline__ void place_tile(ForwardCoordinates<C::PACKED> &tile, const ForwardWork &work, int m,
                                           int all_head)
{
    tile.all_head = all_head;
    tile.batch = tile.all_head / work.heads;
    tile.head = tile.all_head - tile.batch * work.heads;
    tile.first_row = m * C::M - work.rows_before;
    const int last_row = min(tile.first_row + C::M, work.band.queries) - 1;
    if (C::SHORT) {
        tile.first_row = max(tile.first_row, 0);
        tile.strips = (last_row - tile.first_row) / 64 + 1;
    }
    const Blocks keys = blocks_of_keys(work.band, max(tile.first_row, 0), last_row, C::N);
    tile.last = keys.last, tile.count = keys.count;
}

// The round-th tile of this block.
template <typename C>
__device__ __forceinline__ bool forward_tile(ForwardCoordinates<C::PACKED> &tile, const ForwardWork &work, int round)
{
    const int whole_rounds = C::SHORT ? work.whole / (int)gridDim.x * work.tiles_m : 0;
    if (C::SHORT && round < whole_rounds) {
        const TileOfQueries found = tile_of_whole_head(round, (int)blockIdx.x, (int)gridDim.x, work.tiles_m);
        place_tile<C>(tile, work, found.m, found.head);
        return true;
    }
    int section, rank;
    if (!scheduled_item(C::PACKED ? work.packed.schedule->schedule : work.schedule, round - whole_rounds, section,
                        rank))
        return false;
    if (C::PACKED)
        tile = {}; // so that nothing of the one before is kept
    tile.count = -1;
    if (rank < 0)
        return true;
    const int of_section = C::PACKED ? work.packed.schedule->section : work.section;
    const int first_head = (C::SHORT ? work.whole : 0) + section * of_section;
    const int heads = min(of_section, work.all_heads - first_head);
    if constexpr (C::PACKED) {
        const int place = rank / heads;
        const PackedTile found = work.packed.tiles[place];
        tile.sequence = work.packed.sequences[found.sequence];
        tile.head = tile.all_head = first_head + rank - place * heads;
        const Band &band = tile.sequence.band;
        tile.first_row = found.number * C::M - rows_before(band.queries, C::M);
        const int last_row = min(tile.first_row + C::M, band.queries) - 1;
        const Blocks keys = blocks_of_keys(band, max(tile.first_row, 0), last_row, C::N);
        tile.last = keys.last, tile.count = keys.count;
        return true;
    }
    const TileOfQueries found = tile_of_queries(rank, heads, work.tiles_m, work.together);
    place_tile<C>(tile, work, found.m, first_head + found.head);
    return true;
}

struct ForwardShared {
    uint32_t queries, keys, values, tiles;
    uint32_t query_full, query_empty, key_full, key_empty, value_full, value_empty;
};

// A position in a ring of stages.
template <int STAGES>
struct Ring {
    int stage, phase;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

template <typename C, int COLUMNS>
__device__ __forceinline__ void load_block(uint32_t to, const CUtensorMap *map, uint32_t full, uint32_t empty,
                                           Ring<C::KEY_STAGES> &ring, int row, int head,
                                           const RowsPlace<C::PACKED> &place)
{
    constexpr int BYTES = COLUMNS * C::COLUMN_BYTES;
    mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    mbarrier_arrive_expect_tx(full + 8 * ring.stage, BYTES);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
        load_rows(to + ring.stage * BYTES + column * C::COLUMN_BYTES, map, full + 8 * ring.stage, 64 * column, row,
                  head, place);
    ring.advance();
}

// A tile travels with its queries, so that the producer alone looks for it, ahead. count < 0: there are no more.
// Consumers have no use for first_key.
template <typename C>
__device__ __forceinline__ void announce_tile(const ForwardCoordinates<C::PACKED> &tile, const ForwardShared &s,
                                              int place)
{
    const uint32_t to = s.tiles + place * C::TILE_BYTES;
    const auto tell = [to](auto... words) {
        uint32_t at = to;
        ((st_shared(at, (uint32_t)words), at += 4), ...);
    };
    if constexpr (C::PACKED) {
        const Band &band = tile.sequence.band;
        tell(tile.first_row, tile.head, tile.last, tile.count, band.queries, band.keys, band.low, band.high,
             tile.sequence.first_query);
    } else {
        tell(tile.first_row, tile.strips, tile.last, tile.count, tile.first_group, tile.head, tile.batch,
             tile.all_head);
    }
}
template <typename C>
__device__ __forceinline__ bool announced_tile(ForwardCoordinates<C::PACKED> &tile, const ForwardShared &s, int place)
{
    const uint32_t from = s.tiles + place * C::TILE_BYTES;
    uint32_t first_row, second, last, count;
    ld_shared_v4(first_row, second, last, count, from);
    tile.first_row = (int)first_row, tile.last = (int)last, tile.count = (int)count;
    if constexpr (C::PACKED) {
        uint32_t queries, keys, low, high, first_query;
        ld_shared_v4(queries, keys, low, high, from + 16);
        ld_shared(first_query, from + 32);
        tile.head = (int)second;
        tile.sequence.band = {(int)queries, (int)keys, (int)low, (int)high};
        tile.sequence.first_query = (int)first_query;
    } else {
        uint32_t first_group;
        ld_shared(first_group, from + 16);
        tile.strips = (int)second, tile.first_group = (int)first_group;
    }
    return tile.count >= 0;
}
// Of SHORT tiles what is wanted last, and would take registers until then.
template <typename C>
__device__ __forceinline__ void announced_head(ForwardCoordinates<C::PACKED> &tile, const ForwardShared &s, int place)
{
    uint32_t first_group, head, batch, all_head;
    ld_shared_v4(first_group, head, batch, all_head, s.tiles + place * C::TILE_BYTES + 16);
    tile.head = (int)head, tile.batch = (int)batch, tile.all_head = (int)all_head;
}

// The producer thread. A block's values are wanted one product of queries and keys later than its keys.
template <typename C>
__device__ __forceinline__ void forward_produce(const ForwardWork &work, const CUtensorMap *map_query,
                                                const CUtensorMap *map_key, const CUtensorMap *map_value,
                                                const ForwardShared &s)
{
    Ring<C::QUERY_STAGES> query_ring = {0, 0};
    Ring<C::KEY_STAGES> key_ring = {0, 0}, value_ring = {0, 0};
    ForwardCoordinates<C::PACKED> tile = {};
    int next_group = 0;
    const auto load_queries = [&]() {
        constexpr int BOXES = C::GROUPS * C::COLUMNS / C::QUERY_PARTS; // of a part
        const int none = max(-tile.first_row, 0) / 64 * C::COLUMNS;    // boxes before the first query
        for (int part = 0; part < C::QUERY_PARTS; part++) {
            const int place = query_ring.stage * C::QUERY_PARTS + part;
            const int end = C::SHORT ? tile.strips : (part + 1) * BOXES;
            const int first = tile.count > 0 ? max(none, part * BOXES) : end;
            const uint32_t full = s.query_full + 8 * place;
            mbarrier_wait(s.query_empty + 8 * place, query_ring.phase ^ 1);
            if constexpr (C::ANNOUNCED)
                announce_tile<C>(tile, s, place);
            mbarrier_arrive_expect_tx(full, max(end - first, 0) * C::BOX_BYTES);
#pragma unroll 1
            for (int box = first; box < end; box++)
                load_rows(s.queries + query_ring.stage * C::QUERY_BYTES + box * C::BOX_BYTES, map_query, full,
                          box % C::COLUMNS * 64, tile.first_row + box / C::COLUMNS * 64, tile.head, tile.queries());
        }
        query_ring.advance();
    };
    const auto load_keys = [&](int row) {
        load_block<C, C::COLUMNS>(s.keys, map_key, s.key_full, s.key_empty, key_ring, row, tile.head / work.group,
                                  tile.keys());
    };
    const auto load_values = [&](int row) {
        load_block<C, C::VALUE_COLUMNS>(s.values, map_value, s.value_full, s.value_empty, value_ring, row,
                                        tile.head / work.group, tile.keys());
    };
    for (int round = 0; forward_tile<C>(tile, work, round); round++) {
        if (tile.count < 0)
            continue;
        if (C::SHORT) {
            // A head whose strips are as many for each begins at the next one, since later strips may see more keys.
            tile.first_group = next_group;
            const bool even = tile.first_row == 0 && (work.band.queries + 63) / 64 % C::GROUPS == 0;
            next_group = (next_group + tile.strips + even) % C::GROUPS;
        }
        // Queries whose place is still the tile before's come behind the keys and values that there is room for.
        const int queries_after = C::SINGLE ? min(1, tile.count - 1) : -1;
        if (queries_after < 0)
            load_queries();
        if constexpr (C::ADDED)
            fetch_mask<typename C::T>(work.added, tile.batch, tile.head);
        int row = tile.last * C::N;
#pragma unroll 1
        for (int i = 0; i < tile.count; i++, row -= C::N) {
            load_keys(row);
            if (i > 0)
                load_values(row + C::N);
            if (i == queries_after)
                load_queries();
        }
        if (tile.count > 0)
            load_values(row + C::N);
    }
    if constexpr (C::ANNOUNCED) {
        tile = {};
        tile.count = -1;
        load_queries();
    }
}

// s = queries times keys^T, of a warpgroup's 64 queries.
template <typename C>
__device__ __forceinline__ void multiply_keys(float (&s)[C::N / 2], uint64_t queries, uint64_t keys)
{
    wgmma_forget(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::D / 16; k++)
        wgmma<typename C::T, C::N, 0, 0>(s, wgmma_advance(queries, k / 4 * C::BOX_BYTES + k % 4 * 32),
                                         wgmma_advance(keys, k / 4 * C::COLUMN_BYTES + k % 4 * 32), k > 0);
    wgmma_commit_group();
}
// o += p times values.
template <typename C>
__device__ __forceinline__ void multiply_values(float (&o)[C::VALUE_D / 2], uint32_t (&p)[C::N / 16][4],
                                                uint64_t values)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::N / 16; k++)
        wgmma<typename C::T, C::VALUE_D, 1>(o, p[k], wgmma_advance(values, k * 2 * SWIZZLE_ATOM), 1);
    wgmma_commit_group();
}

// The softmax's state of a thread's two rows: the shift that is subtracted from scaled scores, in units of log2, or where a
// mask is added natural ones (-inf before there is one), and the sum of this thread's exponentials.
struct SoftmaxRows {
    float shift[2], sum[2];
};

template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high)
{
    return is_bfloat16<T> ? cvt_rn_bf16x2_f32(high, low) : cvt_rn_f16x2_f32(high, low);
}

// Zeros in place of dropped weights of 16 keys. row, column: dropout's, of the warp's first query and of these keys.
__device__ __forceinline__ void drop_weights(uint32_t (&p)[4], const DropoutSeed &seed, uint32_t row, uint32_t column,
                                             uint32_t threshold)
{
    uint32_t words[4];
    dropout_words(words, seed, row, column);
#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] &= (dropout_keeps(words[i], 0, threshold) ? 0xffff : 0) |
                (dropout_keeps(words[i], 1, threshold) ? 0xffff0000 : 0);
}

// p = exponentials of the scores less the shifts, as the left operand of the values' product, and this thread's sums of
// them. The scores stay. Of a row that has no shift yet they are infinite or NaN.
template <typename C, typename Drop>
__device__ __forceinline__ void weigh_block(uint32_t (&p)[C::N / 16][4], float (&sums)[2], const float (&s)[C::N / 2],
                                            const float (&shift)[2], float scale, const Drop &drop)
{
    float sum[2][2] = {};
#pragma unroll
    for (int k = 0; k < C::N / 16; k++) {
        float weights[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = s[8 * k + i], from = shift[i / 2 % 2];
            weights[i] = ex2_approx_ftz(C::ADDED ? (x - from) * scale : fmaf(x, scale, -from));
            sum[i / 2 % 2][i % 2] += weights[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[k][i] = pack_two<typename C::T>(weights[2 * i], weights[2 * i + 1]);
        drop(p[k], k, true);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        sums[r] = sum[r][0] + sum[r][1];
}

// No maximum is looked for while this thread's exponentials add up to a number that T has room for, and holds as
// precisely as 1; float32 has room for the products with values up to 2^80 or so. Infinities and NaN are too large.
template <typename T>
__device__ __forceinline__ bool is_large(float sum)
{
    return !(sum <= (is_bfloat16<T> ? 16777216.0f : 32768.0f));
}

// Of rows of which one of the four lanes' sums is too large the maximum becomes the shift; `alpha` is what earlier sums
// are to be multiplied by. Other rows stay, whatever their neighbours in the warp do, so that no row's bits depend on
// them. `shift`: what is to be subtracted now, also where nothing has been seen.
template <typename C>
__device__ __forceinline__ void move_shifts(SoftmaxRows &rows, float (&shift)[2], float (&alpha)[2],
                                            const float (&sums)[2], const float (&s)[C::N / 2], float scale)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = s[2 * r];
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            if (i / 2 % 2 == r)
                most = fmaxf(most, s[i]);
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2)) * (C::ADDED ? 1.0f : scale);
        int large = is_large<typename C::T>(sums[r]);
        large |= __shfl_xor_sync(FULL_WARP, large, 1);
        large |= __shfl_xor_sync(FULL_WARP, large, 2);
        const float before = rows.shift[r];
        const bool moves = large && most > before; // not where both are -inf, and not to NaN
        rows.shift[r] = moves ? most : before;
        alpha[r] = moves ? ex2_approx_ftz((before - most) * (C::ADDED ? scale : 1.0f)) : 1.0f;
        rows.sum[r] *= alpha[r];
        shift[r] = rows.shift[r] == -INFINITY ? 0.0f : rows.shift[r];
    }
}

// -inf where the thread's rows, `row` and row + 8, do not see a key. column: the key of s[0]. BITS: a row's scores are
// bits of a word first, which is fewer instructions.
template <int N, bool BITS>
__device__ __forceinline__ void mask_scores(float (&s)[N / 2], const Band &band, int row, int column)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int high = min(row + 8 * r + band.high, band.keys - 1) - column, low = row + 8 * r + band.low - column;
        const uint32_t seen = BITS ? columns_between(low, high) : 0;
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (i / 2 % 2 == r) {
                const int at = i / 4 * 8 + i % 2;
                const bool hidden = BITS ? !(seen >> (i / 4 * 2 + i % 2) & 1) : at > high || at < low;
                s[i] = hidden ? -INFINITY : s[i];
            }
    }
}

// The same where a mask hides a key from the thread's rows, which have these words of keys from the block's first on.
// column: of s[0] in the block.
template <int N>
__device__ __forceinline__ void hide_scores(float (&s)[N / 2], const uint32_t *near, const uint32_t *far, int column)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t words[N / 32];
#pragma unroll
        for (int i = 0; i < N / 32; i += 2) {
            const uint2 two = *reinterpret_cast<const uint2 *>((r ? far : near) + i);
            words[i] = two.x >> column, words[i + 1] = two.y >> column;
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            if (i / 2 % 2 == r) {
                const int at = i / 4 * 8 + i % 2;
                s[i] = words[at / 32] >> at % 32 & 1 ? s[i] : -INFINITY;
            }
    }
}

static constexpr int ORDER_BARRIER = 1, STORE_BARRIER = 4; // named barriers, one a consumer warpgroup

// Ping-pong: the warpgroups issue their products in turns, so that one's exponentials run beside the other's products.
// Not of SHORT tiles, whose warpgroups may be at different ones.
template <typename C>
__device__ __forceinline__ void wait_for_turn(int group)
{
    if (!C::SHORT)
        bar_sync<2 * WARPGROUP>(ORDER_BARRIER + group);
}
template <typename C>
__device__ __forceinline__ void pass_turn(int group)
{
    if (!C::SHORT)
        bar_arrive(ORDER_BARRIER + (group + 1 == C::GROUPS ? 0 : group + 1), 2 * WARPGROUP);
}

// The blocks of a tile that the 64 queries of a warpgroup see: `count` from `last` downwards, and how many of the tile's
// come before and after them.
struct OwnBlocks {
    int last, count, before, after;
};

template <typename C>
__device__ __forceinline__ OwnBlocks own_blocks(const ForwardCoordinates<C::PACKED> &tile, const Band &band, int top)
{
    const int low = max(top + band.low, 0), high = min(min(top + 64, band.queries) - 1 + band.high, band.keys - 1);
    OwnBlocks own;
    own.last = high / C::N;
    own.count = 0 <= top && top < band.queries && low <= high ? own.last - low / C::N + 1 : 0;
    own.before = own.count > 0 ? tile.last - own.last : tile.count;
    own.after = tile.count - own.before - own.count;
    return own;
}

template <typename C>
__device__ __forceinline__ void release_block(uint32_t empty, Ring<C::KEY_STAGES> &ring, int thread)
{
    if (thread % C::RELEASING == 0)
        mbarrier_arrive(empty + 8 * ring.stage);
    ring.advance();
}
template <typename C>
__device__ __forceinline__ void skip_keys(const ForwardShared &s, Ring<C::KEY_STAGES> &ring, int group, int thread)
{
    mbarrier_wait(s.key_full + 8 * ring.stage, ring.phase);
    wait_for_turn<C>(group);
    pass_turn<C>(group);
    release_block<C>(s.key_empty, ring, thread);
}
template <typename C>
__device__ __forceinline__ void skip_values(const ForwardShared &s, Ring<C::KEY_STAGES> &ring, int thread)
{
    mbarrier_wait(s.value_full + 8 * ring.stage, ring.phase);
    release_block<C>(s.value_empty, ring, thread);
}

// The output of a warpgroup's 64 queries takes their place, which it has read, and is copied out.
template <typename C>
__device__ __forceinline__ void
store_output(const ForwardWork &work, const CUtensorMap *map_output, const ForwardCoordinates<C::PACKED> &tile,
             const SoftmaxRows &rows, float (&o)[C::VALUE_D / 2], uint32_t boxes, int group, int strip, int thread)
{
    typedef typename C::T T;
    const int warp = thread / WARP_SIZE, lane = thread % WARP_SIZE, top = tile.first_row + 64 * strip;
    // The sums of a row's four lanes, and the quotients. A row without keys has a sum of 0.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        const float inverse = sum == 0.0f ? 0.0f : (C::DROPS ? work.dropout.scale : 1.0f) / sum;
#pragma unroll
        for (int j = 0; j < C::VALUE_D / 2; j++)
            if (j / 2 % 2 == r)
                o[j] *= inverse;
        const int at = top + 16 * warp + lane / 4 + 8 * r;
        if (lane % 4 == 0 && 0 <= at && at < tile.band(work).queries)
            work.logsumexp[C::PACKED ? (int64_t)tile.head * work.packed.query_rows + tile.sequence.first_query + at
                                     : (int64_t)tile.all_head * work.band.queries + at] =
                sum == 0.0f ? -INFINITY
                : C::ADDED  ? rows.shift[r] + lg2_approx_ftz(sum) * 0.69314718055994531f
                            : (rows.shift[r] + lg2_approx_ftz(sum)) * 0.69314718055994531f;
    }
    const int local = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < C::VALUE_D / 16; i++) {
        const float *const x = o + 8 * i;
        const int vector = (2 * i + lane / 16) % 8 ^ local % 8;
        stmatrix_x4(boxes + i / 4 * C::BOX_BYTES + local * SWIZZLE_ROW + vector * 16, pack_two<T>(x[0], x[1]),
                    pack_two<T>(x[2], x[3]), pack_two<T>(x[4], x[5]), pack_two<T>(x[6], x[7]));
    }
    fence_proxy_async();
    bar_sync<WARPGROUP>(STORE_BARRIER + group);
    if (thread == 0 && top >= 0) {
#pragma unroll
        for (int column = 0; column < C::VALUE_COLUMNS; column++)
            store_rows(map_output, boxes + column * C::BOX_BYTES, 64 * column, top, tile.head, tile.queries());
        bulk_commit_group();
    }
}

// A consumer warpgroup. A step issues the scores of the next block, and then the values' product of the one before, so
// that the tensor cores have work during the exponentials. (To do the same from a tile to the next was slower.)
//
// ptxas moves a wait for products to the front of its basic block. What keeps the one for the values' product behind
// the exponentials, where weights have a place of their own, is the branch on whether shifts move.
template <typename C>
__device__ __forceinline__ void forward_consume(const ForwardWork &work, const CUtensorMap *map_output,
                                                const ForwardShared &s)
{
    typedef typename C::T T;
    const int group = warp_uniform(threadIdx.x / WARPGROUP) - 1, thread = threadIdx.x % WARPGROUP;
    int strip = group; // of the tile's queries
    const int lane = thread % WARP_SIZE, my_row = (C::SHORT ? 0 : 64 * group) + 16 * (thread / WARP_SIZE) + lane / 4;
    const uint32_t my_queries = s.queries + (C::SHORT ? 0 : group) * C::COLUMNS * C::BOX_BYTES;
    const uint64_t queries_first = wgmma_descriptor(my_queries, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t keys_first = wgmma_descriptor(s.keys, WGMMA_SWIZZLE_128, SWIZZLE_ATOM);
    const uint64_t values_first = wgmma_descriptor(s.values, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
    Ring<C::QUERY_STAGES> query_ring = {0, 0};
    Ring<C::KEY_STAGES> key_ring = {0, 0}, value_ring = {0, 0};
    float scores[C::N / 2], o[C::VALUE_D / 2];
    uint32_t p[C::N / 16][4];
    int stored = -1; // the place of queries that is being copied out
    const auto release_stored = [&]() {
        if (stored >= 0 && thread == 0) {
            bulk_wait_group_read<0>();
            mbarrier_arrive(s.query_empty + 8 * stored);
        }
        stored = -1;
    };
    const auto query_place = [&]() { return C::SINGLE ? group : query_ring.stage; };
    const auto strip_from = [&]() {
        return query_ring.stage * C::QUERY_BYTES + (C::SHORT ? strip * C::COLUMNS * C::BOX_BYTES : 0);
    };
    const DropoutSeed seed(C::DROPS ? work.dropout.philox : cuda_ops_philox_state{});
    if (group == C::GROUPS - 1)
        pass_turn<C>(group);

    const auto next_tile = [&](ForwardCoordinates<C::PACKED> &tile, int round) {
        if constexpr (C::ANNOUNCED) {
            mbarrier_wait(s.query_full + 8 * query_place(), query_ring.phase);
            return announced_tile<C>(tile, s, query_place());
        } else {
            return forward_tile<C>(tile, work, round);
        }
    };
    const auto issue_keys = [&]() {
        multiply_keys<C>(scores, wgmma_advance(queries_first, strip_from()),
                         wgmma_advance(keys_first, key_ring.stage * C::KEY_BYTES));
    };
    const auto issue_values = [&](uint32_t(&weights)[C::N / 16][4]) {
        mbarrier_wait(s.value_full + 8 * value_ring.stage, value_ring.phase);
        wgmma_pin(o);
        wgmma_pin(weights);
        multiply_values<C>(o, weights, wgmma_advance(values_first, value_ring.stage * C::VALUE_BYTES));
    };
    // After the wait for the product.
    const auto have_scores = [&]() {
        wgmma_pin(scores);
        release_block<C>(s.key_empty, key_ring, thread);
    };
    const auto have_output = [&](uint32_t(&weights)[C::N / 16][4]) {
        wgmma_pin(o);
        wgmma_pin(weights);
        release_block<C>(s.value_empty, value_ring, thread);
    };
    const auto skip_blocks = [&](int count) {
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            skip_keys<C>(s, key_ring, group, thread);
            skip_values<C>(s, value_ring, thread);
        }
    };
    ForwardCoordinates<C::PACKED> tile;
    for (int round = 0; next_tile(tile, round); round++) {
        if (tile.count < 0)
            continue;
        if constexpr (C::SHORT) {
            strip = group - tile.first_group + (group < tile.first_group ? C::GROUPS : 0);
            if (strip >= tile.strips) {
                release_stored();
                bar_sync<WARPGROUP>(STORE_BARRIER + group); // all know that there is none
                if (thread == 0)
                    mbarrier_arrive(s.query_empty + 8 * query_place());
                skip_blocks(tile.count);
                query_ring.advance();
                continue;
            }
            if (C::DROPS || C::MASKED || C::ADDED)
                announced_head<C>(tile, s, query_place());
        }
        const int top = tile.first_row + 64 * strip;
        const Band &band = tile.band(work);
        const OwnBlocks own = own_blocks<C>(tile, band, top);
        const auto mask_block = [&](int key) {
            if constexpr (C::ADDED)
                add_mask_to_rows<T, C::N>(scores, work.added, tile.batch, tile.head,
                                          (C::SHORT ? top : tile.first_row) + my_row, band.queries - 1,
                                          key + lane % 4 * 2, band.keys - 2);
            if (key + C::N - 1 > min(top + band.high, band.keys - 1) || key < top + 63 + band.low)
                mask_scores<C::N, C::SHORT>(scores, band, (C::SHORT ? top : tile.first_row) + my_row,
                                            key + lane % 4 * 2);
            if constexpr (C::MASKED) {
                const int row = (C::SHORT ? top : tile.first_row) + my_row, last = band.queries - 1;
                const uint32_t *const words = work.mask.of(tile.all_head, work.heads) + key / 32;
                hide_scores<C::N>(scores, words + (int64_t)min(max(row, 0), last) * work.mask.row,
                                  words + (int64_t)min(max(row + 8, 0), last) * work.mask.row, lane % 4 * 2);
            }
        };
        const uint32_t dropout_row =
            (uint32_t)cuda_ops_attention_dropout_row(tile.all_head, work.band.queries, top + thread / WARP_SIZE * 16);
        SoftmaxRows rows = {{-INFINITY, -INFINITY}, {0, 0}};
        float alpha[2];
        int key = own.last * C::N;
        // Beside the exponentials, if there are registers for it.
        const auto drop = [&](uint32_t(&weights)[4], int k, bool beside) {
            if (C::DROPS && beside == (C::GROUPS == 2))
                drop_weights(weights, seed, dropout_row, key / 16 + k, work.dropout.threshold);
        };
        // The scores' weights, and whether earlier sums are to be multiplied by alpha.
        const auto weigh = [&](uint32_t(&weights)[C::N / 16][4], bool first) {
            float sums[2] = {INFINITY, INFINITY}, shift[2];
            if (!first)
                weigh_block<C>(weights, sums, scores, rows.shift, work.scale_log2, drop);
            const bool moves = first || __any_sync(FULL_WARP, is_large<T>(sums[0]) || is_large<T>(sums[1]));
            if (moves) {
                move_shifts<C>(rows, shift, alpha, sums, scores, work.scale_log2);
                weigh_block<C>(weights, sums, scores, shift, work.scale_log2, drop);
            }
            rows.sum[0] += sums[0], rows.sum[1] += sums[1];
#pragma unroll
            for (int k = 0; k < C::N / 16; k++)
                drop(weights[k], k, false);
            return moves;
        };
        // The first block's weights.
        const auto weigh_first = [&](uint32_t(&weights)[C::N / 16][4]) {
            mask_block(key);
            weigh(weights, true);
            release_stored(); // the output of the tile before has long been read by now
#pragma unroll 1
            for (int i = 0; i < own.before; i++)
                skip_values<C>(s, value_ring, thread);
        };
        // The next block's weights, and the values' product of the one before.
        const auto step = [&](uint32_t(&before)[C::N / 16][4], uint32_t(&next)[C::N / 16][4]) {
            key -= C::N;
            mbarrier_wait(s.key_full + 8 * key_ring.stage, key_ring.phase);
            wait_for_turn<C>(group);
            wgmma_pin(o);
            wgmma_pin(before);
            issue_keys();
            issue_values(before);
            pass_turn<C>(group);
            wgmma_wait_group<C::AHEAD ? 1 : 0>();
            have_scores();
            if (!C::AHEAD)
                have_output(before);
            mask_block(key);
            const bool moves = weigh(next, false);
            if (C::AHEAD) {
                wgmma_wait_group<0>();
                have_output(before);
            }
            if (moves) {
#pragma unroll
                for (int j = 0; j < C::VALUE_D / 2; j++)
                    o[j] *= alpha[j / 2 % 2];
            }
        };
#pragma unroll
        for (int i = 0; i < C::VALUE_D / 2; i++)
            o[i] = 0;
        if (!C::ANNOUNCED)
            mbarrier_wait(s.query_full + 8 * query_place(), query_ring.phase);
        if (own.count > 0) {
#pragma unroll 1
            for (int i = 0; i < own.before; i++)
                skip_keys<C>(s, key_ring, group, thread);
            mbarrier_wait(s.key_full + 8 * key_ring.stage, key_ring.phase);
            wait_for_turn<C>(group);
            issue_keys();
            pass_turn<C>(group);
            wgmma_wait_group<0>();
            have_scores();
            int left = own.count - 1;
            if constexpr (C::AHEAD) {
                uint32_t other[C::N / 16][4];
                if (left % 2 == 0) {
                    weigh_first(p);
                } else {
                    weigh_first(other);
                    step(other, p);
                }
#pragma unroll 1
                for (left /= 2; left > 0; left--) {
                    step(p, other);
                    step(other, p);
                }
            } else {
                weigh_first(p);
#pragma unroll 1
                for (; left > 0; left--)
                    step(p, p);
            }
            issue_values(p);
            wgmma_wait_group<0>();
            have_output(p);
        } else {
            release_stored();
            skip_blocks(own.before);
        }
        skip_blocks(own.after);
        if (C::SHORT)
            announced_head<C>(tile, s, query_place());
        store_output<C>(work, map_output, tile, rows, o, my_queries + strip_from(), group, strip, thread);
        stored = query_place();
        if (C::SINGLE)
            release_stored();
        query_ring.advance();
    }
    if (thread == 0)
        bulk_wait_group_read<0>();
}

#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_sm90_forward_kernel(const __grid_constant__ CUtensorMap map_query,
                                  const __grid_constant__ CUtensorMap map_key,
                                  const __grid_constant__ CUtensorMap map_value,
                                  const __grid_constant__ CUtensorMap map_output,
                                  const __grid_constant__ ForwardWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const uint32_t first = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    ForwardShared s;
    s.queries = first, s.keys = first + C::KEYS_FROM, s.values = first + C::VALUES_FROM;
    s.query_full = first + C::BARRIERS_FROM, s.query_empty = s.query_full + 8 * C::QUERY_PLACES;
    s.key_full = s.query_empty + 8 * C::QUERY_PLACES, s.key_empty = s.key_full + 8 * C::KEY_STAGES;
    s.value_full = s.key_empty + 8 * C::KEY_STAGES, s.value_empty = s.value_full + 8 * C::KEY_STAGES;
    s.tiles = first + C::TILES_FROM;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_query);
        prefetch_tensormap(&map_key);
        prefetch_tensormap(&map_value);
        prefetch_tensormap(&map_output);
        for (int place = 0; place < C::QUERY_PLACES; place++) {
            mbarrier_init(s.query_full + 8 * place, 1);
            mbarrier_init(s.query_empty + 8 * place, C::GROUPS / C::QUERY_PARTS);
        }
        for (int stage = 0; stage < C::KEY_STAGES; stage++) {
            mbarrier_init(s.key_full + 8 * stage, 1);
            mbarrier_init(s.value_full + 8 * stage, 1);
            mbarrier_init(s.key_empty + 8 * stage, C::RELEASES);
            mbarrier_init(s.value_empty + 8 * stage, C::RELEASES);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (C::DROPS && blockIdx.x == 0 && threadIdx.x / WARP_SIZE == 1) {
        const DropoutSeed seed(work.dropout.philox);
        if (threadIdx.x % WARP_SIZE == 0)
            seed.store(work.dropout.state);
    }
    if (threadIdx.x / WARPGROUP == 0) {
        setmaxnreg_dec<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            forward_produce<C>(work, &map_query, &map_key, &map_value, s);
    } else {
        setmaxnreg_inc<C::REGISTERS>();
        forward_consume<C>(work, &map_output, s);
    }
#endif
}

// Heads whose keys and values, so many rows, are in the L2 at once; these are walked together.
static inline int64_t heads_at_once(const cuda_ops_attention &p, int64_t rows)
{
    return ((int64_t)32 << 20) / (rows * (p.head_dim + p.value_dim) * 2) * (p.heads / p.key_heads);
}

template <typename C>
static cuda_ops_status launch_forward(const AttentionCall &call, const Device &device)
{
    const cuda_ops_attention &p = call.problem;
    const auto make = make_rows_map<C::PACKED>;
    CUtensorMap map_query, map_key, map_value, map_output;
    if (!make(&map_query, call.query, call.dtype, query_layout(p, p.head_dim, p.query), 64) ||
        !make(&map_key, call.key, call.dtype, key_layout(p, p.head_dim, p.key), C::N) ||
        !make(&map_value, call.value, call.dtype, key_layout(p, p.value_dim, p.value), C::N) ||
        !make(&map_output, call.output, call.dtype, query_layout(p, p.value_dim, p.output), 64))
        return CUDA_OPS_INVALID_ARGUMENT;
    ForwardWork work = {};
    work.logsumexp = (float *)call.logsumexp;
    work.heads = (int)p.heads, work.group = (int)(p.heads / p.key_heads);
    work.scale_log2 = (float)(p.scale * 1.4426950408889634);
    const auto kernel = attention_sm90_forward_kernel<C>;
    if constexpr (C::PACKED) {
        work.all_heads = work.heads;
        work.packed = attention_sm90_sequences_at(call.workspace, call);
        const int64_t most = packed_blocks(p.sequences.query_rows, p.batch, C::M) * p.heads;
        const int64_t blocks = most < device.multiprocessors ? most : device.multiprocessors;
        const int64_t section = heads_at_once(p, p.sequences.key_rows);
        const cuda_ops_status status = attention_sm90_sequences(work.packed, call, C::M, blocks, section);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        launch_dependent_clusters(kernel, blocks, C::THREADS, 1, C::SHARED_BYTES, call.stream, map_query, map_key,
                                  map_value, map_output, work);
        return launch_status();
    }
    work.band = band_of(cuda_ops_attention_only_sequence(&p));
    work.tiles_m = (int)ceil_div(p.queries, C::M);
    work.all_heads = (int)(p.batch * p.heads);
    const int64_t total = (int64_t)work.tiles_m * work.all_heads;
    const int64_t blocks = total < device.multiprocessors ? total : device.multiprocessors;
    // A last tile that leaves a warpgroup idle is short. As many blocks as are a multiple of a head's tiles would take
    // the same one of each head, and those with the short ones wait for the others.
    const bool longest_first = work.band.high < work.band.keys - 1;
    const bool last_is_short = work.tiles_m > 1 && p.queries % C::M != 0 && p.queries % C::M <= C::M - 64;
    work.together = longest_first ? 0 : last_is_short ? work.tiles_m - 1 : work.tiles_m;
    work.rows_before = longest_first ? rows_before(work.band.queries, C::M) : 0;
    // At least a tile for every block.
    work.whole = C::SHORT ? (int)(work.all_heads / blocks * blocks) : 0;
    const int64_t heads = work.all_heads - work.whole;
    int64_t section = heads_at_once(p, p.keys), least = ceil_div(blocks, work.tiles_m);
    section = section > least ? section : least;
    section = work.together == work.tiles_m || section > heads ? heads : section;
    section = section > 0 ? section : 1;
    work.section = (int)section;
    work.schedule = make_schedule(heads * work.tiles_m, section * work.tiles_m, blocks, longest_first);
    work.dropout = dropout_work_of(p, call.state);
    if constexpr (C::ADDED) {
        work.added = added_mask_of(call);
        work.scale_log2 = 1.4426950408889634f; // of scores, which have the scale
    }
    if constexpr (C::MASKED) {
        const cuda_ops_status status = attention_sm90_mask(work.mask, call.workspace, call);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    launch_dependent_clusters(kernel, blocks, C::THREADS, 1, C::SHARED_BYTES, call.stream, map_query, map_key,
                              map_value, map_output, work);
    return launch_status();
}

// Whether rows are so short that the SHORT tile is faster: causal ones of up to 1024 tokens (0.5 to 0.96 of the time),
// others of up to 256 keys (0.5 to 0.88). Tiles of 192 queries are more to be shared out than its tiles of 256: where
// all of them are at work at once, they are faster (benchmarks/notes/attention.md).
static inline bool takes_short_tile(const cuda_ops_attention &p, const Device &device)
{
    const Band band = band_of(cuda_ops_attention_only_sequence(&p));
    const int64_t most_keys = band.high < band.keys / 2 ? 1024 : 256; // a window on the right that hides something
    return p.queries <= 1024 && p.keys <= most_keys &&
           ceil_div(p.queries, 192) * p.batch * p.heads > device.multiprocessors;
}

// Tiles of rows of 64, 128, 192 and 256 elements, and of 192 with values of 128, as latent attention has them.
template <typename T, bool DROPS, bool PACKED = false, MaskWay MASK = NO_MASK>
static cuda_ops_status launch_forward_of(const AttentionCall &call, const Device &device)
{
    if constexpr (!PACKED)
        if (attention_sm90_is_narrow(call.problem) && takes_short_tile(call.problem, device))
            return launch_forward<ForwardTile<T, 64, 64, 4, 64, DROPS, PACKED, MASK>>(call, device);
    if (attention_sm90_is_narrow(call.problem))
        return launch_forward<ForwardTile<T, 64, 64, 3, 128, DROPS, PACKED, MASK>>(call, device);
    if constexpr (!DROPS && !PACKED && MASK == NO_MASK) {
        const int64_t head = call.problem.head_dim, value = call.problem.value_dim;
        if (head > 192 || value > 192)
            return launch_forward<ForwardTile<T, 256, 256, 2, 80, DROPS, PACKED, MASK>>(call, device);
        if (value > 128)
            return launch_forward<ForwardTile<T, 192, 192, 2, 96, DROPS, PACKED, MASK>>(call, device);
        if (head > 128)
            return launch_forward<ForwardTile<T, 192, 128, 2, 128, DROPS, PACKED, MASK>>(call, device);
    }
    return launch_forward<ForwardTile<T, 128, 128, 2, 128, DROPS, PACKED, MASK>>(call, device);
}

#endif
