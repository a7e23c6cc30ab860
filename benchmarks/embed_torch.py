"""timm's side of `benchmarks.embed`, which runs where torch and timm are installed.

It answers each line of its input, a number, with seconds: 0 embeds all files, n computes n batches on the device.
"""

import json
import sys
import time

import timm
import torch
from timm.data import ImageDataset, create_transform, resolve_model_data_config


def main(architecture, folder, batch, resolution, workers, device):
    gpu, batch, resolution, workers = device == "cuda", int(batch), int(resolution), int(workers)
    model = timm.create_model(architecture, num_classes=0, img_size=resolution).to(device).eval()
    settings = resolve_model_data_config(model) | {"input_size": (3, resolution, resolution)}
    files = ImageDataset(folder, transform=create_transform(**settings, is_training=False))
    forward = torch.compile(model) if gpu else model
    images = torch.rand(batch, 3, resolution, resolution, device=device)

    @torch.inference_mode()
    def features(given):
        with torch.autocast(device, torch.bfloat16, enabled=gpu):
            return forward(given)

    def embed():
        loader = torch.utils.data.DataLoader(files, batch, num_workers=workers, pin_memory=gpu)
        whole = [features(given.to(device, non_blocking=True)).float().cpu() for given, _ in loader]
        assert len(torch.cat(whole)) == len(files)

    def model_alone(count):
        for _ in range(count):
            features(images)
        if gpu:
            torch.cuda.synchronize()

    model_alone(1)  # compiles
    print(json.dumps(f"timm {timm.__version__}, torch {torch.__version__}"), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        if int(line):
            model_alone(int(line))
        else:
            embed()
        print(json.dumps(time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
