"""Tests that a sequence split over processes equals the whole one: three on the CPU, so that one
has neighbours on both sides."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from commands import environment
from flashcell.state.context_parallel import ContextParallel
from model_cases import CASES, cpu_only


@cpu_only
def test_parts_are_the_whole(make_model, tmp_path):
    for case, (_, options, *_) in CASES.items():
        # beyond its bound, a recurrent weight's gradient is clipped separately in each part
        free = {"max_recurrent": None} if options.get("cell", "").startswith("flash_") else {}
        make_model(case, **free).save_pretrained(tmp_path / "models" / case)
    worker = Path(__file__).with_name("context_worker.py")
    command = [sys.executable, worker, tmp_path / "models", tmp_path / "store"]
    alone = environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_is_the_model(alone, make_model, tokens):
    model, ids = make_model("flash_gru"), tokens(2, 9)
    context = ContextParallel(model)
    inputs, targets = context.split(ids[:, :-1]), context.split(ids[:, 1:])
    output = context(input_ids=inputs, targets=targets)
    torch.testing.assert_close(output.loss, model(ids, labels=ids).loss, rtol=0, atol=0)
    assert output.past_key_values is None


def test_one_queue_of_launches_is_refused_under_nccl(alone, make_model, monkeypatch):
    model = make_model("lstm")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    ContextParallel(model)  # gloo has no such queue
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1, but must be at least"):
        ContextParallel(model)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    ContextParallel(model)


def test_what_does_not_fit_is_named(alone, make_model, tokens):
    model, ids = make_model("lstm"), tokens(1, 8)
    context = ContextParallel(model)
    for name, instead in (("cu_seq_lens_q", "position_ids"), ("labels", "targets")):
        with pytest.raises(
            ValueError, match=f"{name} is given, but must be None here: .*{instead}"
        ):
            context(input_ids=ids, **{name: ids[0]})
    context.p2p.size = 3
    with pytest.raises(
        ValueError, match="x has 8 steps in dimension 1, but must have a multiple of 3"
    ):
        context.split(ids)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="model checkpoints gradients, but must not"):
        ContextParallel(model)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    other = AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=2, **sizes))
    with pytest.raises(ValueError, match="model is a LlamaForCausalLM with layers of"):
        ContextParallel(other)
