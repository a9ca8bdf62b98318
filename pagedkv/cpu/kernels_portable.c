/* The kernels for every CPU. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"

#define INLINE static inline __attribute__((always_inline))
#include "vec_portable.h"

#include "kernels.h"
