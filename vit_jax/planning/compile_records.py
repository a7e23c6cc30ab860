"""The records that planning passes on: what is asked for, and what a compiler reports.

Bytes, FLOPs and exchanges are those of one device.
"""

import dataclasses
from collections.abc import Iterable

ConfigChange = dict[str, str]  # config field -> new value


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
