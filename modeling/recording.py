"""A decoded step on record: its buffers, its graph or tape, and what it took from the model."""

import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .cache import RecurrentStateLayer, States, StaticRecurrentStateLayer
from .tape import Tape, Unrecordable

address: Any = torch.Tensor.data_ptr


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
        self.logits: Any = None
        self.replay: Any = None  # without graphs: the step's ops, where a tape may have them

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
            buffers, states = map(list, zip(*changed, strict=True))
            torch._foreach_copy_(buffers, states)
        return output.logits

    def record(self, model: nn.Module, pool: Any, stream: Any, workspaces: Any) -> None:
        """Runs the step once, so that everything lazy has happened, then captures it.

        cuBLAS's workspace for `stream` is torch's, and a graph's products write to it at every replay,
        though others may free it (torch.compile does before it records graphs). So it is taken from
        `workspaces`, a pool of which nothing else is, and whose memory stays the caller's.
        """
        current, one = torch.cuda.current_stream(), self.tokens.new_ones(1, 1, dtype=torch.float32)
        stream.wait_stream(current)
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(workspaces):
            one @ one
        with torch.cuda.stream(stream):
            self.forward(model)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may go on meanwhile: only what this one does must be fit for a graph
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            self.logits = self.forward(model)
        self.graph = graph

    def record_ops(self, model: nn.Module) -> None:
        """Where there are no graphs: the ops alone, twice as `record` has it."""
        self.forward(model)
        try:
            with Tape() as tape:
                logits = self.forward(model)
            self.replay = tape.replay(logits)
        except Unrecordable:
            for layer in self.layers:
                layer.take_changed()

    def run(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        if self.replay is not None:
            with torch.inference_mode():  # past autograd, which half of the ops would ask in Python
                logits = self.replay()
            return logits.clone()  # an ordinary tensor, wherever the caller is
        if self.graph is None:
            return self.forward(model)
        self.graph.replay()
        return self.logits.clone()  # the next replay overwrites them


class Snapshot:
    """What a graph took from the model: where the weights are, which modules ran, who listens.

    It keeps nothing of the model alive: a module that goes takes the snapshot's validity with it.
    """

    def __init__(self, model: Any, device: torch.device):
        modules: list[nn.Module] = list(model.modules())
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
        self.sizes: list[Any] = [m._modules for m in modules]
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
            list(map(address, map(operator.getitem, *self.weights))),
            list(map(id, map(operator.getitem, *self.children))),
            list(map(len, self.sizes)),
            self.config.backend,
        )

    def _forget(self, _: Any) -> None:
        self.before, self.weights, self.children, self.sizes = None, (), (), []


def is_only_ops(model: nn.Module) -> bool:
    """Whether all that a step does is torch ops: the modules are torch's and this model's own, with
    their own forward. On CUDA a graph refuses what else one does with values; a tape would miss it."""
    package = type(model).__module__.rpartition(".")[0]
    kinds = {(type(m).__module__, "forward" in vars(m)) for m in model.modules() if m is not model}
    own = (package, "torch.nn.modules")
    return all(name.rpartition(".")[0] in own and not changed for name, changed in kinds)


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
