/* The kernels with AVX2, FMA and F16C; called only where the CPU has them. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#include "vec_avx2.h"

#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
