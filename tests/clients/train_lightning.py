"""Trains with Lightning's Trainer and gradient_clip_val: a two-layer LSTM learns the sum of its
inputs."""

import lightning
import torch
from recording import STEPS, TRAINER, record
from torch import nn


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.lstm(x)[0]), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(flashcell):
    x = torch.randn(8 * STEPS, 12, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(2, keepdim=True).cumsum(1))
    model = Regressor()
    flashcell.replace(model)
    trainer = lightning.Trainer(max_steps=STEPS, enable_checkpointing=False, **TRAINER)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return model


if __name__ == "__main__":
    record(train)
