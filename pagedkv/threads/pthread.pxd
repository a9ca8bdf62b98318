# What Cython modules use of POSIX threads: mutexes, and condition variables that go by the monotonic clock.
cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t*, const void*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_trylock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int pthread_cond_signal(pthread_cond_t*)

cdef extern from *:
    """
    #include <pthread.h>
    static inline long long now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    static inline void mutex_init_recursive(pthread_mutex_t *mutex) {
        pthread_mutexattr_t kind;
        pthread_mutexattr_init(&kind);
        pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
        pthread_mutex_init(mutex, &kind);
        pthread_mutexattr_destroy(&kind);
    }
    #if defined(__APPLE__) /* its conditions know no clock, but a time from now */
    static inline void cond_init_monotonic(pthread_cond_t *cond) { pthread_cond_init(cond, NULL); }
    static inline int cond_wait_ns(pthread_cond_t *cond, pthread_mutex_t *mutex, long long ns) {
        struct timespec t = {ns > 0 ? ns / 1000000000LL : 0, ns > 0 ? ns % 1000000000LL : 0};
        return pthread_cond_timedwait_relative_np(cond, mutex, &t);
    }
    #else
    static inline void cond_init_monotonic(pthread_cond_t *cond) {
        pthread_condattr_t kind;
        pthread_condattr_init(&kind);
        pthread_condattr_setclock(&kind, CLOCK_MONOTONIC);
        pthread_cond_init(cond, &kind);
        pthread_condattr_destroy(&kind);
    }
    /* Waits for a condition variable of cond_init_monotonic, so many nanoseconds at most. */
    static inline int cond_wait_ns(pthread_cond_t *cond, pthread_mutex_t *mutex, long long ns) {
        long long until = now_ns() + ns;
        struct timespec t;
        t.tv_sec = until / 1000000000LL;
        t.tv_nsec = until % 1000000000LL;
        return pthread_cond_timedwait(cond, mutex, &t);
    }
    #endif
    """
    long long now_ns() nogil
    void mutex_init_recursive(pthread_mutex_t*) nogil
    void cond_init_monotonic(pthread_cond_t*) nogil
    int cond_wait_ns(pthread_cond_t*, pthread_mutex_t*, long long) nogil
