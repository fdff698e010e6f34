"""Triton's interpreter made fit for tests: rounding as on a GPU, three program orders, and a count of launches.

Import this module before any kernel is decorated (it sets TRITON_INTERPRET), on machines without a GPU only.

What is repaired, all of it in Triton's own classes and undone when the context ends:

- bfloat16 operands of ``tl.dot`` are multiplied as numbers (the interpreter multiplies their bit patterns), float32 is
  rounded to bfloat16 to nearest even (the interpreter truncates), and ``tf32`` products drop the low bits of their
  operands, which Triton hands to the hardware as they are;
- programs run sequentially, shuffled, or interleaved: one thread per program, a seeded baton passed at every access to
  memory, which is what shows a race;
- a device function does not patch the language again for every call, which is most of the interpreter's time, and
  types are looked up in a table that is not made anew each time;
- Triton before 3.7 makes indices with ``int(array)``, which numpy 2.5 refuses for arrays of one axis.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import contextlib
import inspect
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

from ocnn_fused.backends.triton import availability

ORDERS = ("sequential", "shuffled", "interleaved")

#: Programs that run at the same time when interleaved, as on a GPU with that many places. The single kernel needs all.
RESIDENT = 8

_MEMORY_OPERATIONS = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")


# ----------------------------------------------------------------------------------------------------------------------
# Rounding
# ----------------------------------------------------------------------------------------------------------------------


def float_of_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_of_float(values: np.ndarray) -> np.ndarray:
    """To nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    return float_of_bf16(bf16_of_float(values))


def round_to_tf32(values: np.ndarray) -> np.ndarray:
    """To 10 bits of significand, ties away from zero, as the conversion instruction does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(np.float32)


def truncate_to_tf32(values: np.ndarray) -> np.ndarray:
    """What a matrix instruction sees of an operand."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def _dot_with_rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        convert: Callable[[np.ndarray], np.ndarray] | None = None
        if a.dtype.scalar == tl.bfloat16:
            convert = float_of_bf16
        elif a.dtype.scalar == tl.float32 and str(input_precision).upper().endswith("TF32"):
            convert = truncate_to_tf32
        if convert is not None:
            a, b = (TensorHandle(convert(operand.data), tl.float32) for operand in (a, b))
        return original(self, a, b, d, input_precision, *rest)

    return create_dot


def _cast_with_rounding(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(bf16_of_float(source.data), tl.bfloat16)
        return original(self, source, target)

    return cast_impl


def _indices_of_any_numpy(original: Callable[..., None]) -> Callable[..., None]:
    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()  # whoever undoes the patch undoes this

    return patch_lang_tensor


# ----------------------------------------------------------------------------------------------------------------------
# Program order
# ----------------------------------------------------------------------------------------------------------------------


class _Interleaving:
    """Runs programs in threads of which one at a time holds the baton; a seeded draw decides who gets it next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.alive: list[threading.Thread] = []
        self.turn: dict[threading.Thread, threading.Semaphore] = {}  # each waits for its own, so that one wakes up
        self.place: dict[threading.Thread, tuple[int, int, int]] = {}
        self.error: BaseException | None = None

    def pause(self) -> None:
        """Called before every access to memory: another program may go first."""
        me = threading.current_thread()
        if me not in self.place:
            return
        self._pass_on()
        self._wait_for_turn(me)
        triton_interpreter.interpreter_builder.set_grid_idx(*self.place[me])

    def _pass_on(self) -> None:
        if self.alive:
            self.turn[self.random.choice(self.alive)].release()

    def _wait_for_turn(self, me: threading.Thread) -> None:
        self.turn[me].acquire()
        if self.error is not None:
            raise SystemExit  # another program failed: stop all of them

    def run(self, programs: list[tuple[int, int, int]], run_program: Callable[[tuple[int, int, int]], None]) -> None:
        waiting = list(programs)

        def work() -> None:
            me = threading.current_thread()
            try:
                self._wait_for_turn(me)
                while waiting:
                    self.place[me] = waiting.pop()
                    run_program(self.place[me])
            except SystemExit:
                pass
            except BaseException as error:
                self.error = self.error or error
            finally:
                self.alive.remove(me)
                self._pass_on()

        self.alive = [threading.Thread(target=work, daemon=True) for _ in range(min(RESIDENT, len(programs)))]
        threads = list(self.alive)
        self.turn = {thread: threading.Semaphore(0) for thread in threads}
        self.place = dict.fromkeys(threads, programs[0])
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


#: Which operand of them is the mask.
_MASK_AT = {"create_masked_load": 1, "create_masked_store": 2}


def _with_mask_of_bools(name: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The interpreter of triton 3.9 makes integers of a mask and a scalar, and refuses them then."""
    place = _MASK_AT.get(name)
    if place is None or operands[place].data.dtype == np.bool_:
        return operands
    mask = TensorHandle(operands[place].data != 0, tl.int1)
    return (*operands[:place], mask, *operands[place + 1 :])


class _Reordered:
    """Stands in for a kernel: skips every program until the executor comes to the last, then runs all in its order."""

    def __init__(self, kernel: Callable[..., None], scheduler: Scheduler) -> None:
        self.kernel = kernel
        self.scheduler = scheduler
        # What the executor looks at:
        self.__signature__ = inspect.signature(kernel)
        self.__globals__ = kernel.__globals__  # type: ignore[attr-defined]
        self.__annotations__ = kernel.__annotations__
        self.__name__ = kernel.__name__

    def __call__(self, **arguments: Any) -> None:
        builder = triton_interpreter.interpreter_builder
        last = tuple(size - 1 for size in builder.grid_dim)
        if tuple(builder.grid_idx) != last:
            return
        programs = [(x, y, z) for x, y, z in itertools.product(*map(range, builder.grid_dim))]

        def run_program(place: tuple[int, int, int]) -> None:
            builder.set_grid_idx(*place)
            self.kernel(**arguments)

        try:
            self.scheduler.run(programs, run_program)
        finally:
            self.scheduler.restore_language()


class Scheduler:
    """The current program order and what was launched under it."""

    def __init__(self, order: str, seed: int) -> None:
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
        self.order = order
        self.random = random.Random(seed)
        self.launches: Counter[str] = Counter()
        self.interleaving: _Interleaving | None = None
        self.patches: dict[int, Any] = {}

    def patch_language(self, function: Callable[..., Any]) -> None:
        """What the interpreter does at every call of a device function, once per module and launch."""
        if id(function.__globals__) not in self.patches:
            self.patches[id(function.__globals__)] = triton_interpreter._patch_lang(function)

    def restore_language(self) -> None:
        while self.patches:
            _, scope = self.patches.popitem()  # in reverse order
            if scope is not None:  # before 3.6 the language stays patched
                scope.restore()

    def run(self, programs: list[tuple[int, int, int]], run_program: Callable[[tuple[int, int, int]], None]) -> None:
        if self.order != "sequential":
            self.random.shuffle(programs)
        if self.order != "interleaved":
            for place in programs:
                run_program(place)
            return
        self.interleaving = _Interleaving(self.random.randrange(2**32))
        try:
            self.interleaving.run(programs, run_program)
        finally:
            self.interleaving = None


@contextlib.contextmanager
def repaired(order: str = "sequential", seed: int = 0) -> Iterator[Scheduler]:
    """Repairs and program order for the kernels launched inside; the scheduler counts their launches by name."""
    scheduler = Scheduler(order, seed)
    launch = GridExecutor.__call__
    get_numpy_type = triton_interpreter._get_np_dtype
    numpy_types: dict[str, np.dtype] = {}

    def counted_launch(self: Any, *arguments: Any, **options: Any) -> None:
        kernel, self.fn = self.fn, _Reordered(self.fn, scheduler)
        scheduler.launches[kernel.__name__] += 1
        try:
            with _disable_current_modes():  # the interpreter's own copies are none of the caller's work
                launch(self, *arguments, **options)
        finally:
            self.fn = kernel

    def call_device_function(self: Any, *arguments: Any, **options: Any) -> Any:
        scheduler.patch_language(self.fn)
        return self.rewrite()(*arguments, **options)

    def yielding(name: str) -> Callable[..., Any]:
        original = getattr(InterpreterBuilder, name)

        def access(self: Any, *arguments: Any, **options: Any) -> Any:
            if scheduler.interleaving is not None:
                scheduler.interleaving.pause()
            return original(self, *_with_mask_of_bools(name, arguments), **options)

        return access

    def numpy_type(type_: Any) -> np.dtype:
        name = type_.scalar.name
        if name not in numpy_types:
            numpy_types[name] = get_numpy_type(type_)
        return numpy_types[name]

    replacements = [
        (triton_interpreter, "_get_np_dtype", numpy_type),
        (availability, "interpreter_reason", lambda: None),
        (triton_interpreter, "_patch_lang_tensor", _indices_of_any_numpy(triton_interpreter._patch_lang_tensor)),
        (InterpreterBuilder, "create_dot", _dot_with_rounding(InterpreterBuilder.create_dot)),
        (InterpreterBuilder, "cast_impl", _cast_with_rounding(InterpreterBuilder.cast_impl)),
        (GridExecutor, "__call__", counted_launch),
        (InterpretedFunction, "__call__", call_device_function),
        *((InterpreterBuilder, name, yielding(name)) for name in _MEMORY_OPERATIONS),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield scheduler
