"""flashcell: recurrent networks as fast and ordinary to use as Transformers.

Importing this package registers its model families with the transformers Auto classes.
"""

from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration import FlashMLSTMConfig, FlashRNNConfig, FlashXLSTMConfig
from .generation.batching import Batcher, generate_many
from .generation.requests import Completion, Request
from .hub.kernel_loader import kernel_info, load_kernel
from .layers.diagonal_rnn import FlashGRU, FlashLSTM
from .layers.replace import drop_in, replace, restore
from .layers.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .layers.transformers_xlstm import accelerate
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
from .utils.old_paths import import_old

if not TYPE_CHECKING:  # for which every misspelt name would exist
    __getattr__ = import_old

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Batcher",
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
    "RNNCell",
    "Request",
    "accelerate",
    "drop_in",
    "generate_many",
    "kernel_info",
    "load_kernel",
    "replace",
    "restore",
]

AutoConfig.register("flash_rnn", FlashRNNConfig)
AutoModel.register(FlashRNNConfig, FlashRNNModel)
AutoModelForCausalLM.register(FlashRNNConfig, FlashRNNForCausalLM)
AutoModelForSequenceClassification.register(FlashRNNConfig, FlashRNNForSequenceClassification)
AutoModelForTokenClassification.register(FlashRNNConfig, FlashRNNForTokenClassification)

AutoConfig.register("flash_mlstm", FlashMLSTMConfig)
AutoModel.register(FlashMLSTMConfig, FlashMLSTMModel)
AutoModelForCausalLM.register(FlashMLSTMConfig, FlashMLSTMForCausalLM)
AutoModelForSequenceClassification.register(FlashMLSTMConfig, FlashMLSTMForSequenceClassification)
AutoModelForTokenClassification.register(FlashMLSTMConfig, FlashMLSTMForTokenClassification)

AutoConfig.register("flash_xlstm", FlashXLSTMConfig)
AutoModel.register(FlashXLSTMConfig, FlashXLSTMModel)
AutoModelForCausalLM.register(FlashXLSTMConfig, FlashXLSTMForCausalLM)
AutoModelForSequenceClassification.register(FlashXLSTMConfig, FlashXLSTMForSequenceClassification)
AutoModelForTokenClassification.register(FlashXLSTMConfig, FlashXLSTMForTokenClassification)
