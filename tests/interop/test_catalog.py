"""The published checkpoints: the catalog, downloads, class names."""

import base64
import concurrent.futures
import contextlib
import csv
import dataclasses
import hashlib
import http.server
import os
import re
import resource
import socket
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest

import vit_jax
from tests.conftest import ROOT
from vit_jax import UserError, models
from vit_jax.data.preprocess import parse_pipe
from vit_jax.interop import catalog, download, imagenet_classes, licences, timm_config
from vit_jax.model import create, parameter_shapes

WIDTHS = {"Ti": 192, "S": 384, "B": 768, "L": 1024, "H": 1280}
# Parameters at 224 px without a head, from the authors' counts (their models_test.py, less a head of 1,000).
BACKBONES = {
    "ViT-Ti/16": 5_524_416,
    "ViT-S/32": 22_493_952,
    "ViT-S/16": 21_665_664,
    "ViT-B/32": 87_455_232,
    "ViT-B/16": 85_798_656,
    "ViT-B/8": 85_807_872,
    "ViT-L/32": 305_510_400,
    "ViT-L/16": 303_301_632,
    "ViT-H/14": 630_764_800,
    "R+ViT-Ti/16": 6_144_704,
    "R26+ViT-S/32": 36_046_912,
    "R26+ViT-B/32": 100_614_976,
    "R50+ViT-B/16": 97_890_112,
    "R50+ViT-L/32": 327_969_856,
}
ALL = catalog.list_models()
HUB = [one for one in ALL if one.address.startswith("hf-hub:")]
BIT = [one for one in ALL if one.address.startswith("https://") and one.model.startswith("BiT-")]
OWN = [one for one in ALL if one not in HUB and one not in BIT]  # of vision_transformer and big_vision


def test_the_list_is_consistent():
    for one in OWN:
        assert re.fullmatch(r"(R\d*\+)?ViT-(Ti|S|B|L|H)/\d+", one.model)
        data = one.data.rpartition("+")[2]
        assert re.fullmatch(rf"{re.escape(one.model)}(-[a-z0-9-]+)?-{data}(-{one.resolution})?", one.name)
        bucket = {"google": "vit_models", "big_vision": "big_vision"}[one.layout]
        assert re.fullmatch(rf"https://storage\.googleapis\.com/{bucket}/[\w/%.-]+\.npz", one.address)
        assert one.data in ("imagenet21k", "imagenet2012", "imagenet21k+imagenet2012")
        assert one.head == {"imagenet21k": 21843, "imagenet2012": 1000}[data] and imagenet_classes.class_wnids(one.head)
        assert one.accuracy is None or 50 < one.accuracy < 95
        assert (one.accuracy is None) == (one.of == "") and one.source
        assert catalog.find_entry(one.name) == one


def test_a_name_of_augregs_index_is_the_same_checkpoint():
    listed = [one for one in OWN if "/augreg/" in one.address]
    assert len(listed) > 20
    for one in listed:
        assert catalog.find_entry(one.address.rpartition("/")[2].removesuffix(".npz")) == one
    assert catalog.find_entry("B_16-i21k-300ep-lr_0.001-aug_none-wd_0.3-do_0.1-sd_0.0") is None


def test_the_list_says_with_which_loss_heads_were_trained(held):
    for one in ALL:
        assert (one.loss, bool(one.loss_source)) in (("", False), ("softmax", True), ("sigmoid", True)), one.name
        assert one.loss == "sigmoid" or one.head != 21843, one.name
    losses = {
        name: catalog.find_entry(name).loss for name in ("ViT-B/16-gsam-imagenet2012-224", "ViT-B/16-imagenet21k")
    }
    assert {*losses.values()} == {"sigmoid"}
    assert catalog.find_entry("ViT-S/16-deit3-1k-imagenet2012-224").loss == "sigmoid"
    assert catalog.find_entry("ViT-S/16-deit3-1k-imagenet2012-384").loss == "softmax"
    name, address, path = held(
        create("ViT-mu/16", num_classes=5), model="ViT-mu/16", flexi=False, resolution=224, loss="sigmoid"
    )
    assert vit_jax.load(name)[0].loss == vit_jax.load(address)[0].loss == "sigmoid"
    assert vit_jax.load(name, loss="softmax")[0].loss == vit_jax.load(path)[0].loss == "softmax"


def test_names_and_addresses_are_unique():
    assert len({one.name for one in ALL}) == len({one.address for one in ALL}) == len(ALL) == 413
    assert (len(OWN), len(HUB), len(BIT)) == (75, 318, 20)


def test_checkpoints_of_the_hub():
    for one in HUB:
        assert one.address == f"hf-hub:{one.name.replace('_quickgelu', '')}" and one.source
        assert one.layout == ("timm" if one.name.startswith("timm/") else "huggingface")
        assert (one.of == "") == (one.accuracy is None)
        assert catalog.find_entry(one.name) == catalog.find_entry(one.address) == one
        assert catalog.find_entry(one.name.removeprefix("timm/")) == one and catalog.is_published(one.name)
    trained_with = "timm/vit_base_patch16_clip_quickgelu_224.openai"
    assert catalog.find_entry("vit_base_patch16_clip_224.openai").name == trained_with


def test_rows_of_timm_have_the_sizes_of_their_architecture():
    for one in [one for one in HUB if one.layout == "timm"]:
        name = one.name.removeprefix("timm/")
        architecture, patch_size = timm_config.find_architecture(name), re.search(r"patch(\d+)", name)
        assert architecture or name.startswith("resnetv2_"), name
        if architecture and patch_size:
            sizes = {key: getattr(architecture, key) for key in ("width", "depth", "mlp_dim", "num_heads")}
            assert models.model_name(sizes | {"patch_size": int(patch_size[1])}) == one.model, name


def test_every_licence_has_an_address_and_a_source():
    for one in ALL:
        assert one.licence in licences.ADDRESSES and one.licence_source
    assert licences.BINDING.keys() <= licences.ADDRESSES.keys()
    assert catalog.find_entry("vit_base_patch16_dinov3.lvd1689m").licence == "dinov3-license"


def test_checkpoints_of_bit():
    for one in BIT:
        assert re.fullmatch(rf"{one.model}-(s|m|distilled)-imagenet(21k|2012-{one.resolution})", one.name)
        assert re.fullmatch(r"https://storage\.googleapis\.com/bit_models/(distill/)?[\w-]+\.npz", one.address)
        assert one.head == (21843 if one.name.endswith("21k") else 1000) and one.layout == "google"
        assert create(one.model).name == one.model and (one.of == "") == (one.accuracy is None)


def test_sizes_are_those_of_float32_parameters():
    for one in [one for one in ALL if one.size]:
        width = WIDTHS[re.search(r"ViT-(\w+)/", one.model)[1]]
        count = BACKBONES[one.model] + (width + 1) * one.head
        if one.name.endswith(f"{one.model}-imagenet21k"):
            count += (width + 1) * width  # pre_logits
        number, unit = one.size.split()
        assert float(number) * download.UNITS[unit] == pytest.approx(4 * count, rel=0.02)


def test_searching():
    assert [one.resolution for one in catalog.list_models("ViT-B/16-imagenet2012-*")] == [224, 384]
    assert len(catalog.list_models("R*+ViT-*")) > 10 and catalog.find_entry("ViT-B/16-augreg-imagenet2012-384").accuracy
    assert catalog.list_models("vit-b*") == () and catalog.find_entry("ViT-B/17") is None


def test_tables_are_aligned():
    table = catalog.list_models("ViT-H*")
    assert repr(table).splitlines() == [
        "name                  layout  data         resolution   head  accuracy      size  licence     address",
        "ViT-H/14-imagenet21k  google  imagenet21k         224  21843            2.46 GiB  apache-2.0  "
        + table[0].address,
    ]
    assert table._repr_html_().count("<tr>") == 2 and "<td style" in table._repr_html_()
    assert repr(catalog.list_models("nothing")) == "no published checkpoint has such a name"


def test_classes():
    short, long = imagenet_classes.class_names(1000), imagenet_classes.class_names(21843)
    assert (short[0], short[207], short[281]) == ("tench, Tinca tinca", "golden retriever", "tabby, tabby cat")
    assert {"crane (bird)", "crane (machine)", "maillot", "maillot, tank suit"} <= set(short)
    assert long[0] == "organism" and "crane (n02012849)" in long
    assert imagenet_classes.class_wnids(21843)[0] == "n00004475"
    for count in (1000, 21843):
        assert len(set(imagenet_classes.class_names(count))) == len(set(imagenet_classes.class_wnids(count))) == count
        assert list(imagenet_classes.class_wnids(count)) == sorted(imagenet_classes.class_wnids(count))
        assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in imagenet_classes.class_wnids(count)) and all(
            imagenet_classes.class_names(count)
        )
    # ImageNet-21k as Google packed it has no teddy bear.
    assert set(imagenet_classes.class_wnids(1000)) - set(imagenet_classes.class_wnids(21843)) == {"n04399382"}
    assert imagenet_classes.class_names(10) is None and imagenet_classes.class_wnids(10) is None
    assert imagenet_classes.class_wnids(1000, imagenet_classes.class_names(1000)[:999]) is None  # of other classes


def test_the_list_says_how_images_are_preprocessed():
    for one in ALL:
        if one.preprocess or one.layout != "huggingface":  # whose folders state it
            size = 224 if one.name.startswith("facebook/dinov2-") else one.resolution
            assert parse_pipe(one.preprocess, size).shape == (size, size, 3)
            assert one.preprocess.endswith("|value_range(-1,1)") and one.preprocess_source
            assert len(one.image_mean) == len(one.image_std) == 3
        assert one.flexi == ("-flexibase-" in one.name)


def test_accuracies_stand_on_the_page_with_their_preprocessing():
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    told = re.findall(r"^\| (\S*(?:ViT|BiT)\S*) \| ([\d.]+) \| `(\S+)` \| (.+) \|$", page, re.M)
    pipes = {one.name: one.preprocess.removesuffix("|value_range(-1,1)").replace("|", r"\|") for one in ALL}
    assert told == [
        (one.name, f"{one.accuracy:g}", pipes[one.name], one.preprocess_source) for one in [*OWN, *BIT] if one.accuracy
    ]


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Lists one checkpoint and writes its file as if downloaded: `held(stored, **row)` returns name, address, path."""
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))

    flexible = dataclasses.asdict(catalog.find_entry("ViT-B/16-flexibase-imagenet21k-240"))

    def write_listed(stored, **row):
        one = catalog.CatalogEntry(**(flexible | {"head": 5, "size": "", "flexi": True} | row))
        cells = dataclasses.asdict(one) | {"flexi": "yes" if one.flexi else "", "accuracy": one.accuracy or ""}
        cells |= {name: " ".join(map(str, cells[name])) for name in ("image_mean", "image_std")}
        file = tmp_path / f"{len(list(tmp_path.glob('*.csv')))}.csv"
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, cells)
            writer.writeheader()
            writer.writerow(cells)
        monkeypatch.setattr(catalog, "CATALOG_FILE", file)
        params = jax.tree.map(
            lambda leaf: np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32),
            parameter_shapes(stored),
        )
        path = tmp_path / "published" / one.address.removeprefix("https://")
        path.parent.mkdir(parents=True, exist_ok=True)
        vit_jax.save(path, stored, params, layout="big_vision")
        return one.name, one.address, path

    return write_listed


def test_flexible_checkpoints_come_as_the_model_that_is_listed(held, capsys):
    stored = create("ViT-mu/32", num_classes=5, pooling="gap")
    name, address, path = held(stored, model="ViT-mu/16")
    model, params = vit_jax.load(name)
    assert (model.name, model.field("resolution"), model.spec.grid) == ("ViT-mu/16", 240, (15, 15))
    assert params["embed"]["kernel"].shape[:2] == (16, 16) and params["position"].shape == (225, 32)
    assert model.preprocess == "resize_small(272)|central_crop(240)|value_range(-1,1)"
    assert "resized from 32x32 to 16x16" in capsys.readouterr().err
    by_gs = "gs://big_vision/" + address.partition("/big_vision/")[2]
    assert vit_jax.load(address)[0] == model and catalog.find_entry(by_gs) == catalog.find_entry(name)
    assert vit_jax.load(name, patch_size=30)[0].spec.grid == (8, 8)
    assert vit_jax.load(path)[0].name == "ViT-mu/32"  # a user's own file is not in the catalog


def test_a_listed_checkpoint_comes_with_its_own_preprocessing(held):
    pipe = "resize_small(224,'bicubic',True)|central_crop(224)|value_range(-1,1)"
    row = {"flexi": False, "resolution": 224, "preprocess": pipe}
    name, _, path = held(create("ViT-mu/16", num_classes=5), model="ViT-mu/16", **row)
    assert vit_jax.load(name)[0].preprocess == pipe
    assert vit_jax.load(name, preprocess="value_range(0,1)")[0].preprocess == "value_range(0,1)"
    assert vit_jax.load(name, resolution=384)[0].preprocess == pipe.replace("224", "384")
    # For a user's own file, the layout determines the preprocessing of its authors.
    assert vit_jax.load(path)[0].preprocess == "resize_small(256)|central_crop(224)|value_range(-1,1)"
    vit_jax.save(path, *vit_jax.load(path), layout="google")
    assert vit_jax.load(path)[0].preprocess == "resize((224,224))|value_range(-1,1)"


@pytest.mark.parametrize(
    ("stored", "row"),
    [
        ("ViT-mu/32", {"flexi": False, "model": "ViT-mu/16", "resolution": 224}),
        ("ViT-mu/16", {"flexi": False, "model": "ViT-mu/16", "resolution": 240}),
        ("ViT-mu/16", {"flexi": False, "model": "ViT-mu/16", "resolution": 224, "layout": "google"}),
        ("ViT-mu/16", {"model": "ViT-Ti/16"}),
    ],
)
def test_files_of_another_model_than_listed_are_refused(held, stored, row):
    name, address, _ = held(create(stored, num_classes=5), **row)
    for path in (name, address):
        with pytest.raises(
            UserError,
            match=rf"the file contains a {stored} .*, but the catalog lists a .*, so the file was not loaded$",
        ):
            vit_jax.load(path)
    name, _, _ = held(create(stored, num_classes=5), **row | {"flexi": True, "model": stored, "layout": "big_vision"})
    assert vit_jax.load(name)[0].name == stored


CONTENT = os.urandom(3 * 2**20 + 5)
ARCHIVE = b"PK\5\6" + bytes(18)  # a zip file of nothing
REDIRECTS = {
    "elsewhere": "http://nobody.invalid/x",
    "loop": "loop",
    "bracket": "http://[::1/x",
    "dots": "https://a..b/x",
    "secret": "https://me:secret@host/x",
    "long": f"http://host/{'x' * 1000}",
}
LENGTHS = {"length": "abc", "minus": "-1", "control": "\x1b[31m" + 500 * "9"}


def md5(content):
    return "crc32c=AAAAAA==,md5=" + base64.b64encode(hashlib.md5(content).digest()).decode()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by the file's name, slowly enough for two requests to overlap."""

    def do_GET(self):
        self.server.asked.append(self.path)
        time.sleep(0.02)
        kind = self.path.partition("?")[0].rpartition("/")[2]
        if kind.isdigit():
            self.send_error(int(kind))
            return
        if kind in REDIRECTS:
            self.send_response(302)
            self.send_header("Location", REDIRECTS[kind])
            self.end_headers()
            return
        self.send_response(200)
        content = ARCHIVE if kind == "archive.npz" else CONTENT
        if kind != "unsaid":
            length = len(content) + (7 if kind in ("short", "silent") else 0)
            self.send_header("Content-Length", LENGTHS.get(kind, length))
        if self.server.etag:
            self.send_header("ETag", self.server.etag)
        if kind in ("right", "wrong"):
            self.send_header("x-goog-hash", md5(CONTENT if kind == "right" else b""))
        if kind == "hash":
            self.send_header("x-goog-hash", "md5=abcde")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may have disconnected
            self.wfile.write(content)
        if kind == "silent":
            time.sleep(0.6)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.etag = [], None
        server.address = f"http://127.0.0.1:{server.server_port}/bucket"
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def here(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_downloaded_once(server, tmp_path, capsys):
    path = download.download_file(f"{server.address}/a%2Bb/right", "3.00 MiB")
    assert path == tmp_path / "published" / f"127.0.0.1%3A{server.server_port}" / "bucket" / "a+b" / "right"
    assert path.read_bytes() == CONTENT and here(tmp_path) == ["right"]
    assert "100%" in capsys.readouterr().err
    assert download.download_file(f"{server.address}/a%2Bb/right") == path and len(server.asked) == 1
    path.write_bytes(b"damaged")
    assert download.download_file(f"{server.address}/a%2Bb/right").read_bytes() == b"damaged"
    assert (
        download.download_file(f"{server.address}/a%2Bb/right", "3 MiB").read_bytes() == CONTENT
        and len(server.asked) == 2
    )
    assert download.download_file(f"{server.address}/unsaid").read_bytes() == CONTENT


def test_a_file_that_its_owner_replaces_is_downloaded_again(server, monkeypatch, capsys):
    def contents(kind):
        path = download.download_file(f"{server.address}/{kind}", may_change=True)
        return path.read_bytes(), len(server.asked)

    server.etag = '"1"'
    assert contents("right") == (CONTENT, 1)
    path = download.download_file(f"{server.address}/right")
    path.write_bytes(b"kept")
    assert contents("right") == (b"kept", 2)  # the server has the version that is here
    server.etag = '"2"'
    assert contents("right") == (CONTENT, 3) and contents("right") == (CONTENT, 4)
    server.etag = None  # nothing tells the versions apart
    path.write_bytes(b"kept")
    assert contents("right") == (CONTENT, 5)
    path.with_name("404").write_bytes(b"withdrawn")
    with pytest.raises(UserError, match="was not found"):
        contents("404")
    capsys.readouterr()

    def unreachable(*args, **options):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(download.urllib.request.OpenerDirector, "open", unreachable)
    assert contents("right") == (CONTENT, 6)
    said = f"vit_jax: cannot reach {server.address}/right; the file that was downloaded before is used.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("wrong", None, "^the download is damaged: its MD5 is not"),
        ("hash", None, "^the download is damaged: its MD5 is not"),
        (
            "short",
            None,
            rf"^the download was cut short: {len(CONTENT)} of {len(CONTENT) + 7} bytes arrived; try again\.$",
        ),
        ("right", "3.02 MiB", rf"^the file has {len(CONTENT)} bytes, not the 3\.02 MiB of the catalog"),
        ("unsaid", "2 MiB", rf"^the file has {len(CONTENT)} bytes, not the 2 MiB of the catalog"),
        ("silent", None, r"^the server sent nothing for 0\.3 s: timed out; try again\.$"),
        ("length", None, r"^the server sent the length 'abc', which is not a number; try again later\.$"),
        ("minus", None, r"^the server sent the length '-1'"),
        ("control", None, r"^the server sent the length '\\x1b\[31m9{192}', which"),
        ("page.npz", None, r"^the server's answer is not an \.npz file; open the address in a browser"),
        ("page.npz?download=true", None, r"^the server's answer is not an \.npz file"),
        ("404", None, r"^http://127\S+/404 was not found \(HTTP status 404 Not Found\)\.$"),
        ("403", None, r"^no permission to read http://127\S+/403 \(HTTP status 403 Forbidden\)\.$"),
        ("503", None, r"^cannot read \S+/503 \(HTTP status 503 .*\); try again later, or download it .* as .*/503\.$"),
        ("elsewhere", None, r"^cannot download from http://nobody\.invalid/x; use https://HOST/PATH"),
        (
            "loop",
            None,
            r"^cannot read \S+/loop \(HTTP status 302 .* loop\.\); try again later, or download it .*/loop\.$",
        ),
        ("bracket", None, r"^cannot reach http://127\S+/bracket: Invalid IPv6 URL; download it elsewhere"),
        ("dots", None, r"^cannot download from https://a\.\.b/x; use https://HOST/PATH"),
        (
            "secret",
            None,
            r"^cannot download from this address \(not shown: it may contain a password\); use https://HOST/PATH",
        ),
        ("long", None, r"^cannot download from \S{200}; use https://HOST/PATH"),
    ],
)
def test_failed_downloads_are_reported_and_leave_nothing(server, tmp_path, name, size, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        download.download_file(f"{server.address}/{name}", size, seconds=0.3)
    assert here(tmp_path) == [] and str(raised.value).isprintable()


def test_an_npz_is_a_zip_and_capitals_do_not_matter(server):
    path = catalog.download_entry(f"{server.address}/archive.npz".replace("http", "HTTP"))
    assert path.read_bytes() == ARCHIVE
    assert catalog.download_entry("file://localhost/x") is None


def test_redirects_to_this_machine_come_from_this_machine_only(server):
    def redirected(first):
        request = urllib.request.Request(first)
        return download.SafeRedirects().redirect_request(request, None, 302, "Found", {}, "http://localhost/x")

    assert redirected(f"{server.address}/x").full_url == "http://localhost/x"
    with pytest.raises(UserError, match=r"^cannot download from http://localhost/x; use https"):
        redirected("https://host/x")


def test_without_a_network_the_path_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    path = tmp_path / "published" / f"127.0.0.1%3A{port}" / "x.npz"
    with pytest.raises(UserError) as raised:
        download.download_file(f"http://127.0.0.1:{port}/x.npz")
    reason = "Connection refused; download it elsewhere and save it as"
    assert str(raised.value) == f"cannot reach http://127.0.0.1:{port}/x.npz: {reason} {path}."
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    assert download.download_file(f"http://127.0.0.1:{port}/x.npz") == path


@pytest.mark.parametrize(
    "address",
    [
        "https://host/a/../b",
        "https://host/a/%2e%2E/b",
        "https://host//b",
        "https://host/a/",
        "https://host",
        "https://../b",
        "gs://bucket/../b",
        "http://host/b",
        "https://[host/b",
        "https://a..b/x.npz",
        f"https://{'a' * 64}.org/x.npz",
        "https://host:99999/b",
        "https://host:port/b",
        "https://host/\udc80",
        "ftp://host/b",
        "/etc/passwd",
        "file:///etc/passwd",
    ],
)
def test_addresses_that_are_refused(tmp_path, monkeypatch, address):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(urllib.request, "build_opener", None)
    with pytest.raises(UserError, match=r"^cannot download from \S+; .*\.$"):
        download.download_file(address)


@pytest.mark.parametrize(
    "host", ["https://me:secret@host", "HTTPS://secret@host", "https://me:secret@[host", "ftp://secret@a"]
)
def test_passwords_are_refused_and_not_repeated(host):
    with pytest.raises(
        UserError, match=r"^cannot download from this address \(not shown: it may contain a password\); .*\.$"
    ) as raised:
        download.download_file(f"{host}/x.npz")
    assert "secret" not in str(raised.value)


def test_the_paths_of_downloads():
    place = "storage.googleapis.com/vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz"
    address = "https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"
    assert download.https_address("gs://vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz") == address
    assert str(download.relative_path(address)) == place
    digest = hashlib.sha256(b"d/e").hexdigest()[:16]
    assert str(download.relative_path("https://host/a%2F..%2Fb c?d/e")) == f"host/a%2F..%2Fb%20c%3F{digest}"
    long = [download.relative_path(f"https://host/{'x' * 300}{end}").name for end in ("", "y")]
    assert long[0] != long[1] and all(len(name) < 255 for name in long)


def test_what_signs_an_address_is_neither_shown_nor_kept(server, tmp_path, capfd):
    signed = f"?X-Goog-Signature=SECRET{'x' * 400}"
    path = download.download_file(f"{server.address}/right{signed}")
    assert path.read_bytes() == CONTENT and "SECRET" not in str(path)
    assert download.download_file(f"{server.address}/right{signed}") == path
    assert download.download_file(f"{server.address}/right?other") != path
    for name in ("404", "403", "500"):
        with pytest.raises(UserError) as raised:
            vit_jax.load(f"{server.address}/{name}{signed}")
        assert f"/{name}?..." in str(raised.value) and "SECRET" not in str(raised.value)
    with pytest.raises(
        UserError, match=r"/right\?\.\.\.: what follows '\?' is missing.*; give the whole address again"
    ):
        download.download_file(vit_jax.without_queries(f"{server.address}/right{signed}"))
    assert "SECRET" not in "".join(capfd.readouterr())


def test_several_at_once_do_not_disturb_each_other(server, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: download.download_file(f"{server.address}/right"), range(4)))
    assert len(paths) == 1 and paths.pop().read_bytes() == CONTENT and here(tmp_path) == ["right"]


def test_an_interruption_leaves_nothing_and_leftovers_are_removed(server, tmp_path, monkeypatch):
    old = tmp_path / "published" / f"127.0.0.1%3A{server.server_port}" / "bucket" / "right.1234.partial"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"1")
    os.utime(old, (0, 0))

    class Interrupted(download.tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    monkeypatch.setattr(download, "tqdm", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        download.download_file(f"{server.address}/right")
    assert here(tmp_path) == []


def test_a_disk_that_cannot_be_written_is_reported(server, tmp_path, monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, limit[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write to .*/bucket: File too large; set VIT_JAX_CACHE"):
            download.download_file(f"{server.address}/right")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert here(tmp_path) == []
    (tmp_path / "published" / "file").touch()
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "published" / "file"))
    with pytest.raises(UserError, match=r"cannot write to .*file: File exists"):
        download.download_file(f"{server.address}/right")
