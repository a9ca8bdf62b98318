"""Eviction policies by name: ours, and those that other packages register.

A new policy is a struct of functions (``Policy`` in place.pxd) that ``register_policy`` makes known.
"""

from libc.stdint cimport uintptr_t

import logging

from pagedkv._core.place cimport POLICY_VERSION, Policy
from pagedkv._core.policies.arc cimport ARC
from pagedkv._core.policies.hazard.policy cimport HAZARD
from pagedkv._core.policies.lru cimport LRU
from pagedkv._core.policies.s3fifo cimport S3FIFO
from pagedkv.errors import InvalidArgument, LayoutMismatch, WrongType

ENTRY_POINTS = "pagedkv.policies"       # a package's module that registers a policy, by the policy's name

log = logging.getLogger("pagedkv.policies")

cdef dict known = {}                    # name: address of the Policy


def policies():
    """Names of the eviction policies that are registered, ours first: a tuple of str.

    One that an installed package announces (entry point group ``pagedkv.policies``) is registered when it is first asked for.
    """
    return tuple(known)


def policy_needs_chain(name):
    """Whether a policy needs ``RadixTree(keep_chain=True)``.

    It knows evicted blocks again by the hash of their prefix.

    Raises
    ------
    InvalidArgument
        There is no such policy.
    """
    return policy_named(name).needs_chain


cdef object register_policy(str name, const Policy* policy):
    """Make a policy known by a name.

    Raises
    ------
    WrongType, InvalidArgument
        The name is not a lower-case identifier or another policy's, or the policy cannot choose a victim.
    LayoutMismatch
        The policy was compiled for another version of these headers.
    """
    cdef bint whole, none
    if name is None or policy == NULL:
        raise WrongType("a policy is registered by its name and the address of its Policy")
    if not (name.isidentifier() and name.islower()):
        raise InvalidArgument(f"policy name {name!r}: lower-case letters, digits and underscores are needed, as in 'lfu'")
    if policy.version != POLICY_VERSION or policy.size != sizeof(Policy):
        raise LayoutMismatch(
            f"policy {name!r} was compiled for version {policy.version} of the policy headers ({policy.size} bytes), this "
            f"pagedkv has version {POLICY_VERSION} ({sizeof(Policy)} bytes): compile it against the installed pagedkv"
        )
    if policy.victim == NULL:
        raise InvalidArgument(f"policy {name!r} has no `victim`: the function that chooses what goes first")
    whole = policy.begin != NULL and policy.hint != NULL and policy.depart != NULL
    none = policy.begin == NULL and policy.hint == NULL and policy.depart == NULL
    if not (whole if policy.arrive != NULL else none):
        raise InvalidArgument(f"policy {name!r} learns of requests by `arrive`, `begin`, `hint` and `depart`: all four or none")
    if known.get(name, <uintptr_t>policy) != <uintptr_t>policy:
        raise InvalidArgument(f"policy {name!r} is registered already: give this one another name")
    known[name] = <uintptr_t>policy
    return None


cdef const Policy* policy_named(object name) except NULL:
    if not isinstance(name, str):
        raise WrongType(f"policy must be a name, one of {', '.join(known)}, not {type(name).__name__}")
    if name not in known:
        _load(name)
    if name not in known:
        raise InvalidArgument(
            f"policy {name!r} is not known: one of {', '.join(known)}. Another package's policy is known once its module, which "
            f"registers it, is imported, or announced by an entry point of {ENTRY_POINTS!r}"
        )
    return <const Policy*><uintptr_t>known[name]


def _load(name):
    """Import the module that an installed package announces for a policy, if there is one."""
    from importlib import metadata      # with email and zipfile, which no other name needs
    for announced in metadata.entry_points(group=ENTRY_POINTS, name=name):
        log.info("importing %s for policy %r", announced.value, name)
        try:
            announced.load()
        except (Exception, SystemExit) as problem:
            raise InvalidArgument(
                f"policy {name!r} is announced by the entry point {announced.value!r} of another package, which cannot be "
                f"imported: {type(problem).__name__}: {problem}"
            ) from problem


register_policy("lru", &LRU)
register_policy("arc", &ARC)
register_policy("s3fifo", &S3FIFO)
register_policy("hazard", &HAZARD)
POLICIES = policies()                   # ours alone
