"""Loads the server of docs/serving.md: images a second and waits beside the model alone, on this machine.

python -m benchmarks.serving --write=docs/serving.md

Clients on the same machine each send a photograph, wait for the answer and send the next. The model is a ViT-S/16 with
random weights. Between the loads, onnxruntime runs batches of 32 prepared images alone: the ratio is that of the same
minute.
"""

import argparse
import contextlib
import http.client
import io
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import onnxruntime
from PIL import Image

import vit_jax
from benchmarks.tpu import table
from docs.pages import print_sections
from tests.conftest import ROOT

CLIENTS, BATCH = (1, 8, 32), 32
HEAD = ["clients", "images/s", "of the model alone", "median wait, ms", "95 % wait, ms"]


def photograph(seed: int) -> bytes:
    """Returns a JPEG of 500 x 375 pixels that compresses as photographs do."""
    coarse = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8)
    image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=90)
    return file.getvalue()


def send(port: int, body: bytes, seconds: float, waits: list[float]) -> None:
    """Sends an image again and again, and appends the seconds from each request to its answer."""
    connection, end = http.client.HTTPConnection("127.0.0.1", port), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.request("POST", "/predict", body)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        waits.append(time.perf_counter() - began)


def wait_until_ready(port: int, server: subprocess.Popen) -> None:
    """Returns when the server answers."""
    while server.poll() is None:
        with contextlib.suppress(ConnectionError):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'"ok"'
            return
        time.sleep(0.2)
    raise RuntimeError("the server has ended")


def load(port: int, clients: int, seconds: float) -> list[float]:
    """Returns the waits of all clients."""
    waits: list[float] = []
    threads = [
        threading.Thread(target=send, args=(port, photograph(client), seconds, waits)) for client in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return waits


def rate_alone(session: onnxruntime.InferenceSession, seconds: float) -> float:
    """Returns the images a second of onnxruntime alone."""
    images, began, count = np.zeros((BATCH, 224, 224, 3), np.uint8), time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        session.run(["probabilities"], {"images": images})
        count += BATCH
    return count / (time.perf_counter() - began)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-S/16", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=20, help="of each load [%(default)s]")
    parser.add_argument("--port", type=int, default=8123, help="[%(default)s]")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also write the table into a page")
    args = parser.parse_args(argv[1:])
    pipe = "resize_small(256)|central_crop(224)|value_range(-1,1)"
    model = vit_jax.create(args.model, num_classes=1000, preprocess=pipe, loss="softmax")
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, *model.image_size, 3), np.float32))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        vit_jax.save(path, model, params, preprocess=True)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        command = [sys.executable, "docs/serve.py", str(path), f"--port={args.port}"]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(args.port, server)
            rows = []
            for clients in CLIENTS:
                before = rate_alone(session, args.seconds / 2)
                waits = load(args.port, clients, args.seconds)
                alone = (before + rate_alone(session, args.seconds / 2)) / 2
                rate, (median, most) = len(waits) / args.seconds, np.percentile(waits, [50, 95])
                rows.append(
                    [str(clients), f"{rate:.1f}", f"{rate / alone:.2f}", f"{median * 1000:.0f}", f"{most * 1000:.0f}"]
                )
        finally:
            server.kill()
    print_sections([("serving load", table(HEAD, rows))], args.write)


if __name__ == "__main__":
    main(sys.argv)
