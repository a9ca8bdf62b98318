"""What nvidia-smi says about clocks, power and the driver; empty where it is not there."""

from __future__ import annotations

import subprocess

FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def clocks_and_power() -> dict[str, str]:
    """``nvidia_smi.FIELD`` for every field of the first device."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    if done.returncode != 0 or len(values) != len(FIELDS):
        return {}
    return {f"nvidia_smi.{name}": value for name, value in zip(FIELDS, values, strict=True)}
