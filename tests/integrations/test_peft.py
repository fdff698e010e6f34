"""Models with adapters of peft: what peft trains is no layer's weight, and what it leaves alone is."""

from __future__ import annotations

import pytest
import torch
from definition import assert_is_definition
from networks import resnet18

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")


@pytest.mark.parametrize("dora", [False, True])
def test_lora(dora: bool) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["conv1"], modules_to_save=["layer4.0.conv2"], r=2, use_dora=dora)
    model = peft.get_peft_model(resnet18(4), config)
    model.requires_grad_(True)  # else most layers would have no gradient to compare
    reg = assert_is_definition(model, exclude=())
    adapted = "base_model.model.layer1.0.conv1"
    assert reg.left_out[f"{adapted}.lora_A.default"] == reg.left_out[f"{adapted}.lora_B.default"] == "a peft adapter"
    assert reg.left_out[f"{adapted}.base_layer"].startswith("the base of a peft adapter")
    saved = "base_model.model.layer4.0.conv2"
    assert reg.left_out[f"{saved}.original_module"] == "replaced by a copy that peft trains"
    assert f"{saved}.modules_to_save.default" in reg.layers
    assert not any("lora" in name or "base_layer" in name for name in reg.layers)
    merged = model.merge_and_unload()
    assert "layer1.0.conv1" in assert_is_definition(merged.requires_grad_(True), exclude=()).layers
