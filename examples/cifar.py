"""CIFAR-10 or CIFAR-100: a ResNet-18 for 32x32 images, with lambda 0.01.

The paper's lambda for CIFAR is 0.1, but the loss grows with the fourth power of the weights: at this learning rate
training then becomes infinite within 15 steps, unless gradients are clipped, as they are here, for any lambda.

python examples/cifar.py --data cifar-10-batches-bin     the binary version, unpacked; or cifar-100-binary
python examples/cifar.py --epochs 1 --width 8            without data: random images, to see that it runs
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer

FILES = {"train": ("data_batch_*.bin", "train.bin"), "test": ("test_batch.bin", "test.bin")}


def images(folder: Path | None, split: str) -> tuple[Tensor, Tensor]:
    """Images ``(N, 3, 32, 32)`` from -1 to 1, and labels; a record is one label or two, of which the last counts."""
    if folder is None:
        return 2 * torch.rand(64, 3, 32, 32) - 1, torch.randint(10, (64,))
    paths = sorted(path for pattern in FILES[split] for path in folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"--data must hold {' or '.join(FILES[split])}, got {folder}")
    labels = 2 if paths[0].name in ("train.bin", "test.bin") else 1
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    records = data.reshape(-1, labels + 3 * 32 * 32)
    return records[:, labels:].reshape(-1, 3, 32, 32).float() / 127.5 - 1, records[:, labels - 1].long()


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


def resnet18(width: int, classes: int) -> nn.Module:
    blocks, channels = [], width
    for stage in range(4):
        for index in range(2):
            blocks.append(Block(channels, width << stage, 2 if stage and not index else 1))
            channels = width << stage
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def augmented(batch: Tensor) -> Tensor:
    """Shifted by up to 4 pixels and mirrored, all images of a batch alike."""
    y, x = torch.randint(9, (2,)).tolist()
    batch = F.pad(batch, (4, 4, 4, 4))[:, :, y : y + 32, x : x + 32]
    return batch.flip(3) if torch.rand(()) < 0.5 else batch


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--weight", type=float, default=0.01, help="lambda")
    parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradient")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train, labels = images(options.data, "train")
    test, test_labels = (part.to(device) for part in images(options.data, "test"))
    model = resnet18(options.width, int(labels.max()) + 1).to(device)
    reg = OrthRegularizer(model, weight=options.weight)
    print(reg)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    left = accuracy = 0.0
    for epoch in range(options.epochs):
        model.train()
        for index in torch.randperm(len(labels)).split(options.batch):
            loss = F.cross_entropy(model(augmented(train[index]).to(device)), labels[index].to(device)) + reg()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            batches = zip(test.split(500), test_labels.split(500), strict=True)
            right = [(model(x).argmax(1) == y).sum() for x, y in batches]
        accuracy = sum(right).item() / len(test_labels)
        left = sum(loss.item() - reg.layers[name].floor for name, loss in reg.per_layer().items())
        print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}, orthogonality loss above its least value {left:.3f}")
    return accuracy, left


if __name__ == "__main__":
    main()
