"""Networks of timm: every layer is found and has the loss and the gradient of the definition."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from definition import assert_is_definition
from oracle import Case, loss_and_grad
from torch import Tensor
from without_torchvision import stand_in

from ocnn_fused import OrthRegularizer

stand_in()
timm = pytest.importorskip("timm")

pytestmark = pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")

#: Small ones of many families: grouped, depthwise and dilated layers, attention, branches, transformers.
NETWORKS = (
    "dla46_c", "edgenext_xx_small", "efficientnet_lite0", "ese_vovnet19b_slim_dw", "fbnetc_100", "ghostnet_050",
    "hardcorenas_a", "lcnet_035", "mixnet_s", "mnasnet_small", "mobilenetv2_035", "mobilenetv3_small_050",
    "mobilevit_xxs", "regnetx_002", "regnety_002", "repvgg_a0", "resnet10t", "semnasnet_075",
    "spnasnet_100", "test_byobnet", "test_convnext", "tinynet_e",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_against_the_definition(name: str) -> None:
    torch.manual_seed(0)
    assert_is_definition(timm.create_model(name))


#: Residual blocks, whether the authors' choice takes three layers of each or one, and convolutions in shortcuts.
RESNETS = {
    "resnet18": (8, 1, 3),
    "resnet26d": (8, 3, 4),
    "seresnet18": (8, 1, 3),
    "ecaresnet26t": (8, 3, 4),
    "regnetx_002": (13, 3, 4),
    "regnety_002": (13, 3, 4),
    "resnext26ts": (8, 3, 4),
    "resnetv2_50": (16, 3, 4),
}


@pytest.mark.parametrize("name", RESNETS)
def test_layers_of_the_paper(name: str) -> None:
    blocks, each, shortcuts = RESNETS[name]
    reg = OrthRegularizer(timm.create_model(name), preset="paper-resnet")
    assert len(reg.layers) == blocks * each + shortcuts
    assert not any(re.search(r"stem|^conv1|\bse\b|head|fc", layer) for layer in reg.layers)


def effective_weight(conv: torch.nn.Module) -> Tensor:
    """What StdConv2d computes with; as docs/training.md shows."""
    weight = conv.weight
    return F.batch_norm(weight.flatten(1)[None], None, None, training=True, momentum=0.0, eps=conv.eps).view_as(weight)


def test_standardised_weights() -> None:
    from timm.layers import StdConv2d

    conv = StdConv2d(8, 6, 3)
    assert "the raw weight; StdConv2d may compute with another one" in str(OrthRegularizer(conv))
    reg = OrthRegularizer(conv, 1.0, weight_of={StdConv2d: effective_weight})
    weight = effective_weight(conv)
    image = torch.randn(1, 8, 5, 5)
    torch.testing.assert_close(conv(image), F.conv2d(image, weight, conv.bias, padding=conv.padding))
    expected, _ = loss_and_grad(weight, Case((6, 8, 3, 3)))
    assert reg().item() == pytest.approx(expected, rel=3e-5)
    reg.add_grad_()
    assert conv.weight.grad.any()
