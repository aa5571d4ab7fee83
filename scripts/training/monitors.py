"""Monitors of a training run: gradient norms, gate activations, and the residuals of parallel
solvers.

A row is (step, where, what, value); monitors.csv in the run's folder holds them:

    gradient_norm                    of each block's parameters, after the backward pass
    <gate>_mean, <gate>_saturated    activation of a gate, and the part of it below 0.05 or above 0.95;
                                     the exponential input gate of an mLSTM is given as its
                                     pre-activation: i_mean, i_max, after the soft cap
    newton_residual, newton_iterations   of a FlashGRU or FlashLSTM, run again on the same input;
                                     0 where the method is sequential

Everything is taken from the first micro-batch of a step that is logged, in the main process.
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flashcell.state.boundaries import Boundaries

COLUMNS = ["step", "where", "what", "value"]
GATES = {"lstm": "if o", "gru": "rz", "slstm": " f o", "flash_gru": "zr", "flash_lstm": "fo"}
SAMPLE = 32  # steps of the first row that a FlashLSTM's cell states are followed for
Values = dict[tuple[str, str], float]


def gradient_norms(model: nn.Module) -> Values:
    """Returns the gradient norm of each block, and of each parameter outside the blocks."""
    squares: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        norm = torch.linalg.vector_norm(parameter.grad.float())
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        where = block_of(name)
        squares[where] = squares.get(where, torch.zeros_like(norm)) + norm.square()
    return {(where, "gradient_norm"): s.sqrt().item() for where, s in squares.items()}


def block_of(name: str) -> str:
    """Returns a parameter's block: "model.layers.3.mixer.in_proj.weight" -> "model.layers.3"."""
    parts = name.removeprefix("module.").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


@contextmanager
def watch_gates(model: nn.Module):
    """Yields Values that fill while the model runs forward."""
    values: Values = {}
    handles = []
    for name, module in model.named_modules():
        observe = OBSERVERS.get(type(module).__name__)
        if observe is not None:
            where = block_of(name)
            handles += observe(module, lambda what, x, where=where: note(values, where, what, x))
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def note(values: Values, where: str, what: str, x: Tensor) -> None:
    """Adds x to `values`: its value if it is a number; for a gate after its sigmoid, mean and saturation."""
    if x.numel() == 1:
        values[where, what] = x.item()
        return
    outside = (x < 0.05) | (x > 0.95)
    values[where, f"{what}_mean"] = x.float().mean().item()
    values[where, f"{what}_saturated"] = outside.float().mean().item()


def observe_fused(mixer: Any, note) -> list:
    """Hooks a fused-rnn mixer to note its gates, from the pre-activations x + R h + b.

    h is the previous step's output. The first steps of rows and documents are left out, because the
    output does not hold their previous h."""
    seen: dict[str, Tensor] = {}

    def project(module, inputs, output):
        seen["x"] = output

    @torch.no_grad()
    def gates(module, inputs, output):
        weight, bias = module.recurrent_weight.float(), module.gate_bias.float()
        x = seen.pop("x")[:1].unflatten(-1, (module.num_gates, *bias.shape[1:])).float()
        h = output[:1].unflatten(-1, bias.shape[1:]).float()
        names = GATES.get(module.cell, "")
        for g, gate in enumerate(names):
            if gate.strip():
                recurrent = torch.einsum("btnk,njk->btnj", h[:, :-1], weight[g])
                inner = torch.sigmoid(x[:, 1:, g] + recurrent + bias[g])
                first = starts(inputs)
                note(gate, inner if first is None else inner[~first[:1, 1:]])

    return [mixer.in_proj.register_forward_hook(project), mixer.register_forward_hook(gates)]


def starts(inputs: tuple) -> Tensor | None:
    """Returns where documents begin, [B, T] bool, from a mixer's inputs."""
    return next((x.reset for x in inputs if isinstance(x, Boundaries)), None)


def observe_diagonal(mixer: Any, note) -> list:
    """Hooks a diagonal mixer to note the gates of the first row's first steps, and the solver's
    report."""

    @torch.no_grad()
    def look(cell, inputs, output):
        config, name = mixer.config, cell.kernel_cell
        u = cell.in_proj(inputs[0])
        kernel = cell._kernel(inputs[0], name, config.backend)
        *_, info = kernel(
            u, *cell._weights(), None, method=config.method, tol=config.tol,
            max_iters=config.max_iters, backend=config.backend, return_info=True,
        )  # fmt: skip
        note("newton_residual", info.residual.detach())
        note("newton_iterations", info.iterations.detach())
        gates: dict[str, list[Tensor]] = {gate: [] for gate in GATES[name]}
        a, state = cell._weights()[0].float(), None
        for t in range(min(SAMPLE, u.shape[1])):
            x = u[:1, t].float()
            h, old = (0.0, 0.0) if state is None else (state[0], state[-1])
            _, state = cell.step(inputs[0][:1, t], state, backend=config.backend)
            if name == "flash_gru":
                inner = {"z": x[:, 0] + a[0] * h, "r": x[:, 1] + a[1] * h}
            else:
                p = cell._weights()[1].float()
                inner = {"f": x[:, 0] + a[0] * h + p[0] * old}
                inner["o"] = x[:, 1] + a[1] * h + p[1] * state[-1]
            for gate, value in inner.items():
                gates[gate].append(torch.sigmoid(value))
        for gate, found in gates.items():
            note(gate, torch.cat(found))

    return [mixer.cell.register_forward_hook(look)]


def observe_mlstm(mixer: Any, note) -> list:
    """Hooks an mLSTM mixer to note its gates, which are projections of the token alone."""
    config = mixer.config
    cap = getattr(config, "gate_soft_cap", None)
    sigmoid = getattr(config, "input_gate", "exp") == "sigmoid"

    def look(gate: str):
        @torch.no_grad()
        def hook(module, inputs, output):
            x = output.float()
            x = x if cap is None or gate == "o" else cap * torch.tanh(x / cap)
            if gate == "i" and not sigmoid:
                note("i_mean", x.mean())
                note("i_max", x.max())
            else:
                note(gate, torch.sigmoid(x))

        return hook

    names = {
        "igate_preact": "i",
        "fgate_preact": "f",
        "ogate_preact": "o",
        "igate": "i",
        "fgate": "f",
    }
    found = [(getattr(mixer, name, None), gate) for name, gate in names.items()]
    return [m.register_forward_hook(look(gate)) for m, gate in found if isinstance(m, nn.Module)]


OBSERVERS = {
    "RecurrentMixer": observe_fused,
    "DiagonalMixer": observe_diagonal,
    "FlashMLSTMMixer": observe_mlstm,
    "XLSTMMixer": observe_mlstm,
}
