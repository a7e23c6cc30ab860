"""Builds the functions that run on the devices from a configuration: the one way for training, planning and tests."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, models, optim, sharding, tasks, tree
from vit_jax.config import check_config, resolve_config
from vit_jax.inference import Inference, make_inference
from vit_jax.machine import check_settings
from vit_jax.model import Model, create, parameter_shapes
from vit_jax.models import add_adapters
from vit_jax.optim import Adapters, LastBlocks, Multiplier, make_lr_multipliers, make_sharpness
from vit_jax.step import StepMetrics, TrainState, TrainStep
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree

# (model, a device of this host, devices over which heads are split) -> the model, or one without a wrong kernel
ModelCheck: TypeAlias = Callable[[Model, jax.Device, int], Model]


@dataclasses.dataclass(frozen=True)
class Program(Inference):
    """The jitted functions of a run, and the shapes and shardings of their arguments; nothing is allocated yet.

    Attributes, besides those of `Inference`:
        schedule: the learning rate of each step.
        state: shapes of the training state.
        state_shardings: shardings of the training state.
        batch: shapes of a global batch.
        eval_batch: shapes of a batch of an evaluation, with its `mask`.
        init: (key, given) -> state, created with its shardings; parameters in `given`, by name, replace random ones.
        train_step: (state, batch, parameters of the teacher) -> (state, metrics); the state is donated.
        final_step: (b, e) -> the same function with a learning rate that falls to 0 from step b to step e; it is a
            program of its own, compiled when it is first called.
        lr_multipliers: parameter name -> learning-rate multiplier; 0: frozen.
        teacher: the functions of a frozen model from which this one learns; None: there is none. Its parameters are
            then one more argument of `train_step`.
    """

    schedule: optax.Schedule
    state: TrainState
    state_shardings: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    eval_batch: dict[str, jax.ShapeDtypeStruct]
    init: Callable[[jax.Array, dict[str, Any]], TrainState]
    train_step: Callable[..., tuple[TrainState, StepMetrics]]
    final_step: Callable[[int, int], Callable[..., tuple[TrainState, StepMetrics]]]
    lr_multipliers: dict[str, Multiplier]
    teacher: Inference | None


def make_program(
    config: ConfigDict,
    mesh: Mesh,
    spec: data.DataSpec,
    check: ModelCheck | None = None,
    teacher: Model | None = None,
) -> Program:
    """Builds the program of a config whose durations are in steps, for data of the given shapes.

    If `check` is given, it may use the devices of the mesh. Otherwise these devices need not be on this machine.
    Without the `teacher` that the configuration names, all functions but `train_step` can be used.

    Raises:
        UserError: the model cannot be built, does not fit the data or its teacher, or cannot be split over the mesh; or
            the compiler rejects an option.
    """
    model, task = create_model(config, spec, auto_dtype(mesh.devices.flat[0]))
    model = for_mesh(model, config, mesh, check)
    taught = make_teacher(config, teacher, model, mesh, check) if teacher else None
    step = make_train_step(config, model, task, taught.model if taught else None)
    batch, eval_batch = (batch_shapes(spec, rows) for rows in (config.batch, data.eval_batch_size(config)))
    eval_batch["mask"] = jax.ShapeDtypeStruct(eval_batch["image"].shape[:1], jnp.float32)

    def init(key: jax.Array, given: dict[str, jax.Array]) -> TrainState:
        params = model.init(key, batch["image"])
        return step.init(add_adapters(params, config.adapt.rank, config.adapt.alpha, config.adapt.where, key), given)

    state = jax.eval_shape(init, jax.random.key(0), {})
    state_shardings = sharding.state_shardings(state, mesh)
    teacher_shardings = [taught.params_shardings] if taught else []
    inference = make_inference(model, mesh, state.params, task, config.compiler_options)

    def jit_step(step: TrainStep) -> Callable[..., tuple[TrainState, StepMetrics]]:
        def train_step(state: TrainState, batch: Batch, *teacher_params: ArrayTree) -> tuple[TrainState, StepMetrics]:
            with sharding.use_mesh(mesh):
                return step(state, batch, *teacher_params)

        return jit(
            train_step,
            in_shardings=(state_shardings, inference.batch_sharding, *teacher_shardings),
            out_shardings=(state_shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        )

    @functools.cache
    def final_step(begin: int, end: int) -> Callable[..., tuple[TrainState, StepMetrics]]:
        rate = optim.make_schedule(config, (begin, end))
        return jit_step(make_train_step(config, model, task, taught.model if taught else None, rate))

    trained = tree.flatten(jax.eval_shape(step.trained_part.select, state.params))
    multipliers = step.lr_multipliers.by_name(state.params)
    multipliers = {name: number if name in trained else 0.0 for name, number in multipliers.items()}
    jit = functools.partial(jax.jit, compiler_options=inference.compiler_options)
    return Program(
        **vars(inference),
        schedule=step.schedule,
        state=state,
        state_shardings=state_shardings,
        batch=batch,
        eval_batch=eval_batch,
        init=jit(init, out_shardings=state_shardings),
        train_step=jit_step(step),
        final_step=final_step,
        lr_multipliers=multipliers,
        teacher=taught,
    )


def make_teacher(
    config: ConfigDict, teacher: Model, student: Model, mesh: Mesh, check: ModelCheck | None = None
) -> Inference:
    """Returns the functions of a teacher, which computes in the dtype and by the forms of its student.

    Raises:
        UserError: the teacher does not classify images, or has another number of classes than the student; or it cannot
            be computed in this way, or cannot be split over the mesh.
    """
    name, classes, own = config.task.teacher, teacher.field("num_classes"), student.field("num_classes")
    if teacher.field("head") == "patches" or not classes or teacher.is_regression:
        raise UserError(f"task.teacher={name} does not classify images; choose weights with a classifier.")
    if classes != own:
        raise UserError(
            f"task.teacher={name} has {classes:,} classes, but the data have {own:,}; choose a teacher for the same "
            "classes."
        )
    if teacher.loss != config.task.loss:
        logging.getLogger(__name__).warning(
            "task.teacher was trained with the loss %s; its logits are compared by task.loss=%s",
            *(teacher.loss, config.task.loss),
        )
    fields = {"dtype": student.field("dtype")}
    if isinstance(teacher.spec, models.ModelSpec):
        fields |= {key: config.model[key] for key in ("attention", "mlp", "scan")}
    with errors_of(f"task.teacher={name}"):
        teacher = for_mesh(teacher.with_fields(**fields), config, mesh, check)
        return make_inference(teacher, mesh, parameter_shapes(teacher), compiler_options=config.compiler_options)


def make_train_step(
    config: ConfigDict,
    model: Model,
    task: tasks.Task,
    teacher: Model | None = None,
    rate: optim.LearningRate | None = None,
) -> TrainStep:
    """Returns the update that a config describes, with its schedule or another learning rate.

    Raises:
        UserError: `config.optim.lr_multipliers` cannot be parsed, or the model does not have the blocks that the
            configuration counts.
    """
    optim.check_blocks(config.optim, model)
    rate, multipliers = rate or optim.make_schedule(config), make_lr_multipliers(config)
    return TrainStep(
        model=model,
        task=task,
        optimizer=optim.make_optimizer(config, rate, multipliers),
        schedule=rate,
        seed=config.seed,
        accum_steps=config.accum_steps,
        ema_decay=config.optim.ema_decay,
        trained_part=Adapters() if config.adapt.rank else LastBlocks(config.optim.frozen_blocks),
        lr_multipliers=multipliers,
        sharpness=make_sharpness(config, rate.relative),
        teacher=teacher,
    )


def batch_shapes(spec: data.DataSpec, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of `rows` rows."""
    labels, dtype = ([spec.max_labels] if spec.max_labels else []), jnp.int32
    if spec.has_numbers:
        labels, dtype = [spec.num_classes], jnp.float32
    return {
        "image": jax.ShapeDtypeStruct((rows, *spec.image_shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((rows, *labels), dtype),
    }


def prepare(
    config: ConfigDict, check: ModelCheck | None = None, teacher: Model | None = None
) -> tuple[ConfigDict, data.DataInfo, Program]:
    """Returns the parts of a run. Nothing is written or compiled, except by `check`; see `make_program`.

    The parts are the configuration, completed from the data and with its durations in steps; what else is known from
    the data; and the program.

    Raises:
        UserError: the configuration or the data are wrong, or settings of jax.
    """
    check_settings()
    check_config(config)
    model_without_data(config)  # a wrong field of the model is refused before the data are opened
    mesh = sharding.make_mesh(config)
    config, info = data.complete_config(config)
    config = resolve_config(config)
    if info.class_counts is None and (fields := tasks.fields_that_count(config)):
        need = "needs" if len(fields) == 1 else "need"
        raise UserError(
            f"{' and '.join(fields)} {need} the number of images of each class, which {config.data.source} does not "
            f"state; pack it once with python -m vit_jax.pack SOURCE FOLDER --index-labels, and train on "
            "array_record:FOLDER."
        )
    classes = data.ClassFacts(info.class_names, info.class_counts)
    spec = dataclasses.replace(data.spec(config), classes=classes)
    program = make_program(config, mesh, spec, check, teacher)
    return config, info, describe_program(program, info.preprocess, info.class_names)


def describe_program(program: Program, preprocess: str | None, class_names: tuple[str, ...] | None) -> Program:
    """Returns a program whose model also states how its images are prepared, and what its outputs mean.

    Args:
        program: the program to copy.
        preprocess: the pipe of operations that prepares the images.
        class_names: the names of the classes of the data.
    """
    model = dataclasses.replace(program.model, preprocess=preprocess, **program.task.describe(class_names))
    teacher = program.teacher
    if teacher:  # whose classes are compared with those of the data
        teacher = dataclasses.replace(teacher, model=dataclasses.replace(teacher.model, class_names=class_names))
    return dataclasses.replace(program, model=model, teacher=teacher)


def program_without_data(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None, teacher: Model | None = None
) -> tuple[ConfigDict, Program]:
    """Returns the configuration with its durations in steps, and the program, without opening the data.

    Raises:
        UserError: the configuration is wrong, or it leaves open what is otherwise read from the data.
    """
    check_config(config)
    spec = data.spec(config)
    config = resolve_config(config)
    return config, make_program(config, sharding.make_mesh(config, devices), spec, teacher=teacher)


def make_inference_program(config: ConfigDict, fsdp: int, check: ModelCheck | None = None) -> Program:
    """Returns the program of a finished run for the devices here, with a batch of one image a device.

    Its predictions accept batches of any other size as well. `config` is changed by `fit_to_inference`.

    Raises:
        UserError: the parameters cannot be split over `fsdp` devices.
    """
    fit_to_inference(config, fsdp, 1, jax.devices())
    return make_program(config, sharding.make_mesh(config), data.spec(config), check)


def fit_to_inference(config: ConfigDict, fsdp: int, images: int, devices: Sequence[jax.Device]) -> None:
    """Overwrites what fitted a training to its own devices: the mesh, the batch, its parts, the compiler's options.

    Args:
        config: the configuration to change.
        fsdp: the number of devices to split the weights over.
        images: the number of images of a step on each device.
        devices: the devices.
    """
    with config.unlocked():  # the configurations of older runs lack some axes
        config.mesh.update(slice=sharding.count_slices(devices), data=-1, fsdp=fsdp, tensor=1)
    config.accum_steps, config.compiler_options, config.adapt.rank = 1, "", 0  # adapters are merged when read
    config.batch = config.batch_eval = images * len(devices)


def for_mesh(model: Model, config: ConfigDict, mesh: Mesh, check: ModelCheck | None) -> Model:
    """Returns the model with its fields that are `auto` chosen for the mesh's devices.

    `check` may replace the model after a trial on one of them.
    """
    [images] = sharding.batch_sharding(mesh).shard_shape((config.batch // config.accum_steps,))
    model = model.for_device(mesh.devices.flat[0].device_kind, images, mesh.shape["tensor"])
    return check(model, mesh.local_devices[0], mesh.shape["tensor"]) if check else model


def auto_dtype(device: jax.Device) -> str:
    """Returns the dtype of the activations on a kind of device if `config.model.dtype` is auto."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def create_model(config: ConfigDict, spec: data.DataSpec, dtype: str = "float32") -> tuple[Model, tasks.Task]:
    """Returns the model of `config.model` before anything is chosen for devices, with its task's head, and the task.

    Args:
        config: the configuration of a run.
        spec: the shapes of its data, whose preprocessed images may be square or not.
        dtype: the dtype of the activations if the configuration says `auto`.

    Raises:
        UserError: the model cannot be built, the task does not fit the model or the data, or the images do not have the
            size `config.resolution`.
    """
    fields = {key: value for key, value in config.model.items() if key != "name"}
    if fields["dtype"] == "auto":
        fields["dtype"] = dtype
    fields["grad_dtype"] = config.optim.grad_dtype
    resolution = spec.image_shape[:2]
    if config.resolution not in resolution:
        given = "x".join(map(str, resolution))
        raise UserError(
            f"data.preprocess produces images of {given} pixels, but resolution={config.resolution}; "
            "write {resolution} in data.preprocess in place of the size, or change both."
        )
    fields["resolution"] = resolution
    model = create(config.model.name, **fields)
    task = tasks.make_task(config, model, spec.num_classes, spec.max_labels, spec.classes)
    return model.with_fields(**task.head), task


def model_without_data(config: ConfigDict, dtype: str = "float32") -> Model:
    """Returns the model of a configuration that need not state how many classes and examples its data have.

    Args:
        config: the configuration.
        dtype: the dtype of the activations if the configuration says `auto`.

    Raises:
        UserError: the model or the preprocessing is wrong.
    """
    config = _with_any_data(config)
    return create_model(config, data.spec(config), dtype)[0]


def image_size_without_data(config: ConfigDict) -> tuple[int, int]:
    """Returns (height, width) in pixels of the preprocessed images of a configuration as for `model_without_data`.

    Raises:
        UserError: the preprocessing is wrong.
    """
    height, width, _ = data.spec(_with_any_data(config)).image_shape
    return height, width


def _with_any_data(config: ConfigDict) -> ConfigDict:
    config = config.copy_and_resolve_references()
    classes = config.data.num_classes or len(config.task.target_means or ()) or 2
    config.data.num_classes, config.data.num_examples = classes, config.data.num_examples or 1
    return config
