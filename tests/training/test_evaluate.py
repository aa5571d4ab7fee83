"""Tests scripts/evaluate: text scored token by token, by position, and a task of lm-eval without a
network."""

import copy
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import DEVICE
from evaluation.text import by_position, documents, held_out_texts, load, read_texts, score

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_cards/flash-rnn-python-5m"

TEXTS = ["def size(self):\n    return len(self.items)\n", "import os\n", "x = 'ä'\n" * 3]


@pytest.fixture(scope="module")
def checkpoint():
    return load(str(CHECKPOINT), DEVICE, "reference")


def nats_of(model, ids: list[int], first: int) -> float:
    """Returns the nats of ids[first:], each token given all before it."""
    ids = torch.tensor([ids], device=DEVICE)
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return nats[first - 1 :].sum().item()


def test_a_score_is_the_sum_over_documents(checkpoint):
    model, tokenizer = checkpoint
    found = score(model, tokenizer, TEXTS, 256)
    whole = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    expected = sum(nats_of(model, ids, 1) for ids in whole)
    assert found.predictions == sum(len(ids) - 1 for ids in whole)
    assert found.bytes == len("".join(TEXTS).encode())
    assert found.nats == pytest.approx(expected, rel=1e-6)  # observed 4e-8
    assert found.perplexity == pytest.approx(math.exp(expected / found.predictions), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / found.bytes, rel=1e-6)
    assert score(model, tokenizer, TEXTS, 3).nats == pytest.approx(found.nats, rel=1e-6)


def test_the_end_of_a_document_is_the_models_own(checkpoint):
    """The tokenizer's may be another, which the model was never trained to predict."""
    model, tokenizer = checkpoint
    other = copy.deepcopy(tokenizer)
    other.eos_token = other.convert_ids_to_tokens(7)
    assert other.eos_token_id != model.config.eos_token_id
    assert score(model, other, TEXTS, 256) == score(model, tokenizer, TEXTS, 256)


def test_positions_add_up(checkpoint):
    model, tokenizer = checkpoint
    rows = by_position(model, tokenizer, TEXTS, 8)
    found = score(model, tokenizer, TEXTS, 8)
    assert [row[:3] for row in rows[:2]] == [(0, 0, 3), (1, 2, 6)]
    assert sum(count for _, _, count, _ in rows) == found.predictions
    assert sum(count * nats for _, _, count, nats in rows) == pytest.approx(found.nats)
    firsts = [ids[1] for ids in documents(tokenizer, TEXTS)]
    begin = tokenizer.bos_token_id
    expected = sum(nats_of(model, [begin, int(ids)], 1) for ids in firsts) / 3
    assert rows[0][3] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_scored_is_refused(checkpoint, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer = checkpoint
    with pytest.raises(ValueError, match=r"has no recipe.yaml that says what was held out"):
        held_out_texts(str(tmp_path), None)
    (tmp_path / "recipe.yaml").write_text("python: 3.0\ncorpus_sha256: abc\nheld_out_in: 2\n")
    with pytest.raises(ValueError, match=r"sha256 [0-9a-f]+, but must be that of Python 3.0, abc"):
        held_out_texts(str(tmp_path), None)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"--text is .*empty.txt, but must hold text"):
        read_texts([tmp_path / "empty.txt"])
    (tmp_path / "binary.txt").write_bytes(b"ab\xb8")
    with pytest.raises(ValueError, match=r"^--text is .*, but .*binary.txt is not text in UTF-8"):
        read_texts([tmp_path / "binary.txt"])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=1, **sizes))
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a llama, but must be of one of flashcell's families"):
        load(str(tmp_path), DEVICE, "reference")

    class Lossy:
        bos_token_id, eos_token_id = None, 0

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[1] for _ in texts]}

        def decode(self, ids, clean_up_tokenization_spaces):
            return "?"

    with pytest.raises(ValueError, match=r"the tokenizer loses characters .* begins 'import os"):
        documents(Lossy(), TEXTS[1:])


def test_a_model_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    folder = shutil.copytree(CHECKPOINT, tmp_path / "model")
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    said = f"^the model is {folder}, but: {weights} is damaged: Error while deserializing header"
    with pytest.raises(ValueError, match=said):
        load(str(folder), DEVICE, "reference")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"^the model is nope, but: We couldn't connect .*files\.$"
    ):
        load("nope", DEVICE, "reference")


def test_files_of_a_folder_are_documents(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    assert read_texts([tmp_path]) == ["one", "two"]


def test_a_task_of_lm_eval_runs_offline(checkpoint, monkeypatch):
    """The harness's accuracy equals one counted here from sums of log-probabilities."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    import socket

    from evaluation.harness import local_tasks, run

    def refuse(*_, **__):
        raise AssertionError("a task that is defined locally asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model, tokenizer = checkpoint
    assert local_tasks() == ["python_lines"]
    rows = run(model, tokenizer, [("python_lines", None)], 512, 8, 12)
    ((task, shots, metric, value, _),) = rows
    assert (task, shots, metric) == ("python_lines", "0", "acc")
    from evaluation.tasks.python_lines import load as load_questions

    right = 0
    questions = load_questions()["test"].select(range(12))
    for row in questions:
        # lm-eval counts blanks as the beginning of an ending.
        known = len(tokenizer(row["text"].rstrip())["input_ids"])
        whole = [tokenizer(row["text"] + choice)["input_ids"] for choice in row["choices"]]
        nats = [nats_of(model, ids, known) for ids in whole]
        right += nats.index(min(nats)) == row["answer"]
    assert value == right / len(questions)
    assert value > 0.7  # four choices; observed 0.94 of all 32


def test_the_published_suite():
    from evaluation.harness import SUITES

    arc = [shots for task, shots in SUITES["pararnn"] if task == "arc_challenge"]
    assert arc == [25, 3]
    assert len(SUITES["pararnn"]) == 10


def evaluate(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts/evaluate", *arguments, "--here", "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash-rnn-python-5m", "flash-gru-python-5m"])
def test_the_card_says_what_is_measured(name):
    """Bits per byte of a shipped checkpoint on all of its held-out text."""
    folder = ROOT / "model_cards" / name
    done = evaluate("perplexity", str(folder), "--held-out")
    if "but must be that of Python" in done.stderr:
        pytest.skip("another standard library than the card's")
    assert done.returncode == 0, done.stderr
    card = (folder / "README.md").read_text()
    stated = re.search(r"bits per byte \| \*\*([\d.]+)\*\* \(([\d.]+) nats per token", card)
    assert f"bits per byte   {stated[1]}\n" in done.stdout
    assert f"nats per token  {stated[2]}\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks"], "exactly one of --suite and --tasks must be given"),
        (["tasks", "--suite", "pararnn", "--shots", "3"], "--shots is 3, but must be left out"),
        (
            ["lengths", "--text", __file__, "--corpus", __file__],
            "must be left out unless --held-out",
        ),
        (["perplexity"], "one of the arguments --text --held-out is required"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = evaluate(arguments[0], str(CHECKPOINT), *arguments[1:])
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_an_unknown_task_is_named(checkpoint):
    """Slow, because lm-eval reads all of its tasks first."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    from evaluation.harness import run

    with pytest.raises(ValueError, match="--tasks has no_such, but lm-eval has no such task"):
        run(*checkpoint, [("no_such", None)], 512, 8, None)
