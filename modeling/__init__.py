"""flashcell: recurrent networks as fast and ordinary to use as Transformers.

Importing this package registers its model families with the transformers Auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration import FlashRNNConfig
from .flash_rnn_layers import FlashGRU, FlashLSTM
from .modeling_flash_rnn import (
    FlashRNNForCausalLM,
    FlashRNNForSequenceClassification,
    FlashRNNForTokenClassification,
    FlashRNNModel,
    FlashRNNPreTrainedModel,
)
from .requests import Completion, Request
from .rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .rnn_replace import replace
from .serving import Batcher, generate_many

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Batcher",
    "Completion",
    "FlashGRU",
    "FlashLSTM",
    "FlashRNNConfig",
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNForTokenClassification",
    "FlashRNNModel",
    "FlashRNNPreTrainedModel",
    "GRUCell",
    "LSTMCell",
    "RNNCell",
    "Request",
    "generate_many",
    "replace",
]

AutoConfig.register("flash_rnn", FlashRNNConfig)
AutoModel.register(FlashRNNConfig, FlashRNNModel)
AutoModelForCausalLM.register(FlashRNNConfig, FlashRNNForCausalLM)
AutoModelForSequenceClassification.register(FlashRNNConfig, FlashRNNForSequenceClassification)
AutoModelForTokenClassification.register(FlashRNNConfig, FlashRNNForTokenClassification)
