"""Decoding: one token for every row of a batch, on a GPU as one CUDA graph.

A decoded token costs a model hundreds of small launches, which take the CPU longer than the GPU. A
recurrent step always reads and writes the same places, so it is recorded once for a batch size and
then replayed. `generate` stays transformers' own: the engine sits inside the model's forward call
and takes every step that has one token a row, a cache, and nothing else to say. Sampling, logits
processors, streamers and stopping criteria see the logits they would see without it.

While a cache is being decoded, its states *are* the recording's buffers, and the next step overwrites
them: clone what is to be kept. A cache that another one of the same batch size displaces gets copies.
On devices without graphs the same code calls the model where it would replay the recording.
"""

import logging
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .cache import RecurrentStateLayer, States, StaticRecurrentStateLayer

KEPT = 4  # recordings, each for one batch size; the least recently used goes
MODES = ("auto", "graph", "eager")

logger = logging.getLogger(__name__)


def _groups(layers: Iterable[RecurrentStateLayer]) -> list[States]:
    return [group for layer in layers for group in layer.states.values()]


def _describe(layers: Iterable[RecurrentStateLayer]) -> list[Any]:
    names = [name for layer in layers for name in layer.states]
    return [names, [(s.shape, s.dtype, s.device) for group in _groups(layers) for s in group]]


class Refused(RuntimeError):
    """This step cannot be recorded; the message says why."""


class StepLayer(StaticRecurrentStateLayer):
    """One layer's buffers inside a recording; `changed` is what a step did not write in place."""

    def __init__(self, layer: RecurrentStateLayer):
        super().__init__()
        self.states = {name: _buffers_like(group) for name, group in layer.states.items()}
        self.changed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update_states(self, num_new_tokens: int, **states: States) -> None:
        for name, group in states.items():
            for buffer, s in zip(self.states[name], group, strict=True):
                if (s.dtype, s.shape) != (buffer.dtype, buffer.shape):
                    raise Refused(f"the {name} states change from {buffer.dtype} to {s.dtype}")
                if s is not buffer:
                    self.changed.append((buffer, s))

    def take_changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        changed, self.changed = self.changed, []
        return changed


class Recording:
    """A model's step for one batch size: its input, its states, and how to run it."""

    def __init__(self, layers: list[RecurrentStateLayer], tokens: torch.Tensor):
        self.layers = [StepLayer(layer) for layer in layers]
        self.groups = _groups(self.layers)
        self.cache = Cache(layers=self.layers)
        self.tokens = torch.zeros_like(tokens)
        self.owners: list[Any] = []  # weak: the cache layers whose states the buffers are
        self.graph: Any = None
        self.logits: torch.Tensor | None = None

    def fits(self, layers: list[RecurrentStateLayer]) -> bool:
        return self.holds(layers) or _describe(layers) == _describe(self.layers)

    def holds(self, layers: list[RecurrentStateLayer]) -> bool:
        """Whatever else happens to a cache (a prompt, a reordering) gives it other tensors."""
        if [owner() for owner in self.owners] != layers:
            return False
        return all(map(operator.is_, _groups(layers), self.groups))

    def bind(self, layers: list[RecurrentStateLayer]) -> States:
        """Makes the buffers the states of `layers`; returns the tensors they had."""
        mine = set(map(id, self.groups))
        for layer in filter(None, (owner() for owner in self.owners)):  # the cache decoded so far
            for name, group in layer.states.items():
                if id(group) in mine:
                    layer.states[name] = tuple(s.clone() for s in group)
        states = [s for group in _groups(layers) for s in group]
        torch._foreach_copy_([s for group in self.groups for s in group], states)
        for own, layer in zip(self.layers, layers, strict=True):
            layer.states = {name: own.states[name] for name in layer.states}
        self.owners = [weakref.ref(layer) for layer in layers]
        return tuple(states)

    def forward(self, model: nn.Module) -> torch.Tensor:
        output = model.forward(self.tokens, past_key_values=self.cache, return_dict=True)
        changed = [pair for layer in self.layers for pair in layer.take_changed()]
        if changed:
            torch._foreach_copy_(*map(list, zip(*changed, strict=True)))
        return output.logits

    def record(self, model: nn.Module, pool: Any, stream: Any) -> None:
        """Runs the step once, so that everything lazy has happened, then captures it."""
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.forward(model)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may go on meanwhile: only what this one does must be fit for a graph
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            self.logits = self.forward(model)
        self.graph = graph

    def run(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        if self.graph is None:
            return self.forward(model)
        self.graph.replay()
        return self.logits.clone()  # the next replay overwrites them


class Snapshot:
    """What a graph took from the model: where the weights are, which modules ran, who listens.

    It keeps nothing of the model alive: a module that goes takes the snapshot's validity with it.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        modules = list(model.modules())
        self.config = model.config
        tables = [t for m in modules for t in (m._parameters, m._buffers)]
        weights = [
            (t, name)
            for t in tables
            for name, w in t.items()
            if type(getattr(w, "data", w)) is torch.Tensor
        ]
        self.weights = tuple(zip(*weights, strict=True))
        children = [(m._modules, name) for m in modules for name in m._modules]
        self.children = tuple(zip(*children, strict=True))
        self.sizes = [m._modules for m in modules]
        self.sizes += [h for m in modules[1:] for h in (m._forward_hooks, m._forward_pre_hooks)]
        self.deaths = [weakref.ref(m, self._forget) for m in modules[1:]]
        self.refusal = next((r for m in modules[1:] if (r := _why_not(m))), None)
        for t in (*model.parameters(), *model.buffers()):
            if t.device != device:
                self.refusal = f"not every weight is on {device}, where the tokens are"
            elif type(t.data) is not torch.Tensor:
                self.refusal = f"a weight is a {type(t.data).__name__}, which has no one place"
        self.before: Any = None
        self.before = self._look()

    def holds(self) -> bool:
        try:
            return self.before is not None and self._look() == self.before
        except KeyError:  # a weight or a module is no longer there
            return False

    def _look(self) -> tuple[Any, ...]:  # before every token, so in C: 10 us for 100 weights
        return (
            list(map(torch.Tensor.data_ptr, map(operator.getitem, *self.weights))),
            list(map(id, map(operator.getitem, *self.children))),
            list(map(len, self.sizes)),
            self.config.backend,
        )

    def _forget(self, _: Any) -> None:
        self.before, self.weights, self.children, self.sizes = None, (), (), []


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
        self._snapshot: Snapshot | None = None
        self._pool: Any = None
        self._capturing: Any = None  # one stream: cuBLAS keeps a workspace for every stream it saw
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
        """Gives back the memory of every recording. Caches keep their states."""
        with self._one_thread:
            if self._stream is not None:
                self._stream.synchronize()
            self._recordings.clear()
            self._snapshot = self._pool = None

    def step(
        self, model: nn.Module, input_ids: torch.Tensor | None, cache: Any, rest: dict[str, Any]
    ) -> torch.Tensor | None:
        """The logits [B, 1, V] after one more token a row, or None: run the model as it is.

        `rest` is everything else that forward was given.
        """
        if torch.compiler.is_compiling() or self._mode == "eager" or not _decodes(input_ids, cache):
            return None
        with self._one_thread:
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

    def _run(self, model: nn.Module, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():
            if tokens.is_cuda:
                self._check_model(model, tokens.device)
                self._follow_stream()
            recording = self._find(model, tokens, cache)
            if not recording.holds(cache.layers):
                states = recording.bind(cache.layers)
                if self._streams:  # they may be another stream's, to which they go back now
                    for s in states:
                        s.record_stream(self._stream)
            logits = recording.run(model, tokens)
        for layer in cache.layers:
            layer.length += 1
        return logits

    def _check_model(self, model: nn.Module, device: torch.device) -> None:
        if self._snapshot is None or not self._snapshot.holds():
            self.release()
            self._snapshot = Snapshot(model, device)
        if self._snapshot.refusal is not None:
            raise Refused(self._snapshot.refusal)

    def _follow_stream(self) -> None:
        """Replays share their memory, so one on another stream waits for the last."""
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self._streams = True
        self._stream = stream

    def _find(self, model: nn.Module, tokens: torch.Tensor, cache: Cache) -> Recording:
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
    def _record(self, model: nn.Module, tokens: torch.Tensor, cache: Cache) -> Recording:
        recording = Recording(cache.layers, tokens)
        if not tokens.is_cuda:
            recording.forward(model)  # a step that changes the states' dtype is refused here
            return recording
        if self._capturing is None or self._capturing.device != tokens.device:
            self._capturing = torch.cuda.Stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            recording.record(model, self._pool, self._capturing)
        except Refused:
            raise
        except RuntimeError as error:  # a module of the user's that waits for the GPU, for example
            self._snapshot.refusal = f"capturing the step failed: {error}"
            raise Refused(self._snapshot.refusal) from error
        return recording


def _decodes(input_ids: torch.Tensor | None, cache: Any) -> bool:
    """One token a row, and a cache of ours that holds states: not a recording's own, and not
    transformers' static one, which it decodes by torch.compile."""
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1 or cache is None:
        return False
    return all(type(layer) is RecurrentStateLayer and layer.states for layer in cache.layers)


def _why_not_now(
    model: nn.Module, input_ids: torch.Tensor, cache: Cache, rest: dict[str, Any]
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


def _why_not(module: nn.Module) -> str | None:
    """What makes a module unfit for a graph, which would not notice what it does on the CPU."""
    name = type(module).__name__
    if "_hf_hook" in vars(module):
        return f"accelerate moves the weights or the inputs of {name}"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(
        getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks
    ):  # transformers': idle
        return f"{name} has hooks"
    package = {base.__module__.split(".")[0] for base in type(module).__mro__}
    if "peft" in package:
        return f"{name} is an adapter, which may be switched or changed between two tokens"
    return None


def _buffers_like(group: States) -> States:
    """Empty states; those of one shape lie in one tensor, as the fused-rnn kernel returns them."""
    if len({(s.shape, s.dtype) for s in group}) == 1:
        return group[0].new_zeros((len(group), *group[0].shape)).unbind(0)
    return tuple(torch.zeros_like(s, memory_format=torch.contiguous_format) for s in group)
