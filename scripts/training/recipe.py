"""Reads training recipes: all settings that determine the results of a training run.

A file of scripts/recipes/ holds one, or several that share most values: under `variants`, a name and
what it changes. The name of the variant is then the name of the run.
"""

import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

POSITIVE = ("log_every", "evaluate_every", "checkpoint_every", "batch", "length", "steps")
POSITIVE += ("vocab_size",)
NOT_NEGATIVE = ("warmup", "cooldown", "micro_batch", "held_out_in", "final_learning_rate")
NOT_NEGATIVE += ("weight_decay", "z_loss")


@dataclass(frozen=True)
class Recipe:
    """The settings of one training run, from a file of scripts/recipes/."""

    name: str
    model: dict  # model_type, perhaps preset, and what else AutoConfig.for_model takes
    vocab_size: int
    seed: int
    batch: int  # rows of one step, over all devices
    length: int  # tokens of a row
    steps: int
    warmup: int  # steps of linear warm-up
    learning_rate: float
    final_learning_rate: float  # at the end of the cosine
    weight_decay: float
    clip: float  # largest norm of the gradient; .inf does not clip
    precision: str  # accelerate's: "no" or "bf16"
    log_every: int
    evaluate_every: int
    checkpoint_every: int
    # The text is either the standard library of one Python version, with whole files held out ...
    python: str = ""
    corpus_sha256: str = ""
    held_out_in: int = 0  # one document in so many is held out, by its hash
    # ... or what `datasets.load_dataset` loads (see training/documents.py).
    data: dict = field(default_factory=dict)
    tokenizer: str = ""  # a name on the Hub or a folder; without, one is trained on the text
    carry: bool = True  # the state goes on from a row to the next step's; else rows begin empty
    isolate: bool = True  # no document sees the one before it in its row
    micro_batch: int = 0  # rows a device takes at a time; 0 for all of its rows
    cooldown: int = 0  # the last so many steps: linear to 0
    dropout: float = 0.0  # on embeddings and on all that is added to the residual stream
    z_loss: float = 0.0  # factor of the mean square of log(sum(exp(logits)))
    betas: list = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    decay_embeddings: bool = True
    detached_decay: bool = False  # weights lose weight_decay times the schedule, whatever the rate
    gradient_checkpointing: bool = False

    @classmethod
    def read(cls, path: Path, overrides: list[str], variant: str | None = None) -> "Recipe":
        values = choose_variant(path, load(path), variant)
        names = {entry.name: entry.type for entry in fields(cls)}
        for override in overrides:
            name, _, value = override.partition("=")
            folder, _, key = name.rpartition(".")
            if (folder or key) not in names or folder not in ("", "model", "data"):
                raise ValueError(
                    f"--set {override}: a recipe has {', '.join(names)}, model.<key>, data.<key>"
                )
            target = values.setdefault(folder, {}) if folder else values
            target[key] = parse(value)
        needed = {
            entry.name
            for entry in fields(cls)
            if entry.default is MISSING and entry.default_factory is MISSING
        }
        wrong = (set(values) - set(names)) | (needed - set(values))
        if wrong:
            raise ValueError(f"{path}: missing or unknown {', '.join(sorted(wrong))}")
        if values["precision"] is False:
            values["precision"] = "no"  # YAML reads "no" as false
        for name in values:
            kind: Any = names[name]
            accepted = (int, float) if kind is float else kind
            wrong = isinstance(values[name], bool) and kind is not bool
            if wrong or not isinstance(values[name], accepted):
                raise ValueError(f"{path}: {name} is {values[name]!r}, but must be {kind.__name__}")
        recipe = cls(**values)
        recipe.check(path)
        return recipe

    def check(self, path: Path) -> None:
        if self.name in ("", ".", "..") or Path(self.name).name != self.name:
            raise ValueError(f"{path}: name is {self.name!r}, but must be that of a folder")
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{path}: {name} is {getattr(self, name)}, but must be at least 1")
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{path}: {name} is {getattr(self, name)}, but must be at least 0")
        for name in ("learning_rate", "eps", "clip"):
            if not getattr(self, name) > 0 or (name != "clip" and getattr(self, name) == math.inf):
                raise ValueError(f"{path}: {name} is {getattr(self, name)}, but must be above 0")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"{path}: seed is {self.seed}, but must be at least 0, below 2^64")
        number = lambda b: isinstance(b, (int, float)) and 0 <= b < 1
        if len(self.betas) != 2 or not all(map(number, self.betas)):
            raise ValueError(
                f"{path}: betas is {self.betas}, but must be two numbers from 0, below 1"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{path}: dropout is {self.dropout}, but must be at least 0, below 1")
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"{path}: precision is {self.precision!r}, but must be 'no' or 'bf16'")
        if bool(self.data) == bool(self.corpus_sha256):
            raise ValueError(f"{path}: exactly one of data and corpus_sha256 must be given")
        if self.warmup + self.cooldown > self.steps:
            raise ValueError(
                f"{path}: warmup + cooldown is {self.warmup + self.cooldown}, but must be at most "
                f"steps = {self.steps}"
            )
        if self.carry and not self.isolate:
            raise ValueError(f"{path}: carry is true, but must be false unless isolate is true")
        if self.carry and self.gradient_checkpointing:
            raise ValueError(
                f"{path}: carry is true, but must be false under gradient_checkpointing, which runs "
                "every block twice"
            )

    def write(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


def load(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is {values!r:.40}, but must be a recipe: names and values")
    return values


def parse(value: str) -> Any:
    """Parses a value as YAML, and also numbers that YAML reads as words, such as 1e-3."""
    loaded = yaml.safe_load(value)
    try:
        return float(loaded) if isinstance(loaded, str) else loaded
    except ValueError:
        return loaded


def choose_variant(path: Path, values: dict, variant: str | None) -> dict:
    """Returns the values of one variant; nested ones (`model`, `data`) are changed key by key."""
    variants = values.pop("variants", {})
    if variant not in variants and (variant or variants):
        raise ValueError(
            f"{path}: --variant is {variant}, but must be one of {', '.join(variants) or 'none'}"
        )
    values.pop("shared", None)  # anchors that variants refer to
    for name, value in variants.get(variant, {}).items():
        nested = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = values[name] | value if nested else value
    if variant:
        values["name"] = variant
    return values


def variants(path: Path) -> list[str | None]:
    """Returns the names that --variant accepts for a file; [None] if it holds one recipe."""
    return list(load(path).get("variants", {})) or [None]
