/* What the row kernels share: vector clones for the machine at hand, and rows split between threads. */
#ifndef SIAMESENORM_ROWS_H
#define SIAMESENORM_ROWS_H
#include <stdint.h>

/* Raised with every change of a structure, here and in native.py. */
#define KERNELS_VERSION 6

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

/* Below this many elements a second thread costs more than it brings. */
#define PARALLEL_FROM 32768

static inline int threads_for(int64_t rows, int64_t dim, int32_t threads) {
    if (rows * dim < PARALLEL_FROM) return 1;
    return threads < rows ? threads : (int)rows;
}

/* Rows are split evenly and in order, and partial sums added in order: the same result for the same threads. */
#define SPLIT(rows, parts, part, from, to)                                                                            \
    const int64_t from = (rows) * (part) / (parts), to = (rows) * ((part) + 1) / (parts)

#endif
