/* Threads for one call at a time, made when they are first needed. They never touch Python. */
#ifndef PAGEDKV_CPU_THREADS_H
#define PAGEDKV_CPU_THREADS_H

/* Runs work(argument, item, worker) for item 0 .. items - 1, each once, on at most `threads` threads of which the caller is
 * worker 0, and returns when all are done. Who finds the threads busy with another call does everything alone. */
void run_items(void (*work)(void *argument, long item, int worker), void *argument, long items, int threads);

enum { MOST_THREADS = 256 };

#endif
