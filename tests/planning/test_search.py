"""What is advised where a program does not fit, and the largest batch, with compilers that follow a formula."""

import dataclasses
import itertools
import math

import pytest

from tests.planning.builders import make_compilation
from vit_jax import UserError
from vit_jax.planning import planner, search
from vit_jax.planning.records import EvaluationReport, PlanRequest

REMAT = search.REMAT_FRACTIONS  # of the activations, what is kept


def memory(state, image, waste=1.0):
    """A compiler whose programs need what follows from the change, and of the activations some more (`waste`)."""

    def compile(change):
        share = 8 if "mesh.fsdp" in change else 1
        accum, batch = int(change.get("accum_steps", 1)), int(change.get("batch", 128))
        kept = REMAT[change.get("model.remat", "none")]
        gradients = state / 3 if accum > 1 else 0
        need = (state + gradients) / share + batch / 8 / accum * image * kept * waste
        asked.append(change)
        return make_compilation(
            math.ceil(need), batch=batch, images_per_device=batch // 8, state_bytes=state, parameter_bytes=state // 3
        )

    asked = []
    return compile, asked


@pytest.mark.parametrize(
    "state, image, expected",
    [
        (300, 50, {"accum_steps": "2"}),
        (300, 70, {"accum_steps": "2"}),
        (600, 60, {"accum_steps": "8"}),
        (960, 30, search.STRATEGIES["fsdp"]),
        (960, 60, search.STRATEGIES["fsdp"] | {"accum_steps": "2"}),
        (600, 2500, search.STRATEGIES["fsdp"] | {"model.remat": "full", "accum_steps": "16"}),
    ],
)
def test_advice_is_the_cheapest_change_that_fits(state, image, expected):
    compile, asked = memory(state, image)
    first = compile({})
    assert not first.fits
    change, found = search.find_fitting_change(first, compile)
    assert change == expected and found.fits and len(asked) == 2  # guessed right at once


def test_a_prediction_is_advised_no_parts_and_no_backward_pass():
    def compile(change):
        asked.append(change)
        need = 400 / (8 if "mesh.fsdp" in change else 1) + int(change.get("batch", 128)) / 8 * 60
        return make_compilation(int(need), inference=True, parameter_bytes=400, state_bytes=1200)

    asked = []
    change, found = search.find_fitting_change(compile({}), compile)
    assert change == {"batch": "64"} and found.fits and len(asked) == 2


def test_more_is_computed_again_only_where_parts_do_not_suffice():
    """One image of 1,500 bytes: no part is smaller."""
    found = [
        (change["model.remat"], guess)
        for change, guess in search.candidate_changes(
            make_compilation(2100, batch=8, images_per_device=1, state_bytes=600, parameter_bytes=200)
        )
        if change.get("model.remat")
    ]
    split = 600 // 8
    assert found == [(name, split + int(1500 * part)) for name, part in REMAT.items() if name != "none"]


def test_advice_is_only_what_was_compiled_and_fits():
    compile, asked = memory(300, 70, waste=1.6)
    first = make_compilation(300 + 70 * 16, state_bytes=300, parameter_bytes=100)
    change, found = search.find_fitting_change(first, compile)
    assert found.fits and asked[-1] == change and len(asked) > 1
    compile, asked = memory(20_000, 1)
    assert (
        search.find_fitting_change(make_compilation(20_016, state_bytes=20_000, parameter_bytes=6_666), compile) is None
    )
    assert len(asked) == 1 and {"mesh.fsdp", "model.remat", "batch"} <= set(asked[0])  # the most frugal of all


@pytest.mark.parametrize(("state", "image", "expected"), [(300, 30, {}), (300, 70, {"accum_steps": "2"})])
def test_an_evaluation_that_does_not_fit_gets_a_smaller_batch(state, image, expected):
    step, asked = memory(state, image)

    def compile(change):
        compilation, images = step(change), int(change.get("batch_eval", 512)) // 8
        need = state + 20 * images
        fits = need <= 1000
        evaluation = EvaluationReport(
            batch=8 * images,
            images_per_device=images,
            peak_bytes=need if fits else None,
            needed_bytes=None if fits else need,
            compile_seconds=1.0,
            remembered=False,
        )
        return dataclasses.replace(compilation, evaluation=evaluation)

    change, found = search.find_fitting_change(compile({}), compile)
    assert change == expected | {"batch_eval": "256"} and found.fits and len(asked) == 2 + len(expected)


@pytest.mark.parametrize(("image", "change"), [(30, ""), (70, " --config.accum_steps=2")])
def test_the_command_of_a_plan_has_the_change_that_is_advised(image, change):
    compile, _ = memory(300, image)

    def compile_request(request):
        return compile(dict(word.removeprefix("--config.").split("=") for word in request.words[1:]))

    plan = planner.make_plan(PlanRequest(("--config=r.py",), "v5e:2x4"), compile_request)
    assert f" -- python -m vit_jax.main --config=r.py{change} --config.data.source=" in plan.command


def test_weights_are_never_split_over_slices():
    split = {"slice": 2, "data": 1, "fsdp": 4, "tensor": 1}
    assert all("mesh.fsdp" not in change for change, _ in search.candidate_changes(make_compilation(2000, mesh=split)))
    half = {"slice": 2, "data": 2, "fsdp": 2, "tensor": 1}
    guesses = [
        guess
        for change, guess in search.candidate_changes(make_compilation(2000, mesh=half))
        if change == search.STRATEGIES["fsdp"]
    ]
    assert guesses == [600 / 2 + 1400]


@pytest.mark.parametrize("state, image, start", [*itertools.product((100, 600), (0.3, 7, 60), (1, 16, 4000))])
def test_the_largest_batch_is_found_in_few_compilations(state, image, start):
    def compile(change):
        asked.append(int(change["batch"]) // 8)
        near = max(0, image * asked[-1] + state - 900)  # some of it is computed again when memory runs out
        need = state + image * asked[-1] - near / 2
        return make_compilation(math.ceil(need), images_per_device=asked[-1], batch=asked[-1] * 8, state_bytes=state)

    asked = []
    best, refused = search.find_largest_batch(compile({"batch": start * 8}), compile)
    largest = (1100 - state) / image
    assert best.fits and best.workload.images_per_device <= largest < refused
    assert refused - best.workload.images_per_device <= max(1, best.workload.images_per_device / search.BATCH_STEPS)
    assert len(asked) <= 1 + search.MAX_BATCHES


@pytest.mark.parametrize("accum", [2, 3, 8])
def test_a_batch_is_cut_in_equal_parts_whatever_is_tried(accum):
    def compile(change):
        images = int(change["batch"]) // 8
        assert images % accum == 0
        if images > 3000:
            raise UserError("the warm-up is longer than the run")
        return make_compilation(
            100 + images // 4, images_per_device=images, batch=images * 8, state_bytes=100, accum_steps=accum
        )

    best, refused = search.find_largest_batch(compile({"batch": 8 * accum}), compile)
    assert 2000 < best.workload.images_per_device <= 3000 < refused


def test_no_batch_fits():
    compile, _ = memory(1200, 1)
    assert search.find_largest_batch(compile({}), compile) == (None, 1)


def test_only_what_the_model_accepts_is_computed_again():
    """A BiT's remat is none or full."""
    first = make_compilation(5000, remat_choices=["none", "full"])
    tried = {change["model.remat"] for change, _ in search.candidate_changes(first) if "model.remat" in change}
    assert tried == {"full"}
