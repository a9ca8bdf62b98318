"""Which room may import which: the table of the import test, and of docs/architecture.md.

``python -m tests.arrows`` writes it into the page. A room is a folder of the package, or a module of its top level or
of a wing, or a leaf; it may import itself, what stands here, and nothing else of ours.
"""

from __future__ import annotations

from pathlib import Path

LEAVES = {"_core.tier"}  # modules that are rooms of their own: whatever may import their folder may import them
WINGS = {"adapters", "cache", "lab", "observe", "threads", "tools"}  # folders whose folders and modules are rooms

ARROWS: dict[str, set[str]] = {
    "_version": set(),
    "extras": set(),
    "streams": {"errors"},
    "_core.tier": set(),
    "errors": {"_core.tier"},
    "reference": set(),
    "spec": {"_core.tier", "errors"},
    "threads.pthread": set(),
    "threads.monitor": {"threads.pthread"},
    "_core": {"errors", "threads.pthread", "threads.ending"},
    "threads.ending": set(),
    "threads.spawn": {"threads.ending"},
    "threads.crew": {"threads.monitor", "threads.spawn"},
    "core": {"_core"},
    "c_api": {"_core", "errors"},
    "kernels": {"extras", "errors", "streams", "_version", "threads.monitor", "observe.callbacks", "threads.crew"},
    "cpu": {"errors", "spec"},
    "interop": {"errors", "streams"},
    "observe.latency": set(),
    "observe.stats": {"observe.latency"},
    "observe.hooks": {"errors", "observe.callbacks"},
    "observe.metrics": {"extras", "errors", "observe.latency", "observe.stats"},
    "tiers": {
        *("extras", "errors", "streams", "spec", "threads.monitor", "threads.ending"),
        *("observe.callbacks", "observe.clock", "threads.crew"),
    },
    "events": {"extras", "errors", "spec", "_core", "cache.cache", "observe.callbacks", "threads.monitor"},
    "lab.sizing": {"errors", "spec"},
    "attention": {"errors", "spec", "kernels", "cpu", "reference"},
    "cache.layer_scales": {"spec", "cpu"},
    "cache.layout": {"errors", "spec", "tiers"},
    "cache.storage": {"errors", "spec", "tiers"},
    "cache.reach": {"errors", "spec", "cache.storage", "cache.group_kv"},
    "cache.group_kv": {"errors", "spec", "cache.device_kv", "cache.storage"},
    "cache.gpu_group_kv": {"spec", "kernels", "cache.gpu_kv", "cache.group_kv"},
    "cache.group_mover": {"spec", "tiers"},
    "cache.disk_lanes": {"spec", "tiers"},
    "cache.grouped": {"errors", "spec", "_core", "cache.disk_lanes"},
    "cache.device_kv": {
        *("errors", "spec", "interop", "cpu", "observe.callbacks", "reference", "cache.layer_scales"),
        "cache.storage",
    },
    "cache.gpu_kv": {"errors", "spec", "attention", "kernels", "cache.gpu_layers", "cache.storage"},
    "cache.gpu_layers": {"spec", "kernels"},
    "cache.runtime": {"_core", "threads.crew", "threads.spawn"},
    "cache.tiered": {
        *("errors", "spec", "_core.tier", "tiers", "observe.callbacks", "attention", "kernels", "cache.storage"),
        *("cache.device_kv", "cache.gpu_kv", "cache.group_kv", "cache.group_mover", "cache.disk_lanes"),
        "cache.gpu_group_kv",
    },
    "cache.ranks": {
        *("errors", "spec", "_core.tier", "tiers", "kernels", "cache.storage", "cache.tiered", "cache.parts"),
        *("cache.reach", "cache.layout"),
    },
    "cache.records": {"_core", "tiers", "cache.storage"},
    "cache.points_found": {"spec", "_core", "tiers", "cache.storage", "cache.records"},
    "cache.cost_model": {"_core.tier", "errors", "observe.latency", "spec"},
    "observe.callbacks": {"errors"},
    "observe.clock": {"errors", "observe.callbacks"},
    "cache.admission": {"observe.callbacks", "observe.clock", "cache.cost_model"},
    "cache.scrub": {"_core"},
    "cache.roots": {"errors", "spec", "_core", "cache.scrub"},
    "cache.learned": {"errors", "_core", "tiers", "observe.callbacks"},
    "cache.parts": {
        *("errors", "spec", "_core", "tiers", "kernels", "cache.cost_model", "cache.admission"),
        *("cache.learned", "cache.storage", "cache.tiered", "cache.grouped", "cache.disk_lanes"),
    },
    "cache.jobs": {"errors", "_core", "observe.hooks", "cache.storage"},
    "cache.dispatcher_thread": {"_core", "threads.ending"},
    "cache.dispatcher": {
        *("_core", "observe.callbacks", "threads.crew", "cache.cost_model", "cache.admission", "cache.scrub"),
        *("observe.hooks", "cache.storage", "cache.runtime"),
        *("threads.monitor", "cache.jobs", "cache.dispatcher_thread", "cache.remote"),
    },
    "cache.remote": {
        *("errors", "spec", "_core", "tiers", "threads.monitor", "observe.callbacks", "cache.cost_model"),
        *("cache.storage", "cache.runtime", "observe.latency"),
    },
    "cache.waits": {"errors", "_core", "cache.dispatcher", "cache.runtime", "observe.hooks"},
    "cache.moves": {"errors", "_core", "cache.dispatcher", "cache.runtime", "cache.waits", "observe.hooks"},
    "cache.remainder": {"_core"},
    "cache.load": {
        *("errors", "_core", "cache.moves", "cache.remainder", "cache.sequence", "observe.hooks", "observe.latency"),
        *("spec", "cache.remote"),
    },
    "cache.matcher": {
        *("errors", "_core", "cache.cost_model", "cache.load", "cache.moves", "cache.remote", "observe.hooks"),
    },
    "cache.engine": {
        *("errors", "spec", "_core", "observe.callbacks", "cache.cost_model", "cache.scrub", "cache.moves"),
        *("observe.hooks", "cache.learned", "cache.storage"),
    },
    "cache.explain": {"_core.tier"},
    "cache.pin": {"errors", "_core"},
    "cache.prefetch": {"errors", "_core", "threads.monitor", "threads.ending", "cache.matcher", "cache.runtime"},
    "cache.sequence": {"errors", "spec", "_core", "interop", "cache.engine"},
    "cache.step": {
        *("errors", "spec", "_core", "observe.callbacks", "interop", "cache.engine", "cache.sequence"),
        *("cache.storage", "cache.reach"),
    },
    "cache.checkpoint": {"_core", "cache.admission", "cache.moves", "cache.storage"},
    "cache.journal": {"spec", "_core", "cache.checkpoint", "cache.records", "observe.callbacks"},
    "cache.cache": {
        *("errors", "spec", "_core", "observe.stats", "interop", "kernels", "tiers", "cache.remote"),
        *("cache.storage", "cache.records", "cache.dispatcher", "cache.moves", "cache.engine", "cache.explain"),
        *("cache.pin", "cache.prefetch", "cache.load", "cache.sequence", "cache.step", "cache.cost_model"),
        *("cache.scrub", "cache.checkpoint", "cache.journal", "cache.runtime"),
        *("cache.roots", "cache.learned", "cache.parts", "cache.matcher", "cache.ranks"),
        *("observe.hooks", "cache.traced_step", "cache.grouped", "cache.disk_lanes", "cache.points_found"),
        *("observe.clock", "threads.crew", "cache.layout"),
    },
    "cache.traced_step": {"cache.engine", "observe.hooks", "cache.sequence", "cache.step"},
    "lab.recording": {"errors", "spec", "_core", "observe.hooks", "cache.cache"},
    "lab.show": {"errors", "spec", "cache.sequence", "cache.cache", "lab.recording"},
    "scheduler": {
        *("errors", "spec", "observe.callbacks", "observe.clock", "cache.load", "cache.moves", "cache.sequence"),
        *("cache.step", "cache.cache", "observe.latency", "observe.stats"),
    },
    "serving": {"errors", "spec", "cache.step", "observe.callbacks", "scheduler", "threads.crew"},
    "lab.simulate": {
        *("errors", "spec", "_core", "lab.sizing", "cache.admission", "tiers", "cache.cache", "cache.runtime"),
        *("scheduler", "lab.replay"),
        "_version",
    },
    "lab.replay": {"extras", "errors", "spec", "core", "cache.cache", "lab.sizing", "_version"},
    "lab.traces": {"errors", "spec", "_core", "observe.callbacks", "observe.hooks", "cache.cache", "lab.replay"},
    "tools.payoff": set(),
    "tools.choice": {"_version", "errors", "kernels"},
    "tools.remote": {"errors", "spec", "tiers", "tools.payoff"},
    "tools.store": {"errors", "spec", "_core", "tiers", "tools.payoff", "tools.remote"},
    "tools.doctor": {
        *("errors", "spec", "kernels", "cpu", "attention", "reference", "tools.store", "tools.remote", "_version"),
        "tools.choice",
    },
    "cli": {
        *("errors", "lab.sizing", "lab.replay"),
        *("lab.simulate", "tools.doctor"),
        *("tools.store", "lab.show", "lab.traces"),
        "_version",
    },
    "adapters.probe": {"errors"},
    "adapters.folders": {"errors", "spec", "adapters.probe", "cache.parts", "tiers"},
    "adapters.failures": {"errors", "observe.callbacks"},
    "adapters.store_stats": {"observe.stats"},
    "adapters.model_cache": {
        *("errors", "spec", "cache.cache", "cache.parts", "adapters.failures", "adapters.folders", "adapters.probe"),
    },
    "adapters.store": {
        *("errors", "spec", "cache.cost_model", "cache.explain"),
        *("adapters.failures", "adapters.model_cache", "adapters.probe", "adapters.store_stats"),
    },
    "adapters.face": {"spec", "cache.explain", "adapters.store", "adapters.store_stats"},
    "adapters.llama_state": {"errors", "spec"},
    "adapters.llama_numbers": set(),
    "adapters.versions": set(),
    "adapters.llama_model": {"errors"},
    "adapters.llama_context": {"errors", "adapters.llama_numbers", "adapters.llama_state", "adapters.probe"},
    "adapters.llama_cpp": {
        *("errors", "spec", "observe.callbacks", "cache.explain", "adapters.llama_context", "adapters.llama_model"),
        *("adapters.face", "adapters.failures", "adapters.store", "adapters.versions"),
    },
    "adapters.mlx_layers": {"errors", "spec", "adapters.probe"},
    "adapters.mlx_lm": {
        *("errors", "spec", "observe.callbacks", "adapters.mlx_layers"),
        *("adapters.face", "adapters.failures", "adapters.store", "adapters.versions"),
    },
    "adapters.mlx_server": {"spec", "adapters.failures", "adapters.mlx_lm"},
    "adapters.onnx_ports": {"errors", "spec"},
    "adapters.onnx_context": {"errors", "spec", "interop", "adapters.onnx_ports"},
    "adapters.onnx_probe": {"errors", "adapters.failures", "adapters.onnx_context", "adapters.probe"},
    "adapters.onnx": {
        *("errors", "spec", "adapters.onnx_context", "adapters.onnx_ports", "adapters.onnx_probe"),
        *("adapters.face", "adapters.store"),
    },
    "adapters": set(),
    "cache": set(),
    "lab": set(),
    "threads": set(),
    "observe": set(),
    "tools": set(),
    "__main__": {"cli"},
    "__init__": {
        *("errors", "spec", "core", "observe.stats", "threads.ending"),
        *("cache.pin", "cache.sequence", "cache.step", "cache.cache", "cache.ranks"),
        *("scheduler", "lab.traces", "_version", "events"),
    },
}

BEGIN, END = "<!-- arrows -->\n", "<!-- end of arrows -->\n"


def in_docs() -> str:
    """The table for the page, a line for each room that imports any."""
    width = max(map(len, ARROWS))
    lines = [f"{room:{width}} -> {', '.join(sorted(known))}" for room, known in sorted(ARROWS.items()) if known]
    alone = sorted(room for room, known in ARROWS.items() if not known and room not in WINGS)
    return "\n".join([BEGIN + "```text", *lines, f"{', '.join(alone)} import nothing of ours", "```", END])


def main() -> None:
    """Write it into docs/architecture.md."""
    page = Path(__file__).parent.parent / "docs" / "architecture.md"
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + in_docs() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
