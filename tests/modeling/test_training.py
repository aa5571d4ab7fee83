"""Tests training with common tools: Trainer, LoRA, checkpointing, compilation, classification."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from cases import DEVICE
from model_cases import CASES, cpu_only, kinds
from numerics import EPS, assert_bitwise, assert_close

SAME = 16 * EPS[torch.float32]  # see test_boundaries.py


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def fit(model, ids, steps=30, lr=0.01) -> list[float]:
    """Returns the losses of a few steps of AdamW on one batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=lr), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_default_config_trains(case, make_config, make_model, tokens):
    """Only the sizes are set; use_cache is on, which must not interfere."""
    default = getattr(type(make_config(case)), "initializer_range", None)  # some families have none
    model = make_model(case, initializer_range=default).train()
    losses = fit(model, tokens(2, 12))
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trains_under_autocast_and_in_bf16(case, make_model, tokens, dtype):
    """fp32 weights beside 16-bit activations, and everything in 16 bits."""
    ids, model = tokens(2, 8), make_model(case).train()
    with torch.autocast(DEVICE, dtype):
        mixed = gradients(model, input_ids=ids, labels=ids)
    assert {g.dtype for g in mixed.values()} == {torch.float32}
    pure = gradients(model.to(dtype), input_ids=ids, labels=ids)
    assert {g.dtype for g in pure.values()} == {dtype}
    assert all(g.isfinite().all() for g in (*mixed.values(), *pure.values()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(case, make_model, tokens, reentrant):
    model, ids = make_model(case).train(), tokens(2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    plain = gradients(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, got in gradients(model, **inputs).items():
        assert_bitwise(name, got, plain[name])


def test_checkpointing_refuses_a_cache(case, make_model, tokens):
    model, ids = make_model(case).train(), tokens(1, 4)
    cache = model(ids).past_key_values
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="past_key_values is given, but must be None"):
        model(ids, past_key_values=cache)


def test_generation_while_training_with_checkpoints(case, make_model, tokens):
    """A callback of a Trainer may show what the model says."""
    model, ids = make_model(case).train(), tokens(2, 4)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.gradient_checkpointing_enable()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(found, wanted)
    assert model.training


def test_grad_clip_reaches_the_cell(make_model, tokens):
    ids = tokens(2, 9)
    model = make_model(grad_clip=0.0)
    cut = gradients(model, input_ids=ids, labels=ids)
    model.config.grad_clip = None
    free = gradients(model, input_ids=ids, labels=ids)
    name = "model.layers.1.mixer.recurrent_weight"
    assert (cut[name] - free[name]).norm() > 0.01 * free[name].norm()


def test_loss_is_averaged_over_the_items_the_trainer_counts(case, make_model, tokens):
    model, ids = make_model(case), tokens(2, 9)
    loss = model(ids, labels=ids).loss
    counted = model(ids, labels=ids, num_items_in_batch=torch.tensor(32)).loss
    assert_close("loss", counted * 2, loss, SAME)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert_close("shifted inside", loss, want, SAME)


@pytest.mark.thin
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@cpu_only  # Trainer draws its batches on the default device
def test_trainer(case, make_model, tokens, tmp_path, packed):
    torch.manual_seed(1)
    model = make_model(case, pad_token_id=0)
    texts = [{"input_ids": tokens(n).tolist()} for n in (5, 9, 3, 7)]
    if not packed:
        texts = [{"input_ids": ids, "labels": ids} for ids in tokens(4, 9).tolist()]
    collator = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(
        model,
        TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            logging_steps=1, learning_rate=0.01, remove_unused_columns=not packed,
            gradient_checkpointing=not packed, disable_tqdm=True,
        ),
        train_dataset=texts,
        data_collator=collator if packed else None,
    )  # fmt: skip
    trainer.train()
    assert all((p != before[n]).any() for n, p in model.named_parameters())
    assert torch.isfinite(torch.tensor([e["loss"] for e in trainer.state.log_history[:2]])).all()


def test_lora_on_all_linear_layers(case, make_model, tokens):
    peft = pytest.importorskip("peft")
    model, ids = make_model(case), tokens(2, 12)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
    lora = peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora).train()
    names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    layers = {n.split(".lora_")[0].removeprefix("base_model.model.") for n in names}
    assert {layer.rsplit(".", 1)[1] for layer in layers} == CASES[case].projections
    losses = fit(adapted, ids, lr=0.03)
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad.any() for n, p in adapted.named_parameters() if p.requires_grad)
    merged = adapted.merge_and_unload()
    for name, before in frozen.items():
        changed = not torch.equal(merged.get_parameter(name), before)
        assert changed == (name.removesuffix(".weight") in layers), name


COMPILED = [(case, "aot_eager") for case in CASES]
COMPILED += [pytest.param(case, "inductor", marks=pytest.mark.slow) for case in kinds()]


@pytest.mark.parametrize(("case", "backend"), COMPILED)
def test_compiled_whole(case, make_model, tokens, backend):
    """The compiled object itself is one graph, forward and backward, with padding and documents."""
    model, ids = make_model(case, num_hidden_layers=1).train(), tokens(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    inputs = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": mask,
        "position_ids": torch.tensor([[0, 0, 1, 0, 1]]),
        "use_cache": False,
    }
    want = gradients(model, **inputs)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert_close("loss", compiled(**inputs).loss, model(**inputs).loss, SAME)
    model.zero_grad()
    compiled(**inputs).loss.backward()
    for name, p in model.named_parameters():
        # Fused sums have another order in the backward.
        assert_close(name, p.grad, want[name], 4 * SAME)
    assert counter.frame_count == 1


def test_gradients_of_each_sample(case, make_model, tokens):
    """torch.func.grad equals backward, and vmap of it gives every row's own gradient, for
    per-sample methods."""
    model, ids = make_model(case).double(), tokens(3, 6)
    # Observed 139: products of 6 rows and of 18 are summed in different orders.
    bound = 256 * EPS[torch.float64] * CASES[case].cancelled
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, ids):
        return torch.func.functional_call(
            model, weights, (), {"input_ids": ids, "labels": ids}
        ).loss

    gradient = torch.func.grad(loss)
    each = torch.func.vmap(lambda w, row: gradient(w, row[None]), (None, 0))(weights, ids)
    for row in range(3):
        for name, want in gradients(
            model, input_ids=ids[row : row + 1], labels=ids[row, None]
        ).items():
            assert_close(f"{name} of {row}", each[name][row], want, bound)


def test_sequence_classification(case, make_model, tokens):
    """The class is read from the last token that is not padding, on either side."""
    model = make_model(case, "ForSequenceClassification", num_labels=3, pad_token_id=0)
    text = tokens(1, 5).clamp(1)
    alone = model(text).logits
    for pad in ((3, 0), (0, 3)):
        ids = torch.nn.functional.pad(text, pad)
        logits = model(ids, attention_mask=(ids != 0).long()).logits
        assert_close(f"padding {pad}", logits, alone, SAME)
    labels = torch.tensor([0, 2])
    loss = model(tokens(2, 6).clamp(1), labels=labels).loss
    loss.backward()
    assert all(p.grad.any() for p in model.parameters())


def test_token_classification(case, make_model, tokens):
    """Every token is classified by the state after it: later tokens and padding change nothing."""
    model, ids = make_model(case, "ForTokenClassification", num_labels=3), tokens(2, 6)
    whole = model(ids).logits
    assert whole.shape == (2, 6, 3)
    assert_close("a prefix", model(ids[:, :4]).logits, whole[:, :4], SAME)
    mask = torch.tensor([[0] * 2 + [1] * 6]).expand(2, -1)
    padded = model(torch.nn.functional.pad(ids, (2, 0)), attention_mask=mask).logits
    assert_close("padded", padded[:, 2:], whole, SAME)
    loss = model(ids, labels=torch.randint(0, 3, (2, 6))).loss
    loss.backward()
    assert all(p.grad.any() for p in model.parameters())


def test_label_smoothing_is_that_of_the_next_token(case, make_model, tokens, tmp_path):
    """Trainer shifts the labels only for models that transformers lists as causal."""
    model, ids = make_model(case), tokens(2, 9)
    options = {"label_smoothing_factor": 0.1, "use_cpu": DEVICE == "cpu", "report_to": []}
    trainer = Trainer(model, TrainingArguments(tmp_path, **options))
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    rows = model(ids).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(rows, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)
