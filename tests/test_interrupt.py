"""Ctrl-C in one long call: compiled code looks for signals between pieces of its work."""

from __future__ import annotations

import pytest
from test_cpu_backend import run_python

from ocnn_fused import _extension

#: The processor time of a whole call, and of one that a signal ends after a twentieth of it.
CODE = """
import signal, time, torch
from ocnn_fused import fused_orth_loss
torch.set_num_threads({threads})
weight = torch.randn({shape}, requires_grad={with_grad})
def seconds():
    start = time.process_time()
    try:
        fused_orth_loss(weight, backend="cpu")
    except KeyboardInterrupt:
        pass
    return time.process_time() - start
fused_orth_loss(torch.randn(16, 16, 3, 3))
whole = seconds()
signal.signal(signal.SIGPROF, signal.default_int_handler)
signal.setitimer(signal.ITIMER_PROF, whole / 20)
print(seconds() / whole)
loss = fused_orth_loss(torch.eye(8)[:, :, None, None])
assert loss.item() == 0, "a call after it is as any other"
"""


@pytest.mark.skipif(_extension.module is None, reason="the compiled backend is left out")
@pytest.mark.parametrize(
    ("shape", "with_grad", "threads"),
    [
        ((1024, 1024, 3, 3), True, 1),
        ((1024, 1024, 3, 3), True, 2),
        ((1280, 1280, 3, 3), False, 1),
        ((3072, 3072), True, 1),
        ((192, 192, 9, 9), True, 1),
    ],
    ids=str,
)
def test_a_signal_ends_a_long_call(shape: tuple[int, ...], with_grad: bool, threads: int) -> None:
    code = CODE.format(threads=threads, shape=shape, with_grad=with_grad)
    assert float(run_python(code)) < 0.6
