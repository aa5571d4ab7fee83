"""Runs under `kernels benchmark`: fused-rnn's forward on common shapes, verified against torch.nn.

The runner times one call after another and its reference once. For results to be reported use
scripts/bench_ops, which times both in one run.
"""

import torch
from kernels.benchmark import Benchmark


class FusedRNNBenchmark(Benchmark):
    seed: int = 0

    def _case(self, module: type, gates: int, batch: int, steps: int, width: int) -> None:
        """Returns a torch.nn module of `width` units, its projected input, and its parameters in
        our layout."""
        self.module = module(width, width, batch_first=True, device=self.device)
        self.input = torch.randn(batch, steps, width, device=self.device)
        with torch.no_grad():
            projected = torch.nn.functional.linear(self.input, self.module.weight_ih_l0)
        self.x = projected.view(batch, steps, gates, 1, width)
        self.weight = self.module.weight_hh_l0.detach().view(gates, 1, width, width)
        input_bias = self.module.bias_ih_l0.detach().view(gates, 1, width)
        bias = self.module.bias_hh_l0.detach().view(gates, 1, width)
        if module is torch.nn.GRU:  # the recurrent bias of n is separate: reset scales it
            sums = input_bias[:2] + bias[:2]
            self.bias = torch.cat([sums, input_bias[2:], bias[2:]])
        else:
            self.bias = input_bias + bias

    @torch.no_grad()
    def _verify(self) -> torch.Tensor:
        return self.module(self.input)[0].unsqueeze(2)

    def setup_lstm(self) -> None:
        self._case(torch.nn.LSTM, 4, batch=16, steps=64, width=256)

    def benchmark_lstm(self) -> None:
        self.out, _ = self.kernel.lstm(self.x, self.weight, self.bias)

    def verify_lstm(self) -> torch.Tensor:
        return self._verify()

    def setup_gru(self) -> None:
        self._case(torch.nn.GRU, 3, batch=16, steps=64, width=256)

    def benchmark_gru(self) -> None:
        self.out, _ = self.kernel.gru(self.x, self.weight, self.bias)

    def verify_gru(self) -> torch.Tensor:
        return self._verify()

    def setup_lstm_one_sequence(self) -> None:
        self._case(torch.nn.LSTM, 4, batch=1, steps=64, width=768)

    def benchmark_lstm_one_sequence(self) -> None:
        self.out, _ = self.kernel.lstm(self.x, self.weight, self.bias)

    def verify_lstm_one_sequence(self) -> torch.Tensor:
        return self._verify()

    def setup_lstm_step(self) -> None:
        self._case(torch.nn.LSTM, 4, batch=1, steps=1, width=768)

    def benchmark_lstm_step(self) -> None:
        h, _ = self.kernel.lstm_step(self.x[:, 0], self.weight, self.bias)
        self.out = h.unsqueeze(1)

    def verify_lstm_step(self) -> torch.Tensor:
        return self._verify()
