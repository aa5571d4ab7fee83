"""Decoding: one token for every row of a batch, on a GPU as one CUDA graph.

A decoded token takes hundreds of small kernel launches, which cost the CPU more time than the GPU.
A recurrent step always reads and writes the same memory, so it is recorded once per batch size and
then replayed. On a CPU the recording is a list of the step's torch ops (op_tape.py), replayed
without the Python around them. `generate` stays transformers' own: the engine sits inside the
family's forward and takes every call that has a cache, one token per row, and no other arguments.
So a subclass, a wrapper or a hook of the model runs around each token as usual, and sampling,
logits processors, streamers and stopping criteria see the logits they would see without the engine.

Calls of a few tokens, which assisted decoding tries, are recorded too (captured_call.py).

decode_path.py decides whether a token is replayed. Two rules make a replayed step equal to forward.
First, a step is replayed only while every Python value that it read is unchanged, and it is not
recorded if code of unknown origin runs inside it (fingerprint.py). Second, the recording's buffers
hold the states of one cache on loan, and no one else has access to them (captured_step.py). If
either does not hold, the model is called as usual.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from .captured_call import RecordedCall, RecordedCalls
from .captured_step import CaptureFailed, Recording, Refused, StepLayer, Take, Turns
from .decode_path import Decision, decide_replay, decide_token, decodes, tries
from .explain import explain
from .fingerprint import Fingerprint

KEPT = 4  # recordings, each for one batch size; the least recently used goes
LOOK = 32  # tokens; how often a model is compared that is promised to be unchanged
MODES = ("auto", "graph", "eager")

logger = logging.getLogger(__name__)


class Promise(threading.local):
    """Whether this thread has promised not to change the model, and what was seen since."""

    given = False
    seen: Fingerprint | None = None  # the fingerprint last compared with the model
    recording: Recording | None = None  # the last step's, if no foreign code is around it
    steps = 0  # the number of steps since then


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
        # None is replaced by the first model that decodes.
        self._model = None if model is None else weakref.ref(model)
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._calls = RecordedCalls()
        self._fingerprint: Fingerprint | None = None
        self._promise = Promise()
        self._pool: Any = None
        self._capturing: Any = None  # one stream, whose cuBLAS workspace is in the pool
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
            self._calls.clear()
            self._fingerprint = self._pool = self._capturing = None

    @contextmanager
    def assume_unchanged(self) -> Iterator[None]:
        """Compares the model with its recording at every LOOKth token only, within the block.

        For loops that decode, and change neither the model nor the libraries: the comparison costs
        up to a third of a small model's token. It holds for the calling thread alone. Changes made
        by another thread are noticed within LOOK tokens.
        """
        promise, outer = self._promise, self._promise.given
        try:
            promise.given, promise.seen, promise.recording = True, None, None
            yield
        finally:
            promise.given, promise.seen, promise.recording = outer, None, None

    def step(
        self, model: Any, input_ids: Any, cache: Any, rest: dict[str, Any], take: Take | None = None
    ) -> torch.Tensor | None:
        """Returns the logits [B, 1, V] after one more token per row, or None: call the model as
        usual.

        input_ids [B, 1] and `rest` are the arguments that forward was given. Give `take` when calling
        this without the model's `__call__`: then hooks or wrappers around forward also give None, and
        the result is what `take` returns for the logits, which are only valid during that call.
        """
        alone, take = take is not None, take or torch.clone
        if torch.compiler.is_compiling():
            return None
        if alone and self._promise.given:
            logits = self._step_again(input_ids, cache, take)
            if logits is not None:
                return logits
        if not decodes(input_ids, cache):
            return None
        self._end_other_loans(cache)
        logits = None
        device = torch.cuda.device(input_ids.device) if input_ids.is_cuda else nullcontext()
        with self._turns.lock, device:
            refuses = lambda: self._why_model_refuses(model, input_ids.device)
            decision = self.decide(model, input_ids, cache, rest, refuses)
            if decision.path != "plain":
                try:
                    logits = self._run(model, input_ids, cache, alone, take)
                except Refused as refusal:
                    decision = Decision("plain", str(refusal))
        if logits is None and alone:
            return None
        if decision.path == "plain" and self._mode == "graph":
            raise RuntimeError(f'mode is "graph", but {decision.reason}')
        if (decision.path, decision.reason) != (self.path, self.reason):
            because = f", because {decision.reason}" if decision.reason else ""
            logger.info("decoding: %s step%s", decision.path, because)
        self.path, self.reason = decision.path, decision.reason
        return logits

    def read(
        self, model: Any, input_ids: Any, cache: Any, rest: dict[str, Any], has_logits: bool = True
    ) -> torch.Tensor | None:
        """Reads a few tokens of an assisted generation; returns their logits [B, T, V], or without
        logits the hidden states [B, T, H], or None: call the model as usual.

        The arguments are those of `step`, with input_ids [B, T]; `path` and `reason` stay as they are."""
        if torch.compiler.is_compiling() or not tries(input_ids, cache):
            return None
        self._end_other_loans(cache)
        device = torch.cuda.device(input_ids.device) if input_ids.is_cuda else nullcontext()
        with self._turns.lock, device:
            refuses = lambda: self._why_model_refuses(model, input_ids.device)
            if self.decide(model, input_ids, cache, rest, refuses).path == "plain":
                return None
            self._turns.take(input_ids.device)
            record = lambda make: self._record_call(model, make)
            call = self._calls.find(input_ids, cache, has_logits, record)
            return None if call is None else call.read(input_ids, cache, self._turns)

    def _record_call(self, model: Any, make: Callable[[], RecordedCall]) -> RecordedCall | None:
        try:
            return self._record(model, make)
        except Refused as refusal:
            logger.info("assisted decoding: a call is not recorded, because %s", refusal)
            return None

    def _end_other_loans(self, cache: Any) -> None:
        """Ends loans of other engines: before the lock, or two engines could wait for each other."""
        for layer in cache.layers:
            loan = layer.held[1]
            if loan is not None and getattr(loan, "turns", None) is not self._turns:
                loan.end(layer)

    def explain(self, batch: int = 1) -> str:
        """Returns how a token of `batch` rows would be decoded and why not faster: the path, and for
        each block whether it is fused."""
        if self._model is None:
            raise RuntimeError("this engine is of no model yet: decode a token first")
        if (model := self._model()) is None:
            raise RuntimeError("the model of this engine was deleted: keep a reference to it")
        return explain(self, model, batch)

    def decide(
        self, model: Any, tokens: torch.Tensor, cache: Any, rest: dict[str, Any], refuses: Any
    ) -> Any:
        """Calls decode_path.decide_token, or decide_replay for several tokens; `refuses()` says why the
        whole model cannot be recorded, or returns None."""
        if self._model is None:
            self._model = weakref.ref(model)
        decides = decide_token if tokens.shape[1] == 1 else decide_replay
        return decides(
            model, tokens, cache, rest, mode=self._mode, owner=self._model(),
            why_model_refuses=refuses,
        )  # fmt: skip

    def _run(self, model: Any, tokens: torch.Tensor, cache: Cache, alone: bool, take: Take) -> Any:
        if alone and self._fingerprint is not None and not self._fingerprint.alone:
            return None
        self._turns.take(tokens.device)
        recording = self._find(model, tokens, cache)
        if not recording.holds(cache.layers):
            recording.bind(cache.layers, self._turns)
        logits = recording.run(tokens, cache, take)
        self._promise.recording = recording if alone else None
        return logits

    def _step_again(self, tokens: torch.Tensor, cache: Cache, take: Take) -> torch.Tensor | None:
        """Replays the step that this thread replayed last, or returns None: decide anew.

        For a small model, the decision takes a tenth of the step."""
        promise = self._promise
        with self._turns.lock:
            last = promise.recording
            if last is None or promise.seen is not self._fingerprint or promise.steps >= LOOK:
                return None
            if not last.holds(cache.layers):
                return None
            promise.steps += 1
            with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
                self._turns.take(tokens.device)
                return last.run(tokens, cache, take)

    def _why_model_refuses(self, model: Any, device: torch.device) -> str | None:
        """Returns why the model's step cannot be replayed now; makes a new fingerprint of a model
        that has changed."""
        before, promise = self._fingerprint, self._promise
        if before is not None and promise.given and promise.seen is before and promise.steps < LOOK:
            promise.steps += 1
            return before.refusal
        if before is None or not before.holds(model):
            self.release()
            self._fingerprint = Fingerprint(model, device)
            # a model that changes with every token would otherwise be recorded with every token
            if before is not None and self._mode != "graph":
                return "the model has just changed"
        fingerprint: Any = self._fingerprint
        promise.seen, promise.steps = fingerprint, 0
        return fingerprint.refusal

    def _find(self, model: Any, tokens: torch.Tensor, cache: Cache) -> Recording:
        key = (tokens.shape[0], tokens.device)
        found = self._recordings.pop(key, None)
        if found is None or not found.fits(cache.layers):
            self._turns.wait()  # a recording may be freed
            make = lambda: Recording([StepLayer(layer) for layer in cache.layers], tokens)
            try:
                found = self._record(model, make)
            except CaptureFailed as refusal:
                if self._fingerprint is not None:
                    self._fingerprint.refusal = str(refusal)  # until the model changes
                raise
        self._recordings[key] = found
        while len(self._recordings) > KEPT:
            self._recordings.popitem(last=False)
        return found

    # The buffers are ordinary tensors even where the caller is in inference mode, or they could not
    # be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, model: Any, make: Callable[[], Any]) -> Any:
        recording = make()
        recording.forward(model)  # runs what happens only once, such as packing weights
        if self._fingerprint is None or not self._fingerprint.holds(model):
            self.release()
            self._fingerprint = Fingerprint(model, recording.tokens.device)
        if not recording.tokens.is_cuda:
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
            raise CaptureFailed(f"capturing the step failed: {error}") from error
