"""The base class of all families' configurations."""

import os
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class RecurrentConfig(PreTrainedConfig):
    """Base configuration of a recurrent model: tokens, head, cache and backend.

    Args:
        tie_word_embeddings: whether the head uses the embedding's weight.
        use_cache: whether a forward call returns the states to continue from.
        pad_token_id, bos_token_id, eos_token_id: as in every transformers configuration.
        backend: "auto", "cuda", "cpu" or "reference": who computes the recurrence.

    `backend`, and what else `run_time_fields` names, are choices at run time, not part of the
    model: they are never saved. A model trained by one path generates by another.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    run_time_fields: ClassVar[tuple[str, ...]] = ("backend",)
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Called whenever a configuration is made or copied; flashcell.configuration sets it.
    on_creation: ClassVar[Callable[[], object]] = dict
    # Called with the configuration and its folder before it is saved; set in the same place.
    on_saving: ClassVar[Callable[[Any, str], None]] = staticmethod(lambda config, folder: None)

    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    backend: Literal["auto", "cuda", "cpu", "reference"] = "auto"

    def __post_init__(self, **kwargs: Any) -> None:
        RecurrentConfig.on_creation()
        layer_types = kwargs.pop("layer_types", None)  # other programs save it
        if layer_types is not None and layer_types != self.layer_types:
            raise ValueError(
                f"layer_types is {layer_types}, but must be 'recurrent_state' for each of "
                f"{self.num_hidden_layers} layers, or not given"
            )
        super().__post_init__(**kwargs)
        if getattr(self, "auto_map", None) is None:
            self.auto_map: dict[str, str] = {}  # trl reads it from every configuration

    def __setstate__(self, state: dict[str, Any]) -> None:
        RecurrentConfig.on_creation()
        self.__dict__.update(state)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Any:
        """Returns the published configuration `name`, with `changes`."""
        if name not in cls.presets:
            raise ValueError(f"preset is {name!r}, but must be one of {', '.join(cls.presets)}")
        return cls(**{**cls.presets[name], **changes})

    def validate_layer_type(self):
        """Overrides the base class's check, which knows only transformers' own layer types."""

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer, by which DynamicCache and StaticCache choose the cache layer's
        class."""
        return ["recurrent_state"] * self.num_hidden_layers

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        for name in self.run_time_fields:
            output.pop(name, None)
        if not output.get("auto_map"):
            output.pop("auto_map", None)
        return output

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        if not os.path.isfile(save_directory):  # the base class refuses a file
            os.makedirs(save_directory, exist_ok=True)
            RecurrentConfig.on_saving(self, os.fspath(save_directory))
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing for an installed class, whose file cannot be used without its imports."""
        if not cls.__module__.startswith("flashcell."):
            super().register_for_auto_class(auto_class)

    def require_sizes(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")

    def require_positive(self, *names: str) -> None:
        for name in names:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be a positive, finite number"
                )
