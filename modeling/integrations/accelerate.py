"""`accelerate(model)`: recurrent modules of torch.nn and of other packages run on flashcell's kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ..hub.kernel_loader import check_backend, kernel_info
from ..layers.replace import check_kernel, check_module, find_replacements
from ..layers.rnn_classes import KEPT, REPLACEMENTS, adopt, adopted, change_module, mixed
from . import mlstm_cells
from .slstm_cells import Tirex2Layer, TirexCell, XlstmCell
from .trajectories import RecurrentPolicy, TorchrlGRU, TorchrlLSTM


class Known(NamedTuple):
    """A class of another package, and what makes its modules run on a kernel."""

    kernel: str
    # (module, its class, backend) -> the attributes that change, or why the module stays as it is.
    change: Callable[[Any, type[nn.Module], str], dict[str, Any] | str]


def _mixin(kind: Any) -> Callable[[Any, type[nn.Module], str], dict[str, Any] | str]:
    def change(module: Any, own: type[nn.Module], backend: str) -> dict[str, Any] | str:
        refusal = kind.refusal(module)
        return refusal or {"__class__": mixed(own, kind), "kernel_backend": backend}

    return change


def _through_super(module: Any, own: type[nn.Module], backend: str) -> dict[str, Any] | str:
    """Changes a subclass of torch.nn's whose forward is known to call super().forward, which is then
    flashcell's."""
    kind = next(ours for base, ours in REPLACEMENTS.items() if issubclass(own, base))
    return {"__class__": adopted(own, kind), "kernel_backend": backend}


# By module and name, because no package of these is imported here.
KNOWN = {
    ("xlstm.blocks.slstm.cell", "sLSTMCellBase"): Known("fused-rnn", _mixin(XlstmCell)),
    ("tirex.models.slstm.cell", "sLSTMCell"): Known("fused-rnn", _mixin(TirexCell)),
    ("tirex2.model.component.flashrnn_slstm", "sLSTMFlashRNNLayer"): Known(
        "fused-rnn", _mixin(Tirex2Layer)
    ),
    ("xlstm.blocks.mlstm.cell", "mLSTMCell"): Known("tfla", mlstm_cells.stand_ins),
    ("pytorch_forecasting.models.nn.rnn", "LSTM"): Known("fused-rnn", _through_super),
    ("pytorch_forecasting.models.nn.rnn", "GRU"): Known("fused-rnn", _through_super),
    ("torchrl.modules.tensordict_module.rnn", "LSTMModule"): Known(
        "fused-rnn", _mixin(TorchrlLSTM)
    ),
    ("torchrl.modules.tensordict_module.rnn", "GRUModule"): Known("fused-rnn", _mixin(TorchrlGRU)),
    ("sb3_contrib.common.recurrent.policies", "RecurrentActorCriticPolicy"): Known(
        "fused-rnn", _mixin(RecurrentPolicy)
    ),
}
HOLDER = Known("tfla", mlstm_cells.stand_ins)  # a module whose mlstm_backend is one of THEIRS


def find_known(module: nn.Module) -> Known | None:
    for kind in type(module).__mro__:
        known = KNOWN.get((kind.__module__, kind.__name__))
        if known is not None:
            return known
    held = type(getattr(module, "mlstm_backend", None)).__name__
    return HOLDER if held in (*mlstm_cells.THEIRS, mlstm_cells.TflaBackend.__name__) else None


def accelerate(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Makes the recurrent modules of `model` run on flashcell's kernels, and returns `model`.

    Known are, by class, whatever model they are in:

    - torch.nn's LSTM, GRU, RNN and cells, as `flashcell.replace` takes them;
    - the package xlstm: sLSTM and mLSTM cells, so its xLSTMBlockStack and xLSTMLarge;
    - tirex-ts (TiRex) and tirex-2 (TiRex-2);
    - transformers' xLSTM, and every module that computes with mlstm_kernels' mLSTMBackend;
    - pytorch-forecasting's LSTM and GRU, whose forward calls torch.nn's;
    - TorchRL's LSTMModule and GRUModule, and sb3-contrib's recurrent policies: with resets in the
      middle of a row all trajectories of a batch run in one call, from the states they begin with.

    Parameters, state dict and configuration do not change, and outputs only by rounding.
    `flashcell.restore` undoes it. A line in the log says what was swapped, and what was not and why.

    An mLSTM's heads must be multiples of 8 wide, and its gradient also passes through the normaliser.
    Of transformers' xLSTM (5.17 to 5.22) the code around the mLSTM stays, with its limits:
    `attention_mask` is ignored, so padding is read as text; in bf16 the states are rounded after
    every call; beam search, a cache from an earlier `generate` and `logits_to_keep` do not work.
    `FlashMLSTMForCausalLM.from_pretrained` loads the same checkpoint and has none of these. Training
    works where transformers' own code does not: with the default configuration (whose cache it
    overwrites in place), in bf16, and in mode "train" over a number of tokens that is no multiple of
    chunk_size.

    backend: "auto", "cuda", "cpu" or "reference". Calling it again changes the backend. Raises
    TypeError if `model` is no module, ValueError for an unknown backend and for a model with nothing
    that it knows, and what `load_kernel` raises if a backend asked for by name cannot be had: then
    nothing is changed.
    """
    check_backend(backend)
    check_module(model)
    check_kernel(backend)
    report, found = find_replacements(model, backend)
    changes: list[tuple[Any, dict[str, Any]]] = []
    for name, module in model.named_modules():
        known = find_known(module)
        if known is None:
            continue
        own = vars(module).get(KEPT, {}).get("__class__", type(module))
        change = _reason(module, known, backend) or known.change(module, own, backend)
        if isinstance(change, str):
            report.skipped[name] = change
        else:
            report.replaced[name] = own.__name__
            report.skipped.pop(name, None)
            changes.append((module, change))
    if not report.replaced and not report.skipped:
        raise ValueError(
            f"model is a {type(model).__name__} without a recurrent module that is known, but must "
            "have one: torch.nn's LSTM, GRU, RNN or a cell, or one of xlstm, tirex-ts, tirex-2, "
            "transformers' xLSTM, pytorch-forecasting, torchrl or sb3-contrib"
        )
    for module, kind in found:
        adopt(module, kind, backend)
    for module, change in changes:
        change_module(module, change)
    adopted_ones: list[Any] = [m for m in model.modules() if "_replaced" in vars(m)]
    for module in adopted_ones:  # those of an earlier call too, perhaps for another backend
        module.stand_in(backend)
    report.log()
    return model


def _reason(module: nn.Module, known: Known, backend: str) -> str | None:
    """Returns why the module's own code is the faster one here, or None."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    if backend != "auto" or device == "meta":
        return None
    info = kernel_info(known.kernel, device, backend)
    return f"no kernel here: {info.reason}" if info.source == "reference" else None
