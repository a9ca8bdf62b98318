"""Streams that a GPU tier takes, and the work that each waits for."""

from __future__ import annotations

import types
from typing import Any

import pytest

from pagedkv.errors import InvalidArgument
from pagedkv.tiers.device import DeviceTier
from tests.tiers.fake_gpu import fake_cupy_fixture

fake_cupy = fake_cupy_fixture()


@pytest.mark.parametrize(
    "stream", [True, -1, 1.5, "12", b"5", object(), [3], types.SimpleNamespace(ptr=None), types.SimpleNamespace(ptr=-3)]
)
def test_what_is_no_stream_is_refused_by_name_before_and_after_launches(fake_cupy: Any, stream: Any) -> None:
    device = DeviceTier(4, 64, device="cuda:0")
    for call in (device.before_use, device.launched_on, device.used_by):
        with pytest.raises(InvalidArgument, match="stream must be a CuPy stream"):
            call(stream)


def test_a_stream_of_another_library_is_known_by_the_protocol_whatever_methods_it_has(fake_cupy: Any) -> None:
    other = types.SimpleNamespace(__cuda_stream__=lambda: (0, 9), record=lambda event=None, options=None: event)
    device = DeviceTier(4, 64, device="cuda:0")
    assert device.launched_on(other)
    assert device.before_use(other).ptr == 9


def test_work_on_a_stream_waits_for_all_streams_that_none_has_waited_for(fake_cupy: Any) -> None:
    """A graph that the caller launches waits for nothing of ours."""
    device = DeviceTier(4, 64, device="cuda:0")
    device.launched_on()  # on 5
    device.used_by(6)
    for stream in (6, None):  # whose own work is in order anyhow
        fake_cupy.waits.clear()
        device.before_use(stream)
        assert fake_cupy.waits == ([(6, 5)] if stream == 6 else [(5, 6)])
        device.launched_on(stream)
