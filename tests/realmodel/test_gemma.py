"""Gemma 3 270M on the cache, with prompts far beyond the window of most layers, 512.

The goldens are llama.cpp's, on the same weights in float32 (make_gemma_goldens.py). Its GELU is a table of float16:
with the same rounding here the logits of each prompt agree to 0.013, with the real one to 0.02. Wherever KV comes
from, the tokens are the golden ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import examples.gemma_numpy.model as gemma_model
import pagedkv as pk
from examples.gemma_numpy import source
from examples.gemma_numpy.model import Gemma
from examples.gemma_numpy.tokenizer import Tokenizer
from examples.gemma_numpy.weights import Model, load_model
from examples.llama_numpy.errors import ModelFileError
from examples.llama_numpy.serving import steps
from examples.llama_numpy.weights import Floats
from pagedkv.scheduler import Branch, Request
from tests.realmodel import tiny_gemma
from tests.realmodel.bed import Bed, all_down, fill_device, kv_of, read_goldens, weights_from

HERE = Path(__file__).parent
GOLDENS = read_goldens(HERE / "gemma_goldens.json")
TIE, TOLERANCE, ROUNDED_TOLERANCE = 0.1, 0.05, 0.02
LONG, OTHER = "shared_a", "shared_b"  # they have all but their last tokens in common
LONGEST = "table"  # 2,125 tokens: more than four windows
STEPS, DONE = 6, 3
ROOM = 768  # tokens on the device: one of the two, and a bit
CHUNK = 256  # tokens of a long prompt in a step
Open = Callable[..., pk.KVCache]


@pytest.fixture(scope="session")
def gemma() -> Model:
    """Google's weights, downloaded once into the user's cache directory."""
    return load_model(weights_from(source))


class GemmaBed(Bed):
    """Compares with the goldens themselves, so that no test needs a cold run first."""

    def check(self, name: str, place: int, logits: Any) -> None:
        """The golden token, and the golden logits of the best 20."""
        self.check_token(name, place, logits)
        golden = self.goldens[name]
        np.testing.assert_allclose(logits[golden.top_ids[place]], golden.top_logits[place], rtol=0, atol=self.tolerance)

    def follow(self, cache: pk.KVCache, names: Sequence[str], count: int = STEPS, chunk: int = CHUNK) -> dict[str, int]:
        """Compute prompts together, and golden tokens behind each; cached tokens of each."""
        seqs = {name: cache.sequence(self.so_far(name)) for name in names}
        hits = {name: sum(seq.hit_tokens.values()) for name, seq in seqs.items()}
        places = dict.fromkeys(names, 0)
        while going := [name for name in names if places[name] < count]:
            q_lens = [min(chunk, seqs[name].num_tokens - seqs[name].num_computed) for name in going]
            with cache.step([seqs[name] for name in going], q_lens=q_lens) as step:
                logits = self.model.forward(step)
            for name, row in zip(going, logits, strict=True):
                if seqs[name].num_computed == seqs[name].num_tokens:
                    self.check(name, places[name], row)
                    seqs[name].append(self.goldens[name].greedy[places[name]])
                    places[name] += 1
        for seq in seqs.values():
            seq.release()
        return hits


@pytest.fixture(scope="session")
def beds(gemma: Model) -> dict[int, GemmaBed]:
    """By block size."""
    model, path = Gemma(gemma.weights), source.find_checked()
    return {
        size: GemmaBed("gemma", path, model, GOLDENS, block_size=size, tie=TIE, tolerance=TOLERANCE)
        for size in (8, 16, 64)
    }


@pytest.fixture
def bed(beds: dict[int, GemmaBed]) -> GemmaBed:  # type: ignore[override]
    return beds[16]


def rounded_gelu(x: Any) -> Any:
    """GELU as llama.cpp's table has it: of float16, in float16."""
    half = gemma_model.gelu(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
    return np.where(x <= -10, np.float32(0), np.where(x >= 10, x, half))


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_gemma_computes_the_golden_tokens_with_nothing_cached(
    bed: GemmaBed, opened: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(GOLDENS[name].greedy)
    assert bed.follow(opened(bed, len(GOLDENS[name].ids) + count), [name], count) == {name: 0}
    monkeypatch.setattr(Gemma, "gelu", staticmethod(rounded_gelu))
    monkeypatch.setattr(bed, "tolerance", ROUNDED_TOLERANCE)
    assert bed.follow(opened(bed, len(GOLDENS[name].ids) + count), [name], count) == {name: 0}


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_goes_on_from_a_prefix_that_reaches_beyond_the_window(bed: GemmaBed, opened: Open) -> None:
    cache = opened(bed, 2 * ROOM)
    common = sum(a == b for a, b in zip(bed.so_far(LONG), bed.so_far(OTHER), strict=False))
    assert common > 600
    bed.follow(cache, [LONG])
    assert bed.follow(cache, [OTHER])[OTHER] >= bed.whole(660)
    assert bed.follow(cache, [LONG])[LONG] >= bed.whole(len(GOLDENS[LONG].ids) - 1)


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_computes_prompts_in_chunks_and_in_steps_with_others(bed: GemmaBed, opened: Open) -> None:
    cache = opened(bed, 2 * ROOM)
    bed.follow(cache, [LONG, "france", "mixed", "single"], chunk=100)


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 64])
def test_gemma_computes_the_same_with_other_block_sizes(beds: dict[int, GemmaBed], opened: Open, size: int) -> None:
    bed = beds[size]
    cache = opened(bed, 2 * ROOM)
    bed.follow(cache, [LONG, "code"], chunk=513)
    assert bed.follow(cache, [OTHER, "code"])[OTHER] >= bed.whole(660)


@pytest.mark.realmodel
@pytest.mark.slow
def test_forks_of_gemma_go_on_apart(bed: GemmaBed, opened: Open) -> None:
    cache = opened(bed, 2 * ROOM)
    with cache.sequence(bed.so_far(LONG)) as seq:
        bed.decode(cache, seq, LONG, count=DONE)
        (fork,) = seq.fork()
        with fork:
            fork.append([5, 6, 7])
            with cache.step([fork]) as step:
                bed.model.forward(step)
            bed.decode(cache, seq, LONG, start=DONE, count=STEPS - DONE)


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 16, 64])
def test_gemma_computes_the_golden_tokens_in_a_cache_by_groups(
    beds: dict[int, GemmaBed], opened: Open, size: int
) -> None:
    bed = beds[size]
    cache = opened(bed, 2 * ROOM, by_group=True)
    assert bed.follow(cache, [LONG, "france", "single"], chunk=100) == {LONG: 0, "france": 0, "single": 0}
    assert bed.follow(cache, [LONG])[LONG] >= bed.whole(len(GOLDENS[LONG].ids) - 1)
    bed.follow(cache, [OTHER])
    cache.check_integrity()


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_by_groups_is_forked_evicted_and_computed_again(bed: GemmaBed, opened: Open) -> None:
    cache = opened(bed, 640, by_group=True)  # as many blocks of all layers would not hold the prompt
    for turn in range(2):
        assert (bed.follow(cache, [LONG], chunk=64)[LONG] == 0) == (turn == 0)
        with cache.sequence(bed.so_far(LONG)) as seq:
            bed.decode(cache, seq, LONG, count=DONE)
            first, pages = cache.table.pages(seq.row, 1)
            assert len(pages) <= 512 // 16 + 2
            assert len(seq.blocks) == first + len(pages)
            (fork,) = seq.fork()
            with fork:
                fork.append([5, 6, 7])
                with cache.step([fork]) as step:
                    bed.model.forward(step)
                bed.decode(cache, seq, LONG, start=DONE, count=STEPS - DONE)
        cache.check_integrity()
    bed.follow(cache, ["code"], chunk=64)
    with cache.sequence(range(10, 10 + ROOM)) as seq, pytest.raises(pk.OutOfBlocks), cache.step([seq]):
        pass  # all that is cached has gone
    assert bed.follow(cache, [LONG], chunk=64) == {LONG: 0}


def preempted(bed: GemmaBed, cache: pk.KVCache, name: str = LONG, last: int | None = None) -> bytes:
    """A request is let go of in the middle of its generation; the KV of its last tokens."""
    with cache.sequence(bed.so_far(name)) as seq:
        while (left := seq.num_tokens - seq.num_computed) > CHUNK:
            with cache.step([seq], q_lens=[min(CHUNK, left - 1)]) as step:
                bed.model.forward(step)
        bed.decode(cache, seq, name, count=DONE)
        return kv_of(seq, bed.whole(seq.num_computed), last)


def resumed(
    bed: GemmaBed, cache: pk.KVCache, before: bytes, tier: str, name: str = LONG, last: int | None = None
) -> None:
    """Its KV comes from a tier, bit for bit, and the golden tokens follow."""
    with cache.sequence(bed.so_far(name, DONE)) as seq:
        assert seq.hit_tokens[tier] == bed.whole(len(seq) - 1) > 512
        assert kv_of(seq, bed.whole(len(seq) - 1), last) == before
        bed.decode(cache, seq, name, start=DONE, count=STEPS - DONE)


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64])
def test_gemma_by_groups_computes_a_prompt_of_four_windows_beside_others_and_goes_on_from_its_end(
    beds: dict[int, GemmaBed], opened: Open, size: int
) -> None:
    bed, count = beds[size], len(GOLDENS[LONGEST].greedy)
    cache = opened(bed, 2 * ROOM, by_group=True)
    assert len(GOLDENS[LONGEST].ids) > 2100, "as many blocks of all layers would not hold it"
    names = [LONGEST, "france", "single"]
    assert bed.follow(cache, names, count) == dict.fromkeys(names, 0)
    assert bed.follow(cache, [LONGEST], count)[LONGEST] == bed.whole(len(GOLDENS[LONGEST].ids) - 1)
    before = preempted(bed, cache, LONGEST, last=512)
    resumed(bed, cache, before, "device", LONGEST, last=512)
    with cache.sequence(bed.so_far(LONGEST, DONE)) as seq:
        (fork,) = seq.fork()
        with fork:
            fork.append([5, 6, 7])
            with cache.step([fork]) as step:
                bed.model.forward(step)
            bed.decode(cache, seq, LONGEST, start=DONE, count=STEPS - DONE)


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(LONG, 8), (LONG, 16), (LONGEST, 16)])
def test_gemma_by_groups_is_swapped_to_the_host_and_comes_back(
    beds: dict[int, GemmaBed], opened: Open, name: str, size: int
) -> None:
    bed = beds[size]
    cache = opened(bed, 2 * ROOM, host=bed.blocks(2 * ROOM), by_group=True)
    bed.follow(cache, ["code"], chunk=100)
    before = preempted(bed, cache, name, last=512)
    all_down(cache)
    resumed(bed, cache, before, "host", name, last=512)
    bed.follow(cache, [OTHER, "code"], chunk=100)


def disk(bed: GemmaBed, tmp_path: Path) -> pk.Disk:
    return pk.Disk(str(tmp_path / "kv"), pk.Blocks(bed.blocks(4 * ROOM)), admission="all")


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_is_swapped_to_the_host_and_comes_back(bed: GemmaBed, opened: Open) -> None:
    cache = opened(bed, ROOM, host=bed.blocks(2 * ROOM))
    before = preempted(bed, cache)
    fill_device(cache)
    resumed(bed, cache, before, "host")


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_is_evicted_to_disk_and_found_again_also_by_the_next_process(
    bed: GemmaBed, opened: Open, tmp_path: Path
) -> None:
    cache = opened(bed, ROOM, disk=disk(bed, tmp_path))
    before = preempted(bed, cache)
    fill_device(cache)
    resumed(bed, cache, before, "disk")
    cache.close()
    resumed(bed, opened(bed, ROOM, disk=disk(bed, tmp_path)), before, "disk")


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(LONG, 8), (LONG, 16), (LONGEST, 16)])
def test_gemma_by_groups_is_evicted_to_disk_and_found_again_also_by_the_next_process(
    beds: dict[int, GemmaBed], opened: Open, tmp_path: Path, name: str, size: int
) -> None:
    bed = beds[size]
    cache = opened(bed, 2 * ROOM, disk=disk(bed, tmp_path), by_group=True)
    before = preempted(bed, cache, name, last=512)
    all_down(cache)
    resumed(bed, cache, before, "disk", name, last=512)
    bed.follow(cache, [OTHER, "code"], chunk=100)
    cache.close()
    cache = opened(bed, 2 * ROOM, disk=disk(bed, tmp_path), by_group=True)
    resumed(bed, cache, before, "disk", name, last=512)
    bed.follow(cache, [OTHER, "code"], chunk=100)


@pytest.mark.realmodel
@pytest.mark.slow
@pytest.mark.parametrize(("name", "by_group"), [(LONG, False), (LONG, True), (LONGEST, True)])
def test_a_process_of_gemma_that_is_killed_leaves_its_kv_to_the_next(
    bed: GemmaBed, opened: Open, tmp_path: Path, name: str, by_group: bool
) -> None:
    room = 2 * ROOM if name == LONGEST else ROOM
    order = {
        "gguf": str(bed.path), "model": bed.spec.model, "block_size": bed.block_size, "folder": str(tmp_path),
        "device": bed.blocks(room), "disk": bed.blocks(4 * ROOM), "prompt": bed.so_far(name), "chunk": CHUNK,
        "follow": GOLDENS[name].greedy[:DONE], "is_gemma": True, "by_group": by_group,
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.realmodel.first_life", json.dumps(order)],
        cwd=HERE.parents[1], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    cache, before = opened(bed, room, disk=disk(bed, tmp_path), by_group=by_group), (tmp_path / "kv.bin").read_bytes()
    resumed(bed, cache, before, "disk", name, last=512 if by_group else None)


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_by_groups_is_served_by_a_scheduler_that_swaps_a_long_request_out(
    beds: dict[int, GemmaBed], opened: Open
) -> None:
    """Another long one takes its place; then its window comes back from the host."""
    bed = beds[8]
    cache = opened(bed, 688, host=bed.blocks(4 * ROOM), by_group=True)
    scheduler = pk.Scheduler(cache, pk.SchedulerOptions(6, 64, watermark=0.0, preemption="swap"))

    def submitted(name: str, **options: Any) -> Request:
        return scheduler.submit(bed.so_far(name), len(GOLDENS[name].greedy), **options)

    requests = {submitted(name): name for name in ("france", "code", "single", "mixed", LONG)}
    (long,) = (request for request, name in requests.items() if name == LONG)

    def follow(branch: Branch, row: Floats) -> int:
        name, place = requests[branch.request], branch.num_output
        bed.check(name, place, row)
        return GOLDENS[name].greedy[place]

    for _ in steps(bed.model, scheduler, follow):
        scheduler.check_integrity()
        if long.num_preemptions and OTHER not in requests.values():
            late = submitted(OTHER, namespace=pk.Namespace(tenant="late"), priority=1)
            requests[late] = OTHER
    assert [name for request, name in requests.items() if request.num_preemptions] == [LONG]
    assert OTHER in requests.values()
    assert scheduler.stats().preempted_by_swap == 1
    window = 512 * 15 * 2 * 256 * 4  # bytes: tokens, layers, K and V, numbers of a head, float32
    assert cache.stats().moved_bytes["host_to_device"] >= window
    for request, name in requests.items():
        assert request.outputs[0].tolist() == GOLDENS[name].greedy


@pytest.mark.realmodel
@pytest.mark.slow
def test_gemma_tokenizes_as_llama_cpp_does(gemma: Model) -> None:
    tokenizer = Tokenizer(gemma.vocabulary)
    for name, one in json.loads((HERE / "gemma_goldens.json").read_text(encoding="utf-8")).items():
        assert tokenizer.encode(one["prompt"]) == one["ids"], name
        assert tokenizer.decode(one["ids"][1:]) == one["prompt"], name


def test_the_tiny_vocabulary_merges_the_best_pair_first_and_spells_what_it_lacks(tmp_path: Path) -> None:
    found = load_model(tiny_gemma.write_gguf(tmp_path / "gemma.gguf", tiny_gemma.random_tensors())).vocabulary
    tokenizer = Tokenizer(found)
    texts = [found.tokens[token] for token in tokenizer.encode("and the inn<turn>é")]
    assert texts == ["<bos>", "and", "▁the", "▁", "in", "n", "<turn>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("and the inn<turn>é")[1:]) == "and the inn<turn>é"
    assert tokenizer.decode([5 + 0xC3]) == "\ufffd"
    assert tokenizer.encode("") == [2]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general__architecture": "llama"}, "'llama'"),
    "no window": ({"gemma3__attention__sliding_window": None}, "sliding_window"),
    "a wider V": ({"gemma3__attention__value_length": 32}, "not as wide"),
    "another tokenizer": ({"tokenizer__ggml__model": "gpt2"}, "SentencePiece"),
    "a space in front": ({"tokenizer__ggml__add_space_prefix": True}, "space"),
    "a layer too few": ({"gemma3__block_count": 5}, "blk.5"),
    "another width": ({"gemma3__embedding_length": 40}, "fit"),
    "no such end": ({"tokenizer__ggml__eos_token_id": 9999}, "eos_id"),
}


@pytest.mark.parametrize(("changed", "said"), WRONG.values(), ids=WRONG)
def test_a_file_that_is_no_gemma_is_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = tiny_gemma.write_gguf(tmp_path / "gemma.gguf", tiny_gemma.random_tensors(), **changed)
    with pytest.raises(ModelFileError, match=said):
        load_model(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = tiny_gemma.write_gguf(tmp_path / "gemma.gguf", tiny_gemma.random_tensors()).read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"GGUF" + bytes(60)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFileError):
            load_model(path)


@pytest.mark.parametrize("options", [(), ("--by-group",)])
def test_the_command_continues_a_prompt_and_finds_its_kv_on_disk_in_the_next_run(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tiny_gemma.write_gguf(tmp_path / "gemma.gguf", tiny_gemma.random_tensors())
    text = "the sand and the inn and the thing " * 2
    command = [
        sys.executable, "-m", "examples.gemma_numpy", "--model", str(path), "--device-memory", "256KiB",
        "--max-tokens", "5", "--disk", str(tmp_path / "kv"), text,
    ]  # fmt: skip
    runs = [
        subprocess.run([*command, *options], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith(text)
    assert "none" in runs[0].stderr
    assert "'disk': 32" in runs[1].stderr
    by_group = subprocess.run(
        [*command[:-3], "--host-memory", "256KiB", "--by-group", text, text],
        cwd=HERE.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert by_group.stdout == 2 * runs[0].stdout
    assert "'device': 32" in by_group.stderr
    failed = subprocess.run(
        [*command[:4], str(tmp_path)], cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("gemma_numpy: error: ")
