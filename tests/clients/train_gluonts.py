"""Trains gluonts' DeepAR, which makes its nn.LSTM inside train."""

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from recording import STEPS, TRAINER, record


def train(flashcell):
    noise = np.random.default_rng(0).normal(scale=0.1, size=(4, 200))
    waves = np.sin(np.arange(200) / (2 + np.arange(4)[:, None])) + noise
    data = ListDataset([{"start": "2020-01-01", "target": wave} for wave in waves], freq="D")
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=4,
        context_length=16,
        hidden_size=16,
        dropout_rate=0.0,  # flashcell's dropout draws other random numbers
        batch_size=8,
        num_batches_per_epoch=STEPS,
        trainer_kwargs={"max_epochs": 1, **TRAINER},
    )
    with flashcell.drop_in():
        trained = estimator.train_model(data, cache_data=True)
    return trained.trained_net


if __name__ == "__main__":
    record(train)
