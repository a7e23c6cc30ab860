"""Pre-trained weights made to fit another task and resolution, as the paper does before fine-tuning (section 3.2)."""

from typing import Any

from vit_jax import UserError, models, tree

# The whole pre-training head goes; the new one starts at zero.
REPLACED = ("head/", "pre_logits/")

# What must be the same for the rest to carry over.
MUST_AGREE = (
    "patch_size",
    "stem",
    "stages",
    "stem_width",
    "width",
    "depth",
    "mlp_dim",
    "num_heads",
    "pooling",
    "position",
)


def adapt(source: models.Model, params: dict[str, Any], target: models.Model, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns, by name, what `target` takes over from `source`: all but the head, with the position embeddings
    resampled to the target's grid of patches (linear, corners aligned, the class token's row untouched).

    Args:
        source: the model that the parameters are of.
        params: its parameters.
        target: the model to start.
        wanted: shapes of the parameters of `target`.

    Raises:
        UserError: the models differ in more than head and resolution; names every array concerned.
    """
    had, want = ({key: model.field(key) for key in MUST_AGREE} for model in (source, target))
    if had != want:
        differ = [f"{key} {had[key]}, not {want[key]}" for key in MUST_AGREE if had[key] != want[key]]
        raise UserError(f"it holds a model with {', '.join(differ)}; give this run the same --config.model fields.")
    leaves = {name: leaf for name, leaf in tree.flatten(params).items() if not name.startswith(REPLACED)}
    old, new = source.spec, target.spec
    if "position" in leaves and old.grid != new.grid:
        leaves["position"] = models.resample(leaves["position"], old.grid, new.grid, old.class_rows)
    rest = {name: leaf for name, leaf in tree.flatten(wanted).items() if not name.startswith(REPLACED)}
    if wrong := tree.differences(leaves, rest):
        raise UserError(f"it cannot start a {target.name}: {'; '.join(wrong)}.")
    return leaves
