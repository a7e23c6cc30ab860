"""timm's side of `benchmarks.train_step`, which runs where torch and timm are installed: a step for each line of input.

It answers each line with JSON: the seconds of the step by the clock and of all its threads.
"""

import ctypes
import json
import sys
import time

import timm
import torch


def make_step(architecture: str, batch: int, resolution: int, classes: int):
    """Returns a function that makes one step of AdamW in float32, on images that stay the same."""
    model = timm.create_model(architecture, num_classes=classes, img_size=resolution)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    images = torch.rand(batch, 3, resolution, resolution) * 2 - 1
    labels = torch.randint(0, classes, (batch,))

    def step():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def main(architecture, batch, resolution, classes, settings):
    for setting in json.loads(settings):  # of mallopt, as ours has them
        ctypes.CDLL(None).mallopt(*setting)
    step = make_step(architecture, int(batch), int(resolution), int(classes))
    print(json.dumps({"name": f"timm {timm.__version__}, torch {torch.__version__}"}), flush=True)
    for _ in sys.stdin:
        start, start_work = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - start, time.process_time() - start_work]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
