"""Executes the control flow of a kernel's LLVM IR in Python, to count how often chosen calls are met.

Only what branches and the predicates of those calls depend on is computed: integers, addresses, and loads from given
memory. Comparisons of floats have all the same outcome, which the caller chooses. Anything else that is not understood
is an error, so that a count is either exact or absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Value = Any  # an integer (signed), or a tuple of them for a vector or a struct
Values = dict[str, Value]
Compute = Callable[["Thread", Values], Value]

_NAME = r"%[\w.$-]+"
_TYPE = r"(?:<\d+ x \w+>|\{[^{}]*\}|ptr(?: addrspace\(\d+\))?|\w+)"
_FLAGS = re.compile(r"\b(?:nuw|nsw|exact|disjoint|nneg|samesign|inbounds|nusw|tail|volatile) ")
_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "double": 8}

#: What is read from shared memory decides only whether all programs have arrived at a barrier: they have.
_ARRIVED = 1 << 30
#: Where AMD's kernels find the size of the grid.
_IMPLICIT = 1 << 62
_MOST_BLOCKS = 1_000_000


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "sdiv": _truncated,
    "srem": lambda a, b: a - b * _truncated(a, b),
    "shl": lambda a, b: a << b,
    "ashr": lambda a, b: a >> b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_UNSIGNED: dict[str, Callable[[int, int], int]] = {
    "udiv": lambda a, b: a // b,
    "urem": lambda a, b: a % b,
    "lshr": lambda a, b: a >> b,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@dataclass
class Memory:
    """Tensors that may be read, at their own addresses."""

    tensors: Sequence[torch.Tensor]
    pieces: list[tuple[int, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = [(tensor.data_ptr(), tensor.numpy().tobytes()) for tensor in self.tensors]

    def read(self, address: int, size: int) -> int:
        for start, data in self.pieces:
            if 0 <= address - start <= len(data) - size:
                return int.from_bytes(data[address - start : address - start + size], "little", signed=True)
        raise ValueError(f"read of {size} bytes at {address:#x}, which is in none of the tables")


@dataclass(frozen=True)
class Thread:
    memory: Memory
    program: int
    programs: int
    index: int
    compared_floats: bool = True  # the outcome of each comparison

    def load(self, address: int, size: int) -> int:
        return self.programs if address == _IMPLICIT else self.memory.read(address, size)


class Unknown(Exception):
    """An instruction that is not understood."""


def _split(text: str) -> list[str]:
    """At commas outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<({[") - (character in ">)}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _size(kind: str) -> int:
    """Bytes of a scalar, or of an array of them, as in ``[8 x i8]``."""
    array = re.fullmatch(r"\[(\d+) x (\w+)\]", kind)
    return int(array[1]) * _BYTES[array[2]] if array else _BYTES[kind]


def _bits(kind: str) -> int:
    if kind.startswith("ptr"):
        return 64
    if match := re.search(r"i(\d+)", kind):
        return int(match[1])
    raise Unknown(kind)


def _lanes(kind: str) -> int:
    match = re.match(r"<(\d+) x", kind)
    return int(match[1]) if match else 0


def _operand(kind: str, text: str) -> Compute:
    """A name or a constant of the given type."""
    if text.startswith("%"):
        return lambda thread, values: values[text]
    constant = _constant(kind, text)
    return lambda thread, values: constant


def _constant(kind: str, text: str) -> Value:
    if lanes := _lanes(kind):
        element = kind.split(" x ")[1].rstrip(">")
        if text == "zeroinitializer":
            return (0,) * lanes
        if match := re.fullmatch(r"splat \((.*)\)", text):
            return (_constant(element, match[1].split()[-1]),) * lanes
        return tuple(_constant(element, part.split()[-1]) for part in _split(text[1:-1]))
    if text in ("true", "false", "null", "poison", "undef") or text.startswith("@"):
        return int(text == "true")
    try:
        return int(text)
    except ValueError:
        raise Unknown(text) from None


def _typed(text: str) -> tuple[str, Compute]:
    """``i64 noundef %5``: the type and the value."""
    match = re.match(_TYPE, text)
    assert match
    return match[0], _operand(match[0], text[match.end() :].split(" ", 1)[-1].rsplit(") ", 1)[-1].split()[-1])


def _each(function: Callable[..., int], *values: Value) -> Value:
    """Element by element, if these are vectors."""
    if isinstance(values[0], tuple):
        return tuple(function(*elements) for elements in zip(*values, strict=True))
    return function(*values)


def _compile(text: str) -> Compute:
    """The value of one instruction, given those of its operands."""
    operation, rest = _FLAGS.sub("", text).split(" ", 1)
    if operation in _BINARY or operation in _UNSIGNED:
        kind = re.match(_TYPE, rest)[0]  # type: ignore[index]
        a, b = (_operand(kind, part) for part in _split(rest[len(kind) :]))
        bits = _bits(kind)
        if operation in _BINARY:
            function = _BINARY[operation]
            return lambda t, v: _each(lambda x, y: _signed(function(x, y), bits), a(t, v), b(t, v))
        function, mask = _UNSIGNED[operation], (1 << bits) - 1
        return lambda t, v: _each(lambda x, y: _signed(function(x & mask, y & mask), bits), a(t, v), b(t, v))
    if operation == "icmp":
        condition, rest = rest.split(" ", 1)
        kind = re.match(_TYPE, rest)[0]  # type: ignore[index]
        a, b = (_operand(kind, part) for part in _split(rest[len(kind) :]))
        compare = _COMPARE[condition[-2:]]
        mask = (1 << _bits(kind)) - 1 if condition[0] == "u" else -1
        return lambda t, v: _each(lambda x, y: int(compare(x & mask, y & mask)), a(t, v), b(t, v))
    if operation == "fcmp":
        return lambda t, v: int(t.compared_floats)
    if operation in ("zext", "sext", "trunc", "inttoptr", "ptrtoint", "freeze"):
        source, _, target = rest.partition(" to ")
        kind, a = _typed(source)
        bits = _bits(target or kind)
        # A single bit is kept as 0 or 1, so that extending it with its sign is the only case that is not plain.
        mask = (1 << _bits(kind)) - 1 if operation == "zext" else -1
        sign = -1 if operation == "sext" and _bits(kind) == 1 else 1
        return lambda t, v: _each(lambda x: _signed(sign * (x & mask), bits), a(t, v))
    if operation == "select":
        (_, chosen), (_, a), (_, b) = map(_typed, _split(rest))
        return lambda t, v: a(t, v) if chosen(t, v) else b(t, v)
    if operation == "getelementptr":
        element, pointer, index = _split(rest)
        (_, base), (_, offset), size = _typed(pointer), _typed(index), _size(element)
        return lambda t, v: base(t, v) + size * offset(t, v)
    if operation == "load":
        kind, pointer = _split(rest)[:2]
        if "addrspace(3)" in pointer:
            return lambda t, v: _ARRIVED
        (_, address), size, lanes = _typed(pointer), _bits(kind) // 8, _lanes(kind)
        if lanes:
            return lambda t, v: tuple(t.load(address(t, v) + lane * size, size) for lane in range(lanes))
        return lambda t, v: t.load(address(t, v), size)
    if operation in ("extractelement", "extractvalue"):
        (_, whole), place = _typed(_split(rest)[0]), int(rest.split()[-1])
        return lambda t, v: whole(t, v)[place]
    if operation == "call":
        return _compile_call(rest)
    raise Unknown(text)


def _arguments(call: str) -> list[Compute]:
    inside = re.sub(r'"[^"]*"', '""', call)
    inside = inside[inside.index("(", inside.rindex('""') if '""' in inside else inside.index("@")) + 1 :]
    return [_typed(part)[1] for part in _split(inside[: inside.rindex(")")])]


def _compile_call(call: str) -> Compute:
    if "asm" in call:
        load = re.search(r"(?:@\$(\d) )?ld\.(?:volatile\.)?global\S*\.b(\d+) \{ \$0 \}, \[ \$(\d) \+ 0 \];\"", call)
        if not load:
            raise Unknown(call)
        arguments, size = _arguments(call), int(load[2]) // 8
        address = arguments[int(load[3]) - 1]
        if load[1] is None:
            return lambda t, v: t.load(address(t, v), size)
        wanted = arguments[int(load[1]) - 1]
        return lambda t, v: t.load(address(t, v), size) if wanted(t, v) else 0
    name = re.search(r"@llvm\.(?:nvvm|amdgcn)?\.?([\w.]+)\(", call)
    match name and name[1]:
        case "read.ptx.sreg.tid.x" | "workitem.id.x":
            return lambda t, v: t.index
        case "read.ptx.sreg.ctaid.x" | "workgroup.id.x":
            return lambda t, v: t.program
        case "read.ptx.sreg.nctaid.x":
            return lambda t, v: t.programs
        case "implicitarg.ptr":
            return lambda t, v: _IMPLICIT
        case "elect.sync":  # the thread is the first of its warp
            return lambda t, v: (0, 1)
        case "readfirstlane.i32" | "make.buffer.rsrc.p8.p1":
            return _arguments(call)[0]
        case "shfl.sync.idx.i32":  # from the first lane
            return _arguments(call)[1]
        case "raw.ptr.buffer.load.i64":
            base, offset = _arguments(call)[:2]
            return lambda t, v: t.load(base(t, v) + offset(t, v), 8)
        case "smin.i64":
            a, b = _arguments(call)
            return lambda t, v: min(a(t, v), b(t, v))
    raise Unknown(call)


@dataclass
class _Block:
    phis: list[tuple[str, dict[str, Compute]]] = field(default_factory=list)
    steps: list[tuple[str, Compute]] = field(default_factory=list)  # a name and its value, or a counted call
    next: Callable[[Thread, Values], str | None] = lambda thread, values: None


class ControlFlow:
    """The only function of a module, ready to run; ``counted`` finds the calls and returns what to count them as."""

    def __init__(self, module: str, counted: Callable[[str], str | None]) -> None:
        head, body = re.search(r"^define [^\n]*?\(([^\n]*)\)[^\n]*\{\n(.*?)^\}", module, re.M | re.S).groups()  # type: ignore[union-attr]
        self.parameters = re.findall(rf"{_NAME}(?=,|$)", head)
        body = re.sub(r"\[\n(.*?)\n  \]", lambda match: "[" + match[1].replace("\n", " ") + "]", body, flags=re.S)
        lines = [re.sub(r"(?:, ![\w.]+ !\w+)+$|\s+;.*$", "", line) for line in body.splitlines()]
        lines = [f"{len(self.parameters)}:", *filter(None, lines)]
        definitions = dict(match.groups() for line in lines if (match := re.match(rf"  ({_NAME}) = (.*)", line)))
        self.static: Counter[str] = Counter(kind for line in lines if "call" in line and (kind := counted(line)))
        needed = self._needed(lines, definitions, counted)
        self.compares_floats = any(definitions[name].startswith("fcmp") for name in needed)
        self.blocks: dict[str, _Block] = {}
        for line in lines:
            if match := re.match(r"([\w.$-]+):", line):
                block = self.blocks[match[1]] = _Block()
            elif kind := counted(line) if "call" in line else None:
                block.steps.append((f"count {kind}", self._predicate(line)))
            elif (match := re.match(rf"  ({_NAME}) = (.*)", line)) and match[1] in needed:
                name, text = match.groups()
                if text.startswith("phi"):
                    kind = re.match(_TYPE, text[4:])[0]  # type: ignore[index]
                    sources = re.findall(r"\[ (\S+|<[^>]*>), %([\w.$-]+) \]", text)
                    block.phis.append((name, {label: _operand(kind, value) for value, label in sources}))
                else:
                    block.steps.append((name, _compile(text)))
            elif re.match(r"  (?:br|switch) ", line):
                block.next = self._branch(line)

    @staticmethod
    def _predicate(call: str) -> Compute:
        """Whether a counted call does anything: ``@$5`` in front of an inline instruction is its sixth operand."""
        match = re.search(r'asm [^"]*"@\$(\d+) ', call)
        return _arguments(call)[int(match[1])] if match else lambda thread, values: 1

    @staticmethod
    def _needed(lines: list[str], definitions: Mapping[str, str], counted: Callable[[str], str | None]) -> set[str]:
        """Names that branches and predicates depend on."""
        todo: list[str] = []
        for line in lines:
            if re.match(r"  (?:br|switch) ", line):
                todo += re.findall(rf"i\d+ ({_NAME})", line)
            elif "call" in line and counted(line) and (match := re.search(r'asm [^"]*"@\$(\d+) ', line)):
                inside = line[line.rindex('"(') + 2 :]
                todo += re.findall(_NAME, _split(inside[: inside.rindex(")")])[int(match[1])])
        needed: set[str] = set()
        while todo:
            name = todo.pop()
            if name in definitions and name not in needed:
                needed.add(name)
                if definitions[name].startswith("fcmp"):
                    continue
                text = re.sub(r'"[^"]*"', "", definitions[name])
                if text.startswith("phi"):  # labels are written like names
                    text = re.sub(rf", {_NAME} \]", "", text)
                todo += re.findall(_NAME, text)
        return needed

    @staticmethod
    def _branch(line: str) -> Callable[[Thread, Values], str | None]:
        labels = re.findall(r"label %([\w.$-]+)", line)
        if len(labels) == 1 and line.startswith("  br"):
            return lambda thread, values: labels[0]
        kind, condition = _typed(line.split(" ", 3)[3].split(",")[0])
        if line.startswith("  br"):
            return lambda thread, values: labels[0] if condition(thread, values) else labels[1]
        cases = {int(value): label for value, label in re.findall(rf"{kind} (-?\d+), label %([\w.$-]+)", line)}
        return lambda thread, values: cases.get(condition(thread, values), labels[0])

    def run(self, arguments: Sequence[int], thread: Thread) -> Counter[str]:
        """Executed calls by kind."""
        values: Values = dict(zip(self.parameters, arguments, strict=True))
        count: Counter[str] = Counter()
        before, label = "", next(iter(self.blocks))
        for _ in range(_MOST_BLOCKS):
            block = self.blocks[label]
            values.update([(name, sources[before](thread, values)) for name, sources in block.phis])
            for name, compute in block.steps:
                if name.startswith("%"):
                    values[name] = compute(thread, values)
                elif compute(thread, values):
                    count[name.removeprefix("count ")] += 1
            following = block.next(thread, values)
            if following is None:
                return count
            before, label = label, following
        raise RuntimeError(f"no end after {_MOST_BLOCKS} blocks")
