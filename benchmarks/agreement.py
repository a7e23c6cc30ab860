"""Checks that timm and transformers load what we write, and that we load what they write, with equal logits.

Example:
  python -m benchmarks.agreement --python=../torch/bin/python

`--python` is the Python of an environment with torch (its CPU build suffices), timm, transformers and numpy. Our
environment needs none of them. All weights are random. ViTs have the widths of their names and 3 blocks; images have 64
pixels a side, or 56 for patches of 14. Further small models vary every field on which a file depends, see
`agreement_cases.py`. For each of them `save` must either refuse the model with a UserError, or write a folder that the
other library loads (all arrays and no others) and that we read back. Prints the largest difference of the logits,
relative to the largest logit. Ends with 1 if a difference is above 5e-5, or above 1e-4 for models with a ResNet, whose
convolutions are standardised.
"""

import argparse
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import vit_jax
from benchmarks.agreement_cases import BASES, UNSTORED, VALUES, covering_rows
from vit_jax.models.flat_keywords import flatten_spec

THEIRS = Path(__file__).with_name("agreement_torch.py")
LATER = {"position_rows": "patches", "activation": "gelu", "layer_scale": 1e-5, "num_classes": 11}
DINOV2 = LATER | {"resolution": 56, "class_token": "auto"}
SIGLIP = {"pooling": "map", "num_classes": 0}
# Name of the case -> (model, layout, fields). The name is only printed.
CASES = {
    "timm B/16": ("ViT-B/16", "timm", {"activation": "gelu"}),
    "timm B/16 with the tanh form of GELU": ("ViT-B/16", "timm", {}),
    "timm Ti/16": ("ViT-Ti/16", "timm", {"activation": "gelu", "depth": 12}),
    "timm B/16 GAP": ("ViT-B/16", "timm", {"activation": "gelu", "pooling": "gap", "final_norm": "pooled"}),
    "timm R50+B/16": ("R50+ViT-B/16", "timm", {"activation": "gelu", "stem_epsilons": "timm"}),
    "timm BiT-R50x1": ("BiT-R50x1", "timm", {}),
    "timm DeiT-III B/16": ("ViT-B/16", "timm", LATER),
    "timm DINOv2 B/14 with registers": ("ViT-B/14", "timm", DINOV2 | {"registers": 4}),
    "timm SigLIP B/16": ("ViT-B/16", "timm", SIGLIP),
    "huggingface ViT-B/16": ("ViT-B/16", "huggingface", {"activation": "gelu", "norm_epsilon": 1e-12}),
    "huggingface DINOv2 B/14": (
        "ViT-B/14",
        "huggingface",
        DINOV2 | {"position_rows": "all", "pooling": "token_gap"},
    ),
    "huggingface DINOv2 B/14 with registers": (
        "ViT-B/14",
        "huggingface",
        DINOV2 | {"position_rows": "class", "pooling": "token_gap", "registers": 4},
    ),
    "huggingface SigLIP B/16": ("ViT-B/16", "huggingface", SIGLIP),
}


def limit(model):
    """Returns the largest relative difference of the logits that rounding explains."""
    return 1e-4 if flatten_spec(model.spec).get("stages") else 5e-5


def write_cases(folder, only):
    """Writes the cases whose names contain `only`, and returns a line for each one that fails."""
    failed = []
    for name in [name for name in CASES if only in name]:
        model_name, layout, fields = CASES[name]
        small = {"resolution": 64, "num_classes": 11} | ({"depth": 3} if "ViT" in model_name else {})
        failed += write_case(folder / name.replace("/", "_"), vit_jax.create(model_name, **(small | fields)), layout)
    return failed


def write_covering_cases(folder, only):
    """Writes models with every pair of field values that a layout can store, and prints what `save` refuses.

    Args:
        folder: the folder to write to.
        only: the bases whose names contain this are used.

    Returns:
        A line for each model that fails.
    """
    failed, refused = [], {}
    for base in [base for base in BASES if only in base]:
        layout, model_name, fields = BASES[base]
        known = flatten_spec(vit_jax.create(model_name, **fields).spec)
        if forgotten := known.keys() - VALUES.keys() - UNSTORED:
            raise SystemExit(f"agreement_cases.py has no values of {', '.join(sorted(forgotten))}")
        refuses = functools.partial(is_refused, folder / "trial", base, refused)
        values = {name: [one for one in VALUES[name] if one != known[name]] for name in VALUES if name in known}
        unpaired = {"stages"} if "depth" in known else set(known)  # pairs would make too many ResNets, which are large
        rows = list(covering_rows(values, unpaired, refuses))
        for index, row in enumerate(rows):
            failed += write_case(folder / f"{base} #{index}", vit_jax.create(model_name, **fields | row), layout, row)
        print(f"{base}: {len(rows)} models written", flush=True)
    shutil.rmtree(folder / "trial", ignore_errors=True)
    print(f"refused in {len(refused)} sentences, with an example of each:")
    for sentence, example in sorted(refused.items()):
        print(f"  {sentence} [{example}]", flush=True)
    return failed


def is_refused(path, base, refused, row):
    """Returns whether there is no model with the fields of a row, or `save` refuses it.

    Args:
        path: the folder to save to.
        base: the name of the base, a key of `BASES`.
        refused: message of `save` -> example; a new message is added in place.
        row: the fields that differ from the base.
    """
    layout, model_name, fields = BASES[base]
    try:
        model = vit_jax.create(model_name, **fields | row)
    except vit_jax.UserError:
        return True
    try:
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes_of(model))
        vit_jax.save(path, model, params, layout=layout)
    except vit_jax.UserError as error:
        refused.setdefault(str(error), f"{base}, {row}")
        return True
    return False


def write_case(path, model, layout, row=None):
    """Writes a model with random weights, and its logits, to a folder and reads the model back.

    Returns:
        A list with a line on what differs in the model that was read; empty if nothing does.
    """
    rng = np.random.default_rng(0)
    height, width = model.image_size
    images = rng.uniform(-1, 1, (2, height, width, 3)).astype(np.float32)
    deviation = 1.4 / model.field("width") ** 0.5

    def draw(path, leaf):
        scale = path[-1].key == "scale" or path[-1].key.startswith("layer_scale")
        return rng.normal(scale, deviation, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes_of(model))
    vit_jax.save(path, model, params, layout=layout)
    logits = apply(model, params, images)
    np.savez(path / "io.npz", images=images, logits=logits, row=str(row or ""), limit=limit(model))
    try:
        again, back = vit_jax.load(path)
    except vit_jax.UserError as error:
        return [f"{path.name}, {row}: {error}"]
    if again.image_size != model.image_size:
        return [f"{path.name}, {row}: read back, its images are {again.image_size}, not {model.image_size}"]
    if again.spec == model.spec and jax.tree.all(jax.tree.map(np.array_equal, back, params)):
        return []
    difference = abs(apply(again, back, images) - logits).max() / abs(logits).max()
    return [] if difference <= limit(model) else [f"{path.name}, {row}: read back, {difference:.1e}"]


@functools.cache
def shapes_of(model):
    """Returns the shapes and dtypes of a model's parameters."""
    image = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), image)


def apply(model, params, images):
    """Returns a model's logits."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model.apply)(params, images)[0])


def read_cases(folder):
    """Reads the models that the other libraries wrote, and prints how far our logits are from theirs.

    Returns:
        A line for each model whose logits differ too much.
    """
    failed = []
    for path in sorted(folder.iterdir()):
        io = np.load(path / "io.npz")
        model, params = vit_jax.load(path, resolution="native")  # not that of the preprocessing that it states
        difference = abs(apply(model, params, io["images"]) - io["logits"]).max() / abs(io["logits"]).max()
        line = f"{path.name}, read by us: {difference:.1e}"
        print(line, flush=True)
        failed += [] if difference <= limit(model) else [line]
    return failed


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment with torch, timm and transformers")
    parser.add_argument("--only", default="", help="of the models that we write, those whose name contains this")
    args = parser.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        ours.mkdir()
        theirs.mkdir()
        failed = write_cases(ours, args.only) + write_covering_cases(ours, args.only)
        code = subprocess.run([args.python, THEIRS, ours, theirs]).returncode
        failed += read_cases(theirs)
    if code or failed:
        sys.exit("\n".join(["failed:", *failed, *(["their libraries, above"] if code else [])]))


if __name__ == "__main__":
    main(sys.argv)
