"""One of two processes of test_sharded.py: every checkpoint, sharded by FSDP and by tensor
parallelism, must have the loss, the logits and the gradients of the whole model."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import flashcell  # noqa: F401  (registers the families)

# Sharded weights are gathered; split products are sums in another order, observed: 9.5e-14.
BOUNDS = {"fsdp": 0.0, "tp": 4e-13}


def results(model, ids) -> dict[str, torch.Tensor]:
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    found = {"loss": outputs.loss, "logits": outputs.logits}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {n: whole(t) if hasattr(t, "full_tensor") else t for n, t in found.items()}


def whole(t) -> torch.Tensor:
    """full_tensor, also of a matrix of two (its rows interleaved), which torch 2.10 cannot gather."""
    placement, local = t.placements[0], t.to_local().contiguous()
    if not hasattr(placement, "split_factor"):
        return t.full_tensor()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    pieces = zip(
        *(part.chunk(placement.split_factor, placement.dim) for part in parts), strict=True
    )
    return torch.cat([piece for row in pieces for piece in row], placement.dim)


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.arange(2, 14).view(2, 6)
    plans = {
        "fsdp": DistributedConfig(fsdp_size=2),
        "tp": DistributedConfig(tp_size=2, tp_plan="auto"),
    }
    for checkpoint in sorted(Path(sys.argv[1]).iterdir()):
        want = results(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64), ids)
        for name, plan in plans.items():
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float64, distributed_config=plan
            )
            parameters = list(model.parameters())
            held = sum(
                p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters
            )
            assert held < 0.9 * sum(p.numel() for p in parameters), (
                f"{checkpoint.name} {name}: whole"
            )
            for what, got in results(model, ids).items():
                error = (got - want[what]).norm() / want[what].norm()
                assert error <= BOUNDS[name], (
                    f"{checkpoint.name} {name} {what}: relative error {error:.2g}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
