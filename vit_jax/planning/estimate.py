"""From what a TPU's compiler tells of a step to what a run takes: its estimate, nothing measured."""

from typing import Any

from vit_jax.planning.chips import Slice
from vit_jax.planning.client import Facts

# Table 2: TPUv3-core-days of pre-training, by model, images of the recipe's training split and epochs. That the L/16 of
# ImageNet-21k is the run of 90 epochs follows from its compute.
PAPER = {
    ("ViT-L/16", 303_000_000, 14): 680,
    ("ViT-H/14", 303_000_000, 14): 2500,
    ("ViT-L/16", 14_145_922, 90): 230,
}

# Whether `data.fast` -> images a second that a core reads with `.[fast]`: inception crops at 224 pixels of ImageNet's
# photographs, measured (docs/data.md, Speed). What more a preprocessing does, and another resolution, were not.
READ = {True: 1106, False: 834}


def estimate_cost(facts: Facts, tpu: Slice) -> dict[str, Any]:
    """Returns what a program that fits takes, by the compiler's cycles and the links' published speed.

    Compute is the sum of the compiler's estimates at the chip's clock. Exchange, for which it estimates nothing, is
    what the collectives send over the busiest link at full speed, one after the other; that compute hides some of it
    is not assumed. What goes between slices is left out.

    Args:
        facts: of a program that fits.
        tpu: the slice, or each of several; a device is a chip.
    """
    images, chip = facts["batch"] / facts["devices"], tpu.chip
    compute = facts["cycles"] / chip.clock
    sent = sum(row["link_bytes"] for row in facts["collectives"].values())
    exchange = sent / tpu.link_bandwidth
    rate = images / (compute + exchange)
    model_flops = (2 if facts["inference"] else 6) * facts["macs_per_image"]
    result = {
        "cycles_per_image": facts["cycles"] / images,
        "compute_seconds": compute,
        "exchange_seconds": exchange,
        "images_per_second_per_chip": rate,
        "mfu": rate * model_flops / chip.flops,
        "model_flops": model_flops * images,
    }
    if not facts["inference"]:
        read = facts["images_per_host"] / (compute + exchange)
        result |= {"images_per_second_per_host": read, "input_cores": read / READ[facts["fast"]]}
        result |= {"images_per_second_per_core": READ[facts["fast"]], "host_cores": chip.cores[tpu.chips // tpu.hosts]}
        hours = facts["steps"] * (compute + exchange) / 3600
        result |= {"hours": hours, "chip_hours": hours * facts["devices"]}
        row = facts["model"], facts["num_examples"], round(facts["epochs"])
        result["paper_tpuv3_core_days"] = PAPER.get(row)
    return result
