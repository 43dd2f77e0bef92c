"""The reader of compiled programs, and the walk over their arrays, on programs that are written by hand."""

import pytest

from flax_mesh.hlo.program import read_hlo, read_shape
from flax_mesh.plan.compile.live import walk

LOOP = """HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={}

FileNames
1 "/home/me/model.py"

FunctionNames
1 "Net.__call__"
2 "Layer.__call__"
3 "helper"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=1 function_name_id=3 line=30 end_line=30 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%fused (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  ROOT %n = f32[256]{0} negate(%p)
}

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[256]{0} get-tuple-element(%state), index=1
  %wide = f32[1024]{0} custom-call(%x), metadata={op_name="jit(step)/jvp()/dot" stack_frame_id=3}
  %fast = f32[4096]{0:S(5)} custom-call(%wide)
  %y = f32[256]{0} custom-call(%fast)
  %odd = f32[256]{0} fusion(%y), kind=kLoop, calls=%fused
  ROOT %next = (s32[], f32[256]{0}) tuple(%i, %odd)
}

%condition (state: (s32[], f32[256])) -> pred[] {
  %state = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[256], b: f32[512]) -> (f32[256], f32[512]) {
  %a = f32[256]{0} parameter(0), metadata={op_name="state.leaves[0]"}
  %b = f32[512]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = f32[256]{0} copy(%a)
  %init = (s32[], f32[256]{0}) tuple(%zero, %start)
  %loop = (s32[], f32[256]{0}) while(%init), condition=%condition, body=%body
  %end = f32[256]{0} get-tuple-element(%loop), index=1
  %c = f32[512]{0} fusion(%b), kind=kLoop, calls=%fused
  %new = f32[256]{0} custom-call(%end, %c)
  ROOT %out = (f32[256]{0}, f32[512]{0}) tuple(%new, %c)
}
"""


def test_the_walk_counts_live_arrays_once():
    """At the peak, in the loop: both arguments, the state of the loop, and the array that its body computes from it."""
    found = walk(read_hlo(LOOP))
    assert found.peak == 4 * (256 + 512 + 256 + 1024)
    assert [buffer.array.bytes for buffer in found.at_peak] == [4096, 2048, 1024, 1024]
    without_loop = LOOP.replace("f32[1024]", "f32[1]")
    assert walk(read_hlo(without_loop)).peak == 4 * (256 + 512 + 256 + 512)  # %c, which is a result


BRANCHES = """HloModule step, is_scheduled=true

%left (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %wide = f32[512]{0} custom-call(%p)
  ROOT %r = f32[256]{0} custom-call(%wide)
}

%right (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %wider = f32[1024]{0} custom-call(%p)
  ROOT %r = f32[256]{0} custom-call(%wider)
}

ENTRY %main (a: f32[256], i: s32[]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %i = s32[] parameter(1)
  %start = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%a)
  %copied = f32[256]{0} copy-done(%start)
  %gathers = (f32[256]{0}, f32[2048]{0}) all-gather-start(%copied), replica_groups={{0,1}}
  %gathered = f32[2048]{0} all-gather-done(%gathers)
  %twice = f32[2048]{0} multiply(%gathered, %gathered)
  %small = f32[256]{0} custom-call(%twice)
  ROOT %chosen = f32[256]{0} conditional(%i, %small, %small), branch_computations={%left, %right}
}
"""


def test_the_walk_of_asynchronous_operations_and_branches():
    """Products are written over their operand; of a conditional the larger branch counts, and results once."""
    found = walk(read_hlo(BRANCHES))
    assert found.peak == pytest.approx(4 * (256 + 256 + 2048), abs=16)  # an argument, its copy, the gathered array
    small = walk(read_hlo(BRANCHES.replace("2048", "8")))
    assert small.peak == pytest.approx(4 * (256 + 256 + 256 + 1024), abs=16)  # the operand and the result of a branch
    assert found.weights == {"gathers"}


def test_a_result_in_a_donated_argument_needs_no_memory():
    kept = LOOP.replace("input_output_alias={ {0}: (0, {}, may-alias) }", "input_output_alias={ }")
    kept = kept.replace("f32[1024]", "f32[1]")
    assert walk(read_hlo(kept)).peak == walk(read_hlo(LOOP.replace("f32[1024]", "f32[1]"))).peak + 4 * 256


def test_the_code_that_made_an_array_is_named_by_its_classes():
    found = read_hlo(LOOP)
    assert found.place("stack_frame_id=3") == found.place("stack_frame_id=2") == "Net/Layer (model.py:20)"
    assert found.place("stack_frame_id=1") == "Net (model.py:10)" and found.place("") == ""


ARRAYS = [("f32[3,5]{1,0}", 60, 0), ("f32[3,5]{1,0:T(8,128)}", 4096, 0), ("f32[200,5]{0,1:T(8,128)}", 8 * 256 * 4, 0)]
ARRAYS += [("bf16[4,16,128]{2,1,0:T(8,128)(2,1)S(1)}", 4 * 16 * 128 * 2, 1), ("s32[]{:T(128)}", 512, 0)]


@pytest.mark.parametrize(("text", "size", "space"), [*ARRAYS, ("pred[10]", 10, 0)])
def test_the_bytes_of_an_array_include_the_padding_of_its_layout(text, size, space):
    found = read_shape(text)
    assert (found.bytes, found.space) == (size, space)  # pyright: ignore[reportAttributeAccessIssue]
