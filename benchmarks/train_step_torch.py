"""timm's side of `benchmarks.train_step`, which runs where torch and timm are installed.

It makes the first step at once, which compiles, and says so in a line of JSON. Each line of its input is a number of
steps, which it makes one after the other and answers with a JSON list: wall-clock seconds of a step, processor seconds
of all threads, and the most GiB of GPU memory in use so far (null on a CPU).
"""

import ctypes
import json
import sys
import time

import timm
import torch


def make_step(architecture: str, batch: int, resolution: int, classes: int, dtype: str, device: str, is_compiled: bool):
    """Returns a function that makes one step with AdamW, always on the same images."""
    gpu = device == "cuda"
    torch.set_float32_matmul_precision("high" if gpu else "highest")  # as JAX's default on GPUs: TF32
    model = timm.create_model(architecture, num_classes=classes, img_size=resolution).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=gpu)
    images = torch.rand(batch, 3, resolution, resolution, device=device) * 2 - 1
    labels = torch.randint(0, classes, (batch,), device=device)
    forward = torch.compile(model) if is_compiled else model

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()

    return step


def main(architecture, batch, resolution, classes, dtype, device, is_compiled, settings):
    gpu = device == "cuda"

    def memory():
        return torch.cuda.max_memory_allocated() / 2**30 if gpu else None

    def take_turn(steps):
        start, start_work = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        if gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps, (time.process_time() - start_work) / steps

    for setting in json.loads(settings):  # the settings of mallopt that our process uses
        ctypes.CDLL(None).mallopt(*setting)
    step = make_step(architecture, int(batch), int(resolution), int(classes), dtype, device, json.loads(is_compiled))
    compile_seconds, _ = take_turn(1)
    if gpu:  # the first step compiles, with memory of its own
        torch.cuda.reset_peak_memory_stats()
    name = f"timm {timm.__version__}, torch {torch.__version__}"
    print(json.dumps({"name": name, "compile_seconds": compile_seconds, "memory": memory()}), flush=True)
    for line in sys.stdin:
        print(json.dumps([*take_turn(int(line)), memory()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
