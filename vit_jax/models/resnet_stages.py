"""The stages of a ResNet, in a hybrid or a BiT: how many units they may have, and how far they reduce images."""

from vit_jax import refuse

MAX_STAGES, MAX_UNITS = 8, 100  # the ResNet of 200 layers has 4 and 66


def check_stages(stages: tuple[int, ...], width: int, keyword: str) -> None:
    """Checks the units in each stage of a ResNet and the channels of its root, a field named `keyword`.

    Raises:
        UserError: there are too many stages or units, a stage has no unit, or 32 groups do not divide the channels.
    """
    refuse(
        (
            len(stages) > MAX_STAGES or sum(stages) > MAX_UNITS,
            f"a ResNet has at most {MAX_STAGES} stages and {MAX_UNITS} units in all.",
        ),
        (min(stages, default=1) < 1, f"each of the stages must have at least 1 unit, not {stages}."),
        (width < 1 or width % 32, f"{keyword} must be a multiple of 32, the groups of GroupNorm, not {width}."),
    )


def resnet_stride(stages: tuple[int, ...]) -> int:
    """Returns the pixels, on a side, under one position of the feature map of a ResNet with these stages."""
    return 4 * 2 ** max(0, len(stages) - 1)
