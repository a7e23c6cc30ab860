"""From a configuration to what runs on the devices: the one constructor that training, planning and tests share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, data, models, optim, sharding, tasks, tree
from vit_jax.config import check_config, resolve_config
from vit_jax.step import Batch, Metrics, TrainState, TrainStep


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of a run and the shapes and placements of what they take; nothing is allocated yet.

    Attributes:
        mesh: the devices.
        model: the network, bound to the mesh's platform.
        task: the objective.
        schedule: the learning rate of each step.
        state: shapes of the training state.
        state_shardings: placement of the training state.
        batch: shapes of a global batch.
        eval_batch: shapes of a batch of an evaluation, with its `mask`.
        batch_sharding: placement of a batch's leading dimension.
        init: (key, given) -> state, made in place; `given` are parameters by name to use instead of random ones.
        train_step: (state, batch) -> (state, metrics); consumes the state.
        predict: (params, images) -> logits.
        eval_step: (params, batch of an evaluation) -> sums over its rows; see `tasks.Classify.sums`.
        factors: of the learning rate, by parameter; 0: frozen.
    """

    mesh: Mesh
    model: models.Model
    task: tasks.Classify
    schedule: optax.Schedule
    state: TrainState
    state_shardings: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    eval_batch: dict[str, jax.ShapeDtypeStruct]
    batch_sharding: NamedSharding
    init: Callable[[jax.Array, dict[str, Any]], TrainState]
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    predict: Callable[[Any, jax.Array], jax.Array]
    eval_step: Callable[[Any, Batch], Metrics]
    factors: dict[str, float]


def make_program(config: ConfigDict, mesh: Mesh, spec: data.DataSpec) -> Program:
    """Builds the program of a config whose durations are resolved, for data of the given shapes.

    Raises:
        UserError: the model cannot be built, cannot take such images or cannot be cut as the mesh says.
    """
    model = make_model(config, mesh, spec)
    sharding.check_divides(mesh, {"heads": model.field("num_heads"), "mlp": model.field("mlp_dim")})
    task = tasks.make(config, spec.num_classes)
    rates = optim.lr_multipliers(config)

    def trained(params: Any) -> Any:
        return tree.map_named(
            lambda name, x: x if optim.lr_multiplier(rates, name) else jax.lax.stop_gradient(x), params
        )

    update = TrainStep(
        model=model,
        task=task,
        optimizer=optim.make(config),
        schedule=optim.make_schedule(config),
        seed=config.seed,
        accum_steps=config.accum_steps,
        ema_decay=config.optim.ema_decay,
        trained=trained,
    )
    batch, eval_batch = (batch_shapes(spec, rows) for rows in (config.batch, data.eval_batch_size(config)))
    eval_batch["mask"] = jax.ShapeDtypeStruct(eval_batch["image"].shape[:1], jnp.float32)
    if spec.max_labels and task.loss != "sigmoid":
        raise UserError("images with several labels need --config.task.loss=sigmoid")

    def init(key: jax.Array, given: dict[str, jax.Array]) -> TrainState:
        return update.start(tree.unflatten(tree.flatten(model.init(key, batch["image"])) | given))

    state = jax.eval_shape(init, jax.random.key(0), {})
    optim.check_lr_multipliers(rates, tree.flatten(state.params))
    state_shardings = sharding.state_shardings(state, mesh)
    batch_sharding = sharding.batch_sharding(mesh)
    replicated = NamedSharding(mesh, P())

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with sharding.use(mesh):
            return update(state, batch)

    def predict(params: Any, images: jax.Array) -> jax.Array:
        with sharding.use(mesh):
            return model.apply(params, images)[0]

    params_shardings = state_shardings.params
    predict = jax.jit(predict, in_shardings=(params_shardings, batch_sharding), out_shardings=batch_sharding)

    def eval_step(params: Any, batch: Batch) -> Metrics:
        return task.sums(predict(params, batch["image"]), batch["label"], batch["mask"])

    return Program(
        mesh=mesh,
        model=model,
        task=task,
        schedule=update.schedule,
        state=state,
        state_shardings=state_shardings,
        batch=batch,
        eval_batch=eval_batch,
        batch_sharding=batch_sharding,
        init=jax.jit(init, out_shardings=state_shardings),
        train_step=jax.jit(
            train_step,
            in_shardings=(state_shardings, batch_sharding),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
        ),
        predict=predict,
        eval_step=jax.jit(eval_step, in_shardings=(params_shardings, batch_sharding), out_shardings=replicated),
        factors={name: optim.lr_multiplier(rates, name) for name in tree.flatten(state.params)},
    )


def batch_shapes(spec: data.DataSpec, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns those of a batch of so many rows."""
    labels = [spec.max_labels] if spec.max_labels else []
    return {
        "image": jax.ShapeDtypeStruct((rows, *spec.image_shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((rows, *labels), jnp.int32),
    }


def prepare(config: ConfigDict) -> tuple[ConfigDict, data.DataInfo, Program]:
    """Returns what a run is made of: the configuration, completed from the data and with its durations in steps, what
    else the data tells, and the program. Nothing is written or compiled.

    Raises:
        UserError: something in the configuration or the data is wrong.
    """
    check_config(config)
    mesh = sharding.make_mesh(config)
    config, info = data.complete_config(config)
    config = resolve_config(config)
    return config, info, make_program(config, mesh, data.spec(config))


def program_without_data(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> tuple[ConfigDict, Program]:
    """Returns the configuration with its durations in steps, and the program, for data that need not be here: the
    configuration says what else they would tell.

    Raises:
        UserError: something in the configuration is wrong, or it leaves something to the data.
    """
    check_config(config)
    spec = data.spec(config)
    config = resolve_config(config)
    return config, make_program(config, sharding.make_mesh(config, devices), spec)


def refit(config: ConfigDict, fsdp: int) -> Program:
    """Returns the program of a finished run on the devices here, with the least batch: predictions take any. The
    configuration keeps nothing of what fitted training to the run's own devices.

    Raises:
        UserError: the weights cannot be split over `fsdp` devices.
    """
    with config.unlocked():  # older runs do not know of every axis
        config.mesh.update(slice=sharding.count_slices(jax.devices()), data=-1, fsdp=fsdp, tensor=1)
    config.accum_steps = 1
    config.batch = config.batch_eval = jax.device_count()
    return make_program(config, sharding.make_mesh(config), data.spec(config))


def make_model(config: ConfigDict, mesh: Mesh, spec: data.DataSpec) -> models.Model:
    """Returns the model of `config.model` for images of the shape that preprocessing gives them, square or not, with
    what `auto` leaves open chosen by the mesh's devices.
    """
    platform = mesh.devices.flat[0].platform
    fields = {key: value for key, value in config.model.items() if key != "name"}
    if fields["dtype"] == "auto":
        fields["dtype"] = "float32" if platform == "cpu" else "bfloat16"
    if fields["attention"] == "auto":
        fields["attention"] = "heads_first" if platform == "cpu" else "tokens_first"
    resolution = spec.image_shape[:2]
    if config.resolution not in resolution:
        given = "x".join(map(str, resolution))
        raise UserError(
            f"data.preprocess gives images of {given} pixels, but resolution={config.resolution}; "
            "write {resolution} where it states the size, or set both."
        )
    return models.create(config.model.name, num_classes=spec.num_classes, resolution=resolution, **fields)
