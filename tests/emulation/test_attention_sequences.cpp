// attention's list of tiles of packed sequences on Hopper (attention/sequences.cu), beside one made in plain
// loops: starts that ascend, and any numbers at all. The kernels that walk over it are not emulated.
#include <algorithm>
#include <tuple>

#include "attention/sm90/sequences.h"
#include "cases.h"

using namespace emulation;

static void fill_starts(int32_t *starts, int64_t batch, int64_t rows, bool sound)
{
    int64_t at = one_in(2) ? 0 : random_in(0, rows);
    for (int64_t b = 0; b <= batch; b++) {
        starts[b] = (int32_t)(sound ? at : random_in(-rows - 5, 2 * rows + 5));
        at += b < batch ? random_in(0, std::min(rows - at, 4 * rows / batch + 1)) : 0;
    }
}

// The blocks of `size_n` keys that some query of a tile sees, by looking at each key. Tiles are counted from the end of
// the last 64 queries, which may be fewer, so that the first one is short.
static int keys_seen(const Band &band, int tile, int size_m, int size_n)
{
    const int tiles = (band.queries + size_m - 1) / size_m;
    const int end = (band.queries + 63) / 64 * 64 - (tiles - 1 - tile) * size_m, first = std::max(end - size_m, 0);
    int count = 0;
    for (int from = 0; from < band.keys; from += size_n) {
        bool seen = false;
        for (int i = first; i < std::min(end, band.queries) && !seen; i++)
            seen = std::max(i + band.low, from) <= std::min({i + band.high, from + size_n - 1, band.keys - 1});
        count += seen;
    }
    return count;
}

static void sequences(int64_t number)
{
    AttentionCall call = {};
    cuda_ops_attention &p = call.problem;
    cuda_ops_attention_sequences &q = p.sequences;
    call.backward = one_in(2);
    p.batch = one_in(8) ? random_in(1000, 2100) : random_size(60), p.key_heads = random_in(1, 3);
    p.heads = p.key_heads * random_in(1, 3);
    q.query_rows = random_size(4000), q.key_rows = one_in(2) ? q.query_rows : random_size(4000);
    const bool sound = !one_in(4), same = q.key_rows == q.query_rows && one_in(2);
    int32_t *const query_starts = (int32_t *)device_memory((size_t)(4 * (p.batch + 1)), 0);
    int32_t *const key_starts = same ? query_starts : (int32_t *)device_memory((size_t)(4 * (p.batch + 1)), 0);
    fill_starts(query_starts, p.batch, q.query_rows, sound);
    if (!same)
        fill_starts(key_starts, p.batch, q.key_rows, sound);
    q.query_starts = query_starts, q.key_starts = key_starts;
    p.queries = one_in(2) ? q.query_rows : random_in(1, q.query_rows);
    p.keys = one_in(2) ? q.key_rows : random_in(1, q.key_rows);
    p.window_left = one_in(2) ? CUDA_OPS_ATTENTION_UNBOUNDED : random_in(0, 300);
    p.window_right = one_in(2) ? CUDA_OPS_ATTENTION_UNBOUNDED : one_in(2) ? 0 : random_in(0, 300);
    q.bottom_right = one_in(2);
    const int size_m = call.backward ? (one_in(2) ? 128 : 64) : one_in(2) ? 192 : 128, size_n = 128;
    const int64_t grid = random_in(1, 132), wanted = random_in(0, 4), heads = call.backward ? p.key_heads : p.heads;
    describe("case %lld: %s, %lld sequences of %lld and %lld rows, %d x %d%s", (long long)number,
             call.backward ? "backward" : "forward", (long long)p.batch, (long long)q.query_rows, (long long)q.key_rows,
             size_m, size_n, sound ? "" : ", starts of any numbers");
    void *const workspace = device_memory((size_t)attention_sm90_sequences_bytes(call), 0);
    const PackedWork work = attention_sm90_sequences_at(workspace, call);
    expect_success(attention_sm90_sequences(work, call, size_m, grid, wanted));

    const int64_t all_blocks = packed_blocks(q.query_rows, p.batch, size_m);
    std::vector<int> owner((size_t)all_blocks, -1), seen((size_t)p.batch, 0);
    int64_t query_end = cuda_ops_attention_clamp(query_starts[0], 0, q.query_rows), tiles = 0;
    int64_t key_end = cuda_ops_attention_clamp(key_starts[0], 0, q.key_rows);
    for (int b = 0; b < p.batch; b++) {
        const PackedSequence &s = work.sequences[b];
        const int64_t first_query = query_end, first_key = key_end;
        query_end = std::max(query_end, cuda_ops_attention_clamp(query_starts[b + 1], 0, q.query_rows));
        key_end = std::max(key_end, cuda_ops_attention_clamp(key_starts[b + 1], 0, q.key_rows));
        cuda_ops_attention_sequence expected = cuda_ops_attention_sequence_of(&p, b);
        if (!sound) {
            expected = cuda_ops_attention_only_sequence(&p);
            expected.queries = std::min(query_end - first_query, p.queries);
            expected.keys = std::min(key_end - first_key, p.keys);
            expected.first_query = first_query, expected.first_key = first_key;
            expected.diagonal += q.bottom_right ? expected.keys - expected.queries : 0;
        }
        const Band band = band_of(expected);
        if (std::tie(s.band.queries, s.band.keys, s.band.low, s.band.high) !=
                std::tie(band.queries, band.keys, band.low, band.high) ||
            s.first_query != expected.first_query || s.first_key != expected.first_key)
            fail("sequence %d: %d queries from %d, %d keys from %d", b, s.band.queries, s.first_query, s.band.keys,
                 s.first_key);
        tiles += call.backward ? (band.keys + size_n - 1) / size_n : (band.queries + size_m - 1) / size_m;
        for (int i = 0; i < (band.queries + size_m - 1) / size_m && call.backward; i++) {
            if (s.first_block + i >= all_blocks || owner[(size_t)(s.first_block + i)] >= 0)
                fail("block %d of sequence %d has no place of its own", i, b);
            owner[(size_t)(s.first_block + i)] = b;
        }
    }
    for (int64_t i = 0; i < all_blocks && call.backward; i++)
        if (work.blocks[i] != owner[(size_t)i])
            fail("block %lld is of sequence %d, got %d", (long long)i, owner[(size_t)i], work.blocks[i]);

    const PackedSchedule &schedule = *work.schedule;
    const int64_t least = (grid + std::max<int64_t>(tiles, 1) - 1) / std::max<int64_t>(tiles, 1);
    if (schedule.schedule.total != tiles * heads || schedule.section != std::min(std::max(wanted, least), heads))
        fail("%lld tiles of %lld heads: a total of %d, sections of %d", (long long)tiles, (long long)heads,
             schedule.schedule.total, schedule.section);
    // Each tile once; of a sequence in ascending order in backward; those of more blocks first.
    std::vector<std::vector<bool>> found((size_t)p.batch);
    int before = INT32_MAX;
    for (int64_t i = 0; i < tiles; i++) {
        const PackedTile tile = work.tiles[i];
        if (tile.sequence < 0 || tile.sequence >= p.batch || tile.number < 0)
            fail("tile %lld is number %d of sequence %d", (long long)i, tile.number, tile.sequence);
        const Band &band = work.sequences[tile.sequence].band;
        const int count = call.backward ? (band.keys + size_n - 1) / size_n : (band.queries + size_m - 1) / size_m;
        std::vector<bool> &of_sequence = found[(size_t)tile.sequence];
        of_sequence.resize((size_t)count);
        if (tile.number >= count || of_sequence[(size_t)tile.number])
            fail("tile %d of sequence %d comes twice, or is none", tile.number, tile.sequence);
        of_sequence[(size_t)tile.number] = true;
        if (call.backward) {
            if (tile.number != seen[(size_t)tile.sequence]++)
                fail("tile %d of sequence %d comes out of order", tile.number, tile.sequence);
            continue;
        }
        const int length = keys_seen(band, tile.number, size_m, size_n);
        if (length > before)
            fail("tile %lld is longer than the one before: %d after %d", (long long)i, length, before);
        before = length;
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "sequences", sequences);
}
