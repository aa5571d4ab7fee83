"""Decoding: one token for every row of a batch, on a GPU as one CUDA graph.

A decoded token takes hundreds of small kernel launches, which cost the CPU more time than the GPU.
A recurrent step always reads and writes the same memory, so it is recorded once per batch size and
then replayed. On a CPU the recording is a list of the step's torch ops (op_tape.py), replayed
without the Python around them. `generate` stays transformers' own: the engine sits inside the
family's forward and takes every call that has a cache, one token per row, and no other arguments.
So a subclass, a wrapper or a hook of the model runs around each token as usual, and sampling,
logits processors, streamers and stopping criteria see the logits they would see without the engine.

Two rules make a replayed step equal to forward. First, a step is replayed only while every Python
value that it read is unchanged, and it is not recorded if code of unknown origin runs inside it
(fingerprint.py). Second, the recording's buffers hold the states of one cache on loan, and no one
else has access to them (captured_step.py). If either does not hold, the model is called as usual.
"""

import logging
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..kernels.fused_rnn.private_names import forward_level, transforms_are_active
from ..state.cache import is_recurrent
from ..utils.private_names import (
    ENGINE,
    DeviceContext,
    dispatch_modes,
    function_modes,
    list_function_modes,
)
from .captured_step import Recording, Refused, Turns
from .fingerprint import Fingerprint

KEPT = 4  # recordings, each for one batch size; the least recently used goes
LOOK = 32
MODES = ("auto", "graph", "eager")

logger = logging.getLogger(__name__)


class DecodeEngine:
    """Records the decoding steps of one model and replays them.

    mode     "auto": a CUDA graph on a GPU, a tape on a CPU, and the model's own forward if neither
             is possible; "graph": RuntimeError if there is no graph; "eager": no recordings
    path     how the last decoded token was computed: "graph", "tape" or "plain" (the model's own
             forward); None before the first
    reason   why the path was "plain", else None
    """

    def __init__(self, model: Any = None, mode: str = "auto"):
        self.mode = mode
        self.path: str | None = None
        self.reason: str | None = None
        self._model = None if model is None else weakref.ref(model)  # None: whoever is first
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._fingerprint: Fingerprint | None = None
        self._last: Recording | None = None  # of the last step, if nobody's code is around it
        self._looked = 0  # so many steps ago
        self._pool: Any = None
        self._capturing: Any = None  # one stream for a pool, in which its workspace of cuBLAS lies
        self._turns = Turns()

    def __reduce__(self) -> Any:  # copies and pickles of a model record anew
        return DecodeEngine, (None, self.mode)

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}")
        self._mode = mode

    def release(self) -> None:
        """Frees the memory of every recording. Caches keep their states.

        torch keeps cuBLAS's workspace (32 MiB on an H200) for the stream of each of the first 32
        calls."""
        with self._turns.lock:
            self._turns.wait()
            self._recordings.clear()
            self._fingerprint = self._pool = self._capturing = self._last = None

    def step(
        self, model: Any, input_ids: Any, cache: Any, rest: dict[str, Any], *, alone: bool = False
    ) -> torch.Tensor | None:
        """Returns the logits [B, 1, V] after one more token per row, or None: call the model as
        usual.

        input_ids [B, 1] and `rest` are the arguments that forward was given. Set `alone` when
        calling this without the model's `__call__`: then hooks or wrappers around forward also give
        None.
        """
        if torch.compiler.is_compiling() or not _decodes(input_ids, cache):
            return None
        reason, logits = self._why_not_now(model, input_ids, cache, rest), None
        if reason is None:
            for layer in cache.layers:  # before the lock, or two engines could wait for each other
                loan = layer.held[1]
                if loan is not None and getattr(loan, "turns", None) is not self._turns:
                    loan.end(layer)
            with self._turns.lock:
                self._last = None
                try:
                    logits = self._run(model, input_ids, cache, alone)
                except Refused as refusal:
                    reason = str(refusal)
        if logits is None and alone:
            return None
        if reason is not None and self._mode == "graph":
            raise RuntimeError(f'mode is "graph", but {reason}')
        recorded = "graph" if input_ids.is_cuda else "tape"
        path = "plain" if logits is None else recorded
        if (path, reason) != (self.path, self.reason):
            logger.info("decoding: %s step%s", path, f", because {reason}" if reason else "")
        self.path, self.reason = path, reason
        return logits

    def _run(self, model: Any, tokens: torch.Tensor, cache: Cache, alone: bool) -> Any:
        with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
            fingerprint = self._check_model(model, tokens.device)
            if alone and not fingerprint.alone:
                return None
            self._turns.take(tokens.device)
            recording = self._find(model, tokens, cache)
            if not recording.holds(cache.layers):
                recording.bind(cache.layers, self._turns)
            logits = recording.run(tokens, cache)
        if alone:
            self._last, self._looked = recording, 0
        return logits

    def again(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor | None:
        """Does what `step(..., alone=True)` does, without revalidation; None if `step` must be
        called.

        Call it only if no user code ran since the last step, because such code could have changed a
        value that the step reads. Revalidation costs a tenth of a small model's step. Changes made
        by another thread are noticed within LOOK tokens.
        """
        with self._turns.lock:
            last, self._looked = self._last, self._looked + 1
            if last is None or self._looked >= LOOK or not last.holds(cache.layers):
                return None
            with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
                self._turns.take(tokens.device)
                return last.run(tokens, cache)

    def _check_model(self, model: Any, device: torch.device) -> Fingerprint:
        before = self._fingerprint
        if before is None or not before.holds(model):
            self.release()
            self._fingerprint = Fingerprint(model, device)
            # a model that changes with every token would otherwise be recorded with every token
            if before is not None and self._mode != "graph":
                raise Refused("the model has just changed")
        fingerprint: Any = self._fingerprint
        if fingerprint.refusal is not None:
            raise Refused(fingerprint.refusal)
        return fingerprint

    def _find(self, model: Any, tokens: torch.Tensor, cache: Cache) -> Recording:
        key = (tokens.shape[0], tokens.device)
        found = self._recordings.pop(key, None)
        if found is None or not found.fits(cache.layers):
            self._turns.wait()  # a recording may go
            found = self._record(model, tokens, cache)
        self._recordings[key] = found
        while len(self._recordings) > KEPT:
            self._recordings.popitem(last=False)
        return found

    # The buffers are ordinary tensors even where the caller is in inference mode, or they could not
    # be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, model: Any, tokens: torch.Tensor, cache: Cache) -> Recording:
        recording = Recording(cache.layers, tokens)
        recording.forward(model)  # runs what happens only once, such as packing weights
        if self._fingerprint is None or not self._fingerprint.holds(model):
            self.release()
            self._fingerprint = Fingerprint(model, tokens.device)
        if not tokens.is_cuda:
            recording.record_ops(model)
        else:
            self._capture(model, recording)
        if not self._fingerprint.holds(model):
            raise Refused("the model changed while its step was recorded")
        return recording

    def _capture(self, model: Any, recording: Recording) -> None:
        device = recording.tokens.device
        if self._capturing is None or self._capturing.device != device:
            self._capturing, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        try:
            recording.record(model, self._pool, self._capturing)
        except Refused:
            raise
        except RuntimeError as error:  # an op that waits for the GPU, for example
            refusal = f"capturing the step failed: {error}"
            if self._fingerprint is not None:
                self._fingerprint.refusal = refusal  # until the model changes
            raise Refused(refusal) from error

    def _why_not_now(
        self, model: Any, input_ids: torch.Tensor, cache: Cache, rest: dict[str, Any]
    ) -> str | None:
        """Returns why this call cannot be replayed, or None if it can."""
        if self._mode == "eager":
            return 'mode is "eager"'
        if ENGINE.reason is not None:
            return ENGINE.reason
        if self._model is None:
            self._model = weakref.ref(model)
        if self._model() is not model:  # such as a replica of DataParallel
            return "the engine is another model's"
        for name, value in rest.items():
            given = value is not None and value is not False
            if given and name not in ("use_cache", "logits_to_keep"):
                return f"{name} is given"
        device = input_ids.device.type
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if torch.is_autocast_enabled(device):
            return "autocast is on, whose casts of weights live only as long as its context"
        if isinstance(rest.get("logits_to_keep"), torch.Tensor):
            return "logits_to_keep is a tensor"
        if cache.layers[0].batch_size != input_ids.shape[0]:
            return "the cache has another batch"  # the model raises the clearer error
        if device not in ("cuda", "cpu") or (device == "cpu" and self._mode == "graph"):
            return f"{device} has no graphs"
        if input_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return _who_listens(input_ids)


def _decodes(input_ids: torch.Tensor | None, cache: Any) -> bool:
    """Whether the call has one token per row and a DynamicCache of ours that holds states.

    A recording's own cache is excluded, and so is StaticCache, which transformers decodes by
    torch.compile."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1 or cache is None:
        return False
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(
        is_recurrent(layer)
        and getattr(layer, "in_dynamic_cache", False)
        and getattr(layer, "held", ({},))[0]
        for layer in layers
    )


def _who_listens(tokens: torch.Tensor) -> str | None:
    """Returns what would observe or change the step's ops one by one, such as a dispatch mode, or
    None."""
    if type(tokens) is not torch.Tensor:
        return f"input_ids is a {type(tokens).__name__}"
    if transforms_are_active():
        return "torch.func transforms the call"
    if forward_level() >= 0:
        return "derivatives are taken in forward mode"
    if dispatch_modes():
        return "a dispatch mode is on"
    if function_modes():
        for mode in list_function_modes():
            if type(mode) is not DeviceContext:  # that of torch.set_default_device
                return f"{type(mode).__name__} is on"
    return None
