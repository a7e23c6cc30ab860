"""AutoAugment: the policy that was found for ImageNet (Cubuk et al., arXiv 1805.09501)."""

from vit_jax.data.augment import RANDAUGMENT, RGB, Generator, random_sign, translate_y

# Sub-policies of (operation, probability, magnitude) from the authors' code (tensorflow/tpu,
# models/official/efficientnet/autoaugment.py, policy_v0). big_vision and DALI have the same. Operations with
# probability 0 are left out; Equalize, AutoContrast and Invert have no magnitude.
POLICY: tuple[tuple[tuple[str, float, int], ...], ...] = (
    (("Equalize", 0.8, 0), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 0)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 0)),
    (("Equalize", 0.4, 0), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 0)),
    (("Invert", 0.4, 0), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 0), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 0)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("Solarize", 0.8, 4),),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 0),),
    (("Equalize", 1.0, 0), ("AutoContrast", 0.6, 0)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 0)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)
# Translations reach farther than RandAugment's.
OPERATIONS = RANDAUGMENT | {"TranslateY": (translate_y, lambda part, rng: (random_sign(part * 250, rng),))}


def autoaugment(image: RGB, rng: Generator) -> RGB:
    """Applies one of `POLICY`'s 25 sub-policies, picked uniformly; its operations are applied with their probabilities.

    Args:
        image: the image at its final resolution, since translations are in pixels.
        rng: the only source of randomness.
    """
    for name, probability, magnitude in POLICY[rng.integers(len(POLICY))]:
        if rng.random() < probability:
            function, arguments = OPERATIONS[name]
            image = function(image, *arguments(magnitude / 10, rng))
    return image
