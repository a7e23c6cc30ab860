"""What the arrays of a timm architecture do not tell.

`timm_models.csv` lists the architectures of timm 1.0.31 whose form is one of ours, from the models themselves.
"""

import csv
import functools
from pathlib import Path
from typing import Any


def architecture_fields(name: str) -> dict[str, Any]:
    """Returns num_heads, activation and norm_epsilon of an architecture; nothing for one that is not listed."""
    return dict(_read_table().get(name, {}))


@functools.cache
def _read_table() -> dict[str, dict[str, Any]]:
    with Path(__file__).with_name("timm_models.csv").open(newline="", encoding="utf-8") as file:
        return {
            row["architecture"]: {
                "num_heads": int(row["num_heads"]),
                "activation": row["activation"],
                "norm_epsilon": float(row["norm_epsilon"]),
            }
            for row in csv.DictReader(file)
        }
