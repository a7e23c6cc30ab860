"""The records of planning as JSON: what `--json` prints, what the compiler's process answers, what the cache keeps.

The keys of the parts of a record, such as the workload and the estimate of a plan, lie side by side in one object. A
key is absent if the record lacks the part to which it belongs: a program that does not fit has no keys of an estimate.
A key is null if the part is there without this value: `cycles` of a program for a CPU.
"""

import dataclasses
import json
from typing import Any, TypeVar

from vit_jax.planning.compile_records import (
    Compilation,
    EvaluationReport,
    Exchange,
    Executable,
    StepReport,
    StepSchedule,
    Workload,
)
from vit_jax.planning.plan_records import Plan

Json = dict[str, Any]
ReportT = TypeVar("ReportT")


def plan_to_json(plan: Plan) -> Json:
    """Returns what `python -m vit_jax.plan --json` prints of a plan."""
    result = compilation_to_json(plan.compilation)
    if plan.estimate:
        estimate = dataclasses.asdict(plan.estimate)
        run = estimate.pop("run")
        result |= estimate | (run or {})
    if plan.by_schedule:
        result["schedule"] |= dataclasses.asdict(plan.by_schedule)
    if plan.goodput:
        result["goodput"] = dataclasses.asdict(plan.goodput)
    if plan.price is not None:
        result["price"] = plan.price
    if plan.advice:
        better = plan.advice.plan
        result["advice"] = {"change": plan.advice.change, **plan_to_json(better)} if better else None
    if plan.largest:
        largest = plan_to_json(plan.largest.plan) if plan.largest.plan else None
        result["fit"] = {"largest": largest, "refused_images_per_device": plan.largest.refused_images_per_device}
    if plan.command is not None:
        result["command"] = plan.command
    return result


def compilation_to_json(compilation: Compilation) -> Json:
    """Returns a compilation as JSON: what is known of a program without any estimate."""
    result = dataclasses.asdict(compilation.workload) | step_to_json(compilation.step)
    if evaluation := compilation.evaluation:
        told = {key: value for key, value in dataclasses.asdict(evaluation).items() if value is not None}
        result["evaluation"] = told | {"fits": evaluation.needed_bytes is None}
    return result | {"fits": compilation.fits}


def compilation_from_json(given: Json) -> Compilation:
    """Rebuilds a compilation from the JSON that `compilation_to_json` wrote."""
    evaluation = given.get("evaluation")
    optional: Json = {"peak_bytes": None, "needed_bytes": None}
    return Compilation(
        _select(Workload, given),
        step_from_json(given),
        _select(EvaluationReport, optional | evaluation) if evaluation else None,
    )


def step_to_json(step: StepReport) -> Json:
    """Returns the compiler's report of a step as JSON."""
    told = dataclasses.asdict(step)
    executable, needed_bytes = told.pop("executable") or {}, told.pop("needed_bytes")
    needed = {} if needed_bytes is None else {"needed_bytes": needed_bytes}
    return {"fits": needed_bytes is None, **executable, **needed, **told}


def step_from_json(given: Json) -> StepReport:
    """Rebuilds the report of a step from the JSON that `step_to_json` wrote.

    Raises:
        KeyError, TypeError, AttributeError: the JSON is something else.
    """
    executable = None
    if "peak_bytes" in given:
        collectives = {kind: Exchange(**each) for kind, each in given["collectives"].items()}
        schedule = StepSchedule(**given["schedule"]) if given.get("schedule") else None
        executable = _select(Executable, given | {"collectives": collectives, "schedule": schedule})
    needed_bytes = None if executable else given["needed_bytes"]
    return _select(StepReport, given | {"executable": executable, "needed_bytes": needed_bytes})


def remember_step(step: StepReport) -> str:
    """Returns the text that the cache keeps of the compiler's report of a step, without `flops` and `remembered`."""
    return json.dumps({key: value for key, value in step_to_json(step).items() if key not in ("flops", "remembered")})


def remembered_step(text: str, flops: float) -> StepReport:
    """Rebuilds the report of a step from the text that `remember_step` wrote and from its FLOPs.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        return step_from_json(json.loads(text) | {"flops": flops, "remembered": True})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a report") from error


def _select(kind: type[ReportT], given: Json) -> ReportT:
    """Builds a record from the values of its fields; other keys of `given` are ignored."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in names})
