"""Tests that a saved conversation continues as if it had not been saved."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, StaticCache

from cases import DEVICE
from decode_cases import greedy
from flashcell.state.rows import state_shapes
from flashcell.state.serialization import FORMAT, _digest, read_state
from model_cases import state_tensors

CONTINUE = """
import sys, torch, flashcell
folder, new, device = sys.argv[1:]
model = flashcell.FlashRNNForCausalLM.from_pretrained(folder).to(device)
text = torch.load(f"{folder}/text.pt").to(model.device)
cache = model.load_state(f"{folder}/talk.safetensors")
out = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache,
                     max_new_tokens=int(new), do_sample=False, pad_token_id=0)
torch.save(out.cpu(), f"{folder}/continued.pt")
"""


@pytest.fixture
def talk(make_model, tokens):
    model = make_model()
    with torch.no_grad():
        return model, model(tokens(2, 7)).past_key_values


def test_another_process_goes_on(make_model, tokens, tmp_path):
    model, ids = make_model("slstm"), tokens(2, 5)
    want = greedy(model, ids, new=20)
    cache = DynamicCache(config=model.config)
    text = greedy(model, ids, new=8, past_key_values=cache)
    model.save_pretrained(tmp_path)
    model.save_state(cache, tmp_path / "talk.safetensors")
    torch.save(text.cpu(), tmp_path / "text.pt")
    subprocess.run([sys.executable, "-c", CONTINUE, tmp_path, "12", DEVICE], check=True)
    assert torch.equal(torch.load(tmp_path / "continued.pt"), want.cpu())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_states_come_back_bit_by_bit(make_model, tokens, tmp_path, kind):
    model = make_model("slstm").bfloat16()
    static = StaticCache(config=model.config, max_cache_len=8)
    cache = static if kind == "static" else DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(3, 6), past_key_values=cache)
        model(tokens(3, 1), past_key_values=cache)
    model.save_state(cache, tmp_path / "state")
    loaded = model.load_state(tmp_path / "state")
    assert loaded.get_seq_length() == 7
    for old, new in zip(cache.layers, loaded.layers, strict=True):
        assert old.states.keys() == new.states.keys()
        for name in old.states:
            assert all(map(torch.equal, old.states[name], new.states[name]))


def test_a_file_is_whole_or_not_there(talk, tmp_path, monkeypatch):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    model.save_state(cache, path)
    before = path.read_bytes()
    cache.reorder_cache(torch.tensor([1, 0]))

    def crash(*_, **__):
        raise OSError(28, "disk full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match=f"disk full: '{path}'"):
        model.save_state(cache, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(DEVICE != "cpu", reason="a forked process has no GPU")
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_what_a_kill_leaves_behind_goes_with_the_next_save(talk, tmp_path, monkeypatch, moment):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    model.save_state(cache, path)
    before = path.read_bytes()
    process = os.fork()
    if process == 0:
        try:
            monkeypatch.setattr(os, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            model.save_state(cache, path)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == before
    model.save_state(cache, path)
    assert os.listdir(tmp_path) == [path.name]
    model.load_state(path)


def test_what_is_no_state_of_the_model(talk, make_model, tmp_path):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    with pytest.raises(ValueError, match="cache is empty"):
        model.save_state(DynamicCache(config=model.config), path)
    with pytest.raises(
        ValueError, match="cache is empty"
    ):  # states of no tokens, which no load accepts
        model.save_state(model(torch.zeros(1, 0, dtype=torch.long)).past_key_values, path)
    llama = DynamicCache()
    llama.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
    with pytest.raises(TypeError, match="cache has a DynamicLayer"):
        model.save_state(llama, path)
    with pytest.raises(TypeError, match="cache is a str, but must be a Cache"):
        model.save_state("talk", cache)
    model.save_state(cache, path)
    others = {
        "cell.0 is \\[2, 2, 16\\] torch.float32, but must be \\[2, 4, 8\\]": make_model(
            num_heads=4
        ),
        "without \\[\\], but with \\['layers.0.cell.1'": make_model("gru"),
        "without \\['layers.2.cell.0'": make_model(num_hidden_layers=3),
        "torch.float32, but must be .* torch.float64": make_model().double(),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            other.load_state(path)
        with pytest.raises(ValueError, match=message):
            other.save_state(cache, path)


def test_what_is_no_state_file(talk, tmp_path):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    model.save_state(cache, path)
    tensors, good = load_file(path), {**FORMAT, "model_type": "flash_rnn", "tokens": "7"}
    changes = {
        "model_type is 'llama', but must be 'flash_rnn'": {"model_type": "llama"},
        "version is '2', but must be '1'": {"version": "2"},
        "tokens is '0', but must be a number of at least 1": {"tokens": "0"},
        "tokens is 'many'": {"tokens": "many"},
        "tokens is '1000000000000000000'": {"tokens": "1" + "0" * 18},
    }
    for message, change in changes.items():
        metadata = {**good, **change}
        save_file(tensors, path, {**metadata, "sha256": _digest(metadata, tensors)})
        with pytest.raises(ValueError, match=message):
            model.load_state(path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="format is None"):
        model.load_state(path)
    save_file(tensors, path, good)
    with pytest.raises(ValueError, match=r"sha256 is None, but must be '\w{64}': the file is dam"):
        model.load_state(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="must be a saved state"):
        model.load_state(path)
    with pytest.raises(FileNotFoundError):
        model.load_state(Path(tmp_path, "none"))


def test_what_was_loaded_is_no_part_of_the_file(talk, tmp_path):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    model.save_state(cache, path)
    loaded = model.load_state(path)
    with open(path, "rb+") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(9)
    assert all(map(torch.equal, state_tensors(loaded), state_tensors(cache)))


@pytest.mark.parametrize("flips", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_changes_nothing(talk, tmp_path, flips):
    model, cache = talk
    path, draw = tmp_path / "talk.safetensors", random.Random(1)
    model.save_state(cache, path)
    good, loaded, refused = path.read_bytes(), 0, []
    begin = int.from_bytes(good[:8], "little") + 8  # where the data begin
    for i in range(flips):
        bad = bytearray(good)
        bad[draw.randrange(begin if i % 2 else len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            other = model.load_state(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        loaded += 1
        assert other.get_seq_length() == cache.get_seq_length()
        assert all(map(torch.equal, state_tensors(other), state_tensors(cache)))
    assert loaded < flips / 10
    assert all(str(path) in message for message in refused)


def test_what_is_no_file_of_any_kind(talk, tmp_path):
    model, _ = talk
    path = tmp_path / "talk.safetensors"
    huge = b"\xff" * 7 + b"\x7f" + b"{}" * 40
    header = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    for content in (b"", b"\0" * 7, huge, len(header).to_bytes(8, "little") + header, b"[" * 10**6):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"talk\.safetensors.*must be a saved state"):
            model.load_state(path)
    path.unlink()
    os.mkfifo(path)  # nobody writes there: opening it the usual way would wait for ever
    for special in (path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="must be a saved state: it is no regular file"):
            model.load_state(special)
    opened = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(IsADirectoryError, match=re.escape(f"{tmp_path}', but must be a saved")):
            model.load_state(tmp_path)
    assert len(os.listdir("/dev/fd")) == opened


def test_what_is_no_path(talk, tmp_path):
    model, cache = talk
    wrong = {"path is a NoneType": None, "path is a bytes": b"talk", "path is a int": 3}
    for message, path in wrong.items():
        with pytest.raises(TypeError, match=f"^{message}, but must be a str or"):
            model.save_state(cache, path)
        with pytest.raises(TypeError, match=f"^{message}, but must be a str or"):
            model.load_state(path)
    for path in ("", "/", tmp_path):
        with pytest.raises((ValueError, IsADirectoryError), match=r"path is .*, but must be"):
            model.save_state(cache, path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_file_that_was_there(talk, tmp_path):
    model, cache = talk
    path = tmp_path / "talk.safetensors"
    model.save_state(cache, path)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            model.save_state(cache, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_tokens_are_kept(make_model, tmp_path, tokens):
    """A file holds the tokens that its state has read, if they were given."""
    model, ids = make_model(), tokens(1, 7)
    cache = model(ids).past_key_values
    model.save_state(cache, tmp_path / "with", input_ids=ids)
    model.save_state(cache, tmp_path / "without")
    shapes = state_shapes(model)
    loaded, read = read_state(model.config, tmp_path / "with", shapes)
    assert read == ids[0].tolist()
    assert read_state(model.config, tmp_path / "without", shapes)[1] is None
    for got, want in zip(state_tensors(loaded), state_tensors(cache), strict=True):
        assert torch.equal(got.to(want.device), want)
    for wrong in (ids[0, :6], ids.float(), tokens(7, 1)):
        with pytest.raises(ValueError, match="but must be the 7 token ids that the cache has read"):
            model.save_state(cache, tmp_path / "wrong", input_ids=wrong)
    two = model(tokens(2, 7)).past_key_values
    with pytest.raises(ValueError, match="a cache of 2 rows, but it must have one"):
        model.save_state(two, tmp_path / "wrong", input_ids=ids)
    assert not (tmp_path / "wrong").exists()
