"""Models whose linear layers have weights of 8 or 4 bits, which a decoding step reads in less time.

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantizationConfig("int8"))

A row n of a weight W [N, K] is kept as integers (or float8_e4m3fn) times one number:

    W_nk ~ scale_n q_nk,   scale_n = max_k |W_nk| / m,   q_nk = W_nk / scale_n, rounded to nearest

with m = 127 for int8 and 448, its largest value, for float8_e4m3fn. Of int4, q is from -8 to 7, and
every 32 neighbours in a row share a scale s in bf16, which may be negative:

    W ~ s q,   s = f max |W| / 7 or -f w / 8,   w the weight of the largest size, f = 0.7, 0.75 ... 1

whichever has the least squared error. The head of an int4 model gets int8. x is not rounded. Quantised
are all nn.Linear; embeddings, norms, gates, convolutions and recurrent weights stay as they are. Decoding
reads the narrow weights (decode_linear.py). Elsewhere x is multiplied by q of 8 bits and then by the
scale, and int4 is unpacked to x's dtype first.
"""

from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from .linear import INPUTS_OF_INT4, INT4, QuantizedLinear

METHOD = "flashcell"
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
CLASSIFIER = "score"  # the head of a classifier, which begins with random weights


class QuantizationConfig(QuantizationConfigMixin):
    """Says which weights of a model get 8 or 4 bits, for from_pretrained(quantization_config=...).

    weights                 "int8", "fp8" (float8_e4m3fn: closer for small values, coarser for large
                            ones) or "int4" (4.5 bits with scales; the head gets int8)
    modules_to_not_convert  names of linear layers that stay as they are, or of modules around them

    Adapters (peft's LoRA and DoRA; DoRA not with "fp8") are trained beside narrow weights, and merged
    into them only after `model.dequantize()`. Adapters that multiply the weight itself (HRA) need a
    dequantised model. `model.resize_token_embeddings` keeps the head's rows, and quantises new ones.

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


def linears_of(model: nn.Module, config: QuantizationConfig) -> dict[str, nn.Linear]:
    """Returns the layers that are quantised: those of exactly the class nn.Linear, by their names."""
    kept = (*config.modules_to_not_convert, CLASSIFIER)
    stays = lambda name: any(f".{part}." in f".{name}." for part in kept)
    found = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    return {name: m for name, m in found.items() if not stays(name)}


def dtype_of(config: QuantizationConfig, is_head: bool) -> torch.dtype:
    """Returns the dtype of a layer's weight. A head in int4 would cost as much accuracy as all other
    layers together."""
    return torch.int8 if is_head and config.weights == "int4" else DTYPES[config.weights]


def replace_linears(model: Any, config: QuantizationConfig, make: Any) -> None:
    """Puts make(module, dtype) in the place of every layer that is quantised.

    A head that shares its weight with the embedding gets a weight of its own."""
    head, found = model.get_output_embeddings(), linears_of(model, config)
    dtypes = {name: dtype_of(config, module is head) for name, module in found.items()}
    for name, module in found.items():
        if dtypes[name] == INT4 and module.in_features % INPUTS_OF_INT4:
            raise ValueError(
                f"weights is 'int4', but {name} has {module.in_features} inputs, which are no multiple of "
                f"{INPUTS_OF_INT4}: name it in modules_to_not_convert, or ask for 'int8'"
            )
    made = {name: make(module, dtypes[name]) for name, module in found.items()}
    for name, layer in made.items():  # now, so that a weight that is refused changes nothing
        owner, _, own = name.rpartition(".")
        layer.config = model.config
        setattr(model.get_submodule(owner), own, layer)
        if model.all_tied_weights_keys.pop(f"{name}.weight", None) is not None:
            model.config.tie_word_embeddings = False


@torch.no_grad()
def quantize_weights(model: Any, config: QuantizationConfig) -> Any:
    """Gives the linear layers of a model weights of 8 or 4 bits, in place, and returns it.

    It does to a model in memory what from_pretrained(..., quantization_config=config) does."""
    if not isinstance(config, QuantizationConfig):
        raise TypeError(f"config is a {type(config).__name__}, but must be a QuantizationConfig")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("model is quantised, but must have floating weights")
    quantizer = RecurrentQuantizer(config, pre_quantized=False)
    model = quantizer.postprocess_model(model) or model
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    return model


class RecurrentQuantizer(HfQuantizer):
    """Does what a QuantizationConfig says when transformers loads a model."""

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

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        # not config.dtype, which is a text after save_pretrained and the old one after .to()
        return super().dequantize(model, dtype=dtype or model.dtype)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        wide = dtype or model.dtype
        for name, layer in list(model.named_modules()):
            if not isinstance(layer, QuantizedLinear):
                continue
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, layer.floating(wide))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:  # with adapters: transformers refuses a model without
        return True


def check_trainable(model: Any) -> None:
    """Raises RuntimeError if a model is quantised, and has no parameter that can be trained."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, QuantizationConfig) and not any(
        w.requires_grad for w in model.parameters()
    ):
        raise RuntimeError(
            f"the model has weights in {config.weights}, and nothing in it can be trained: add "
            "adapters (LoRA), or load it without quantization_config"
        )


if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:  # an exported model may have registered it
    auto.register_quantization_config(METHOD)(QuantizationConfig)
    auto.register_quantizer(METHOD)(RecurrentQuantizer)
