"""The server of docs/serving.md: its answers are those of `vit_jax.predict`, and no client stops it."""

import concurrent.futures
import contextlib
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.conftest import ROOT
from tests.models.test_models import params_of, tiny
from vit_jax.predict import predict

pytest.importorskip("onnx_ir")  # of the extra [test], with onnxruntime, fastapi and uvicorn
uvicorn = pytest.importorskip("uvicorn")

from docs import serve  # noqa: E402

PIPE = "resize_small(40)|central_crop(32)|value_range(-1,1)"


def photograph(kind="jpeg", size=(60, 50), mode="RGB", **options):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    return photograph(exif=exif)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = tiny(preprocess=PIPE, class_names=tuple("abcdefg"), loss="softmax")
    params = params_of(model)
    vit_jax.save(folder / "model.npz", model, params)
    vit_jax.save(folder / "pixels.onnx", model, params, preprocess=True)
    vit_jax.save(folder / "plain.onnx", model, params)
    return folder


@contextlib.contextmanager
def serving(path):
    server = uvicorn.Server(uvicorn.Config(serve.make_app(str(path)), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port(checkpoint):
    with serving(checkpoint / "pixels.onnx") as number:
        yield number


def send(port, body, method="POST", path="/predict"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


IMAGES = {
    "photo.jpg": photograph(),
    "turned.jpg": turned(),
    "grey.png": photograph("png", mode="L"),
    "alpha.png": photograph("png", mode="RGBA"),
    "small.png": photograph("png", size=(8, 9)),
}


def test_the_answers_are_those_of_predict_also_of_many_clients_at_once(checkpoint, port, tmp_path):
    for name, content in IMAGES.items():
        (tmp_path / name).write_bytes(content)
    expected = predict(checkpoint / "model.npz", [tmp_path / name for name in IMAGES])
    assert send(port, None, "GET", "/health") == (200, "ok")
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda body: send(port, body), list(IMAGES.values()) * 20))
    for number, (status, found) in enumerate(answers):
        classes = expected[number % len(IMAGES)]["classes"]
        assert status == 200 and [one["class"] for one in found["classes"]] == [one["class"] for one in classes]
        for one, other in zip(found["classes"], classes, strict=True):
            assert abs(one["probability"] - other["probability"]) < 1e-5


def test_a_file_that_reads_float_gives_the_same(checkpoint, port):
    with serving(checkpoint / "plain.onnx") as other:
        answers = [send(number, IMAGES["photo.jpg"])[1]["classes"] for number in (port, other)]
    for one, same in zip(*answers, strict=True):
        assert one["class"] == same["class"] and abs(one["probability"] - same["probability"]) < 1e-5


def large_png():
    """A file of 30 million pixels."""
    file = io.BytesIO()
    Image.new("1", (6000, 5000)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "cannot decode the image"),
        (b"no image", 400, "cannot decode the image"),
        (photograph()[:300], 400, "cannot decode the image"),
        (b"\0" * (serve.MOST_BYTES + 1), 413, "more than 10,000,000 bytes"),
        (large_png(), 413, "5000 x 6000 pixels; 25,000,000 are allowed"),
        (photograph("png", size=(65000, 1)), 400, "cannot preprocess the image"),
    ],
)
def test_a_bad_image_is_a_sentence_and_the_next_one_is_answered(port, body, status, message):
    found, answer = send(port, body)
    assert found == status and message in answer["detail"]
    assert send(port, IMAGES["photo.jpg"])[0] == 200


def test_clients_that_go_away_or_send_slowly_hold_up_nobody(port, monkeypatch):
    monkeypatch.setattr(serve, "UPLOAD_SECONDS", 0.2)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for one in sockets:  # they announce an image and send a part
        one.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
    sockets[0].close()
    assert send(port, IMAGES["photo.jpg"])[0] == 200
    assert b"408" in sockets[1].recv(100)
    for one in sockets:
        one.close()
    assert send(port, IMAGES["photo.jpg"])[0] == 200


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({}, "does not state how images are prepared"), ({"preprocess": PIPE, "num_classes": 0}, "has no head, so")],
)
def test_a_model_that_cannot_be_served_is_refused(fields, sentence, tmp_path):
    model = tiny(**fields)
    vit_jax.save(tmp_path / "x.onnx", model, params_of(model))
    with pytest.raises(vit_jax.UserError, match=sentence):
        serve.make_app(str(tmp_path / "x.onnx"))


def test_what_is_no_model_is_a_sentence(tmp_path):
    (tmp_path / "x.onnx").write_text("no model")
    command = [sys.executable, "docs/serve.py", str(tmp_path / "x.onnx")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "cannot open" in done.stderr and "Traceback" not in done.stderr
