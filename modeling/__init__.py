"""flashcell: recurrent networks as fast and ordinary to use as Transformers.

Importing this package registers its model families with the transformers Auto classes. What stands in
for torch.nn's modules needs torch alone; transformers is imported when the first model or Auto class
is used.
"""

from typing import TYPE_CHECKING, Any

from .auto_classes import import_with_transformers, register_with_transformers
from .choice.backend_choice import explain
from .hub.kernel_loader import kernel_info, load_kernel
from .integrations.accelerate import accelerate
from .integrations.flashrnn import flashrnn
from .layers.quantize import quantize_dynamic
from .layers.replace import drop_in, replace, restore
from .layers.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .utils.old_paths import import_old

if TYPE_CHECKING:
    from .configuration import FlashMLSTMConfig, FlashRNNConfig, FlashXLSTMConfig
    from .generation.batching import Batcher, generate_many
    from .generation.requests import Completion, Request
    from .layers.block_gru import BlockGRU, BlockGRUCell
    from .layers.diagonal_rnn import FlashGRU, FlashLSTM
    from .modeling_flash_mlstm import (
        FlashMLSTMForCausalLM,
        FlashMLSTMForSequenceClassification,
        FlashMLSTMForTokenClassification,
        FlashMLSTMModel,
        FlashMLSTMPreTrainedModel,
    )
    from .modeling_flash_rnn import (
        FlashRNNForCausalLM,
        FlashRNNForSequenceClassification,
        FlashRNNForTokenClassification,
        FlashRNNModel,
        FlashRNNPreTrainedModel,
    )
    from .modeling_flash_xlstm import (
        FlashXLSTMForCausalLM,
        FlashXLSTMForSequenceClassification,
        FlashXLSTMForTokenClassification,
        FlashXLSTMModel,
        FlashXLSTMPreTrainedModel,
    )
    from .quantization.config import QuantizationConfig, quantize_weights

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Batcher",
    "BlockGRU",
    "BlockGRUCell",
    "Completion",
    "FlashGRU",
    "FlashLSTM",
    "FlashMLSTMConfig",
    "FlashMLSTMForCausalLM",
    "FlashMLSTMForSequenceClassification",
    "FlashMLSTMForTokenClassification",
    "FlashMLSTMModel",
    "FlashMLSTMPreTrainedModel",
    "FlashRNNConfig",
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNForTokenClassification",
    "FlashRNNModel",
    "FlashRNNPreTrainedModel",
    "FlashXLSTMConfig",
    "FlashXLSTMForCausalLM",
    "FlashXLSTMForSequenceClassification",
    "FlashXLSTMForTokenClassification",
    "FlashXLSTMModel",
    "FlashXLSTMPreTrainedModel",
    "GRUCell",
    "LSTMCell",
    "QuantizationConfig",
    "RNNCell",
    "Request",
    "accelerate",
    "drop_in",
    "explain",
    "flashrnn",
    "generate_many",
    "kernel_info",
    "load_kernel",
    "quantize_dynamic",
    "quantize_weights",
    "replace",
    "restore",
]

_MODULES = {  # name -> the module that it is imported from when first used; see also _module_of
    "Batcher": "generation.batching",
    "BlockGRU": "layers.block_gru",
    "BlockGRUCell": "layers.block_gru",
    "Completion": "generation.requests",
    "QuantizationConfig": "quantization.config",
    "FlashGRU": "layers.diagonal_rnn",
    "FlashLSTM": "layers.diagonal_rnn",
    "Request": "generation.requests",
    "generate_many": "generation.batching",
    "quantize_weights": "quantization.config",
}
_FAMILIES = {
    "FlashMLSTM": "modeling_flash_mlstm",
    "FlashRNN": "modeling_flash_rnn",
    "FlashXLSTM": "modeling_flash_xlstm",
}
_SUBMODULES = {
    "configuration",
    "convert_xlstm",
    "generation",
    "recurrent_model",
    "state",
    *_FAMILIES.values(),
}


def _module_of(name: str) -> str:
    if name in _MODULES:
        return _MODULES[name]
    if name.endswith("Config"):
        return "configuration"
    return next(module for family, module in _FAMILIES.items() if name.startswith(family))


def _import(name: str) -> Any:
    if name in __all__:
        value = getattr(import_with_transformers(_module_of(name), name), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        for module in (*_FAMILIES.values(), name):  # lists their submodules, too
            found = import_with_transformers(module, name)
        return found
    return import_old(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if not TYPE_CHECKING:  # type checkers would take any misspelt name for defined
    __getattr__ = _import

register_with_transformers()
