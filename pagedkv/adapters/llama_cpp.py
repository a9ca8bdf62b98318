"""A prefix cache over memory and disk for a ``llama_cpp.Llama`` (llama-cpp-python).

    llm = llama_cpp.Llama("model.gguf", n_ctx=4096)
    cache = attach(llm, memory="2GiB", disk=pagedkv.Disk("kv", "20GiB"))
    llm.create_chat_completion(...)         # as before; the beginning of a prompt that was seen before is not computed

``llm.generate`` of this one object is replaced; completions, chats and streams all go through it. Before a prompt is
evaluated, its longest cached prefix is put into the context, unless the context holds as much of it already. When the
generator ends, also by ``break`` or a stream that is closed, its tokens are stored, and shared with every prompt that
begins alike. ``set_cache`` is not used: it would copy the whole state, and the scores, for each answer.

A failure of the cache is a miss: it is counted, logged once per kind, and the prompt is computed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Sequence
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.adapters.face import Face
from pagedkv.adapters.failures import refusing
from pagedkv.adapters.llama_context import Context
from pagedkv.adapters.llama_model import TESTED, check_supported, model_name
from pagedkv.adapters.store import MIN_TOKENS, PrefixStore
from pagedkv.adapters.versions import is_tested
from pagedkv.cache.explain import Explanation
from pagedkv.errors import InvalidArgument, NotSupported, WrongType
from pagedkv.observe.callbacks import Log
from pagedkv.spec.budgets import Disk
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.sizes import Size, check_flag

log = Log(logging.getLogger("pagedkv.adapters"))

BLOCK_SIZE = 16  # tokens; the rest of a prompt behind whole blocks is cheap on a CPU only if it is short
_MEASURED = 32  # tokens of a prompt from which its time tells a rate
Tokens = Generator[int, Any, None]


def attach(
    llm: Any,
    memory: Size = "1GiB",
    disk: Disk | None = None,
    *,
    store_generated: bool = True,
    on_mismatch: str = "beside",
    block_size: int = BLOCK_SIZE,
    min_tokens: int = MIN_TOKENS,
    require_namespace: bool = False,
    **options: Any,
) -> LlamaCache:
    """Give a ``llama_cpp.Llama`` a prefix cache.

    Parameters
    ----------
    llm : llama_cpp.Llama
        One whose context holds tokens already goes on from them.
    memory, disk, on_mismatch, min_tokens, require_namespace, options
        As for :class:`pagedkv.adapters.store.PrefixStore`. One directory serves many models; each has a folder of its
        own, found by a digest of its weights, its settings and the KV that it computes for 8 fixed tokens.
    store_generated : bool
        False stores prompts only. llama.cpp computes other bits for tokens that it generates one by one than for the
        same tokens in a prompt; without them, a hit has the bits of a cold run.
    block_size : int
        Tokens of a block.

    Returns
    -------
    LlamaCache
        Close it, or leave that to the end of the program.

    Raises
    ------
    ImportError
        llama-cpp-python is not installed.
    NotSupported
        The model or a setting cannot be cached, and why; `llm` is as it was.
    WrongType, InvalidArgument, LayoutMismatch, TierError
        The memory or the disk cannot be used, or `llm` has a cache; `llm` is as it was.
    """
    runtime = _runtime()
    check_flag(store_generated, "store_generated")
    if not isinstance(llm, runtime.Llama):
        raise NotSupported(f"a {type(llm).__name__}", "attach takes a llama_cpp.Llama")
    if isinstance(getattr(llm.generate, "pagedkv_cache", None), LlamaCache):
        raise InvalidArgument("this llama_cpp.Llama has a cache already: detach() or close() that one first")
    with refusing("this llama_cpp.Llama", f"llama-cpp-python {runtime.__version__} does not answer as expected"):
        check_supported(llm, runtime)
        reset_at = list(inspect.signature(llm.generate).parameters).index("reset") - 1
        context = Context(llm, runtime)
        name = model_name(llm, runtime, context.layout)
    if not is_tested(runtime.__version__, TESTED):
        log.warning(
            "llama-cpp-python %s is not among the tested versions (%s to %s); its states are understood",
            runtime.__version__, *TESTED,
        )  # fmt: skip
    store = PrefixStore(
        context.layout.spec(block_size, name), memory, disk, probe=context.probe, on_mismatch=on_mismatch,
        min_tokens=min_tokens, require_namespace=require_namespace, **options,
    )  # fmt: skip
    return LlamaCache(llm, context, store, reset_at, store_generated)


def _runtime() -> ModuleType:
    try:
        import llama_cpp
    except ImportError as problem:
        raise ImportError(
            "pagedkv.adapters.llama_cpp is for llama-cpp-python, which cannot be imported here: "
            "pip install llama-cpp-python"
        ) from problem
    runtime: ModuleType = llama_cpp
    return runtime


class LlamaCache(Face):
    """The prefix cache of one ``llama_cpp.Llama``, made by :func:`attach`.

    A context manager that closes itself.

    Attributes
    ----------
    store : PrefixStore
    """

    def __init__(self, llm: Any, context: Context, store: PrefixStore, reset_at: int, store_generated: bool) -> None:
        self.store, self._llm, self._context, self._store_generated = store, llm, context, store_generated
        self._reset_at = reset_at  # among the arguments behind the tokens
        self._before: Any = llm.__dict__.get("generate")  # another package's replacement, where there is one
        self._generate: Callable[..., Tokens] = llm.generate
        self._as_prompt = 0  # leading tokens of the context that were computed as a prompt, not one by one
        self._attached = True
        self._turn = object()  # of the request that began last, whose tokens the context holds

        def generate(tokens: Sequence[int], *args: Any, **kwargs: Any) -> Tokens:
            return self._cached(tokens, args, kwargs)

        generate.pagedkv_cache = self  # type: ignore[attr-defined]
        self._ours = generate
        llm.generate = generate

    # ---- for the caller

    def explain(self, prompt: str | bytes | ArrayLike) -> Explanation:
        """Which tokens of a prompt, a text or its tokens, are in which tier."""
        if isinstance(prompt, str | bytes):
            text = prompt.encode() if isinstance(prompt, str) else prompt
            prompt = self._llm.tokenize(text, special=True)
        return self.store.explain(prompt)

    def detach(self) -> None:
        """Put the ``Llama`` back as it was. The store stays open. Twice is fine."""
        self._attached = False
        if self._llm.__dict__.get("generate") is self._ours:  # else another replacement calls ours
            if self._before is None:
                del self._llm.generate
            else:
                self._llm.generate = self._before

    def close(self, *, write_s: float | None = 5.0) -> None:
        """Detach; write blocks that the disk lacks, for `write_s` seconds at most; close."""
        self.detach()
        self.store.close(write_s=write_s)

    # ---- around a prompt

    def _cached(self, tokens: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        """Return the generator of a prompt, in the namespace of the call."""
        resets = kwargs.get("reset", args[self._reset_at] if len(args) > self._reset_at else True)
        space = None
        if self._attached:
            with self.store.failures.guard("namespace"):
                space = self.store.current()
        if space is None:
            return self._uncached(tokens, args, kwargs)
        return self._run(tokens, args, kwargs, space, bool(resets))

    def _uncached(self, tokens: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        self._turn = object()
        return (yield from self._generate(tokens, *args, **kwargs))

    def _run(
        self, tokens: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any], space: Namespace, resets: bool
    ) -> Tokens:
        turn = self._turn = object()
        prompt = 0
        reused = self._llm.n_tokens
        with self.store.failures.guard("prompt"):
            tokens = list(tokens)
            ids = np.asarray(tokens)
            if len(ids) and ids.dtype.kind not in "iu":
                raise WrongType(f"tokens must be integers, got {ids.dtype}")
            ids = ids.astype(np.int64)
            prompt, tokens = len(ids), ids.tolist()
            if resets:
                reused = self._restore(ids, space)
            else:
                prompt += reused
        began = perf_counter()
        try:
            generated = self._generate(tokens, *args, **kwargs)
            try:
                token = next(generated)
                if resets and prompt - reused >= _MEASURED:
                    self.store.observe_prefill(prompt - reused, perf_counter() - began, reused)
                while True:
                    token = generated.send((yield token))
            except StopIteration:
                return
            finally:
                generated.close()
        finally:
            if self._turn is turn:  # else a later request has the context: its tokens are not this one's
                self._store(prompt, reused, space)

    def _restore(self, ids: NDArray[np.int64], space: Namespace) -> int:
        """Put the longest cached prefix into the context, if that is more than is there.

        Returns the tokens that need no computing.
        """
        llm = self._llm
        there = llm.input_ids[: llm.n_tokens]
        common = min(len(there), len(ids))
        differs = np.flatnonzero(there[:common] != ids[:common])
        have = int(differs[0]) if len(differs) else common
        self._as_prompt = min(self._as_prompt, have)
        if len(ids) > llm.n_ctx():
            return have  # llama_cpp refuses it

        def apply(found: int) -> None:
            self._as_prompt = 0
            llm._requires_eval = True
            llm.n_tokens = 0
            self._context.write(found)
            llm.input_ids[:found] = ids[:found]
            llm.n_tokens = found
            self._as_prompt = found

        return self.store.load(ids, self._context.views, beyond=have, namespace=space, apply=apply) or have

    def _store(self, prompt: int, reused: int, space: Namespace) -> None:
        """Store the tokens of the context."""
        llm = self._llm
        with self.store.failures.guard("store"):
            held = int(llm.n_tokens)
            if self._as_prompt >= min(reused, held):
                self._as_prompt = max(self._as_prompt, min(prompt, held))
            ids = llm.input_ids[: held if self._store_generated else min(self._as_prompt, held)].copy()
            if len(ids) and ids.min() < 0:
                return  # images

            def read(start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
                state = self._context.read(held)
                if state is None:
                    self.store.failures.add("store", "the context's cells are not its tokens")
                    return None
                k, v = self._context.layout.views(state, held)
                return k[:, start:stop], v[:, start:stop]

            self.store.save(ids, read, namespace=space)
