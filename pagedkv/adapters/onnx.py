"""A prefix cache over memory and disk for ONNX decoders with past and present KV.

    session = onnxruntime.InferenceSession("model.onnx")
    decoder = CachedDecoder(session, memory="1GiB", disk=pagedkv.Disk("kv", "10GiB"), revision="smollm2@2")
    for token in decoder.generate(prompt, 100): ...      # or, token by token:
    logits = decoder.prefill(prompt)                     # computes the tokens that are not cached
    logits = decoder.step(token)

The decoder keeps the KV of one sequence, as the caller's own loop would. Its KV is stored when an answer of
``generate`` ends, at the next prompt, by ``save`` and by ``close``.

A failure of the cache is a miss: it is counted, logged once per kind, and the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.adapters.face import Face
from pagedkv.adapters.onnx_context import open_context
from pagedkv.adapters.onnx_ports import PAST, PRESENT, Ports
from pagedkv.adapters.onnx_probe import probed
from pagedkv.adapters.store import MIN_TOKENS, PrefixStore
from pagedkv.errors import InvalidArgument, WrongType
from pagedkv.spec.budgets import Disk
from pagedkv.spec.namespace import Namespace
from pagedkv.spec.sizes import Size, whole_number

BLOCK_SIZE = 16  # tokens; the rest of a prompt behind whole blocks is cheap on a CPU only if it is short
_MEASURED = 32  # tokens of a prompt from which its time tells a rate


class CachedDecoder(Face):
    """A decoder session with a prefix cache. One thread at a time uses it.

    Parameters
    ----------
    session : onnxruntime.InferenceSession
        Inputs ``input_ids`` [1, tokens], past K and V of each layer [1, heads, tokens, head_dim] in float32 or float16,
        and where it has them ``attention_mask``, ``position_ids``, ``cache_position``, ``num_logits_to_keep`` and
        ``use_cache_branch``. Outputs ``logits`` and the present K and V. Its past grows with the sequence, or has a
        fixed length and a present of the same length.
    memory, disk, on_mismatch, min_tokens, require_namespace, options
        As for :class:`pagedkv.adapters.store.PrefixStore`. One directory serves many models; each has a folder of its
        own, found by `revision`, the KV's shape and the KV that it computes for 8 fixed tokens.
    revision : str
        Names the weights, such as ``"smollm2-135m@2"``: other weights need another one.
    max_length : int, optional
        Tokens of the past, for sessions whose present is written into the past (``past_present_share_buffer`` of
        onnxruntime-genai): one array per layer is bound as both.
    past, present : str
        Names of the KV, with ``{layer}`` and ``{side}``, which is ``key`` or ``value``.
    block_size : int
        Tokens of a block.

    Attributes
    ----------
    store : PrefixStore
    tokens : int64 [n]
        Whose KV the decoder holds.

    Raises
    ------
    NotSupported
        The session takes no past, has inputs whose meaning is not known, or its KV does not come back; and why.
    WrongType, InvalidArgument, LayoutMismatch, TierError
        An argument, or the memory or the disk cannot be used.
    """

    def __init__(
        self,
        session: Any,
        memory: Size = "1GiB",
        disk: Disk | None = None,
        *,
        revision: str,
        max_length: int | None = None,
        past: str = PAST,
        present: str = PRESENT,
        on_mismatch: str = "beside",
        block_size: int = BLOCK_SIZE,
        min_tokens: int = MIN_TOKENS,
        require_namespace: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(revision, str) or not revision:
            raise WrongType(f"revision must be a text that names the weights, such as 'smollm2@2', not {revision!r}")
        for name in ("get_inputs", "get_outputs", "run"):
            if isinstance(session, type) or not callable(getattr(session, name, None)):
                raise WrongType(f"session must be an onnxruntime.InferenceSession, not a {type(session).__name__}")
        ports = Ports.of(session, past, present)
        self._context = open_context(session, ports, max_length)
        probe, self._vocab = probed(self._context)
        spec = ports.spec(block_size, f"onnx {revision}")
        self.store = PrefixStore(
            spec, memory, disk, probe=probe, on_mismatch=on_mismatch, min_tokens=min_tokens,
            require_namespace=require_namespace, **options,
        )  # fmt: skip
        self.tokens: NDArray[np.int64] = np.empty(0, np.int64)
        self._num_saved = 0  # of them
        self._space: Namespace | None = None  # of the tokens; None: they are not stored, nor used for another prompt
        self._turn = object()  # of the prompt that came last
        self._has_prompt = False  # one that was computed
        self._closed = False

    # ---- a sequence

    def prefill(self, tokens: ArrayLike) -> NDArray[Any]:
        """Compute a prompt, except for its cached prefix. It takes the place of the tokens so far.

        Parameters
        ----------
        tokens : int [n], at least one.

        Returns
        -------
        logits : [vocab], of the last token.

        Raises
        ------
        WrongType, InvalidArgument
            They are no tokens, or more than the past can hold. Nothing has changed.
        """
        ids = self._checked(tokens)
        if self._context.limit is not None and len(ids) > self._context.limit:
            raise InvalidArgument(f"a prompt of {len(ids)} tokens; the past holds {self._context.limit}: shorten it")
        self.save()
        self._turn = object()
        space = None
        if not self._closed:
            with self.store.failures.guard("namespace"):
                space = self.store.current()
        have = min(_common(self.tokens, ids), len(ids) - 1) if space is not None and space == self._space else 0
        self._has_prompt, self._space = False, None  # until the tokens are those of this prompt and namespace
        if space is not None:
            have = self._restored(ids, have, space)
        self._keep(have)
        self._space = space
        began = perf_counter()
        logits = self._computed(ids[have:])
        if space is not None and len(ids) - have >= _MEASURED:
            self.store.observe_prefill(len(ids) - have, perf_counter() - began, have)
        self._has_prompt = True
        return logits

    def step(self, token: int) -> NDArray[Any]:
        """Compute one more token behind the others.

        Returns
        -------
        logits : [vocab]

        Raises
        ------
        WrongType, InvalidArgument
            It is no token, there is no prompt yet, or the past is full. Nothing has changed.
        """
        ids = self._checked([token])
        if not self._has_prompt:
            raise InvalidArgument("there is no prompt yet, or the last one failed: call prefill(tokens) first")
        if len(self.tokens) == self._context.limit:
            raise InvalidArgument(f"the past holds {self._context.limit} tokens, and all are used: begin a new prompt")
        return self._computed(ids)

    def generate(
        self,
        tokens: ArrayLike,
        max_tokens: int,
        *,
        choose: Callable[[NDArray[Any]], int] | None = None,
        stop: Collection[int] = (),
    ) -> Generator[int, None, None]:
        """Answer a prompt, token by token.

        The answer is stored when the generator ends or is closed.

        Parameters
        ----------
        tokens : int [n]
        max_tokens : int
            Of the answer; a full past ends it as well.
        choose : called with logits [vocab], returns a token. Default: the one with the largest.
        stop : tokens that end the answer; they belong to it.

        Raises
        ------
        WrongType, InvalidArgument
            As :meth:`prefill`; or another prompt began before the answer's end.
        """
        wanted = whole_number(max_tokens, "max_tokens", 0, 2**31 - 1)
        if not isinstance(stop, Collection) or isinstance(stop, str | bytes):
            raise WrongType(f"stop must be a collection of tokens, such as {{2}}, not {stop!r}")
        if choose is not None and not callable(choose):
            raise WrongType(f"choose must be called with logits and return a token, not {choose!r}")
        try:
            logits = self.prefill(tokens)
            turn = self._turn
            for number in range(wanted):
                chosen = int(np.argmax(logits)) if choose is None else choose(logits)
                token = int(self._checked([chosen])[0])
                yield token
                if token in stop or number + 1 == wanted or len(self.tokens) == self._context.limit:
                    return
                if self._turn is not turn:
                    raise InvalidArgument("another prompt has taken the place of this one: one decoder, one answer")
                logits = self.step(token)
        finally:
            self.save()

    def save(self) -> int:
        """Store the KV of the tokens so far; how many of them were not cached before."""
        if self._space is None or len(self.tokens) == self._num_saved:
            return 0
        failures = self.store.failures.counts()
        saved = self.store.save(self.tokens, self._context.kv, namespace=self._space, layout="HND")
        if self.store.failures.counts() == failures:  # else it is tried again
            self._num_saved = len(self.tokens)
        return saved

    # ---- for the caller

    def purge(self, namespace: Namespace | str) -> int:
        """Forget a namespace, also on disk.

        The decoder's own tokens of it are neither stored nor used for another prompt.
        """
        if self._space == (Namespace(tenant=namespace) if isinstance(namespace, str) else namespace):
            self._space = None
        return super().purge(namespace)

    def checkpoint(self) -> int:
        """Store the tokens so far, and write all blocks that the disk lacks.

        Returns the number that a restart finds.
        """
        self.save()
        return super().checkpoint()

    def close(self, *, write_s: float | None = 5.0) -> None:
        """Store the tokens so far, and close the cache; the decoder goes on without it.

        Blocks that the disk lacks are written for `write_s` seconds at most. Twice is fine.
        """
        self.save()
        self._space, self._closed = None, True
        super().close(write_s=write_s)

    # ---- inside

    def _checked(self, tokens: ArrayLike) -> NDArray[np.int64]:
        try:
            ids = np.asarray(tokens)
        except (ValueError, TypeError) as problem:
            raise WrongType(f"tokens must be integers [n]: {problem}") from None
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise WrongType(f"tokens must be integers [n], got {ids.dtype} {ids.shape}")
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocab:
            raise InvalidArgument(f"tokens must be one or more numbers from 0 to {self._vocab - 1}, got {ids}")
        return ids.astype(np.int64)

    def _restored(self, ids: NDArray[np.int64], have: int, space: Namespace) -> int:
        """Take a cached prefix of more than `have` tokens; how many need no computing then."""

        def apply(found: int) -> None:
            self._context.adopt(found)
            self._hold(ids[:found])
            self._num_saved = found

        loaded = self.store.load(ids, self._context.views, beyond=have, namespace=space, layout="HND", apply=apply)
        return loaded or min(have, self._context.length)  # after a failed load it may be empty

    def _keep(self, length: int) -> None:
        self._num_saved = min(self._num_saved, length)
        self._hold(self.tokens[:length])  # first: the context holds these tokens at least, whatever interrupts this
        self._context.cut(length)

    def _hold(self, tokens: NDArray[np.int64]) -> None:
        self.tokens = tokens.copy()
        self.tokens.flags.writeable = False

    def _computed(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        self._context.cut(len(self.tokens))  # an interrupted run may have added others
        logits = self._context.run(ids)
        self._hold(np.concatenate((self.tokens, ids)))
        return logits


def _common(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> int:
    """How many leading tokens agree."""
    length = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:length] != theirs[:length])
    return int(differs[0]) if len(differs) else length
