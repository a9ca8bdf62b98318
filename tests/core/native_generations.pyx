# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Sets the generation that a slot has after 2**31 reuses, and looks at queues.

The slots are those that are used next.
"""

from libc.stdint cimport int32_t

from pagedkv._core.block_table cimport BlockTable
from pagedkv._core.policies.hazard.policy cimport HAZARD
from pagedkv._core.policies.hazard.victims cimport hazard_of
from pagedkv._core.place cimport Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport RadixTree
from pagedkv._core.types cimport LAST_GENERATION, NIL

LAST = LAST_GENERATION


def next_owner(Placement placement, int32_t generation):
    cdef Place* p = &placement.place
    assert p.free_owner != NIL
    p.owners[p.free_owner].generation = generation


def next_transfer(Placement placement, int32_t generation):
    cdef Place* p = &placement.place
    assert p.free_transfer != NIL
    p.transfers[p.free_transfer].generation = generation


def next_row(BlockTable table, int32_t generation):
    table.rows[table.free_rows[table.num_free_rows - 1]].generation = generation


def next_node(RadixTree tree, int32_t generation):
    assert tree.tree.free_node != NIL
    tree.tree.nodes[tree.tree.free_node].generation = generation


def next_visit(Placement placement, int32_t generation):
    cdef Place* p = &placement.place
    assert hazard_of(p).visits.free_slot != NIL
    hazard_of(p).visits.at[hazard_of(p).visits.free_slot].generation = generation


def next_past(Placement placement, int32_t generation):
    cdef Place* p = &placement.place
    assert hazard_of(p).history.free_past != NIL
    hazard_of(p).history.pasts[hazard_of(p).history.free_past].generation = generation


def retired(Placement placement, BlockTable table=None):
    """Nodes, rows and pasts that are never used again."""
    cdef Place* p = &placement.place
    return (p.tree.num_retired, 0 if table is None else table.num_retired,
            hazard_of(p).history.num_retired if p.policy == &HAZARD else 0)


def queues(Placement placement):
    """Of every run on the device: its depth and the queue that its policy has it in."""
    cdef Place* p = &placement.place
    cdef int32_t n
    return sorted([(p.tree.nodes[n].depth, p.fates[n].queue[0]) for n in range(p.tree.num_nodes)
                   if p.tree.nodes[n].root != NIL and p.tree.nodes[n].tiers & 1])
