"""Machines that KV lies on: GPUs by name, and servers with GPUs, host memory and disks."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.errors import WrongType
from pagedkv.lab.sizing.checks import by_name, byte_count, rate
from pagedkv.spec.sizes import whole_number

PCIE4_X16, PCIE5_X16 = 31.5e9, 63.0e9  # bytes/s in one direction: 16 lanes of 16 or 32 GT/s, 128 bits in 130


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; rates are its data sheet's, which no program reaches.

    Parameters
    ----------
    name : of the product.
    memory_bytes : in all.
    read_bytes_per_s : of its memory.
    flops_per_s : 16-bit floating point, dense.
    link_bytes_per_s : from host memory, in one direction.

    Raises
    ------
    WrongType, InvalidArgument
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        byte_count(self.memory_bytes, "memory_bytes", 1)
        for name in ("read_bytes_per_s", "flops_per_s", "link_bytes_per_s"):
            rate(getattr(self, name), name)


_ALL = (
    Gpu("a100-80gb", 80 * 10**9, 2.039e12, 312e12, PCIE4_X16),
    Gpu("h100", 80 * 10**9, 3.35e12, 989e12, PCIE5_X16),
    Gpu("h200", 141 * 10**9, 4.8e12, 989e12, PCIE5_X16),
    Gpu("l4", 24 * 10**9, 300e9, 121e12, PCIE4_X16),
    Gpu("l40s", 48 * 10**9, 864e9, 362e12, PCIE4_X16),
    Gpu("rtx-4090", 24 * 10**9, 1008e9, 165e12, PCIE4_X16),
)
GPUS = {gpu.name: gpu for gpu in _ALL}


def find_gpu(name: str) -> Gpu:
    """A GPU by its name; capitals do not count.

    Raises
    ------
    WrongType
        Not text.
    InvalidArgument
        No such GPU; the message names those there are.
    """
    return by_name(GPUS, name, "GPU")


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal servers with equal GPUs.

    Parameters
    ----------
    gpu : each of them.
    num_gpus, gpus_per_server : the last server may be partly filled.
    host_bytes, disk_bytes : for KV, per server; 0: there is no such tier.
    disk_bytes_per_s : read from the disks of one server.

    Raises
    ------
    WrongType, InvalidArgument
    """

    gpu: Gpu
    num_gpus: int = 1
    gpus_per_server: int = 8
    host_bytes: int = 10**12
    disk_bytes: int = 10**13
    disk_bytes_per_s: float = 7e9

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, Gpu):
            raise WrongType(f"gpu must be a Gpu, not {type(self.gpu).__name__}")
        whole_number(self.num_gpus, "num_gpus", 1, 10**9)
        whole_number(self.gpus_per_server, "gpus_per_server", 1, 1024)
        byte_count(self.host_bytes, "host_bytes")
        byte_count(self.disk_bytes, "disk_bytes")
        rate(self.disk_bytes_per_s, "disk_bytes_per_s")

    @property
    def num_servers(self) -> int:
        """Servers for all GPUs."""
        return -(-self.num_gpus // self.gpus_per_server)
