"""The problem in each framework; as a script, solved by two processes each, of which rank 0 saves the weights.

python tests/integrations/frameworks.py FOLDER lightning transformers accelerate
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from problem import IMAGES, OPTIONS, RATE, STEPS, data, network
from torch import Tensor, nn
from torch.distributed.launcher import LaunchConfig, elastic_launch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from ocnn_fused import OrthRegularizer
from ocnn_fused.regularizer import selection
from ocnn_fused.regularizer.distributed import balanced_shares

Weights = dict[str, Tensor]

#: The module that brings each framework with it.
IMPORTED = {
    "lightning": "ocnn_fused.integrations.lightning",
    "transformers": "ocnn_fused.integrations.transformers",
    "accelerate": "accelerate",
}


def lightning_module(task: float = 1.0, fully_sharded: bool = False) -> Any:
    from lightning import LightningModule
    from torch.distributed.fsdp import fully_shard

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels = batch
            return task * F.cross_entropy(self.net(images), labels)

        def configure_model(self) -> None:
            if fully_sharded:
                fully_shard(self.net[0])
                fully_shard(self.net)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Module()


def lightning_trainer(**options: Any) -> Any:
    from lightning import Trainer

    unwanted = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(**{"accelerator": "cpu", "max_steps": STEPS, **dict.fromkeys(unwanted, False), **options})


def images_in_order(batch: int, sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=batch, sampler=sampler)


def lightning_strategy(variant: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    if variant == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return "ddp_find_unused_parameters_true" if variant == "unused" else "ddp"


def train_lightning(world: int = 1, accumulate: int = 1, task: float = 1.0, **options: Any) -> Weights:
    from ocnn_fused.integrations.lightning import OrthCallback

    module = lightning_module(task, fully_sharded="ModelParallel" in type(options.get("strategy")).__name__)
    parallel: dict[str, Any] = {"devices": world}
    sampler = None
    if world > 1:  # its own sampler would shuffle
        parallel.update(use_distributed_sampler=False)
        sampler = DistributedSampler(data()[1], world, int(os.environ["RANK"]), shuffle=False)
    trainer = lightning_trainer(
        callbacks=[OrthCallback(**OPTIONS)], accumulate_grad_batches=accumulate, **parallel, **options
    )
    trainer.fit(module, images_in_order(IMAGES // STEPS // world // accumulate, sampler))
    state = module.net.state_dict()
    return {name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight for name, weight in state.items()}


class Classifier(nn.Module):
    """Takes and returns what a Trainer wants."""

    def __init__(self, task: float) -> None:
        super().__init__()
        self.net = network()
        self.task = task

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": self.task * F.cross_entropy(logits, labels), "logits": logits}


def transformers_trainer(
    folder: str, world: int = 1, accumulate: int = 1, task: float = 1.0, orth_log_layers: bool = False, **options: Any
) -> Any:
    from transformers import TrainingArguments

    from ocnn_fused.integrations.transformers import OrthTrainer

    class InOrder(OrthTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    defaults = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": IMAGES // STEPS // world // accumulate,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    examples = [{"images": image, "labels": label} for image, label in zip(*data(), strict=True)]
    return InOrder(
        Classifier(task),
        TrainingArguments(**{**defaults, **options}),
        train_dataset=examples,
        orth=OPTIONS,
        orth_log_layers=orth_log_layers,
    )


def train_transformers(folder: str, **options: Any) -> Weights:
    trainer = transformers_trainer(folder, **options)
    trainer.train()
    return trainer.model.net.state_dict()


def train_accelerate(world: int = 1, accumulate: int = 1, attach: bool = False) -> Weights:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    plain = network()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=RATE), images_in_order(IMAGES // STEPS // world // accumulate)
    )
    reg = OrthRegularizer(model, **OPTIONS)
    if attach:
        reg.attach(optimizer)
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels) + reg())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not attach:
            reg.step()
    return plain.state_dict()


def solve(framework: str, path: str) -> None:
    # A DDP that looks for unused layers averages the used ones only, and FSDP gathers all: nothing is shared out.
    framework, _, variant = framework.partition("-")
    shared_out: list[int] = []  # world sizes that layers were shared out for

    def spy(costs: Sequence[float], world: int) -> list[tuple[int, ...]]:
        shared_out.append(world)
        return balanced_shares(costs, world)

    selection.balanced_shares = spy  # type: ignore[assignment]
    if framework == "lightning":
        weights = train_lightning(world=2, accumulate=2, strategy=lightning_strategy(variant))
    elif framework == "transformers":
        weights = train_transformers(
            f"{path}.folder", world=2, accumulate=2, ddp_find_unused_parameters=None if variant else False
        )
    else:
        weights = train_accelerate(world=2, accumulate=2)
    assert shared_out == ([] if variant else [2])
    if torch.distributed.get_rank() == 0:
        torch.save(weights, path)
    torch.distributed.destroy_process_group()


def main(folder: str, *frameworks: str) -> None:
    """As ``torchrun --standalone --nproc-per-node 2`` does for each, but what they import is imported only once."""
    mp.set_forkserver_preload([IMPORTED[framework.partition("-")[0]] for framework in frameworks])
    for framework in frameworks:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=framework,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="forkserver",
        )
        elastic_launch(config, solve)(framework, f"{folder}/{framework}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
