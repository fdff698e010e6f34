"""Digits with Accelerate: two lines more than without the regulariser.

python examples/accelerate_training.py
accelerate launch --cpu --num_processes 2 examples/accelerate_training.py     two processes share out the layers
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import DigitsNet, digits
from torch.utils.data import DataLoader, TensorDataset

from ocnn_fused import OrthRegularizer


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--weight", type=float, default=0.01, help="lambda")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimiser step")
    options = parser.parse_args(arguments)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    images, labels, test_images, test_labels = digits()
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reg = OrthRegularizer(model, weight=options.weight)  # after prepare, so that it sees how the model is wrapped
    for epoch in range(options.epochs):
        model.train()
        for image, label in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(image), label) + reg()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: {sum(reg.per_layer().values()).item():.3f} left of the unweighted loss")
    model.eval()
    with torch.no_grad():
        accuracy = (accelerator.unwrap_model(model)(test_images).argmax(1) == test_labels).double().mean().item()
    accelerator.print(reg)
    accelerator.print(f"test accuracy {accuracy:.1%}")
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
