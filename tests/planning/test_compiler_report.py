"""What is read from the text of compiled programs, and from a compiler's refusal."""

import pytest

from vit_jax import UserError
from vit_jax.planning import collectives, compiler, hlo

HLO = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %s = bf16[2,4]{1,0} reduce-scatter(%g), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
  %m = f32[8,4]{1,0} fusion(%g), calls=%fused, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %g)
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %r = f32[8]{0} all-reduce(%p), channel_id=5, replica_groups=mesh['a'=1,'b'=4], device_ids=([2,2]T(1,0)) {'a','b'}
  ROOT %d = f32[2]{0} dynamic-slice(%r, %i)
}

%fused (p: f32[8,4]) -> f32[8,4] {
  ROOT %k = f32[8,4]{1,0} copy(%p), backend_config={"estimated_cycles":"7777"}
}

%below (p: (s32[], f32[4])) -> pred[] {
  %five = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %five), direction=LT
}

%again (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %r = f32[4]{0} all-to-all(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%step_of_a_fusion (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), channel_id=6, frontend_attributes={chain_id="0"}, dimensions={0}
}

ENTRY %main (x: f32[4,4]) -> f32[] {
  %r = (f32[4,4]{1,0}, f32[], /*index=2*/pred[3]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %o = f32[4]{0} fusion(%x), calls=%fused, backend_config={"estimated_cycles":"5"}
  %kernel = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %n = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %ps = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %pd = f32[4]{0} collective-permute-done(%ps)
  %gs = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %gd = bf16[16]{0} all-gather-done(%gs)
  %w = (s32[], f32[8,4]) while(%t), body=%body, condition=%c, backend_config={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4]) while(%t), condition=%below, body=%again
  %f = f32[2]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %a = f32[8]{0} fusion(%x), kind=kCustom, calls=%step_of_a_fusion
  %b = f32[8]{0} fusion(%x), kind=kCustom, calls=%step_of_a_fusion
  %sent = (bf16[96,8]{1,0}, u32[], token[]) send(%x), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %e = f32[] constant(0)
}
"""


def test_collectives_are_read_from_the_text_of_a_program():
    assert [(each.kind, each.bytes, each.groups, each.times) for each in collectives.read_collectives(HLO)] == [
        ("all-reduce", 64 + 4 + 3, ((0, 1), (2, 3)), 1),
        ("collective-permute", 16, ((0, 1), (1, 0)), 1),
        ("all-gather", 32, ((0, 1, 2, 3),), 1),
        ("all-gather", 128, ((0, 2), (1, 3)), 3),
        ("reduce-scatter", 32, ((0, 1), (2, 3)), 3),
        ("all-to-all", 16, ((0, 1, 2, 3),), 5),
        ("reduce-scatter", 32, ((0, 2, 1, 3),), 1),
        ("all-gather", 32, (), 1),
        ("all-reduce between slices", 96 * 8 * 2, (), 1),
    ]


def test_cycles_count_as_often_as_loops_run_and_fusions_once():
    executed = [each for each in hlo.read_instructions(HLO) if not each.fused]
    assert sum(each.cycles * each.times for each in executed if each.cycles) == 5 + 3 * 100
    assert [each.name for each in executed if each.is_kernel] == ["kernel"]


def test_a_compilers_refusal_is_read():
    beside = "RESOURCE_EXHAUSTED: Ran out of memory, the total memory required for HLO temporaries (30.02G) exceeds"
    assert compiler.read_refusal(beside, 100) == int(30.02 * 2**30) + 100
    total = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Used 215.17G of 31.25G hbm. Exceeded by 183.92G."
    assert compiler.read_refusal(total, 100) == int(215.17 * 2**30)
    with pytest.raises(UserError, match=r"the compiler rejected the program: INTERNAL: no$"):
        compiler.read_refusal("INTERNAL: no\nmore", 0)
