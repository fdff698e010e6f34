"""What the user asked of float32 matrix products, by whichever of torch's two settings."""

from __future__ import annotations

import torch


def matmul_precision() -> str:
    """``"highest"``, ``"high"`` or ``"medium"``, as ``torch.get_float32_matmul_precision()`` names them.

    That function raises, or says what was asked for earlier, where ``torch.backends.cuda.matmul.fp32_precision`` (or
    the setting of all backends) was set since. The newer setting is what cuBLAS follows, and has no name for "medium".
    """
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")  # not there before torch 2.9
    if newer == "ieee":
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if newer == "tf32" else "highest"
