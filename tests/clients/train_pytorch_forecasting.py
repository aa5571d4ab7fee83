"""Trains pytorch-forecasting's Temporal Fusion Transformer, whose LSTM is a subclass of nn.LSTM.

The subclass has its own forward, for sequences of length 0, which calls super().forward. What a
forward calls cannot be told from its class, so `replace` and `drop_in` leave it alone and say
so. Here the program is imported while torch.nn.LSTM is flashcell's, so that its super().forward
is flashcell's.
"""

from unittest.mock import patch

import lightning
import numpy as np
import pandas as pd
from recording import STEPS, TRAINER, record
from torch import nn


def train(flashcell, optimizer):
    with patch.object(nn, "LSTM", flashcell.LSTM):
        from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    time = np.tile(np.arange(120), 4)
    group = np.repeat(np.arange(4), 120)
    noise = np.random.default_rng(0).normal(scale=0.1, size=480)
    frame = pd.DataFrame({"time": time, "group": group.astype(str)})
    frame["value"] = np.sin(time / (2 + group)) + noise
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        min_encoder_length=4,  # so that lengths differ in a batch
        max_encoder_length=16,
        max_prediction_length=4,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
        static_categoricals=["group"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.01,
        optimizer=optimizer,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
    )
    trainer = lightning.Trainer(max_steps=STEPS, enable_checkpointing=False, **TRAINER)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=8, num_workers=0))
    return model


if __name__ == "__main__":
    record(train, ("sgd", "adam"))
