"""Words instead of classes: vectors of texts, with which the features of an image are compared (zero-shot).

The user brings the vectors, from the text encoder that was trained with the image encoder. With a softmax over the
texts it is CLIP's evaluation (Radford et al., arXiv 2103.00020, section 3.1); with a bias and the sigmoid of each text,
SigLIP's (Zhai et al., arXiv 2303.15343).
"""

import dataclasses
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int, Int64
from ml_collections import ConfigDict
from numpy.typing import ArrayLike

from vit_jax import NPZ_ERRORS, UserError, choose, errors_of, printable, refuse, user_errors
from vit_jax.data.sources import Source, compose
from vit_jax.evals.class_maps import without_numbers
from vit_jax.evals.labelled_features import normalise
from vit_jax.evals.logit_metrics import Predictions, score_mapped
from vit_jax.model import Model
from vit_jax.storage import filesystem

# A factor outside is none that a model has learnt: CLIP's is at most 100, and the logarithms of all are below 6.
SCALES = (6.0, 1000.0)
ARRAYS = ("names", "vectors", "logit_scale", "logit_bias")  # of a file; the last may be absent
ROWS = 4096  # images whose logits are computed at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """The names of classes, with the vectors of their texts.

    Attributes:
        names: the names.
        vectors: a vector for each name, of length 1.
        scale: the factor of the cosines of features and vectors.
        bias: what is added to their product; None: nothing.
    """

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    vectors: Float[Array | np.ndarray, "texts width"]
    scale: float | Array
    bias: float | Array | None = None

    @property
    def loss(self) -> str:
        """What turns logits into probabilities: sigmoid if there is a bias, as in SigLIP, else softmax."""
        return "softmax" if self.bias is None else "sigmoid"

    def logits(self, features: Float[Array | np.ndarray, "n width"]) -> Float[Array, "n texts"]:
        """Returns scale * cosine + bias of the features of each image (`pre_logits`) and each text."""
        cosines = jnp.matmul(normalise(jnp.asarray(features)), jnp.asarray(self.vectors).T, precision="highest")
        return self.scale * cosines + (0.0 if self.bias is None else self.bias)

    def check_width(self, model: Model) -> None:
        """Raises UserError if the features of a model have another width than the vectors."""
        width, wanted = self.vectors.shape[1], model.spec.feature_width
        if width != wanted:
            raise UserError(
                f"the vectors of the texts have {width:,} channels, but the features of the model have {wanted:,}; use "
                "the text encoder that was trained with this image encoder and, of a CLIP, the image encoder with its "
                "projection."
            )


def make_texts(
    names: ArrayLike, vectors: ArrayLike, logit_scale: ArrayLike, logit_bias: ArrayLike | None = None
) -> Texts:
    """Returns texts from arrays, or what NumPy makes arrays of.

    Args:
        names: a name for each class, all different.
        vectors: floating-point numbers [classes, width] of any length, or [classes, templates, width]: then those of
            several sentences for each class, whose vectors of length 1 are averaged (arXiv 2103.00020, section 3.1.4).
        logit_scale: the factor of the cosines, not its logarithm, which is what models learn.
        logit_bias: what is added to their product; None: nothing, and probabilities are a softmax.

    Raises:
        UserError: an array has another form, a number is not finite, two names are equal, a vector is zero, or the
            factor is one that no model learns.
    """
    named, given = np.asarray(names), np.asarray(vectors)
    refuse(
        (
            named.ndim != 1 or named.dtype.kind != "U" or not len(named),
            f"names must be a list of strings, one for each class, not {named.dtype} {list(named.shape)}.",
        ),
        (
            given.ndim not in (2, 3) or given.dtype.kind != "f" or not given.size or len(given) != len(named),
            f"vectors must be floating-point numbers [{len(named)}, width] or [{len(named)}, templates, width], not "
            f"{given.dtype} {list(given.shape)}.",
        ),
    )
    words = tuple(map(str, named))
    composed = [compose(word) for word in words]
    if len({*composed}) < len(composed):
        repeated = next(word for word in composed if composed.count(word) > 1)
        raise UserError(f"{printable(repeated, 50)!r} is the name of several texts; give each class one name.")
    scale, bias = _number("logit_scale", logit_scale), None if logit_bias is None else _number("logit_bias", logit_bias)
    if not SCALES[0] <= scale <= SCALES[1]:
        raise UserError(
            f"logit_scale is {scale:g}, but the factors of cosines that models learn lie between {SCALES[0]:g} and "
            f"{SCALES[1]:g}; what a model stores is the logarithm, so write its exponential."
        )
    with np.errstate(over="ignore"):
        known = given.astype(np.float32).astype(np.float64)  # in which no square of a float32 overflows
    bad = ~np.isfinite(known).reshape(len(known), -1).all(axis=1)
    if bad.any():
        raise UserError(f"the vectors of {printable(words[bad.argmax()], 50)!r} are not finite; compute them anew.")
    known = _unit_vectors(words, known)
    if known.ndim == 3:
        known = _unit_vectors(words, known.mean(axis=1))
    return Texts(words, known.astype(np.float32), scale, bias)


def _unit_vectors(
    names: Sequence[str], vectors: Float64[np.ndarray, "names *sentences width"]
) -> Float64[np.ndarray, "names *sentences width"]:
    """Returns vectors divided by their length; raises UserError if one is zero, with the name to which it belongs."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not lengths.all():
        first = names[int((lengths == 0).reshape(len(names), -1).any(axis=1).argmax())]
        raise UserError(f"a vector of {printable(first, 50)!r} is zero, so it has no direction; compute it anew.")
    return vectors / lengths


def _number(name: str, value: ArrayLike) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise UserError(f"{name} must be one finite number, not {array.dtype} {list(array.shape)}.")
    return float(array.reshape(()))


def read_texts(path: str | Path) -> Texts:
    """Returns the texts in an .npz file, local or remote, which has the arguments of `make_texts` as arrays.

    Raises:
        UserError: the file cannot be read, has other arrays, or see `make_texts`.
    """
    content = filesystem.read_bytes(str(path))
    with errors_of(str(path)):
        advice = "write it by np.savez, the names as an array of strings"
        with user_errors("cannot read the texts", *NPZ_ERRORS, advice=advice):
            file = np.load(io.BytesIO(content), allow_pickle=False)
            arrays = {} if isinstance(file, np.ndarray) else {name: file[name] for name in file}
        for name in arrays:
            choose("array of texts", name, ARRAYS)
        if missing := [name for name in ARRAYS[:3] if name not in arrays]:
            raise UserError(f"a file of texts has the arrays {', '.join(ARRAYS[:3])}; it lacks {', '.join(missing)}.")
        return make_texts(**arrays)


def score_zeroshot(
    eval_config: ConfigDict,
    source: Source,
    model: Model,
    features: Float32[np.ndarray, "n width"],
    labels: Int[np.ndarray, " n"],
) -> dict[str, float]:
    """Returns the metrics of `score_mapped`, for a model that chooses among all texts of a file.

    Args:
        eval_config: the configuration of the evaluation.
        source: the images.
        model: the model.
        features: the features of the images.
        labels: the labels in the source.

    Raises:
        UserError: see `check_zeroshot`, or no image has a label.
    """
    texts = _read_named(eval_config, model)
    starts = range(0, len(features), ROWS)
    logits = np.concatenate([np.asarray(texts.logits(features[start : start + ROWS])) for start in starts])
    mapped = np.where(labels >= 0, find_texts(texts, source)[labels], -1)
    return score_mapped(Predictions(logits, mapped, texts.names), texts.loss)


def check_zeroshot(eval_config: ConfigDict, source: Source, model: Model) -> None:
    """Checks that an evaluation has texts for the features of a model and for the classes of its data.

    If the data do not name their classes, a line says that the texts are those of the classes by number.

    Raises:
        UserError: the file cannot be read, or its texts are for other features or classes.
    """
    texts = _read_named(eval_config, model)
    rows = find_texts(texts, source)
    if not without_numbers(source.class_names, source.class_ids):
        first = printable(texts.names[rows[0]], 50)
        logging.getLogger(__name__).warning("the data do not name their classes; the text of class 0 is %r", first)


def _read_named(eval_config: ConfigDict, model: Model) -> Texts:
    if not eval_config.texts:
        raise UserError("a zero-shot evaluation needs vectors of texts; set the field texts to a file, FILE.npz.")
    texts = read_texts(eval_config.texts)
    with errors_of(eval_config.texts):
        texts.check_width(model)
    return texts


def find_texts(texts: Texts, source: Source) -> Int64[np.ndarray, " classes"]:
    """Returns for each class of a source the number of its text, by the equal name or WordNet id.

    If the source does not name its classes and there are as many texts, class i has text i.

    Raises:
        UserError: a class has no text, or shares its name with another class.
    """
    rows = {compose(name): row for row, name in enumerate(texts.names)}
    for names in (source.class_names, source.class_ids):
        found = [rows.get(compose(name), -1) for name in names or ()]
        if found and min(found) >= 0 and len({*found}) == len(found):
            return np.array(found, np.int64)
    kinds = without_numbers(source.class_names, source.class_ids)
    if not kinds and source.num_classes == len(rows):
        return np.arange(len(rows))
    if not kinds:
        raise UserError(
            f"the data have {source.num_classes:,} classes without names, but there are {len(rows):,} texts; give one "
            "text for each class, in their order."
        )
    if missing := [name for name in kinds[0] if name not in rows]:
        raise UserError(
            f"{len(missing):,} of the {source.num_classes:,} classes of the data have no text, the first of them "
            f"{printable(missing[0], 50)!r}; add texts with exactly these names."
        )
    repeated = next(name for name in kinds[0] if kinds[0].count(name) > 1)
    raise UserError(
        f"several classes of the data are called {printable(repeated, 50)!r}, so one text cannot be that of each; name "
        "the texts by the WordNet ids of the classes."
    )
