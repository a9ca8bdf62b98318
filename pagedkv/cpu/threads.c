/* Workers sleep on a condition; a call wakes them, and items are handed out by a counter. After a call a worker looks for the next one
 * for a moment before it sleeps: layers follow each other closely.
 *
 * `owner` is held by the call that has the threads. `lock` guards `turn`, `open` and the sleepers. Who comes when the turn is over
 * does nothing, so a call never waits for a thread that has not begun. A forked child has none of the threads: it starts its own.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { LOOKS = 2000 };

static struct {
    pthread_mutex_t owner, lock;
    pthread_cond_t wake;
    int started;
    long first_turn[MOST_THREADS]; /* that a worker has seen when it starts */
    _Atomic long turn;             /* one more for each call */
    int open, wanted;              /* whether the turn takes workers, and which: 1 .. wanted */
    void (*work)(void *, long, int);
    void *argument;
    long items;
    _Atomic long next;
    _Atomic int active; /* workers inside the turn */
} crew = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void breathe(int times)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (times > LOOKS)
        sched_yield();
}

static void take_items(int worker)
{
    for (long item; (item = atomic_fetch_add(&crew.next, 1)) < crew.items;)
        crew.work(crew.argument, item, worker);
}

static void *live(void *number)
{
    const int worker = (int)(long)number;
    for (long seen = crew.first_turn[worker];;) {
        for (int i = 0; i < LOOKS && atomic_load(&crew.turn) == seen; i++)
            breathe(0);
        pthread_mutex_lock(&crew.lock);
        while (atomic_load(&crew.turn) == seen)
            pthread_cond_wait(&crew.wake, &crew.lock);
        seen = atomic_load(&crew.turn);
        const int mine = crew.open && worker <= crew.wanted;
        if (mine)
            atomic_fetch_add(&crew.active, 1);
        pthread_mutex_unlock(&crew.lock);
        if (mine) {
            take_items(worker);
            atomic_fetch_sub(&crew.active, 1);
        }
    }
    return NULL;
}

static void forget_threads(void)
{
    pthread_mutex_init(&crew.owner, NULL);
    pthread_mutex_init(&crew.lock, NULL);
    pthread_cond_init(&crew.wake, NULL);
    crew.started = crew.open = 0;
    atomic_store(&crew.active, 0);
}

__attribute__((constructor)) static void expect_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* At least this many if they can be had; how many there are to use. */
static int start_threads(int wanted)
{
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (crew.started < wanted) {
        pthread_t thread;
        const int worker = crew.started + 1;
        crew.first_turn[worker] = atomic_load(&crew.turn);
        if (pthread_create(&thread, &detached, live, (void *)(long)worker))
            break;
        crew.started = worker;
    }
    pthread_attr_destroy(&detached);
    return crew.started < wanted ? crew.started : wanted;
}

void run_items(void (*work)(void *, long, int), void *argument, long items, int threads)
{
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads > items)
        threads = (int)items;
    if (threads <= 1 || pthread_mutex_trylock(&crew.owner)) {
        for (long item = 0; item < items; item++)
            work(argument, item, 0);
        return;
    }
    const int helpers = start_threads(threads - 1);
    pthread_mutex_lock(&crew.lock);
    crew.work = work;
    crew.argument = argument;
    crew.items = items;
    crew.wanted = helpers;
    crew.open = 1;
    atomic_store(&crew.next, 0);
    atomic_fetch_add(&crew.turn, 1);
    pthread_cond_broadcast(&crew.wake);
    pthread_mutex_unlock(&crew.lock);
    take_items(0);
    pthread_mutex_lock(&crew.lock);
    crew.open = 0;
    pthread_mutex_unlock(&crew.lock);
    for (int times = 0; atomic_load(&crew.active); times++)
        breathe(times);
    pthread_mutex_unlock(&crew.owner);
}
