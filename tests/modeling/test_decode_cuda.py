"""Tests the recorded step as a CUDA graph: which changes it must notice, and what it may cost.

test_decode.py runs on the GPU too, and compares every way to generate there.
"""

import gc
import threading

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from cases import DEVICE
from decode_cases import CHANGES, decode, greedy, without_engine
from flashcell.generation.captured_step import Recording
from flashcell.generation.engine import KEPT
from model_cases import state_tensors

# Memory of cuBLAS for each stream that was captured; release() uses another of torch's 32 streams.
WORKSPACE = 32 << 20

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda")


def replayed(model) -> bool:
    return model.decoder.reason is None and all(
        r.graph is not None for r in model.decoder._recordings.values()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_replays_are_the_steps(case, make_model, tokens, dtype, batch):
    model, ids = make_model(case).to(dtype), tokens(batch, 5)
    model.decoder.mode = "graph"
    got = greedy(model, ids, new=40)
    assert replayed(model)
    assert torch.equal(got, without_engine(model, lambda: greedy(model, ids, new=40)))


def test_a_graph_keeps_the_workspace_of_its_products(case, make_model, tokens):
    """torch.compile frees cuBLAS's workspace before it records graphs; flash_mlstm's products write
    to it."""
    model, ids = make_model(case), tokens(2, 5)
    want = greedy(model, ids, new=20)
    assert replayed(model)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.zeros(64 << 20, dtype=torch.int32)  # this would reuse the freed memory
    assert torch.equal(greedy(model, ids, new=20), want)
    assert not others.any()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_recorded_anew(make_model, tokens, change):
    """Within one conversation the first steps use the old model and the rest the new one."""

    def conversation(mode):
        torch.manual_seed(0)
        model = make_model()
        model.decoder.mode = mode
        ids, logits, cache = tokens(2, 6), [], DynamicCache(config=model.config)
        with torch.no_grad():
            for t in range(6):
                if t == 4:
                    CHANGES[change](model)
                    for p in model.parameters():
                        p.add_(0.125)
                logits.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
        return torch.stack(logits).float()

    assert torch.equal(conversation("auto"), conversation("eager"))


def test_adapters_are_not_recorded(make_model, tokens):
    peft = pytest.importorskip("peft")
    model, ids = make_model(), tokens(2, 5)
    plain = greedy(model, ids)
    assert replayed(model)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4)
    tuned = peft.get_peft_model(model, config).eval()
    want = without_engine(model, lambda: greedy(tuned, ids))
    assert torch.equal(greedy(tuned, ids), want)
    assert "is code of peft" in model.decoder.reason
    with tuned.disable_adapter():
        assert torch.equal(greedy(tuned, ids), plain)
    merged = tuned.merge_and_unload()
    got = greedy(merged, ids)
    assert replayed(model)
    assert torch.equal(got, without_engine(model, lambda: greedy(merged, ids)))


def test_memory_is_bounded_and_given_back(make_model, tokens):
    model = make_model(hidden_size=256, num_heads=1, vocab_size=4096)
    greedy(model, tokens(1, 4))
    model.decoder.release()

    def used():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before, peaks = used(), []
    # One more than are kept, so that all are recorded again.
    for batch in 8 * list(range(20, 21 + KEPT)):
        greedy(model, tokens(batch, 4))
        peaks.append(used() - before)
    assert max(peaks[len(peaks) // 2 :]) <= max(peaks[: len(peaks) // 2]), peaks
    model.decoder.release()
    assert used() <= before + WORKSPACE


def test_states_are_read_in_another_stream_while_the_cache_goes_on(make_model, tokens):
    """A second thread that reads a cache which a first one decodes gets complete states that stay
    unchanged."""
    model, ids = make_model(), tokens(2, 60)
    want, cache = [], DynamicCache(config=model.config)
    for token in ids.split(1, 1):
        without_engine(model, lambda token=token: decode(model, token, cache))
        want.append([s.clone() for s in state_tensors(cache)])
    cache, read, done = DynamicCache(config=model.config), [], threading.Event()

    def listen():
        with torch.cuda.stream(torch.cuda.Stream()), torch.device("cuda"):
            while not done.is_set():
                got = state_tensors(cache)
                torch.cuda.synchronize()
                read.append([s.cpu() for s in got])

    decode(model, ids[:, :2], cache)
    listener = threading.Thread(target=listen)
    listener.start()
    for token in ids[:, 2:].split(1, 1):
        decode(model, token, cache)
        torch.cuda.synchronize()
    done.set()
    listener.join()
    assert all(map(torch.equal, state_tensors(cache), want[-1]))
    want = [[s.cpu() for s in states] for states in want]
    layers = range(0, len(want[0]), len(want[0]) // model.config.num_hidden_layers)
    for states in read:  # a token may come between two layers, never within one
        for start in layers:
            group = slice(start, start + len(want[0]) // len(layers))
            assert any(all(map(torch.equal, states[group], w[group])) for w in want)


def test_a_displaced_cache_goes_on_in_its_own_stream(make_model, tokens):
    """Another thread's token, whose stream is late, displaces a cache from the buffers. The cache's
    own next call has no graph and does not know of that stream."""
    model, ids, others = make_model(), tokens(2, 12), tokens(2, 40)

    def run(displace):
        cache = DynamicCache(config=model.config)
        decode(model, ids[:, :6], cache)
        if displace:
            with torch.cuda.stream(late):
                torch.cuda._sleep(10**8)
                decode(model, others[:, :1], other)
        with torch.no_grad():
            return model(ids[:, 6:], past_key_values=cache).logits

    late, other = torch.cuda.Stream(), DynamicCache(config=model.config)
    with torch.no_grad():
        model(others, past_key_values=other)
    want = without_engine(model, lambda: run(False))
    torch.cuda.synchronize()
    assert torch.equal(run(True), want)
    torch.cuda.synchronize()


def test_beams_are_reordered_in_streams_of_their_own(case, make_model, tokens):
    model, prompts = make_model(case), [tokens(2, n) for n in (3, 4, 5)]
    want = [
        without_engine(model, lambda p=p: greedy(model, p, new=20, num_beams=3)) for p in prompts
    ]
    got = in_streams(lambda i: greedy(model, prompts[i], new=20, num_beams=3), len(prompts))
    assert all(map(torch.equal, got, want))


def test_packed_weights_are_recorded_once(make_model, tokens):
    """With more rows than linear_step takes, the first step moves the weights, which does not count
    as a change."""
    model, ids = make_model("flash_mlstm").bfloat16(), tokens(20, 3)
    model.decoder.mode = "graph"
    decode(model, ids)
    (first,) = model.decoder._recordings.values()
    decode(model, ids)
    assert list(model.decoder._recordings.values()) == [first]
    assert model.decoder.path == "graph"


def test_other_threads_and_streams(make_model, tokens):
    model, prompts = make_model(), [tokens(2, n) for n in (3, 4, 5, 6)]
    want = [greedy(model, p, new=60) for p in prompts]
    model.decoder.release()  # so that one of them records while the others compute
    got = in_streams(lambda i: greedy(model, prompts[i], new=60), len(prompts))
    assert all(map(torch.equal, got, want))


def in_streams(work, count):
    """Returns the results of work(0), work(1), ..., each from a thread and a stream of its own."""
    got = [None] * count

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()), torch.device("cuda"):
            got[i] = work(i)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_what_cannot_be_captured_says_so(make_model, tokens, monkeypatch):
    """If a step cannot be captured, decoder.reason says why, the model is called instead, and the
    failed capture leaves nothing behind."""
    model, ids = make_model(), tokens(2, 4)
    want = greedy(model, ids)
    forward = Recording.forward

    def waits(recording, model):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return forward(recording, model)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "forward", waits)
        model.decoder.release()
        assert torch.equal(greedy(model, ids), want)
        assert model.decoder.reason.startswith("capturing the step failed")
        assert torch.randn(3).isfinite().all()
        model.decoder.mode = "graph"
        with pytest.raises(RuntimeError, match='mode is "graph", but capturing the step failed'):
            greedy(model, ids)
    model.decoder.release()
    assert torch.equal(greedy(model, ids), want)
    assert replayed(model)


class Listener(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard += value.flatten().tolist()

    def end(self):
        self.heard.append(None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_end_is_found_on_another_device_than_the_current(make_model, tokens):
    model, ids, ears = (
        make_model().to("cuda:1"),
        tokens(1, 5).to("cuda:1"),
        [Listener(), Listener()],
    )
    text = without_engine(model, lambda: greedy(model, ids, new=60))
    options = {"new": 60, "eos_token_id": int(text[0, 30])}
    got = greedy(model, ids, streamer=ears[0], **options)
    want = without_engine(model, lambda: greedy(model, ids, streamer=ears[1], **options))
    assert torch.equal(got, want)
    assert ears[0].heard == ears[1].heard


@pytest.mark.parametrize("new", [1, 2, 30])
def test_the_end_is_found_a_token_late_and_unseen(make_model, tokens, new):
    """The end of a text is noticed one token late, but generate returns and streams the same as if
    it looked after every token."""
    model = make_model()
    for ids in (tokens(1, 5), tokens(4, 5)):
        text = without_engine(model, lambda ids=ids: greedy(model, ids, new=30))
        for end in (None, int(text[0, 12]), [int(t) for t in text[:, 9]]):
            options = {"new": new, "eos_token_id": end}
            ears = [Listener(), Listener()] if len(ids) == 1 else [None, None]
            got = greedy(model, ids, streamer=ears[0], **options)
            want = without_engine(model, lambda: greedy(model, ids, streamer=ears[1], **options))  # noqa: B023
            assert torch.equal(got, want)
            assert ears[0] is None or ears[0].heard == ears[1].heard
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": new}
    text = model.generate(**embeds, do_sample=False, pad_token_id=0)
    again = without_engine(model, lambda: model.generate(**embeds, do_sample=False, pad_token_id=0))
    assert torch.equal(text, again)
    text = greedy(model, ids, new=30)
    state = torch.get_rng_state(), torch.cuda.get_rng_state()
    drawn = []
    for mode in ("auto", "eager"):
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1])
        model.decoder.mode = mode
        sample = {"do_sample": True, "eos_token_id": int(text[0, 12])}
        drawn.append([greedy(model, ids, new=20, **sample), greedy(model, ids, new=20, **sample)])
    assert all(map(torch.equal, *drawn))
