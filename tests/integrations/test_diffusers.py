"""Networks of diffusers: every layer is found and has the loss and the gradient of the definition."""

from __future__ import annotations

import pytest
import torch
from definition import assert_is_definition

diffusers = pytest.importorskip("diffusers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:no orthogonal convolution exists")]

SMALL = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}


def test_unet() -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    reg = assert_is_definition(diffusers.UNet2DModel(**SMALL, **blocks, attention_head_dim=8))
    assert any("upsamplers" in name for name in reg.layers)


def test_conditioned_unet() -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D",) * 2}
    reg = assert_is_definition(diffusers.UNet2DConditionModel(**SMALL, **blocks, cross_attention_dim=16))
    assert "conv_in" in reg.layers  # of latents, which have four channels


def test_vae() -> None:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    reg = assert_is_definition(diffusers.AutoencoderKL(**SMALL, **blocks))
    assert reg.left_out["encoder.conv_in"] == "3 input channels"
