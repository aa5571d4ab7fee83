"""`quantize_dynamic`: weights in int8 for recurrent modules on the CPU, by torch's quantised modules.

torch.ao.quantization finds modules by their exact class. So torch's own quantize_dynamic silently
leaves flashcell's modules in float, unless it is given their classes ({flashcell.LSTM}), which this
file adds to torch's table. torch's quantised LSTM, GRU and cells hold weights in int8 and states in
float, and round the input and h to 7 bits before each product. They are faster than our kernels
with fp32 weights where reading the weights takes most of the time: from 512 units on (NOTEBOOK.md).
"""

import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from .replace import check_module, restore
from .rnn import GRU, LSTM, GRUCell, LSTMCell, RNNCell
from .rnn_classes import base_class

try:
    from torch.ao.quantization import get_default_dynamic_quant_module_mappings as torch_mapping
    from torch.ao.quantization import quantize_dynamic as torch_quantize
except ImportError:  # torch has announced that torchao will take its place
    torch_mapping = torch_quantize = None  # type: ignore[assignment]

logger = logging.getLogger("flashcell")
CLASSES: dict[type[nn.Module], type[nn.Module]] = {  # those that torch can quantise
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}
SIZES = ("input_size", "hidden_size")
SEQUENCE = ("num_layers", "batch_first", "dropout", "bidirectional")


class Converter:
    """Stands in torch's table for a quantised class, and makes it of torch.nn's class and of ours."""

    def __init__(self, own: Any, quantized: Any):
        self.own, self.quantized = own, quantized

    def from_float(self, module: Any) -> nn.Module:
        """Returns the quantised module; raises ValueError for one that torch's classes do not hold."""
        if reason := obstacle(module):
            raise ValueError(f"{module} cannot be quantised: {reason}")
        names = (*SIZES, *(SEQUENCE if isinstance(module, RNNBase) else ()))
        names += ("nonlinearity",) if isinstance(module, nn.RNNCell) else ()
        # torch's quantised modules always have biases: a module without gets zeros.
        twin = self.own(**{name: getattr(module, name) for name in names})
        # Inside drop_in it is flashcell's, and torch's from_float takes its own classes alone.
        restore(twin)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                there = module.bias or not name.startswith("bias")
                parameter.copy_(getattr(module, name)) if there else parameter.zero_()
        twin.qconfig = module.qconfig
        return self.quantized.from_float(twin)


def obstacle(module: nn.Module) -> str | None:
    """Returns why torch has no quantised module that computes what `module` does, or None."""
    kind = base_class(module)
    if kind not in CLASSES and kind not in CLASSES.values():
        return f"torch has no quantised class for its class {kind.__name__}"
    if getattr(module, "proj_size", 0) > 0:
        return f"proj_size is {module.proj_size}, but must be 0 for torch's quantised LSTM"
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            had = f"{parameter.dtype} on {parameter.device}"
            return f"{name} is {had}, but must be {torch.float32} on the CPU"
    return None


def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Any = None,
    dtype: torch.dtype = torch.qint8,
    mapping: dict[Any, Any] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Returns `model` with its LSTMs, GRUs, cells and linear layers quantised for the CPU.

        model = flashcell.quantize_dynamic(model)

    Arguments and results are those of torch.ao.quantization.quantize_dynamic, which does the work.
    `qconfig_spec` is a set of classes and names, or a dict from these to a qconfig; None stands for all
    that can be quantised. A class of torch.nn there means flashcell's of that name too. `dtype`, of the
    weights, is torch.qint8 or torch.float16. `mapping` is a table from classes to quantised classes in
    place of torch's. With `inplace=True` the model itself changes; otherwise it stays as it is.

    What torch cannot quantise stays in float, and a warning names it with the reason: nn.RNN, an LSTM
    with a projection, subclasses, weights that are not fp32 on the CPU. The quantised modules are
    torch's: they take no unbatched sequence and give no gradients; state dicts, pickles and copies work.

    Raises TypeError if `model` is no module, ImportError if torch has no torch.ao.quantization, and
    what torch's function raises.
    """
    check_module(model)
    if torch_quantize is None:
        raise ImportError(
            f"torch {torch.__version__} has no torch.ao.quantization, but quantize_dynamic needs it: "
            "install an earlier version"
        )
    if not inplace:
        model = copy.deepcopy(model)
    if isinstance(model, (RNNBase, RNNCellBase)):  # torch converts what a model holds
        holder: Any = nn.Sequential(model)
        quantize_dynamic(holder, qconfig_spec, dtype, mapping, inplace=True)
        return holder[0]
    table = dict(torch_mapping() if mapping is None else mapping)
    for own, ours in CLASSES.items():
        if own in table:
            table[own] = table[ours] = Converter(own, table[own])
    if qconfig_spec is None and dtype in (torch.qint8, torch.float16):
        qconfig_spec = {nn.Linear, *CLASSES}
    if isinstance(qconfig_spec, set):
        qconfig_spec = qconfig_spec | {CLASSES[k] for k in qconfig_spec if k in CLASSES}
    elif isinstance(qconfig_spec, dict):
        added = {CLASSES[kind]: value for kind, value in qconfig_spec.items() if kind in CLASSES}
        qconfig_spec = {**added, **qconfig_spec}
    left = {}
    for name, module in model.named_modules():
        if isinstance(module, (RNNBase, RNNCellBase)) and (reason := obstacle(module)):
            left[name] = reason
            module.qconfig = None  # torch leaves such a module out, whatever qconfig_spec says
    result = torch_quantize(model, qconfig_spec, dtype, table, inplace=True)
    if left:
        names = "; ".join(f"{name} ({reason})" for name, reason in left.items())
        logger.warning("left in float: %s", names)
    return result


def register() -> None:
    """Adds flashcell's classes to torch's table, for its own quantize_dynamic(model, {flashcell.LSTM})."""
    table = {} if torch_mapping is None else torch_mapping()
    for own, ours in CLASSES.items():
        if own in table:
            table.setdefault(ours, Converter(own, table[own]))


register()
