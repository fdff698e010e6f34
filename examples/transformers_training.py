"""Digits with the Hugging Face Trainer: OrthTrainer instead of Trainer.

python examples/transformers_training.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from digits import DigitsNet, digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, TrainingArguments

from ocnn_fused.integrations.transformers import OrthTrainer


class Digits(Dataset[dict[str, Tensor]]):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """Trainer wants a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsNet()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--weight", type=float, default=0.01, help="lambda")
    options = parser.parse_args(arguments)
    images, labels, test_images, test_labels = digits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = OrthTrainer(
            Classifier(),
            TrainingArguments(
                output_dir=folder,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=64,
                per_device_eval_batch_size=256,
                learning_rate=3e-3,
                logging_steps=10,
                eval_strategy="epoch",
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                seed=0,
            ),
            train_dataset=Digits(images, labels),
            eval_dataset=Digits(test_images, test_labels),
            compute_metrics=accuracy,
            orth={"weight": options.weight},
        )
        trainer.train()
    print(trainer.orth)
    return trainer.state.log_history


if __name__ == "__main__":
    main()
