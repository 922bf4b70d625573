// Which queries see which keys, in which order attention's forward takes its tiles of queries, which blocks of queries
// a block of keys walks over in its backward, and in which order blocks of keys are handed out and add to the queries'
// gradients.
#ifndef CUDA_OPS_ATTENTION_SM90_ORDER_H
#define CUDA_OPS_ATTENTION_SM90_ORDER_H

#include <cuda_runtime.h>
#include <stdint.h>

// Query i sees keys i + low to i + high of 0 to keys - 1.
struct Band {
    int queries, keys, low, high;
};

// Whether some of M queries from first_query on see a key.
__host__ __device__ __forceinline__ bool queries_see_keys(const Band &band, int first_query, int M)
{
    const int end = first_query + M < band.queries ? first_query + M : band.queries;
    const int low = first_query + band.low, high = end - 1 + band.high;
    return (low > 0 ? low : 0) <= (high < band.keys - 1 ? high : band.keys - 1);
}

// Forward's tiles of queries of some heads, so many of each. The first `together` of a head follow each other, while
// its keys and values are in the L2; after these of all heads comes the rest, of each head the last tile first. All of
// them together: where tiles are as long. None: where later ones are longer. All but the last: where that one is short,
// and evens out what the others leave.
struct TileOfQueries {
    int m, head;
};

__host__ __device__ __forceinline__ TileOfQueries tile_of_queries(int rank, int heads, int tiles, int together)
{
    if (rank < heads * together)
        return {rank % together, rank / together};
    rank -= heads * together;
    return {tiles - 1 - rank / heads, rank % heads};
}

// Of heads that a block has to itself, the round-th tile of block `block` of `blocks`: the last one of a head first,
// since it is the longest where attention is causal.
__host__ __device__ __forceinline__ TileOfQueries tile_of_whole_head(int round, int block, int blocks, int tiles)
{
    const int turn = round / tiles;
    return {tiles - 1 - (round - turn * tiles), turn * blocks + block};
}

// A thread has two of every eight columns of a product, 32 at most. Bit i: whether its i-th is one of `low` to `high`,
// which are counted from its first.
__host__ __device__ __forceinline__ uint32_t columns_up_to(int last)
{
    const int count = last < 0 ? 0 : (last >> 3) * 2 + ((last & 7) > 0 ? 2 : 1);
    return count < 32 ? (1u << count) - 1 : 0xffffffffu;
}
__host__ __device__ __forceinline__ uint32_t columns_between(int low, int high)
{
    return columns_up_to(high) & ~columns_up_to(low - 1);
}

// Blocks of N keys add to the sums of M queries in ascending order; the first stores them, the last rounds them.
__host__ __device__ __forceinline__ int first_block_of_keys(const Band &band, int first_query, int N)
{
    const int low = first_query + band.low;
    return (low > 0 ? low : 0) / N;
}

// The blocks of M queries that see a key of block n of N keys: `count` of them up to `last`. Up to `finished` no block
// of keys comes after this one.
struct BlocksOfQueries {
    int last, count, finished;
};

__host__ __device__ __forceinline__ BlocksOfQueries blocks_of_queries(const Band &band, int n, int M, int N)
{
    const int end = n * N + N, last_key = (end < band.keys ? end : band.keys) - 1;
    const int first = n * N > band.high ? n * N - band.high : 0;
    const int last = last_key - band.low < band.queries - 1 ? last_key - band.low : band.queries - 1;
    BlocksOfQueries blocks;
    blocks.last = last / M;
    blocks.count = first <= last ? blocks.last - first / M + 1 : 0;
    blocks.finished = end >= band.keys || band.queries + band.high <= end ? blocks.last : (end - band.high) / M - 1;
    return blocks;
}

// Whoever is free gets the next block of keys. A head's are in ascending order, which is that of the sums: a block
// waits for some that have been handed out before it, and of all that are being worked at the earliest waits for none.
// Which block has which queries' turn is a matter of lengths alone, so that results depend neither on who is free when
// nor on the number of multiprocessors.
//
// Heads go by sections, and a section's blocks by key, so that those that many queries see come first where attention
// is causal. Sections overlap: the late half of one and the `early` half of the next are dealt out in turns. Long and
// short blocks run side by side, and a head's follow each other at a distance at which each finds the sums of the one
// before done; without, all that are free after a section's short blocks begin the next one's long ones together, and
// wait for each other. At the end the last section's early half comes by itself, and short blocks of two sections are
// left.
struct BlockOfKeys {
    int n, head;
};

__host__ __device__ __forceinline__ BlockOfKeys block_of_keys(int place, int blocks, int heads, int section, int early)
{
    const int late = blocks - early, sections = (heads + section - 1) / section;
    const int in_last = heads - (sections - 1) * section;
    if (place < section * early)
        return {place / section, place % section};
    place -= section * early;
    const int overlapping = (sections - 2) * section * blocks;
    if (place < overlapping) {
        const int first_head = place / (section * blocks) * section, from = place - first_head * blocks;
        if (from >= 2 * section * late) // the early half's last, where their number is odd
            return {late, first_head + section + from - 2 * section * late};
        const int row = from / (2 * section), column = from % (2 * section);
        return {column < section ? early + row : row, first_head + column};
    }
    place -= overlapping;
    if (place < in_last * early)
        return {place / in_last, heads - in_last + place % in_last};
    place -= in_last * early;
    const int in_two = section + in_last;
    return {early + place / in_two, heads - in_two + place % in_two};
}

#endif
