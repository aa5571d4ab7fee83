"""Trains neuralforecast's LSTM, RNN or DeepAR on four noisy waves."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, RNN, DeepAR
from recording import STEPS, TRAINER, record

SIZES = {"encoder_hidden_size": 16, "decoder_hidden_size": 16}
MODELS = {
    "LSTM": (LSTM, SIZES),
    "RNN": (RNN, SIZES),
    "DeepAR": (
        DeepAR,
        {"lstm_hidden_size": 16, "lstm_dropout": 0.0},
    ),  # flashcell's dropout draws other random numbers
}


def waves() -> pd.DataFrame:
    time = np.arange(120)
    noise = np.random.default_rng(0).normal(scale=0.1, size=(4, 120))
    values = np.sin(time / (2 + np.arange(4)[:, None])) + noise
    return pd.DataFrame(
        {
            "unique_id": np.repeat(np.arange(4), 120),
            "ds": np.tile(time, 4),
            "y": values.ravel(),
        }
    )


def train(flashcell, name):
    options = {"h": 4, "input_size": 16, "max_steps": STEPS, "batch_size": 4, **TRAINER}
    options |= {"windows_batch_size": 32, "enable_checkpointing": False}
    kind, sizes = MODELS[name]
    model = kind(**sizes, **options)
    flashcell.replace(model)
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(waves())
    return forecast.models[0]


if __name__ == "__main__":
    record(train, tuple(MODELS))
