"""Serves the .onnx file of a model on 127.0.0.1: POST /predict takes an image file, GET /health answers "ok".

python docs/serve.py workdirs/digits.onnx --port=8000

Images are prepared by the code that prepares them in training; JAX is not imported. While the model runs, the images
that arrive wait, and its next run takes all of them, up to a batch.
"""

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from starlette.requests import ClientDisconnect

from vit_jax import UserError, data
from vit_jax.data.images import EncodedImage, stated_size

MOST_BYTES, MOST_PIXELS = 10_000_000, 25_000_000  # of an image's file; of the decoded image, which takes 75 MB
UPLOAD_SECONDS, MOST_REQUESTS = 10, 256  # beyond these a request is refused
BATCH, TOP = 32, 5  # images of a run, classes of an answer


def make_app(path: str) -> FastAPI:
    """Returns the application; raises UserError if the file is no model with a head that states its preprocessing."""
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # the classes of onnxruntime have no other base
        raise UserError(f"cannot open {path}: {error}") from None
    described = json.loads(session.get_modelmeta().custom_metadata_map.get("vit_jax", "{}"))
    if not described.get("preprocess"):
        raise UserError(f"{path} does not state how images are prepared; convert a checkpoint that does.")
    if "probabilities" not in [output.name for output in session.get_outputs()]:
        raise UserError(f"{path} has no head, so it predicts no classes; fine-tune the model first.")
    pipe = data.parse_pipe(described["preprocess"], resolution=0)
    takes_bytes = session.get_inputs()[0].type == "tensor(uint8)"  # of --preprocess
    decoders = asyncio.Semaphore(os.cpu_count() or 1)  # images that are decoded at the same time
    waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future]] = asyncio.Queue()

    def prepare(body: bytes) -> np.ndarray:
        height, width = stated_size(body, "sent")
        if height * width > MOST_PIXELS:
            raise HTTPException(413, f"the image has {height} x {width} pixels; {MOST_PIXELS:,} are allowed")
        image, unused = EncodedImage(body, "sent", exif=True), np.random.default_rng(0)
        return pipe.apply_ops(image, unused) if takes_bytes else pipe(image, unused)

    async def run_batches() -> None:
        while True:
            batch = [await waiting.get()]
            while len(batch) < BATCH and not waiting.empty():
                batch.append(waiting.get_nowait())
            try:
                images = {"images": np.stack([image for image, _ in batch])}
                [results] = await asyncio.to_thread(session.run, ["probabilities"], images)
            except Exception as error:  # of this batch alone: its requests answer 500
                results = [error] * len(batch)
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():  # the client is still there
                    (answer.set_exception if isinstance(result, Exception) else answer.set_result)(result)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(run_batches())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/predict")
    async def predict(request: Request) -> dict:
        body = bytearray()
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        raise HTTPException(413, f"the image has more than {MOST_BYTES:,} bytes")
        except ClientDisconnect:
            raise HTTPException(400, "the client went away") from None
        except TimeoutError:
            raise HTTPException(408, f"the image did not arrive within {UPLOAD_SECONDS} seconds") from None
        try:
            async with decoders:
                image = await asyncio.to_thread(prepare, bytes(body))
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        answer = asyncio.get_running_loop().create_future()
        waiting.put_nowait((image, answer))
        probabilities = await answer
        best = np.argsort(-probabilities, kind="stable")[:TOP].tolist()
        names = described["class_names"] or [str(number) for number in range(len(probabilities))]
        return {"classes": [{"class": names[i], "probability": float(probabilities[i])} for i in best]}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the .onnx file")
    parser.add_argument("--port", type=int, default=8000, help="[8000]")
    args = parser.parse_args()
    try:
        served = make_app(args.path)
    except UserError as error:
        parser.error(str(error))
    uvicorn.run(served, host="127.0.0.1", port=args.port, limit_concurrency=MOST_REQUESTS)
