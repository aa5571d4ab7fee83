"""Takes this model's classes from the installed flashcell.

Programs that do not import flashcell find them here, with trust_remote_code.
"""

from flashcell import (
    FlashRNNConfig,
    FlashRNNForCausalLM,
    FlashRNNForSequenceClassification,
    FlashRNNForTokenClassification,
    FlashRNNModel,
)

__all__ = [
    "FlashRNNConfig",
    "FlashRNNForCausalLM",
    "FlashRNNForSequenceClassification",
    "FlashRNNForTokenClassification",
    "FlashRNNModel",
]
