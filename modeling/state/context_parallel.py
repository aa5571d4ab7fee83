"""Context parallelism: the tokens of one sequence are sharded over devices, the weights replicated.

    context = ContextParallel(model)                # after torch.distributed.init_process_group
    tokens, targets = context.split(tokens), context.split(targets)       # [B, T] -> [B, T / ranks]
    output = context(input_ids=tokens, targets=targets)
    output.loss.backward()                          # the loss of this part; see below for gradients

Each device sends every layer's state to the next one, and the state's gradient to the previous one.
Outputs and gradients are those of one call over the whole sequence, for every family and cell,
including the window of a convolution. Nothing is computed twice. A device starts a layer as soon as
the previous device has computed that layer's state, so the work is a wavefront over layers and
devices. If one layer's recurrence takes t, R devices need 1 / R of the time of one device plus
(R - 1) t, whatever the number of layers.

The targets are the tokens that follow, shifted before they are split (-100 counts for nothing). A
part's loss is the sum over its targets divided by the mean number of targets of a part, so the mean
of the parts' losses is that over the whole sequence, also where a part has few targets or none. Its
backward pass gives the parameters' gradients through this device's tokens: DistributedDataParallel
around the model, or an all-reduce, averages them over the devices, which is the gradient of the
whole. As with micro-batches, a FlashGRU's or FlashLSTM's `max_recurrent` acts on each part's
gradient by itself.

Documents packed into the sequence are told apart by position_ids or seq_idx [B, T], split like the
tokens, and padding by attention_mask [B, T], split likewise. cu_seq_lens_q and gradient checkpointing are
refused: the first begins every document with an empty state, the second runs a layer twice. NCCL
with CUDA_DEVICE_MAX_CONNECTIONS=1 is refused as well: with one launch queue, a rank's all-reduce
can block the message that another rank waits for, which is a deadlock.

With accelerate, which puts DistributedDataParallel around the model:

    model, optimizer = accelerator.prepare(model, optimizer)
    context = ContextParallel(model)
    for tokens in batches:                          # the same [B, T + 1] on every device
        inputs, targets = (context.split(x) for x in (tokens[:, :-1], tokens[:, 1:]))
        with accelerator.autocast():
            loss = context(input_ids=inputs, targets=targets).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .boundaries import count_from, find_boundaries
from .cache import CACHE, NAMES, RecurrentStateLayer, States

IGNORED = -100  # a target that counts for nothing
# group -> shapes and dtypes of a layer's states
Layout = dict[str, list[tuple[torch.Size, torch.dtype]]]


class P2P:
    """Sends and receives states between this rank and its neighbours, as flat tensors of one
    dtype."""

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.sent: list[tuple[Any, Tensor]] = []  # keeps buffers alive while they are sent

    def peer(self, step: int) -> int:
        """Returns the global rank of the process `step` places after this one."""
        rank = self.rank + step
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def send(self, tensors: Any, step: int) -> None:
        flat = torch.cat([t.detach().flatten().to(flat_dtype(tensors)) for t in tensors])
        self.sent.append((dist.isend(flat, self.peer(step), self.group), flat))

    def receive(
        self, layout: list[tuple[torch.Size, torch.dtype]], step: int, device: Any
    ) -> States:
        sizes = [shape.numel() for shape, _ in layout]
        wide = flat_dtype([torch.empty(0, dtype=dtype) for _, dtype in layout])
        flat = torch.empty(sum(sizes), dtype=wide, device=device)
        dist.recv(flat, self.peer(step), self.group)
        parts = zip(flat.split(sizes), layout, strict=True)
        return tuple(part.view(shape).to(dtype) for part, (shape, dtype) in parts)

    def drain(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent = []

    def __del__(self) -> None:  # gloo cancels sends that nobody waits for
        self.drain()


def flat_dtype(tensors: Any) -> torch.dtype:
    """Returns the dtype that holds all tensors exactly: fp64 if one of them is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class RecvStates(torch.autograd.Function):
    """Receives the previous rank's states; the backward pass sends their gradient back."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, p2p: P2P, layout: list) -> States:
        ctx.p2p = p2p
        return p2p.receive(layout, -1, anchor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.p2p.send(grads, -1)
        return None, None, None


class SendStates(torch.autograd.Function):
    """Sends states to the next rank and returns 0; the backward pass receives their gradient."""

    @staticmethod
    def forward(ctx: Any, p2p: P2P, *states: Tensor) -> Tensor:  # type: ignore[override]
        ctx.p2p, ctx.layout = p2p, [(s.shape, s.dtype) for s in states]
        ctx.device = states[0].device
        p2p.send(states, 1)
        return torch.zeros((), device=ctx.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.p2p.receive(ctx.layout, 1, ctx.device)


class ContextLayer(RecurrentStateLayer):
    """One layer's cache: receives its initial states from the previous rank and sends its last
    on."""

    in_dynamic_cache = False
    goes_on = False  # every call begins with another rank's states

    def __init__(self, context: "ContextParallel", index: int, batch: int, device: torch.device):
        super().__init__()
        self.context, self.key, self.device = context, (index, batch), device

    def get_states(self, name: str = "cell") -> States | None:
        if self.context.p2p.rank == 0:
            return None  # the sequence begins here
        if not self.states:
            layout = self.context.layout_before(self.key, self.device)
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            flat = [one for group in layout.values() for one in group]
            taken = iter(RecvStates.apply(anchor, self.context.p2p, flat))
            self.states = {name: tuple(next(taken) for _ in g) for name, g in layout.items()}
        return self.states[name]

    def update_states(self, num_new_tokens: int, **states: States) -> None:
        p2p = self.context.p2p
        if p2p.rank < p2p.size - 1:
            layout = {name: [(s.shape, s.dtype) for s in g] for name, g in states.items()}
            self.context.tell_layout(self.key, layout, self.device)
            flat = [s for group in states.values() for s in group]
            self.context.given.append(SendStates.apply(p2p, *flat))
        self.states = {}  # nothing continues from here on this rank


class ContextParallel:
    """Runs a model on a sequence that is split over the ranks of a group in order; see the module.

    model   of one of our families, or one of them wrapped by DistributedDataParallel or FSDP2
    group   a torch.distributed process group; None for all ranks

    Calls must be the same ones on every rank, with the same batch size and gradients either on or
    off everywhere. ValueError names an argument that does not fit.
    """

    def __init__(self, model: nn.Module, group: Any = None):
        inner: Any = getattr(model, "module", model)
        kinds = set(getattr(inner.config, "layer_types", None) or ())
        if kinds != {"recurrent_state"}:
            raise ValueError(
                f"model is a {type(inner).__name__} with layers of {sorted(kinds)}, but must have "
                "recurrent states and nothing else"
            )
        if any(getattr(m, "gradient_checkpointing", False) for m in inner.modules()):
            raise ValueError(
                "model checkpoints gradients, but must not: every layer would run twice"
            )
        one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        if one_queue and dist.get_backend(group) == "nccl":
            raise ValueError(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, but must be at least 2 under NCCL: messages between "
                "ranks could wait behind a sum over them for ever"
            )
        self.model, self.config, self.p2p = model, inner.config, P2P(group)
        self.given: list[Tensor] = []
        self._layouts: dict[tuple[int, tuple[int, int]], Layout] = {}

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's part of x, split evenly along `dim`; ValueError if that is
        impossible."""
        if x.shape[dim] % self.p2p.size:
            raise ValueError(
                f"x has {x.shape[dim]} steps in dimension {dim}, but must have a multiple of "
                f"{self.p2p.size}, the number of ranks"
            )
        return x.chunk(self.p2p.size, dim)[self.p2p.rank].contiguous()

    def __call__(self, input_ids: Tensor, targets: Tensor | None = None, **inputs: Any) -> Any:
        """Runs the model on this rank's part; with `targets` [B, T / ranks] the output has a
        `loss`."""
        for name in ("cu_seq_lens_q", *NAMES, "labels"):
            if inputs.get(name) is not None:
                instead = "targets" if name == "labels" else "position_ids"
                raise ValueError(f"{name} is given, but must be None here: use {instead}")
        inputs = self._place_documents(input_ids, inputs)
        if targets is not None:  # `targets` are shifted already
            count = (targets != IGNORED).sum()
            dist.all_reduce(count, group=self.p2p.group)
            share = count.clamp(min=1) / self.p2p.size
            inputs.update(labels=targets, shift_labels=targets, num_items_in_batch=share)
        cache = self.begin(input_ids)
        output = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, **inputs)
        if targets is not None:
            output.loss = self.join(output.loss)
        else:
            output.logits = self.join(output.logits)
        setattr(output, CACHE, None)
        return output

    def _place_documents(self, input_ids: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns inputs whose position_ids alone tell documents apart. Whether a part begins with a new
        document, the tokens before it may decide, which other ranks have."""
        names = "attention_mask", "position_ids", "seq_idx"
        mask, positions, numbers = (self._whole(inputs.get(name)) for name in names)
        if numbers is None and (positions is None or mask is None):
            return inputs
        length = input_ids.shape[1] * self.p2p.size
        found = find_boundaries(len(input_ids), length, mask, positions, None, numbers)
        return {**inputs, "seq_idx": None, "position_ids": self.split(count_from(found.reset))}

    def _whole(self, x: Tensor | None) -> Tensor | None:
        """Joins the parts of all ranks, [B, T / ranks] -> [B, T]."""
        if x is None:
            return None
        parts = [torch.empty_like(x) for _ in range(self.p2p.size)]
        dist.all_gather(parts, x.contiguous(), group=self.p2p.group)
        return torch.cat(parts, 1)

    def begin(self, input_ids: Tensor) -> Cache:
        """Returns past_key_values for a model call made by the caller instead of by this class.

        Documents may be told apart by position_ids without padding alone. What the caller computes from the output goes through `join` before the backward pass."""
        if self.given and torch.is_grad_enabled():
            raise RuntimeError(
                "the states of the last call were given on, but no loss of it went through join: "
                "their gradients would be missing"
            )
        self.p2p.drain()
        self.given, rows = [], len(input_ids)
        layers = range(self.config.num_hidden_layers)
        return Cache(layers=[ContextLayer(self, i, rows, input_ids.device) for i in layers])

    def join(self, value: Tensor) -> Tensor:
        """Returns `value`, whose backward pass then includes the states that were sent on."""
        given, self.given = self.given, []
        return value + torch.stack(given).sum().to(value.dtype) if given else value

    def layout_before(self, key: tuple[int, int], device: torch.device) -> Layout:
        """Returns the shapes and dtypes that the previous rank sends for a layer; asked once per
        batch size."""
        if (-1, key) not in self._layouts:
            said: list[Any] = [None]
            dist.recv_object_list(said, self.p2p.peer(-1), self.p2p.group, device)
            self._layouts[-1, key] = said[0]
        return self._layouts[-1, key]

    def tell_layout(self, key: tuple[int, int], layout: Layout, device: torch.device) -> None:
        told = self._layouts.setdefault((1, key), layout)
        if told is layout:
            dist.send_object_list([layout], self.p2p.peer(1), self.p2p.group, device)
        elif told != layout:
            raise RuntimeError(
                f"the states of layer {key[0]} were {told}, but are {layout}: the next rank waits "
                "for the former; use another ContextParallel for another precision"
            )
