/* The entry point: one attention call. */
#ifndef PAGEDKV_CPU_ATTEND_CALL_H
#define PAGEDKV_CPU_ATTEND_CALL_H

#include "attend.h"

/* Writes o (and lse) of a call; arguments have been checked. 0, or -1 where there was no memory (then o is not to be used). */
int attend(const call_t *call, const isa_t *isa, int threads);

/* The best of this CPU, or the one of a name; NULL if there is none of that name here. */
const isa_t *isa_of(const char *name);

#endif
