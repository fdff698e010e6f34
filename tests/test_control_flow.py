"""tools/control_flow.py counts what a module would execute, whatever the compiler has done to its loops."""

from __future__ import annotations

import pytest
import torch
from control_flow import ControlFlow, Memory, Thread, Unknown

#: A loop of as many steps as the table says for the program, its first step peeled and its body unrolled twice.
PEELED = """
define amdgpu_kernel void @kernel(ptr addrspace(1) inreg %0, i32 inreg %1) local_unnamed_addr #0 !dbg !4 {
  %3 = tail call i32 @llvm.amdgcn.workgroup.id.x(), !dbg !1
  %4 = zext nneg i32 %3 to i64
  %5 = getelementptr i64, ptr addrspace(1) %0, i64 %4, !dbg !1
  %6 = load <1 x i64>, ptr addrspace(1) %5, align 8, !dbg !1
  %7 = extractelement <1 x i64> %6, i64 0
  %8 = icmp sgt i64 %7, 0
  br i1 %8, label %9, label %.end

9:                                                ; preds = %2
  tail call void @product()
  %10 = add nsw i64 %7, -1
  %11 = and i64 %10, 1
  %12 = icmp eq i64 %11, 0
  br i1 %12, label %.head, label %13

13:                                               ; preds = %9
  tail call void @product()
  br label %.head

.head:                                            ; preds = %13, %9
  %14 = icmp samesign ult i64 %10, 2
  br i1 %14, label %.end, label %.body

.body:                                            ; preds = %.body, %.head
  %15 = phi i64 [ %11, %.head ], [ %16, %.body ]
  tail call void @product()
  tail call void @product()
  %16 = add nuw nsw i64 %15, 2
  %17 = icmp slt i64 %16, %10
  br i1 %17, label %.body, label %.end

.end:                                             ; preds = %.body, %.head, %2
  ret void
}
"""


def executed(module: str, steps: int) -> int:
    flow = ControlFlow(module, lambda line: "product" if "@product" in line else None)
    table = torch.tensor([-7, steps])
    thread = Thread(Memory([table]), program=1, programs=2, index=0)
    return flow.run([table.data_ptr(), 0], thread)["product"]


def test_counts_a_loop_taken_apart() -> None:
    assert [executed(PEELED, steps) for steps in range(-1, 9)] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("icmp sgt i64 %7, 0", "icmp sgt i64 %7, 1"),  # the peeled step left out
        ("icmp eq i64 %11, 0", "icmp ne i64 %11, 0"),  # the odd step taken for the even one
        ("%16 = add nuw nsw i64 %15, 2", "%16 = add nuw nsw i64 %15, 1"),
        ("[ %11, %.head ]", "[ 0, %.head ]"),  # begins at the wrong step
    ],
)
def test_sees_a_wrong_loop(right: str, wrong: str) -> None:
    assert right in PEELED
    module = PEELED.replace(right, wrong)
    assert [executed(module, steps) for steps in range(1, 9)] != list(range(1, 9))


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(Unknown, match="mystery"):
        executed(PEELED.replace("workgroup.id.x", "mystery"), 1)
    with pytest.raises(ValueError, match="none of the tables"):
        executed(PEELED.replace("i64 %4, !dbg", "i64 2, !dbg"), 1)


@pytest.mark.parametrize("outcome", [True, False])
def test_comparisons_of_floats_have_the_outcome_that_is_asked_for(outcome: bool) -> None:
    """Of floats that are not computed: they may depend on anything."""
    module = """
define void @kernel(float %0) {
  %2 = call float @mystery(float %0)
  %3 = fcmp olt float %2, 5.000000e-01
  br i1 %3, label %right, label %wrong

right:
  call void @product()
  ret void

wrong:
  ret void
}
"""
    flow = ControlFlow(module, lambda line: "product" if "@product" in line else None)
    assert flow.compares_floats
    assert flow.run([0], Thread(Memory([]), 0, 1, 0, outcome))["product"] == int(outcome)


def test_arithmetic_is_that_of_llvm() -> None:
    """Signs, widths, vectors and predicates, each as the number of steps of a loop."""
    cases = {
        "sdiv i64 %0, 2": ("-7", -3),
        "srem i64 %0, 4": ("-7", -3),
        "lshr i64 %0, 62": ("-1", 3),
        "udiv i64 %0, 4611686018427387904": ("-1", 3),
        "add i64 %0, 9223372036854775807": ("3", -(2**63) + 2),
        "mul i64 %0, -3": ("5", -15),
        "shl i64 %0, 63": ("3", -(2**63)),
        "xor i64 %0, -1": ("4", -5),
        "ashr i64 %0, 1": ("-5", -3),
        "tail call i64 @llvm.smin.i64(i64 %0, i64 2)": ("5", 2),
    }
    for text, (argument, expected) in cases.items():
        module = f"""
define void @kernel(i64 %0) {{
  %2 = {text}
  switch i64 %2, label %wrong [
    i64 {expected}, label %right
    i64 {expected + 1}, label %wrong
  ]

wrong:
  ret void

right:
  call void @product()
  ret void
}}
"""
        flow = ControlFlow(module, lambda line: "product" if "@product" in line else None)
        assert flow.run([int(argument)], Thread(Memory([]), 0, 1, 0))["product"] == 1, text
