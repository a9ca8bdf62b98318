"""``pagedkv doctor``: finds the installed parts, and tests the CPU and GPU kernels.

Exit code 1 if something fails that this machine should be able to do, 0 otherwise. Without a GPU the CUDA kernels are
compiled where NVRTC is installed; CuPy and their self-test are skipped then. ``--disk DIR`` tries a directory for the
disk tier instead, ``--remote URL`` a remote store; ``--gpu`` lists the kernels of another GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagedkv import cpu
from pagedkv._version import __version__
from pagedkv.attention import PagedAttention
from pagedkv.errors import InvalidArgument, PagedKVError
from pagedkv.kernels import autotune
from pagedkv.kernels.backend import Backend
from pagedkv.kernels.cupy_backend import CupyBackend, device_count, import_cupy
from pagedkv.kernels.driver import driver_version
from pagedkv.kernels.jit import CompileCache, default_folder
from pagedkv.kernels.nvrtc import Nvrtc
from pagedkv.kernels.precompile import architecture
from pagedkv.kernels.select import KERNELS, make_plan
from pagedkv.kernels.shipped import FLAGSHIP, shipped
from pagedkv.kernels.source import kernel_names, sources_dir
from pagedkv.kernels.toolkits import installed_nvrtcs, nvrtc_for
from pagedkv.kernels.trial import TimedBackend
from pagedkv.kernels.variant import Variant
from pagedkv.reference import paged_attention
from pagedkv.spec.paths import path_text
from pagedkv.spec.sizes import parse_size
from pagedkv.tools import choice, remote
from pagedkv.tools.store import trial

Status = Literal["ok", "warning", "failed", "skipped"]
WITHOUT_GPU = (9, 0)  # compiled for then
DISK_SIZE = "1GiB"
LARGEST_ERROR = 1e-3  # of float16 against float64, relative to the largest output
SEQ_LENS, Q_LENS = (1, 17, 300), (1, 3, 2)
HEADS, MANY_HEADS = 8, 40  # of queries; the kernel for many heads takes no fewer than 33
TUNED_AGAIN, TUNED_AGAIN_Q_LEN = FLAGSHIP, 2048  # other configs are tried at their first use


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes
    ----------
    name : of the examined part.
    status : only ``"failed"`` makes the exit code 1.
    detail : the finding, and the command that installs a missing part.
    seconds : how long it took, where that says something.
    """

    name: str
    status: Status
    detail: str
    seconds: float | None = None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``doctor`` command."""
    about = """Compare the CPU kernels with float64; look at device, driver, compiler and CuPy; compile every CUDA
    kernel and compare them, too. With --disk: make a store in a temporary directory inside DIR, try and measure it,
    delete it, and say how much a disk hit saves. With --remote: try and measure a remote store.
    With --gpu: list the kernels that "auto" tries on another GPU, and why not the others."""
    parser = commands.add_parser("doctor", help="try the CUDA kernels or a disk tier here", description=about)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--disk", metavar="DIR", help="try this directory for a disk tier, and not the kernels")
    parser.add_argument(
        "--remote", metavar="URL",
        help="try this remote store: valkey://host:6379/0, mooncake://master:50051, s3://bucket, ...",
    )  # fmt: skip
    parser.add_argument("--cluster", action="store_true", help="the server of --remote is a node of a cluster")
    parser.add_argument("--secret-file", metavar="FILE", help="secret for --remote (default: a random one)")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust for --remote")
    parser.add_argument("--size", metavar="SIZE", help=f"of the store for --disk (default: {DISK_SIZE})")
    parser.add_argument("--gpu", metavar="X.Y", help="list the kernels for a compute capability, 9.0 for an H100")
    parser.add_argument("--retune", action="store_true", help="forget the verdicts on CUDA kernels, and try them again")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, argv: Any = None) -> int:
    """Print the report; 1 if a check failed, else 0."""
    if arguments.gpu is not None:
        return choice.run(arguments)
    found = []
    numbers: dict[str, Any] = {}
    what = "disk"
    if arguments.retune and (arguments.remote is not None or arguments.disk is not None):
        raise InvalidArgument("--retune tries the CUDA kernels again, and --disk and --remote try something else")
    if arguments.remote is not None:
        if arguments.disk is not None or arguments.size is not None:
            raise InvalidArgument("--remote and --disk are two examinations: ask for one")
        what, examination = "remote", examine_remote(arguments, numbers)
    elif arguments.secret_file is not None or arguments.ca_file is not None or arguments.cluster:
        raise InvalidArgument("--secret-file, --ca-file and --cluster are for --remote")
    elif arguments.disk is None:
        if arguments.size is not None:
            raise InvalidArgument("--size is for --disk")
        examination = examine(retune=arguments.retune)
    else:
        size, directory = arguments.size or DISK_SIZE, path_text(arguments.disk, "--disk")
        trial.check_arguments(directory, parse_size(size))
        examination = examine_disk(directory, size, numbers)
    if not arguments.json:
        print(f"pagedkv {__version__}, Python {platform.python_version()}, {platform.platform()}")
    with contextlib.closing(examination) as checks:
        for check in checks:
            found.append(check)
            if not arguments.json:
                took = "" if check.seconds is None else f"  ({check.seconds:.2f} s)"
                print(f"{check.status:8} {check.name:24} {check.detail}{took}", flush=True)
    failed = [check.name for check in found if check.status == "failed"]
    if arguments.json:
        about = {"pagedkv": __version__, "python": platform.python_version(), "platform": platform.platform()}
        report = {**about, "ok": not failed, "checks": [asdict(check) for check in found]}
        print(json.dumps(report | ({what: numbers} if numbers else {}), indent=2))
    else:
        print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


def examine_disk(directory: str, size: str, numbers: dict[str, Any]) -> Generator[Check, None, None]:
    """The checks of ``--disk``; `numbers` is filled with the measurements."""
    with contextlib.closing(trial.examine(directory, parse_size(size), numbers)) as findings:
        yield from (Check(*finding) for finding in findings)


def examine_remote(arguments: argparse.Namespace, numbers: dict[str, Any]) -> Generator[Check, None, None]:
    """The checks of ``--remote``; `numbers` is filled with the measurements."""
    store = remote.options(
        arguments.remote, arguments.secret_file, arguments.ca_file, is_cluster=arguments.cluster
    )  # fmt: skip
    with contextlib.closing(remote.examine(store, numbers)) as findings:
        yield from (Check(*finding) for finding in findings)


def examine(*, retune: bool = False) -> Generator[Check, None, None]:
    """All checks, one after the other; with `retune` the kernels are tried again."""
    yield from cpu_self_test()
    try:
        yield Check("sources", "ok", f"{len(kernel_names())} kernels in {sources_dir()}")
    except PagedKVError as error:
        yield Check("sources", "failed", str(error))
        return
    driver = driver_version()
    yield _driver(driver)
    cupy, count = None, 0
    for check, module, devices in _cupy(driver is not None):
        cupy, count = module or cupy, devices or count
        yield check
    for number in range(count):
        yield _device(cupy, number)
    nvrtc = None
    for check, chosen in _nvrtc(driver):
        nvrtc = chosen or nvrtc
        yield check
    yield cache_check(default_folder())
    capability = _capability(cupy) if count else WITHOUT_GPU
    if nvrtc is None:
        yield Check("compile", "skipped", "no NVRTC")
    else:
        for variant in typical(capability):
            yield compile_check(variant, capability, nvrtc)
    if not count:
        yield Check("self-test", "skipped", "no GPU")
        if retune:
            yield Check("kernels chosen", "skipped", "no GPU: nothing is tried again")
        return
    try:
        backend = CupyBackend()
    except PagedKVError as error:
        yield Check("self-test", "failed", str(error))
        return
    yield from self_test(backend)
    yield from verdict_checks(backend, retune)


def verdict_checks(backend: TimedBackend, retune: bool) -> Iterator[Check]:
    """The verdicts on the kernels of this device; a kernel that was wrong is a warning."""
    verdicts, is_on = autotune.verdicts_of(backend), autotune.is_on(backend)
    if not is_on:  # kernels found wrong before are passed over all the same, and shown
        yield Check("kernels chosen", "failed" if retune else "skipped", "PAGEDKV_AUTOTUNE=0: no kernel is tried")
    elif retune:
        try:
            verdicts.forget()
        except OSError as error:
            why = f"{verdicts.path} cannot be removed ({error.strerror}): remove it, or set PAGEDKV_CACHE_DIR"
            yield Check("kernels chosen", "failed", f"{why}; nothing was tried again")
            return
        for name, max_q_len in (("decode", 1), ("prefill", TUNED_AGAIN_Q_LEN)):
            start = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the report has them
                    make_plan(backend, TUNED_AGAIN, num_kv_heads=8, max_sequences=1, max_q_len=max_q_len)
            except Exception as error:  # of CuPy and the driver, too: a report is wanted, not a traceback
                yield Check(f"try {name}", "failed", f"{type(error).__name__}: {error}", time.perf_counter() - start)
    found = verdicts.all()
    if is_on and not found:
        yield Check("kernels chosen", "ok", "none yet: the first use tries them, or pagedkv doctor --retune")
    for name, verdict in sorted(found.items()):
        times = ", ".join(f"{kernel} {us:.1f} us" for kernel, us in verdict.us.items())
        wrong = "".join(f"; {kernel} is wrong: {why}" for kernel, why in verdict.wrong.items())
        late = "".join(f"; {kernel} was not tried yet" for kernel in verdict.late)
        yield Check("kernel chosen", "warning" if wrong else "ok", f"{name}: {verdict.kernel} ({times}){wrong}{late}")


def _driver(version: tuple[int, int] | None) -> Check:
    if version is None:
        return Check("driver", "skipped", "no NVIDIA driver (libcuda.so.1)")
    return Check("driver", "ok", f"for CUDA {version[0]}.{version[1]}")


def _cupy(has_driver: bool) -> Iterator[tuple[Check, Any, int]]:
    """CuPy and how many devices it sees. Neither has to be there where there is no driver."""
    trouble: Status = "failed" if has_driver else "skipped"
    try:
        cupy = import_cupy()
    except PagedKVError as error:
        yield Check("CuPy", trouble, str(error)), None, 0
        return
    yield Check("CuPy", "ok", f"{cupy.__version__} in {Path(cupy.__file__).parent}"), cupy, 0
    try:
        count = device_count(cupy)
    except PagedKVError as error:
        none = "no CUDA device" in str(error)
        yield Check("device", "skipped" if none else trouble, str(error)), cupy, 0
        return
    yield Check("devices", "ok", f"{count}"), cupy, count


def _device(cupy: Any, number: int) -> Check:
    found = cupy.cuda.runtime.getDeviceProperties(number)
    name = found["name"].decode() if isinstance(found["name"], bytes) else found["name"]
    capability, gib = f"{found['major']}.{found['minor']}", found["totalGlobalMem"] / 2**30
    detail = f"{name}, compute capability {capability}, {found['multiProcessorCount']} multiprocessors, {gib:.1f} GiB"
    return Check(f"device {number}", "ok", detail)


def _capability(cupy: Any) -> tuple[int, int]:
    found = cupy.cuda.runtime.getDeviceProperties(0)
    return int(found["major"]), int(found["minor"])


def _nvrtc(driver: tuple[int, int] | None) -> Iterator[tuple[Check, Nvrtc | None]]:
    try:
        chosen = nvrtc_for(driver)
    except PagedKVError as error:
        wanted = driver is not None  # else there is nothing to compile for
        yield Check("NVRTC", "failed" if wanted else "skipped", str(error)), None
        return
    for nvrtc in installed_nvrtcs():
        version = ".".join(map(str, nvrtc.version))
        used = "" if nvrtc is chosen else ", not used"
        yield Check("NVRTC", "ok", f"{version} in {nvrtc.library}{used}"), chosen
        headers = nvrtc.header_version
        shown = "unknown version" if headers is None else ".".join(map(str, headers))
        same = headers is None or headers[0] == nvrtc.version[0]
        yield Check("CUDA headers", "ok" if same else "warning", f"{shown} in {nvrtc.include}{used}"), None


def cache_check(folder: Path | None) -> Check:
    """Whether compiled kernels can be kept."""
    if folder is None:
        return Check("compiled kernels", "warning", "no home directory: every process compiles anew")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        why = f"{folder} cannot be written, so every process compiles anew; set PAGEDKV_CACHE_DIR to a folder that can"
        return Check("compiled kernels", "warning", why)
    files = list(folder.glob("*.cubin")) if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files) / 2**20
    return Check("compiled kernels", "ok", f"{len(files)} files of {size:.1f} MiB together in {folder}")


def typical(capability: tuple[int, int]) -> list[Variant]:
    """One shipped variant of every kernel."""
    return list({one.kernel: one for one in reversed(shipped(capability))}.values())[::-1]


def compile_check(variant: Variant, capability: tuple[int, int], nvrtc: Nvrtc) -> Check:
    """Compile a variant, whatever the cache holds."""
    name = f"compile {variant.kernel}"
    start = time.perf_counter()
    try:
        arch = architecture(variant, capability, nvrtc)
        binary = CompileCache(nvrtc, None, ("--ptxas-options=-v",)).get(variant, arch)
    except PagedKVError as error:
        return Check(name, "failed", str(error), time.perf_counter() - start)
    registers = re.findall(r"Used (\d+) registers", binary.log)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", binary.log)))
    detail = f"{arch}, {len(binary.code)} bytes, {', '.join(registers)} registers, {spilled} bytes spilled"
    return Check(name, "ok", detail, time.perf_counter() - start)


def cpu_self_test() -> Iterator[Check]:
    """The CPU kernels against float64 on the same batch, with every available instruction set."""
    problem, expected = _problem()
    used = cpu.isa()
    for name in cpu.isas():
        start = time.perf_counter()
        cpu.set_isa(name)
        try:
            found = cpu.attend(
                problem["q"], problem["k"], problem["v"], problem["seq_lens"],
                block_tables=problem["block_tables"], q_indptr=problem["q_indptr"],
            )  # fmt: skip
        finally:
            cpu.set_isa(used)
        largest = float(np.abs(found - expected).max()) / float(np.abs(expected).max())
        status: Status = "ok" if largest <= LARGEST_ERROR else "failed"
        share = f", used, {cpu.num_threads()} threads" if name == used else ""
        detail = f"largest error {largest:.1e} of the largest output{share}"
        yield Check(f"CPU kernels {name}", status, detail, time.perf_counter() - start)


def self_test(backend: Backend) -> Iterator[Check]:
    """Every attention kernel against float64, on a small ragged batch.

    Unused memory is NaN.
    """
    problem_of = functools.cache(_problem)
    for kernel in KERNELS:
        name, latents = f"self-test {kernel.name}", kernel.name.startswith("decode_mla")
        problem, expected = problem_of(latents, MANY_HEADS if kernel.name == "decode_mla_wgmma" else HEADS)
        start = time.perf_counter()
        try:
            make = functools.partial(
                PagedAttention, num_qo_heads=problem["q"].shape[1], num_kv_heads=problem["k"].shape[2],
                head_dim=problem["k"].shape[3], head_dim_v=problem["v"].shape[3], v_in_k=latents, block_size=16,
                max_sequences=len(SEQ_LENS), max_q_len=max(Q_LENS), max_tokens=sum(Q_LENS), device=backend,
                softmax_scale=problem["k"].shape[3] ** -0.5,
            )  # fmt: skip
            reason = kernel.unsupported(make(kernel="decode_simt").config, backend.capability)
            if reason is not None:
                yield Check(name, "skipped", reason)
                continue
            attention = make(kernel=kernel.name)
            given = {key: backend.asarray(array) for key, array in problem.items()}
            attention.plan(given["block_tables"], given["seq_lens"], given["q_indptr"])
            out = attention.run(given["q"], given["k"], None if latents else given["v"])
            found = backend.to_host(out).astype(np.float64)
        except Exception as error:  # of CuPy and the driver, too: a report is wanted, not a traceback
            yield Check(name, "failed", f"{type(error).__name__}: {error}", time.perf_counter() - start)
            continue
        largest = float(np.abs(found - expected).max()) / float(np.abs(expected).max())
        status: Status = "ok" if largest <= LARGEST_ERROR else "failed"  # a NaN is not <=
        yield Check(name, status, f"largest error {largest:.1e} of the largest output", time.perf_counter() - start)


def _problem(latents: bool = False, qo_heads: int = HEADS) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """Arrays of a batch, and the attention that float64 computes of them.

    With ``latents`` V is a part of K.
    """
    heads, dim = (1, 320) if latents else (2, 64)
    rng = np.random.default_rng(0)
    counts = [-(-length // 16) for length in SEQ_LENS]
    order = rng.permutation(sum(counts) + 4).astype(np.int32)
    tables = np.full((len(SEQ_LENS), max(counts)), -1, np.int32)
    k, v = (np.full((len(order), 16, heads, dim), np.nan, np.float16) for _ in range(2))
    for seq, (length, count) in enumerate(zip(SEQ_LENS, counts, strict=True)):
        tables[seq, :count], order = order[:count], order[count:]
        for position in range(length):
            slot = tables[seq, position // 16], position % 16
            k[slot], v[slot] = rng.standard_normal((2, heads, dim)).astype(np.float16)
    if latents:
        v = k[..., :256]
    q = rng.standard_normal((sum(Q_LENS), qo_heads, dim)).astype(np.float16)
    lens, indptr = np.array(SEQ_LENS, np.int32), np.cumsum([0, *Q_LENS]).astype(np.int32)
    expected = paged_attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), tables, lens, indptr)
    arrays: dict[str, NDArray[Any]] = {
        "q": q,
        "k": k,
        "v": v,
        "block_tables": tables,
        "seq_lens": lens,
        "q_indptr": indptr,
    }
    return arrays, np.asarray(expected)
