"""flash_mlstm over two processes by its tensor-parallel plan is the model in one; the sharding plans."""

import os
import subprocess
import sys

import pytest
import torch

from flashcell import FlashMLSTMConfig, FlashMLSTMForCausalLM

RANK = """
import sys

import torch
from transformers.distributed import DistributedConfig

from flashcell import FlashMLSTMForCausalLM

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
ids = torch.arange(18).view(2, 9) * 7 % 61
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
for folder in sys.argv[1:]:
    whole = FlashMLSTMForCausalLM.from_pretrained(folder, dtype=torch.float64)
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    shared = FlashMLSTMForCausalLM.from_pretrained(
        folder, dtype=torch.float64, distributed_config=plan
    )
    sizes = [m.backbone.blocks[0].ffn.proj_down.weight for m in (shared, whole)]
    assert sizes[0].to_local().numel() * 2 == sizes[1].numel()
    texts = [m.generate(ids, pad_token_id=0, **options) for m in (shared, whole)]
    assert torch.equal(*texts)
    losses = [m(ids, labels=ids).loss for m in (shared, whole)]
    for loss in losses:
        loss.backward()
    for (name, p), want in zip(shared.named_parameters(), whole.parameters(), strict=True):
        got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        error = float((got - want.grad).norm() / want.grad.norm())
        assert error < BOUND, f"{name}: relative error {error}"
torch.distributed.destroy_process_group()
"""
BOUND = 1e-13  # relative, in float64; observed 2.1e-14


def test_two_processes_are_one(tmp_path):
    for mode in ("single", "fused"):
        config = FlashMLSTMConfig(
            vocab_size=61, hidden_size=64, num_hidden_layers=2, num_heads=2, weight_mode=mode
        )
        model = FlashMLSTMForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / mode)
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500 + os.getpid() % 1000}
    ranks = []
    for rank in range(2):
        names = {**place, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
        code = RANK.replace("BOUND", repr(BOUND))
        command = [sys.executable, "-c", code, tmp_path / "single", tmp_path / "fused"]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]


@pytest.mark.parametrize("case", ["flash_mlstm", "flash_xlstm", "lstm"])
def test_sharding_plans_name_modules(make_model, case):
    model = make_model(case)
    for name in model._fsdp_plan:
        model.get_submodule(name.removesuffix(".*"))
    assert any(name.endswith(".*") for name in model._fsdp_plan)
