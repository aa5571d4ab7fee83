"""Tests that every request in a batch gets what it would get alone."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

import flashcell
from flashcell import Batcher, Request, generate_many
from flashcell.generation.slots import Batch
from model_cases import CASES, state_tensors
from serving_cases import alone, collect

LENGTHS = (1, 2, 63, 64, 65, 200, 256, 257, 290, 5)

pytestmark = pytest.mark.usefixtures("read_at_once_and_late")


@pytest.mark.thin
def test_greedy_is_generate(case, make_model, tokens):
    model = make_model(case)
    prompts = [tokens(n) for n in LENGTHS]
    limits = [3 + 5 * i for i in range(len(prompts))]
    requests = [Request(p, max_new_tokens=n) for p, n in zip(prompts, limits, strict=True)]
    got = collect(generate_many(model, requests, slots=3, prefill_rows=2, prefill_chunk=64))
    assert len(got) == len(prompts)
    for i, prompt in enumerate(prompts):
        assert got[i] == alone(model, prompt, new=limits[i]), i


def test_end_tokens(make_model, tokens):
    model = make_model()
    prompts = [tokens(n) for n in (4, 7, 30)]
    texts = [alone(model, p, new=30) for p in prompts]
    model.generation_config.eos_token_id = texts[0][3]
    results = {c.index: c for c in generate_many(model, prompts, max_new_tokens=30, slots=2)}
    for i, text in enumerate(texts):
        end = model.generation_config.eos_token_id
        want = text[: text.index(end) + 1] if end in text else text
        assert results[i].tokens == want
        assert results[i].reason == ("stop" if end in text else "length")
    ends = [texts[1][5], 1000]
    for given in (ends, torch.tensor(ends)):
        (other,) = generate_many(model, [Request(prompts[1], 30, eos_token_id=given)])
        assert other.tokens == texts[1][: texts[1].index(texts[1][5]) + 1]


def test_sampling_has_a_generator_a_request(make_model, tokens):
    model = make_model()
    prompts = [tokens(n) for n in (3, 40, 9)]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    requests = [Request(p, 12, seed=i, **options) for i, p in enumerate(prompts)]
    got = collect(generate_many(model, requests, slots=2))
    for i, prompt in enumerate(prompts):
        # On other devices a batch of one draws other random numbers.
        if prompt.device.type == "cpu":
            torch.manual_seed(i)
            assert got[i] == alone(model, prompt, new=12, **options)
    assert got == collect(generate_many(model, requests, slots=2))
    unseeded = [Request(prompts[0], 12, do_sample=True) for _ in range(3)]
    texts = collect(generate_many(model, unseeded, slots=2)).values()
    assert len({tuple(t) for t in texts}) > 1


class Record:
    """Records the scores from which a request's tokens were chosen."""

    def __init__(self):
        self.scores = []

    def __call__(self, ids, scores):
        self.scores.append(scores.clone())
        return scores


@pytest.mark.thin
def test_neighbours_do_not_change_a_bit(case, make_model, tokens):
    """Other requests, another slot and another prefill row leave the logits bitwise the same."""
    widths = {"hidden_size": 64, "vocab_size": 64}
    if "intermediate_size" in CASES[case].options:
        widths["intermediate_size"] = 128
    model, prompt = make_model(case, **widths), tokens(70)

    def scores(before: int, after: int) -> torch.Tensor:
        record = Record()
        others = [Request(tokens(1 + 37 * i % 90), 1 + 11 * i % 17) for i in range(before + after)]
        mine = Request(prompt, 20, logits_processor=LogitsProcessorList([record]))
        requests = [*others[:before], mine, *others[before:]]
        collect(generate_many(model, requests, slots=4, prefill_rows=2))
        return torch.cat(record.scores)

    want = scores(0, 0)
    for before, after in ((1, 0), (2, 5), (7, 3)):
        assert torch.equal(scores(before, after), want)


def test_completion_order_and_lazy_requests(make_model, tokens):
    model, read = make_model(), []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield Request(tokens(4), max_new_tokens=50 if i == 0 else 2)

    many = generate_many(model, endless(), slots=3, prefill_rows=2)
    first = [next(many).index for _ in range(8)]
    assert 0 not in first, "the long one does not hold up the short ones"
    assert max(read) < 8 + 3 + 2 + 2


def test_cancel(make_model, tokens):
    model, prompts = make_model(), [tokens(n) for n in (5, 6, 300, 8, 9)]
    want = alone(model, prompts[1], new=20)
    many, came = Batcher(model, slots=2, prefill_rows=1), []

    def cancel_others(token):
        came.append(token)
        if len(came) == 10:
            # Request 0 decodes, 2 is being read or waits, 4 waits, and 77 does not exist.
            for index in (0, 2, 4, 77):
                many.cancel(index)

    for i, prompt in enumerate(prompts):
        many.submit(Request(prompt, 20, on_token=cancel_others if i == 1 else None))
    results = {c.index: c for c in many}
    assert {i: c.reason for i, c in results.items()} == {
        0: "cancelled", 1: "length", 2: "cancelled", 3: "length", 4: "cancelled"
    }  # fmt: skip
    assert results[1].tokens == want == came
    assert results[0].tokens == alone(model, prompts[0], new=20)[: len(results[0].tokens)]
    assert 5 < len(results[0].tokens) < 20
    assert results[3].tokens == alone(model, prompts[3], new=20)


def test_errors_stay_with_their_request(make_model, tokens):
    model, good = make_model(), tokens(6)
    want = alone(model, good, new=8)

    def fails(*_):
        raise KeyError("mine")

    wrong = {
        "prompt has shape \\[0\\]": Request([]),
        "prompt has shape \\[1, 6\\]": Request(good[None]),
        "prompt has token 61, but must be in 0..60": Request([1, 61]),
        "prompt has token -1": Request([-1, 3]),
        "max_new_tokens is 0": Request(good, 0),
        "prompt has 65 tokens, but may have 64": Request([1] * 65),
        "temperature": Request(good, do_sample=True, temperature=-1.0),
        "mine": Request(good, 8, on_token=fails),
        "'mine'": Request(good, 8, logits_processor=LogitsProcessorList([fails])),
        "prompt is 'text', but must be token ids": Request("text"),
        "prompt is None, but must be token ids": Request(None),
        "prompt is \\[1.5, 2.0\\], but must be token ids, which are int": Request([1.5, 2.0]),
        "max_new_tokens is 2.5, but must be an integer": Request(good, 2.5),
        "max_new_tokens is True, but must be an integer": Request(good, True),
        "max_time is True, but must be None or a number": Request(good, max_time=True),
        "max_time is '1s', but must be None or a number": Request(good, max_time="1s"),
        "seed is 2\\.5, but must be None or an integer": Request(good, do_sample=True, seed=2.5),
        "seed is True, but must be None or an integer": Request(good, seed=True),
        f"seed is {2**64}, but must be None or an integer of 64 bits": Request(good, seed=2**64),
        "but must be token ids: its layout is torch.sparse_coo": Request(good.to_sparse()),
        "eos_token_id is '5', but must be token ids": Request(good, eos_token_id="5"),
    }
    requests = [r for bad in wrong.values() for r in (bad, Request(good, 8))]
    results = {c.index: c for c in generate_many(model, requests, slots=3, max_prompt_tokens=64)}
    for i, message in enumerate(wrong):
        assert results[2 * i].reason == "error"
        with pytest.raises((ValueError, TypeError, KeyError), match=message):
            raise results[2 * i].error
        assert results[2 * i + 1].tokens == want


@pytest.mark.thin
@pytest.mark.parametrize("slots", [1, 2])
def test_logits_that_are_not_finite(case, make_model, slots):
    """Nor do they stay in the prefill row or the slot."""
    model = make_model(case)
    good = torch.tensor([1, 2, 3])
    text = alone(model, good, new=9)
    bad = min(set(range(4, 61)) - set(text))  # 0 fills padding
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    ends_wrong = Request(
        good,
        9,
        do_sample=True,
        top_k=1,
        logits_processor=LogitsProcessorList([leave_nothing_after(4)]),
    )
    requests = [Request([1, bad, 3], 9), Request(good, 9), ends_wrong, Request(good, 9)]
    results = {c.index: c for c in generate_many(model, requests, slots=slots, prefill_rows=slots)}
    assert isinstance(results[0].error, FloatingPointError)
    assert isinstance(results[2].error, ValueError)
    assert len(results[2].tokens) == 4
    assert results[1].tokens == results[3].tokens == text


def leave_nothing_after(tokens: int):
    def processor(ids, scores):
        return scores if ids.shape[1] < 3 + tokens else scores.fill_(float("-inf"))

    return processor


def test_time_limit(make_model, tokens, monkeypatch):
    """A request ends after max_time, on a clock that advances a second with each of its tokens."""
    model, now = make_model(), [100.0]
    monkeypatch.setattr("flashcell.generation.requests.time.monotonic", lambda: now[0])

    def a_second_later(token):
        now[0] += 1.0

    requests = [Request(tokens(4), 20, max_time=7, on_token=a_second_later), Request(tokens(4), 20)]
    results = {c.index: c for c in generate_many(model, requests, slots=2)}
    assert results[0].reason == "time"
    assert len(results[0].tokens) == 8  # the first length that ends later than after 7 s
    assert results[1].reason == "length"
    assert len(results[1].tokens) == 20


def test_memory_does_not_grow(make_model, tokens):
    model = make_model()
    many, sizes = Batcher(model, slots=3, prefill_rows=2), set()
    for i in range(30):
        many.submit(Request(tokens(1 + 13 * i), 1 + i))
    while many.busy:
        many.step()
        states = state_tensors(many.batch.reading) + state_tensors(many.batch.decoding)
        sizes.add(sum(s.nbytes for s in states))
    state = 2 * 32 * 4 * 2  # h and c of 32 units in fp32, two layers
    assert max(sizes) == (3 + 2) * state


def test_slots_stay_full(make_model, tokens, monkeypatch):
    """32 texts, every eighth of them long: padded batches of four would take 8 times the long
    length."""
    model, calls = make_model(), []
    decode = Batch.decode
    monkeypatch.setattr(Batch, "decode", lambda self: (calls.append(1), decode(self)))
    requests = [Request(tokens(4), 60 if i % 8 == 0 else 4) for i in range(32)]
    collect(generate_many(model, requests, slots=4, prefill_rows=4))
    assert len(calls) < 2.5 * (4 * 60 + 28 * 4) / 4  # 8 * 60 if padded


def test_text_is_refused_at_once(make_model, tokens):
    """Text in a list raises at once; text that a generator yields ends only its own request."""
    model = make_model()
    for requests in ("text", ["text"], (tokens(3), "text"), [Request(tokens(3)), "text"]):
        with pytest.raises(TypeError, match="requests has the text 'text', but must have token"):
            generate_many(model, requests)
    (done,) = generate_many(model, iter(["text"]))
    assert "prompt is 'text', but must be token ids" in str(done.error)


def test_what_it_does_not_take(make_model):
    model = make_model()
    for name, value, must in (
        ("slots", 0, "an integer of at least 1"),
        ("prefill_chunk", 1, "an integer of at least 2"),
        ("prefill_rows", 2.5, "an integer"),
        ("slots", True, "an integer"),
    ):
        with pytest.raises(ValueError, match=f"{name} is {value}, but must be {must}"):
            generate_many(model, [], **{name: value})
    for most in (0, True, "9"):
        with pytest.raises(ValueError, match=f"max_prompt_tokens is {most!r}, but must be None or"):
            generate_many(model, [], max_prompt_tokens=most)
    with pytest.raises(ValueError, match="model is in training mode"):
        generate_many(model.train(), [])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes))
    with pytest.raises(TypeError, match=r"model has layers of .*, but must be purely recurrent"):
        flashcell.generate_many(llama.eval(), [])
    with pytest.raises(TypeError, match=r"model has layers of .*, but must be purely recurrent"):
        flashcell.generate_many(torch.nn.Linear(2, 2), [])
    assert list(generate_many(model.eval(), [])) == []


@pytest.mark.slow
def test_a_thousand_requests(make_model):
    """Prompts of 8 to 2,048 tokens and outputs of 1 to 1,024 (log-uniform) give what generate gives."""
    model = make_model(num_hidden_layers=1)

    def log_uniform(low: int, high: int) -> list[int]:
        return (low * (high / low) ** torch.rand(1000, device="cpu")).long().tolist()

    prompts = [torch.randint(0, 61, (n,)) for n in log_uniform(8, 2048)]
    limits = log_uniform(1, 1024)
    requests = [Request(p, n) for p, n in zip(prompts, limits, strict=True)]
    many, sizes, got = generate_many(model, requests), set(), {}
    for done in many:
        got[done.index] = done.tokens
        sizes.add(sum(s.nbytes for s in state_tensors(many.batch.decoding)))
    sizes.discard(0)  # requests of one token may end before anything is decoded
    assert len(sizes) == 1
    wrong = [i for i in range(1000) if got[i] != alone(model, prompts[i], new=limits[i])]
    assert not wrong
