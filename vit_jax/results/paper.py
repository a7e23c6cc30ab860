"""The numbers of the paper's Tables 2 and 5, and which weights they are of."""

import csv
import dataclasses
import functools
import posixpath
from pathlib import Path

NUMBERS = Path(__file__).with_name("paper.csv")


@dataclasses.dataclass(frozen=True)
class PaperNumber:
    """An accuracy after fine-tuning, as the paper states it.

    Attributes:
        table: its number.
        pretraining: jft, imagenet21k or imagenet2012.
        model: its name.
        dataset: its TFDS name; imagenet2012_real for ReaL; vtab for the mean of the 19 tasks.
        accuracy: in percent.
        std: its standard deviation; None: not stated.
    """

    table: str
    pretraining: str
    model: str
    dataset: str
    accuracy: float
    std: float | None

    def __str__(self) -> str:
        """Returns the accuracy as in the paper's tables."""
        return f"{self.accuracy:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@functools.cache
def read_paper_numbers() -> tuple[PaperNumber, ...]:
    """Returns the numbers of Tables 2 and 5, in the paper's order."""
    with NUMBERS.open() as file:
        rows = list(csv.DictReader(file))
    return tuple(_parse_number(row) for row in rows)


def _parse_number(row: dict[str, str]) -> PaperNumber:
    accuracy, std = float(row["accuracy"]), float(row["std"]) if row["std"] else None
    return PaperNumber(row["table"], row["pretraining"], row["model"], row["dataset"], accuracy, std)


def find_pretraining(model: str, init_from: str | None) -> str | None:
    """Returns the data that the weights of a run were pre-trained on as in the paper, or None.

    These are the authors' checkpoints, such as ViT-B/16-imagenet21k, and runs in folders named as the recipes, such as
    workdirs/vit_b16_jft.
    """
    if init_from is None:
        return None
    recipe = model.lower().replace("-", "_").replace("/", "")
    names = {
        name: number.pretraining
        for number in read_paper_numbers()
        for name in (f"{model}-{number.pretraining}", f"{recipe}_{number.pretraining}")
    }
    return names.get(init_from) or names.get(posixpath.basename(init_from.rstrip("/")))


def find_paper_number(table: str, model: str, init_from: str | None, dataset: str) -> PaperNumber | None:
    """Returns what a table states for a model that was fine-tuned from some weights on a data set, or None."""
    wanted = (table, find_pretraining(model, init_from), model, dataset)
    found = [
        number
        for number in read_paper_numbers()
        if (number.table, number.pretraining, number.model, number.dataset) == wanted
    ]
    return found[0] if found else None
