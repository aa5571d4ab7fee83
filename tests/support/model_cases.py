"""The models of the behaviour suite (tests/modeling), which every family that adds its cases here
runs.

They are small with large weights, so that every gate moves and a wrong state shows in the logits.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import flashcell
from cases import DEVICE

VOCABULARY = 61
cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="says nothing about the device")


class Case(NamedTuple):
    family: str  # the classes are flashcell.<family>Config, <family>ForCausalLM, ...
    options: dict[str, Any]  # options of the configuration, besides those of all
    projections: set[str]  # names of the linear layers that LoRA's "all-linear" adapts
    paths: tuple[dict[str, Any], ...]  # ways to run it that must not change the model
    stir: float = 0.0  # added to weights, for families without an initializer_range
    logits: torch.dtype | None = None  # None for the model's dtype
    # Gradients in float64 have more roundings here: a norm follows the mLSTM, so what scales a
    # head's output changes little, and most of a gate's gradient cancels. Observed 1.4.
    cancelled: int = 1

    def config(self, **changes: Any) -> PreTrainedConfig:
        options = {"vocab_size": VOCABULARY, **self.options, **changes}
        return getattr(flashcell, f"{self.family}Config")(**options)

    def model(self, head: str = "ForCausalLM", **changes: Any) -> PreTrainedModel:
        """Returns the model in eval mode, with biases that padding cannot hide behind."""
        model = getattr(flashcell, self.family + head)(self.config(**changes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter))
                elif self.stir and "initializer_range" not in changes:
                    parameter.add_(self.stir * torch.randn_like(parameter))
        return model


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_heads": 2}
MLP = {"gate_proj", "up_proj", "down_proj"}
REFERENCE = {"backend": "reference"}


def flash_rnn(**options: Any) -> Case:
    diagonal = options["cell"].startswith("flash_")
    paths: tuple[dict[str, Any], ...] = (REFERENCE, {"save": "recompute"})
    if diagonal:
        parallel = [{"method": method, **REFERENCE} for method in ("newton", "multiple_shooting")]
        paths = (
            REFERENCE,
            {"method": "sequential"},
            *parallel,
            {**parallel[0], "tol": 1e-3, "max_iters": 2},
        )
    projections = MLP | {"in_proj"} | ({"out_proj"} if diagonal else set())
    return Case("FlashRNN", {**SIZES, "initializer_range": 0.3, **options}, projections, paths)


def flash_mlstm(**options: Any) -> Case:
    wide = {"q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact"}
    wide |= {"proj_up_gate", "proj_up"}
    if options.get("weight_mode") == "fused":
        wide = {"qkv_opreact", "ifgate_preact", "proj_up_gate_z"}
    projections = wide | {"out_proj", "proj_down"}
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "norm_eps": 0.1,
    }  # so that no norm divides by next to nothing
    paths = REFERENCE, {"chunk_size": 3}
    return Case(
        "FlashMLSTM", {**sizes, **options}, projections, paths, 0.15, torch.float32, cancelled=2
    )


def flash_xlstm(**options: Any) -> Case:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "norm_eps": 0.01}
    projections = {"proj_up", "proj_down", "igate", "fgate"}
    paths = REFERENCE, {"chunk_size": 3}
    return Case("FlashXLSTM", {**sizes, **options}, projections, paths, 0.25, cancelled=2)


CASES = {
    "lstm": flash_rnn(cell="lstm"),
    "gru": flash_rnn(cell="gru"),
    "rnn": flash_rnn(cell="rnn"),
    "rnn-relu": flash_rnn(cell="rnn", nonlinearity="relu"),
    "slstm": flash_rnn(cell="slstm"),
    "flash_gru": flash_rnn(cell="flash_gru"),
    "flash_lstm": flash_rnn(cell="flash_lstm"),
    "flash_mlstm": flash_mlstm(),
    "flash_mlstm-sigmoid": flash_mlstm(input_gate="sigmoid", weight_mode="fused"),
    "flash_xlstm": flash_xlstm(slstm_at=[0]),
}


def state_tensors(cache: Any) -> list[torch.Tensor]:
    """Returns every state of every layer, with the batch first."""
    return [s for layer in cache.layers for group in layer.states.values() for s in group]


def blocks(model: nn.Module) -> nn.ModuleList:
    backbone = getattr(model, model.base_model_prefix, model)
    return getattr(backbone, backbone._blocks)


def kinds() -> list[str]:
    """Returns a case for each set of weights' names, which decides how it is saved, exported and
    sharded."""
    with torch.device("meta"):
        return list(
            {frozenset(case.model().state_dict()): name for name, case in CASES.items()}.values()
        )
