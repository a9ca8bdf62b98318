"""The auditor: recomputes from scratch the counts that a Placement keeps incrementally."""

from libc.stdint cimport int32_t

from pagedkv._core.block_pool cimport COUNT, TREE, Pool
from pagedkv._core.links cimport coldest, is_linked
from pagedkv._core.place cimport NUM_LISTS, Groups, Place
from pagedkv._core.placement cimport Placement
from pagedkv._core.radix_tree cimport Tree, node_ids, node_pages, node_top
from pagedkv._core.recency cimport is_owned, list_of
from pagedkv._core.tails cimport ANY, MOVING, POINTS, has_point_in, need, page_top
from pagedkv._core.types cimport MAX_TIERS, NIL, handle_slot


def placement_problems(Placement self):
    """Every disagreement found, as text; see Placement.check_integrity for the equations."""
    cdef Place* p = &self.place
    cdef Tree* t = &self.tree.tree
    cdef int32_t n, o, tier, i, u, d
    problems = []
    cdef bint collecting = self.lock.begin_audit()
    try:
        expected, sizes = [], []
        for _tier in range(p.num_tiers):
            expected.append({})
            sizes.append([0, 0])
        owners = {}
        for o in range(p.owners_capacity):
            if p.owners[o].live:
                n = p.owners[o].node
                if t.nodes[n].depth + t.nodes[n].length != p.owners[o].num_blocks:
                    problems.append(f"owner {o}: num_blocks")
                while t.nodes[n].length > 0:
                    owners[n] = owners.get(n, 0) + 1
                    n = t.nodes[n].parent
        cached = [0] * p.num_tiers
        kids = {}
        below = {}
        usage = {}
        copying = {}
        tail_copies = 0
        for i in range(p.transfers_capacity):
            if p.transfers[i].node != NIL and p.transfers[i].copies and p.transfers[i].is_tail:
                tail_copies += 1
            elif p.transfers[i].node != NIL and p.transfers[i].copies:
                n = p.transfers[i].node
                d = p.domain_of[t.nodes[n].root]
                usage[d, p.transfers[i].dst] = usage.get((d, p.transfers[i].dst), 0) + p.transfers[i].num_blocks
                o = p.transfers[i].num_blocks
                while o > 0 and t.nodes[n].length > 0:
                    copying[n] = i
                    o -= t.nodes[n].length
                    n = t.nodes[n].parent
                if o != 0:
                    problems.append(f"transfer {i}: copies a run that is not whole any more")
        o = len(set(copying.values())) + tail_copies
        if p.num_copying != o:
            problems.append(f"{p.num_copying} copies in flight, really {o}")
        for n in range(t.num_nodes):
            if t.nodes[n].root == NIL or t.nodes[n].length == 0:
                continue
            if p.fates[n].transfer < 0 and p.fates[n].top != node_top(t, n):
                problems.append(f"node {n}: top")
            if (p.fates[n].copying >= 0) != (n in copying) or (n in copying
                                                               and handle_slot(p.fates[n].copying) != copying[n]):
                problems.append(f"node {n}: copying")
            for tier in range(p.num_tiers):
                if (t.nodes[n].tiers >> tier) & 1:
                    below[t.nodes[n].parent, tier] = below.get((t.nodes[n].parent, tier), 0) + 1
                    o = t.nodes[n].parent
                    if p.closed[tier] and t.nodes[o].length > 0 and not (t.nodes[o].tiers >> tier) & 1:
                        problems.append(f"node {n}: in tier {tier} without its parent")
            if n in copying:
                key = (t.nodes[n].parent, p.transfers[copying[n]].dst)
                below[key] = below.get(key, 0) + 1
            if p.fates[n].transfer >= 0 and not p.transfers[handle_slot(p.fates[n].transfer)].promotes:
                key = (t.nodes[n].parent, p.transfers[handle_slot(p.fates[n].transfer)].dst)
                below[key] = below.get(key, 0) + 1
            key = (t.nodes[n].parent, p.fates[n].top)
            kids[key] = kids.get(key, 0) + 1
            d = p.domain_of[t.nodes[n].root]
            if p.fates[n].transfer >= 0:
                i = handle_slot(p.fates[n].transfer)
                usage[d, p.transfers[i].dst] = usage.get((d, p.transfers[i].dst), 0) + t.nodes[n].length
                if not p.transfers[i].promotes:
                    usage[d, p.transfers[i].src] = usage.get((d, p.transfers[i].src), 0) - t.nodes[n].length
            for tier in range(p.num_tiers):
                if not (t.nodes[n].tiers >> tier) & 1:
                    if is_linked(&p.links[tier], n):
                        problems.append(f"node {n}: linked in tier {tier} without a copy there")
                    continue
                sizes[tier][p.fates[n].queue[tier]] += t.nodes[n].length
                usage[d, tier] = usage.get((d, tier), 0) + t.nodes[n].length
                held = 1 + (owners.get(n, 0) if tier == node_top(t, n) else 0)
                if p.fates[n].transfer >= 0 and p.transfers[handle_slot(p.fates[n].transfer)].src == tier:
                    held += 1
                for i in range(t.nodes[n].length):
                    block = node_ids(t, n, tier)[i]
                    refs = p.pools[tier].refs[block]
                    if not refs & TREE or (refs & COUNT) < held:
                        problems.append(f"node {n} block {block} tier {tier}: {refs & COUNT} references, {held} known")
                    if block in expected[tier]:
                        problems.append(f"block {block} of tier {tier} is in two runs")
                    expected[tier][block] = n
                    cached[tier] += refs == (TREE | 1)
                alone = not is_owned(p, n, tier)
                if p.fates[n].transfer < 0 and alone and not is_linked(&p.links[tier], n):
                    problems.append(f"node {n}: evictable in tier {tier} but in no list")
                if not p.policy.keeps_owned and not alone and is_linked(&p.links[tier], n):
                    problems.append(f"node {n}: owned but in an eviction list of tier {tier}")
        if p.groups != NULL:
            problems += groups_problems(self, owners, kids)
        for n in range(t.num_nodes):
            if t.nodes[n].root != NIL:
                for u in range(MAX_TIERS):
                    if p.fates[n].kids[u] != kids.get((n, u), 0):
                        problems.append(f"node {n}: kids[{u}] = {p.fates[n].kids[u]}, really {kids.get((n, u), 0)}")
                    if p.fates[n].below[u] != below.get((n, u), 0):
                        problems.append(f"node {n}: below[{u}] = {p.fates[n].below[u]}, really {below.get((n, u), 0)}")
        for d in range(p.num_domains):
            for tier in range(p.num_tiers):
                if p.domains[d].usage[tier] != usage.get((d, tier), 0):
                    problems.append(f"domain {d}: {p.domains[d].usage[tier]} in tier {tier}, really {usage.get((d, tier), 0)}")
        for tier in range(p.num_tiers):
            if p.pools[tier] == NULL:
                continue
            if [p.size[tier][0], p.size[tier][1]] != sizes[tier]:
                problems.append(f"tier {tier}: queue sizes {[p.size[tier][0], p.size[tier][1]]} != {sizes[tier]}")
            if p.pools[tier].num_cached != cached[tier]:
                problems.append(f"tier {tier}: num_cached {p.pools[tier].num_cached} != {cached[tier]}")
            for i in range(p.num_domains * NUM_LISTS):
                n = coldest(&p.links[tier], i)
                while n >= 0:
                    if list_of(p, tier, n) != i:
                        problems.append(f"node {n} of tier {tier} is in list {i}, not {list_of(p, tier, n)}")
                        break
                    n = p.links[tier].next[n]
    finally:
        self.lock.end_audit(collecting)
    return problems


# Of pages, tails and points; counts points among their runs' `kids`.
cdef list groups_problems(Placement self, dict owners, dict kids):
    cdef Place* p = &self.place
    cdef Groups* g = p.groups
    cdef Tree* t = &self.tree.tree
    cdef Pool* pool
    cdef int32_t n, o, i, group, k, tier, points = 0
    problems, held, marks, moving, known_pending, leaving = [], {}, {}, {}, {}, {}

    def tail(counts, node, tier, group, first, last):
        while last > first:
            for i in range(max(first, t.nodes[node].depth), last):
                at = i - t.nodes[node].depth
                where = page_top(t, node, group, at) if tier == ANY else tier
                key = where, group, NIL if where == NIL else node_pages(t, node, where, group)[at]
                counts[key] = counts.get(key, 0) + 1
                if key[2] == NIL:
                    problems.append(f"node {node}, group {group}, tier {tier}: a hole at block {i}, which is held")
            last = min(last, t.nodes[node].depth)
            node = t.nodes[node].parent

    for o in range(p.owners_capacity):
        for group in range(1, g.num if p.owners[o].live else 1):
            tail(held, p.owners[o].node, ANY, group, p.owners[o].first[group], p.owners[o].num_blocks)
    for o in range(p.transfers_capacity):
        if p.transfers[o].node == NIL or not p.transfers[o].is_tail:
            continue
        n, i, tier = p.transfers[o].node, 0, p.transfers[o].src
        moving[n] = moving.get(n, 0) | MOVING << tier
        k = t.nodes[n].depth + t.nodes[n].length
        for group in range(1, g.num):
            known_pending[tier, group] = known_pending.get((tier, group), 0) + p.transfers[o].frees[group]
            for block in range(k - 1, k - need(g, group, k) - 1, -1):
                if p.transfers[o].dst_ids[i] != NIL:
                    tail(marks, n, tier, group, block, block + 1)
                    if p.transfers[o].dst > tier:
                        once = {}
                        tail(once, n, tier, group, block, block + 1)
                        for key in once:
                            leaving.setdefault(key, []).append(p.transfers[o].dst)
                i += 1
    for n in range(t.num_nodes):
        if t.nodes[n].root == NIL or t.nodes[n].length == 0:
            continue
        k = t.nodes[n].depth + t.nodes[n].length
        if p.fates[n].tails & ~POINTS != moving.get(n, 0):
            problems.append(f"node {n}: tails {p.fates[n].tails:#x}, but on their way are {moving.get(n, 0):#x}")
        if (p.fates[n].point > 0) != (p.fates[n].tails & POINTS > 0):
            problems.append(f"node {n}: point {p.fates[n].point} with its tail in {p.fates[n].tails & POINTS:#x}")
        for tier in range(p.num_tiers):
            if has_point_in(p, n, tier) != is_linked(&g.points[tier], n):
                problems.append(f"node {n}: a point in tier {tier}, but in its list of points or not")
            for group in range(1, g.num if has_point_in(p, n, tier) else 1):
                tail(marks, n, tier, group, k - need(g, group, k), k)
        if p.fates[n].point:
            points += 1
            tier = 0
            while not has_point_in(p, n, tier):
                tier += 1
            kids[n, tier] = kids.get((n, tier), 0) + 1
        elif (t.nodes[n].first_child == NIL and n not in owners and (g.free_every == 0 or k % g.free_every)
                and not p.fates[t.nodes[n].root].failed and p.fates[n].transfer < 0 and p.fates[n].copying < 0
                and not p.fates[n].tails):
            problems.append(f"node {n}: a dead end")
    for tier in range(p.num_tiers):
        for group in range(1, g.num):
            pool, cached = g.pools[tier][group], 0
            if pool == NULL:
                continue
            for n in range(t.num_nodes):
                for i in range(t.nodes[n].length if t.nodes[n].root != NIL else 0):
                    o = node_pages(t, n, tier, group)[i]
                    if o == NIL:
                        continue
                    marked = marks.get((tier, group, o), 0)
                    known = marked + held.get((tier, group, o), 0)
                    if not pool.refs[o] & TREE or pool.refs[o] & COUNT < max(known, 1):
                        problems.append(f"node {n}, page {o} of group {group} in tier {tier}: {pool.refs[o] & COUNT} "
                                        f"references, {known} known")
                    if pool.marks[o] != marked:
                        problems.append(f"page {o} of group {group} in tier {tier}: {pool.marks[o]} marks, really {marked}")
                    cached += pool.refs[o] & COUNT == pool.marks[o]
                    to = leaving.get((tier, group, o), [])
                    if len(to) != len(set(to)) or pool.leaving[o] != sum(1 << n for n in to):
                        problems.append(f"page {o} of group {group} in tier {tier} goes to {pool.leaving[o]:#x}, really {to}")
            if pool.num_cached != cached:
                problems.append(f"group {group} in tier {tier}: num_cached {pool.num_cached}, really {cached}")
            if g.pending[tier][group] != known_pending.get((tier, group), 0):
                problems.append(f"group {group} in tier {tier}: {g.pending[tier][group]} pages will be free, really "
                                f"{known_pending.get((tier, group), 0)}")
    if points != g.num_points:
        problems.append(f"{g.num_points} points, really {points}")
    return problems


def placement_dump(Placement self):
    """Nodes with their fate: id -> dict."""
    cdef Place* p = &self.place
    cdef int32_t n, tier, group, i
    out = {}
    cdef bint collecting = self.lock.begin_audit()
    try:
        for n, (parent, depth, tokens, ids) in self.tree.dump().items():
            if not tokens:
                continue
            out[n] = node = {
                "parent": parent, "depth": depth, "tokens": tokens, "ids": ids, "top": p.fates[n].top,
                "last_use": p.fates[n].last_use, "priority": p.fates[n].klass - 1, "in_flight": p.fates[n].transfer >= 0,
                "owned": bool(is_owned(p, n, node_top(p.tree, n))), "failed": bool(p.fates[n].failed),
            }
            if p.groups == NULL:
                continue
            node["pages"], node["point"] = {}, ()
            for tier in range(p.num_tiers):
                if has_point_in(p, n, tier):
                    node["point"] += (tier,)
                for group in range(1, p.groups.num):
                    pages = []
                    for i in range(p.tree.nodes[n].length):
                        pages.append(node_pages(p.tree, n, tier, group)[i])
                    node["pages"][tier, group] = pages
    finally:
        self.lock.end_audit(collecting)
    return out
