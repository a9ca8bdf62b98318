"""``pagedkv plan``: model, machines and users in, table or JSON out.

Exit code 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

from pagedkv.errors import InvalidArgument
from pagedkv.lab.sizing.machines import GPUS, Gpu, Machines, find_gpu
from pagedkv.lab.sizing.models import MODELS, Model, find_model, model_of_config, with_window_kept
from pagedkv.lab.sizing.planner import plan
from pagedkv.lab.sizing.result import Plan
from pagedkv.lab.sizing.shape import FORMATS, KVFormat, LayerGroup, mla, token_bytes
from pagedkv.lab.sizing.table import lines, params, shape
from pagedkv.lab.sizing.users import Users
from pagedkv.spec.sizes import format_size, parse_size

DEFAULT_MODEL, DEFAULT_GPU = "llama-3.1-70b", "h100"
DESCRIPTION = """Where users' KV fits and how long they wait for it. Without arguments: one million users on 1,000 GPUs.
A number may be written 1000000, 1,000,000 or 1M; a share 0.01 or 1%; a size 80GB or 64GiB. Times are the least that
bytes, rates and arithmetic allow."""
_NUMBER = re.compile(r"([0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kMB]?)", re.ASCII)
_FACTOR = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_SETS = {  # parameters of the library, by the options that set them
    "num_gpus": "gpus", "memory_bytes": "gpu_memory", "read_bytes_per_s": "gpu_read", "flops_per_s": "gpu_tflops",
    "link_bytes_per_s": "link", "disk_bytes_per_s": "disk_read", "bits": "weight_bits", "step_s": "step_ms",
    "num_layers": "layers", "num_kv_heads": "kv_heads", "latent_dim": "latent", "rope_dim": "latent",
    **{name: name for name in (
        "users", "tokens", "max_tokens", "active", "shared_prefix", "turns_per_hour", "gpus_per_server", "block_size",
        "tensor_parallel", "memory_share", "kv_share", "scale_group", "scale_bits", "head_dim", "v_head_dim", "window",
        "params", "active_params",
    )},
}  # fmt: skip
_BY_NUMBERS = ("config", "layers", "kv_heads", "head_dim", "v_head_dim", "window", "latent", "params", "active_params")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``plan`` command and its options."""
    parser = commands.add_parser("plan", help="size KV for a model, machines and users", description=DESCRIPTION)
    about = parser.add_argument_group("model")
    add = about.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"a name; --models lists them (default: {DEFAULT_MODEL})")
    add("--models", action="store_true", help="list models and GPUs known by name, and end")
    add("--config", metavar="FILE", help="a model by its config.json, with --params")
    add("--layers", metavar="N", help="a model by its numbers: layers")
    add("--kv-heads", metavar="N", help="KV heads of a layer")
    add("--head-dim", metavar="N", help="numbers in a head of K")
    add("--v-head-dim", metavar="N", help="numbers in a head of V (default: as K)")
    add("--latent", metavar="N[+ROPE]", help="MLA: numbers of the one latent, as in 512+64; without heads")
    add("--window", metavar="TOKENS", help="sliding window of all layers")
    add("--params", metavar="N", help="weights, as in 7B")
    add("--active-params", metavar="N", help="weights that one token meets (default: all)")
    add("--weight-bits", metavar="N", default="16", help="bits of a weight (default: %(default)s)")
    add("--kv-dtype", metavar="D", default="float16", help=f"of {', '.join(FORMATS)} (default: %(default)s)")
    add("--scale-group", metavar="N", default="0", help="numbers that share a scale (default: too many to count)")
    add("--scale-bits", metavar="N", default="16", help="bits of a scale (default: %(default)s)")
    add("--block-size", metavar="TOKENS", default="16", help="default: %(default)s")
    add("--keep-window", action="store_true", help="tokens behind a window are kept, as in a cache without by_group")

    about = parser.add_argument_group("users")
    add = about.add_argument
    add("--users", metavar="N", default="1M", help="sessions to keep (default: %(default)s)")
    add("--tokens", metavar="N", default="512", help="of a session (default: %(default)s)")
    default = "the model's context; of a model by its numbers, --tokens"
    add("--max-tokens", metavar="N", help=f"of the longest session (default: {default})")
    add("--active", metavar="SHARE", default="1%", help="that generate at once (default: 1%%)")
    add("--shared-prefix", metavar="TOKENS", default="0", help="that all sessions begin with (default: none)")
    add("--turns-per-hour", metavar="N", default="0", help="how often a user comes back (default: not counted)")

    about = parser.add_argument_group("machines")
    add = about.add_argument
    add("--gpus", metavar="N", default="1000", help="default: %(default)s")
    add("--gpu", metavar="NAME", default=DEFAULT_GPU, help=f"of {', '.join(GPUS)} (default: %(default)s)")
    add("--gpu-memory", metavar="SIZE", help="instead of that GPU's")
    add("--gpu-read", metavar="SIZE", help="memory rate per second, instead of that GPU's")
    add("--gpu-tflops", metavar="N", help="10^12 16-bit operations per second, instead of that GPU's")
    add("--link", metavar="SIZE", help="host to GPU per second, instead of that GPU's")
    add("--gpus-per-server", metavar="N", default="8", help="default: %(default)s")
    add("--tensor-parallel", metavar="N", help="GPUs per copy of the weights (default: as few as hold them)")
    add("--memory-share", metavar="SHARE", default="90%", help="of a GPU's memory for weights and KV (default: 90%%)")
    add("--kv-share", metavar="SHARE", help="of a GPU's memory for KV alone, instead of --memory-share")
    add(
        "--host-memory",
        metavar="SIZE",
        default="1TB",
        help="host memory for KV, per server (default: %(default)s; 0B: none)",
    )
    add("--disk", metavar="SIZE", default="10TB", help="disk for KV, per server (default: %(default)s; 0B: none)")
    add("--disk-read", metavar="SIZE", default="7GB", help="of a server's disks per second (default: %(default)s)")
    add("--step-ms", metavar="MS", help="time of a decode step (default: the least that memory needs)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; sizes in bytes, times in seconds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Any = None) -> int:
    """Print a plan, or the models and GPUs known by name; 0."""
    if arguments.models:
        print(known(as_json=arguments.json))
        return 0
    try:
        found = _planned(arguments)
    except InvalidArgument as problem:
        raise _about_an_option(problem) from None
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else "\n".join(lines(found)))
    return 0


def _planned(arguments: argparse.Namespace) -> Plan:
    options = _Options(arguments)
    model = options.model()
    return plan(
        with_window_kept(model) if arguments.keep_window else model,
        options.machines(),
        options.users(),
        kv=options.kv_format(),
        weight_bits=options.count("weight_bits"),
        block_size=options.count("block_size"),
        tensor_parallel=options.maybe("tensor_parallel"),
        memory_share=options.share("memory_share"),
        kv_share=None if arguments.kv_share is None else options.share("kv_share"),
        step_s=None if arguments.step_ms is None else options.number("step_ms") / 1000,
    )


def _about_an_option(problem: InvalidArgument) -> InvalidArgument:
    """The library's errors begin with a parameter's name: with the option that sets it instead."""
    name, _, rest = str(problem).partition(" ")
    return InvalidArgument(f"{_option(_SETS[name])} {rest}") if name in _SETS else problem


def known(*, as_json: bool = False) -> str:
    """Models and GPUs that have a name."""
    if as_json:
        models = {
            name: {"kv_bytes_per_token": token_bytes(one.groups), "params": one.params, "source": one.source}
            for name, one in MODELS.items()
        }
        return json.dumps({"models": models, "gpus": {name: gpu.memory_bytes for name, gpu in GPUS.items()}}, indent=2)
    text = [f"{'model':18} {'weights':>8} {'KV per token':>12}  layers, and where that is published"]
    for name, model in MODELS.items():
        size = format_size(token_bytes(model.groups))
        text.append(f"{name:18} {params(model.params):>8} {size:>12}  {shape(model)}; {model.source}")
    text.append("GPUs: " + ", ".join(f"{name} ({format_size(gpu.memory_bytes)})" for name, gpu in GPUS.items()))
    return "\n".join(text)


class _Options:
    """The options as numbers; an error names the option it is about."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    def given(self, name: str) -> Any:
        return getattr(self._arguments, name)

    def number(self, name: str) -> float:
        return float(self._decimal(name))

    def count(self, name: str) -> int:
        return parse_count(self.given(name), _option(name))

    def maybe(self, name: str) -> int | None:
        return None if self.given(name) is None else self.count(name)

    def share(self, name: str) -> float:
        text = self.given(name).strip()
        found = _NUMBER.fullmatch(text.removesuffix("%"))
        if found is not None and not found[2] and "," not in found[1]:
            value = Decimal(found[1]) / (100 if text.endswith("%") else 1)
            if value <= 1:
                return float(value)
        raise InvalidArgument(f"{_option(name)}: {text[:40]!r} is no share: write 0.25 or 25%")

    def size(self, name: str) -> int:
        try:
            return parse_size(self.given(name))
        except InvalidArgument as error:
            raise InvalidArgument(f"{_option(name)}: {error}") from None

    def model(self) -> Model:
        """By its name, or by its numbers; not by both."""
        numbers = [name for name in _BY_NUMBERS if self.given(name) is not None]
        if not numbers:
            return find_model(self.given("model") or DEFAULT_MODEL)
        if self.given("model") is not None:
            raise InvalidArgument(f"give MODEL or its numbers, not both ({_option(numbers[0])})")
        if self.given("config") is not None:
            return self._of_config(numbers)
        latent = self.given("latent") is not None
        for name in ("layers", *(() if latent else ("kv_heads", "head_dim")), "params"):
            if self.given(name) is None:
                raise InvalidArgument(f"a model by its numbers needs {_option(name)} too")
        for name in ("kv_heads", "head_dim", "v_head_dim") if latent else ():
            if self.given(name) is not None:
                raise InvalidArgument(f"--latent takes the place of {_option(name)}: give one of them")
        if latent:
            group = self._latent()
        else:
            group = LayerGroup(
                *map(self.count, ("layers", "kv_heads", "head_dim")), v_head_dim=self.maybe("v_head_dim")
            )
        group = replace(group, window=self.maybe("window"))
        return Model("model", (group,), self.count("params"), self.maybe("active_params"), self._longest())

    def _longest(self) -> int:
        """Tokens of the longest session."""
        return self.count("tokens" if self.given("max_tokens") is None else "max_tokens")

    def _of_config(self, given: list[str]) -> Model:
        """By its file, which has all numbers but those of the weights."""
        for name in given:
            if name not in ("config", "params", "active_params"):
                raise InvalidArgument(f"--config FILE takes the place of {_option(name)}: give one of them")
        if self.given("params") is None:
            raise InvalidArgument("--config needs --params too: a config.json does not count the weights")
        return model_of_config(
            self.given("config"), self.count("params"), self.maybe("active_params"), self._longest()
        )  # fmt: skip

    def _latent(self) -> LayerGroup:
        parts = self.given("latent").split("+")
        if len(parts) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            raise InvalidArgument(f"--latent: {self.given('latent')[:40]!r} is not written as 512+64")
        return mla(self.count("layers"), int(parts[0]), int(parts[1]) if len(parts) == 2 else 0)

    def kv_format(self) -> KVFormat:
        scales = {name: self.count(name) for name in ("scale_group", "scale_bits")}
        return KVFormat(self.given("kv_dtype"), **scales)

    def users(self) -> Users:
        return Users(
            self.count("users"), self.count("tokens"), self.maybe("max_tokens"), self.share("active"),
            self.count("shared_prefix"), self.number("turns_per_hour"),
        )  # fmt: skip

    def machines(self) -> Machines:
        gpu: Gpu = find_gpu(self.given("gpu"))
        sizes = {"gpu_memory": "memory_bytes", "gpu_read": "read_bytes_per_s", "link": "link_bytes_per_s"}
        changes: dict[str, Any] = {
            field: self.size(name) for name, field in sizes.items() if self.given(name) is not None
        }
        if self.given("gpu_tflops") is not None:
            changes["flops_per_s"] = self.number("gpu_tflops") * 1e12
        if changes:
            gpu = replace(gpu, name=f"modified {gpu.name}", **changes)
        return Machines(
            gpu, self.count("gpus"), self.count("gpus_per_server"), self.size("host_memory"),
            self.size("disk"), self.size("disk_read"),
        )  # fmt: skip

    def _decimal(self, name: str) -> Decimal:
        return _decimal(self.given(name), _option(name))


def parse_count(text: str, option: str) -> int:
    """A whole number as ``pagedkv plan`` takes them: 1000000, 1,000,000 or 1M.

    Raises
    ------
    InvalidArgument
        It is none; the message names the option.
    """
    exact = _decimal(text, option)
    if exact != int(exact):
        raise InvalidArgument(f"{option}: {text[:40]} is not a whole number")
    return int(exact)


def _decimal(text: str, option: str) -> Decimal:
    text = text.strip()
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"{option}: {text[:40]!r} is not a number: write 1000000, 1,000,000 or 1M")
    return Decimal(found[1].replace(",", "")) * _FACTOR[found[2]]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
