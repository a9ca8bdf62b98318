"""The beds: SmolLM2 and a tiny model at several block sizes.

The tests download the weights of SmolLM2 themselves.

Without a network the real model's tests are skipped with the reason; with PAGEDKV_REQUIRE_REALMODEL set they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pagedkv as pk
from examples.gemma_numpy.model import Gemma
from examples.gemma_numpy.weights import load_model as load_gemma
from examples.llama_numpy import source
from examples.llama_numpy.gguf_file import Model
from examples.llama_numpy.model import Llama
from examples.llama_numpy.weight_cache import load_model
from tests.realmodel import tiny, tiny_gemma
from tests.realmodel.bed import Bed, goldens_of, one_blas_thread, read_goldens, tiny_goldens, weights_from

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _few_threads() -> Iterator[None]:
    with one_blas_thread():
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF, downloaded once into the user's cache directory."""
    return weights_from(source)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Model:
    """The model file's content."""
    return load_model(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_bed(smollm2: Model, smollm2_path: Path) -> Bed:
    return Bed(
        "smollm2",
        smollm2_path,
        Llama(smollm2.weights),
        read_goldens(HERE / "goldens.json"),
        block_size=16,
        tie=0.06,
        tolerance=0.005,  # of logits around 20; the goldens are rounded to 0.001, ours were within 0.0006 of them
    )


@pytest.fixture(scope="session")
def tensors() -> tiny.Tensors:
    """The tiny model's tensors."""
    return tiny.random_tensors()


@pytest.fixture(scope="session")
def tiny_path(tensors: tiny.Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's GGUF."""
    return tiny.write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tensors)


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """What the tiny GGUF holds."""
    return load_model(tiny_path, tmp_path_factory.mktemp("converted"))


@pytest.fixture(scope="session")
def tiny_beds(tiny_model: Model, tiny_path: Path, tensors: tiny.Tensors) -> dict[int, Bed]:
    """By block size."""
    goldens = tiny_goldens(tensors)
    model = Llama(tiny_model.weights)
    sizes = (1, 8, 16, 64)
    return {size: Bed("tiny", tiny_path, model, goldens, block_size=size, tie=1e-3, tolerance=1e-3) for size in sizes}


@pytest.fixture(scope="session")
def gemma_tensors() -> tiny_gemma.Tensors:
    """The tensors of the tiny model with windows."""
    return tiny_gemma.random_tensors()


@pytest.fixture(scope="session")
def tiny_gemma_bed(gemma_tensors: tiny_gemma.Tensors, tmp_path_factory: pytest.TempPathFactory) -> Bed:
    """Layers that see 24 tokens beside one that sees all."""
    path = tiny_gemma.write_gguf(tmp_path_factory.mktemp("tiny_gemma") / "gemma.gguf", gemma_tensors)
    among = range(tiny_gemma.FIRST_PLAIN, len(tiny_gemma.TOKENS))
    goldens = goldens_of(lambda tokens: tiny_gemma.logits_of(gemma_tensors, tokens), among)
    model = Gemma(load_gemma(path).weights)
    return Bed("tiny gemma", path, model, goldens, block_size=8, tie=1e-3, tolerance=1e-3)


SMOLLM2 = pytest.param("smollm2", marks=[pytest.mark.realmodel, pytest.mark.slow])


@pytest.fixture(params=["tiny-1", "tiny-8", "tiny-16", "tiny-64", "tiny_gemma", SMOLLM2])
def bed(request: pytest.FixtureRequest) -> Bed:
    """Every scenario runs on each of these."""
    if request.param == "tiny_gemma":
        gemma: Bed = request.getfixturevalue("tiny_gemma_bed")
        return gemma
    _model, _, size = request.param.partition("-")
    found: Bed = request.getfixturevalue("tiny_beds")[int(size)] if size else request.getfixturevalue("smollm2_bed")
    return found


@pytest.fixture
def opened() -> Iterator[Callable[..., pk.KVCache]]:
    """Opens a bed's caches; at the end no block of theirs is held, and their books agree."""
    caches: list[pk.KVCache] = []

    def open_it(bed: Bed, num_tokens: int, **options: Any) -> pk.KVCache:
        caches.append(bed.open(num_tokens, **options))
        return caches[-1]

    yield open_it
    for cache in caches:
        cache.check_integrity()
        assert all(counts["live"] == 0 for counts in cache.stats().blocks.values())
        cache.close()
