/* Ends one pass of a file that includes itself per element type (see common.h). No include guard: it is used twice. */
#undef REAL
#undef FN
