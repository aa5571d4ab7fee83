"""Tests the states kept by the tokens that they have read: right ones, shared, bounded, on disk."""

import os
import random
import time

import pytest
import torch
from transformers import DynamicCache

from flashcell.state.disk_states import StateFolder
from flashcell.state.prefix_states import PrefixStates, model_identity
from flashcell.state.rows import named_states, state_shapes

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(scope="module")
def state_after(model):
    def run(ids: list[int]) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=cache)
        return cache

    return run


@pytest.fixture
def states(model):
    return PrefixStates(b"m" * 32, model.config, CPU, 0, 64 * MIB)


def length(state) -> int:
    return 0 if state is None else state.get_seq_length()


def test_the_longest_beginning_is_found(states, state_after):
    draw = random.Random(0)
    text = [draw.randrange(3000) for _ in range(400)]
    for n in (16, 63, 64, 65, 128, 200, 300):
        states.keep(torch.tensor(text[:n]), state_after(text[:n]))
    for n in range(1, 400, 7):
        want = max((k for k in (16, 63, 64, 65, 128, 200, 300) if k < n), default=0)
        assert length(states.find(text[:n])) == want, n
    other = [*text[:250], 5 if text[250] != 5 else 6, *text[251:]]
    assert length(states.find(other)) == 200
    assert states.find([9, *text]) is None
    assert states.find(text[:15]) is None
    states.keep(torch.tensor(text[:5]), state_after(text[:5]))
    assert states.find(text[:7]) is None, "a few tokens are not worth it"


def test_random_texts_against_a_table(states, state_after):
    """What is found is what a search of all kept beginnings finds."""
    draw, kept = random.Random(1), {}
    state = state_after([1] * 20)
    for _ in range(300):
        text = [draw.randrange(2) for _ in range(draw.randrange(16, 40))]
        text = [7] * 64 * draw.randrange(3) + text
        if tuple(text) not in kept:
            kept[tuple(text)] = len(text)
            states.keep(torch.tensor(text), state)
    for _ in range(2000):
        text = [7] * 64 * draw.randrange(3) + [draw.randrange(2) for _ in range(draw.randrange(60))]
        ends = [n for n in range(len(text)) if tuple(text[:n]) in kept]
        saved = states.tokens_saved
        found = states.find(text)
        assert (found is not None) == bool(ends)
        assert states.tokens_saved - saved == max(ends, default=0)


def test_a_collision_gives_nothing_away(states, state_after, monkeypatch):
    """With a digest that is always the same, only the very tokens give a state."""
    monkeypatch.setattr(PrefixStates, "_digest", lambda self, tokens: b"same")
    mine, theirs = [3] * 20, [4] * 20
    states.keep(torch.tensor(mine), state_after(mine))
    states._count(next(iter(states._lengths)), 20, 1)
    assert states.find([*theirs, 1]) is None
    assert length(states.find([*mine, 1])) == 20


def test_budgets(model, state_after):
    """Device states move to host memory, host states are dropped, the least recently used first."""
    ids = [[i] * 20 for i in range(12)]
    state = state_after(ids[0])
    size = sum(s.nbytes for s in named_states(state).values()) + 80 + 1024
    states = PrefixStates(b"m" * 32, model.config, CPU, 0, 6 * size)
    states.budgets[True] = 3 * size  # as on a GPU
    for one in ids:
        states.keep(torch.tensor(one), state_after(one))
        states.find([*ids[0], 1])
    known = [i for i, one in enumerate(ids) if states.find([*one, 1]) is not None]
    assert known == [0, 4, 5, 6, 7, 8, 9, 10, 11]
    assert states.used == {True: 3 * size, False: 6 * size}
    for i in known:
        got, want = states.find([*ids[i], 1]), state_after(ids[i])
        for a, b in zip(named_states(got).values(), named_states(want).values(), strict=True):
            assert torch.equal(a, b)
    states.budgets = {True: 0, False: 0}
    states.keep(torch.tensor([5] * 30), state_after([5] * 30), pinned=True)
    assert length(states.find([5] * 40)) == 30, "what was put in stays"
    assert len(states) == 1
    assert list(states._lengths.values()) == [{30: 1}]


def test_common_beginnings_are_cut(states):
    shared = list(range(200))
    assert states.cuts([*shared, *[7] * 50], 0) == [250]
    assert states.cuts([*shared, *[8] * 70], 0) == [192, 270]
    assert states.cuts([*shared, *[9] * 70], 192) == [270]
    assert states.cuts([1, 2, 3], 0) == []


def make_folder(tmp_path, model, budget=64 * MIB) -> tuple[PrefixStates, StateFolder]:
    identity = model_identity(model)
    folder = StateFolder(tmp_path, identity, model.config, state_shapes(model), budget)
    return PrefixStates(identity, model.config, CPU, 0, 64 * MIB, folder), folder


def test_the_disk(model, state_after, tmp_path):
    """The next process finds them; damaged and exchanged files are not used; the budget holds."""
    texts = [[i] * (20 + i) for i in range(8)]
    states, folder = make_folder(tmp_path, model)
    for text in texts:
        states.keep(torch.tensor(text), state_after(text))
    folder.close()
    files = sorted(folder.place.iterdir())
    assert len(files) == 8
    assert not any(os.stat(file).st_mode & 0o077 for file in files)
    size = files[0].stat().st_size
    again, folder = make_folder(tmp_path, model)
    for text in texts:
        state = again.find([*text, 1])
        assert length(state) == len(text)
        for a, b in zip(
            named_states(state).values(), named_states(state_after(text)).values(), strict=True
        ):
            assert torch.equal(a, b)
    folder.close()
    raw = bytearray(files[0].read_bytes())
    raw[-1] ^= 1
    files[0].write_bytes(raw)
    files[1].write_bytes(files[2].read_bytes())
    files[3].write_bytes(b"")
    again, folder = make_folder(tmp_path, model)
    found = [again.find([*text, 1]) is not None for text in texts]
    assert found == [False, False, True, False, True, True, True, True]
    assert folder.damaged == 3
    assert len(list(folder.place.iterdir())) == 5
    folder.close()
    for i, file in enumerate(sorted(folder.place.iterdir())):
        os.utime(file, (i, i))
    again, folder = make_folder(tmp_path, model, int(3.5 * size))
    assert len(list(folder.place.iterdir())) == 3
    folder.close()


def test_other_weights_find_nothing(model, state_after, tmp_path):
    states, folder = make_folder(tmp_path, model)
    text = [5] * 30
    states.keep(torch.tensor(text), state_after(text))
    folder.close()
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[0, 0] += 1
    try:
        again, folder = make_folder(tmp_path, model)
        assert again.find([*text, 1]) is None
        folder.close()
    finally:
        with torch.no_grad():
            weight[0, 0] -= 1


def turns(served, alone, question: str, options: dict) -> list[dict]:
    """Holds a conversation of three turns; returns the usage of each.

    Each answer is what generate gives for the whole conversation."""
    talk, parts, usages = [], [], []
    for said in (question, "def write_file(path):", "import os"):
        talk.append({"role": "user", "content": said})
        parts.append(f"# user\n{said}\n")
        answer = served.post("/v1/chat/completions", messages=talk, **options).json()
        text = answer["choices"][0]["message"]["content"]
        assert text == alone([*parts, "# assistant\n"], options["max_tokens"])[0]
        usages.append(answer["usage"])
        talk.append({"role": "assistant", "content": text})
        parts.append(f"# assistant\n{text}\n")
    return usages


def check_only_new_tokens_read(usages: list[dict]) -> None:
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    for before, after, held in zip(usages, usages[1:], cached[1:], strict=False):
        # at least all that was read before, and the answer too if it has the same tokens again
        assert before["prompt_tokens"] <= held < after["prompt_tokens"]


def test_the_next_turn_reads_only_its_new_tokens(served, alone):
    question = "def read_file(path):\n" + "    # reads it all\n" * 30
    names = "prompt_tokens_total", "cached_tokens_total"
    before = [served.metric(name) for name in names]
    usages = turns(served, alone, question, {"temperature": 0, "max_tokens": 24})
    assert usages[0]["prompt_tokens"] > 150
    check_only_new_tokens_read(usages)
    read, cached = (served.metric(n) - b for n, b in zip(names, before, strict=True))
    assert read == sum(usage["prompt_tokens"] for usage in usages)
    assert read - cached < usages[-1]["prompt_tokens"] + 60


def test_a_saved_state_is_put_in(start, model, state_after, tokenizer, tmp_path):
    ids = tokenizer("import os\n" * 30)["input_ids"]
    model.save_state(state_after(ids), tmp_path / "state", input_ids=ids)
    one = start("--prefix-state", tmp_path / "state", "--slots", 2)
    answer = one.post(prompt=[*ids, 7, 8], max_tokens=2).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids)


@pytest.mark.slow
def test_the_second_turn_starts_at_once(start, alone):
    """Also after 4,096 tokens, which take seconds to read."""
    one = start("--slots", 4)
    question = "def read_file(path):\n" + "    # reads it all\n" * 700
    usages = turns(one, alone, question, {"temperature": 0, "max_tokens": 24})
    assert usages[0]["prompt_tokens"] > 4096
    check_only_new_tokens_read(usages)
    ids = [5 + i % 900 for i in range(4096)]

    def first(prompt) -> float:
        began = time.perf_counter()
        one.text(prompt, max_tokens=1)
        return time.perf_counter() - began

    first(ids[:100])
    cold = first(ids)
    assert first([*ids, 7]) < cold / 5
