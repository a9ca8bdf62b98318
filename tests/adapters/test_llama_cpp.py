"""attach() on a stand-in for llama_cpp: hits, streams, failing calls, refusals, restarts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.llama_cpp import LlamaCache, attach
from pagedkv.adapters.store import PrefixStore
from tests.adapters import llama_stub
from tests.adapters.lives import kill_once_written
from tests.adapters.llama_stub import VOCAB, Llama

SYSTEM = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
ONE, OTHER = [*SYSTEM, *range(40)], [*SYSTEM, *range(500, 560)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 40)
    return path


@pytest.fixture(autouse=True)
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and context of each prefill that was reported.

    The store does not learn their times: the stand-in computes faster than it loads.
    """
    seen: list[tuple[int, int]] = []
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_stub.module())
    monkeypatch.setattr(PrefixStore, "observe_prefill", lambda store, n, seconds, context: seen.append((n, context)))
    return seen


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Callable[..., LlamaCache]]:
    with contextlib.ExitStack() as stack:

        def attach_it(llm: Llama, size: str | None = "8MiB", memory: str = "1MiB", **options: Any) -> LlamaCache:
            disk = None if size is None else pk.Disk(str(tmp_path / "kv"), size)
            return stack.enter_context(attach(llm, memory, disk, **options))

        yield attach_it


def answer(llm: Llama, prompt: list[int], length: int = 12) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0.0), length))


def cold(prompt: list[int], weights: Path, length: int = 12) -> list[int]:
    return answer(Llama(weights), prompt, length)


def computed(llm: Llama, prompt: list[int], weights: Path, length: int = 12) -> int:
    """Tokens that an answer computes; the answer is that of a cold run."""
    before = llm.decoded
    assert answer(llm, prompt, length) == cold(prompt, weights, length)
    return llm.decoded - before


# ---- hits


@pytest.mark.parametrize("v_trans", [True, False])
@pytest.mark.parametrize("magic", [True, False])
def test_two_conversations_in_turn_both_hit(attached: Any, weights: Path, v_trans: bool, magic: bool) -> None:
    llm = Llama(weights, v_trans=v_trans, magic=magic)
    cache = attached(llm)
    assert computed(llm, ONE, weights) == 340 + 11
    assert computed(llm, OTHER, weights) == 60 + 11  # of the context itself
    assert computed(llm, ONE, weights) == 1 + 11
    assert computed(llm, OTHER, weights) == 1 + 11
    turn = [*ONE, *cold(ONE, weights), 5, 6, 7]
    assert computed(llm, turn, weights) == 4 + 11  # the last token of an answer is never evaluated
    stats = cache.stats()
    assert stats.failures == {}
    assert stats.prompts == 5
    assert stats.loaded_tokens == 339 + 359 + 351


def test_a_hit_puts_one_state_in_and_a_prompt_that_is_known_takes_none_out(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    attached(llm)
    llm.calls.clear()
    answer(llm, ONE)
    assert llm.calls == ["get_size", "get_data"]  # a miss, and storing
    answer(llm, OTHER)
    llm.calls.clear()
    answer(llm, ONE)
    assert llm.calls == ["set_data"]
    llm.calls.clear()
    answer(llm, ONE, 20)
    assert llm.calls == ["get_size", "get_data"]  # it was in the context, and is longer now


def test_it_is_found_after_a_restart_whichever_way_v_lies(attached: Any, weights: Path) -> None:
    for v_trans in (True, False, True):
        llm = Llama(weights, v_trans=v_trans, n_ctx=2048 + v_trans)
        cache = attached(llm)
        expected = 340 if cache.store.find(ONE) == 0 else 1
        assert computed(llm, ONE, weights) == expected + 11
        assert cache.stats().failures == {}
        cache.close()


def test_times_of_long_prefills_are_reported(attached: Any, weights: Path, observed: list[tuple[int, int]]) -> None:
    llm = Llama(weights)
    attached(llm)
    answer(llm, ONE)
    answer(llm, OTHER)
    answer(llm, ONE)
    assert observed == [(340, 0), (60, 300)]


def test_short_prompts_are_computed(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    llm.calls.clear()
    computed(llm, ONE[:200], weights)
    assert llm.calls == []
    assert cache.stats().short_prompts == 2


def test_a_context_with_tokens_goes_on_from_them(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    answer(llm, ONE)
    before = llm.input_ids[: llm.n_tokens].copy()
    cache = attached(llm)
    assert llm.n_tokens == len(before)
    assert np.array_equal(llm.input_ids[: llm.n_tokens], before)
    assert computed(llm, [*ONE, 3, 1, 4], weights) < 20
    assert cache.stats().saved_tokens > 340


def test_prompts_alone_have_the_bits_of_a_cold_run(attached: Any, weights: Path) -> None:
    """The stand-in marks tokens that were computed one by one; the store has none of them."""
    llm = Llama(weights)
    cache = attached(llm, store_generated=False)
    first = answer(llm, ONE)
    turn = [*ONE, *first, *range(60)]  # goes on in the context, over generated tokens
    answer(llm, turn)
    answer(llm, OTHER)
    cache.detach()
    other = Llama(weights)
    attached(other, size=None)  # another cache in between changes nothing
    other = Llama(weights)
    cache.close()
    attached(other, store_generated=False)
    answer(other, turn, 1)
    assert not other._ctx.v[-1, :, -1].any()
    assert other.decoded < 8 + len(turn) - 300  # the probe, and less than the whole prompt


# ---- streams


def test_a_stream_that_is_closed_or_left_is_stored(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    stream = llm.generate(ONE)
    assert next(stream) == cold(ONE, weights, 1)[0]
    stream.close()
    assert cache.store.find(ONE) == 336
    for _ in llm.generate(OTHER):
        break
    assert cache.store.find(OTHER) == 352
    assert cache.stats().failures == {}


def test_a_stream_that_never_began_does_nothing(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    llm.generate(ONE).close()
    assert cache.stats().prompts == 0


def test_what_is_sent_and_thrown_reaches_the_generator(attached: Any, weights: Path) -> None:
    llm, plain = Llama(weights), Llama(weights)
    attached(llm)
    tokens = []
    for one in (llm, plain):
        stream: Any = one.generate(ONE)
        tokens.append([next(stream), stream.send([4, 5]), next(stream)])
    assert tokens[0] == tokens[1]
    stream = llm.generate(OTHER)
    next(stream)
    with pytest.raises(LookupError):
        stream.throw(LookupError("the caller's"))
    assert computed(llm, OTHER, weights, 1) == 0


def test_reset_false_goes_on_in_the_context(attached: Any, weights: Path) -> None:
    llm, plain = Llama(weights), Llama(weights)
    cache = attached(llm)
    for one in (llm, plain):
        answer(one, ONE)
    ours, theirs = (list(itertools.islice(one.generate([9, 8], 40, 0.0, False), 3)) for one in (llm, plain))
    assert ours == theirs
    assert cache.stats().prompts == 1
    assert computed(llm, ONE, weights) == 1 + 11


# ---- trouble


def test_an_exception_at_any_call_costs_a_hit_and_nothing_else(attached: Any, weights: Path, tmp_path: Path) -> None:
    """Every call that the adapter makes fails once; every answer is that of a cold run."""
    conversations = [ONE, OTHER, ONE, [*OTHER, 1, 2]]
    expected = [cold(prompt, weights) for prompt in conversations]
    number, failures = 0, 0
    while True:
        llm = Llama(weights)
        cache = attached(llm, size=None)
        llm.calls.clear()
        llm.fail_at = number
        for prompt, tokens in zip(conversations, expected, strict=True):
            assert answer(llm, prompt) == tokens
        if len(llm.calls) <= number:
            break
        failures += sum(cache.stats().failures.values())
        llm.fail_at = None
        before = llm.decoded
        assert answer(llm, ONE) == expected[0]
        assert llm.decoded - before == 4 + 11  # and it goes on; without a disk, in whole blocks
        cache.close()
        number += 1
    assert number >= 8
    assert failures == number  # each was counted, once


@pytest.mark.parametrize("call", ["set_data", "get_data", "get_size"])
def test_a_call_that_always_fails_is_said_once(attached: Any, weights: Path, call: str, caplog: Any) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    answer(llm, ONE)
    llm.fail_at = call
    with caplog.at_level(logging.WARNING, "pagedkv.adapters"):
        for _ in range(3):
            computed(llm, [*OTHER, 7], weights, 1)
            computed(llm, ONE, weights, 1)
            computed(llm, list(range(300)), weights, 1)
    assert sum(cache.stats().failures.values()) >= 3
    assert len(caplog.records) == len(cache.stats().failures)


def test_after_a_state_that_was_not_taken_the_context_is_empty(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    answer(llm, ONE)
    answer(llm, list(range(300)))
    llm.fail_at = "set_data"
    assert computed(llm, ONE, weights) == 340 + 11
    assert cache.stats().failures == {"load: RuntimeError": 1}


def test_cells_that_are_not_the_tokens_are_not_stored(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    stream = llm.generate(ONE)
    next(stream)
    llm._ctx.positions = [pos + 1 for pos in llm._ctx.positions]  # shifted by someone else
    stream.close()
    assert cache.store.find(ONE) == 0
    assert list(cache.stats().failures) == ["store: the context's cells are not its tokens"]


def test_images_in_the_context_are_not_stored(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    stream = llm.generate(ONE)
    next(stream)
    llm.input_ids[5] = -1
    stream.close()
    assert cache.stats().saved_tokens == 0
    assert cache.stats().failures == {}


def test_a_prompt_longer_than_the_context_is_an_error_of_the_runtime(attached: Any, weights: Path) -> None:
    llm = Llama(weights, n_ctx=320)
    cache = attached(llm)
    with pytest.raises(ValueError, match="the context is full"):
        next(llm.generate(ONE))
    assert computed(llm, ONE[:310], weights, 2) <= 320
    assert cache.stats().failures == {}


def test_an_error_of_the_runtime_comes_out_and_what_it_computed_is_kept(attached: Any, weights: Path) -> None:
    llm = Llama(weights, n_ctx=400)
    cache = attached(llm)
    with pytest.raises(ValueError, match="the context is full"):
        answer(llm, ONE, 100)
    assert cache.store.find(ONE) == 336
    assert computed(llm, ONE, weights) <= 340


# ---- attaching and detaching


def test_detach_puts_the_object_back(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    names = set(vars(llm))
    cache = attached(llm)
    assert "generate" in vars(llm)
    cache.detach()
    cache.detach()
    assert set(vars(llm)) == names
    assert llm.generate.__func__ is Llama.generate  # type: ignore[attr-defined]
    answer(llm, ONE)
    assert cache.stats().prompts == 0
    with attach(llm, "1MiB"):
        pass
    assert set(vars(llm)) == names


def test_other_replacements_of_generate_stay(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    seen: list[int] = []
    plain = llm.generate

    def theirs(tokens: Any, top_k: int = 40, temp: float = 0.8, reset: bool = True) -> Any:
        seen.append(len(tokens))
        return plain(tokens, top_k, temp, reset)

    llm.generate = theirs  # type: ignore[method-assign]
    cache = attached(llm)
    computed(llm, ONE, weights)
    ours = llm.generate
    later = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    llm.generate = later  # type: ignore[method-assign]
    cache.detach()
    assert llm.generate is later
    answer(llm, ONE)
    assert seen == [340, 340]
    assert cache.stats().prompts == 1


def test_one_object_has_one_cache(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    with pytest.raises(pk.InvalidArgument, match="detach"):
        attach(llm, "1MiB")
    computed(llm, ONE, weights)
    assert cache.stats().saved_tokens > 0


REFUSED: dict[str, Any] = {
    "embeddings": lambda llm: setattr(llm.context_params, "embeddings", True),
    "4 sequences": lambda llm: setattr(llm.context_params, "n_seq_max", 4),
    "logits_all": lambda llm: setattr(llm, "_logits_all", True),
    "images": lambda llm: setattr(llm, "chat_handler", object()),
    "its layers are recurrent": lambda llm: setattr(llm._model.model, "kind", "is_recurrent"),
    "some of its layers are recurrent": lambda llm: setattr(llm._model.model, "kind", "is_hybrid"),
    "encoder": lambda llm: setattr(llm._model.model, "kind", "has_encoder"),
    "diffusion": lambda llm: setattr(llm._model.model, "kind", "is_diffusion"),
    "sliding window": lambda llm: setattr(llm._model.model, "swa", 512),
    "M-RoPE": lambda llm: setattr(llm._model.model, "rope", 8),
    "2 streams": lambda llm: setattr(llm.how, "streams", 2),
    "another format": lambda llm: setattr(llm.how, "behind", b"\0" * 8),
    "too small": lambda llm: setattr(llm, "_n_ctx", 8),
    "does not answer as expected": lambda llm: setattr(llm, "fail_at", "get_data"),
    "does not answer as expected.*No such file": lambda llm: setattr(llm, "model_path", "/nowhere.gguf"),
    "does not answer as expected.*took 0": lambda llm: setattr(llm, "fail_at", "set_data"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("fill", [False, True])
def test_a_model_that_cannot_be_cached_is_refused_and_works_as_before(
    tmp_path: Path, weights: Path, reason: str, fill: bool
) -> None:
    llm = Llama(weights)
    if fill:
        answer(llm, ONE)
    REFUSED[reason](llm)
    names, tokens = set(vars(llm)), llm.input_ids[: llm.n_tokens].copy()
    state = "unchanged"
    if fill and "took 0" in reason:  # a state that is never taken cannot be put back either
        reason, tokens, state = "not taken back.*took 0", tokens[:0], "its context was emptied"
    with pytest.raises(pk.NotSupported, match=f"(?s){reason}.*{state}"):
        attach(llm, "1MiB", pk.Disk(str(tmp_path / "kv"), "8MiB"))
    assert set(vars(llm)) == names
    assert np.array_equal(llm.input_ids[: llm.n_tokens], tokens)
    assert not (tmp_path / "kv").exists()
    llm._n_ctx = 2048
    assert answer(llm, ONE) == cold(ONE, weights)


def test_something_else_than_a_llama_is_refused() -> None:
    with pytest.raises(pk.NotSupported, match=r"llama_cpp\.Llama"):
        attach(object())


def test_without_the_runtime_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match="pip install llama-cpp-python"):
        attach(Llama(weights))


def test_arguments_that_cannot_be_used_leave_the_object_alone(tmp_path: Path, weights: Path) -> None:
    llm = Llama(weights)
    names = set(vars(llm))
    for options in ({"memory": 5}, {"disk": "kv"}, {"memory": "1B"}, {"on_mismatch": "x", "disk": pk.Disk(
            str(tmp_path / "kv"), "8MiB")}, {"store_generated": 1}, {"min_tokens": -1}):  # fmt: skip
        with pytest.raises((pk.WrongType, pk.InvalidArgument)):
            attach(llm, **options)
        assert set(vars(llm)) == names
    assert answer(llm, ONE) == cold(ONE, weights)


@pytest.mark.parametrize(("version", "warns"), [("0.3.36", 0), ("0.3.99", 1), ("0.2.90", 1), ("0.4.0.dev1", 1)])
def test_an_untested_version_is_one_warning(
    attached: Any, weights: Path, version: str, warns: int, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_stub.module(version))
    llm = Llama(weights)
    attached(llm)
    computed(llm, ONE, weights)
    computed(llm, OTHER, weights)
    assert [record.getMessage().count("tested versions") for record in caplog.records] == [1] * warns


# ---- whose KV it is


def test_other_weights_lora_and_settings_find_nothing_of_each_other(attached: Any, weights: Path) -> None:
    def long_name(llm: Llama) -> None:
        llm.metadata = {"phi3.rope.scaling.original_context_length": "1024"}

    changes: list[Callable[[Llama], object]] = [
        lambda llm: None,
        lambda llm: setattr(llm, "lora_path", str(weights)),
        lambda llm: (setattr(llm, "lora_path", str(weights)), setattr(llm, "lora_scale", 0.5)),
        lambda llm: setattr(llm.context_params, "rope_freq_scale", 0.5),
        lambda llm: setattr(llm, "kv_overrides", {"a": 1}),
        long_name,
        lambda llm: setattr(llm, "_seed", 3),  # which only the probe tells
        lambda llm: weights.write_bytes(b"GGUF of others"),
    ]
    for number, change in enumerate([*changes, *changes[-1:]]):
        llm = Llama(weights)
        change(llm)
        cache = attached(llm, size="64MiB")
        assert (cache.store.find(ONE) > 0) == (number == len(changes))  # the last one twice
        answer(llm, ONE)
        cache.close()


def test_tenants_share_nothing_also_in_a_stream_that_goes_on_outside(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    with cache.namespace("alice"):
        stream = llm.generate(ONE)
    next(stream)
    stream.close()
    assert cache.store.find(ONE) == 0
    with cache.namespace("alice"):
        assert cache.explain(ONE).cached_tokens == 336
        answer(llm, list(range(300)))
        assert computed(llm, ONE, weights) == 1 + 11
    with cache.namespace(pk.Namespace(tenant="bob")):
        answer(llm, list(range(300)))
        assert computed(llm, ONE, weights) == 340 + 11


def test_an_older_stream_does_not_store_another_requests_tokens(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    with cache.namespace("alice"):
        stream = llm.generate(ONE)
        next(stream)
    with cache.namespace("bob"):
        answer(llm, OTHER)
    stream.close()
    with cache.namespace("alice"):
        assert cache.store.find(OTHER) == 0
    with cache.namespace("bob"):
        assert cache.store.find(OTHER) > 300


def test_a_restore_that_is_cut_short_leaves_an_empty_context(
    attached: Any, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    answer(llm, ONE)
    answer(llm, OTHER)

    def cut(found: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._context, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        answer(llm, ONE)
    assert llm.n_tokens == 0
    monkeypatch.undo()
    assert answer(llm, OTHER) == cold(OTHER, weights)


def test_without_a_namespace_a_store_for_tenants_computes(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm, require_namespace=True)
    computed(llm, ONE, weights)
    assert cache.stats().failures == {"namespace: NamespaceRequired": 1}
    assert cache.stats().saved_tokens == 0


def test_a_text_is_explained_as_its_tokens(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    cache = attached(llm)
    text = "a long text. " * 40
    answer(llm, llm.tokenize(text.encode()))
    assert cache.explain(text).cached_tokens == 512
    assert cache.explain(text.encode()).num_tokens == 521


# ---- the end of the process

LIFE = """
    import sys
    import pagedkv as pk
    from pagedkv.adapters.llama_cpp import attach
    from tests.adapters import llama_stub
    from tests.adapters.test_llama_cpp import ONE, OTHER, answer
    sys.modules["llama_cpp"] = llama_stub.module()
    llm = llama_stub.Llama({weights!r})
    cache = attach(llm, "1MiB", pk.Disk({path!r}, "8MiB"))
    answer(llm, ONE), answer(llm, OTHER)
"""


def test_a_process_that_was_killed_leaves_its_prompts(tmp_path: Path, weights: Path, attached: Any) -> None:
    """Nothing was closed or flushed: write-behind alone."""
    script = LIFE.format(weights=str(weights), path=str(tmp_path / "kv"))
    kill_once_written(script, 24)  # of 351 + 371 tokens, 300 of them shared
    llm = Llama(weights)
    cache = attached(llm)
    for prompt in (ONE, OTHER):
        computed(llm, prompt, weights)
        computed(llm, list(range(300)), weights, 1)
    stats = cache.stats()
    assert stats.loaded_tokens >= 0.95 * (len(ONE) + len(OTHER))
    assert stats.failures == {}


def test_an_interrupt_comes_out_and_leaves_a_context_that_works(attached: Any, weights: Path) -> None:
    llm = Llama(weights)
    attached(llm)
    answer(llm, ONE)
    answer(llm, list(range(300)))

    def interrupted(state: bytes) -> bool:
        raise KeyboardInterrupt

    llm._ctx.take = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate(ONE))
    del llm._ctx.take
    assert computed(llm, ONE, weights) == 1 + 11
