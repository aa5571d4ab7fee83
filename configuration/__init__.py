"""What a model is: one configuration_<family>.py a family."""

from .configuration_flash_mlstm import FlashMLSTMConfig
from .configuration_flash_rnn import FlashRNNConfig
from .configuration_flash_xlstm import FlashXLSTMConfig

__all__ = ["FlashMLSTMConfig", "FlashRNNConfig", "FlashXLSTMConfig"]
