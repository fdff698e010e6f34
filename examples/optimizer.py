"""Handwritten digits with orthogonal updates: ``python examples/optimizer.py --mode operator``; needs scikit-learn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from digits import DigitsNet, digits

from ocnn_fused.optim import Muon


def main(arguments: Sequence[str] | None = None) -> float:
    """Train a small network and return the share of the test images that it has right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("operator", "flatten", "per_tap"), default="operator")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    model = DigitsNet()
    optimizer = Muon(model, options.rate, weight_decay=0.01, mode=options.mode)
    print(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for epoch in range(options.epochs):
        for batch in torch.randperm(len(images)).split(50):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    model.eval()
    accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    print(f"{accuracy:.1%} of the test images")
    return accuracy


if __name__ == "__main__":
    main()
