"""The records that planning passes on: what is asked for, and what a compiler reports.

Bytes, FLOPs and exchanges are those of one device.
"""

import dataclasses
from collections.abc import Iterable

ConfigChange = dict[str, str]  # config field -> value


def config_flags(change: ConfigChange) -> list[str]:
    """Returns a change as flags of `vit_jax.main`."""
    return [f"--config.{key}={value}" for key, value in change.items()]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be compiled.

    Attributes:
        words: flags of `vit_jax.main`.
        target: a TPU slice, `v5e:2x4`; or `cpu` or `gpu`, the devices of this machine.
        inference: a prediction instead of a step of training.
        emulated_devices: the number of devices that `cpu` stands for.
        schedule: read the schedules of all operations, which the compiler then writes; not for `cpu` and `gpu`.
    """

    words: tuple[str, ...]
    target: str
    inference: bool = False
    emulated_devices: int = 1
    schedule: bool = False

    @property
    def emulation_flag(self) -> str:
        """The flag of XLA_FLAGS with which the CPU stands for several devices."""
        return f"--xla_force_host_platform_device_count={self.emulated_devices}"

    def with_change(self, change: ConfigChange) -> "Request":
        """Returns the request with other values of some config fields."""
        return dataclasses.replace(self, words=(*self.words, *config_flags(change)))


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is known of a request before anything is compiled.

    Attributes:
        target: see `Request`.
        inference: see `Request`.
        memory_bytes: what a device has for a program.
        model: name of the model.
        mesh: axis -> devices along it.
        devices: in all.
        device_kind: jax's name of the devices.
        batch: images of a step, over all devices.
        images_per_device: images of a step; devices that share their images count each of them.
        images_per_host: images of a step that the busiest host reads.
        waiting_bytes: batches read ahead, which lie on a device beside what a step needs.
        source: `data.source`.
        data_dir: `data.data_dir`.
        fast: `data.fast`.
        resolution: pixels along each side of an image.
        accum_steps: parts in which a batch is computed.
        remat: which activations are computed again in the backward pass.
        remat_choices: what the model accepts in its place.
        dtype: of the activations.
        steps: of the run.
        save_steps: between two saves; `save_minutes` may save before.
        save_minutes: between two saves; 0: by steps only.
        epochs: of the run.
        num_examples: images of the training split.
        parameters: their number, over all devices.
        parameter_bytes: of the parameters.
        state_bytes: of the training state: parameters, optimizer, average.
        macs_per_image: multiply-accumulates of an image's forward pass.
        readers: of the images, if they are streamed; 0: they cannot be.
        window: shards that each of them shuffles at a time.
        teacher_bytes: of the parameters of a teacher; 0: there is none.
        teacher_macs: multiply-accumulates of its forward pass of an image.
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
    teacher_bytes: int = 0
    teacher_macs: int = 0

    @property
    def resident_bytes(self) -> int:
        """The bytes that a program is given and that do not depend on the batch."""
        return self.parameter_bytes if self.inference else self.state_bytes + self.teacher_bytes

    @property
    def mesh_axes(self) -> str:
        """The mesh axes that are longer than 1, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "one device"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All collectives of one kind in a program.

    Attributes:
        count: how many are executed.
        bytes: of the whole arrays, as one device sees them.
        link_bytes: carried by the busiest link between chips, one collective after the other.
    """

    count: int
    bytes: int
    link_bytes: float


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """What a program costs a device by the schedules of its operations, which wait for nothing; times are in cycles.

    Attributes:
        kinds: `matmul`, `kernel`, `reduction`, `layout`, `elementwise` or `other` -> cycles of these operations.
        exchange_exposed: during which a device only waits for collectives, at the full speed of the busiest link.
        exchange_hidden: of collectives, while operations run.
        copies_exposed: during which a device only waits for copies that run beside its operations.
        copies_hidden: of such copies, while operations run.
        hbm_bytes: that the operations move from and to HBM.
        open_loops: the number of operations with a loop whose turns depend on data, which count as one turn, or as the
            compiler's estimate of the operation if that is more.
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
        """The cycles of the operations, without what they wait for."""
        return sum(self.kinds.values())


@dataclasses.dataclass(frozen=True)
class Executable:
    """What a compiled program contains.

    Attributes:
        temp_bytes: of intermediate results.
        code_bytes: of the program itself.
        peak_bytes: the most memory that the program needs at once, its arguments included.
        compiler_flops: the compiler's count, which takes one turn of a loop; None: there is none, or there are loops.
        collectives: kind -> exchanges of that kind.
        cycles: the compiler's estimate for a TPU, of all but Pallas kernels; None: there is none.
        kernels: the number of Pallas kernels executed.
        kernel_cycles: of all kernels, by their schedules; None: unknown, or there are none.
        schedule: of the whole program; None: it was not asked for.
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
    """What the compiler reported of the train step, or of the prediction.

    Attributes:
        executable: None: the compiler refused the program for its size.
        needed_bytes: more than a device has; None: the program fits.
        flops: of its matrix products, counted from its trace.
        compile_seconds: that the compiler took.
        versions: package -> version that compiled it; None: not installed.
        remembered: it was compiled earlier.
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
    """What the compiler reported of the evaluation step, with what training keeps in memory beside it.

    Attributes:
        batch: images of a step, over all devices.
        images_per_device: images of a step.
        peak_bytes: the most memory that is needed at once; None: the compiler refused the program for its size.
        needed_bytes: more than a device has; None: the program fits.
        compile_seconds: that the compiler took.
        remembered: it was compiled earlier.
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
