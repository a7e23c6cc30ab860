"""The records that planning passes on: what is asked for, what a compiler reports, the plan, and all of them as JSON.

Bytes, FLOPs and exchanges are those of one device.

The JSON is what `--json` prints, what the compiler's process answers, and what the cache keeps. The keys of the parts
of a record, such as the workload and the estimate of a plan, lie side by side in one object. A key is absent if the
record lacks the part to which it belongs: a program that does not fit has no keys of an estimate. A key is null if the
part is there without this value: `cycles` of a program for a CPU.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from vit_jax.planning.goodput import GoodputEstimate

ConfigChange = dict[str, str]  # config field -> new value
Json = dict[str, Any]
ReportT = TypeVar("ReportT")


def config_flags(change: ConfigChange) -> list[str]:
    """Returns a change as flags of `vit_jax.main`."""
    return [f"--config.{key}={value}" for key, value in change.items()]


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A request to compile a run, or a prediction, for a target.

    Attributes:
        words: flags of `vit_jax.main`.
        target: a TPU slice such as `v5e:2x4`; or `cpu` or `gpu` for the devices of this machine.
        inference: whether to compile a prediction instead of a train step.
        emulated_devices: the number of devices that `cpu` stands for.
        reads_schedules: whether the schedules of all operations, which the compiler writes, are read; only for TPU
            slices.
    """

    words: tuple[str, ...]
    target: str
    inference: bool = False
    emulated_devices: int = 1
    reads_schedules: bool = False

    @property
    def emulation_flag(self) -> str:
        """The flag of XLA_FLAGS with which the CPU stands for several devices."""
        return f"--xla_force_host_platform_device_count={self.emulated_devices}"

    def with_change(self, change: ConfigChange) -> "PlanRequest":
        """Returns the request with other values of some config fields."""
        return dataclasses.replace(self, words=(*self.words, *config_flags(change)))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The facts about a request that are known before anything is compiled.

    Attributes:
        target: see `PlanRequest`.
        inference: see `PlanRequest`.
        memory_bytes: bytes of memory that a device has for a program.
        model: name of the model.
        mesh: axis of the mesh -> number of devices along it.
        devices: the number of all devices.
        chips: the number of all chips, of which some have two devices.
        device_kind: jax's name of the devices.
        batch: images of a step, over all devices.
        images_per_device: images of a step on one device. An image that several devices share counts on each of them.
        images_per_host: images of a step that the busiest host reads.
        waiting_bytes: bytes of the batches read ahead, which lie on a device beside what a step needs.
        source: `data.source`.
        data_dir: `data.data_dir`.
        fast: `data.fast`.
        resolution: pixels along each side of an image.
        accum_steps: the number of parts in which a batch is computed, one after the other.
        remat: which activations are computed again in the backward pass.
        remat_choices: the values of `remat` that the model accepts.
        dtype: the dtype of the activations.
        steps: the steps of the run.
        save_steps: steps between two saves, those before evaluations included; `save_minutes` may save earlier.
        save_minutes: minutes between two saves; 0 if only steps count.
        epochs: the epochs of the run.
        num_examples: images of the training split.
        parameters: the number of parameters, over all devices.
        parameter_bytes: bytes of the parameters.
        state_bytes: bytes of the training state: parameters, optimizer, average.
        macs_per_image: multiply-accumulates of an image's forward pass.
        passes: the number of gradients that a step computes: two with SAM.
        readers: the number of readers if the images are streamed; 0 if they cannot be streamed.
        window: the number of shards that each reader shuffles at a time.
        teacher_bytes: bytes of the parameters of a teacher; 0 if there is none.
        teacher_macs: multiply-accumulates of the teacher's forward pass of an image; 0 if there is none.
    """

    target: str
    inference: bool
    memory_bytes: int
    model: str
    mesh: dict[str, int]
    devices: int
    chips: int
    device_kind: str
    batch: int
    images_per_device: int
    images_per_host: int
    waiting_bytes: int
    source: str
    data_dir: str | None
    fast: bool
    resolution: int
    accum_steps: int
    remat: str
    remat_choices: list[str]
    dtype: str
    steps: int
    save_steps: int
    save_minutes: float
    epochs: float
    num_examples: int
    parameters: int
    parameter_bytes: int
    state_bytes: int
    macs_per_image: int
    readers: int
    window: int
    passes: int = 1
    teacher_bytes: int = 0
    teacher_macs: int = 0

    @property
    def resident_bytes(self) -> int:
        """The bytes of a program's arguments without the batch: parameters, or the training state and a teacher."""
        return self.parameter_bytes if self.inference else self.state_bytes + self.teacher_bytes

    @property
    def mesh_axes(self) -> str:
        """The mesh axes that are longer than 1, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "one device"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All collectives of one kind in a program.

    Attributes:
        count: the number of collectives that one run of the program executes.
        bytes: the bytes of the whole arrays, as one device sees them, summed over the collectives.
        link_bytes: the bytes that the busiest link between chips carries for each collective, summed over them.
    """

    count: int
    bytes: int
    link_bytes: float


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """The cost of a program to a device by the schedules of its operations, in which they wait for nothing.

    All times are in cycles.

    Attributes:
        kinds: `matmul`, `kernel`, `reduction`, `layout`, `elementwise` or `other` -> cycles of these operations.
        exchange_exposed: cycles during which a device only waits for collectives, at the full speed of the busiest
            link.
        exchange_hidden: cycles of collectives during which operations run.
        copies_exposed: cycles during which a device only waits for copies that run beside its operations.
        copies_hidden: cycles of such copies during which operations run.
        hbm_bytes: bytes that the operations move from and to HBM.
        open_loops: the number of operations with a loop whose number of turns depends on data. Such a loop counts as
            one turn. The operation counts as the compiler's estimate of it if that is more.
        missing: the number of operations without a schedule that the compiler estimates at more than 1,000 cycles.
    """

    kinds: dict[str, int]
    exchange_exposed: int
    exchange_hidden: int
    copies_exposed: int
    copies_hidden: int
    hbm_bytes: int
    open_loops: int
    missing: int

    @property
    def cycles(self) -> int:
        """The cycles of the operations, without waits for collectives and copies."""
        return sum(self.kinds.values())


@dataclasses.dataclass(frozen=True)
class Executable:
    """The contents of a compiled program.

    Attributes:
        temp_bytes: bytes of intermediate results.
        code_bytes: bytes of the program itself.
        peak_bytes: the most memory that the program needs at once, its arguments included.
        compiler_flops: the FLOPs that the compiler counts. None if it counts none, or if the program has loops, of
            which the compiler counts one turn only.
        collectives: kind of collective -> all exchanges of that kind.
        cycles: the cycles that a compiler for TPUs estimates for all but Pallas kernels; None if there is no estimate.
        kernels: the number of Pallas kernels that one run of the program executes.
        kernel_cycles: the cycles of all kernels by their schedules; None if they are unknown or there are no kernels.
        schedule: the schedule of the whole program; None if it was not asked for.
    """

    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    compiler_flops: float | None
    collectives: dict[str, Exchange]
    cycles: int | None
    kernels: int
    kernel_cycles: int | None = None
    schedule: StepSchedule | None = None


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The compiler's report of the train step, or of the prediction.

    Attributes:
        executable: what the compiled program contains; None if the compiler refused the program for its size.
        needed_bytes: the bytes that the program needs if they are more than a device has; None if the program fits.
        flops: the FLOPs of its matrix products and convolutions, counted from its trace.
        compile_seconds: the seconds that the compiler took.
        versions: package -> its version when the program was compiled; None: not installed.
        remembered: whether the program was compiled earlier, so that this report comes from the cache.
    """

    executable: Executable | None
    needed_bytes: int | None
    flops: float
    compile_seconds: float
    versions: dict[str, str | None]
    remembered: bool

    @property
    def required_bytes(self) -> int:
        """The memory that the program needs, whether it fits or not."""
        if self.needed_bytes is not None:
            return self.needed_bytes
        assert self.executable
        return self.executable.peak_bytes


@dataclasses.dataclass(frozen=True)
class EvaluationReport:
    """The compiler's report of the evaluation step, with the memory that training keeps beside it.

    Attributes:
        batch: images of an evaluation step, over all devices.
        images_per_device: images of an evaluation step on one device.
        peak_bytes: the most memory that is needed at once; None if the compiler refused the program for its size.
        needed_bytes: the bytes that are needed if they are more than a device has; None if the program fits.
        compile_seconds: the seconds that the compiler took.
        remembered: whether the program was compiled earlier, so that this report comes from the cache.
    """

    batch: int
    images_per_device: int
    peak_bytes: int | None
    needed_bytes: int | None
    compile_seconds: float
    remembered: bool

    @property
    def required_bytes(self) -> int:
        """The memory that the program needs, whether it fits or not."""
        required = self.peak_bytes if self.needed_bytes is None else self.needed_bytes
        assert required is not None
        return required


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A workload and what the compiler reported of it.

    Attributes:
        workload: what was compiled.
        step: the train step, or the prediction.
        evaluation: the evaluation step; None for a prediction.
    """

    workload: Workload
    step: StepReport
    evaluation: EvaluationReport | None

    @property
    def fits(self) -> bool:
        """Whether a device has the memory for every part."""
        return all(part.needed_bytes is None for part in self._parts())

    @property
    def free_bytes(self) -> int:
        """The memory of a device that the largest part leaves free."""
        return self.workload.memory_bytes - max(part.required_bytes for part in self._parts())

    def _parts(self) -> Iterable[StepReport | EvaluationReport]:
        return (self.step, self.evaluation) if self.evaluation else (self.step,)


@dataclasses.dataclass(frozen=True)
class RatioBand:
    """The range of the published step times of real runs, as multiples of their predicted times.

    Attributes:
        low: the smallest ratio of published to predicted time.
        high: the largest ratio of published to predicted time.
        runs: the number of runs.
        kinds: the kinds of chips on which the runs were made.
    """

    low: float
    high: float
    runs: int
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """The estimate of a whole training run.

    Attributes:
        images_per_second_per_host: images per second that the busiest host must read.
        input_cores: CPU cores that this reading takes.
        images_per_second_per_core: images per second that one core is assumed to read.
        host_cores: CPU cores of a host.
        hours: the hours of the run.
        chip_hours: the hours of the run, summed over all chips.
        paper_tpuv3_core_days: TPUv3-core-days of the paper's run of this model on these data for as many epochs; None
            if the paper has no such run.
        streamed_disk: number of hosts -> bytes of shards on the disk of each host, for the number of hosts of the plan
            and its halves down to 1. Empty if the images cannot be streamed.
    """

    images_per_second_per_host: float
    input_cores: float
    images_per_second_per_core: int
    host_cores: int
    hours: float
    chip_hours: float
    paper_tpuv3_core_days: int | None
    streamed_disk: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a step on a TPU, by the compiler's cycles and the published speed of the links.

    Attributes:
        cycles_per_image: cycles of compute that one chip takes for one of its images.
        compute_seconds: seconds of compute in a step.
        exchange_seconds: seconds of exchange in a step.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        model_flops: model FLOPs of a step on one chip.
        run: the whole run; None for a prediction.
        band: the band of the time of a step, compute and exchange together; None: not calibrated.
    """

    cycles_per_image: float
    compute_seconds: float
    exchange_seconds: float
    images_per_second_per_chip: float
    mfu: float
    model_flops: float
    run: RunEstimate | None
    band: RatioBand | None = None


@dataclasses.dataclass(frozen=True)
class ScheduleEstimate:
    """The estimate of a step on a TPU by the schedules of its operations and the exchange that they do not hide.

    Attributes:
        cycles_per_image: cycles that one chip takes for one of its images, without the exchange.
        seconds: seconds of a step, with the exchange that is not hidden.
        images_per_second_per_chip: the rate of processing.
        mfu: model FLOPs utilization, between 0 and 1.
        band: the band of `seconds`; None: not calibrated.
    """

    cycles_per_image: float
    seconds: float
    images_per_second_per_chip: float
    mfu: float
    band: RatioBand | None = None


@dataclasses.dataclass(frozen=True)
class Advice:
    """Among the changes with which a program fits, the one that costs the least speed.

    Attributes:
        change: the change to the configuration; empty if `plan` is None.
        plan: the plan with the change; None: no change that was tried makes the program fit.
    """

    change: ConfigChange
    plan: "Plan | None"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
        plan: the plan with that batch; None: no batch fits.
        refused_images_per_device: images per device of the smallest batch that does not fit or that the configuration
            does not allow, among those tried; None: every batch tried fits.
    """

    plan: "Plan | None"
    refused_images_per_device: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is known of a request.

    Attributes:
        compilation: what the compiler reported.
        estimate: the estimate by the compiler's cycles; None if the program does not fit or is not for a TPU.
        price: the price of the run; None if no price was given or there is no estimate of a run.
        advice: what the search for a change with which the program fits has found; None if the program fits, or if the
            largest batch was searched instead.
        largest: the largest batch that fits; None if it was not searched.
        command: the command that trains as planned; None if nothing that fits was found, or for a prediction.
        by_schedule: the estimate by schedules; None if it was not asked for or the program does not fit.
        goodput: the goodput to expect; None if there is no estimate of a run.
    """

    compilation: Compilation
    estimate: Estimate | None = None
    price: float | None = None
    advice: Advice | None = None
    largest: LargestBatch | None = None
    command: str | None = None
    by_schedule: ScheduleEstimate | None = None
    goodput: GoodputEstimate | None = None


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
