"""Converted models on disk, so that a GGUF is parsed and expanded once.

A file is named after the SHA-256 of its GGUF. It is a plain ``.npz`` whose members carry checksums; a file that is cut,
damaged or of another format is not believed, and made again.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path

import numpy as np

from examples.llama_numpy.config import LlamaConfig
from examples.llama_numpy.folders import appearing, models_folder, sha256_of
from examples.llama_numpy.gguf_file import Model, read_gguf
from examples.llama_numpy.vocabulary import Vocabulary
from examples.llama_numpy.weights import LlamaWeights

FORMAT = 1  # raise it when arrays or their meaning change


def load_model(path: Path, folder: Path | None = None) -> Model:
    """A model from its GGUF, or from what was converted from the very same bytes before.

    Parameters
    ----------
    path : the GGUF.
    folder : of converted models. Default: :func:`models_folder`. If it cannot be written, a RuntimeWarning says so.

    Raises
    ------
    ModelFileError, ImportError, OSError
        As :func:`read_gguf`.
    """
    digest = sha256_of(path)
    kept = (models_folder() if folder is None else folder) / f"{digest}-v{FORMAT}.npz"
    model = _read(kept, digest)
    if model is None:
        model = read_gguf(path)
        try:
            _write(kept, model)
        except OSError as error:
            warnings.warn(
                f"the converted weights cannot be kept in {kept.parent} ({error.strerror}): every run converts anew",
                RuntimeWarning,
                stacklevel=2,
            )
    return model


def _write(path: Path, model: Model) -> None:
    about = {
        "sha256": model.sha256,
        "name": model.name,
        "config": model.weights.config.to_dict(),
        "vocabulary": model.vocabulary.to_dict(),
    }
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with appearing(path) as file:
        np.savez(file, about=text, **model.weights.stored())  # type: ignore[arg-type]  # a name is no allow_pickle


def _read(path: Path, digest: str) -> Model | None:
    """What a file holds, every byte of it checked.

    None if it is not there or not to be believed.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}  # reading a member to its end compares its checksum
        about = json.loads(arrays.pop("about").tobytes())
        if about["sha256"] != digest:
            return None
        weights = LlamaWeights.from_arrays(LlamaConfig(**about["config"]), arrays)
        return Model(about["name"], digest, Vocabulary.from_dict(about["vocabulary"]), weights)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, NotImplementedError):
        return None
