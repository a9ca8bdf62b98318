"""A variant: one kernel specialised by macros, the unit of compilation and of the caches."""

from __future__ import annotations

from dataclasses import dataclass, field

BASE_OPTIONS = ("-std=c++17", "-ftz=true", "-lineinfo", "-default-device")


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel and the -D macros it is compiled with.

    Parameters
    ----------
    kernel : name of the .cu and of its ``extern "C"`` entry.
    macros : (name, value) pairs in alphabetical order; make them with :func:`variant`.
    arch_features : "" or "a": whether it needs an architecture's own instructions (``sm_90a``).
    """

    kernel: str
    macros: tuple[tuple[str, str], ...] = ()
    arch_features: str = ""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kernel, self.macros, self.arch_features)))

    def __hash__(self) -> int:
        """Computed once: every launch looks its kernel up."""
        return self._hash

    def options(self, arch: str) -> tuple[str, ...]:
        """NVRTC options for an architecture such as ``sm_90`` or ``compute_90``."""
        return (f"-arch={arch}", *BASE_OPTIONS, *(f"-D{name}={value}" for name, value in self.macros))

    def __str__(self) -> str:
        return f"{self.kernel}<{', '.join(f'{name}={value}' for name, value in self.macros)}>"


def variant(kernel: str, *, arch_features: str = "", **macros: int | str | bool) -> Variant:
    """Variant of a kernel; booleans become 0 and 1."""
    given = {name: str(int(value)) if isinstance(value, bool | int) else value for name, value in macros.items()}
    return Variant(kernel, tuple(sorted(given.items())), arch_features)
