"""Decoding: one token for every row of a batch, on a GPU as one CUDA graph.

A decoded token costs a model hundreds of small launches, which take the CPU longer than the GPU. A
recurrent step always reads and writes the same places, so it is recorded once for a batch size and
then replayed. `generate` stays transformers' own: the engine sits inside the model's forward call
and takes every step that has one token a row, a cache, and nothing else to say. Sampling, logits
processors, streamers and stopping criteria see the logits they would see without it.

While a cache is being decoded, its states *are* the recording's buffers, and the next step overwrites
them: clone what is to be kept. A cache that another one of the same batch size displaces gets copies.
On devices without graphs the recording is a tape of the step's torch ops (tape.py), which spares the
Python around them; where it may not be, and for the torch reference, the model is called instead.
"""

import logging
import threading
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from .cache import RecurrentStateLayer, is_recurrent
from .recording import Recording, Refused, Snapshot, is_only_ops

KEPT = 4  # recordings, each for one batch size; the least recently used goes
MODES = ("auto", "graph", "eager")

logger = logging.getLogger(__name__)


class DecodeEngine:
    """A model's recordings.

    mode     "auto": graphs on CUDA, and the plain step where one cannot be; "graph": RuntimeError
             there; "eager": no recordings at all
    reason   why the last step with one token a row was not replayed from a graph, None if it was
    """

    def __init__(self, mode: str = "auto"):
        self.mode = mode
        self.reason: str | None = None
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._last: Recording | None = None  # of the last step, if it was taken
        self._snapshot: Snapshot | None = None
        self._pool: Any = None
        self._capturing: Any = None  # one stream for a pool, in which its workspace of cuBLAS lies
        self._stream: Any = None  # where the last replay was put
        self._streams = False  # whether there have been several
        self._one_thread = threading.RLock()

    def __reduce__(self) -> Any:  # copies and pickles of a model record anew
        return DecodeEngine, (self.mode,)

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}")
        self._mode = mode

    def release(self) -> None:
        """Gives back the memory of every recording, but for cuBLAS's workspace (32 MiB on an H200), which
        torch keeps for the stream of each of the first 32 calls. Caches keep their states."""
        with self._one_thread:
            if self._stream is not None:
                self._stream.synchronize()
            self._recordings.clear()
            self._snapshot = self._pool = self._capturing = self._last = None

    def step(
        self, model: Any, input_ids: Any, cache: Any, rest: dict[str, Any]
    ) -> torch.Tensor | None:
        """The logits [B, 1, V] after one more token a row, or None: run the model as it is.

        input_ids [B, 1] or whatever forward was given, and `rest`, everything else.
        """
        if torch.compiler.is_compiling() or self._mode == "eager" or not _decodes(input_ids, cache):
            return None
        with self._one_thread:
            self._last = None
            reason, logits = _why_not_now(model, input_ids, cache, rest), None
            if reason is None:
                try:
                    logits = self._run(model, input_ids, cache)
                    reason = None if input_ids.is_cuda else f"{input_ids.device.type} has no graphs"
                except Refused as refusal:
                    reason = str(refusal)
                if reason is not None and self._mode == "graph":
                    raise RuntimeError(f'mode is "graph", but {reason}')
            if reason != self.reason:
                logger.info("decoding %s", reason or "from a graph")
            self.reason = reason
        return logits

    def again(self, model: Any, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor | None:
        """`step` for who has run nothing since the last one that could have changed the model or what is
        asked of it, and on a CPU would look for changes as long as for a tenth of the step. None: take
        `step`; the last one was another cache's, or is no list of ops.
        """
        with self._one_thread:
            last = self._last
            if last is None or last.replay is None or not last.holds(cache.layers):
                return None
            logits = last.run(model, input_ids)
        for layer in cache.layers:
            layer.length += 1
        return logits

    def _run(self, model: Any, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
            self._check_model(model, tokens.device)
            if tokens.is_cuda:
                self._follow_stream()
            recording = self._find(model, tokens, cache)
            if not recording.holds(cache.layers):
                states = recording.bind(cache.layers)
                if self._streams:  # they may be another stream's, to which they go back now
                    for s in states:
                        s.record_stream(self._stream)
            logits = recording.run(model, tokens)
            self._last = recording
        for layer in cache.layers:
            layer.length += 1
        return logits

    def _check_model(self, model: Any, device: torch.device) -> None:
        snapshot = self._snapshot
        if snapshot is None or not snapshot.holds():
            self.release()
            self._snapshot = snapshot = Snapshot(model, device)
        if snapshot.refusal is not None and device.type == "cuda":
            raise Refused(snapshot.refusal)

    def _follow_stream(self) -> None:
        """Replays share their memory, so one on another stream waits for the last."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self._streams = True
        self._stream = stream

    def _find(self, model: Any, tokens: torch.Tensor, cache: Cache) -> Recording:
        key = (tokens.shape[0], tokens.device)
        found = self._recordings.pop(key, None)
        if found is None or not found.fits(cache.layers):
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
        if not tokens.is_cuda:
            taped = self._snapshot is not None and self._snapshot.refusal is None
            if taped and model.config.backend != "reference" and is_only_ops(model):
                recording.record_ops(model)
            else:
                recording.forward(model)  # a step that changes the states' dtype is refused here
            return recording
        if self._capturing is None or self._capturing.device != tokens.device:
            self._capturing, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        try:
            recording.record(model, self._pool, self._capturing)
        except Refused:
            raise
        except RuntimeError as error:  # a module of the user's that waits for the GPU, for example
            refusal = f"capturing the step failed: {error}"
            if self._snapshot is not None:
                self._snapshot.refusal = refusal  # until the model changes
            raise Refused(refusal) from error
        return recording


def _decodes(input_ids: torch.Tensor | None, cache: Any) -> bool:
    """One token a row, and a cache of ours that holds states: not a recording's own, and not
    transformers' static one, which it decodes by torch.compile."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1 or cache is None:
        return False
    layers = getattr(cache, "layers", ())
    kind = RecurrentStateLayer._layer_type  # only of DynamicCache's; see is_recurrent
    return bool(layers) and all(
        is_recurrent(layer) and layer._layer_type == kind and layer.states for layer in layers
    )


def _why_not_now(
    model: Any, input_ids: torch.Tensor, cache: Cache, rest: dict[str, Any]
) -> str | None:
    """What in this call makes the step another one."""
    for name, value in rest.items():
        if name not in ("use_cache", "logits_to_keep") and value is not None and value is not False:
            return f"{name} is given"
    if model.config.output_hidden_states:
        return "output_hidden_states is asked for"
    if torch.is_grad_enabled() or model.training:
        return "gradients are recorded" if torch.is_grad_enabled() else "the model is training"
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast is on, whose casts of weights live only as long as its context"
    if isinstance(rest.get("logits_to_keep"), torch.Tensor):
        return "logits_to_keep is a tensor"
    if cache.layers[0].batch_size != input_ids.shape[0]:
        return "the cache has another batch"  # the model says it better
    if input_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    return None
