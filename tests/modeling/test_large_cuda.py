"""Tests activations of more than 2^31 elements, which training keeps whole (prompts are read in
pieces)."""

import gc

import pytest
import torch

import flashcell
from cases import DEVICE
from model_cases import CASES, kinds
from numerics import EPS, assert_close

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs FLASHCELL_TEST_DEVICE=cuda"),
]
ROWS, TOKENS = 8200, 1024
# Width of the residual stream, so that it is such a tensor itself.
WIDTH = 2**31 // (ROWS * TOKENS) + 1
NEEDED = 120 * 2**30  # bytes; seen: mLSTM 58, slstm 66, xlstm 109 GiB
LAST = 4  # rows, at the end of the batch, that are compared


@pytest.mark.parametrize("case", kinds())
def test_more_than_31_bits_of_elements(case, tokens):
    """In a batch with more than 2^31 elements, the last rows have the results that they have alone,
    and so have the gradients of a loss on them."""
    gc.collect()  # frees what other cases left to the allocator
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < NEEDED:
        pytest.skip(f"needs {NEEDED / 2**30:.0f} GiB")
    torch.cuda.reset_peak_memory_stats()
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1}
    family = CASES[case].family
    sizes |= {"FlashRNN": {"initializer_range": 0.02}, "FlashMLSTM": {"ffn_proj_factor": 0.25}}.get(
        family, {}
    )
    kind = getattr(flashcell, family + "ForCausalLM")
    model, ids = kind(CASES[case].config(**sizes)).bfloat16(), tokens(ROWS, TOKENS)
    weight = torch.randn(LAST, TOKENS, model.config.vocab_size)

    def run(rows):
        model.zero_grad()
        logits = model(rows, use_cache=False).logits[-LAST:]
        (logits * weight).sum().backward()
        return logits.detach(), {n: p.grad for n, p in model.named_parameters()}

    got, got_gradients = run(ids)
    want, want_gradients = run(ids[-LAST:])
    print(f"{case}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    assert_close("logits", got, want, 4 * EPS[torch.bfloat16])
    for name, gradient in got_gradients.items():
        assert_close(name, gradient, want_gradients[name], 16 * EPS[torch.bfloat16])
