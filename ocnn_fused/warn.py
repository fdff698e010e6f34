"""Warnings that point at the user's line, however many of ours and of torch's lie between."""

from __future__ import annotations

import os
import sys
import warnings

import torch

# Not as a Path, which would drop the "./" that Python 3.10 keeps in the names of a relative folder's files.
_NOT_THE_USERS = tuple(f"{os.path.dirname(file)}/" for file in (__file__, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Nothing within what torch.compile traces: it cannot look at frames, and would warn while it compiles."""
    if torch.compiler.is_compiling():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
