"""Digits with Lightning: one callback, and the module knows nothing of it.

python examples/lightning_training.py --devices 2     two processes share out the layers
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import lightning
import torch
import torch.nn.functional as F
from digits import DigitsNet, digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ocnn_fused.integrations.lightning import OrthCallback


class DigitsModule(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsNet()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--weight", type=float, default=0.01, help="lambda")
    options = parser.parse_args(arguments)
    lightning.seed_everything(0)
    images, labels, test_images, test_labels = digits()
    orth = OrthCallback(weight=options.weight)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="auto",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[orth],
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        DigitsModule(),
        DataLoader(TensorDataset(images, labels), batch_size=64 // options.devices, shuffle=True),
        DataLoader(TensorDataset(test_images, test_labels), batch_size=256),
    )
    if trainer.is_global_zero:
        print(orth.regularizer)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main())
