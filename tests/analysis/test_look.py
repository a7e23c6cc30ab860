"""The page that `vit_jax.look` writes, and its files."""

import base64
import io
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import UserError, look
from vit_jax.analysis import figures, look_page, measure, observe
from vit_jax.model import create
from vit_jax.models import resnet

RANDOM = np.random.default_rng(0)
VOID = {"meta", "img", "source", "br"}
NAME = "a <b> & 'c' \".png"


class Page(HTMLParser):
    """The tags of a page; every tag must be closed by its own, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes), f"{tag} has an attribute twice"
        self.tags.append((tag, dict(attributes)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def check_page(text):
    """Checks that a page stands alone: no address outside it, and a text for every picture."""
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    page = Page(text)
    assert {"html", "head", "meta", "title", "style", "body", "h1"} <= {tag for tag, _ in page.tags}
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"base64,[\w+/=]+", "", text))
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "srcset", "href"):
            if name in attributes:
                kind, content = re.fullmatch(r"data:image/(png|webp|svg\+xml);base64,(.+)", attributes[name]).groups()
                check_picture(kind, base64.b64decode(content, validate=True))
        if tag == "img":
            assert attributes["alt"].strip()
    assert page.all("picture") == [{}] * len(page.all("source"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    return page


def check_picture(kind, content):
    if kind == "svg+xml":
        svg = ET.fromstring(content)
        named = [value for node in svg.iter() for key, value in node.attrib.items() if key.endswith("href")]
        assert all(value.startswith(("#", "data:")) for value in named)
    else:
        assert Image.open(io.BytesIO(content)).format.lower() == kind


def observations(spec, images, saliency=False):
    """Random ones of the right shapes."""
    shape = (images, spec.depth, spec.attention.num_heads)
    height, width = spec.position.image_size
    draw = RANDOM.random
    return observe.Observations(
        count=images,
        pixels=RANDOM.integers(0, 256, (images, height, width, 3)).astype(np.uint8),
        logits=draw((images, spec.head.num_classes), np.float32),
        rollout=draw((images, *spec.grid), np.float32),
        rollout_alone=draw((images, *spec.grid), np.float32),
        heads=draw((*shape, *spec.grid), np.float32).astype(np.float16),
        registers=draw((images, spec.prefix.registers, *spec.grid), np.float32),
        components=draw((images, *spec.grid, 3), np.float32),
        own_components=draw((images, *spec.grid, 3), np.float32),
        component_shares=np.array([0.5, 0.2, 0.1]),
        distance=10 * draw(shape[1:]),
        entropy=draw(shape[1:]),
        similarity=np.eye(spec.depth),
        saliency=draw((images, height, width), np.float32) if saliency else None,
    )


def write(folder, model, images, **how):
    image = jax.ShapeDtypeStruct((1, *model.spec.position.image_size, 3), np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)
    params = jax.tree.map(lambda leaf: RANDOM.normal(size=leaf.shape).astype(np.float32), shapes)
    names = [NAME, *(f"folder/{i}.jpg" for i in range(1, images))]
    seen = observations(model.spec, images, **how)
    return look_page.write_look(folder, "some/model.npz", model, params, names, seen, top=3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    names = [f"<i>class</i> {i}" for i in range(5)]
    model = create("ViT-mu/8", resolution=(32, 48), depth=3, num_classes=5, registers=2, class_names=names)
    return write(tmp_path_factory.mktemp("look"), model, 7, saliency=True)


def test_the_page_stands_alone_and_every_picture_has_a_text(written):
    page = check_page(written[0].read_text())
    # Six pictures, three blocks of heads and the registers of each image; six figures in two themes.
    assert len(page.all("img")) == 7 * (6 + 4) + 6 and len(page.all("source")) == 6
    assert NAME in page.text and "<i>class</i> 3" in page.text and len(page.all("meter")) == 7 * 3
    assert "32 x 48 pixels, 4 x 6 patches of 8 pixels" in page.text
    assert len(page.all("details")) == 7


def test_every_figure_is_a_png_and_an_svg(written):
    folder = written[0].parent
    names = {path.stem for path in written if path.suffix == ".svg"}
    assert names == {
        *("embedding_filters", "position_similarity", "attention_distance", "attention_entropy", "layer_similarity"),
        *("rollout", "rollout_all", "patch_components"),
    }
    assert {path.name for path in written} == {path.name for path in folder.iterdir()}
    for name in names:
        check_picture("png", (folder / f"{name}.png").read_bytes())
        check_picture("svg+xml", (folder / f"{name}.svg").read_bytes())
    measures = np.load(folder / "measures.npz")
    assert measures["distance"].shape == (3, 2) and measures["images"][0] == NAME


@pytest.mark.slow
def test_what_a_model_does_not_have_is_said(tmp_path):
    fields = {"pooling": "gap", "position": "sincos2d", "num_classes": 0, "resolution": 32}
    model = create("R+ViT-mu/16", **fields)
    page = check_page(write(tmp_path / "new" / "folder", model, 1)[0].read_text())
    assert "fixed sines and cosines" in page.text and "no classifier" in page.text and "no class token" in page.text
    assert "the first convolution of the ResNet" in page.text and "1 x 1 patches of 32 pixels" in page.text
    assert "own components" not in page.text and "registers" not in page.text
    assert not page.all("meter") and not (tmp_path / "new" / "folder" / "position_similarity.svg").exists()


def test_labels_stay_inside_the_figure():
    figure = figures.position_similarity(RANDOM.random((14, 14, 14, 14)))
    figure.draw_without_rendering()
    box = figure.axes[0].yaxis.label.get_window_extent()
    assert box.x0 > 0 and box.x1 > box.x0


def test_colours_of_components_are_the_ranks_of_most_patches():
    components = np.stack([np.arange(1000), -np.arange(1000), np.ones(1000)], axis=-1).reshape(10, 10, 10, 3)
    components[0, 0, 0] = 1e6  # one patch far from all others changes no colour but its own
    colours = figures.component_colours(components, 10, 10)
    assert colours.shape == (10, 10, 10, 3) and (colours[0, 0, 0] == 255).all()
    rest = colours.reshape(-1, 3)[20:980].astype(int)
    np.testing.assert_allclose(rest[:, 0], 255 * (np.arange(20, 980) - 10) / 980, atol=1.5)
    np.testing.assert_allclose(rest[:, :2].sum(axis=1), 255, atol=2)
    np.testing.assert_array_equal(figures.component_colours(components[:1], 7, 4).shape, (1, 7, 4, 3))


def test_filters_are_those_that_a_resnet_computes_with():
    kernel = RANDOM.normal(0.1, 0.3, (7, 7, 3, 8)).astype(np.float32)
    for epsilons in resnet.EPSILONS.values():
        found = measure.pixel_filters({"stem": {"root": {"conv": {"kernel": kernel}}}}, is_hybrid=True)
        np.testing.assert_allclose(found, epsilons.standardise(jax.numpy.asarray(kernel)), atol=1e-3)


def test_wrong_numbers_are_answered_before_anything_is_read():
    with pytest.raises(UserError, match="the number of images must be at least 1, not 0"):
        look.look("model.npz", [], "look")
    with pytest.raises(UserError, match="top must be at least 1, not 0"):
        look.look("model.npz", ["photo.png"], "look", top=0)
    with pytest.raises(UserError, match=r"model\.npz"):  # one is enough
        look.look("model.npz", ["photo.png"], "look", top=1)


@pytest.mark.slow
def test_from_a_photograph_to_the_page(tmp_path, capsys):
    model = create("ViT-mu/8", resolution=16, num_classes=3, preprocess="resize(16)|value_range(-1,1)")
    image = jax.ShapeDtypeStruct((1, 16, 16, 3), np.float32)
    vit_jax.save(tmp_path / "model.npz", model, jax.jit(model.init)(jax.random.key(0), image))
    for number in range(2):
        pixels = RANDOM.integers(0, 256, (20, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    look.main(["look", str(tmp_path / "model.npz"), str(tmp_path), f"--out={tmp_path / 'look'}", "--saliency"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(tmp_path / "look" / "index.html")
    assert "saliency" in check_page((tmp_path / "look" / "index.html").read_text()).text
    with pytest.raises(UserError, match="cannot write to"):
        look.look(tmp_path / "model.npz", [tmp_path / "0.png"], tmp_path / "0.png" / "below")


def test_the_table_of_a_head_has_its_best_classes_or_all_numbers():
    sizes = {"width": 8, "depth": 1, "mlp_dim": 8, "num_heads": 1, "resolution": 8}
    numbers = create(
        "ViT-mu/4", **sizes, num_classes=2, loss="l2", target_scale=[(40, 10), (5, 2)], class_names=["age", "<weight>"]
    )
    table = look_page.class_table(numbers, np.array([1.0, -2.0], np.float32), 1)
    assert "50" in table and "&lt;weight&gt;" in table and ">1<" in table
    classes = create("ViT-mu/4", **sizes, num_classes=3, class_names=["a", "b", "c"])
    table = look_page.class_table(classes, np.log(np.array([1, 3, 6], np.float32)), 2)
    assert "60.0%" in table and "30.0%" in table and "10.0%" not in table and table.index(">c<") < table.index(">b<")
