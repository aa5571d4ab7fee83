"""Trains darts' BlockRNN, which makes its nn.LSTM inside fit."""

import numpy as np
from darts import TimeSeries
from darts.models import BlockRNNModel
from recording import STEPS, TRAINER, record


def train(flashcell):
    noise = np.random.default_rng(0).normal(scale=0.1, size=20 * STEPS)
    series = TimeSeries.from_values((np.sin(np.arange(20 * STEPS) / 3) + noise).astype(np.float32))
    model = BlockRNNModel(
        input_chunk_length=16,
        output_chunk_length=4,
        model="LSTM",
        hidden_dim=16,
        n_rnn_layers=2,
        batch_size=8,
        random_state=0,
        pl_trainer_kwargs={"max_steps": STEPS, "enable_checkpointing": False, **TRAINER},
    )
    with flashcell.drop_in():
        model.fit(series)
    return model.model


if __name__ == "__main__":
    record(train)
