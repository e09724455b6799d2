// Index types of the indexer's kernels: LONG_SEATS and LONG_LENGTHS say which inputs are int64.
#pragma once
#include "common.cuh"

#if LONG_SEATS
typedef i64 seat_t;
#else
typedef int seat_t;
#endif
#if LONG_LENGTHS
typedef i64 length_t;
#else
typedef int length_t;
#endif
