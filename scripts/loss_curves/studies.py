"""The studies of scripts/convergence: which models and variants are compared."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import flashcell
from loss_curves.run import VOCABULARY, Provider

NOISE = (1, 2, 3, 4)  # seeds
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2}
FUSED = {"model_type": "flash_rnn", "intermediate_size": 256, "num_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    **{cell: {**FUSED, "cell": cell} for cell in ("lstm", "gru", "rnn", "slstm")},
    **{cell: {**FUSED, "cell": cell} for cell in ("flash_gru", "flash_lstm")},
    "mlstm-exp": {"model_type": "flash_mlstm", "num_heads": 2},
    "mlstm-sigmoid": {"model_type": "flash_mlstm", "num_heads": 2, "input_gate": "sigmoid"},
    "xlstm": {"model_type": "flash_xlstm", "num_heads": 2, "slstm_at": [1]},
}


def make_model(values: dict[str, Any], backend: str) -> nn.Module:
    config = AutoConfig.for_model(**SMALL | values, backend=backend)
    return AutoModelForCausalLM.from_config(config)


def kernel_providers(family: str, kernel: str) -> Iterator[Provider]:
    """Yields the kernel and the reference in fp32 and bf16, and perturbed kernels to measure noise.

    The perturbations are one rounding of the initial weights, and sums in another order."""
    make = partial(make_model, FAMILIES[family])
    for bf16 in (False, True):
        yield Provider("kernel", partial(make, kernel), bf16)
        yield Provider("reference", partial(make, "reference"), bf16)
        for seed in NOISE:
            yield Provider(f"nudged-{seed}", partial(make, kernel), bf16, nudge=seed)
            yield Provider(f"reordered-{seed}", partial(make, kernel), bf16, reorder=seed)


class TorchMixer(nn.Module):
    """Runs torch.nn.LSTM in place of a RecurrentMixer, with the mixer's weights.

    both_biases  train both biases of nn.LSTM, b_ih and b_hh, or leave b_hh at 0
    own_start    initialise as nn.LSTM does, uniform within 1 / sqrt(D)
    """

    def __init__(self, mixer: nn.Module, both_biases: bool, own_start: bool, own_kernel: bool):
        super().__init__()
        width = mixer.gate_bias[0].numel()
        module = flashcell.LSTM if own_kernel else nn.LSTM
        self.lstm = module(mixer.in_proj.in_features, width, batch_first=True)
        if not own_start:
            with torch.no_grad():
                self.lstm.weight_ih_l0.copy_(mixer.in_proj.weight)
                self.lstm.weight_hh_l0.copy_(mixer.recurrent_weight.view(-1, width))
                self.lstm.bias_ih_l0.copy_(mixer.gate_bias.flatten())
                self.lstm.bias_hh_l0.zero_()
        self.lstm.bias_hh_l0.requires_grad_(both_biases)

    def forward(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.lstm(hidden_states)[0]


def make_lstm(kernel: str, preset: str | None) -> nn.Module:
    if preset is None:
        return make_model({**FUSED, **WIDE, "cell": "lstm", "num_heads": 1}, kernel)
    config = flashcell.FlashRNNConfig.preset(preset, backend=kernel)
    if config.cell != "lstm" or config.num_heads != 1:
        raise ValueError(f"--preset is {preset}, but must have lstm cells of one head")
    return AutoModelForCausalLM.from_config(config)


def with_torch(kernel: str, preset: str | None, **options: bool) -> nn.Module:
    model = make_lstm(kernel, preset)
    for block in model.model.layers:
        block.mixer = TorchMixer(block.mixer, **options)
    return model


WIDE = {"hidden_size": 256, "intermediate_size": 512}
PRESET_RATE = 3e-4  # learning rate of a large model without warm-up
TORCH_PROVIDERS: dict[str, dict[str, bool]] = {
    "nn.LSTM, one bias": {"both_biases": False, "own_start": False, "own_kernel": False},
    "nn.LSTM": {"both_biases": True, "own_start": False, "own_kernel": False},
    "nn.LSTM, its start": {"both_biases": True, "own_start": True, "own_kernel": False},
    "flashcell.LSTM": {"both_biases": True, "own_start": False, "own_kernel": True},
    "flashcell.LSTM, its start": {"both_biases": True, "own_start": True, "own_kernel": True},
}


def torch_providers(kernel: str, preset: str | None = None) -> Iterator[Provider]:
    """Yields flash_rnn's LSTM, and nn.LSTM in its place, step by step closer to its usual settings.

    It does so in a small model, or in a preset, without flashcell.LSTM and TF32."""
    native: Callable[[], nn.Module] = partial(make_lstm, kernel, preset)
    rate = {"rate": PRESET_RATE} if preset else {}
    for bf16 in (False, True):
        yield Provider("flash_rnn", native, bf16, **rate)
        for seed in NOISE if bf16 else NOISE[:1]:
            yield Provider(f"nudged-{seed}", native, bf16, nudge=seed, **rate)
        for name, options in TORCH_PROVIDERS.items():
            if preset is None or not options["own_kernel"]:
                yield Provider(name, partial(with_torch, kernel, preset, **options), bf16, **rate)
    if preset is not None:
        return
    one_bias = partial(with_torch, kernel, preset, **TORCH_PROVIDERS["nn.LSTM, one bias"])
    yield Provider("nn.LSTM, one bias, TF32", one_bias, tf32=True)
