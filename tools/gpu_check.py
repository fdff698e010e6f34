"""Compiles every shipped kernel configuration for every supported GPU, without one, and checks what comes out.

    python tools/gpu_check.py --out gpu_check.md          all targets
    python tools/gpu_check.py --targets sm_90 gfx942      some

For each kernel: no stack, no local (spilled) loads or stores, shared memory within the architecture's limit, what BARS
asks for, every operand of a TF32 product rounded where it is stored, the matrix instruction where the precision
promises one, and as many of them as the plan has multiply-adds: the machine code has the same matrix instructions as
the compiler's last LLVM IR, and the control flow of that is executed for all work items of sample plans. Exits non-zero
if anything is wrong. This shows what the GPU would run, not how fast. Takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

os.environ.pop("TRITON_INTERPRET", None)  # compiled, not interpreted
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="gpu_check_"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
import triton.language as tl
from control_flow import ControlFlow, Memory, Thread
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ocnn_fused.backends.device import SPECS
from ocnn_fused.backends.model import SPLIT_PRODUCTS, product_work
from ocnn_fused.backends.triton import fields, kernels
from ocnn_fused.backends.triton.config import BARRIERS, Config, compile_options, shipped, single_configs
from ocnn_fused.backends.triton.cooperative import (
    RESERVED_SHARED,
    is_possible,
    most_warps,
    programs_per_multiprocessor,
    tensor_columns,
)
from ocnn_fused.backends.triton.launch import kernel_constants
from ocnn_fused.backends.triton.tables import Layout, Tables, build_tables
from ocnn_fused.plan import Plan, candidates
from ocnn_fused.problem import problem_of

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Target:
    """An architecture, the shared memory a program may have, and its matrix instructions."""

    name: str
    shared_bytes: int
    matrix: str  # regular expression

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm_")

    @property
    def warp(self) -> int:
        return 32 if self.is_nvidia else 64

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(int(self.name[3:]), 10)

    @property
    def device(self) -> str:
        """One whose configurations it is compiled with."""
        if not self.is_nvidia:
            return "MI250"
        return {"sm_80": "A100", "sm_90": "H100", "sm_100": "H100"}.get(self.name, "RTX 4090")

    @property
    def triton(self) -> GPUTarget:
        if self.is_nvidia:
            return GPUTarget("cuda", int(self.name[3:]), self.warp)
        return GPUTarget("hip", self.name, self.warp)


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 163 << 10, r"HMMA"),
        Target("sm_86", 99 << 10, r"HMMA"),
        Target("sm_89", 99 << 10, r"HMMA"),
        Target("sm_90", 227 << 10, r"HGMMA|HMMA"),
        Target("sm_100", 227 << 10, r"UTC\w*MMA"),
        Target("sm_120", 99 << 10, r"HMMA"),
        Target("gfx90a", 64 << 10, r"v_mfma\w+"),
        Target("gfx942", 64 << 10, r"v_mfma\w+"),
    )
}

_POINTERS = {
    "table": "*i64", "constants": "*fp32", "tiles": "*i32", "weights": "*i64", "workspace": "*u8", "partials": "*fp32",
    "grads": "*u8", "losses": "*fp32", "arrivals": "*i32", "targets": "*i64", "factors": "*fp64",
}  # fmt: skip
_NUMBERS = {"factor": "fp32"}


@dataclass(frozen=True)
class Bar:
    """What the machine code of a kernel for NVIDIA must keep to, beside being right and without stack or spills."""

    instructions: float | None = (
        None  # most in the inner loop for CHUNK multiply-adds: a tap, or a plane, of an element
    )
    programs: int = 2  # fewest that share a multiprocessor, by registers, shared memory and warps, with 64 x 64 tiles
    wide: float = 0.0  # smallest share of the bytes copied to shared memory that goes 16 bytes at a time
    by_products: float | None = None  # most instructions where matrix instructions do the multiply-adds


BARS = {
    "squares": Bar(),
    "evaluate": Bar(instructions=60, by_products=40),
    "gram": Bar(wide=0.4),
    "mix": Bar(instructions=48, by_products=28),
    "apply": Bar(wide=0.25),  # on sm_90 products in TF32 want planes that lie the other way round: 4 bytes at a time
    "gather": Bar(instructions=45, by_products=22),
    "single": Bar(wide=0.3),
}


@dataclass(frozen=True)
class Job:
    """One kernel in one configuration for one target."""

    kernel: str
    precision: str
    config: Config
    target: str
    adds: bool = False  # to gradients that are there

    @property
    def options(self) -> dict[str, int]:
        target = TARGETS[self.target]
        return compile_options(self.kernel, self.config, target.capability if target.is_nvidia else None)

    @property
    def warps(self) -> int:
        return self.options["num_warps"]

    @property
    def constants(self) -> dict[str, object]:
        return kernel_constants(self.kernel, self.precision, self.config, self.adds)

    @property
    def function(self) -> triton.JITFunction:
        return getattr(kernels, f"{self.kernel}_kernel")

    @property
    def wants_matrix_instructions(self) -> bool:
        if "PRECISION" in self.constants:
            return self.precision != "ieee" or not TARGETS[self.target].is_nvidia
        return bool(self.constants.get("BY_PRODUCTS"))

    @property
    def roundings(self) -> int:
        """Fewest instructions that round to TF32: one for each operand that a thread stores, wherever it does."""
        if self.precision != "tf32":
            return 0
        config, threads = self.config, 32 * self.warps
        stored = {
            "evaluate": (fields.CHUNK.value + 1) * config.rows * config.columns,
            "gram": config.tile**2,
            "mix": 2 * (16**3 + 32 * 8**2 + 64 * 8**2),  # the tile and its mirror image, for each of MIX_SIZES
        }
        stages = stored if self.kernel == "single" else [self.kernel]
        return sum(-(-stored.get(stage, 0) // threads) for stage in stages)


@dataclass
class Outcome:
    """What the compiler produced; ``problems`` is empty if all is well."""

    job: Job
    seconds: float
    registers: int = 0
    stack: int = 0
    spills: int = 0
    scalar_spills: int = 0  # on AMD into lanes of vector registers; if these did not suffice there would be a stack
    shared: int = 0
    tensor_columns: int = 0
    programs: int = 0  # that fit on one multiprocessor
    instructions: float = 0.0  # of evaluate's, mix's or gather's inner loop, or all, for CHUNK multiply-adds
    roundings: int = 0  # to TF32, in PTX
    matrix: Counter[str] = field(default_factory=Counter)
    multiply_adds: int = 0  # executed by matrix instructions for the sample plans
    wide: float = 0.0  # share of the bytes copied to shared memory that goes 16 bytes at a time
    barriers: int = 0  # of all programs, each with a fence and a cleared L1 cache
    problems: list[str] = field(default_factory=list)


def jobs(targets: Sequence[str]) -> Iterator[Job]:
    """Every kernel that can be launched without asking for a configuration, each once."""
    for target in targets:
        every = shipped(SPECS[TARGETS[target].device])
        for precision, configs in every.items():
            if TARGETS[target].is_nvidia and is_possible():
                for config, adds in product(single_configs(configs), (False, True)):
                    yield Job("single", precision, config, target, adds)
            for config in configs:
                yield Job("gram", precision, config, target)
                yield Job("apply", precision, config, target)
        default = every["ieee"][0]
        yield from (Job(kernel, "ieee", default, target) for kernel in ("squares", "evaluate", "mix", "gather"))
        yield Job("gather", "ieee", default, target, adds=True)
        for precision, configs in every.items():
            yield from (Job("apply", precision, config, target, adds=True) for config in configs)
        yield Job("evaluate", "bf16", default, target)
        if "tf32" in every:
            yield from (Job(kernel, "tf32", every["tf32"][0], target) for kernel in ("evaluate", "mix"))
            if every["tf32"][0].by_products:
                yield from (Job("gather", "tf32", every["tf32"][0], target, adds) for adds in (False, True))


def lacks_linker(target: Target) -> bool:
    """Whether triton leaves linking for AMD to a program of ROCm that is not here, as it did before 3.4."""
    if target.is_nvidia:
        return False
    from triton.backends.amd.compiler import HIPBackend

    try:
        getattr(HIPBackend, "path_to_rocm_lld", bool)()
    except Exception:  # no narrower class says it
        return True
    return False


def compile_job(job: Job) -> triton.compiler.CompiledKernel:
    return _compile(job.function, job.constants, job)


def _compile(function: triton.JITFunction, constants: dict[str, object], job: Job) -> triton.compiler.CompiledKernel:
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else (_POINTERS | _NUMBERS).get(name, "i32")
        if name in _POINTERS:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[job.target].triton, options=job.options)


@triton.jit
def mix_of_16_outputs(table, constants, tiles, workspace, partials, with_grad, factors, factor):
    """What mix does in TF32 with a tile of a plan of up to 16 outputs, such as that of a 3x3 layer."""
    kernels.mix_pair_by_products(table, constants, tiles, workspace, partials, with_grad, factors, factor, True, 16, 16)


@triton.jit
def evaluate_by_products(table, constants, tiles, weights, workspace, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What evaluate does in TF32 with a tile of a plan of up to 16 taps."""
    kernels.evaluate_tile_by_products(table, constants, tiles, weights, workspace, True, ROWS, COLUMNS)


def _instructions_of_evaluate(job: Job) -> float:
    """All of the code for one tile of 9 taps and 25 planes, per CHUNK multiply-adds, planes padded to 32.

    A loop over the halves of the tile, and in it one over the planes, 16 at a time: each runs twice.
    """
    sides = {name: job.constants[name] for name in ("ROWS", "COLUMNS")}
    sass = _machine_code(_compile(evaluate_by_products, sides, job))[1]
    of_planes, of_halves, *_ = sorted(len(body) for body in loops(sass) if any("MMA" in line for line in body))
    executed = _executable(sass) + of_halves + 2 * of_planes
    return executed / (job.config.rows * job.config.columns * 9 * 32 / fields.CHUNK.value / (32 * job.warps))


def _instructions_of_gather(sass: str) -> float:
    """Of the loop with matrix instructions, for CHUNK multiply-adds of 25 planes: two rounds, of 16 planes each.

    A round has 16 planes of 256 elements and 16 taps, shared by 128 threads.
    """
    rounds = [len(body) for body in loops(sass) if any(re.search(r"H\w*MMA", line) for line in body)]
    return min(rounds, default=0) * 2 / (25 * 256 * 16 / fields.CHUNK.value / 128)


def _instructions_of_mix(job: Job) -> float:
    """All of the code for one tile of 13 outputs and its mirror image, which has no loop, per CHUNK multiply-adds.

    As many of these as a plan counts: 13 outputs of each entry to 16 lags, and back.
    """
    sass = _machine_code(_compile(mix_of_16_outputs, {}, job))[1]
    return _executable(sass) / (2 * 16**2 * 16 * (13 + 13) / fields.CHUNK.value / (32 * job.warps))


def _executable(sass: str) -> int:
    """Instructions, without those that fill up the end."""
    return sum(name != "NOP" for name in _INSTRUCTION.findall(sass))


def check(job: Job) -> Outcome:
    start = perf_counter()
    try:
        compiled = compile_job(job)
    except Exception as error:
        return Outcome(job, perf_counter() - start, problems=[f"does not compile: {str(error)[:200]}"])
    outcome = Outcome(
        job, perf_counter() - start, shared=compiled.metadata.shared, tensor_columns=tensor_columns(compiled)
    )
    target, bar = TARGETS[job.target], BARS[job.kernel]
    (_read_nvidia if target.is_nvidia else _read_amd)(outcome, compiled, target)
    if target.is_nvidia:
        outcome.programs = programs_per_multiprocessor(
            outcome.registers,
            outcome.shared,
            job.warps,
            target.shared_bytes + RESERVED_SHARED,
            most_warps(target.capability),
            outcome.tensor_columns,
        )
        if not outcome.programs:
            outcome.problems.append("not one program fits on a multiprocessor")
        elif job.config.tile <= 64 and outcome.programs < bar.programs:
            outcome.problems.append(f"{outcome.programs} programs fit on a multiprocessor, wanted {bar.programs}")
        most = bar.by_products if job.constants.get("BY_PRODUCTS") else bar.instructions
        if most is not None and not 0 < outcome.instructions <= most:
            outcome.problems.append(f"{outcome.instructions:.0f} instructions per tap, at most {most} are wanted")
        if outcome.wide < bar.wide:
            outcome.problems.append(f"{outcome.wide:.0%} copied 16 bytes at a time, at least {bar.wide:.0%} are wanted")
        if job.kernel == "single" and outcome.barriers != BARRIERS:
            outcome.problems.append(f"{outcome.barriers} barriers that clear the L1 cache, {BARRIERS} are wanted")
    if outcome.stack:
        outcome.problems.append(f"{outcome.stack} bytes of stack")
    if outcome.spills:
        outcome.problems.append(f"{outcome.spills} local accesses")
    if outcome.shared > target.shared_bytes:
        outcome.problems.append(f"{outcome.shared} bytes of shared memory, limit {target.shared_bytes}")
    if outcome.roundings < job.roundings:
        outcome.problems.append(f"{outcome.roundings} roundings to TF32, {job.roundings} operands are stored")
    if job.wants_matrix_instructions:
        try:
            _check_matrix_instructions(outcome, compiled.asm["llir"])
        except Exception as error:
            outcome.problems.append(f"control flow not understood: {str(error)[:200]}")
    return outcome


#: Shapes and plans with every loop over products, for one step, a few, and the last one of them not full.
_SAMPLES = (
    ((70, 40, 3, 3), "toom/row"),
    ((72, 8, 3), "toom/column"),
    ((16, 16, 3), "direct/row"),
    ((136, 72), "gram/column"),
    ((24, 100), "gram/row"),
)
#: Places of those that share the workspace where one launch makes several passes.
_PASSES = (range(2), range(2, 5))


@cache
def _sample(
    precision: str, config: Config, passes: tuple[range, ...] | None
) -> tuple[list[Plan], list[torch.Tensor], Tables]:
    """Plans, their weights and tables."""
    plans = []
    for shape, name in _SAMPLES:
        every = candidates(problem_of(shape, 1, 1, 1, None), "column" if name.endswith("column") else "row")
        plans.append(next(plan for plan in every if plan.name == name))
    weights = [torch.empty(shape) for shape, _ in _SAMPLES]
    plane = torch.bfloat16 if precision == "bf16" else torch.float32
    wanted = [True] * len(plans)
    layouts, device = [Layout.of(weight) for weight in weights], torch.device("cpu")
    tables = build_tables(layouts, plans, wanted, plane, config, device, precision == "tf32", passes)
    return plans, weights, tables


def _matrix_call(line: str) -> str | None:
    """Name and shape of a matrix instruction in LLVM IR."""
    if match := re.search(
        r"(mma\.sync|wgmma)\S*\.m(\d+)n(\d+)k(\d+)|@llvm\.amdgcn\.(mfma)\.f32\.(\d+)x(\d+)x(\d+)", line
    ):
        name, *sides = filter(None, match.groups())
        return f"{name} {'x'.join(sides)}"
    if match := re.search(r"tcgen05\.mma\S*kind::(tf32|f16) .* i32 (\d+), i1 \S+, i1 \S+\)", line):
        depth, descriptor = 8 if match[1] == "tf32" else 16, int(match[2])
        return f"tcgen05 {(descriptor >> 24 & 31) * 16}x{(descriptor >> 17 & 63) * 8}x{depth}"
    return None


def _multiply_adds(call: str) -> int:
    """Of each warp that executes it; four of them share one of Hopper's. Blackwell's is issued by one for all."""
    name, shape = call.split()
    return prod(map(int, shape.split("x"))) // (4 if name == "wgmma" else 1)


def _shape(instruction: str) -> str | None:
    """Of a matrix instruction in machine code; Blackwell's is in a descriptor."""
    match = re.match(r"(?:HMMA\.(16)(8)(8|16)\b|HGMMA\.(\d+)x(\d+)x(\d+)|v_mfma_f32_(\d+)x(\d+)x(\d+))", instruction)
    return "x".join(filter(None, match.groups())) if match else None


def _check_matrix_instructions(outcome: Outcome, module: str) -> None:
    """The instructions are those of the IR, and execute as many multiply-adds as the plans are counted with.

    However the compiler has taken its loops apart. Each program runs once per warp, as the first thread of it.
    """
    job = outcome.job
    if not outcome.matrix:
        outcome.problems.append("no matrix instruction")
        return
    flow = ControlFlow(module, _matrix_call)
    if flow.static.total() != outcome.matrix.total():
        outcome.problems.append(f"{outcome.matrix.total()} matrix instructions, but {flow.static.total()} in LLVM IR")
    shapes = {_shape(name) for name in outcome.matrix} - {None}
    if shapes and shapes != {call.split()[1] for call in flow.static}:
        outcome.problems.append(f"matrix instructions {set(outcome.matrix)}, but {set(flow.static)} in LLVM IR")
    plans, weights, tables = _sample(job.precision, job.config, _PASSES if job.kernel == "single" else None)
    work = [product_work(plan, job.config.tile, job.config.depth, job.config.wide) for plan in plans]
    stages = {"gram": (0,), "apply": (1,), "single": (0, 1)}.get(job.kernel, ())
    expected = sum(of_plan[stage] for of_plan in work for stage in stages) * (3 if job.precision == "tf32x3" else 1)
    if job.constants.get("BY_PRODUCTS"):
        split = ("evaluate", "mix", "gather") if job.kernel == "single" else (job.kernel,)
        expected += sum(split_work(tables, stage, job.config) for stage in split)
    outcome.multiply_adds = _executed(flow, job, weights, tables)
    if outcome.multiply_adds != expected:
        outcome.problems.append(f"{outcome.multiply_adds} multiply-adds are executed, the plans have {expected}")


def split_work(tables: Tables, stage: str, config: Config) -> int:
    """Multiply-adds that matrix instructions do in evaluate, mix or gather.

    mix: the sum of each tile with its mirror image and the difference, there and back. The others: whole tiles.
    """
    tiles = [tile for one in tables.passes for tile in range(*one.stage(stage))]
    is_evaluate = stage == "evaluate"
    flag = fields.B_EVALUATED_BY_PRODUCTS if is_evaluate else fields.B_BY_PRODUCTS
    elements = config.rows * (config.columns if is_evaluate else config.gathered_columns)
    total = 0
    for row in tables.tiles[tiles, 0].tolist():
        if stage == "mix":
            size = int(tables.table[row + fields.M_SIZE.value])
            total += 4 * size**2 * {16: 16, 32: 8}[size] ** 2
        elif tables.table[row + flag.value]:
            planes, taps = (int(tables.table[row + at.value]) for at in (fields.B_PLANES, fields.B_PADDED_TAPS))
            total += -(-planes // fields.CHUNK.value) * fields.CHUNK.value * taps * elements
    return SPLIT_PRODUCTS * total


def _executed(flow: ControlFlow, job: Job, weights: list[torch.Tensor], tables: Tables) -> int:
    """Multiply-adds of all programs of the sample plans' launch."""
    addresses = torch.tensor([weight.data_ptr() for weight in weights])
    memory = Memory((tables.table, tables.constants, tables.tiles, addresses))
    # Of the single launch one program does all stages.
    begin, end = tables.passes[0].stage(job.kernel) if job.kernel != "single" else (0, 1)
    values = {
        "table": tables.table.data_ptr(),
        "constants": tables.constants.data_ptr(),
        "tiles": tables.tiles[begin:].data_ptr(),
        "weights": addresses.data_ptr(),
        "with_grad": 1,
        "pass_rows": tables.pass_rows,
        "passes": len(tables.passes),
        "loss_rows": tables.loss_rows,
        "count": tables.count,
    }
    # Those that no branch depends on are left at zero, like the compiler's own at the end.
    arguments = [values.get(name, 0) for name in job.function.arg_names if name not in job.constants]
    arguments += [0] * (len(flow.parameters) - len(arguments))

    def counted(compared_floats: bool) -> Counter[str]:
        executed: Counter[str] = Counter()
        for program in range(end - begin):
            for warp in range(job.warps):
                first = warp * TARGETS[job.target].warp
                executed += flow.run(arguments, Thread(memory, program, end - begin, first, compared_floats))
        return executed

    executed = counted(True)
    if flow.compares_floats and counted(False) != executed:
        raise ValueError("products depend on the values of floats")
    return sum(count * _multiply_adds(call) for call, count in executed.items())


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]+)")


def _read_nvidia(outcome: Outcome, compiled: triton.compiler.CompiledKernel, target: Target) -> None:
    usage, sass = _machine_code(compiled)
    outcome.roundings = len(re.findall(r"and\.b32\s+%r\d+, %r\d+, -8192;", compiled.asm["ptx"]))
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    outcome.registers, outcome.stack = int(numbers["REG"]), int(numbers["STACK"])
    instructions = Counter(_INSTRUCTION.findall(sass))
    outcome.spills = sum(count for name, count in instructions.items() if name.split(".")[0] in ("LDL", "STL"))
    outcome.matrix = Counter({name: count for name, count in instructions.items() if re.match(target.matrix, name)})
    outcome.wide = _share_of_wide_copies(instructions)
    # What programs write before a barrier, and may have read before, must be read from the L2 cache behind it.
    outcome.barriers = min(instructions["MEMBAR.ALL.GPU"], instructions["CCTL.IVALL"])
    if outcome.job.constants.get("BY_PRODUCTS"):
        counted = {"evaluate": _instructions_of_evaluate, "mix": _instructions_of_mix}.get(outcome.job.kernel)
        outcome.instructions = counted(outcome.job) if counted else _instructions_of_gather(sass)
    elif BARS[outcome.job.kernel].instructions is not None:
        outcome.instructions = instructions_per_tap(sass, worst=outcome.job.kernel == "mix")


def _machine_code(compiled: triton.compiler.CompiledKernel) -> tuple[str, str]:
    """What it uses of the hardware, and the instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _run("cuobjdump", "--dump-resource-usage", file.name), _run("cuobjdump", "-sass", file.name)


def _share_of_wide_copies(instructions: Counter[str]) -> float:
    """Of the bytes that the code copies from global to shared memory; 0 if it copies none."""
    copied: Counter[int] = Counter()
    for name, count in instructions.items():
        if name.startswith("LDGSTS"):
            bits = next((int(part) for part in name.split(".") if part in ("64", "128")), 32)
            copied[bits] += count * bits
    return copied[128] / copied.total() if copied else 0.0


def instructions_per_tap(sass: str, worst: bool = False) -> float:
    """Of an inner loop, per CHUNK multiply-adds in it: of the one with fewest, or most; 0 without any.

    evaluate and gather have loops of other kinds, which copy; mix has one for each of MIX_SIZES and direction.
    """
    found = []
    for body in loops(sass):
        chunks = sum(2 if "FFMA2" in line else "FFMA" in line for line in body) / fields.CHUNK.value
        found += [len(body) / chunks] if chunks >= 1 else []
    return (max if worst else min)(found, default=0.0)


def loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each, those of loops within included."""
    code = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);", sass)]
    for end, text in code:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < end:
            yield [line for address, line in code if int(jump[1], 16) <= address <= end]


def _read_amd(outcome: Outcome, compiled: triton.compiler.CompiledKernel, target: Target) -> None:
    text = compiled.asm["amdgcn"]
    names = "vgpr_count|private_segment_fixed_size|vgpr_spill_count|sgpr_spill_count"
    numbers = {name: int(value) for name, value in re.findall(rf"\.({names}):\s+(\d+)", text)}
    outcome.registers = numbers["vgpr_count"]
    outcome.stack = numbers["private_segment_fixed_size"]
    outcome.spills = numbers.get("vgpr_spill_count", 0)
    outcome.scalar_spills = numbers.get("sgpr_spill_count", 0)
    outcome.matrix = Counter(re.findall(rf"^\s+({target.matrix})", text, re.M))


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([NVIDIA_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def row(outcome: Outcome) -> str:
    """Of the table."""
    job = outcome.job
    matrix = ", ".join(f"{count} {name}" for name, count in outcome.matrix.most_common(2)) or "-"
    tile = f"{job.config.tile}x{job.config.wide or job.config.tile}x{job.config.depth}"
    return (
        f"| {job.target} | {job.kernel} | {job.precision} | {tile} | {job.warps} | {outcome.registers} "
        f"| {outcome.stack} | {outcome.spills} | {outcome.scalar_spills} | {outcome.shared} "
        f"| {outcome.tensor_columns or '-'} | {outcome.programs or '-'} | {round(outcome.instructions, 1) or '-'} "
        f"| {outcome.roundings or '-'} | {matrix} "
        f"| {outcome.multiply_adds or '-'} | {f'{outcome.wide:.0%}' if outcome.wide else '-'} | {outcome.seconds:.1f} "
        f"| {'; '.join(outcome.problems) or 'ok'} |"
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line about one target."""
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    return (
        f"{outcomes[0].job.target}: {len(outcomes)} kernels, {f'{wrong} with problems' if wrong else 'all fine'}; "
        f"at most {max(outcome.registers for outcome in outcomes)} registers, "
        f"{max(outcome.shared for outcome in outcomes)} bytes of shared memory; "
        f"{sum(outcome.seconds for outcome in outcomes):.0f} s"
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, one row per kernel, configuration and target."""
    lines = [
        f"Compiled with triton {triton.__version__}. None of the machine code was executed.",
        "",
        "- Spills: local loads and stores on NVIDIA, vector registers in memory on AMD. Scalar spills: AMD's scalar "
        "registers kept in lanes of vector registers (`v_writelane`, `v_readlane`), which touches no memory.",
        "- Roundings: instructions in PTX that round an operand of a TF32 product, as it is stored; the products drop "
        "what is left of the low bits.",
        "- Multiply-adds: those that matrix instructions execute for sample plans; they equal the plans' own counts.",
        "",
        "| target | kernel | precision | tile | warps | registers | stack | spills | scalar spills "
        "| shared | tensor columns | programs | instructions per tap | roundings "
        "| matrix instructions | multiply-adds | 16-byte copies | seconds | |",
        "|" + "---|" * 19,
    ]
    lines += map(row, outcomes)
    return "\n".join(lines) + "\n"


#: Slowest first, so that no process is left with a long compilation at the end.
_SLOWEST_FIRST = ("single", "apply", "gram", "mix", "gather", "evaluate", "squares")


def run(todo: Sequence[Job], processes: int) -> list[Outcome]:
    """The outcomes in the order of the jobs; prints what is wrong at once, and a line for every target that is done."""
    outcomes: dict[Job, Outcome] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        order = sorted(todo, key=lambda job: (job.target, _SLOWEST_FIRST.index(job.kernel)))
        for future in as_completed([pool.submit(check, job) for job in order]):
            outcome = future.result()
            outcomes[outcome.job] = outcome
            if outcome.problems:
                print(row(outcome), flush=True)
            part = [job for job in todo if job.target == outcome.job.target]
            if outcomes.keys() >= set(part):
                print(summary([outcomes[job] for job in part]), flush=True)
    return [outcomes[job] for job in todo]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="only these GPUs")
    parser.add_argument("--kernels", nargs="+", help="only these, for instance gram single")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="compilers at the same time")
    parser.add_argument("--out", type=Path, help="write the table to this file instead of printing it")
    options = parser.parse_args(arguments)
    left_out = [name for name in options.targets if lacks_linker(TARGETS[name])]
    if left_out:
        print(f"{', '.join(left_out)}: left out, because triton {triton.__version__} needs ROCm's linker for them")
    targets = [name for name in options.targets if name not in left_out]
    todo = [job for job in jobs(targets) if not options.kernels or job.kernel in options.kernels]
    start = perf_counter()
    outcomes = run(todo, options.processes)
    text = table(outcomes)
    if options.out:
        options.out.write_text(text)
    else:
        print(f"\n{text}")
    print(f"Compiled and checked {len(todo)} kernels in {perf_counter() - start:.0f} s")
    wrong = sum(bool(outcome.problems) for outcome in outcomes)
    raise SystemExit(f"{wrong} of {len(todo)} kernels have problems, listed above" if wrong else 0)


if __name__ == "__main__":
    main()
