"""Named choices of layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .. import modules

#: What the name of a block's shortcut contains, in torchvision, timm, Hugging Face and diffusers.
_SHORTCUT = ("downsample", "shortcut", "skip", "proj")


def paper_resnet(model: nn.Module) -> tuple[frozenset[nn.Module], list[str]]:
    """The layers that the authors' scripts regularise, and the names of residual blocks in which none was found.

    Of a block with two convolutions larger than 1x1 the first, of any other (a bottleneck) all, and the convolutions of
    the shortcuts. A block is known by its structure: it has a shortcut, which may be None, or children conv1 and conv2,
    and no other block inside; its convolutions may stand within modules of their own, beside norm and activation.
    """
    blocks = {name: module for name, module in model.named_modules() if _may_be_block(module)}
    chosen: list[nn.Module] = []
    empty: list[str] = []
    for name, block in blocks.items():
        if any(other.startswith(f"{name}." if name else "") for other in blocks if other != name):
            continue
        chain = _chain(_children_with_convolutions(block))
        if chain and 0 < chain[0].in_channels <= modules.FEW_CHANNELS:  # type: ignore[operator]
            continue  # a stem
        if len(chain) < 2:
            empty.append(modules.plain_name(name))
            continue
        basic = len(chain) == 2 and all(max(unit.weight.shape[2:]) > 1 for unit in chain)  # type: ignore[operator, index]
        chosen += chain[:1] if basic else chain
        shortcuts = [child for child_name, child in block.named_children() if _is_shortcut(child_name)]
        chosen += [convolution for shortcut in shortcuts for convolution in _convolutions(shortcut)]
    if not chosen:
        unknown = f"; it does not know the structure of {', '.join(empty)}" if empty else ""
        raise ValueError(
            "preset 'paper-resnet' needs residual blocks, each with a shortcut beside two or three convolutions, and "
            f"found none in the model{unknown}"
        )
    return frozenset(chosen), empty


def _is_shortcut(name: str) -> bool:
    return any(part in name for part in _SHORTCUT)


def _may_be_block(module: nn.Module) -> bool:
    names = [*module._modules, *(name for name, value in vars(module).items() if value is None)]
    marked = any(map(_is_shortcut, names)) or {"conv1", "conv2"} <= module._modules.keys()
    return marked and sum(len(_convolutions(child)) for child in _children_with_convolutions(module)) > 1


def _children_with_convolutions(module: nn.Module) -> list[nn.Module]:
    """Those of a block's main branch, which may be wrapped in one child."""
    children = [child for name, child in module.named_children() if _convolutions(child) and not _is_shortcut(name)]
    if len(children) == 1 and len(_convolutions(children[0])) > 1:
        return _children_with_convolutions(children[0])
    return children


def _chain(children: Iterable[nn.Module]) -> list[nn.Module]:
    """The convolutions that feed each other; attention beside them has several of its own, or other channels."""
    chain: list[nn.Module] = []
    for child in children:
        first, *others = _convolutions(child)
        if not others and (not chain or first.in_channels in (0, chain[-1].out_channels)):  # 0: lazy
            chain.append(first)
    return chain


def _convolutions(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if modules.is_convolution(part)]
