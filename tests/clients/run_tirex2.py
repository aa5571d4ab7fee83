"""Forecasts with TiRex-2 (tirex-2), with blocks of sLSTM or of mLSTM in both directions."""

from functools import partial

import torch
from comparing import compare
from tirex2.model.tirex2 import TiRex2
from tirex2.model.types import TimeseriesType

SIZES = {
    "TiRex-2 sLSTM, 1 series": ("bi-slstm", 1),
    "TiRex-2 sLSTM, 16 series": ("bi-slstm", 16),
    "TiRex-2 sLSTM, 64 series": ("bi-slstm", 64),
    "TiRex-2 mLSTM, 1 series": ("bi-mlstm", 1),
    "TiRex-2 mLSTM, 64 series": ("bi-mlstm", 64),
}
WIDTH, BLOCKS, PATCH = 512, 6, 32
TOKENS = {"output_patch_size": PATCH, "input_patch_size": PATCH, "input_patch_stride": PATCH}


def build(name, device):
    kind, series = SIZES[name]
    block = {
        "time_mixer": {"model_type": kind, "embedding_dim": WIDTH, "num_heads": 4},
        "variate_mixer": {"embedding_dim": WIDTH, "num_heads": 4},
        "dropout": 0.0,
        "eps": 1e-6,
    }
    block["time_mixer"]["num_slstm_heads"] = 4
    model = TiRex2(
        {"templates": {"own": block}, "recipe": ["own"] * BLOCKS},
        num_blocks=BLOCKS, embedding_dim=WIDTH, input_patch_size=PATCH, output_patch_size=PATCH,
        quantiles=[0.1, 0.5, 0.9], tokenizer_cfg=TOKENS, scaler_cfg={}, h_expand=2.0,
        context_len=2048, future_len=64, input_ff_dim=1024, act_func="SiLU", dropout=0.0,
        device=device,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    batch = [TimeseriesType(torch.randn(1, 1024).cumsum(1), None, None) for _ in range(series)]

    def run(model):
        return torch.cat([y.flatten() for y in model.predict(batch, prediction_length=64)])

    return model, run


if __name__ == "__main__":
    compare({name: partial(build, name) for name in SIZES}, train=(), by_device=True)
