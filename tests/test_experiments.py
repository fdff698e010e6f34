"""The experiments' runner: keys, lines, resuming with the same bits, the table, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from experiments import optimizer_table, plan, tiny
from experiments.__main__ import main
from experiments.attack import Attack
from experiments.classification import Classification
from experiments.config import Config, Line, configured
from experiments.filters import Filters
from experiments.gan import Gan
from experiments.inpainting import Inpainting
from experiments.lengths import CELLS, SEEDS, TaskClipped, runs_of
from experiments.lengths_table import Found, against_best, against_plain, lengths
from experiments.methods import METHODS, Method, Regularization
from experiments.networks import backbone
from experiments.optimizers import OPTIMIZERS, Optimized
from experiments.plan import (
    CHOOSING_SEEDS,
    COMPARED,
    EXPERIMENTS,
    GRIDS,
    OPTIMIZER_FINALISTS,
    OPTIMIZER_GRIDS,
    OPTIMIZER_ROWS,
    Plan,
    small,
)
from experiments.retrieval import Neighbours, Proxies
from experiments.runner import RESULTS, Context, Stopped, run
from experiments.table import Difference, Section, percent, results
from experiments.training import augmented, batch_indices

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def corrupts_memory_without_avx512(module: nn.Module) -> bool:
    """A strided 1x1 convolution of so few channels that torch's backward writes past its buffer, on some processors."""
    if not isinstance(module, nn.Conv2d):
        return False
    return module.kernel_size == (1, 1) and max(module.stride) > 1 and module.in_channels // module.groups < 8


@pytest.fixture(autouse=True)
def no_layer_that_corrupts_memory() -> Iterator[None]:
    """On any processor a test fails that would end its process on some."""

    def look(module: nn.Module, _: object) -> None:
        assert not corrupts_memory_without_avx512(module), module

    handle = register_module_forward_pre_hook(look)
    yield
    handle.remove()


def context(data: Path, folder: Path, **options: Any) -> Context:
    return Context(data, folder / "work", folder / "results", progress=False, **options)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_every_setting_counts_in_the_key() -> None:
    config = Classification()
    others = [replace(config, rate=0.2), replace(config, seed=1), replace(config, method="ocnn"),
              replace(config, choosing=True), replace(config, steps=601)]  # fmt: skip
    keys = {one.key for one in (config, *others)}
    assert len(keys) == 6
    assert Classification().key == config.key
    assert Attack().key != Filters().key


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_command_gives_the_configuration_back(experiment: str) -> None:
    kind = EXPERIMENTS[experiment].config
    config = replace(kind(), method="ocnn-free", weight=1 / 3, rate=3e-4, seed=5, choosing=True)
    words = config.command.split()
    assert words[:5] == ["python", "-m", "experiments", "run", experiment]
    assert configured(kind, words[5:-2]) == config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("width", "must be name=value with one of method, rate"),
        ("size=3=4", "size must be int, got '3=4'"),
        ("rate=fast", "rate must be float, got 'fast'"),
        ("no_such=1", "got 'no_such=1'"),
        ("choosing=yes", "must be True or False, got 'choosing=yes'"),
    ],
)
def test_wrong_settings_are_named(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(Classification, [word])


@pytest.mark.parametrize(("method", "weight"), [("plain", 0.1), ("ocnn", 0.0), ("no_such", 0.1)])
def test_wrong_methods_are_named(method: Method, weight: float) -> None:
    with pytest.raises(ValueError, match=r"(weight must be 0 for the plain method|method must be one of plain, )"):
        Regularization(method, weight, torch.nn.Conv2d(4, 4, 3))


def test_methods_are_what_they_are_called() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 6, 3, bias=False)
    flat = model.weight.detach().flatten(1).double()
    gram = flat @ flat.T - torch.eye(6)
    assert float(Regularization("plain", 0.0, model).loss()) == 0
    methods: tuple[Method, ...] = ("kernel", "srip", "ocnn", "ocnn-free")
    kernel, srip, ocnn, free = (Regularization(method, 0.5, model).loss().item() for method in methods)
    assert kernel == pytest.approx(0.5 * gram.square().sum().item(), rel=1e-5)
    norm = 0.5 * torch.linalg.matrix_norm(gram, 2).item() ** 2
    assert 0.9 * norm < srip <= norm * (1 + 1e-5)  # by power iterations, from below
    assert ocnn > kernel  # it has the kernel's terms and more
    assert free < ocnn
    projection = Regularization("projection", 1.0, model)
    assert float(projection.loss()) == 0
    before = Regularization("ocnn", 1.0, model).loss().item()
    projection.after_step()
    assert Regularization("ocnn", 1.0, model).loss().item() < before


def test_batches_have_every_image_once() -> None:
    seen = torch.cat([batch_indices(3, step, 20, 5) for step in range(4)])
    assert sorted(seen.tolist()) == list(range(20))
    assert batch_indices(3, 4, 20, 5).tolist() != batch_indices(3, 0, 20, 5).tolist()


def test_augmentation_shifts_and_mirrors() -> None:
    torch.manual_seed(0)
    image = torch.arange(1, 49, dtype=torch.uint8).reshape(1, 3, 4, 4)
    possible = set()
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    for top in range(3):
        for left in range(3):
            part = padded[0, :, top : top + 4, left : left + 4]
            possible |= {tuple(part.flatten().tolist()), tuple(part.flip(2).flatten().tolist())}
    made = {tuple(one.flatten().tolist()) for one in augmented(image.expand(300, -1, -1, -1), 1)}
    assert made == possible


@pytest.mark.parametrize("network", ["resnet18", "resnet18-stem", "wideresnet"])
def test_small_networks_run_on_every_processor(network: str) -> None:
    config = small(Classification(network=network))
    assert not any(map(corrupts_memory_without_avx512, backbone(network, 10, config.width).modules()))
    assert any(map(corrupts_memory_without_avx512, backbone(network, 10, 4).modules()))


# -- resuming ----------------------------------------------------------------------------------------------------------


class StopAfter:
    """Says stop at the n-th question."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


RESUMED: list[Config] = [
    Classification(method="ocnn", weight=0.1, fraction=0.5),
    Classification(method="projection", weight=0.1),
    Classification(method="ocnn-auto", weight=1.0),
    TaskClipped(method="kernel-auto", weight=0.5),
    Inpainting(method="srip", weight=1e-3),
    Gan(method="ocnn-free", weight=0.01),
    Gan(method="ocnn-auto", weight=1.0),
    Proxies(method="kernel", weight=0.01, base_weight=0.1),
    Neighbours(method="ocnn", weight=0.1),
    Attack(images=8),
    Filters(),
    *(Optimized(optimizer=optimizer, rate=0.01) for optimizer in OPTIMIZERS),
]


@pytest.mark.parametrize(
    "config", RESUMED, ids=lambda config: f"{config.experiment}-{getattr(config, 'optimizer', config.method)}"
)
def test_interrupted_runs_give_the_same_bits(config: Config, data: Path, tmp_path: Path) -> None:
    config = small(config)
    if hasattr(config, "steps"):
        config = replace(config, steps=6)
    if hasattr(config, "base_steps"):
        config = replace(config, base_steps=8)
    whole = context(data, tmp_path / "whole")
    expected = run(config, whole, EXPERIMENTS)
    interrupted, stops = context(data, tmp_path / "interrupted"), 0
    for count in range(1, 100):
        interrupted.stop = StopAfter(count % 3 + 1)
        torch.manual_seed(count)  # whatever the process did in between
        try:
            found = run(config, interrupted, EXPERIMENTS)
            break
        except Stopped:
            stops += 1
    assert stops >= 1
    assert json.dumps(found.result) == json.dumps(expected.result)
    kept, again = ({path.name: torch.load(path, weights_only=True) for path in one.work.glob("*.kept.pt")}
                   for one in (whole, interrupted))  # fmt: skip
    assert kept.keys() == again.keys()
    for name, tensors in kept.items():
        assert all(torch.equal(value, again[name][key]) for key, value in tensors.items())


def test_same_seed_pairs_the_methods(data: Path, tmp_path: Path) -> None:
    """First weights, images and batches are those of the plain run: without a step nothing differs."""
    place = context(data, tmp_path)
    scores = []
    for method in METHODS:
        config = small(Classification(method, weight=0.0 if method == "plain" else 1e-30, seed=4))
        scores.append(run(config, place, EXPERIMENTS).result["training_loss"])
    assert len(set(scores)) == 1


def test_finished_runs_are_not_repeated(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = context(data, tmp_path)
    config = small(Inpainting())
    run(config, place, EXPERIMENTS)
    run(config, place, EXPERIMENTS)
    assert len((place.results / "inpainting.jsonl").read_text().splitlines()) == 1
    assert "gave the same result as its line" in capsys.readouterr().out
    path = place.results / "inpainting.jsonl"
    line = json.loads(path.read_text())
    line["result"]["psnr"] += 1
    path.write_text(json.dumps(line) + "\n")
    run(config, place, EXPERIMENTS)
    assert "gave ANOTHER RESULT than its line" in capsys.readouterr().out


def test_a_killed_process_continues(data: Path, tmp_path: Path) -> None:
    """SIGTERM ends a run with a checkpoint, and the same command continues to the same line."""
    settings = ["method=ocnn", "weight=0.1", "steps=400", "width=8", "batch=8"]

    def command(folder: str) -> list[str]:
        place = tmp_path / folder
        return [sys.executable, "-m", "experiments", "run", "classification", *settings, "--data", str(data),
                "--work", str(place / "work"), "--results", str(place / "results")]  # fmt: skip

    process = subprocess.Popen(command("killed"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    shown = ""
    while "/400" not in shown:  # the bar appears when training begins
        shown += process.stderr.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    results = {folder: tmp_path / folder / "results" / "classification.jsonl" for folder in ("killed", "whole")}
    assert process.returncode == 3
    assert not results["killed"].exists()
    assert len(list((tmp_path / "killed" / "work").glob("*[!d].pt"))) == 1  # the checkpoint
    for folder in results:
        subprocess.run(command(folder), cwd=ROOT, check=True, capture_output=True)
    killed, whole = (json.loads(path.read_text()) for path in results.values())
    assert killed["result"] == whole["result"]


def test_stop_file_ends_the_queue(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "stop").touch()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        options = ["--data", str(data), "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
        assert main(["queue", *options]) == 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "the same command continues" in capsys.readouterr().out


def test_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = main(["run", "classification", "--data", str(tmp_path), "--work", str(tmp_path / "work")])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert code == 2
    assert "cifar-100-binary/train.bin is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "classification"])
    assert "--data must name the folder" in capsys.readouterr().err


# -- lambda at each length ---------------------------------------------------------------------------------------------


def test_steered_methods_steer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(4, 6, 3, bias=False)
    for method, kind in (("ocnn-auto", "conv"), ("kernel-auto", "kernel")):
        regularization = Regularization(method, 0.5, model)
        assert regularization.regularizer is not None
        assert regularization.regularizer.method == kind
        assert regularization.regularizer.tolerance == 0.5
        regularization.loss()
        saved = regularization.state_dict()
        other = Regularization(method, 0.5, model)
        assert other.state_dict()["lambda"] != saved["lambda"]
        other.load_state_dict(saved)
        assert other.state_dict()["lambda"] == saved["lambda"]


def test_the_tasks_gradient_alone_is_clipped(data: Path, tmp_path: Path) -> None:
    """With a penalty beyond all measure the weights move as far as it says, or no farther than the norm allows."""
    moved = []
    for kind in (Classification, TaskClipped):
        config = replace(small(kind(method="ocnn", weight=1e4, rate=1e-6)), steps=1)
        task = EXPERIMENTS[config.experiment].start(config, context(data, tmp_path))
        before = [weight.detach().clone() for weight in task.model.parameters()]
        task.advance(0)
        pairs = zip(task.model.parameters(), before, strict=True)
        moved.append(float(torch.stack([(after - old).norm() for after, old in pairs]).norm().detach()))
    assert moved[0] == pytest.approx(5 * 1.9e-6, rel=0.05)  # Nesterov's first step is 1.9 times the rate
    assert moved[1] > 10 * moved[0]


def test_the_runs_that_decide_come_first() -> None:
    stages = list(runs_of(CELLS, SEEDS))
    first = [(config.steps, config.method) for _, configs in stages[:3] for config in configs]
    assert {steps for steps, _ in first} == {600, 1200, 6000}
    assert {method for _, method in first} == {"plain", "ocnn", "ocnn-auto"}
    every = [config for _, configs in stages for config in configs]
    assert len({config.key for config in every}) == len(CELLS) * 3 * 16 + 9
    assert all(config.rate == 0.1 and not config.choosing for config in every)


def test_verdicts(data: Path, tmp_path: Path) -> None:
    """By hand: differences of 1, 2, 3 have the standard error 0.577 and the half interval 2.48."""
    assert against_plain(None) == against_plain(Difference([1.0, 2.0])) == "needs three seeds"
    assert against_plain(Difference([1.0, 2.0, 3.0])) == "not below"
    assert against_plain(Difference([2.0, 3.0, 4.0])) == "**above**"
    assert against_plain(Difference([-2.0, -3.0, -4.0])) == "**BELOW**"
    assert against_best(Difference([-0.5, 0.5, -1.0]), True) == "yes"
    assert against_best(Difference([-1.0, -2.0, -3.0]), True) == "**NO**"
    assert against_best(Difference([1.0, 2.0, 3.0]), False) == "grid not complete"
    assert against_best(Difference([1.0]), True) == "needs three seeds"

    place = context(data, tmp_path)
    assert lengths(CELLS, place) == ["Not run yet."]
    cell, accuracies = CELLS[0], {"plain": 0.3, "ocnn": 0.31, "ocnn-auto": 0.33}
    place.results.mkdir()
    lines = []
    for seed in SEEDS:
        for config in cell.runs(("plain", "ocnn", "ocnn-auto"), seed):
            accuracy = accuracies[config.method] + 0.01 * seed * (config.method != "plain")
            accuracy += 0.005 * (config.weight == 0.001)  # the best of the grid
            lines.append({"experiment": "classification", "key": config.key, "config": {}, "torch": "",
                          "result": {"accuracy": accuracy}, "timing": {}, "command": config.command})  # fmt: skip
    (place.results / "classification.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = Found(cell, place)
    assert found.best("ocnn") == 0.001
    assert found.is_complete("ocnn")
    text = "\n".join(lengths(CELLS, place))
    assert (
        "| 30.00 (3) | 32.50 (3, 0.001) | 34.00 (3) | +4.00 ± 0.58 (3) | **above** | +1.50 ± 0.00 (3) | yes |" in text
    )
    assert "width 8, 100% of the labels, 1200 steps" in text[text.index("Not run yet: ") :]


# -- plan and table ----------------------------------------------------------------------------------------------------


def test_methods_have_the_same_number_of_trials() -> None:
    for grid in GRIDS.values():
        assert len({len(grid.settings(method)) for method in METHODS}) == 1


def test_choice_takes_the_best_trial(tmp_path: Path, data: Path) -> None:
    place = context(data, tmp_path)
    runs = Plan(place, smoke=True)
    with pytest.raises(plan.NotChosen, match="classification, ocnn: python -m experiments run"):
        runs.chosen("classification", "ocnn")
    trials = runs.trials("classification", "ocnn")
    for trial in trials:
        run(trial, place, EXPERIMENTS)
    assert [trial.seed for trial in trials] == [100, 100, 101, 101]
    assert [trial.weight for trial in trials] == [trials[0].weight, trials[1].weight] * 2
    assert all(trial.choosing for trial in trials)
    assert not set(CHOOSING_SEEDS) & set(SEEDS)
    path = place.results / "classification.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def chosen(*accuracies: float) -> int:
        for line, accuracy in zip(lines, accuracies, strict=True):
            line["result"]["accuracy"] = accuracy
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
        return [trial.weight for trial in trials].index(runs.chosen("classification", "ocnn").weight)

    assert chosen(0.2, 0.1, 0.2, 0.4) == 1  # the mean over the seeds decides
    assert chosen(0.2, 0.1, 0.2, 0.2) == 0
    assert chosen(0.2, 0.9, 0.2, float("nan")) == 0  # a training that exploded never wins


def made_up(config: Optimized, accuracy: float) -> Line:
    result = {"accuracy": accuracy, "curve": [{"step": 600, "accuracy": accuracy / 2}]}
    timing = {"training_seconds": 60.0, "curve_seconds": [30.0], "processor_seconds": 61.0}
    return Line("optimizers", config.key, asdict(config), result, timing, "torch", config.command)


def test_optimizers_are_chosen_by_two_seeds_of_the_best(tmp_path: Path) -> None:
    place = Context(Path(), Path(), tmp_path)
    runs = Plan(place)
    assert len({len(runs.optimizer_trials(optimizer)) for optimizer in OPTIMIZERS}) == 1
    with pytest.raises(plan.NotChosen, match=r"sgd: python -m experiments run optimizers rate=0\.05 seed=100"):
        runs.second_optimizer_trials("sgd")
    for number, trial in enumerate(runs.optimizer_trials("sgd")):
        place.append(made_up(trial, 0.1 + 0.01 * number))
    second = runs.second_optimizer_trials("sgd")
    assert len(second) == OPTIMIZER_FINALISTS
    assert [(trial.rate, trial.decay) for trial in second] == [(0.4, 1e-2), (0.4, 3e-3), (0.4, 5e-4), (0.2, 1e-2)]
    assert all(trial.choosing and trial.seed == CHOOSING_SEEDS[1] for trial in second)
    for trial, accuracy in zip(second, (0.1, 0.1, 0.3, 0.1), strict=True):
        place.append(made_up(trial, accuracy))
    config = next(iter(OPTIMIZER_ROWS.values()))
    chosen = runs.optimizer_run(config, "sgd", 2)
    assert (chosen.rate, chosen.decay, chosen.seed, chosen.choosing) == (0.4, 5e-4, 2, False)
    assert set(OPTIMIZER_GRIDS) == set(OPTIMIZERS)


def test_the_optimizers_part_of_the_page(tmp_path: Path) -> None:
    place = Context(Path(), Path(), tmp_path / "results")
    runs, page = Plan(place), tmp_path / optimizer_table.PAGE
    page.write_text(f"before\n\n{optimizer_table.BEGIN}{optimizer_table.END}\n\nafter\n")
    optimizer_table.write(runs, tmp_path)
    empty = page.read_text()
    assert empty.count("Not run yet.") == len(OPTIMIZERS) + len(OPTIMIZER_ROWS)
    for optimizer, best in zip(OPTIMIZERS, (0.2, 0.3, 0.4, 0.5), strict=True):
        for trial in runs.optimizer_trials(optimizer):
            place.append(made_up(trial, 0.1))
        for trial in runs.second_optimizer_trials(optimizer):
            place.append(made_up(trial, 0.1))
        for seed in SEEDS:
            config = runs.optimizer_run(next(iter(OPTIMIZER_ROWS.values())), optimizer, seed)
            place.append(made_up(config, best + 0.01 * seed))
    optimizer_table.write(runs, tmp_path)
    text = page.read_text()
    assert "| operator | 51.00 (3) | +30.00 ± 0.00 (3) | +10.00 ± 0.00 (3) | 50.0 | +0% |" in text
    assert "| adamw | 15.5 (30 s) |" in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    optimizer_table.write(runs, tmp_path)
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"must have the line <!-- training"):
        optimizer_table.write(runs, tmp_path)


def test_differences_are_paired() -> None:
    score = percent("top-1", "accuracy")
    assert Difference([1.0, 2.0, 6.0]).write(score) == "+3.00 ± 1.53 (3)"
    assert Difference([1.0, 2.0]).write(score) == "+1.50 (2)"
    section = Section("", Classification(), [score])

    def line(value: float) -> Any:
        return type("Line", (), {"result": {"accuracy": value}})

    section.lines = {"plain": {0: line(0.1), 1: line(0.2)}, "ocnn": {1: line(0.3), 2: line(0.9)}}
    assert "| top-1, % | 15.00 (2) | 60.00 (2) |" in results(section)
    assert "| — minus plain |  | +10.00 (1) |" in results(section)


@pytest.mark.skipif(not RESULTS.exists(), reason="no results yet")
def test_committed_lines_are_of_known_runs() -> None:
    place = Context(Path(), Path(), RESULTS)
    for name, experiment in EXPERIMENTS.items():
        for key, line in place.lines(name).items():
            config = experiment.config(**line.config)
            assert config.key == key
            assert config.command == line.command


def test_compared_methods_come_first() -> None:
    assert COMPARED == ("plain", "kernel", "srip", "ocnn")


@pytest.mark.slow
def test_smoke_runs_everything() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments", "queue", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 figures" in done.stdout
