/* Which instruction sets this CPU has, and the values of 8-bit floats. */
#include "attend_call.h"
#include "numbers.h"

#include <math.h>
#include <string.h>

static int is_here(const isa_t *isa)
{
#ifdef PAGEDKV_X86
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (isa == &isa_avx2)
        return v3;
    if (isa == &isa_avx512)
        return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return isa == &isa_portable;
}

const isa_t *isa_of(const char *name)
{
    static const isa_t *const best_first[] = {
#ifdef PAGEDKV_X86
        &isa_avx512, &isa_avx2,
#endif
        &isa_portable};
    for (size_t i = 0; i < sizeof best_first / sizeof *best_first; i++)
        if (is_here(best_first[i]) && (!name[0] || !strcmp(name, best_first[i]->name)))
            return best_first[i];
    return NULL;
}

/* Filled when the library is loaded: sign, exponent and fraction are what the formats (OCP 8-bit floating point, 2023) say. */
float f8_values[2][256];

__attribute__((constructor)) static void fill_f8(void)
{
    for (int code = 0; code < 256; code++) {
        const float sign = code & 128 ? -1.0f : 1.0f;
        const int e4 = code >> 3 & 15, m3 = code & 7, e5 = code >> 2 & 31, m2 = code & 3;
        f8_values[0][code] = e4 == 15 && m3 == 7 ? NAN : sign * (e4 ? ldexpf(1 + m3 / 8.0f, e4 - 7) : ldexpf(m3 / 8.0f, -6));
        f8_values[1][code] = e5 == 31 ? (m2 ? NAN : sign * INFINITY) : sign * (e5 ? ldexpf(1 + m2 / 4.0f, e5 - 15) : ldexpf(m2 / 4.0f, -14));
    }
}
