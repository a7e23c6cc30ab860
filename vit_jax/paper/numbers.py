"""The numbers of the paper's Tables 2, 4, 5, 6 and 9, the weights that they belong to, and the cost of pre-training."""

import csv
import dataclasses
import functools
import posixpath
from collections.abc import Mapping
from pathlib import Path

NUMBERS = Path(__file__).with_name("paper.csv")
RUNS = Path(__file__).with_name("paper_runs.csv")
COUNTS = ("epochs", "exaflops", "core_days")
# Data set -> the learning rates of Table 4, from which the paper chooses.
LEARNING_RATES: Mapping[str, tuple[float, ...]] = {
    "imagenet2012": (0.003, 0.01, 0.03),
    **dict.fromkeys(("cifar10", "cifar100", "oxford_iiit_pet", "oxford_flowers102"), (0.001, 0.003, 0.01, 0.03)),
}
HYBRID_LEARNING_RATES = (*LEARNING_RATES["imagenet2012"], 0.06)  # of hybrids and ResNets on ImageNet
VTAB_LEARNING_RATES = (0.01,)


@dataclasses.dataclass(frozen=True)
class PaperNumber:
    """An accuracy after fine-tuning, as the paper states it.

    Attributes:
        table: the number of the table, such as "5".
        pretraining: the pre-training data: jft, imagenet21k, imagenet2012 or noisy_student.
        model: the name of the model.
        dataset: the TFDS name of the data set; imagenet2012_real for ReaL; vtab:TASK, or vtab for the mean of the 19
            tasks.
        accuracy: the accuracy in percent.
        std: its standard deviation in percent; None: not stated.
        epochs: the epochs of pre-training, if the table has several runs of a model; else None.
        decimals: the number of decimals that the paper states.
    """

    table: str
    pretraining: str
    model: str
    dataset: str
    accuracy: float
    std: float | None
    epochs: int | None = None
    decimals: int = 2

    def __str__(self) -> str:
        """Returns the accuracy as in the paper's tables."""
        return f"{self.accuracy:.{self.decimals}f}" + ("" if self.std is None else f" ± {self.std:.2f}")

    def is_of(self, weights: str) -> bool:
        """Returns whether weights are those whose fine-tuning gave this number.

        Such weights are the authors' checkpoint, such as ViT-B/16-imagenet21k, or a run of ours in a folder named like
        its recipe, such as workdirs/vit_b16_jft. A number with `epochs` (Table 6) needs a folder that ends with them,
        such as vit_l16_jft_7, as configs/studies/compute.py names it.

        Args:
            weights: a value of `init_from`.
        """
        recipe = f"{self.model.lower().translate(str.maketrans('-+', '__', '/'))}_{self.pretraining}"
        folder = posixpath.basename(weights.rstrip("/"))
        if self.epochs is not None:
            return folder == f"{recipe}_{self.epochs}"
        published = f"{self.model}-{self.pretraining}"
        return weights == published or folder == recipe


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """The cost of a pre-training run, from Tables 2 and 6.

    Attributes:
        model: the name of the model.
        pretraining: the pre-training data, as in `PaperNumber`.
        epochs: the epochs of pre-training; None: not stated.
        exaflops: the exaFLOPs of pre-training; None: not stated.
        core_days: the TPUv3-core-days of pre-training; None: not stated.
    """

    model: str
    pretraining: str
    epochs: int | None
    exaflops: int | None
    core_days: int | None


@functools.cache
def read_paper_numbers() -> tuple[PaperNumber, ...]:
    """Returns the numbers of Tables 2, 5, 6 and 9, in the paper's order."""
    with NUMBERS.open() as file:
        return tuple(_parse_number(row) for row in csv.DictReader(file))


def _parse_number(row: dict[str, str]) -> PaperNumber:
    return PaperNumber(
        table=row["table"],
        pretraining=row["pretraining"],
        model=row["model"],
        dataset=row["dataset"],
        accuracy=float(row["accuracy"]),
        std=float(row["std"]) if row["std"] else None,
        epochs=_parse_count(row["epochs"]),
        decimals=len(row["accuracy"].partition(".")[2]),
    )


@functools.cache
def read_paper_runs() -> tuple[PaperRun, ...]:
    """Returns the pre-training runs of Table 6 in its order, then the other runs of Table 2.

    Table 2 does not state the epochs of L/16 on ImageNet-21k. That it is the run of 90 epochs follows from its compute.
    """
    with RUNS.open() as file:
        return tuple(
            PaperRun(row["model"], row["pretraining"], *(_parse_count(row[key]) for key in COUNTS))
            for row in csv.DictReader(file)
        )


def _parse_count(text: str) -> int | None:
    return int(text) if text else None


def find_paper_number(table: str, model: str, init_from: str | None, dataset: str) -> PaperNumber | None:
    """Returns what a table states for a model that was fine-tuned from some weights on a data set, or None.

    Args:
        table: the number of the table.
        model: the name of the model.
        init_from: the weights, see `PaperNumber.is_of`; None matches no number.
        dataset: as in `PaperNumber`.
    """
    for number in read_paper_numbers():
        if (number.table, number.model, number.dataset) == (table, model, dataset) and number.is_of(init_from or ""):
            return number
    return None


def list_learning_rates(dataset: str, model: str) -> tuple[float, ...]:
    """Returns the learning rates among which the paper chooses on a data set, or on a task of VTAB.

    Args:
        dataset: a key of `LEARNING_RATES`. Any other name is a task of VTAB.
        model: the name of the model.
    """
    if dataset == "imagenet2012" and not model.startswith("ViT"):
        return HYBRID_LEARNING_RATES
    return LEARNING_RATES.get(dataset, VTAB_LEARNING_RATES)
