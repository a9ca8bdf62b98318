"""Which capacities a command replays: given ones, a sweep over device sizes, or defaults."""

from __future__ import annotations

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.capacity import Capacity, resolve
from pagedkv.lab.replay.trace import Trace

DEFAULT_SHARES = (1, 4, 10)  # device, host, disk: percent of the unique blocks, small enough to matter
OPTIONS = ("--device-memory", "--host-memory", "--disk")
DEFAULT_SWEEP = "1%,2%,5%,10%,20%,50%"


def capacities(
    trace: Trace,
    device: str | None,
    host: str | None,
    disk: str | None,
    sweep: str | None,
    bytes_per_token: int,
) -> list[Capacity]:
    """Resolve the command's options; without any, small tiers of at least one block each.

    Raises
    ------
    InvalidArgument : a size that is none, or options that contradict each other.
    """
    if sweep is not None:
        return _swept(trace, device, host, disk, sweep, bytes_per_token)
    if device is None:
        if host is not None or disk is not None:
            raise InvalidArgument("--device-memory: --host-memory and --disk need it; give its size too")
        small, middle, large = (max(1, trace.num_unique * share // 100) for share in DEFAULT_SHARES)
        return [Capacity(small, middle, large)]
    return [
        resolve(
            trace, device_memory=device, host_memory=host, disk=disk, bytes_per_token=bytes_per_token, names=OPTIONS
        )
    ]


def _swept(
    trace: Trace, device: str | None, host: str | None, disk: str | None, sweep: str, bytes_per_token: int
) -> list[Capacity]:
    if device is not None:
        raise InvalidArgument("--sweep varies the device's size: give sizes to --sweep, or --device-memory, not both")
    sizes = [size.strip() for size in sweep.split(",")]
    if sweep == DEFAULT_SWEEP:  # a small trace has no 1 %
        sizes = [size for size in sizes if int(size[:-1]) * trace.num_unique >= 100] or ["100%"]
    names = ("--sweep", *OPTIONS[1:])
    found = [
        resolve(trace, device_memory=s, host_memory=host, disk=disk, bytes_per_token=bytes_per_token, names=names)
        for s in sizes
    ]
    return list(dict.fromkeys(found))
