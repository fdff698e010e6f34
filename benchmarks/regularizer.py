"""What the ways to use OrthRegularizer cost on a CPU, interleaved in one process: ``python benchmarks/regularizer.py``.

For a ResNet: the value with its gradient (``reg()``, backward), ``add_grad_`` into gradients that are there,
``project_`` with and without its checks, with a free target, and with lambdas that are steered; and the memory that
``add_grad_`` and ``project_`` take. Then the host's part of ``reg()`` and ``add_grad_``: 36 convolutions of 1x1x3x3, as
many as a ResNet-34 has, whose arithmetic takes next to nothing. Last what the Triton backend would allocate for a
ResNet-34 on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from memory import in_child, rise_during
from resnet import ResNet
from tables import megabytes, number, ratio, table
from timing import CpuTimer, Effort, interleave
from torch import nn

from ocnn_fused import OrthRegularizer, engine
from ocnn_fused.backends import triton
from ocnn_fused.backends.triton.tables import passes_of, workspace_of
from ocnn_fused.plan import Plan
from ocnn_fused.problem import Options, Precision

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
HOST_LAYERS = 36
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")


def timed(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call, in turn."""
    for call in contestants.values():
        call()
    return interleave(contestants, CpuTimer(), Effort.exactly(rounds))


def compared(found: dict[str, list[float]], base: str) -> str:
    rows = [
        {
            "": name,
            "median ms": f"{1e3 * median(times):.3f}",
            "least ms": f"{1e3 * min(times):.3f}",
            f"median ratio to {base}": f"{median(a / b for a, b in zip(times, found[base], strict=True)):.3f}",
            "ratio of least": f"{min(times) / min(found[base]):.3f}",
        }
        for name, times in found.items()
    ]
    return table(rows)


def network_contestants(depths: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model = ResNet(depths, 1000, cifar=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made = {target: OrthRegularizer(model, target=target) for target in (1, "free")}  # type: ignore[arg-type]
    reg, free, steered = made[1], made["free"], OrthRegularizer(model, "auto")
    # So small a rate that the weights stay what they are for all of them; the arithmetic is the same.
    return {
        "add_grad_": reg.add_grad_,
        "reg(), backward": lambda: reg().backward(),
        "project_": lambda: reg.project_(rate=1e-6),
        "project_, always checked": lambda: reg.project_(rate=1e-6, safe="always"),
        "project_, unchecked": lambda: reg.project_(rate=1e-6, safe=False),
        "add_grad_, free": free.add_grad_,
        "reg(), backward, free": lambda: free().backward(),
        "add_grad_, auto": steered.add_grad_,
        "reg(), backward, auto": lambda: steered().backward(),
    }


def host_contestants() -> dict[str, Callable[[], object]]:
    model = nn.Sequential(*(nn.Conv2d(1, 1, 3, bias=False) for _ in range(HOST_LAYERS)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    reg, steered = (OrthRegularizer(model, weight, include=nn.Conv2d) for weight in (0.01, "auto"))
    return {
        "reg()": reg,
        "reg(), backward": lambda: reg().backward(),
        "add_grad_": reg.add_grad_,
        "reg(), auto": steered,
        "add_grad_, auto": steered.add_grad_,
    }


def _peak(name: str, depths: tuple[int, ...], threads: int, has_gradients: bool) -> int:
    """Of two calls, in a child: the second may keep what the first has allocated."""
    torch.set_num_threads(threads)
    tiny = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 1))
    model = ResNet(depths, 1000, cifar=False)
    for parameter in (*tiny.parameters(), *(model.parameters() if has_gradients else ())):
        parameter.grad = torch.zeros_like(parameter)
    getattr(OrthRegularizer(tiny), name)()  # starts the threads
    call = getattr(OrthRegularizer(model), name)
    return rise_during(lambda: (call(), call()))


def memory(depths: tuple[int, ...], threads: int) -> str:
    rows = []
    for has_gradients in (True, False):
        found = {name: in_child(_peak, name, depths, threads, has_gradients) for name in ("add_grad_", "project_")}
        cells = {f"{name} MB": megabytes(value) for name, value in found.items()}
        share = ratio(found["project_"], found["add_grad_"])
        where = "gradients are there" if has_gradients else "no gradients yet"
        rows.append({"peak memory": where, **cells, "project_ / add_grad_": number(share, "{:.2f}")})
    return table(rows)


def workspace(depths: tuple[int, ...]) -> str:
    """Of the Triton backend, which works on the list in several passes."""
    reg = OrthRegularizer(ResNet(depths, 1000, cifar=False))
    lines = []
    for precision in PRECISIONS:
        options = Options(backend="triton", precision=precision)
        chosen = [engine.choose(layer.problem, torch.float32, "A100", options).plan for layer in reg.layers.values()]
        plans = [plan for plan in chosen if isinstance(plan, Plan)]
        passes = passes_of(plans, [True] * len(plans), precision, triton.workspace_limit())
        most = max(sum(workspace_of(plans[place], 4, True) for place in one) for one in passes)
        lines.append(f"{precision}: at most {most / 2**20:.0f} MB of workspace in {len(passes)} passes")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=DEPTHS, default="resnet18")
    parser.add_argument("--rounds", type=int, default=11, help="default: 11")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.network}, {options.threads} threads\n")
    print(compared(timed(network_contestants(DEPTHS[options.network]), options.rounds), "add_grad_"))
    print(f"\n{memory(DEPTHS[options.network], options.threads)}")
    print(f"\nhost: {HOST_LAYERS} convolutions of 1x1x3x3\n")
    print(compared(timed(host_contestants(), 5 * options.rounds), "reg()"))
    print("\n" + workspace(DEPTHS["resnet34"]))


if __name__ == "__main__":
    main()
