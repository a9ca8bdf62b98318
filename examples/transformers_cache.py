"""pagedkv as the prefix cache of a transformers model.

    store = open_store(model, memory="1GiB", disk=pk.Disk("kv", "20GiB"))
    cache, rest = load(store, model, ids)                      # a DynamicCache, and the tokens that it lacks
    ids = model.generate(ids, cache=cache)                     # computes the rest, and adds it to the cache
    save(store, ids, cache)

``store.observe_prefill(rest.shape[1], seconds, context)`` tells the store how fast the model computes, and loads that
would take longer are declined. Inside ``with store.namespace(...)`` a tenant's requests share KV with no other one.

The example makes a small Llama with random weights. Needs PyTorch and transformers, which no extra names (tried with
transformers 5.24; in earlier versions the argument `cache` is `past_key_values`).
"""

import tempfile

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import pagedkv as pk
from pagedkv.adapters.probe import Probe
from pagedkv.adapters.store import PrefixStore
from pagedkv.errors import NotSupported

PROBE, BLOCK = 8, 16  # tokens


@torch.no_grad()
def open_store(model: PreTrainedModel, memory: str, disk: pk.Disk | None = None, revision: str = "") -> PrefixStore:
    """A store for the KV of this model, of which `revision` names the weights.

    The model computes a few tokens: their KV says its shape, and tells models apart whose names are equal.

    Raises
    ------
    NotSupported
        A layer keeps something else than K and V of each token, or the layers differ in shape.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise NotSupported(name, "its KV depends on the encoder's input as well")
    cache = DynamicCache(config=model.config)
    if others := {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}:
        raise NotSupported(name, f"{', '.join(sorted(others))} does not keep K and V of all tokens")
    ids = torch.arange(PROBE, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    model(ids, cache=cache)
    shapes = {(*layer.keys.shape, layer.values.shape[-1], layer.keys.dtype) for layer in cache.layers}
    if len(shapes) > 1:
        raise NotSupported(name, f"its layers keep K and V of {len(shapes)} shapes")
    _, heads, _, width, width_v, dtype = shapes.pop()
    spec = pk.KVSpec(
        len(cache.layers), heads, width, str(dtype).removeprefix("torch."), BLOCK, head_dim_v=width_v,
        model=f"{name} {revision}",
    )  # fmt: skip
    k, v = computed(cache, 0, PROBE)
    return PrefixStore(spec, memory, disk, probe=Probe(k.float().numpy(), v.float().numpy()))


def computed(cache: DynamicCache, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a range of tokens, in host memory: [layer, head, token, dim]."""
    k = torch.stack([layer.keys[0, :, start:stop] for layer in cache.layers])
    v = torch.stack([layer.values[0, :, start:stop] for layer in cache.layers])
    return k.cpu(), v.cpu()


def load(store: PrefixStore, model: PreTrainedModel, ids: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
    """The KV of the longest cached prefix of `ids` [1, n], and the tokens behind it."""
    spec, sides = store.spec, []

    def into(n: int) -> tuple[torch.Tensor, ...]:
        for width in (spec.head_dim, spec.head_dim_v or spec.head_dim):
            shape = spec.num_layers, spec.num_kv_heads, n, width
            sides.append(torch.empty(shape, dtype=getattr(torch, spec.dtype)))
        return tuple(sides)

    cached = store.load(ids[0].tolist(), into, layout="HND")
    cache = DynamicCache(config=model.config)
    if cached:  # after a failed load, which is a miss, the tensors may hold anything
        for layer, (k, v) in enumerate(zip(*sides, strict=True)):
            cache.update(k[None].to(model.device), v[None].to(model.device), layer)
    return cache, ids[:, cached:]


def save(store: PrefixStore, ids: torch.Tensor, cache: DynamicCache) -> int:
    """Store the KV that `cache` holds of the tokens `ids` [1, n]; how many of them are new."""
    held = ids[0, : cache.get_seq_length()]  # without the last token, whose KV the model has not computed
    return store.save(held.tolist(), lambda start, stop: computed(cache, start, stop), layout="HND")


# ---- the example


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache | None = None) -> tuple[torch.Tensor, int]:
    """Twelve greedy tokens behind a prompt, and how many of its tokens the model computed."""
    inputs = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, __: inputs.append(args[0].shape[1]))
    mask = torch.ones_like(ids)
    ids = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=12, do_sample=False)
    hook.remove()
    return ids, inputs[0]


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 500, "pad_token_id": 0, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    document = torch.randint(1, 500, (1, 400))
    prompts = [torch.cat([document, torch.randint(1, 500, (1, 20))], dim=1) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        for run, lacking in (("first", [420, 20]), ("second", [1, 1])):
            with open_store(model, "16MiB", pk.Disk(folder, "64MiB")) as store:
                for prompt, most in zip(prompts, lacking, strict=True):
                    cold, all_tokens = generate(model, prompt)
                    cache, rest = load(store, model, prompt)
                    warm, tokens = generate(model, prompt, cache)
                    save(store, warm, cache)
                    hit = dict(store.stats().hit_tokens)
                    print(f"{run} run: {tokens} of {all_tokens} prompt tokens computed; cached: {hit}")
                    assert warm.equal(cold), "the tokens are those of a model without a cache"
                    assert tokens == rest.shape[1] == most
                store.checkpoint()  # or the rest is written while the store closes, for some seconds at most
                assert not store.stats().failures
    try:
        open_store(MistralForCausalLM(MistralConfig(**shape, sliding_window=64)), "16MiB")
    except NotSupported as refusal:
        print(refusal)
    else:
        raise AssertionError("a model that forgets tokens was taken")


if __name__ == "__main__":
    main()
