"""A recipe: everything that decides the numbers of a training run."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Recipe:
    """A file of scripts/recipes/."""

    name: str
    model: dict  # arguments of AutoConfig.for_model, model_type among them
    vocab_size: int
    python: str  # whose standard library the corpus is
    corpus_sha256: str
    held_out_in: int  # one file in so many is held out
    seed: int
    batch: int  # lanes read side by side
    length: int  # tokens of a lane in one step; the state goes on from step to step
    steps: int
    warmup: int
    learning_rate: float
    final_learning_rate: float
    weight_decay: float
    clip: float  # of the gradient's norm
    precision: str  # accelerate's: "no" or "bf16"
    log_every: int
    evaluate_every: int
    checkpoint_every: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> "Recipe":
        values = yaml.safe_load(path.read_text())
        names = {field.name: field.type for field in fields(cls)}
        for override in overrides:
            name, _, value = override.partition("=")
            folder, _, key = name.rpartition(".")
            if (folder or key) not in names or folder not in ("", "model"):
                raise ValueError(f"--set {override}: a recipe has {', '.join(names)}, model.<key>")
            (values[folder] if folder else values)[key] = yaml.safe_load(value)
        wrong = set(names) ^ set(values)
        if wrong:
            raise ValueError(f"{path}: missing or unknown {', '.join(sorted(wrong))}")
        for name, kind in names.items():
            accepted = (int, float) if kind is float else kind
            if not isinstance(values[name], accepted):
                raise ValueError(f"{path}: {name} is {values[name]!r}, but must be {kind.__name__}")
        for name in ("log_every", "evaluate_every", "checkpoint_every", "batch", "length", "steps"):
            if values[name] < 1:
                raise ValueError(f"{path}: {name} is {values[name]}, but must be at least 1")
        return cls(**values)

    def write(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))
