# Intrusive doubly linked lists over arrays: O(1) link, unlink and move, no allocation per element.
#
# An element is an index >= 0 into `prev`/`next`; a list is a sentinel, written ~list_no (so < 0), whose two links
# live in `ends`. `next` leads from cold to hot: next(sentinel) is the coldest element, prev(sentinel) the hottest.
# An element with next == UNLINKED is in no list.
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc, realloc

cdef enum:
    UNLINKED = 0x7FFFFFFF

cdef struct Links:
    int32_t* prev       # [num_elements], owned by the maker of the Links
    int32_t* next
    int32_t* ends       # [num_lists][2]: coldest, hottest; ~list_no when empty

cdef inline void set_next(Links* l, int32_t i, int32_t to) noexcept nogil:
    if i >= 0:
        l.next[i] = to
    else:
        l.ends[2 * ~i] = to

cdef inline void set_prev(Links* l, int32_t i, int32_t to) noexcept nogil:
    if i >= 0:
        l.prev[i] = to
    else:
        l.ends[2 * ~i + 1] = to

cdef inline int32_t coldest(Links* l, int32_t list_no) noexcept nogil:
    return l.ends[2 * list_no]

cdef inline int32_t hottest(Links* l, int32_t list_no) noexcept nogil:
    return l.ends[2 * list_no + 1]

cdef inline bint is_linked(Links* l, int32_t i) noexcept nogil:
    return l.next[i] != UNLINKED

cdef inline void link_between(Links* l, int32_t i, int32_t colder, int32_t hotter) noexcept nogil:
    l.prev[i] = colder
    l.next[i] = hotter
    set_next(l, colder, i)
    set_prev(l, hotter, i)

cdef inline void link_hottest(Links* l, int32_t list_no, int32_t i) noexcept nogil:
    link_between(l, i, l.ends[2 * list_no + 1], ~list_no)

cdef inline void unlink(Links* l, int32_t i) noexcept nogil:
    set_next(l, l.prev[i], l.next[i])
    set_prev(l, l.next[i], l.prev[i])
    l.next[i] = UNLINKED

# Room for n numbers, what was there kept. False: no memory, and nothing has changed.
cdef inline bint int32s_grow(int32_t** array, int32_t n) noexcept nogil:
    cdef int32_t* grown = <int32_t*>realloc(array[0], n * sizeof(int32_t))
    if grown == NULL:
        return False
    array[0] = grown
    return True

# Room for elements below `new`, those from `old` on in no list. False: no memory, and what was there is as it was.
cdef inline bint links_grow(Links* l, int32_t old, int32_t new) noexcept nogil:
    cdef int32_t i
    if not int32s_grow(&l.prev, new) or not int32s_grow(&l.next, new):
        return False
    for i in range(old, new):
        l.next[i] = UNLINKED
    return True

# Empty lists 0 .. num_lists - 1, without room for elements yet (links_grow). False: no memory.
cdef inline bint links_open(Links* links, int32_t num_lists) noexcept nogil:
    cdef int32_t i
    links.prev = links.next = NULL
    links.ends = <int32_t*>malloc(2 * num_lists * sizeof(int32_t))
    if links.ends == NULL:
        return False
    for i in range(num_lists):
        links.ends[2 * i] = links.ends[2 * i + 1] = ~i
    return True

cdef inline void links_close(Links* links) noexcept nogil:
    free(links.prev)
    free(links.next)
    free(links.ends)
