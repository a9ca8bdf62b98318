"""A model by its ``config.json`` and the caller's count of its weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.cli import main
from pagedkv.lab.simulate import MODELS, Hardware, parse_gpus
from pagedkv.lab.simulate.served import served_by_config
from tests.spec.published import CONFIGS


@pytest.fixture
def file_of(tmp_path):
    """The path of a published config, with other fields where they are given."""

    def write(name, **fields):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**CONFIGS[name], **fields}))
        return str(path)

    return write


def test_layers_and_heads_are_those_of_the_named_model(file_of):
    named = MODELS["gpt-oss-120b"]
    model = served_by_config(file_of("gpt-oss-120b"), named.sizes.params, named.sizes.active_params)
    assert set(model.sizes.groups) == set(named.sizes.groups)
    assert (model.shape.num_qo_heads, model.shape.head_dim) == (64, 64)
    assert model.shape.matmul_weights == named.sizes.active_params
    assert model.kv_bytes_per_token == named.kv_bytes_per_token
    assert model.spec(16).bytes_per_token == named.spec(16).bytes_per_token


def test_a_dense_model_costs_nearly_what_it_does_by_its_name(file_of):
    """By its name, embeddings and the output head are left out of compute."""
    gpu, number = parse_gpus("2xH100")
    named = MODELS["gemma-3-27b"]
    machines = [Hardware(gpu, number, m) for m in (named, served_by_config(file_of("gemma-3-27b-it"), 27_009_346_304))]
    for q, context in ((np.array([1] * 20), np.array([9000] * 20)), (np.array([2000]), np.array([20_000]))):
        by_name, by_file = (machine.step_s(q, context) for machine in machines)
        assert by_name <= by_file <= 1.06 * by_name


def test_a_mixture_reads_all_it_meets_and_for_one_token_its_active_weights(file_of):
    gpu, number = parse_gpus("4xH100")
    hardware = Hardware(gpu, number, served_by_config(file_of("gpt-oss-120b"), 117_000_000_000, 5_000_000_000))
    read = hardware.roofline()._weights_read
    assert read(1) == pytest.approx(10e9)
    assert read(2) == pytest.approx(2 * (10e9 - 5e9 * 5 / 117))
    assert read(10_000) == pytest.approx(234e9)


def test_the_command_serves_it(file_of, capsys):
    command = ["simulate", "synthetic:chat:3:20", "--config", file_of("gemma-3-27b-it"), "--params", "27B"]
    assert main([*command, "--gpus", "2xH100", "--systems", "tiered,groups", "--json", "-", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"]["model"] == "gemma3_text"
    assert report["hardware"]["weight_bytes"] == 54_000_000_000
    assert [layers["window"] for layers in report["hardware"]["layers"]] in ([1024, None], [None, 1024])
    assert report["results"][1]["memory_held"] < report["results"][0]["memory_held"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("DeepSeek-V2-Lite", "layer 0 of this deepseek_v2 model"), ("gemma-3n-E4B-it", "layer 20 of this gemma3n_text")],
)
def test_a_model_without_k_and_v_of_one_shape_in_each_layer_is_refused(file_of, name, words):
    with pytest.raises(pk.UnsupportedVariant, match=words):
        served_by_config(file_of(name), 10**9)


def test_a_mixture_is_not_taken_for_a_dense_model(file_of):
    with pytest.raises(pk.InvalidArgument, match="a mixture of 128 experts: say with active_params"):
        served_by_config(file_of("gpt-oss-120b"), 117_000_000_000)
    assert served_by_config(file_of("gpt-oss-120b", num_local_experts=1), 10**9).shape.matmul_weights == 10**9


def test_a_file_that_does_not_say_how_many_query_heads_there_are_is_refused(file_of):
    path = file_of("GLM-4.5", num_attention_heads=None)
    with pytest.raises(pk.InvalidArgument, match="no num_attention_heads"):
        served_by_config(path, 10**9, 10**8)


def test_what_does_not_go_together_is_refused(file_of, capsys):
    path = file_of("gpt-oss-120b")
    for wrong, words in (
        (["--config", path], "--config needs --params too"),
        (["--config", path, "--params", "117B", "--model", "llama-3-8b"], "give --model or --config, not both"),
        (["--params", "117B"], "--params is for --config FILE"),
        (["--active-params", "5B"], "--active-params is for --config FILE"),
        (["--config", path, "--params", "many"], "--params: 'many' is not a number"),
        (["--config", path, "--params", "117B", "--active-params", "200B"], "active_params"),
        (["--config", path, "--params", "0"], "params must be"),
        (["--config", path, "--params", "1", "--active-params", "0"], "active_params must be"),
        (["--config", path, "--params", "117B"], "a mixture of 128 experts"),
        (["--config", f"{path}.txt", "--params", "117B"], "cannot be read"),
    ):
        assert main(["simulate", "synthetic:chat:3:20", *wrong]) == 2
        assert words in capsys.readouterr().err
