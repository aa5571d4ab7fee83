"""Tests text of `datasets` as rows: documents are separate, none is lost, and a resumed run reads
on."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from train_cases import TEXTS, text_recipe, write_text
from training import documents as training_documents
from training.documents import (
    DatasetTexts,
    Documents,
    Rows,
    digest_of,
    local_files,
    local_text,
)
from training.recipe import Recipe
from training.step import check_isolation, chunk_loss


@pytest.fixture(params=["table", "stream"])
def recipe(request, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = Recipe(**text_recipe(write_text(tmp_path / "text"), carry=False))
    recipe.data["streaming"] = request.param == "stream"
    return recipe


class Letters:
    """A tokenizer of bytes; 0 begins a document."""

    bos_token_id = 0

    def __call__(self, texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}


def rows(recipe, rank=0, world=1, count=3, length=50) -> Rows:
    return Rows(Documents(recipe, rank, world), Letters(), count, length, recipe.carry)


def take(source: Rows, count: int) -> list:
    return list(itertools.islice(source.chunks(), count))


def test_an_epoch_is_every_document_that_is_not_held_out_once(recipe):
    documents = Documents(recipe)
    held_out = documents.held_out()
    assert 0 < len(held_out) < len(TEXTS)
    training = sorted(set(TEXTS) - set(held_out))
    for _ in range(2):
        epoch = list(itertools.islice(documents, len(training)))
        assert sorted(epoch) == training
    shares = [list(itertools.islice(Documents(recipe, rank, 2), 5)) for rank in range(2)]
    assert not set(shares[0]) & set(shares[1])


def test_rows_are_documents_end_to_end(recipe):
    chunks = [chunk for chunk, _ in take(rows(recipe), 8)]
    tokens, positions, targets = (np.concatenate(parts, 1) for parts in zip(*chunks, strict=True))
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    starts = tokens == 0
    starts[:, ::50] = True  # a row begins with an empty state
    assert ((positions == 0) == starts).all()
    assert (np.diff(positions)[~starts[:, 1:]] == 1).all()
    for row in tokens:
        whole = bytes(row.astype(np.uint8)).split(b"\0")[1:-1]
        assert whole
        assert {text.decode() for text in whole} <= set(TEXTS)


def test_carried_rows_go_on(recipe):
    carried = Recipe(**{**vars(recipe), "carry": True})
    chunks = [chunk for chunk, _ in take(rows(carried), 8)]
    tokens, positions, _ = (np.concatenate(parts, 1) for parts in zip(*chunks, strict=True))
    assert ((positions == 0) == (tokens == 0)).all()


@pytest.mark.parametrize("at", [1, 4, 9])
def test_it_reads_on_where_it_stood(recipe, at, monkeypatch):
    monkeypatch.setattr(training_documents, "AT_A_TIME", 3)
    whole = take(rows(recipe), 20)  # several epochs
    again = rows(recipe)
    again.load(whole[at - 1][1])
    for (want, _), (got, _) in zip(whole[at:], take(again, 20 - at), strict=True):
        assert all((a == b).all() for a, b in zip(want, got, strict=True))


def test_the_state_is_that_of_the_last_chunk_taken(recipe, tmp_path):
    """Chunks are made ahead, in a thread."""
    texts = DatasetTexts(recipe, tmp_path / "tokenizer")
    for step in range(5):
        texts.training_chunk(step)
    state = texts.state()
    want = texts.training_chunk(5)[0]
    again = DatasetTexts(recipe, tmp_path / "tokenizer")
    again.load(state)
    assert all((a == b).all() for a, b in zip(want, again.training_chunk(5)[0], strict=True))


def test_text_that_is_all_held_out_is_named(recipe):
    documents = Documents(replace(recipe, held_out_in=1))
    assert documents.held_out()
    with pytest.raises(ValueError, match="data has no training document for process 0"):
        next(iter(documents))


def test_an_epoch_may_end_where_a_run_is_resumed(recipe):
    documents = Documents(recipe)
    count = sum(1 for _ in TEXTS) - len(documents.held_out())
    list(itertools.islice(documents, count))
    again = Documents(recipe)
    again.state = documents.state
    assert next(iter(again)) == next(iter(documents))


def test_paragraphs_of_a_file_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    data = local_text(tmp_path / "text.txt")
    recipe = Recipe(**text_recipe(tmp_path, carry=False, data=data))
    documents = Documents(recipe)
    held_out = documents.held_out()
    assert held_out
    epoch = list(itertools.islice(documents, len(TEXTS) - len(held_out)))
    assert sorted(t.strip() for t in (*epoch, *held_out)) == sorted(t.strip() for t in TEXTS)


def test_an_error_of_the_thread_is_shown(recipe, tmp_path):
    texts = DatasetTexts(recipe, tmp_path / "tokenizer")
    recipe.data["column"] = "words"
    texts.documents.column = "words"
    with pytest.raises(KeyError, match="words"):
        texts.training_chunk(0)


def test_local_text_must_be_there(tmp_path):
    with pytest.raises(ValueError, match="must be a file or a folder with files"):
        local_text(tmp_path)
    with pytest.raises(ValueError, match="must be a file or a folder with files"):
        local_text(tmp_path / "nothing")


def test_names_are_no_patterns(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "text").mkdir()
    names = ("page[1].txt", "page1.txt", "a*.txt", "ab.txt")
    for name in names:
        (tmp_path / "text" / name).write_text(f"the text of {name}")
    data = local_text(tmp_path / "text")
    assert {file.name for file in local_files(data)} == set(names)
    documents = Documents(Recipe(**text_recipe(tmp_path, carry=False, data=data, held_out_in=1)))
    assert sorted(documents.held_out()) == sorted(f"the text of {name}" for name in names)
    before = digest_of(local_files(data))
    (tmp_path / "text" / "ab.txt").write_text("another text")
    assert digest_of(local_files(data)) != before
    (tmp_path / "text" / "a::b.txt").touch()
    with pytest.raises(ValueError, match="no name may have ::"):
        local_text(tmp_path / "text")


def test_a_process_without_documents_waits_for_the_next_epoch(recipe):
    """Eight processes share few documents: in some epochs one of them has none."""
    if Documents(recipe).streams:
        pytest.skip("a stream is not dealt out anew")
    for rank in range(8):
        documents = Documents(recipe, rank, 8)
        documents.table = documents.table.select(range(12))
        assert len(list(itertools.islice(documents, 40))) == 40
    documents.table = documents.table.select(range(7))  # no epoch has one for the eighth process
    with pytest.raises(ValueError, match="no training document for process 7"):
        next(iter(documents))


SMALL = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
ISOLATED = {
    "flash_rnn": {"num_heads": 2, "intermediate_size": 16, "backend": "reference"},
    "flash_mlstm": {"num_heads": 2, "qk_dim_factor": 1.0, "backend": "reference"},
    "llama": {"num_attention_heads": 2, "intermediate_size": 16},
}


@pytest.mark.parametrize("kind", ISOLATED)
def test_documents_of_a_row_are_kept_apart(kind):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **ISOLATED[kind]))
    check_isolation(model)
    tokens = np.arange(8)[None]
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 2]])
    options = {"carry": False, "isolate": True, "reduction": "none"}
    row, _ = chunk_loss(model, (tokens, positions, tokens), None, **options)
    alone, _ = chunk_loss(
        model, tuple(x[:, 5:] for x in (tokens, positions, tokens)), None, **options
    )
    torch.testing.assert_close(row[5:], alone, rtol=1e-5, atol=1e-5)


def test_a_model_that_leaks_is_refused():
    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    config = AutoConfig.for_model("mamba2", **SMALL, **sizes)
    with pytest.raises(ValueError, match="isolate is true, but must be false: mamba2 lets"):
        check_isolation(AutoModelForCausalLM.from_config(config))
