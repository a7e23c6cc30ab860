"""The numbers of the paper's Tables 2, 5, 6 and 9, and which weights they are of; what its pre-training took."""

import csv
import dataclasses
import functools
import posixpath
from pathlib import Path

NUMBERS = Path(__file__).with_name("paper.csv")
RUNS = Path(__file__).with_name("paper_runs.csv")
COUNTS = ("epochs", "exaflops", "core_days")


@dataclasses.dataclass(frozen=True)
class PaperNumber:
    """An accuracy after fine-tuning, as the paper states it.

    Attributes:
        table: its number.
        pretraining: jft, imagenet21k, imagenet2012 or noisy_student.
        model: its name.
        dataset: its TFDS name; imagenet2012_real for ReaL; vtab:TASK, or vtab for the mean of the 19 tasks.
        accuracy: in percent.
        std: its standard deviation; None: not stated.
        epochs: of pre-training, where the table has several runs of a model.
        decimals: that are stated.
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
        """Returns whether weights are those that the number is about.

        These are the authors' checkpoints, such as ViT-B/16-imagenet21k, and runs in folders named as the recipes, such
        as workdirs/vit_b16_jft. Those of Table 6 end with their epochs, as in configs/studies/compute.py:
        vit_l16_jft_7.
        """
        recipe = f"{self.model.lower().translate(str.maketrans('-+', '__', '/'))}_{self.pretraining}"
        folder = posixpath.basename(weights.rstrip("/"))
        if self.epochs is not None:
            return folder == f"{recipe}_{self.epochs}"
        published = f"{self.model}-{self.pretraining}"
        return weights == published or folder == recipe


@dataclasses.dataclass(frozen=True)
class PaperRun:
    """What a pre-training took: Tables 2 and 6.

    Attributes:
        model: its name.
        pretraining: on what, as in `PaperNumber`.
        epochs: None: not stated.
        exaflops: None: not stated.
        core_days: TPUv3-core-days; None: not stated.
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
    """Returns what pre-training took: the runs of Table 6 in its order, then the others of Table 2.

    That the L/16 of ImageNet-21k is the run of 90 epochs follows from its compute.
    """
    with RUNS.open() as file:
        return tuple(
            PaperRun(row["model"], row["pretraining"], *(_parse_count(row[key]) for key in COUNTS))
            for row in csv.DictReader(file)
        )


def _parse_count(text: str) -> int | None:
    return int(text) if text else None


def find_paper_number(table: str, model: str, init_from: str | None, dataset: str) -> PaperNumber | None:
    """Returns what a table states for a model that was fine-tuned from some weights on a data set, or None."""
    for number in read_paper_numbers():
        if (number.table, number.model, number.dataset) == (table, model, dataset) and number.is_of(init_from or ""):
            return number
    return None
