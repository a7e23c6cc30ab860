"""Schedules of operations, of kernels compiled alone, and of whole programs with what they exchange."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from vit_jax.planning import chips, collectives, hlo, targets
from vit_jax.planning.schedules import dumps, kernel_cycles, step_schedule
from vit_jax.planning.schedules.scalar_unit import OperationCost, read_schedule
from vit_jax.planning.schedules.step_schedule import Timeline
from vit_jax.storage import versions

# A grid of 3 x 4 blocks in a pipeline of two stages: in 13 turns, the first only fetches and the last only computes.
# The block that is fetched depends on the first index alone, so that it is fetched at every fourth turn.
GRID = """
= control target key start
LB: loop body

     0   :  { %s10_s0 = smov 0 /* copy for cssa */  ;;  %s11_s1 = smov 0 }
   0x1   :  { %s12_s2 = smov 0  ;;  %s13_s3 = smov 4294967295 } /* Start region 8 */
   0x2 LB: > { %s30_s4 = sadd.s32 1, %s21_s1  ;;  %s20_s0 = sphi %s10_s0, %s40_s0  ;;  %s21_s1 = sphi %s11_s1, %s41_s1
/* phi copy */  ;;  %s22_s2 = sphi %s12_s2, %s42_s2  ;;  %s23_s3 = sphi %s13_s3, %s43_s3 } /* Start region 9 */
   0x3   : > { %p1_p0 = scmp.ge.s32.totalorder %s30_s4, 4  ;;  %s31_s5 = sadd.s32 1, %s22_s2 }
   0x4   : > { %p2_p1 = scmp.ne.s32.totalorder %s22_s2, %s23_s3  ;;  %p3_p2 = scmp.lt.s32.totalorder %s20_s0, 12 }
   0x5   : > { %p4_p3 = pnand %p2_p1, %p3_p2  ;;  %p5_p4 = scmp.eq.s32.totalorder %s20_s0, 0 }
   0x6   : > { %50 = dma.hbm_to_vmem [thread:$0]  (!%p4_p3), /*hbm=*/%s1_s9, /*size_in_granules=*/64, /*vmem=*/%s2_s8 /*
base_bounds: (4, 4) */ }
   0x7   : > { %60 = sbr.rel (%p5_p4) target = $region5 }
   0x8   :  {}
   0x9   :  {}
   0xa   :  {}
   0xb   :  {}
   0xc   : > { %70 = vmatmul.bf16.gmra.mxu0 %v1_v0  ;;  %71 = vmatmul.f32.gmra.mxu1 %v2_v1 }
   0xd PF: > { %s40_s0 = sadd.s32 1, %s20_s0  ;;  %s43_s3 = smov %s22_s2 } /* Start/End empty region 5 */
   0xe   : > { %s41_s1 = smov (%p1_p0, %s30_s4), 0  ;;  %s42_s2 = smov (!%p1_p0, %s31_s5), %s22_s2 }
   0xf   : > { %p6_p5 = scmp.ge.s32.totalorder %s40_s0, 13 }
  0x10   :  { %80 = sbr.rel (!%p6_p5) target = $region9 }
  0x11   :  {}
  0x12   :  {}
  0x13   :  {}
  0x14   :  {}
  0x15   :  { %90 = vsyncpa [#allocation4], 1 }
"""


def test_loops_pipelines_and_blocks_fetched_once_are_executed():
    found = read_schedule(GRID)
    body, skipped = 0x15 - 0x2, 1
    assert found.bundles == 2 + 13 * body - skipped + 1
    assert found.mxu_rows == 12 * 16  # the other unit takes rows of four bytes, half as many at once
    assert found.granules == 3 * 64
    assert (found.assumed, found.open_loops, found.shared) == (0, 0, False)


def test_a_copied_predicate_decides_what_its_original_does():
    copied = GRID.replace("%p4_p3 = pnand", "%p9_p8 = pnand").replace(
        "{ %50 = dma", "{ %p4_p3 = pmov %p9_p8  ;;  %50 = dma"
    )
    assert copied.count("p9_p8") == 2 and read_schedule(copied) == read_schedule(GRID)


def test_what_depends_on_data_is_counted_once_and_reported():
    unknown = GRID.replace("scmp.ge.s32.totalorder %s40_s0, 13", "scmp.ge.s32.totalorder %s40_s0, %s77_s7")
    found = read_schedule(unknown)
    assert found.open_loops == 1 and found.bundles == 0x16 - 1  # the first turn computes nothing
    condition = GRID.replace("%p5_p4 = scmp.eq.s32.totalorder %s20_s0, 0", "%p5_p4 = scmp.eq.s32.totalorder %s77_s7, 0")
    found = read_schedule(condition)
    assert found.assumed == 1 and found.mxu_rows == 13 * 16


def test_what_a_collective_sends_beside_an_operation_is_no_traffic_of_its_own():
    general = GRID.replace("dma.hbm_to_vmem [thread:$0]", "dma.general").replace("/*hbm=*/", "/*src=*/")
    assert read_schedule(general).granules == 3 * 64  # decided by the indices of the blocks
    unknown = general.replace("%p2_p1 = scmp.ne.s32.totalorder %s22_s2, %s23_s3", "%p2_p1 = scmp.ne.s32 %s77_s7, 0")
    assert unknown != general and read_schedule(unknown).granules == 0


def test_the_longest_of_three_counts():
    v5e, v4, v6e = (chips.CHIPS[kind] for kind in ("v5e", "v4", "v6e"))
    for bundles, rows, granules, cycles in ((5, 3, 0, 5), (5, 8, 0, 8), (5, 8, 819 * 10, 480)):
        assert OperationCost(bundles, rows, granules, False, 0, 0).cycles(v5e) == cycles  # 819 GB/s at 1.5 GHz
    assert OperationCost(0, 10, 0, False, 0, 0).cycles(v6e) == 5
    shared = OperationCost(0, 0, 10, True, 0, 0)  # each core of a v4 moves as much
    assert shared.hbm_bytes(v4) == 2 * 10 * 512 and shared.hbm_bytes(v5e) == 10 * 32


def test_transfers_hide_behind_operations():
    line = Timeline()
    line.start("a", 100)
    line.start("b", 50)  # after a
    line.run(120)
    line.wait("a")
    line.wait("b")
    assert (line.exposed, line.hidden, line.now) == (30, 120, 150)
    line.transfer(10)
    assert (line.exposed, line.now) == (40, 160)


HLO = """HloModule jit_step

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %gathered = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %inner = bf16[8,4]{1,0} fusion(%g), calls=%product
  %ready = bf16[16]{0} all-gather-done(%gathered)
  ROOT %t = (s32[], bf16[8,4]) tuple(%i, %g)
}

%product (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %k = bf16[8,4]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

%step (p: bf16[8,4]) -> bf16[8,4] {
  %spread = bf16[16]{0} all-gather(%p), replica_groups=[1,4]<=[4], frontend_attributes={chain_id="3"}, dimensions={0}
  ROOT %k = bf16[8,4]{1,0} add(%p, %p)
}

%moved (p: bf16[8,4]) -> bf16[8,4] {
  ROOT %k = bf16[8,4]{1,0} transpose(%p)
}

ENTRY %main (x: bf16[4,4]) -> bf16[] {
  %prefetched = (bf16[819]{0:S(1)}, bf16[819]{0}, u32[]) copy-start(%x)
  %w = (s32[], bf16[8,4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %first = bf16[8]{0} fusion(%x), calls=%step
  %second = bf16[8]{0} fusion(%x), calls=%step
  %copied = bf16[819]{0:S(1)} copy-done(%prefetched)
  %transposed = bf16[8]{0} fusion(%x), calls=%moved
  %attention = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
  %all = bf16[4]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %lost = bf16[8]{0} sort(%x), backend_config={"estimated_cycles":"5000"}
  %searched = bf16[8]{0} reduce(%x), backend_config={"estimated_cycles":"9"}
  ROOT %e = bf16[] constant(0)
}
"""


class Written(dumps.Dumps):
    """Schedules of so many bundles."""

    def __init__(self):
        pass

    def read(self, name):
        bundles = {"inner": 10, "first": 20, "second": 30, "transposed": 40, "attention": 50, "searched": 7}.get(name)
        return OperationCost(bundles, 0, 1, False, 0, name == "searched") if bundles else None


def test_a_program_is_summed_by_kind_and_its_exchange_laid_beside(monkeypatch):
    times = {"all-gather": 12.0, "all-reduce": 8.0}
    monkeypatch.setattr(collectives.Links, "cycles", lambda links, each: times[each.kind])
    links = collectives.Links(chips.parse_topology("v5e:2x2"), [])
    found = step_schedule.read_step_schedule(HLO, Written(), links)
    assert found.kinds == {"matmul": 30, "kernel": 50, "elementwise": 50, "layout": 40, "reduction": 9}
    assert found.exchange_exposed == 3 * (12 - 10) + 8
    assert found.exchange_hidden == 3 * 10 + 12  # the second is spread over two fusions that take longer
    assert (found.copies_exposed, found.copies_hidden) == (0, 3)  # 1,638 bytes at 546 a cycle
    assert (found.open_loops, found.missing) == (1, 1)
    assert found.hbm_bytes == 32 * (3 + 5) and found.cycles == 179


CHECK = """
import json, os, sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from tests.kernels import compiled
from vit_jax.planning import chips, hlo, targets
from vit_jax.planning.schedules import dumps, kernel_cycles

[device, *_] = targets.find_devices("v5e:2x2", 1)
chip, folder = chips.CHIPS["v5e"], dumps.dump_folder()

def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

def costs(function, *shapes):
    dumps.delete_dumps(folder)
    text = jax.jit(function).lower(*shapes).compile().as_text()
    written = dumps.Dumps(folder)
    found = [written.read(each.name) for each in hlo.read_instructions(text) if not each.fused]
    found = [each for each in found if each]
    return text, [sum(each.cycles(chip) for each in found), sum(each.hbm_bytes(chip) for each in found)]

def kernel(x, w, o):
    @pl.when(pl.program_id(1) == 0)
    def _():
        o[...] = jnp.zeros_like(o)
    o[0] += jnp.dot(x[0], w[...], preferred_element_type=jnp.float32)

def block(rows, columns):
    return pl.BlockSpec((1, rows, columns), lambda i, j: (i, 0, 0))

def product(x, w):
    images, rows, depth = x.shape
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((images, rows, 256), jnp.float32),
        grid=(images, 2),
        in_specs=[block(rows, depth), pl.BlockSpec((depth, 256), lambda i, j: (0, j))],
        out_specs=block(rows, 256),
    )(x, w)

found = {}
_, found["square"] = costs(jnp.matmul, array((4096, 4096)), array((4096, 4096)))
_, found["mlp"] = costs(jnp.matmul, array((25088, 768)), array((768, 3072)))
_, found["add"] = costs(jnp.add, array((25088, 3072)), array((25088, 3072)))
_, found["softmax"] = costs(jax.nn.softmax, array((1536, 256, 256), jnp.float32))
text, found["kernel"] = costs(product, array((16, 256, 768)), array((768, 512)))
found["alone"] = kernel_cycles.sum_kernel_cycles(text, "v5e:2x2")
attention, *arrays = compiled.one_device([device], 8, 257, 16, 80, "bfloat16")
text = attention.lower(*arrays).compile().as_text()
found["more than the default limit of VMEM"] = kernel_cycles.sum_kernel_cycles(text, "v5e:2x2")
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_schedules_come_out_at_the_arithmetic_and_at_the_bytes(tmp_path):
    environment = os.environ | targets.NO_POD | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"VIT_JAX_CACHE": str(tmp_path / "cache"), **dumps.dump_environment(str(tmp_path))}
    answer = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout)
    macs_per_cycle = 4 * 128**2
    for name, sizes in (("square", (4096, 4096, 4096)), ("mlp", (25088, 768, 3072))):
        rows, depth, columns = sizes
        assert found[name][0] == pytest.approx(rows * depth * columns / macs_per_cycle, rel=0.003)
    moved = 2 * (25088 * 768 + 768 * 3072 + 25088 * 3072)
    assert moved - found["mlp"][1] in (0, 2 * 25088 * 768)  # the first operand may have been copied to VMEM before
    assert found["add"][1] == 3 * 2 * 25088 * 3072
    for name, arrays in (("add", 3), ("softmax", 3)):  # the softmax reads its operand twice
        size = {"add": 2 * 25088 * 3072, "softmax": 4 * 1536 * 256 * 256}[name]
        assert found[name] == [pytest.approx(arrays * size / 819e9 * 1.5e9, rel=1e-3), arrays * size]
    blocks = 16 * 2 * 256 * 768 + 16 * 2 * 2 * 768 * 256 + 16 * 4 * 256 * 256  # of the second operand, two an image
    assert found["kernel"][1] == blocks and found["alone"] == found["kernel"][0]
    assert found["more than the default limit of VMEM"] > 8 * 16 * 7 * 257**2 * 80 / macs_per_cycle


PRODUCTS = """
import json
import jax, jax.numpy as jnp
from vit_jax.planning import chips, hlo, targets
from vit_jax.planning.schedules import dumps

found, folder = {}, dumps.dump_folder()
for kind, chip in chips.CHIPS.items():
    [device, *_] = targets.find_devices(f"{kind}:" + ("2x2" if chip.dimensions == 2 else "2x2x1"), 1)
    square = jax.ShapeDtypeStruct((1024,) * 2, jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    dumps.delete_dumps(folder)
    text = jax.jit(jnp.matmul).lower(square, square).compile().as_text()
    written = dumps.Dumps(folder)
    costs = [written.read(each.name) for each in hlo.read_instructions(text) if not each.fused]
    found[kind] = [sum(each.cycles(chip) for each in costs if each), sum(each.mxu_rows for each in costs if each)]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_a_product_is_never_faster_than_the_peak_of_its_device(tmp_path):
    environment = os.environ | targets.NO_POD | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= dumps.dump_environment(str(tmp_path))
    answer = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout)
    assert found.keys() == chips.CHIPS.keys()
    for kind, (cycles, rows) in found.items():
        chip = chips.CHIPS[kind]
        least = 2 * 1024**3 / chip.device_flops * chip.clock
        assert least <= 1.01 * cycles < 3 * least, kind
        assert rows > 0, kind


KERNEL = (
    "  %attention.1 = (f32[16,256]{1,0:T(8,128)}, bf16[8]{0}) custom-call(%a, %b), "
    'custom_call_target="tpu_custom_call", operand_layout_constraints={f32[16,256]{1,0}, s32[]}, '
    "output_operand_aliasing={{0}: (0, {})}, metadata={}, "
    'backend_config={"flag_configs":[],"custom_call_config":{"body":"TUzv{","needs_layout_passes":true},"x":{}}'
)


def test_kernels_are_read_from_the_text_of_a_program():
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n{KERNEL}\n}}"
    [found] = [kernel_cycles.parse_kernel(each) for each in hlo.read_instructions(text) if each.is_kernel]
    assert found.operands == (("float32", (16, 256)), ("int32", ()))
    assert found.results == (("float32", (16, 256)), ("bfloat16", (8,)))
    assert json.loads(found.config) == {"custom_call_config": {"body": "TUzv{", "needs_layout_passes": True}}
    assert found.aliases == ((0, 0),)


def test_each_kernel_is_compiled_alone_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    other = KERNEL.replace("attention.1", "attention.2").replace("TUzv", "TUzw")
    text = f"ENTRY %main (x: f32[]) -> f32[] {{\n{KERNEL}\n{KERNEL.replace('attention.1', 'again')}\n{other}\n}}"
    asked = []

    def compile_alone(unknown, target):
        asked.append(len(unknown))
        return [None if refused and "TUzw" in kernel.config else 7 for kernel in unknown]

    monkeypatch.setattr(kernel_cycles, "_compile", compile_alone)
    refused = True
    assert kernel_cycles.sum_kernel_cycles(text, "v5e:2x2") is None
    refused = False
    assert kernel_cycles.sum_kernel_cycles(text, "v5e:2x4") == 3 * 7
    monkeypatch.setattr(versions, "library_versions", lambda names: {"libtpu": "2"})
    assert kernel_cycles.sum_kernel_cycles(text, "v5e:2x2") == 3 * 7
    monkeypatch.setattr(versions, "source_digest", lambda package: "changed")
    assert kernel_cycles.sum_kernel_cycles(text, "v5e:2x2") == 3 * 7
    assert asked == [2, 1, 2, 2]  # anew: what was refused, for another compiler, and by other code
    assert kernel_cycles.sum_kernel_cycles("ENTRY %main (x: f32[]) -> f32[] {\n}", "v5e:2x2") is None
