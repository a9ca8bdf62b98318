"""examples/server over a real model: its streams are what the command line prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.llama_numpy.command import main
from examples.llama_numpy.gguf_file import Model
from examples.server.llama import LlamaEngine
from tests.server.conftest import openai, running

SMOLLM2 = pytest.param("smollm2", marks=[pytest.mark.realmodel, pytest.mark.slow])
MESSAGE = "the sand and the sea <|im_end|>"


@pytest.fixture(params=["tiny", SMOLLM2])
def named(request: pytest.FixtureRequest) -> tuple[Model, Path]:
    """A model and its file."""
    name = "tiny_model" if request.param == "tiny" else request.param
    return request.getfixturevalue(name), request.getfixturevalue(f"{request.param}_path")


@pytest.fixture
def printed(named: tuple[Model, Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command line answers."""

    def run(*arguments: str) -> str:
        assert main(["--model", str(named[1]), "--max-tokens", "12", *arguments]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


def test_streams_are_what_the_command_line_prints(named: tuple[Model, Path], printed: Callable[..., str]) -> None:
    with running(LlamaEngine(named[0]), max_batch_tokens=40) as made:
        client, model = made.client(), named[0].name

        def streamed(**options: Any) -> str:
            events = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": MESSAGE}], max_tokens=12, stream=True, **options
            )
            return "".join(event.choices[0].delta.content or "" for event in events)

        assert streamed() == printed(MESSAGE)
        assert streamed() == printed(MESSAGE), "from the cache, too"
        drawn = printed(MESSAGE, "--temperature", "0.9", "--top-p", "0.95", "--seed", "6")
        assert streamed(temperature=0.9, top_p=0.95, seed=6) == drawn
        plain = client.completions.create(model=model, prompt=MESSAGE, max_tokens=12)
        assert plain.choices[0].text == printed("--plain", MESSAGE)


def test_samples_are_those_of_the_command_line(named: tuple[Model, Path], printed: Callable[..., str]) -> None:
    with running(LlamaEngine(named[0])) as made:
        told = made.client().completions.create(
            model=named[0].name, prompt=MESSAGE, max_tokens=12, n=3, temperature=0.8, seed=2
        )
    whole = printed("--plain", "--parallel", "3", "--temperature", "0.8", "--seed", "2", MESSAGE)
    assert whole.endswith("".join(f"\n[{choice.index}] {choice.text}\n" for choice in told.choices).rstrip("\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x" * 300, "run of more than 256"),
        (" " * 300, "run of more than 256"),
        ("some words " * 50_000, "characters"),
        ("qjzxv " * 2000, "more than 1024 tokens"),
    ],
    ids=["letters", "blanks", "words", "tokens"],
)
def test_texts_that_take_long_to_encode_are_refused_before_that(tiny_model: Model, text: str, says: str) -> None:
    with running(LlamaEngine(tiny_model)) as made:
        client, messages = made.client(), [{"role": "user", "content": text}]
        with pytest.raises(openai.BadRequestError, match=says):
            client.completions.create(model=tiny_model.name, prompt=text)
        with pytest.raises(openai.BadRequestError, match=says) as told:
            client.chat.completions.create(model=tiny_model.name, messages=messages)
        assert told.value.param == "messages"
        assert told.value.code == ("context_length_exceeded" if "run" not in says else None)
