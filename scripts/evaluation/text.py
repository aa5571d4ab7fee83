"""Measures a model's loss on text: on every token, given all of its document before it."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.weights import check_weights
from flashcell import QuantizationConfig  # importing flashcell registers the model families
from training.corpus import Lanes, collect_standard_library, held_out_lanes, load_corpus
from training.documents import read_text
from training.step import chunk_loss


@dataclass(frozen=True)
class Score:
    """The total loss in nats over `predictions` tokens (document ends included), and the text's
    bytes."""

    nats: float
    predictions: int
    bytes: int

    @property
    def per_token(self) -> float:
        return self.nats / self.predictions

    @property
    def perplexity(self) -> float:
        return math.exp(self.per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def load(name: str, device: str, backend: str, weights: str | None = None):
    """Loads a checkpoint of one of our families, in fp32, and its tokenizer; `weights` "int8", "fp8" or
    "int4" quantises its linear layers."""
    config = {} if weights is None else {"quantization_config": QuantizationConfig(weights)}
    try:
        check_weights(Path(name))  # transformers' error names no file
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **config)
    except (OSError, ValueError, SafetensorError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"the model is {name}, but: {why}") from error
    model = model.to(device).eval()
    if set(getattr(model.config, "layer_types", None) or ()) != {"recurrent_state"}:
        raise ValueError(
            f"{name} is a {model.config.model_type}, but must be of one of flashcell's families: "
            "text is read in pieces, and the state carried from one to the next"
        )
    model.config.backend = backend
    return model, tokenizer


def read_texts(paths: list[Path]) -> list[str]:
    """Reads files, and all files of folders in order of name, as one document each."""
    files = [f for p in paths for f in (sorted(p.rglob("*")) if p.is_dir() else [p])]
    try:
        texts = [read_text(file) for file in files if not file.is_dir()]
    except ValueError as error:
        raise ValueError(f"--text is {' '.join(map(str, paths))}, but {error}") from None
    if not any(texts):
        raise ValueError(f"--text is {' '.join(map(str, paths))}, but must hold text")
    return [text for text in texts if text]


def held_out_texts(model: str, corpus_file: Path | None) -> list[str]:
    """Returns the documents that the checkpoint's recipe.yaml held out of its training corpus."""
    path = Path(model) / "recipe.yaml"
    if not path.is_file():
        raise ValueError(f"{model} has no recipe.yaml that says what was held out: use --text")
    recipe = yaml.safe_load(path.read_text())
    corpus = load_corpus(corpus_file) if corpus_file else collect_standard_library()
    if corpus.sha256 != recipe.get("corpus_sha256"):
        raise ValueError(
            f"the corpus is the standard library of Python {corpus.python}, sha256 {corpus.sha256}, "
            f"but must be that of Python {recipe.get('python')}, {recipe.get('corpus_sha256')}: run "
            "it with that Python, or name a corpus that scripts/train --prepare-corpus wrote there"
        )
    return corpus.split(recipe["held_out_in"])[1]


def documents(tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encodes each text after the token that begins a document."""
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise ValueError("the tokenizer has neither bos_token nor eos_token, but must have one")
    found = []
    for text, ids in zip(
        texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True
    ):
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            raise ValueError(
                "the tokenizer loses characters of the text, but must keep all: what is not "
                f"predicted would not count; the text begins {text[:40]!r}"
            )
        found.append(np.array([begin, *ids]))
    return found


def lay_out(model, tokenizer, texts: list[str]) -> Lanes:
    """Arranges whole documents in lanes; the last prediction of each is its end.

    It is the model's own, if the configuration has one: the tokenizer's may be another."""
    end = model.config.eos_token_id
    if not isinstance(end, int):
        end = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return held_out_lanes(documents(tokenizer, texts), end)


@torch.no_grad()
def token_losses(model, lanes: Lanes, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, for `length` tokens of every lane at a time, positions in the documents and nats."""
    carried = None
    # A terminal gets a progress bar, a log a line from time to time.
    often = 0.1 if sys.stderr.isatty() else 20
    for index in tqdm(range(lanes.chunks(length)), unit="chunk", mininterval=often):
        chunk = lanes.chunk(index, length)
        nats, carried = chunk_loss(model, chunk, carried, "none")
        scored = (chunk[2] != -100).flatten()
        yield chunk[1].flatten()[scored], nats.double().cpu().numpy()[scored]


def score(model, tokenizer, texts: list[str], length: int) -> Score:
    parts = [nats for _, nats in token_losses(model, lay_out(model, tokenizer, texts), length)]
    nats = np.concatenate(parts)
    return Score(float(nats.sum()), len(nats), sum(len(text.encode()) for text in texts))


def by_position(
    model, tokenizer, texts: list[str], length: int
) -> list[tuple[int, int, int, float]]:
    """Averages the loss by position: rows (first, last, tokens, nats per token) for 2^k - 1 to
    2^(k+1) - 2. It shows whether the model still works beyond its training length."""
    counts, sums = np.zeros(64), np.zeros(64)
    for positions, nats in token_losses(model, lay_out(model, tokenizer, texts), length):
        octave = np.log2(positions + 1).astype(int)
        counts += np.bincount(octave, minlength=64)
        sums += np.bincount(octave, nats, minlength=64)
    return [
        (2**k - 1, 2 ** (k + 1) - 2, int(counts[k]), sums[k] / counts[k])
        for k in np.flatnonzero(counts)
    ]
