"""ONNX Runtime itself.

IOBinding on our memory, OrtValues, and the contract of its PagedAttention operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.errors import ExchangeRefused
from pagedkv.interop import as_array, as_view, empty, export, fit
from pagedkv.interop.onnxruntime import bind_input, bind_output, paged_attention_inputs


def double(ort: Any) -> Any:
    """A session that computes y = x + x in float32."""
    from onnx import parser

    text = '<ir_version: 8, opset_import: ["": 17]> double (float[n] x) => (float[n] y) { y = Add (x, x) }'
    model = parser.parse_model(text)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_inputs_and_outputs_are_bound_where_they_lie(ort: Any):
    session = double(ort)
    x, y = export(np.arange(6, dtype=np.float32)[1:]), np.zeros(5, np.float32)  # read-only, at 4 bytes
    binding = session.io_binding()
    assert bind_input(binding, "x", x).ptr == x.ptr
    assert bind_output(binding, "y", y).ptr == y.ctypes.data
    session.run_with_iobinding(binding)
    assert y.tolist() == [2, 4, 6, 8, 10]
    assert binding.get_outputs()[0].data_ptr() == y.ctypes.data


def test_what_cannot_be_bound_is_refused_and_not_bound(ort: Any):
    session = double(ort)
    binding = session.io_binding()
    x = np.arange(10, dtype=np.float32)
    with pytest.raises(ExchangeRefused, match="not compact"):
        bind_input(binding, "x", x[::2])
    with pytest.raises(ExchangeRefused, match="not compact"):
        bind_output(binding, "y", x[::2])
    with pytest.raises(ExchangeRefused, match="read-only"):
        bind_output(binding, "y", export(x))
    with pytest.raises(ExchangeRefused, match="complex64"):
        bind_input(binding, "x", np.zeros(4, np.complex64))
    assert binding.get_outputs() == []


def test_its_own_values_go_both_ways(ort: Any):
    view = empty((2, 3), "bfloat16")
    view.numpy()[...] = 1.5
    value = ort.OrtValue.from_dlpack(view) if hasattr(ort.OrtValue, "from_dlpack") else _value(view)
    assert value.data_ptr() == view.ptr
    made = ort.OrtValue.ortvalue_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    inner = made if hasattr(made, "__dlpack__") else made._get_c_value()
    assert as_view(inner).ptr == made.data_ptr()
    assert as_array(inner).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ExchangeRefused):
        export(view).__dlpack__()
    assert fit(export(view), "onnxruntime").__dlpack__() is not None


def _value(view: Any) -> Any:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.OrtValue.from_dlpack(view.__dlpack__(), False)


def test_its_schema_of_paged_attention_has_the_inputs_that_we_make(ort: Any):
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = {(s.domain, s.name): s for s in state.get_all_operator_schema()}
    schema = schemas["com.microsoft", "PagedAttention"]
    types = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    told = {i.name: types[i.typeStr] for i in schema.inputs}
    cache = pk.KVCache(pk.KVSpec(1, 2, 16, "float16", 16), pk.Blocks(4))
    with cache, cache.sequence(range(5)) as seq, cache.step([seq]) as step:
        inputs = paged_attention_inputs(step, cache.pages(0, read_only=False))
        step.mark_written(0)
    for name, array in inputs.items():
        kind = "float16" if "cache" in name else str(array.dtype)
        assert f"tensor({kind})" in told[name], name
    required = {i.name for i in schema.inputs if i.option.name == "Single"}
    assert required == {"query", "key_cache", "cumulative_sequence_length", "past_seqlens", "block_table"}
    assert required - {"query"} <= inputs.keys()


def test_a_model_with_the_operator_is_well_formed_and_needs_another_provider_than_the_cpus(ort: Any):
    from onnx import TensorProto, helper

    half, whole = TensorProto.BFLOAT16, TensorProto.INT32  # float16 would be cast for a CPU first
    shapes = {
        "query": (half, ["tokens", 64]), "key": (half, ["tokens", 32]), "value": (half, ["tokens", 32]),
        "key_cache": (half, ["pages", 16, 2, 16]), "value_cache": (half, ["pages", 16, 2, 16]),
        "cumulative_sequence_length": (whole, ["n1"]), "past_seqlens": (whole, ["n"]),
        "block_table": (whole, ["n", "b"]), "cos_cache": (half, []), "sin_cache": (half, []),
        "slot_mapping": (whole, ["tokens"]),
    }  # fmt: skip
    names = [name if name not in ("cos_cache", "sin_cache") else "" for name in shapes]
    node = helper.make_node(
        "PagedAttention", names, ["output"], domain="com.microsoft", num_heads=4, kv_num_heads=2
    )  # fmt: skip
    ins = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items() if name in names]
    out = helper.make_tensor_value_info("output", half, ["tokens", 64])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "paged", ins, [out]), opset_imports=imports, ir_version=8)
    with pytest.raises(Exception, match=r"(?i)not.implemented|find an implementation"):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
