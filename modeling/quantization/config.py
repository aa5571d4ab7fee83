"""Models whose linear layers have weights of 8 bits, which a decoding step reads in half or a quarter of the time.

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=EightBitConfig("int8"))

A row n of a weight W [N, K] is kept as integers (or float8_e4m3fn) times one number:

    W_nk ~ scale_n q_nk,   scale_n = max_k |W_nk| / m,   q_nk = W_nk / scale_n, rounded to nearest

with m = 127 for int8 and 448, its largest value, for float8_e4m3fn. x is not rounded. Quantised are all
nn.Linear; embeddings, norms, gates, convolutions and recurrent weights stay as they are. Decoding reads
the 8 bits (decode_linear.py); everything else multiplies by q as x's dtype, and by scale after it.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from .linear import QuantizedLinear

METHOD = "flashcell"
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CLASSIFIER = "score"  # the head of a classifier, which begins with random weights


class EightBitConfig(QuantizationConfigMixin):
    """Says which weights of a model get 8 bits, for from_pretrained(quantization_config=...).

    weights                 "int8", or "fp8" (float8_e4m3fn: closer for small values, coarser for
                            large ones)
    modules_to_not_convert  names of linear layers that stay as they are, or of modules around them

    ValueError and TypeError name the argument, what it was and what it must be.
    """

    def __init__(
        self, weights: str = "int8", modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
    ):  # fmt: skip
        if not isinstance(weights, str) or weights not in DTYPES:
            raise ValueError(f"weights is {weights!r}, but must be one of {', '.join(DTYPES)}")
        kept = [] if modules_to_not_convert is None else modules_to_not_convert
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise TypeError(f"modules_to_not_convert is {kept!r}, but must be a list of names")
        if quant_method != METHOD:
            raise ValueError(f"quant_method is {quant_method!r}, but must be {METHOD!r}")
        self.quant_method: Any = quant_method
        self.weights, self.modules_to_not_convert = weights, kept


def linears_of(model: nn.Module, config: EightBitConfig) -> dict[str, nn.Linear]:
    """Returns the layers that get 8 bits: those of exactly the class nn.Linear, by their names."""
    kept = (*config.modules_to_not_convert, CLASSIFIER)
    stays = lambda name: any(f".{part}." in f".{name}." for part in kept)
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    return {name: m for name, m in found.items() if not stays(name)}


def replace_linears(model: Any, config: EightBitConfig, make: Any) -> None:
    """Puts make(module, dtype) in the place of every layer that gets 8 bits.

    A head that shares its weight with the embedding gets a weight of its own."""
    eight = DTYPES[config.weights]
    made = {name: make(module, eight) for name, module in linears_of(model, config).items()}
    for name, layer in made.items():  # now, so that a weight that is refused changes nothing
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, layer)
        if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
            model.config.tie_word_embeddings = False


@torch.no_grad()
def quantize_weights(model: Any, config: EightBitConfig) -> Any:
    """Gives the linear layers of a model 8 bits, in place, and returns it.

    It does to a model in memory what from_pretrained(..., quantization_config=config) does."""
    if not isinstance(config, EightBitConfig):
        raise TypeError(f"config is a {type(config).__name__}, but must be an EightBitConfig")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("model is quantised, but must have floating weights")
    quantizer = EightBitQuantizer(config, pre_quantized=False)
    model = quantizer.postprocess_model(model) or model
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    return model


class EightBitQuantizer(HfQuantizer):
    """Does what an EightBitConfig says when transformers loads a model."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if self.pre_quantized:
            replace_linears(model, self.quantization_config, QuantizedLinear.like)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if not self.pre_quantized:
            replace_linears(model, self.quantization_config, QuantizedLinear.of)
        for name, weight in model.named_parameters():  # adapters are trained, not the model itself
            weight.requires_grad_(name.startswith(f"{CLASSIFIER}."))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:  # with adapters: transformers refuses a model without
        return True


def check_trainable(model: Any) -> None:
    """Raises RuntimeError if a model has 8 bits, and no parameter that can be trained."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, EightBitConfig) and not any(w.requires_grad for w in model.parameters()):
        raise RuntimeError(
            f"the model has weights in {config.weights}, and nothing in it can be trained: add "
            "adapters (LoRA), or load it without quantization_config"
        )


if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:  # an exported model may have registered it
    auto.register_quantization_config(METHOD)(EightBitConfig)
    auto.register_quantizer(METHOD)(EightBitQuantizer)
