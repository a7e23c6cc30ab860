"""A model to evaluate: from a run, a checkpoint folder, a file or the catalogue, with the functions that use it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from ml_collections import ConfigDict

from vit_jax import UserError, checkpoint, data, interop, nearest_path, sharding, without_queries
from vit_jax.config import get_config, load_config
from vit_jax.inference import Inference, make_inference
from vit_jax.kernel_trials import check_kernels
from vit_jax.program import auto_dtype, describe_program, fit_to_inference, for_mesh, make_inference_program
from vit_jax.tree import ArrayTree

MOST_ACTIVATION_BYTES = 2**28  # bytes of a device's largest activation; a few of that size are in memory at once
PRODUCTS = ("dot_general", "conv_general_dilated")
DEFAULT_IMAGES = 128  # images per evaluation step and device for a model without a run


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on the devices of this machine.

    Attributes:
        config: the configuration of the model's run, with the mesh of these devices. Without a run, the default
            configuration without evaluations.
        program: the functions that use the model's weights.
        read: returns the weights as NumPy arrays.
        batch: the wanted number of images per evaluation step over all devices. It may not fit into memory.
        digest: returns `interop.digest_weights` of the weights.
        step: the step of the run's checkpoint, or None without a run.
    """

    config: ConfigDict
    program: Inference
    read: Callable[[], ArrayTree]
    batch: int
    digest: Callable[[], str]
    step: int | None = None


def is_run(path: str | Path) -> bool:
    """Returns whether a path is the folder of a run.

    It is not if it is a file of weights, a single checkpoint of a run, a folder of timm or transformers, or the name of
    weights to download.

    Raises:
        UserError: the path is remote and cannot be read, or there is no such file, folder or name.
    """
    name = without_queries(str(path)).removesuffix("?...")
    if name.endswith((".npz", ".safetensors", ".safetensors.index.json")) or interop.is_download_name(name):
        return False
    folder = checkpoint.local_workdir(path)
    if not folder.exists():
        near = nearest_path(folder)
        raise UserError(f"there is no folder {path}{f'; did you mean {str(near)!r}?' if near else '.'}")
    # Folders of timm and transformers have a config.json too, but no checkpoints.
    is_published = any(folder.glob("*.safetensors*")) and not (folder / "checkpoints").is_dir()
    return (folder / "config.json").is_file() and not is_published


def open_run(workdir: str | Path, best: bool, fsdp: int, source: str | None) -> LoadedModel:
    """Opens a run's newest or best checkpoint; of a run with `stop_after`, which exports its best, this one.

    Args:
        workdir: the run's folder, local or remote.
        best: opens the best checkpoint that was kept instead of the newest one.
        fsdp: the number of devices to split the weights over.
        source: the new `config.data.source`, if the data have moved; None: that of the run.

    Raises:
        UserError: there is no such checkpoint yet, or the weights cannot be split over `fsdp` devices.
    """
    path = checkpoint.local_workdir(workdir, best)
    folder = checkpoint.find_checkpoint(path, best)
    if folder is None:
        raise UserError(f"{workdir} contains no checkpoint{' with a metric' if best else ''} yet.")
    config = load_config(path / "config.json")
    if config.stop_after is not None and not best:
        path = checkpoint.local_workdir(workdir, best=True)
        folder = checkpoint.find_checkpoint(path, best=True) or folder  # before the first evaluation, the newest
    config.data.source = source or config.data.source
    wanted = data.eval_batch_size(config)
    program = make_inference_program(config, fsdp, check_kernels)
    names = checkpoint.manifest_of(folder)["model"]["class_names"]
    program = describe_program(program, None, tuple(names) if names else None)
    digest = functools.partial(interop.digest_weights, folder)
    return LoadedModel(config, program, lambda: checkpoint.read_weights(folder)[0], wanted, digest, int(folder.name))


def open_weights(
    path: str | Path,
    fsdp: int,
    source: str | None,
    resolution: int | tuple[int, ...] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> LoadedModel:
    """Opens weights of any form that `vit_jax.load` reads.

    Args:
        path: the path of the weights, or their name in the catalogue.
        fsdp: the number of devices to split the weights over.
        source: the data source of evaluations that name none.
        resolution: the size of the images, as for `vit_jax.load`.
        devices: the devices that compute; None: those of all processes.

    Raises:
        UserError: the weights cannot be read, or cannot be split over `fsdp` devices.
    """
    devices = devices or jax.devices()
    model, params = interop.load(path, dtype=auto_dtype(devices[0]), resolution=resolution)
    config, height = get_config(), model.image_size[0]
    fit_to_inference(config, fsdp, DEFAULT_IMAGES, devices)
    mesh = sharding.make_mesh(config, devices)
    with config.unlocked():
        config.resolution, config.data.num_classes = height, model.field("num_classes") or None
        config.data.source, config.evals = source or "", ConfigDict()
    model = for_mesh(model, config, mesh, check_kernels)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    digest = functools.partial(interop.digest_weights, path)
    return LoadedModel(config, make_inference(model, mesh, shapes), lambda: params, config.batch_eval, digest)


def choose_batch(program: Inference) -> int:
    """Returns how many images over all devices of the program a step may have, at least one image a device.

    The largest activation of the step takes at most `MOST_ACTIVATION_BYTES` on each device.
    """
    image = jax.ShapeDtypeStruct((1, *program.model.image_size, 3), jnp.float32)
    traced = jax.make_jaxpr(lambda params, image: program.model.apply(params, image)[0])(program.params, image)
    return program.mesh.size * max(
        1, MOST_ACTIVATION_BYTES // max(image.size * image.dtype.itemsize, largest_product(traced.jaxpr))
    )


def largest_product(jaxpr: Jaxpr) -> int:
    """Returns the bytes of the largest result of a matrix product or convolution in a function's trace, 0 for none."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += map(largest_product, jaxprs_in_params(equation.params))
        if equation.primitive.name in PRODUCTS:
            sizes += [out.aval.size * out.aval.dtype.itemsize for out in equation.outvars]
    return max(sizes)


def rounded(batch: int) -> int:
    """Returns a number of images, rounded up to a multiple of the number of devices of all processes."""
    devices = jax.device_count()
    return -(-batch // devices) * devices
