"""Reinforcement learning's recurrent modules: several trajectories in a row, in one call of the kernel.

A batch of rows [B, T] holds trajectories end to end: a mark says that a step is the first of a new
one. Other packages cut the rows apart and pad them, or call the LSTM once a step. Here the
trajectories become one PackedSequence, so the module's kernel runs as many steps as the longest has.

The classes are mixed into the other package's class in front of it, as those of slstm_cells.py.
Shapes: B rows, T steps, S trajectories, L layers * directions, H width of a state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..kernels.fused_rnn.packed import put_rows
from ..layers.rnn_classes import KEPT


class Trajectories(NamedTuple):
    """Where the S trajectories of [B, T] lie, the longest first; places are in [B * T]."""

    places: Tensor  # [B * T]: the steps as a PackedSequence has them, all first ones first
    batch_sizes: Tensor  # on the CPU
    starts: Tensor  # [S]: the first step of each
    ends: Tensor  # [S]: the last step of each


def find_trajectories(marks: Tensor) -> Trajectories:
    """Cuts rows in front of every marked step; marks [B, T] bool, T > 0.

    The number of trajectories is read, so on CUDA the host waits for marks."""
    first = marks.cpu().clone()
    first[:, 0] = True
    starts = first.flatten().nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_tensor([first.numel()])]) - 1
    lengths, by_length = (ends - starts + 1).sort(descending=True, stable=True)
    starts, ends = starts[by_length], ends[by_length]
    batch_sizes = len(starts) - lengths.bincount().cumsum(0)[:-1]
    begins = batch_sizes.cumsum(0) - batch_sizes
    steps = torch.arange(len(batch_sizes), device="cpu").repeat_interleave(batch_sizes)
    which = torch.arange(first.numel(), device="cpu") - begins.repeat_interleave(batch_sizes)
    places, device = starts[which] + steps, marks.device
    return Trajectories(places.to(device), batch_sizes, starts.to(device), ends.to(device))


def run_trajectories(
    module: nn.Module,  # an nn.LSTM or nn.GRU
    x: Tensor,  # [B, T, I]
    found: Trajectories,
    states: tuple[Tensor, ...],  # [S, L, H] each: what the trajectories begin with
) -> tuple[Tensor, tuple[Tensor, ...]]:  # [B, T, P], [S, L, H] each
    """Runs every trajectory from its own state; returns the outputs, and the states that they end in."""
    given = tuple(s.transpose(0, 1).contiguous() for s in states)
    data = x.flatten(0, 1).index_select(0, found.places)
    y, last = module(PackedSequence(data, found.batch_sizes), given if len(given) > 1 else given[0])
    last = last if len(given) > 1 else (last,)
    output = put_rows(y.data, found.places).view(*x.shape[:2], -1)
    return output, tuple(s.transpose(0, 1) for s in last)


def changed_method(module: Any, package: str, names: tuple[str, ...]) -> str | None:
    """Returns why a module stays as it is whose class overrides one of the methods `names` of the class
    that `package` defines, or None."""
    own = vars(module).get(KEPT, {}).get("__class__", type(module))
    base = next(kind for kind in own.__mro__ if kind.__module__ == package)
    for name in names:
        if not hasattr(base, name):
            return f"its class has no {name}: the package has another version"
        if getattr(own, name) is not getattr(base, name):
            return f"its class {own.__name__} has a {name} of its own"
    return None


class _TorchrlModule:
    """TorchRL's LSTMModule and GRUModule, whose is_init marks the first step of a trajectory.

    A trajectory begins with the states stored at its first step. The result has its final states at
    its last step, and zeros at the other steps, as with each recurrent_backend of TorchRL. The
    overridden method gets rows with their marks; TorchRL calls it for recurrent_backend "triton".
    """

    kernel_backend: str
    held: str  # the attribute with the nn.LSTM or nn.GRU
    path: str  # the method that runs rows with marks

    @property
    def recurrent_backend(self) -> str:
        return "triton"

    def run_rows(self, x: Tensor, is_init: Tensor, states: tuple[Tensor, ...]) -> Any:
        """Runs x [B, T, I] with is_init [B, T] and states [B, T, L, H]; returns the output and the
        states."""
        found = find_trajectories(is_init)
        first = tuple(s.flatten(0, 1).index_select(0, found.starts) for s in states)
        y, last = run_trajectories(getattr(self, self.held), x, found, first)
        shape = x.shape[:2]
        placed = [
            s.new_zeros(shape.numel(), *s.shape[1:]).index_copy(0, found.ends, s) for s in last
        ]
        return y, *(s.view(*shape, *s.shape[1:]) for s in placed)

    @classmethod
    def refusal(cls, module: Any) -> str | None:
        """Returns why the module stays as it is, or None."""
        own = type(getattr(module, cls.held))
        if not issubclass(own, (nn.LSTM, nn.GRU)):
            return f"its {cls.held} is {own.__module__}'s {own.__name__}, not torch.nn's"
        package = "torchrl.modules.tensordict_module.rnn"
        return changed_method(module, package, ("forward", f"_{cls.held}", cls.path))


class TorchrlLSTM(_TorchrlModule):
    held, path = "lstm", "_lstm_triton_with_resets"

    def _lstm_triton_with_resets(
        self, input: Tensor, hidden0_in: Tensor, hidden1_in: Tensor, is_init: Tensor
    ) -> Any:
        return self.run_rows(input, is_init, (hidden0_in, hidden1_in))


class TorchrlGRU(_TorchrlModule):
    held, path = "gru", "_gru_triton_with_resets"

    def _gru_triton_with_resets(self, input: Tensor, hidden_in: Tensor, is_init: Tensor) -> Any:
        return self.run_rows(input, is_init, (hidden_in,))


class RecurrentPolicy:
    """sb3-contrib's recurrent policies, whose episode_starts empties the state before a step.

    If an episode starts within a sequence, they run the LSTM once a step, for all sequences of the
    batch. Calls of one step, and calls in which no episode starts, run their own code."""

    kernel_backend: str

    def _process_sequence(
        self,
        features: Tensor,  # [B * T, I]
        lstm_states: tuple[Tensor, Tensor],  # [L, B, H] each
        episode_starts: Tensor,  # [B * T], 1.0 or 0.0
        lstm: nn.LSTM,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        B = lstm_states[0].shape[1]
        marks = episode_starts.reshape(B, -1) != 0
        T = marks.shape[1]
        if T == 1 or not marks.any():
            own: Any = super()
            return own._process_sequence(features, lstm_states, episode_starts, lstm)
        found = find_trajectories(marks)
        rows, empty = found.starts // T, marks.flatten()[found.starts]
        first = tuple(
            s.transpose(0, 1).index_select(0, rows).masked_fill(empty[:, None, None], 0)
            for s in lstm_states
        )
        x = features.reshape(B, T, lstm.input_size)
        y, last = run_trajectories(lstm, x, found, first)
        at_end = (found.ends % T == T - 1).nonzero().squeeze(1)
        at_end = at_end[rows[at_end].argsort()]
        h, c = (s.index_select(0, at_end).transpose(0, 1) for s in last)
        return y.flatten(0, 1), (h, c)

    @staticmethod
    def refusal(policy: Any) -> str | None:
        return changed_method(
            policy, "sb3_contrib.common.recurrent.policies", ("_process_sequence",)
        )
