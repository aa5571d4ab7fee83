"""Tests that padding changes nothing and that packed documents do not see each other."""

import pytest
import torch
from transformers import DynamicCache

from cases import DEVICE
from flashcell.state.boundaries import cut_prompt, find_boundaries
from model_cases import CASES, VOCABULARY, state_tensors
from numerics import EPS, assert_close

# The sums are the same in fp32 but for other batch sizes: a few roundings a step, which the gates
# damp. Observed: at most 10 units. The mLSTM on a GPU omits 2^-22 of a product, 4 units; observed:
# 18.
SAME = (16 if DEVICE == "cpu" else 24) * EPS[torch.float32]


def run(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **kwargs)


def assert_same_states(got, want, row: int = 0) -> None:
    """Asserts that row `row` of the first cache equals the only row of the second."""
    for g, w in zip(*(state_tensors(o.past_key_values) for o in (got, want)), strict=True):
        g, w = g[row], w[0]
        # M of a few heads may cancel to nothing: compare on the scale of its terms, one.
        if w.numel() < 8:
            g, w = (torch.nn.functional.pad(m, (0, 1), value=1.0) for m in (g, w))
        assert_close("state", g, w, SAME)


PADDINGS = {
    "left": ([0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]),
    "right": ([1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]),
    "between": ([1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1, 0]),
    "nothing but padding": ([0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("where", PADDINGS)
@pytest.mark.parametrize("positions", [False, True], ids=["mask", "mask+positions"])
def test_padded_batch_is_each_row_alone(case, make_model, tokens, where, positions):
    model, ids, mask = make_model(case), tokens(2, 8), torch.tensor(PADDINGS[where])
    kwargs = {"attention_mask": mask}
    if positions:  # positions as generate makes them, 0 at padding
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    batch = run(model, ids, **kwargs)
    for row, real in enumerate(mask.bool()):
        if not real.any():
            written = (s[row].any() for s in state_tensors(batch.past_key_values))
            assert not any(written), "padding wrote to the state"
            continue
        alone = run(model, ids[row : row + 1, real])
        assert_close("logits", batch.logits[row, real], alone.logits[0], SAME)
        assert_same_states(batch, alone, row)


LENGTHS = [3, 1, 5]
STARTS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
NUMBERS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4]])
PACKED = {
    "position_ids": {"position_ids": POSITIONS},
    "cu_seq_lens_q": {"cu_seq_lens_q": STARTS},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "the collator's": {
        "position_ids": POSITIONS,
        "seq_idx": NUMBERS.int(),
        "cu_seq_lens_q": STARTS,
        "cu_seq_lens_k": STARTS,
        "max_length_q": 5,
        "max_length_k": 5,
    },
}


@pytest.mark.parametrize("how", PACKED)
def test_packed_documents_are_separate_documents(case, make_model, tokens, how):
    model, ids = make_model(case), tokens(1, 9)
    packed = run(model, ids, **PACKED[how])
    parts = [run(model, part) for part in ids.split(LENGTHS, dim=1)]
    assert_close("logits", packed.logits, torch.cat([p.logits for p in parts], 1), SAME)
    assert_same_states(packed, parts[-1])


@pytest.mark.parametrize("how", ["position_ids", "seq_idx"])
def test_packed_rows_with_padding(case, make_model, tokens, how):
    model, ids, pad = make_model(case), tokens(1, 9), tokens(2, 2)
    rows = torch.cat([ids.expand(2, 9), pad], 1)
    mask = torch.tensor([[1] * 9 + [0] * 2]).expand(2, -1)
    told = {k: torch.nn.functional.pad(v, (0, 2)) for k, v in PACKED[how].items()}
    batch, alone = run(model, rows, attention_mask=mask, **told), run(model, ids, **PACKED[how])
    for row in range(2):
        assert_close("logits", batch.logits[row, :9], alone.logits[0], SAME)
        assert_same_states(batch, alone, row)


MASKED_STARTS = {  # documents whose first tokens are padding, and padding inside one
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]),
    "position 0 at padding": torch.tensor([[0, 0, 1, 2, 0, 0, 1, 0, 2]]),
    "seq_idx": torch.tensor([[3, 3, 3, 3, 5, 5, 5, 5, 5]]),
    "seq_idx 0 at padding": torch.tensor([[3, 0, 3, 3, 0, 5, 5, 0, 5]]),
}


@pytest.mark.parametrize("how", MASKED_STARTS)
def test_a_document_may_begin_with_padding(case, make_model, tokens, how):
    model, ids, mask = make_model(case), tokens(1, 9), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1]])
    name = "seq_idx" if "seq" in how else "position_ids"
    packed = run(model, ids, attention_mask=mask, **{name: MASKED_STARTS[how]})
    for part in ([0, 2, 3], [5, 6, 8]):
        alone = run(model, ids[:, part])
        assert_close("logits", packed.logits[:, part], alone.logits, SAME)


def test_packed_gradients_are_the_sum_over_documents(case, make_model, tokens):
    model, ids = make_model(case).double(), tokens(1, 9)
    names = [name for name, _ in model.named_parameters()]
    for layer in model.modules():
        if hasattr(layer, "max_recurrent"):  # beyond the bound only one sign of a gradient passes
            layer.max_recurrent = None

    def gradients(*calls):
        losses = [model(ids, **kw).logits.square().sum() for ids, kw in calls]
        return torch.autograd.grad(sum(losses), list(model.parameters()))

    separate = gradients(*((part, {}) for part in ids.split(LENGTHS, dim=1)))
    for how in ("position_ids", "cu_seq_lens_q"):
        packed = gradients((ids, PACKED[how]))
        for name, got, want in zip(names, packed, separate, strict=True):
            # float64: equal up to the roundings of some hundred terms of both signs; observed: at
            # most 73 units
            bound = 128 * EPS[torch.float64] * CASES[case].cancelled
            assert_close(f"{how} {name}", got, want, bound)


def test_a_document_may_begin_while_decoding(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 6)
    cache = run(model, ids[:, :5]).past_key_values
    begins = torch.tensor([[0], [5]])
    last = run(model, ids[:, 5:], past_key_values=cache, position_ids=begins)
    assert_close("new document", last.logits[0, 0], run(model, ids[:1, 5:]).logits[0, 0], SAME)
    assert_close("continued", last.logits[1, 0], run(model, ids[1:]).logits[0, -1], SAME)


WRONG = {
    "mask rank": ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask has shape"),
    "mask batch": ({"attention_mask": torch.ones(3, 4)}, "attention_mask has shape"),
    "mask length": ({"attention_mask": torch.ones(2, 3)}, "but must be .2, at least 4."),
    "positions rank": ({"position_ids": torch.zeros(4)}, "position_ids has shape"),
    "positions length": ({"position_ids": torch.zeros(1, 5)}, "but must be .2 or 1, 4."),
    "numbers batch": ({"seq_idx": torch.zeros(3, 4)}, "seq_idx has shape"),
    "offsets of a batch": (
        {"cu_seq_lens": torch.tensor([0, 4])},
        "cu_seq_lens_q has shape .2. for a batch of 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_shapes_are_named(what):
    kwargs, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        find_boundaries(2, 4, **kwargs)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q"])
def test_lists_are_named(make_model, tokens, name):
    with pytest.raises(TypeError, match=f"{name} is a list, but must be a tensor"):
        run(make_model(), tokens(1, 2), **{name: [[1, 1]]})


def test_wrong_offsets_are_named(make_model, tokens, monkeypatch):
    monkeypatch.setenv("FLASHCELL_CHECK", "1")  # on a GPU, values are checked on request only
    for offsets in ([0, 5, 3, 9], [1, 9], [0, 8]):
        with pytest.raises((ValueError, RuntimeError), match="cu_seqlens"):
            run(make_model(), tokens(1, 9), cu_seq_lens_q=torch.tensor(offsets))


def test_exactly_one_input(make_model, tokens):
    model, ids = make_model(), tokens(1, 3)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(input_ids=ids, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_wrong_inputs_are_named(make_model, tokens, name):
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\], but must be \[B, T"):
        make_model()(**{name: tokens(3)})


def test_no_tokens_and_no_rows(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 5)
    assert run(model, ids[:0]).logits.shape == (0, 5, VOCABULARY)
    none = torch.ones(2, 0, dtype=torch.long)
    told = run(model, ids[:, :0], attention_mask=none, position_ids=none, seq_idx=none)
    assert told.logits.shape == (2, 0, VOCABULARY)
    for past in ({}, {"past_key_values": run(model, ids).past_key_values}):
        nothing = run(model, ids[:, :0], **past)
        assert nothing.logits.shape == (2, 0, VOCABULARY)
        got = run(model, ids, past_key_values=nothing.past_key_values).logits
        want = (
            run(model, torch.cat([ids, ids], 1)).logits[:, 5:] if past else run(model, ids).logits
        )
        assert_close("after no tokens", got, want, SAME)


def test_padding_at_the_cut_of_a_long_prompt(make_model, tokens):
    """Two documents, the second after padding that its positions count. The prompt is cut where the
    padding begins, within it, and where it ends: the second one's states and tokens must not
    change."""
    model = make_model()
    model.prompt_tokens = 256
    for pads, begin in ((20, 256), (20, 246), (20, 236), (0, 256)):
        ids, mask = tokens(1, 400), torch.ones(1, 400, dtype=torch.long)
        mask[:, begin : begin + pads] = 0
        positions = torch.cat([torch.arange(begin), torch.arange(400 - begin)])[None]
        options = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        got = run(model, ids, past_key_values=DynamicCache(config=model.config), **options)
        want = run(model, ids[:, begin + pads :])
        assert_close("logits", got.logits[:, -1], want.logits[:, -1], SAME)
        assert_same_states(got, want)


def test_positions_and_numbers_are_joined():
    """A document begins where either positions or numbers say so."""
    positions, numbers = (
        torch.tensor([[0, 1, 2, 0, 1, 2, 3]]),
        torch.tensor([[4, 4, 4, 4, 4, 5, 5]]),
    )
    found = find_boundaries(1, 7, position_ids=positions, seq_idx=numbers)
    assert found.reset.int().tolist() == [[1, 0, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize(("position", "begins"), [(0, 1), (1, 1), (2, 0)])
def test_a_position_that_does_not_go_on_after_padding_begins_a_document(position, begins):
    positions, mask = torch.tensor([[1, 9, position, position + 1]]), torch.tensor([[1, 0, 1, 1]])
    found = find_boundaries(1, 4, mask, positions)
    assert found.reset.int().tolist() == [[0, 0, begins, 0]]


def test_a_long_prompt_takes_the_last_columns_of_the_mask():
    """The mask then covers the text in the cache as well."""
    ids, mask = torch.zeros(1, 600, dtype=torch.long), torch.ones(1, 1000, dtype=torch.long)
    mask[0, :7] = 0
    mask[0, 400:403] = 0
    with torch.no_grad():
        chunks = cut_prompt(ids, None, None, mask, tokens=256, cache=DynamicCache(), rest={})
    got = torch.cat([chunk[3] for chunk in chunks], 1)
    assert torch.equal(got, mask[:, 400:])
