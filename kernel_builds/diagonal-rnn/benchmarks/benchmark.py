"""Runs under `kernels benchmark`: diagonal-rnn's forward on common shapes, verified against loops
in torch.

The runner times one call after another and its reference once. For results to be reported use
scripts/bench_ops, which times both in one run.
"""

import torch
from kernels.benchmark import Benchmark


class DiagonalRNNBenchmark(Benchmark):
    seed: int = 0

    def _case(self, rows: int, batch: int, steps: int, width: int) -> None:
        self.x = torch.randn(batch, steps, 3, width, device=self.device)
        self.weight = torch.rand(rows, width, device=self.device) - 0.5

    def setup_gru(self) -> None:
        self._case(3, batch=8, steps=256, width=1024)

    def benchmark_gru(self) -> None:
        self.out, _ = self.kernel.flash_gru(self.x, self.weight)

    def verify_gru(self) -> torch.Tensor:
        h, outputs = torch.zeros_like(self.x[:, 0, 0]), []
        for x in self.x.unbind(1):
            z, r = (torch.sigmoid(self.weight[k] * h + x[:, k]) for k in range(2))
            c = torch.tanh(self.weight[2] * h * r + x[:, 2])
            h = (1 - z) * h + z * c
            outputs.append(h)
        return torch.stack(outputs, 1)

    def setup_lstm(self) -> None:
        self._case(5, batch=8, steps=256, width=1024)

    def benchmark_lstm(self) -> None:
        self.out, _ = self.kernel.flash_lstm(self.x, self.weight[:3], self.weight[3:])

    def verify_lstm(self) -> torch.Tensor:
        a_f, a_o, a_z, p_f, p_o = self.weight
        h = c = torch.zeros_like(self.x[:, 0, 0])
        outputs = []
        for x in self.x.unbind(1):
            f, z = torch.sigmoid(a_f * h + p_f * c + x[:, 0]), torch.tanh(a_z * h + x[:, 2])
            c = f * c + (1 - f) * z
            h = torch.sigmoid(a_o * h + p_o * c + x[:, 1]) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1)
