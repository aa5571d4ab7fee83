"""Runs forecasting models: neuralforecast's LSTM and DeepAR, darts' BlockRNN, gluonts' DeepAR and
pytorch-forecasting's Temporal Fusion Transformer."""

import torch
from comparing import compare

BATCH, PAST, AHEAD, WIDTH = 64, 96, 12, 128


def neuralforecast(name):
    from neuralforecast import models

    sizes = {
        "LSTM": {"encoder_hidden_size": WIDTH, "decoder_hidden_size": WIDTH},
        "DeepAR": {"lstm_hidden_size": WIDTH, "lstm_dropout": 0.0},
    }
    model = getattr(models, name)(h=AHEAD, input_size=PAST, max_steps=1, **sizes[name])
    nothing = dict.fromkeys(("hist_exog", "futr_exog", "stat_exog"))
    batch = {"insample_y": torch.randn(BATCH, PAST, 1).cumsum(1), **nothing}

    def run(model):
        y = model(batch)
        return torch.cat([part.flatten() for part in y]) if isinstance(y, tuple) else y

    return model, run


def darts():
    from darts.models.forecasting.block_rnn_model import _BlockRNNModule
    from darts.utils.data.torch_datasets.utils import PLModuleInput

    model = _BlockRNNModule(
        name="LSTM", input_size=1, hidden_dim=WIDTH, num_layers=2, future_cov_dim=0, target_size=1,
        nr_params=1, input_chunk_length=PAST, output_chunk_length=AHEAD,
        train_sample_shape=[(PAST, 1), (AHEAD, 1)],
    )  # fmt: skip
    data = PLModuleInput(past_target=torch.randn(BATCH, PAST, 1).cumsum(1))
    return model, lambda model: model(data).prediction


def gluonts():
    from gluonts.torch.model.deepar.module import DeepARModel

    model = DeepARModel(
        freq="D", context_length=PAST, prediction_length=AHEAD, hidden_size=WIDTH, dropout_rate=0.0
    )
    length = model._past_length
    series = torch.randn(BATCH, length + AHEAD).cumsum(1)
    features = torch.randn(BATCH, length + AHEAD, 1)
    past, future = series.split((length, AHEAD), 1)
    nowhere = torch.zeros(BATCH, 1, dtype=torch.long), torch.zeros(BATCH, 1)
    seen = torch.ones_like(past), torch.ones_like(future)

    def run(model):
        return model.loss(
            *nowhere, features[:, :length], past, seen[0], features[:, length:], future, seen[1]
        )

    return model, run


def pytorch_forecasting():
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    time, group = np.tile(np.arange(160), BATCH), np.repeat(np.arange(BATCH), 160)
    frame = pd.DataFrame({"time": time, "group": group.astype(str)})
    frame["value"] = np.sin(time / (2 + group)) + np.random.default_rng(0).normal(size=len(time))
    data = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["group"], min_encoder_length=PAST // 4,
        max_encoder_length=PAST, max_prediction_length=AHEAD, time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"], static_categoricals=["group"],
    )  # fmt: skip
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=64, attention_head_size=4, hidden_continuous_size=16, loss=QuantileLoss()
    )
    x, _ = next(iter(data.to_dataloader(train=True, batch_size=BATCH, num_workers=0)))
    return model, lambda model: model(x)["prediction"]


MODELS = {
    "neuralforecast LSTM": lambda: neuralforecast("LSTM"),
    "neuralforecast DeepAR": lambda: neuralforecast("DeepAR"),
    "darts BlockRNN": darts,
    "gluonts DeepAR": gluonts,
    "pytorch-forecasting TFT": pytorch_forecasting,
}

if __name__ == "__main__":
    compare(MODELS)
