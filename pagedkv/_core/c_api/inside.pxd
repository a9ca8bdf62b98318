# Into an object of the core, and out of it, for threads that may hold the GIL or not (lock.pxd has the mutex's rules).
# A handle is the address of a Python object, which a call borrows: it counts no references.
from pagedkv._core.block_pool cimport BlockPool, Pool
from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.c_api.header cimport pagedkv_placement, pagedkv_pool, pagedkv_table
from pagedkv._core.lock cimport Lock, write_hint
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Placement
from pagedkv.threads.pthread cimport pthread_mutex_lock, pthread_mutex_t, pthread_mutex_trylock

cdef extern from *:
    """
    #include <Python.h>
    /* Whether this thread holds the GIL; it need not be one of Python's. */
    static int pkv_holds_gil(void) {
    #if PY_VERSION_HEX >= 0x030D0000
        return PyThreadState_GetUnchecked() != NULL;
    #elif PY_VERSION_HEX >= 0x030C0000
        return _PyThreadState_UncheckedGet() != NULL;
    #else                               /* before 3.12 that is the state of whichever thread holds it */
        PyThreadState *holder = _PyThreadState_UncheckedGet();
        return holder != NULL && holder == PyGILState_GetThisThreadState();
    #endif
    }
    """
    bint holds_gil "pkv_holds_gil"() noexcept nogil

cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    PyThreadState* PyEval_SaveThread() noexcept nogil
    void PyEval_RestoreThread(PyThreadState*) noexcept nogil

# No thread waits for the mutex while it holds the GIL: the one that has it may need the GIL to go on.
cdef inline void wait_for(pthread_mutex_t* mutex) noexcept nogil:
    cdef PyThreadState* state
    if holds_gil():
        state = PyEval_SaveThread()
        pthread_mutex_lock(mutex)
        PyEval_RestoreThread(state)
    else:
        pthread_mutex_lock(mutex)

cdef inline void take(Lock lock) noexcept nogil:
    if pthread_mutex_trylock(&lock.mutex) != 0:
        wait_for(&lock.mutex)
    write_hint(&lock.taken, lock.taken + 1)

cdef inline Pool* enter_pool(pagedkv_pool* handle) noexcept nogil:
    take((<BlockPool><void*>handle).lock)
    return &(<BlockPool><void*>handle).pool

cdef inline void leave_pool(pagedkv_pool* handle) noexcept nogil:
    (<BlockPool><void*>handle).lock.release()

# What never changes in it may be read without the mutex.
cdef inline Place* place_of(pagedkv_placement* handle) noexcept nogil:
    return &(<Placement><void*>handle).place

cdef inline Place* enter(pagedkv_placement* handle) noexcept nogil:
    take((<Placement><void*>handle).lock)
    return place_of(handle)

cdef inline void leave(pagedkv_placement* handle) noexcept nogil:
    (<Placement><void*>handle).lock.release()

cdef inline void enter_table(pagedkv_table* handle) noexcept nogil:
    take((<BlockTable><void*>handle).lock)

cdef inline void leave_table(pagedkv_table* handle) noexcept nogil:
    (<BlockTable><void*>handle).lock.release()
