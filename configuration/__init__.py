"""What a model is: one configuration_<family>.py a family."""

from ..auto_classes import register_models, write_loader
from .configuration_flash_mlstm import FlashMLSTMConfig
from .configuration_flash_rnn import FlashRNNConfig
from .configuration_flash_xlstm import FlashXLSTMConfig
from .recurrent_config import RecurrentConfig

__all__ = ["FlashMLSTMConfig", "FlashRNNConfig", "FlashXLSTMConfig"]

RecurrentConfig.on_creation = staticmethod(register_models)
RecurrentConfig.on_saving = staticmethod(write_loader)
