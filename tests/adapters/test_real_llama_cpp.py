"""attach() on llama-cpp-python itself, with SmolLM2: ``pytest -m runtimes``.

llama.cpp's own numbers depend on how a prompt is cut into batches, so a hit is compared with the same context rewound
in place; with a cold run only by tokens, without flash attention, and behind prefixes that were prompts themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy import source
from pagedkv.adapters.llama_cpp import attach
from tests.adapters.lives import kill_once_written
from tests.realmodel.bed import weights_from

pytestmark = [pytest.mark.runtimes, pytest.mark.realmodel]
llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed (docs/testing.md)", exc_type=ImportError
)

F16, Q8_0 = 1, 8
KINDS = {
    "f16, V transposed": {},
    "f16, flash attention": {"flash_attn": True},
    "q8_0, flash attention": {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0},
    "K q8_0, V f16 transposed": {"type_k": Q8_0, "type_v": F16},
}
STORY = "Once upon a time the keeper of a lighthouse counted {} ships, and wrote each of them into a book. "


@pytest.fixture(scope="module")
def weights() -> Path:
    return weights_from(source)


@pytest.fixture(scope="module")
def model(weights: Path) -> Iterator[Callable[..., Any]]:
    """Opens each kind of a Llama once, and gives it out empty."""
    opened: dict[str, Any] = {}

    def open_it(kind: str = "f16, V transposed") -> Any:
        if kind not in opened:
            opened[kind] = new(weights, **KINDS[kind])
        return emptied(opened[kind])

    yield open_it
    for llm in opened.values():
        llm.close()


def new(weights: Path, **options: Any) -> Any:
    return llama_cpp.Llama(str(weights), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, seed=1, **options)


def emptied(llm: Any) -> Any:
    llm._ctx.kv_cache_seq_rm(-1, 0, -1)
    llm.reset()
    return llm


def prompt(llm: Any, *numbers: int, length: int = 300) -> list[int]:
    """Tokens of a text that the numbers make."""
    text = "".join(STORY.format(number) for number in itertools.islice(itertools.cycle(numbers), 30))
    return llm.tokenize(text.encode())[:length]  # type: ignore[no-any-return]


def answer(llm: Any, tokens: list[int], length: int = 8) -> list[int]:
    return list(itertools.islice(llm.generate(tokens, temp=0.0), length))


def first_logits(llm: Any, tokens: list[int]) -> Any:
    """Logits behind a prompt, as bits."""
    stream = llm.generate(tokens, temp=0.0)
    next(stream)
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), (llm.n_vocab(),)).copy()
    stream.close()
    return logits.view(np.uint32)


def state(llm: Any) -> bytes:
    size = llama_cpp.llama_state_seq_get_size(llm._ctx.ctx, 0)
    data = (llama_cpp.ctypes.c_uint8 * size)()
    return bytes(data[: llama_cpp.llama_state_seq_get_data(llm._ctx.ctx, data, size, 0)])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_has_the_bits_of_a_context_rewound_in_place(model: Any, kind: str, block_size: int) -> None:
    llm = model(kind)
    tokens = prompt(llm, 3, length=330)
    other = [*tokens[:290], *prompt(llm, 4, length=20)]
    with attach(llm, "64MiB", block_size=block_size) as cache:
        answer(llm, tokens)
        cache.detach()
        expected = first_logits(llm, other)  # llama.cpp itself goes on behind the 290 tokens
        held = state(llm)
    emptied(llm)
    with attach(llm, "64MiB", block_size=block_size) as cache:
        answer(llm, tokens)
        emptied(llm)
        assert np.array_equal(first_logits(llm, other), expected)
        assert cache.stats().loaded_tokens == 290
        assert cache.stats().failures == {}
        assert state(llm) == held


def test_tokens_are_those_of_a_cold_run(model: Any) -> None:
    """Prompts whose prefix was a prompt, too: the same batches, so the same numbers."""
    llm = model()
    system = prompt(llm, 7, length=280)
    questions = [[*system, *prompt(llm, number, length=24)] for number in range(20, 28)]
    cold = []
    for question in questions:
        emptied(llm)
        cold.append(answer(llm, question))
    emptied(llm)
    with attach(llm, "64MiB", store_generated=False) as cache:
        answer(llm, system, 1)
        for question, expected in zip(questions, cold, strict=True):
            emptied(llm)
            assert answer(llm, question) == expected
        assert cache.stats().loaded_tokens >= 272 * len(questions)


def test_two_conversations_in_turn_both_hit(model: Any) -> None:
    llm = model()
    one, other = prompt(llm, 11), prompt(llm, 12)
    with attach(llm, "64MiB") as cache:
        answers = [answer(llm, one), answer(llm, other)]
        assert [answer(llm, one), answer(llm, other)] == answers
        assert cache.stats().loaded_tokens == 2 * 299


def test_a_stream_that_is_closed_is_stored(model: Any) -> None:
    llm = model()
    text = "".join(STORY.format(number) for number in range(30, 50))
    with attach(llm, "64MiB") as cache:
        stream = llm.create_completion(text, max_tokens=50, temperature=0.0, stream=True)
        next(stream)
        stream.close()
        found = cache.explain(text)
        assert found.cached_tokens > found.num_tokens - 16


def test_chats_say_the_same_and_are_found_after_a_restart(model: Any, tmp_path: Path) -> None:
    llm = model()
    messages = [
        {"role": "system", "content": "".join(STORY.format(number) for number in range(50, 64))},
        {"role": "user", "content": "How many ships did the keeper count?"},
    ]

    def say() -> str:
        chat = llm.create_chat_completion(messages, max_tokens=12, temperature=0.0)
        return chat["choices"][0]["message"]["content"]  # type: ignore[no-any-return]

    expected = say()
    disk = pk.Disk(str(tmp_path / "kv"), "256MiB")
    for turn in range(2):
        emptied(llm)
        with attach(llm, "64MiB", disk) as cache:
            assert say() == expected
            assert (cache.stats().loaded_tokens > 250) == bool(turn)
            assert cache.stats().failures == {}


LIFE = """
    import pagedkv as pk
    from pathlib import Path
    from pagedkv.adapters.llama_cpp import attach
    from tests.adapters.test_real_llama_cpp import answer, new, prompt
    llm = new(Path({weights!r}))
    cache = attach(llm, "64MiB", pk.Disk({path!r}, "256MiB"))
    answer(llm, prompt(llm, 5))
"""


def test_a_process_that_was_killed_leaves_its_prompt(model: Any, weights: Path, tmp_path: Path) -> None:
    kill_once_written(LIFE.format(weights=str(weights), path=str(tmp_path / "kv")), 20)
    llm = model()
    expected = answer(llm, prompt(llm, 5))
    emptied(llm)
    with attach(llm, "64MiB", pk.Disk(str(tmp_path / "kv"), "256MiB")) as cache:
        assert answer(llm, prompt(llm, 5)) == expected
        assert cache.stats().loaded_tokens >= 0.95 * 300


@pytest.mark.parametrize(("options", "reason"), [({"logits_all": True}, "logits_all"), ({"embedding": True}, "embed")])
def test_a_context_that_cannot_be_cached_is_refused(weights: Path, options: Any, reason: str) -> None:
    llm = new(weights, **options)
    names = set(vars(llm))
    with pytest.raises(pk.NotSupported, match=reason):
        attach(llm, "64MiB")
    assert set(vars(llm)) == names
    llm.close()


def test_a_context_with_tokens_is_as_it_was_after_attaching(model: Any) -> None:
    llm = model()
    tokens = prompt(llm, 9)
    answer(llm, tokens)
    before, held = state(llm), llm.n_tokens
    with attach(llm, "64MiB"):
        assert (llm.n_tokens, state(llm)) == (held, before)
