"""The report: right numbers, safe with any checkpoint, and a page that opens by itself in a real browser."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from cifar_resnet import CifarResNet, tiny
from torch import nn

from ocnn_fused import fused_orth_loss
from ocnn_fused.__main__ import main
from ocnn_fused.report import CheckpointError, findings, load_checkpoint, measure, read_state_dict, report, svg
from ocnn_fused.spectrum import singular_values

TESTS = Path(__file__).resolve().parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MODEL = ["--model", "cifar_resnet:tiny", "--input", "3,8,8"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As the public CIFAR weights are kept: under a key, with a wrapper's prefix."""
    path = tmp_path / "plain.pt"
    state = {f"module.{name}": value for name, value in tiny().state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 91.2}, path)
    return path


def test_numbers_are_those_of_the_functions() -> None:
    model = tiny()
    (network,) = report(model, (3, 8, 8))
    layer = network.layers["layer2.0.conv1"]
    module = model.layer2[0].conv1
    values = singular_values(module, 8).detach()
    assert (layer.shape, layer.stride, layer.input_size) == ((8, 4, 3, 3), (2, 2), (8, 8))
    assert layer.values == len(values)
    assert layer.largest == pytest.approx(values[0].item(), rel=1e-6)
    assert layer.smallest == pytest.approx(values[-1].item(), rel=1e-4)
    assert layer.curve[0] == pytest.approx(layer.largest, rel=1e-4)
    assert layer.loss == pytest.approx(fused_orth_loss(module.weight, 2).item())
    assert sum(layer.histogram) == pytest.approx(1, rel=1e-4)
    assert len(layer.excess) == 4
    assert layer.least_loss == 0
    assert network.layers["linear"].excess == ((pytest.approx(network.layers["linear"].above_least, rel=1e-4),),)


def test_what_many_layers_share_is_said_once() -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(6)]
    for index, layer in enumerate(layers):
        nn.init.dirac_(layer.weight)
        layer.weight.data *= 3 + index
    layers[0].weight.data[:2] = 0
    sentences = findings(measure(nn.Sequential(*layers), (4, 8, 8), title="net"))
    largest = [sentence for sentence in sentences if "largest" in sentence]
    assert len(largest) == 1
    assert largest[0].startswith("6 of 6 layers have singular values above 2, above all 5: largest singular value 8.00")
    assert "0: 2 of 4 filters are dead." in sentences


@pytest.mark.parametrize("shape", ["32", "4,32,32", "3,8,8,8,8,8"])
@pytest.mark.parametrize("command", ["report", "spectrum"])
def test_a_wrong_input_shape_is_a_sentence(
    command: str, shape: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(checkpoint), *MODEL[:2], "--input", shape]) == 2
    sentence = "error: --input must be the shape of one input, such as 3,224,224; "
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(sentence)
    assert str((1, *map(int, shape.split(",")))) in error.replace("(1, 32,)", "(1, 32)")


def test_findings_name_the_layer_the_number_and_the_frequency() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 2, bias=False), nn.Conv1d(2, 2, 1, bias=False), nn.Conv1d(8, 8, 1))
    with torch.no_grad():
        model[0].weight.copy_(2 * torch.eye(2)[:, :, None].expand(2, 2, 2))  # the sum of two pixels, doubled
        model[1].weight.copy_(torch.eye(2)[:, :, None])
    sentences = findings(measure(model[:2], (2, 8), title="net"))
    assert any(
        re.fullmatch(r"0: smallest singular value (0|\S+e-\d+) at the highest frequency\.", text) for text in sentences
    )
    assert "0: largest singular value 4.00 at constant input." in sentences
    assert "1: 100% of the singular values lie within 10% of 1." in sentences
    with torch.no_grad():
        model[2].weight[1:] = model[2].weight[0]
        model[2].weight[3:5] = 0
    (network,) = report(model[2:3], (8, 4))
    assert "2: 2 of 8 filters are dead." in findings(network)
    assert any("its filters are alike" in sentence for sentence in findings(network))


def test_layers_that_cannot_be_looked_at_are_left_out_and_named(tmp_path: Path) -> None:
    model = tiny()
    model.spare = nn.Linear(3, 3)
    with torch.no_grad():
        model.layer1[0].conv1.weight[0, 0, 0, 0] = float("nan")
    (network,) = report(model, (3, 8, 8), tmp_path / "net.html")
    assert network.left_out == {
        "spare": "the input does not reach it",
        "layer1.0.conv1": "weight must be finite, got NaN or infinite entries",
    }
    page = (tmp_path / "net.html").read_text()
    assert "the input does not reach it" in page
    with pytest.raises(ValueError, match="got 'layer9'"):
        report(model, (3, 8, 8), layers=["layer9"])


def test_a_model_that_is_a_layer_has_a_name(tmp_path: Path) -> None:
    (network,) = report(nn.Conv2d(4, 4, 3), (4, 8, 8), tmp_path / "net.html")
    assert list(network.layers) == ["the model"]
    assert ">the model<" in (tmp_path / "net.html").read_text()


class Page(HTMLParser):
    """Counts what a page has, and checks that every element is closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_and_files_beside_it(tmp_path: Path) -> None:
    plain, other = tiny(), CifarResNet(1, width=4)
    networks = report(plain, (3, 8, 8), tmp_path / "net.html", compare=other, titles=("plain", "regularised"))
    text = (tmp_path / "net.html").read_text()
    page = Page(text)
    layers = len(networks[0].layers)
    assert layers == 8
    assert page.counts["tr"] == layers + 1
    maps = 2 * 6  # of the worst six, both networks
    assert page.counts["svg"] == 2 * layers + maps
    assert page.counts["polyline"] == 2 * layers
    for word in ("plain", "regularised", "layer3.0.conv2", "What stands out", "within 10% of 1"):
        assert word in page.text
    assert "script" not in page.counts
    assert not re.search(r"https?:|url\(|@import|\b(src|href|on\w+)=", text)
    content = json.loads((tmp_path / "net.json").read_text())
    assert [network["title"] for network in content["networks"]] == ["plain", "regularised"]
    assert len(content["comparison"]) == layers
    with (tmp_path / "net.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * layers
    assert float(rows[0]["largest"]) == networks[0].layers["conv1"].largest
    with pytest.raises(ValueError, match="name of the HTML file"):
        report(plain, (3, 8, 8), tmp_path / "net.csv")


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Conv2d(3, 4, 3))
    report(model, (3, 8, 8), tmp_path / "net.html", titles=('<img src="x">&', ""))
    page = Page((tmp_path / "net.html").read_text())
    assert not {"script", "img"} & page.counts.keys()
    assert "<script>alert(1)</script>" in page.text


def test_networks_with_different_layers_are_compared_where_they_can_be(tmp_path: Path) -> None:
    first, second = nn.Sequential(nn.Conv1d(2, 3, 3)), nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 3, 3))
    report(first, (2, 9), tmp_path / "net.html", compare=second, titles=("one", "two"))
    page = Page((tmp_path / "net.html").read_text())
    assert page.counts["tr"] == 3
    assert "–" in page.text


def test_images_give_the_similarity_of_the_paper(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    (by_weights,) = report(tiny(), (3, 8, 8), layers=["layer1.0.conv1"])
    (by_images,) = report(tiny(), images, tmp_path / "net.html", layers=["layer1.0.conv1"], images=images)
    assert by_images.layers["layer1.0.conv1"].similarity != by_weights.layers["layer1.0.conv1"].similarity
    assert "guided back-propagation" in (tmp_path / "net.html").read_text()


def test_figures_of_extreme_numbers_are_finite() -> None:
    for values in ([0.0], [0.0, 0.0], [1e9, 1.0], [1e-12]):
        text = svg.curves("t", [values]) + svg.histogram("t", [values]) + svg.heat_map("t", [values], max(values))
        assert not re.search(r"nan|inf", text)
        Page(text)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def broken_checkpoints(folder: Path, made: Path) -> dict[str, tuple[Path, str]]:
    """By kind: a file, and what must be said of it."""
    state = tiny().state_dict()
    good = folder / "good.pt"
    torch.save(state, good)
    files = {
        "code in a zip": (lambda path: torch.save({"state_dict": Payload(made)}, path), "could run code"),
        "code in a pickle": (lambda path: path.write_bytes(pickle.dumps(Payload(made), 2)), "could run code"),
        "code in a new pickle": (lambda path: path.write_bytes(pickle.dumps(Payload(made))), "could run code|damaged"),
        "a whole module": (lambda path: torch.save(nn.Conv2d(1, 1, 1), path), "could run code"),
        "truncated": (lambda path: path.write_bytes(good.read_bytes()[:-500]), "damaged"),
        "half": (lambda path: path.write_bytes(good.read_bytes()[: good.stat().st_size // 2]), "damaged"),
        "text": (lambda path: path.write_text("not a checkpoint"), "damaged"),
        "empty": (lambda path: path.write_bytes(b""), r"is empty \(0 bytes\)"),
        "folder": (lambda path: path.mkdir(), "is not a file"),
        "missing": (lambda path: None, "does not exist"),
        "a tensor": (lambda path: torch.save(torch.zeros(2), path), "holds no weights by name, but a Tensor"),
        "no tensors": (lambda path: torch.save({"epoch": 3}, path), "holds no weights"),
        "wrong shape": (
            lambda path: torch.save({**state, "conv1.weight": torch.zeros(5, 3, 3, 3)}, path),
            r"another shape for conv1.weight than the model: \(5, 3, 3, 3\), not \(4, 3, 3, 3\)",
        ),
        "lacking": (lambda path: torch.save({"conv1.weight": state["conv1.weight"]}, path), "lacks bn1.weight .*more"),
        "another model": (lambda path: torch.save({**state, "head.w": torch.zeros(1)}, path), "has head.w"),
    }
    paths = {}
    for number, (kind, (write, message)) in enumerate(files.items()):
        path = folder / f"broken{number}.pt"
        write(path)
        paths[kind] = path, message
    return paths


KINDS = (
    "code in a zip", "code in a pickle", "code in a new pickle", "a whole module", "truncated", "half", "text",
    "empty", "folder", "missing", "a tensor", "no tensors", "wrong shape", "lacking", "another model",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_broken_checkpoints_run_nothing_and_say_one_sentence(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = tmp_path / "made", tmp_path / "report.html"
    path, message = broken_checkpoints(tmp_path, made)[kind]
    assert main(["report", str(path), *MODEL, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.startswith("error: checkpoint ")
    assert error.count("\n") == 1
    assert not made.exists()
    assert not out.exists()


def test_the_payload_would_have_run(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    made = tmp_path / "made"
    path, _ = broken_checkpoints(tmp_path, made)["code in a zip"]
    torch.load(path, weights_only=False)
    assert made.exists()


def test_no_user_code_is_imported_for_a_broken_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "empty.pt").write_bytes(b"")
    assert main(["report", str(tmp_path / "empty.pt"), "--model", "loud:make", "--input", "3,8,8"]) == 2


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "model_state_dict", "nested", "compiled", "both"])
def test_checkpoints_as_training_scripts_write_them(wrap: str, tmp_path: Path) -> None:
    state = tiny().state_dict()
    prefix = {"compiled": "_orig_mod.", "both": "module._orig_mod."}.get(wrap, "")
    content: Any = {prefix + name: value for name, value in state.items()}
    if wrap in ("state_dict", "model", "model_state_dict"):
        content = {wrap: content, "epoch": 3, "optimizer": {"state": {}}}
    if wrap == "nested":
        content = {"model": {"state_dict": content}}
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    found = read_state_dict(path)
    assert found.keys() == state.keys()
    model = CifarResNet(1, width=4)
    load_checkpoint(model, found, path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_counters_that_old_checkpoints_lack_are_not_missed() -> None:
    state = {name: value for name, value in tiny().state_dict().items() if "num_batches" not in name}
    load_checkpoint(tiny(), state, "old.pt")
    del state["bn1.running_var"]
    with pytest.raises(CheckpointError, match=r"lacks bn1\.running_var: is it of another model"):
        load_checkpoint(tiny(), state, "old.pt")


# ----------------------------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------------------------


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in ("info", "report", "spectrum", "explain"):
        assert re.search(rf"^ +{command} +\w", text, re.MULTILINE)


def test_report_spectrum_explain_and_info(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "net.html"
    assert main(["report", str(checkpoint), *MODEL, "--compare", str(checkpoint), "--out", str(out)]) == 0
    assert "16 layers" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.glob("net.*")} == {".html", ".json", ".csv"}
    assert main(["spectrum", str(checkpoint), *MODEL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("layer ")
    assert main(["explain", "64,32,3,3", "--stride", "2"]) == 0
    assert len(capsys.readouterr().out) > 50
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith("ocnn_fused ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "cifar_resnet"}, "--model must be package.module:factory"),
        ({"--model": "no_such_module:make"}, "cannot be imported: No module named 'no_such_module'"),
        ({"--model": "cifar_resnet:no_such"}, "cannot be imported"),
        ({"--model": "builtins:dict"}, "must return a torch.nn.Module, got dict"),
        ({"--input": "3,x"}, "--input must be positive numbers"),
        ({"--out": "/no/such/folder/net.html"}, "--out must be an HTML file in a folder that exists"),
        ({"--out": "net.json"}, "--out must be an HTML file"),
    ],
)
def test_wrong_options_are_named(
    change: dict[str, str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--model": MODEL[1], "--input": MODEL[3], **change}
    assert main(["report", str(checkpoint), *(part for pair in options.items() for part in pair)]) == 2
    assert message in capsys.readouterr().err


def test_explain_names_a_wrong_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "64"]) == 2
    assert "got shape (64,)" in capsys.readouterr().err


def test_as_a_module(checkpoint: Path) -> None:
    """Through the shell, exit code included."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    command = [sys.executable, "-m", "ocnn_fused", "spectrum"]
    done = subprocess.run(
        [*command, str(checkpoint), *MODEL], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "layer3.0.conv2" in done.stdout
    missing = subprocess.run(
        [*command, "none.pt", *MODEL], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (missing.returncode, missing.stderr) == (2, "error: checkpoint none.pt does not exist\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in ``python -m ocnn_fused explain .. | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ocnn_fused", "explain", "8,8,3,3"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore")
def test_a_network_of_hugging_face(tmp_path: Path) -> None:
    """Its layers stand in modules of their own kind, and it returns a dataclass; random weights, nothing is fetched."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    (network,) = report(model, (3, 32, 32), tmp_path / "net.html")
    assert not network.left_out
    stem = network.layers["resnet.embedder.embedder.convolution"]
    assert (stem.shape, stem.stride, stem.input_size) == ((8, 3, 7, 7), (2, 2), (32, 32))
    assert network.layers["classifier.1"].shape == (3, 16)
    assert Page((tmp_path / "net.html").read_text()).counts["tr"] == len(network.layers) + 1


# ----------------------------------------------------------------------------------------------------------------------
# A real browser
# ----------------------------------------------------------------------------------------------------------------------


def opened(page: Path, folder: Path, *flags: str) -> tuple[str, list[str], set[str]]:
    """The DOM after loading, what the console said, and the hosts that the page asked for."""
    log = folder / f"{page.stem}-net.json"
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=3000", "--dump-dom",
        *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(log.read_text())["events"]
    urls = [event["params"].get("url", "") for event in events if isinstance(event.get("params"), dict)]
    hosts = {url.split("/")[2] for url in urls if url.startswith("http")}
    # The browser's own: updates, the time, accounts.
    return done.stdout, console, {host for host in hosts if not host.endswith((".google.com", ".googleapis.com"))}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_opens_in_a_browser_and_asks_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "net.html"
    report(tiny(), (3, 8, 8), path, compare=CifarResNet(1, width=4), titles=("plain", "regularised"))
    dom, console, hosts = opened(path, tmp_path)
    assert dom.count("<tr>") == 9
    assert dom.count("<svg ") == 2 * 8 + 12
    assert not console
    assert not hosts
    # The same eyes see a script's error and a request, so they would have seen ours.
    control = tmp_path / "control.html"
    control.write_text('<script>no_such_function()</script><img src="http://picture.invalid/a.png">')
    _, console, hosts = opened(control, tmp_path)
    assert "no_such_function" in "".join(console)
    assert hosts == {"picture.invalid"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_is_no_wider_than_a_telephone(tmp_path: Path) -> None:
    """Only the table may scroll sideways. Measured by a script that the test adds to a copy of the page."""
    path = tmp_path / "net.html"
    report(tiny(), (3, 8, 8), path, compare=CifarResNet(1, width=4), titles=("plain", "regularised"))
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text())
    # In a frame, because a browser's own window has a least width.
    script = (
        "<script>with (document.documentElement) document.title = scrollWidth <= clientWidth ? 'fits' : 'wide'</script>"
    )
    inner = tmp_path / "inner.html"
    inner.write_text(text.replace("</body>", f"{script}</body>"))
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<iframe src="inner.html" width="400" height="900" style="border:0" onload="setTimeout(() => '
        'document.body.append(this.contentDocument.title), 50)"></iframe>'
    )
    dom, _, _ = opened(outer, tmp_path, "--allow-file-access-from-files")
    assert dom.endswith("</iframe>fits</body></html>\n")
