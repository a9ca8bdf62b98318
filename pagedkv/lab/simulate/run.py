"""``pagedkv simulate`` as a library.

One workload, one machine, some systems, a SimResult for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.errors import InvalidArgument
from pagedkv.lab.replay.progress import Progress, Silent
from pagedkv.lab.simulate.contiguous import ContiguousServer
from pagedkv.lab.simulate.hardware import Hardware
from pagedkv.lab.simulate.paged import PagedServer
from pagedkv.lab.simulate.result import SimResult
from pagedkv.lab.simulate.systems import DEFAULT_SYSTEMS, choose
from pagedkv.lab.simulate.workload import Workload
from pagedkv.spec.sizes import whole_number


def simulate(
    workload: Workload,
    hardware: Hardware,
    systems: Sequence[str] = DEFAULT_SYSTEMS,
    *,
    block_size: int = 16,
    max_running: int = 256,
    max_batch_tokens: int = 2048,
    longest: int | None = None,
    progress: Progress | None = None,
) -> list[SimResult]:
    """Serve a workload with each system, every time from an empty cache.

    Parameters
    ----------
    workload, hardware
    systems : names of ``SYSTEMS``.
    block_size : tokens of a block.
    max_running : sequences at once.
    max_batch_tokens : tokens of a step.
    longest : tokens that the system ``contiguous`` reserves for each request; default: those of the workload's longest
        that fits on the device.
    progress : told about each run.

    Raises
    ------
    InvalidArgument, UnsupportedVariant, WrongType
    """
    chosen = choose(systems)
    block_size = whole_number(block_size, "block size", 1, 256)
    max_running = whole_number(max_running, "max running", 1, 1 << 16)
    max_batch_tokens = whole_number(max_batch_tokens, "max batch tokens", max_running + 1, 1 << 22)
    if hardware.blocks(block_size)[0] < 1:
        raise InvalidArgument("the memory beside the weights does not hold one block")
    if any(system.by_group for system in chosen):
        hardware.model.spec(block_size)  # raises
    slots = hardware.kv_bytes // hardware.model.kv_bytes_per_token
    lengths = [sum(workload.num_tokens(i)) for i in range(len(workload))]
    fitting = max((length for length in lengths if length <= slots), default=slots)
    longest = fitting if longest is None else whole_number(longest, "longest", 1, 1 << 30)
    progress = Silent() if progress is None else progress
    results = []
    for system in chosen:
        progress.start(system.name, len(workload))
        if system.paged:
            server = PagedServer(workload, system, hardware, block_size, max_running, max_batch_tokens, progress)
            results.append(server.run())
        else:
            apart = ContiguousServer(workload, system, hardware, longest, max_running, max_batch_tokens, progress)
            results.append(apart.run())
    return results
