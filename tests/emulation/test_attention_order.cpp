// attention on Hopper: in which order forward takes its tiles; in backward, who adds to which queries' sums, of random
// bands, and in which order blocks of keys are handed out. What its kernels rely on, and what no result tells: a wrong
// order waits forever, or leaves multiprocessors idle.
#include "attention/sm90/order.h"
#include "attention/sm90/sections.h"
#include "cases.h"

#include <algorithm>

using namespace emulation;

static constexpr int UNBOUNDED = (1 << 29) + 1024;

static void blocks_of_a_band()
{
    const int M = one_in(2) ? 64 : 128, N = M == 64 && one_in(2) ? 64 : 128; // 64 keys: of rows of 256 elements
    Band band = {(int)random_in(1, 900), (int)random_in(1, 900), -UNBOUNDED, UNBOUNDED};
    const int diagonal = one_in(2) ? 0 : (int)random_in(-900, 900);
    if (one_in(2))
        band.low = diagonal - (int)random_in(0, 500);
    if (!one_in(4))
        band.high = diagonal + (one_in(2) ? 0 : (int)random_in(0, 500));
    describe("%d queries, %d keys, keys %d to %d from a query's own, blocks of %d queries and %d keys", band.queries,
             band.keys, band.low, band.high, M, N);
    std::vector<std::vector<int>> adding((size_t)(band.queries + M - 1) / M), last = adding;
    for (int n = 0; n < (band.keys + N - 1) / N; n++) {
        const BlocksOfQueries blocks = blocks_of_queries(band, n, M, N);
        for (int m = blocks.last; m > blocks.last - blocks.count; m--) {
            adding.at((size_t)m).push_back(n);
            if (m <= blocks.finished)
                last.at((size_t)m).push_back(n);
        }
    }
    for (size_t m = 0; m < adding.size(); m++) {
        bool seen = false;
        for (int i = (int)m * M; i < band.queries && i < (int)m * M + M; i++)
            seen |= std::max(i + band.low, 0) <= std::min(i + band.high, band.keys - 1);
        if (queries_see_keys(band, (int)m * M, M) != !adding[m].empty() || (seen && adding[m].empty()))
            fail("block %zu of queries is taken for one that sees keys, or that sees none", m);
        for (size_t i = 0; i < adding[m].size(); i++)
            if (adding[m][i] != first_block_of_keys(band, (int)m * M, N) + (int)i)
                fail("block %d of keys is number %zu that adds to block %zu of queries", adding[m][i], i, m);
        if (!adding[m].empty() && (last[m].size() != 1 || last[m][0] != adding[m].back()))
            fail("%zu blocks of keys take themselves for the last that adds to block %zu of queries", last[m].size(),
                 m);
    }
}

static void order_of_blocks()
{
    const int blocks = (int)random_in(1, 20), heads = (int)random_in(1, 60), section = (int)random_in(1, heads);
    const int early = section < heads ? (blocks + 1) / 2 : blocks;
    describe("%d blocks of keys, %d heads in sections of %d", blocks, heads, section);
    std::vector<int> handed_out((size_t)heads);
    for (int place = 0; place < blocks * heads; place++) {
        const BlockOfKeys block = block_of_keys(place, blocks, heads, section, early);
        if (block.head < 0 || block.head >= heads || block.n != handed_out[(size_t)block.head])
            fail("place %d has block %d of head %d", place, block.n, block.head);
        handed_out[(size_t)block.head]++;
    }
    for (int head = 0; head < heads; head++)
        if (handed_out[(size_t)head] != blocks)
            fail("%d blocks of head %d are handed out", handed_out[(size_t)head], head);
}

// Of rows of more than 128 elements.
static void order_in_sections()
{
    const int blocks = (int)random_in(1, 20), heads = (int)random_in(1, 60), fit = (int)random_in(0, 70);
    const int section = heads_of_section(heads, fit), sections = (heads + section - 1) / section;
    describe("%d blocks, %d heads, of which %d fit: sections of %d", blocks, heads, fit, section);
    if (section > std::max(fit, 1) || sections * std::max(fit, 1) - heads >= std::max(fit, 1))
        fail("%d sections are more than are wanted, or too few", sections);
    std::vector<int> taken((size_t)heads);
    for (int place = 0; place < blocks * heads; place++) {
        const BlockOfHead block = block_of_head(place, blocks, heads, section);
        if (block.head < 0 || block.head >= heads || block.number != taken[(size_t)block.head])
            fail("place %d has block %d of head %d", place, block.number, block.head);
        taken[(size_t)block.head]++;
        if (block.head / section != place / (section * blocks))
            fail("place %d has head %d, of another section", place, block.head);
    }
    for (int head = 0; head < heads; head++)
        if (taken[(size_t)head] != blocks)
            fail("%d blocks of head %d are taken", taken[(size_t)head], head);
}

// Every tile once; a head's tiles `together` side by side, then the rest, of each head the last one first.
static void order_of_tiles()
{
    const int tiles = (int)random_in(1, 20), heads = (int)random_in(1, 60);
    const int together = one_in(3) ? 0 : one_in(2) ? tiles : tiles - 1;
    describe("%d tiles of each of %d heads, %d together", tiles, heads, together);
    std::vector<std::vector<int>> ranks((size_t)heads, std::vector<int>((size_t)tiles, -1));
    for (int rank = 0; rank < tiles * heads; rank++) {
        const TileOfQueries tile = tile_of_queries(rank, heads, tiles, together);
        if (tile.head < 0 || tile.head >= heads || tile.m < 0 || tile.m >= tiles)
            fail("rank %d is tile %d of head %d", rank, tile.m, tile.head);
        else if (ranks[(size_t)tile.head][(size_t)tile.m]++ >= 0)
            fail("tile %d of head %d comes twice", tile.m, tile.head);
        else
            ranks[(size_t)tile.head][(size_t)tile.m] = rank;
    }
    for (int head = 0; head < heads; head++)
        for (int m = 0; m < tiles; m++) {
            const int expected = m < together ? head * together + m : heads * (together + tiles - 1 - m) + head;
            if (ranks[(size_t)head][(size_t)m] != expected)
                fail("tile %d of head %d has rank %d in place of %d", m, head, ranks[(size_t)head][(size_t)m],
                     expected);
        }
}

// Every tile of the heads once, and all of a head by one block.
static void order_of_whole_heads()
{
    const int tiles = (int)random_in(1, 8), blocks = (int)random_in(1, 40), turns = (int)random_in(1, 5);
    describe("%d tiles of each of %d heads for %d blocks", tiles, turns * blocks, blocks);
    std::vector<int> taken((size_t)(turns * blocks));
    for (int block = 0; block < blocks; block++)
        for (int round = 0; round < turns * tiles; round++) {
            const TileOfQueries tile = tile_of_whole_head(round, block, blocks, tiles);
            if (tile.head < 0 || tile.head >= turns * blocks || tile.head % blocks != block ||
                tile.m != tiles - 1 - taken[(size_t)tile.head])
                fail("round %d of block %d is tile %d of head %d", round, block, tile.m, tile.head);
            else
                taken[(size_t)tile.head]++;
        }
    for (size_t head = 0; head < taken.size(); head++)
        if (taken[head] != tiles)
            fail("%d tiles of head %zu are taken", taken[head], head);
}

// A bit for each of a thread's columns, which are 0, 1, 8, 9, 16, ... from its first.
static void columns_of_a_thread()
{
    const int low = one_in(3) ? -UNBOUNDED : (int)random_in(-20, 150),
              high = one_in(3) ? UNBOUNDED : (int)random_in(-20, 150);
    describe("columns %d to %d", low, high);
    const uint32_t columns = columns_between(low, high);
    for (int i = 0; i < 32; i++) {
        const int at = i / 2 * 8 + i % 2;
        if ((columns >> i & 1) != (low <= at && at <= high))
            fail("column %d is wrong", at);
    }
}

static void attention_order(int64_t)
{
    for (int i = 0; i < 50; i++) {
        order_of_whole_heads();
        columns_of_a_thread();
        order_of_tiles();
        blocks_of_a_band();
        order_of_blocks();
        order_in_sections();
    }
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "attention_order", attention_order);
}
