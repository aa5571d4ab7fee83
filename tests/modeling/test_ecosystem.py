"""Tests common tools around a model: pipelines, streamers, quantisation, compilation of decoding."""

import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation import CompileConfig

from cases import DEVICE
from model_cases import VOCABULARY, cpu_only, kinds
from numerics import EPS, assert_close

TEXTS = ["w3 w5 w7", "w11", "w13 w17 w19 w23 w29"]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def tokenizer():
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", unk_token="w1", padding_side="left"
    )


def test_pipeline_in_batches(case, make_model, tokenizer):
    """Texts of different lengths in one batch: each result is that of the text alone."""
    generate = pipeline("text-generation", make_model(case), tokenizer=tokenizer, device=DEVICE)
    options = {**GREEDY, "return_full_text": False}
    alone = [generate(text, **options)[0]["generated_text"] for text in TEXTS]
    batch = [r[0]["generated_text"] for r in generate(TEXTS, batch_size=3, **options)]
    assert batch == alone
    assert len(set(" ".join(alone).split())) > 3, "a text of one word proves nothing"


def test_streamer(case, make_model, tokenizer):
    model, inputs = make_model(case), tokenizer(TEXTS[:1], return_tensors="pt").to(DEVICE)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {**inputs, **GREEDY, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    want = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    assert "".join(pieces).split() == tokenizer.decode(want).split()
    assert len(pieces) > 4, "not streamed"


@pytest.mark.thin
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left-padded"])
def test_static_cache_decodes_in_one_graph(case, make_model, tokens, padded):
    """Two generate calls with different prompts give one complete graph, compiled once."""
    model, graphs = make_model(case), []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("eager")(graph, inputs)

    compile_config = CompileConfig(fullgraph=True, mode=None, backend=backend)
    # Transformers by itself compiles only on accelerators.
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    for length in (4, 7):
        ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
        if padded:
            mask[0, :2] = 0
        options = {**GREEDY, "attention_mask": mask}
        got = model.generate(
            ids, cache_implementation="static", compile_config=compile_config, **options
        )
        assert torch.equal(got, model.generate(ids, use_cache=False, **options))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", kinds())
def test_static_cache_is_compiled_by_inductor(case, make_model, tokens):
    """generate compiles a static cache as on a GPU: one graph over two calls."""
    model, compile_config = make_model(case), CompileConfig()
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    for length in (4, 7):
        ids = tokens(2, length)
        options = {**GREEDY, "attention_mask": torch.ones_like(ids)}
        got = model.generate(
            ids, cache_implementation="static", compile_config=compile_config, **options
        )
        assert torch.equal(got, model.generate(ids, **options))
    assert counters["stats"]["unique_graphs"] == 1


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@cpu_only
def test_exported_for_any_batch_and_length(case, make_model, tokens):
    model = make_model(case, num_hidden_layers=1)
    # a convolution of torch 2.10 asks for a bound
    bound = {"max": 2**16} if torch.__version__ < "2.11" else {}
    sizes = {
        0: torch.export.Dim("batch", min=2, max=99),
        1: torch.export.Dim("time", min=2, **bound),
    }
    with torch.no_grad():
        exported = torch.export.export(Logits(model), (tokens(3, 7),), dynamic_shapes=(sizes,))
        for ids in (tokens(2, 12), tokens(40, 5)):
            assert_close(
                "logits", exported.module()(ids), model(ids).logits, 8 * EPS[torch.float32]
            )


@cpu_only
def test_8_bit_linear_layers(case, make_model, tokens):
    """Tools that replace every nn.Linear find all but the gates, and the replacements run.

    One scale a tensor, for weights and activations: with weights as large as here, errors of a tenth
    (observed: at most 0.12).
    """
    model, ids = make_model(case), tokens(2, 12)
    want = model(ids).logits
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    assert not list(full_linears(small))
    got = small(ids).logits
    assert_close("logits", got, want, 0.2)
    assert (got - want).norm() > 1e-4 * want.norm(), "nothing was replaced"


def test_torchao(case, make_model, tokens):
    torchao = pytest.importorskip("torchao")
    model, ids = make_model(case), tokens(2, 12)
    want = model(ids).logits
    torchao.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    whole = [m for m in full_linears(model) if type(m.weight.data) is torch.Tensor]
    assert not whole
    assert_close("logits", model(ids).logits, want, 0.1)


def test_bitsandbytes(case, make_model, tokens, tmp_path):
    """transformers loads all linear layers but gates and head in 8 bits; logits agree to 0.1 (observed:
    0.037)."""
    pytest.importorskip("bitsandbytes")
    model, ids = make_model(case), tokens(2, 12)
    model.save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map=DEVICE
    )
    assert list(full_linears(small)) == [small.lm_head]
    want = model(ids).logits
    assert_close("logits", small(ids).logits, want, 0.1)
    cache = small(ids[:, :-1]).past_key_values
    assert_close("a token", small(ids[:, -1:], past_key_values=cache).logits, want[:, -1:], 0.1)


def full_linears(model):
    """Layers that the quantising tool passed over, as it should."""
    linears = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
    replaced = "Linear8bitLt", "GateLinear", "InputGate"
    return (m for m in linears if type(m).__name__ not in replaced)


def test_embeddings_are_ids(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    text = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    assert torch.equal(text, model.generate(ids, attention_mask=mask, **GREEDY)[:, 6:])


def test_output_hidden_states(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(outputs.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model.compute_logits(outputs.hidden_states[-1]), outputs.logits)
    assert model(ids, return_dict=False)[0].shape == (2, 6, VOCABULARY)


def test_new_tokens_in_the_vocabulary(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    want = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 3)
    assert model.config.vocab_size == VOCABULARY + 3
    assert_close("logits", model(ids).logits[..., :VOCABULARY], want, EPS[torch.float32])
    model(torch.full((1, 2), VOCABULARY + 2))
