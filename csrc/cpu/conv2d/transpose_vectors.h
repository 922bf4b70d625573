/* Part of the files that are compiled for each instruction set and element type: needs LANES, FN, and the types
 * FN(vector) and FN(index). For GCC, whose __builtin_shuffle it is made of. */

/* The transpose of LANES x LANES elements in log2(LANES) rounds: each interleaves the first half of the rows with the
 * second, which moves the highest bit of an element's row into the lowest of its column. */
CUDA_OPS_INLINE void FN(transpose)(FN(vector) rows[LANES])
{
    FN(index) low = {0}, high = {0};
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) {
        low[l] = l / 2 + l % 2 * LANES;
        high[l] = low[l] + LANES / 2;
    }
#pragma GCC unroll 4
    for (int width = 1; width < LANES; width *= 2) {
        FN(vector) next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            rows[i] = next[i];
    }
}
