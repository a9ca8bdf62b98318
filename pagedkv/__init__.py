"""pagedkv: a paged KV cache that any inference runtime can import."""

import importlib
import importlib.util
import logging
import sys
import threading
import types
import typing

if importlib.util.find_spec("pagedkv._core.block_table") is None:
    raise ImportError(
        f"{__path__[0]} holds the sources of pagedkv, whose modules are not compiled: leave this folder to import the "
        "installed package, or compile them in place with `pip install -e .`"
    )

from pagedkv import errors as errors
from pagedkv._version import __version__ as __version__
from pagedkv.errors import AddressInUse as AddressInUse
from pagedkv.errors import ClosedError as ClosedError
from pagedkv.errors import CompileError as CompileError
from pagedkv.errors import DoubleRelease as DoubleRelease
from pagedkv.errors import ExchangeRefused as ExchangeRefused
from pagedkv.errors import FileFormatError as FileFormatError
from pagedkv.errors import InvalidArgument as InvalidArgument
from pagedkv.errors import KernelsUnavailable as KernelsUnavailable
from pagedkv.errors import LayoutMismatch as LayoutMismatch
from pagedkv.errors import NamespaceRequired as NamespaceRequired
from pagedkv.errors import NotSupported as NotSupported
from pagedkv.errors import OutOfBlocks as OutOfBlocks
from pagedkv.errors import PagedKVError as PagedKVError
from pagedkv.errors import PinBudgetExceeded as PinBudgetExceeded
from pagedkv.errors import QueueFull as QueueFull
from pagedkv.errors import RankLost as RankLost
from pagedkv.errors import RanksDisagree as RanksDisagree
from pagedkv.errors import RecordingFormatError as RecordingFormatError
from pagedkv.errors import RequestTooLarge as RequestTooLarge
from pagedkv.errors import SlowReader as SlowReader
from pagedkv.errors import StaleHandle as StaleHandle
from pagedkv.errors import StepFailed as StepFailed
from pagedkv.errors import StoreDamaged as StoreDamaged
from pagedkv.errors import TierError as TierError
from pagedkv.errors import TraceFormatError as TraceFormatError
from pagedkv.errors import UnsupportedVariant as UnsupportedVariant
from pagedkv.errors import WrongType as WrongType
from pagedkv.spec.budgets import Disk as Disk
from pagedkv.spec.kv_spec import KVSpec as KVSpec
from pagedkv.spec.layers import Attention as Attention
from pagedkv.spec.layers import Latent as Latent
from pagedkv.spec.layers import Recurrent as Recurrent
from pagedkv.spec.layers import Rows as Rows
from pagedkv.spec.layers import SameAs as SameAs
from pagedkv.spec.namespace import Namespace as Namespace
from pagedkv.spec.policies import Hazard as Hazard
from pagedkv.spec.ranks import Ranks as Ranks
from pagedkv.spec.remote import Mooncake as Mooncake
from pagedkv.spec.remote import Objects as Objects
from pagedkv.spec.remote import Valkey as Valkey
from pagedkv.spec.scales import Scales as Scales
from pagedkv.spec.sizes import Blocks as Blocks
from pagedkv.spec.sizes import Bytes as Bytes
from pagedkv.spec.sizes import Size as Size

importlib.import_module("pagedkv.threads.ending")  # before handlers that a program registers from now on

if typing.TYPE_CHECKING:
    from pagedkv import core as core
    from pagedkv import events as events
    from pagedkv.cache.cache import KVCache as KVCache
    from pagedkv.cache.pin import Pin as Pin
    from pagedkv.cache.ranks.rank import Rank as Rank
    from pagedkv.cache.sequence import Sequence as Sequence
    from pagedkv.cache.step import Step as Step
    from pagedkv.core import Tier as Tier
    from pagedkv.core import get_include as get_include
    from pagedkv.lab.traces import TraceRecorder as TraceRecorder
    from pagedkv.observe.stats import CacheStats as CacheStats
    from pagedkv.scheduler import Scheduler as Scheduler
    from pagedkv.scheduler import SchedulerOptions as SchedulerOptions

logging.getLogger("pagedkv").addHandler(logging.NullHandler())  # silent unless the application configures logging


_here, _one_first_use = sys.modules[__name__], threading.RLock()
_LATER = {  # names that load the rooms of a cache, or of its tools, with their first use: the module of each
    "CacheStats": "observe.stats",
    "KVCache": "cache.cache",
    "Pin": "cache.pin",
    "Rank": "cache.ranks.rank",
    "Scheduler": "scheduler",
    "SchedulerOptions": "scheduler",
    "Sequence": "cache.sequence",
    "Step": "cache.step",
    "Tier": "core",
    "TraceRecorder": "lab.traces",
    "get_include": "core",
}
__all__ = [name for name in dir() if name[0] != "_" and not isinstance(getattr(_here, name), types.ModuleType)]
__all__ = ["errors", *(name for name in __all__ if name not in _LATER), *_LATER]


if not typing.TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> typing.Any:
        if name in _LATER:
            # One thread at a time, and a cache first: threads that entered its modules at two ends would meet half way
            with _one_first_use:
                if _LATER[name] != "core":
                    importlib.import_module("pagedkv.cache.cache")
                found = getattr(importlib.import_module(f"pagedkv.{_LATER[name]}"), name)
            setattr(_here, name, found)
            return found
        if name[0] != "_" and importlib.util.find_spec(f"pagedkv.{name}") is not None:  # without its import
            with _one_first_use:
                return importlib.import_module(f"pagedkv.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "events"]
