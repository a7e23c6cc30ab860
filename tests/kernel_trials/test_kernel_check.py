"""Kernels on a chip that may execute them wrongly; the chip and its results are injected."""

import functools
import threading
from unittest.mock import Mock

import jax
import pytest

from tests.distributed.test_coordination import everywhere, make_groups
from vit_jax import kernels, predict, program
from vit_jax.execution import AttentionSizes, attention_kinds, attention_sizes, comparison
from vit_jax.kernel_trials import correctness
from vit_jax.kernel_trials.correctness import check_kernels
from vit_jax.kernels import Packing
from vit_jax.model import create
from vit_jax.storage import cache as cache_folder

CHIP = Mock(jax.Device, platform="tpu", device_kind="TPU v5 lite")
RIGHT = {"the result": 0.002, "the gradient of the input": 0.008}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def fused(**fields):
    return create("ViT-mu/8", attention="fused", **fields)


class Measure:
    """Answers comparisons, and counts them."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def __call__(self, spec, device, tensor):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_kernel_that_is_right_is_used_and_compared_once(caplog):
    measure = Measure(RIGHT)
    for _ in range(2):
        assert check_kernels(fused(), CHIP, comparisons={"attention": measure}) == fused()
    assert measure.asked == 1 and not caplog.records
    check_kernels(fused(resolution=64), CHIP, comparisons={"attention": measure})
    check_kernels(fused(), Mock(jax.Device, platform="tpu", device_kind="TPU v4"), comparisons={"attention": measure})
    assert measure.asked == 3


@pytest.mark.parametrize("value", [0.3, float("nan"), float("inf")])
def test_a_kernel_that_is_wrong_is_replaced_each_time(caplog, value):
    measure = Measure(RIGHT | {"the gradient of the input": value})
    for _ in range(2):
        plain = create("ViT-mu/8", attention="tokens_first")
        assert check_kernels(fused(), CHIP, comparisons={"attention": measure}) == plain
    assert measure.asked == 1
    assert [record.getMessage() for record in caplog.records] == 2 * [
        "the attention kernel fused is wrong on TPU v5 lite: it changes the gradient of the input by "
        f"{value:.2g} times its size; the plain form, which is slower, replaces it."
    ]


def test_a_kernel_that_does_not_run_is_tried_again(caplog):
    measure = Measure(RuntimeError("no such instruction\nin line 1"))
    assert check_kernels(fused(), CHIP, comparisons={"attention": measure}).field("attention") == "tokens_first"
    assert "does not run on TPU v5 lite (no such instruction)" in caplog.text
    measure.answer = RIGHT
    assert check_kernels(fused(), CHIP, comparisons={"attention": measure}).field("attention") == "fused"


def test_only_the_kernel_that_is_wrong_is_replaced(caplog):
    model = create("ViT-mu/8", attention="fused", mlp="fused")
    comparisons = {"attention": Measure(RIGHT), "mlp": Measure({"the result of the MLP": 0.5})}
    chosen = check_kernels(model, CHIP, comparisons=comparisons)
    assert (chosen.field("attention"), chosen.field("mlp")) == ("fused", "jit")
    assert "the MLP kernel fused is wrong on TPU v5 lite: it changes the result of the MLP by 0.5" in caplog.text
    comparisons = {"attention": Measure({"the result": 0.5}), "mlp": Measure(RIGHT)}
    chosen = check_kernels(model.with_fields(resolution=64, mlp_dim=256), CHIP, comparisons=comparisons)
    assert (chosen.field("attention"), chosen.field("mlp")) == ("tokens_first", "fused")


def test_plain_forms_and_cpus_are_not_compared():
    measure = Measure(RuntimeError())
    for model, device in ((create("ViT-mu/8", attention="tokens_first"), CHIP), (fused(), jax.devices()[0])):
        assert check_kernels(model, device, comparisons={"attention": measure}) == model
    assert not measure.asked


def test_all_hosts_make_the_same_choice(monkeypatch, tmp_path):
    """One has a broken chip; each has a cache of its own."""
    folders = threading.local()
    monkeypatch.setattr(cache_folder, "root", lambda: folders.path)

    def choose(group):
        folders.path = tmp_path / str(group.host)
        folders.path.mkdir()
        answer = RIGHT | ({"the result": 1.0} if group.host == 2 else {})
        return check_kernels(fused(), CHIP, 1, group, {"attention": Measure(answer)}).field("attention")

    assert everywhere([lambda group=group: choose(group) for group in make_groups(4)]) == ["tokens_first"] * 4


@pytest.mark.parametrize("kind", [pytest.param("heads_first", marks=pytest.mark.slow), "tokens_first"])
def test_forms_that_are_right_are_within_the_tolerance(kind):
    spec = create("ViT-mu/8", attention=kind, dtype="bfloat16").spec
    found = comparison.measure_differences(spec, jax.devices()[0])
    assert all(value < correctness.TOLERANCE / 2 for value in found.values())


@pytest.mark.parametrize(
    "fields", [pytest.param({"qk_norm": True}, marks=pytest.mark.slow), {"rotary": "axial", "qk_norm": True}]
)
def test_the_kernel_that_changes_queries_is_within_the_tolerance(fields):
    """Interpreted, in bfloat16: the gradient of the norms, too."""
    spec = create("ViT-mu/8", resolution=56, attention="fused", dtype="bfloat16", **fields).spec
    with kernels.interpret_kernels():
        found = comparison.measure_differences(spec, jax.devices()[0])
    assert "the gradient of the norms" in found
    assert all(value < correctness.TOLERANCE for value in found.values()), found


def test_every_form_of_the_kernel_is_compared_by_itself():
    forms = ({}, {"qk_norm": True}, {"rotary": "axial"}, {"qk_norm": True, "rotary": "axial"})
    assert len({attention_sizes(create("ViT-B/16", **fields).spec, 0) for fields in forms}) == len(forms)


def test_forms_that_are_wrong_are_not():
    """Keys that are no tokens attended to, a head's channels exchanged: none of this may pass."""
    sizes = AttentionSizes(8, 197, 1, 8, "bfloat16")

    def differences(form, images):
        operands = comparison.draw_operands(sizes)
        packing = Packing(sizes.tokens, images, kernels.round_up(images * sizes.tokens, 8))
        found = jax.jit(functools.partial(comparison.compare, form, packing))(*operands)
        return [float(value) > correctness.TOLERANCE for value in found.values()]

    def without_mask(x, kernel, bias, packing, change):
        every_row = Packing(packing.rows, 1, packing.rows)
        return attention_kinds.ATTENTIONS["tokens_first"](x, kernel, bias, every_row, change)

    def exchanged(x, kernel, bias, packing, change):
        return attention_kinds.ATTENTIONS["tokens_first"](x, kernel[..., ::-1], bias, packing, change)

    assert all(differences(without_mask, 1)) and all(differences(without_mask, 4))
    assert all(differences(exchanged, 1))


def test_predictions_and_programs_ask_before_they_compile(tiny, monkeypatch):
    replaced = []

    def check(model, device, tensor=1, coordinator=None):
        replaced.append((model.field("attention"), device.platform, tensor))
        return model.with_attention("tokens_first")

    _, _, built = program.prepare(tiny, check)
    assert built.model.field("attention") == "tokens_first" and replaced == [("heads_first", "cpu", 1)]
    built = program.make_inference_program(tiny, 1, check)
    assert built.model.field("attention") == "tokens_first" and len(replaced) == 2
    assert predict.check_kernels is check_kernels
