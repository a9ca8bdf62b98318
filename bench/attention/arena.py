"""Random KV of any size, which the host can read without copying it back.

The arena is one chunk of random values repeated. The chunk's length is eight times a prime, so that no two blocks of a
pool that is smaller than their common multiple hold the same bytes: a kernel that reads the wrong block computes
something else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.attention.device import Device
from pagedkv.spec.dtypes import bfloat16_to_float32, float32_to_bfloat16

LARGE_PERIOD = 8 * 2_097_169  # elements
SMALL_PERIOD = 8 * 4_099
FP8_SCALE = 1 / 64  # value = stored * scale; stored normal values reach about 350 of the 448 that e4m3 holds
ALIGNMENT = 512  # bytes


class Arena:
    """Memory full of standard normal values, as bfloat16 or as fp8 e4m3.

    Parameters
    ----------
    device : where it lies.
    num_bytes : its size.
    period : elements after which it repeats itself.
    """

    def __init__(self, device: Device, num_bytes: int, period: int = LARGE_PERIOD) -> None:
        self.device, self.num_bytes, self.period = device, num_bytes, period
        self._memory = device.empty((num_bytes,), np.uint8)
        self._values = np.random.default_rng(0).standard_normal(period, dtype=np.float32)
        self._bits: dict[str, NDArray[Any]] = {
            "bfloat16": float32_to_bfloat16(self._values),
            "float8_e4m3": to_e4m3(self._values / FP8_SCALE),
        }
        self._decoded: dict[str, NDArray[np.float32]] = {
            "bfloat16": bfloat16_to_float32(self._bits["bfloat16"]),
            "float8_e4m3": E4M3_VALUES[self._bits["float8_e4m3"]] * np.float32(FP8_SCALE),
        }
        self._dtype = ""

    def hold(self, dtype: str) -> None:
        """Fill the arena with values of a dtype, if it holds another.

        What was written to it is gone.
        """
        if dtype == self._dtype:
            return
        chunk = self._bits[dtype].view(np.uint8)[: self.num_bytes]
        done = len(chunk)
        self.device.copy(self._memory[:done], self.device.array(chunk))
        while done < self.num_bytes:
            count = min(done, self.num_bytes - done)
            self.device.copy(self._memory[done : done + count], self._memory[:count])
            done += count
        self.device.synchronize()
        self._dtype = dtype

    def forget(self) -> None:
        """Mark it as overwritten: the next :meth:`hold` fills it again."""
        self._dtype = ""

    def memory(self, first: int, count: int) -> Any:
        """uint8 [count] from byte ``first``."""
        assert first + count <= self.num_bytes
        return self._memory[first : first + count]

    def elements(self, first: int, shape: tuple[int, ...]) -> Any:
        """An array of the dtype's bits (uint16 or uint8) from element ``first``."""
        bits = self._bits[self._dtype].dtype
        return self.memory(first * bits.itemsize, int(np.prod(shape)) * bits.itemsize).view(bits).reshape(shape)

    def values(self, at: NDArray[np.int64], dtype: str) -> NDArray[np.float32]:
        """What elements ``at`` stand for, scales applied, as :meth:`hold` put them there."""
        found: NDArray[np.float32] = self._decoded[dtype][at % self.period]
        return found

    def bits(self, first: int, count: int) -> NDArray[np.uint16]:
        """bfloat16 bits of ``count`` elements from ``first``, as :meth:`hold` put them there."""
        found: NDArray[np.uint16] = self._bits["bfloat16"][(first + np.arange(count)) % self.period]
        return found

    def words_sum(self, num_bytes: int) -> int:
        """Sum of the arena's first 32-bit words, modulo 2**32.

        Of ``num_bytes`` bytes, while the arena holds bfloat16.
        """
        words = self._bits["bfloat16"].view(np.uint32)
        turns, rest = divmod(num_bytes // 4, len(words))
        return (turns * int(words.sum(dtype=np.uint64)) + int(words[:rest].sum(dtype=np.uint64))) % 2**32


def _e4m3_values() -> NDArray[np.float32]:
    """float32 [256]: the value of every e4m3 byte (no infinities; 0x7F and 0xFF are NaN)."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size[byte & 127 == 127] = np.nan
    return np.where(byte >> 7, -size, size).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Bytes of the nearest e4m3, a tie to the smaller size; too large becomes the largest."""
    sizes = E4M3_VALUES[:127]
    middles = (sizes[1:] + sizes[:-1]) / 2
    return (np.searchsorted(middles, np.abs(values)) | np.where(values < 0, 128, 0)).astype(np.uint8)
