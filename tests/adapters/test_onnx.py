"""CachedDecoder on ONNX Runtime: hits, restarts, failing calls, refusals; SmolLM2."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from examples.llama_numpy import source
from examples.llama_numpy.weight_cache import load_model
from pagedkv.adapters.onnx import CachedDecoder
from pagedkv.adapters.onnx_ports import Ports
from pagedkv.adapters.store import PrefixStore
from pagedkv.errors import InvalidArgument, NotSupported, WrongType
from tests.adapters.lives import kill_once_written
from tests.realmodel.bed import weights_from

pytest.importorskip("onnx", reason="onnx has no wheel for this Python")
pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python")
from examples.onnx_decoder.graph import KINDS, Graph, decoder
from tests.adapters.onnx_models import TINY, tiny_weights

VOCAB = TINY.vocab_size
SYSTEM = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
ONE, OTHER = [*SYSTEM, *range(40)], [*SYSTEM, *range(100, 160)]
ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "realmodel" / "goldens.json"


@pytest.fixture(scope="module")
def sessions() -> Callable[[str], Any]:
    """Sessions of the tiny model, one of each kind."""
    made: dict[str, Any] = {}

    def session(kind: str = "growing") -> Any:
        if kind not in made:
            made[kind] = decoder(
                tiny_weights(), kind.removesuffix(" float16"), dtype=kind.split()[-1] if " f" in kind else "float32"
            )
        return made[kind]

    return session


@pytest.fixture(autouse=True)
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and context of each prefill that was reported.

    The store does not learn their times: so small a model computes faster than it loads.
    """
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(PrefixStore, "observe_prefill", lambda store, n, seconds, context: seen.append((n, context)))
    return seen


@pytest.fixture
def opened(tmp_path: Path, sessions: Any) -> Iterator[Callable[..., CachedDecoder]]:
    with contextlib.ExitStack() as stack:

        def open_it(
            kind: str = "growing", size: str | None = "8MiB", session: Any = None, **options: Any
        ) -> CachedDecoder:
            disk = None if size is None else pk.Disk(str(tmp_path / "kv"), size)
            options = {"revision": "tiny", "max_length": 512 if kind == "in place" else None} | options
            return stack.enter_context(CachedDecoder(session or sessions(kind), "2MiB", disk, **options))

        yield open_it


def answer(decoder: CachedDecoder, prompt: list[int], length: int = 12) -> list[int]:
    return list(decoder.generate(prompt, length))


def kv(decoder: CachedDecoder, length: int) -> bytes:
    """K and V of the first tokens that the decoder holds."""
    return b"".join(layer.tobytes() for side in decoder._context.kv(0, length) for layer in side)


def computed(decoder: CachedDecoder, prompt: list[int], observed: list[tuple[int, int]]) -> int:
    """Tokens of a prompt that are computed."""
    observed.clear()
    decoder.prefill(prompt)
    return observed[0][0] if observed else 0


@pytest.fixture(scope="module")
def cold(sessions: Any) -> Callable[..., list[int]]:
    """Answers of a decoder whose cache is closed."""
    known: dict[tuple[int, ...], list[int]] = {}

    def tokens(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in known:
            decoder = CachedDecoder(sessions("growing"), "1MiB", revision="cold")
            decoder.close()
            known[tuple(prompt)] = answer(decoder, prompt)
        return known[tuple(prompt)]

    return tokens


# ---- hits


@pytest.mark.parametrize("kind", [*KINDS, "growing float16"])
def test_every_kind_of_past_hits_with_two_conversations_in_turn(
    opened: Any, cold: Any, observed: Any, kind: str
) -> None:
    decoder = opened(kind, size=None)
    for prompt in (ONE, OTHER, [*ONE, 5, 6], [*OTHER, 7]):
        answered = answer(decoder, prompt)
        assert kind == "growing float16" or answered == cold(prompt)
    assert observed == [(340, 0), (60, 300)]  # the others had a few tokens to compute
    assert decoder.stats().loaded_tokens == 336 + 360  # whole blocks; of the second prompt also some of its answer
    assert decoder.stats().failures == {}


@pytest.mark.parametrize("kind", [*KINDS, "growing float16"])
def test_a_hit_has_the_bits_of_a_context_that_was_rewound(opened: Any, kind: str) -> None:
    decoder = opened(kind)
    decoder.prefill(ONE)
    rewound = decoder.prefill(ONE)  # the last token alone
    bits = kv(decoder, 340)
    decoder.prefill(np.arange(300) % VOCAB)
    again = decoder.prefill(ONE)
    assert decoder.stats().loaded_tokens == 339
    assert again.tobytes() == rewound.tobytes()
    assert kv(decoder, 340) == bits


def test_a_restart_finds_all_on_disk(opened: Any, cold: Any) -> None:
    decoder = opened()
    answer(decoder, ONE)
    bits = kv(decoder, 339)
    decoder.close()
    decoder = opened()
    assert answer(decoder, ONE) == cold(ONE)
    assert decoder.stats().hit_tokens["disk"] + decoder.stats().hit_tokens["partial"] == 339
    assert kv(decoder, 339) == bits


def test_a_killed_process_leaves_its_answer_on_disk(opened: Any, cold: Any, tmp_path: Path) -> None:
    script = f"""
    import pagedkv as pk
    from pagedkv.adapters.onnx import CachedDecoder
    from examples.onnx_decoder.graph import decoder
    from tests.adapters.onnx_models import tiny_weights
    disk = pk.Disk({str(tmp_path / "kv")!r}, "8MiB")
    cache = CachedDecoder(decoder(tiny_weights()), "2MiB", disk, revision="tiny")
    list(cache.generate({ONE}, 12))
    """
    kill_once_written(script, (340 + 11) // 16)
    decoder = opened()
    assert answer(decoder, ONE) == cold(ONE)
    assert decoder.stats().loaded_tokens >= 336


def test_the_context_is_used_where_it_holds_more_than_the_cache(opened: Any, observed: Any) -> None:
    decoder = opened(size=None)
    answer(decoder, ONE)
    computed(decoder, [*ONE, *range(32)], observed)
    assert observed == [(32 + 12 - 12, 340)]
    assert decoder.stats().loaded_tokens == 0


def test_an_answer_is_stored_when_its_generator_is_closed(opened: Any) -> None:
    decoder = opened()
    stream = decoder.generate(ONE, 50)
    taken = list(itertools.islice(stream, 5))
    assert decoder.stats().saved_tokens == 0
    stream.close()
    assert decoder.stats().saved_tokens == 344
    assert decoder.tokens.tolist() == [*ONE, *taken[:4]]


def test_tokens_by_hand_are_those_of_generate(opened: Any, cold: Any) -> None:
    decoder = opened()
    logits, tokens = decoder.prefill(ONE), []
    while len(tokens) < 12:
        tokens.append(int(np.argmax(logits)))
        logits = decoder.step(tokens[-1])
    assert tokens == cold(ONE)
    decoder.prefill(OTHER)  # stores what came before
    assert decoder.stats().saved_tokens == 352


def test_an_answer_ends_at_a_stop_token_and_where_the_past_is_full(opened: Any, cold: Any) -> None:
    expected = cold(ONE)
    first = expected.index(expected[3])
    assert list(opened().generate(ONE, 50, stop={expected[3]})) == expected[: first + 1]
    for kind, limit in (("fixed", 512), ("chunked", 512 - 7), ("in place", 512)):
        decoder = opened(kind, size=None)
        assert len(list(decoder.generate(ONE, 1000))) == limit - 340 + 1
        with pytest.raises(InvalidArgument, match=f"the past holds {limit} tokens, and all are used"):
            decoder.step(1)


def test_a_choice_of_the_caller_is_taken(opened: Any) -> None:
    assert list(opened(size=None).generate(ONE, 3, choose=lambda logits: int(np.argmin(logits)))) != answer(
        opened(size=None), ONE, 3
    )


# ---- whose KV it is


def test_namespaces_share_neither_cache_nor_context(opened: Any, observed: Any) -> None:
    decoder = opened(require_namespace=True)
    for name, expected in (("a", 340), ("b", 340), ("a", 0)):
        with decoder.namespace(name):
            assert computed(decoder, ONE, observed) == expected
    observed.clear()
    for _ in range(2):
        decoder.prefill(ONE)  # outside of all: computed, not cached
    assert decoder.stats().failures == {"namespace: NamespaceRequired": 2}
    assert decoder.stats().saved_tokens == 2 * 340


@pytest.mark.parametrize("mismatch", ["beside", "refuse"])
def test_other_weights_of_the_same_revision_find_nothing(opened: Any, observed: Any, mismatch: str) -> None:
    first = opened()
    first.prefill(ONE)
    first.close()
    other = decoder(tiny_weights(seed=1))
    if mismatch == "refuse":
        with pytest.raises(pk.LayoutMismatch, match="computes other numbers"):
            opened(session=other, on_mismatch="refuse")
        return
    assert computed(opened(session=other), ONE, observed) == 340
    assert computed(opened(), ONE, observed) == 0  # and the first ones are found still


# ---- failures


def test_a_cache_that_fails_costs_a_hit_and_nothing_else(
    opened: Any, cold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of the cache fails once; every answer is that of a cold run."""
    from pagedkv.cache.sequence import Sequence

    calls = [(pk.KVCache, "sequence"), (pk.KVCache, "match"), (Sequence, "gather"), (Sequence, "scatter")]
    failures = 0
    for owner, name in calls:
        right = getattr(owner, name)
        for number in range(6):
            decoder = opened(size=None)
            seen = itertools.count()

            def wrong(*args: Any, **options: Any) -> Any:
                if next(seen) == number:  # noqa: B023
                    raise RuntimeError("injected")
                return right(*args, **options)  # noqa: B023

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, wrong)
                for prompt in (ONE, OTHER, ONE):
                    assert answer(decoder, prompt) == cold(prompt)
            failures += sum(decoder.stats().failures.values())
            assert answer(decoder, OTHER) == cold(OTHER)
            assert answer(decoder, ONE) == cold(ONE)
            assert decoder.stats().loaded_tokens  # it goes on
            decoder.close()
    assert failures >= 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_that_is_interrupted_leaves_nothing_wrong(
    opened: Any, cold: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = opened(kind)
    for prompt in (ONE, OTHER, list(range(199)) * 2):
        answer(decoder, prompt)
    right = decoder._context.adopt
    for before in (True, False):

        def interrupted(length: int) -> None:
            if not before:  # noqa: B023
                right(length)
            raise KeyboardInterrupt

        monkeypatch.setattr(decoder._context, "adopt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill(ONE)
        monkeypatch.setattr(decoder._context, "adopt", right)
        with pytest.raises(InvalidArgument, match="no prompt yet"):
            decoder.step(1)
        for prompt in (ONE, OTHER):
            assert answer(decoder, prompt) == cold(prompt)


def test_a_step_that_is_interrupted_behind_its_run_is_not_there(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, other = opened(size=None), opened(size=None)
    for one in (decoder, other):
        one.prefill(ONE)
    right = decoder._context.run

    def interrupted(ids: Any) -> Any:
        right(ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder._context, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.step(7)
    monkeypatch.setattr(decoder._context, "run", right)
    assert decoder.tokens.tolist() == ONE
    assert decoder.step(8).tobytes() == other.step(8).tobytes()


@pytest.mark.parametrize("where", ["_keep", "_hold"])
def test_a_rewind_that_is_interrupted_leaves_nothing_wrong(
    opened: Any, cold: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    decoder = opened(size=None)
    decoder.prefill(ONE)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill([*ONE[:100], 5])
    with pytest.raises(InvalidArgument, match="no prompt yet"):
        decoder.step(7)
    assert answer(decoder, ONE) == cold(ONE)
    assert answer(decoder, OTHER) == cold(OTHER)


def test_an_interrupted_prompt_moves_no_kv_into_another_namespace(
    opened: Any, observed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = opened(size=None)
    with decoder.namespace("b"):
        decoder.prefill(ONE)
    with decoder.namespace("a"):
        decoder.prefill(list(range(199)) * 2)
    keep = decoder._keep

    def interrupted(length: int) -> None:
        keep(length)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, decoder.namespace("b"):
        patch.setattr(decoder, "_keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill([*ONE, 3])
    decoder.save()
    with decoder.namespace("a"):
        assert computed(decoder, ONE, observed) == 340
    with decoder.namespace("b"):
        assert decoder.store.find(ONE) == 336


def test_a_save_that_failed_is_tried_again(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = opened(size=None)
    decoder.prefill(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(decoder.store.cache, "sequence", None)
        assert decoder.save() == 0
    assert decoder.stats().failures == {"save: TypeError": 1}
    assert decoder.save() == 340
    assert decoder.save() == 0


def test_a_purge_takes_the_decoders_own_tokens_along(opened: Any) -> None:
    decoder = opened()
    with decoder.namespace("a"):
        decoder.prefill(ONE)
        decoder.checkpoint()  # nothing is on its way to disk then, so the purge drops it at once
        assert decoder.store.find(ONE) == 336
        assert decoder.purge("a") > 0
    decoder.prefill(OTHER)
    with decoder.namespace("a"):
        assert decoder.store.find(ONE) == 0


class Breaking:
    """A session whose runs fail when told to, before or after the real run."""

    def __init__(self, session: Any) -> None:
        self._session, self.breaks = session, ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._session, name)
        if name not in ("run", "run_with_iobinding"):
            return found

        def run(*args: Any) -> Any:
            how, self.breaks = self.breaks, ""
            done = None if how == "before" else found(*args)
            if how:
                raise RuntimeError("the accelerator is gone")
            return done

        return run


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_fails_leaves_the_sequence_as_it_was(
    opened: Any, cold: Any, sessions: Any, kind: str, how: str
) -> None:
    session = Breaking(sessions(kind))
    decoder = opened(kind, session=session)
    token = int(np.argmax(decoder.prefill(ONE)))
    session.breaks = how
    with pytest.raises(RuntimeError, match="accelerator"):
        decoder.step(token)
    assert decoder.tokens.tolist() == ONE
    tokens = [token]
    while len(tokens) < 12:
        tokens.append(int(np.argmax(decoder.step(tokens[-1]))))
    assert tokens == cold(ONE)
    session.breaks = how
    with pytest.raises(RuntimeError, match="accelerator"):
        decoder.prefill(OTHER)
    with pytest.raises(InvalidArgument, match="or the last one failed"):
        decoder.step(7)  # of which sequence?
    assert answer(decoder, OTHER) == cold(OTHER)
    assert answer(decoder, ONE) == cold(ONE)


def test_without_its_cache_the_decoder_goes_on(opened: Any, cold: Any) -> None:
    decoder = opened()
    answer(decoder, ONE)
    decoder.close()
    decoder.close()
    assert answer(decoder, OTHER) == cold(OTHER)
    assert decoder.stats().failures == {}


def test_one_decoder_answers_one_prompt_at_a_time(opened: Any, cold: Any) -> None:
    decoder = opened()
    first = decoder.generate(ONE, 12)
    next(first)
    assert answer(decoder, OTHER) == cold(OTHER)
    with pytest.raises(InvalidArgument, match="another prompt has taken the place"):
        next(first)
    assert answer(decoder, ONE) == cold(ONE)


# ---- bad input


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([], InvalidArgument, "one or more numbers from 0 to 198"),
        ([1, VOCAB], InvalidArgument, "from 0 to 198"),
        ([-1], InvalidArgument, "from 0 to 198"),
        ([1.5], WrongType, "tokens must be integers"),
        ([[1, 2]], WrongType, r"int64 \(1, 2\)"),
        ([[1], [2, 3]], WrongType, "tokens must be integers"),
        (list(range(199)) * 3, InvalidArgument, "a prompt of 597 tokens; the past holds 512"),
    ],
)
def test_tokens_that_are_none_are_refused_and_nothing_changes(opened: Any, tokens: Any, error: Any, words: str) -> None:
    decoder = opened("fixed")
    with pytest.raises(InvalidArgument, match="no prompt yet"):
        decoder.step(3)
    decoder.prefill(ONE)
    with pytest.raises(error, match=words):
        decoder.prefill(tokens)
    with pytest.raises(error):
        next(decoder.generate(tokens, 3))
    assert decoder.tokens.tolist() == ONE


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stop": 5}, WrongType, "stop must be a collection of tokens"),
        ({"choose": 5}, WrongType, "choose must be called with logits"),
        ({"choose": lambda _: 1.7}, WrongType, "tokens must be integers"),
        ({"choose": lambda _: None}, WrongType, "tokens must be integers"),
        ({"choose": lambda _: 999}, InvalidArgument, "from 0 to 198"),
    ],
)
def test_a_choice_that_is_no_token_goes_nowhere(opened: Any, options: Any, error: Any, words: str) -> None:
    decoder = opened(size=None)
    decoder.prefill(OTHER)
    with pytest.raises(error, match=words):
        next(decoder.generate(ONE, 3, **options))
    assert decoder.tokens.tolist() == (ONE if callable(options.get("choose")) else OTHER)


def ports(**changes: Any) -> Any:
    """A session's inputs and outputs alone; a change of None leaves one out."""
    inputs: dict[str, Any] = {"input_ids": ("tensor(int64)", ["batch", "tokens"])}
    outputs: dict[str, Any] = {"logits": ("tensor(float)", ["batch", "tokens", 99])}
    for layer, side in itertools.product(range(2), ("key", "value")):
        inputs[f"past_key_values.{layer}.{side}"] = ("tensor(float)", ["batch", 2, "past", 16])
        outputs[f"present.{layer}.{side}"] = ("tensor(float)", ["batch", 2, "all", 16])
    for name, value in changes.items():
        where = outputs if name.startswith(("present", "logits")) else inputs
        where[name] = value
    listed = [
        [SimpleNamespace(name=name, type=value[0], shape=value[1]) for name, value in side.items() if value is not None]
        for side in (inputs, outputs)
    ]
    return SimpleNamespace(get_inputs=lambda: listed[0], get_outputs=lambda: listed[1], run=lambda *_: [])


P0, P1 = "past_key_values.0.key", "past_key_values.1.value"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"past_key_values.{n}.{side}": None for n in (0, 1) for side in ("key", "value")}, "it takes no past KV"),
        ({P1: None}, "past of layer 1 has no value"),
        ({"present.1.key": None, "present.1.value": None}, "past KV of 2 layers, and 1 with outputs like"),
        ({P0: ("tensor(float)", ["batch", 4, "past", 16])}, "its layers differ"),
        ({P0: ("tensor(float16)", ["batch", 2, "past", 16])}, "its layers differ"),
        ({"logits": None}, "no output 'logits'"),
        ({"input_ids": None}, "no input 'input_ids'"),
        ({"input_ids": ("tensor(int64)", [4, "tokens"])}, "not .1 or any batch, tokens."),
        ({"input_ids": ("tensor(int64)", [1, 1])}, "its past grows, and every run takes 1 tokens"),
        ({"encoder_hidden_states": ("tensor(float)", [1, 9, 9])}, "input 'encoder_hidden_states' is not known"),
        ({"attention_mask": ("tensor(bool)", ["batch", "total"])}, "'attention_mask' is tensor.bool., not int64"),
        ({"attention_mask": ("tensor(int64)", ["batch", 1, 1, "total"])}, "not .batch, tokens."),
    ],
)
def test_sessions_that_cannot_be_cached_are_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        CachedDecoder(ports(**changes), revision="x")


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        (["batch", "past", 32], "tensor(float)", "not .1 or any batch, heads, tokens, head_dim."),
        ([8, 2, "past", 16], "tensor(float)", "not .1 or any batch"),
        (["batch", 2, "past", 16], "tensor(int8)", "is tensor.int8.; KV of"),
    ],
)
def test_kv_of_another_form_is_refused(shape: list[Any], kind: str, words: str) -> None:
    names = [f"past_key_values.{n}.{side}" for n in (0, 1) for side in ("key", "value")]
    with pytest.raises(NotSupported, match=words):
        CachedDecoder(ports(**dict.fromkeys(names, (kind, shape))), revision="x")


def test_names_of_other_exporters_are_given(opened: Any, sessions: Any) -> None:
    with pytest.raises(NotSupported, match=r"no input is named like 'past.{layer}.{side}'"):
        opened(past="past.{layer}.{side}")
    with pytest.raises(InvalidArgument, match=r"'{layer}' and '{side}' are needed once each"):
        opened(present="present")
    with pytest.raises(InvalidArgument, match="are needed once each"):
        opened(past=5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"revision": ""}, WrongType, "revision must be a text that names the weights"),
        ({"max_length": 64}, NotSupported, "as its inputs promise"),  # a growing session writes into no array
        ({"max_length": 0}, InvalidArgument, "max_length"),
        ({"kind": "fixed", "max_length": 64}, InvalidArgument, "max_length=64, and the session's past has 512"),
        ({"session": "model.onnx"}, WrongType, "session must be an onnxruntime.InferenceSession, not a str"),
    ],
)
def test_options_that_do_not_fit_are_refused(opened: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        opened(**options)


def test_a_past_without_room_for_the_probe_is_refused(opened: Any) -> None:
    with pytest.raises(NotSupported, match="room for 5 tokens"):
        opened(session=decoder(tiny_weights(), "fixed", length=5))


def test_a_session_that_does_not_use_its_past_is_refused(opened: Any) -> None:
    with pytest.raises(NotSupported, match="behind KV that is put back it computes other numbers"):
        opened(session=_forgetful())


def _forgetful() -> Any:
    """A session whose logits depend on the tokens of a run alone."""
    graph, rows = Graph(), np.random.default_rng(0).standard_normal((50, 2, 4)).astype(np.float32)
    ids = graph.input("input_ids", 7, ["batch", "tokens"])
    found = graph.op("Transpose", graph.op("Gather", graph.weight(rows), ids), perm=[0, 2, 1, 3])
    sums = graph.op("Unsqueeze", graph.op("CumSum", found, graph.weight(2, np.int64)), graph.ints(0))
    sums = graph.op("Squeeze", sums, graph.ints(0))
    for side in ("key", "value"):
        past = graph.input(f"past_key_values.0.{side}", 1, ["batch", 2, "past", 4])
        graph.op("Concat", past, sums, axis=2, out=graph.output(f"present.0.{side}", 1, ["batch", 2, "all", 4]))
    flat = graph.op("Reshape", graph.op("Transpose", found, perm=[0, 2, 1, 3]), graph.ints(1, -1, 8))
    graph.op("Identity", flat, out=graph.output("logits", 1, ["batch", "tokens", 8]))
    return graph.session()


def test_a_session_whose_tokens_see_later_ones_is_refused(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op = Graph.op

    def both_ways(graph: Graph, kind: str, *inputs: str, **options: Any) -> Any:
        if kind != "LessOrEqual":
            return op(graph, kind, *inputs, **options)
        return op(graph, "Or", op(graph, kind, *inputs), op(graph, "GreaterOrEqual", *inputs))

    monkeypatch.setattr(Graph, "op", both_ways)
    for kind in ("growing", "fixed"):
        with pytest.raises(NotSupported, match="behind KV that is put back it computes other numbers"):
            opened(session=decoder(tiny_weights(), kind))


@pytest.mark.parametrize("first", [0, 9])
def test_a_session_that_sees_what_lies_behind_the_tokens_is_refused(
    opened: Any, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    op, columns = Graph.op, [""]

    def all_behind(graph: Graph, kind: str, *inputs: str, **options: Any) -> Any:
        if kind == "LessOrEqual":
            columns[0] = inputs[0]
        if kind != "And":
            return op(graph, kind, *inputs, **options)
        behind = op(
            graph, "And", op(graph, "Not", inputs[1]), op(graph, "GreaterOrEqual", columns[0], graph.ints(first))
        )
        return op(graph, "Or", op(graph, "And", *inputs), behind)

    monkeypatch.setattr(Graph, "op", all_behind)
    with pytest.raises(NotSupported, match="behind KV that is put back it computes other numbers"):
        opened(session=decoder(tiny_weights(), "fixed"))


# ---- inputs


def test_inputs_of_merged_and_static_exports_are_fed() -> None:
    names = {
        "attention_mask": ("tensor(int64)", ["batch", 16]), "cache_position": ("tensor(int64)", ["tokens"]),
        "position_ids": ("tensor(int32)", ["batch", "tokens"]), "num_logits_to_keep": ("tensor(int64)", []),
        "use_cache_branch": ("tensor(bool)", [1]),
    }  # fmt: skip
    feeds = Ports.of(ports(**names)).feeds(np.array([7, 8, 9]), 4, 7)
    assert {name: (str(value.dtype), value.tolist()) for name, value in feeds.items()} == {
        "input_ids": ("int64", [[7, 8, 9]]),
        "attention_mask": ("int64", [[1] * 7 + [0] * 9]),
        "cache_position": ("int64", [4, 5, 6]),
        "position_ids": ("int32", [[4, 5, 6]]),
        "num_logits_to_keep": ("int64", 1),
        "use_cache_branch": ("bool", [True]),
    }


def test_a_mask_leaves_out_the_padding(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = opened("chunked"), []
    right = Ports.feeds

    def feeds(*args: Any) -> Any:
        seen.append(right(*args))
        return seen[-1]

    monkeypatch.setattr(Ports, "feeds", feeds)
    decoder.prefill([5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    assert [one["attention_mask"].sum() for one in seen] == [8, 10]
    assert seen[1]["input_ids"].tolist() == [[13, 14, 0, 0, 0, 0, 0, 0]]


# ---- SmolLM2


@pytest.mark.slow
@pytest.mark.realmodel
def test_smollm2_says_the_golden_tokens_from_memory_and_from_disk(tmp_path: Path, observed: Any) -> None:
    model = load_model(weights_from(source))
    session = decoder(model.weights)
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))
    disk = pk.Disk(str(tmp_path / "kv"), "256MiB")
    compared, spent = 0, []
    for _ in range(2):
        with CachedDecoder(session, "128MiB", disk, revision="smollm2", min_tokens=16) as cached:
            for golden in goldens.values():
                logits = cached.prefill(golden["ids"])
                for token, top in zip(golden["greedy"][:8], golden["top_logits"], strict=False):
                    if top[0] - top[1] > 1e-3:
                        assert int(np.argmax(logits)) == token
                        compared += 1
                    logits = cached.step(token)
            assert cached.stats().failures == {}
        spent.append(sum(tokens for tokens, _ in observed))
        observed.clear()
    assert spent[0] > 1000  # tokens of prompts that were computed
    assert spent[1] == 0
    assert compared > 120


@pytest.mark.slow
@pytest.mark.realmodel
@pytest.mark.checkout
def test_the_example_finds_its_prompt_in_a_second_process(tmp_path: Path) -> None:
    weights_from(source)
    command = [sys.executable, "-W", "error", "-m", "examples.onnx_decoder", "--years", "15"]
    said = []
    for _ in range(2):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        said.append(ran.stdout.splitlines())
    assert said[0][0] == said[1][0]  # the answer
    assert [re.match(r"(\d+) of (\d+) tokens", lines[1]).groups() for lines in said] == [("0", "419"), ("418", "419")]
