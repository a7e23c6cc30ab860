"""Configurations of timm and transformers: what they state becomes fields, pipes and names, and is written again."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import vit_jax
from tests.interop.test_safetensors import small
from vit_jax import UserError, convert, data
from vit_jax.interop import archives, published_config, timm_config, transformers_config, transformers_families
from vit_jax.interop.timm_vit import FAMILY as VISION_TRANSFORMER
from vit_jax.model import create, parameter_shapes

# As timm's hub states it for a ViT-B/16 of AugReg, with labels.
TIMM = {
    "architecture": "vit_base_patch16_224",
    "num_classes": 2,
    "global_pool": "token",
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "crop_mode": "center",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    },
    "label_names": ["n01", "n02"],
    "label_descriptions": {"n01": "cat", "n02": "dog"},
}


def timm(**changed):
    return TIMM | {"pretrained_cfg": TIMM["pretrained_cfg"] | changed}


def read_timm(content):
    return timm_config.read_config(content, VISION_TRANSFORMER)


def read_transformers(content, preprocessor, family=transformers_families.VIT):
    return transformers_config.read_config(content, preprocessor, family)


def test_timm_states_heads_preprocessing_and_names():
    stated = read_timm(TIMM)
    assert stated.fields == {
        "num_heads": 12,
        "activation": "gelu",
        "norm_epsilon": 1e-6,
        "pooling": "token",
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
    }
    assert stated.preprocess == "torch_resize(248,'bicubic')|torch_center_crop(224)|value_range(-1,1)"
    assert (stated.resolution, stated.class_names) == ((224, 224), ["cat", "dog"])
    assert read_timm(TIMM | {"label_descriptions": {"n01": "cat"}}).class_names == [
        "n01",
        "n02",
    ]
    assert read_timm({"architecture": "vit_so400m_patch14_siglip_384"}).fields["num_heads"] == 16
    assert read_timm({"architecture": "vit_giant_patch14_dinov2.lvd"}).fields["activation"] == "swiglu"
    assert "num_heads" not in read_timm({"architecture": "vit_of_tomorrow"}).fields
    args = {"num_heads": 3, "act_layer": "gelu_tanh"}
    fields = read_timm(TIMM | {"model_args": args}).fields
    assert (fields["num_heads"], fields["activation"]) == (3, "gelu_tanh")


@pytest.mark.parametrize(
    ("changed", "pipe"),
    [
        ({"crop_pct": 1.0}, "torch_resize(224,'bicubic')|torch_center_crop(224)"),
        ({"crop_pct": 0.875, "interpolation": "bilinear"}, "torch_resize(256,'bilinear')|torch_center_crop(224)"),
        ({"crop_mode": "squash", "crop_pct": 1.0}, "torch_resize((224,224),'bicubic')"),
        ({"crop_mode": "squash"}, "torch_resize((248,248),'bicubic')|torch_center_crop(224)"),
        ({"crop_mode": "border"}, None),
    ],
)
def test_crops_of_timm(changed, pipe):
    wanted = pipe and f"{pipe}|value_range(-1,1)"
    assert read_timm(timm(**changed)).preprocess == wanted


VIT = {"model_type": "vit", "id2label": {"0": "cat", "1": "dog"}, "image_size": 384, "layer_norm_eps": 1e-3}


@pytest.mark.parametrize(
    ("preprocessor", "pipe", "mean"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 384}, "torch_resize((384,384),'bilinear')", 0.5),
        (
            {
                "image_processor_type": "BitImageProcessor",
                "size": {"shortest_edge": 256},
                "crop_size": {"height": 224, "width": 224},
                "resample": 3,
                "image_mean": [0.1, 0.1, 0.1],
            },
            "torch_resize(256,'bicubic')|torch_center_crop(224)",
            0.1,
        ),
        (
            {"feature_extractor_type": "DeiTFeatureExtractor", "size": 256, "crop_size": 224, "resample": 3},
            "torch_resize((256,256),'bicubic')|torch_center_crop(224)",
            0.5,
        ),
        (
            {"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 9}, "do_normalize": False},
            "torch_resize((8,9),'bicubic')",
            0.0,
        ),
        ({"image_processor_type": "ViTImageProcessor", "rescale_factor": 1.0}, None, 0.5),
    ],
)
def test_transformers_states_preprocessing(preprocessor, pipe, mean):
    stated = read_transformers(VIT, preprocessor)
    assert stated.preprocess == (pipe and f"{pipe}|value_range(-1,1)")
    assert stated.fields["image_mean"] == (mean,) * 3 and stated.class_names == ["cat", "dog"]
    assert (stated.fields["norm_epsilon"], stated.fields["num_heads"]) == (1e-3, 12)


def test_defaults_of_transformers():
    stated = read_transformers({"vision_config": {}, "model_type": "siglip"}, {}, transformers_families.SIGLIP)
    assert stated.fields == {"num_heads": 12, "norm_epsilon": 1e-6, "activation": "gelu_tanh"}
    assert read_transformers({"model_type": "vit"}, {}).fields["norm_epsilon"] == 1e-12


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "bert"}, "its model_type is bert, but of the models of transformers .* vit_jax reads only vit"),
        ({"model_type": "vit", "hidden_act": "relu"}, "hidden_act in its configuration must be one of gelu"),
        ({"model_type": "vit", "num_attention_heads": "3"}, "num_attention_heads .* must be a whole number"),
        ({"model_type": "vit", "layer_norm_eps": None}, "layer_norm_eps .* must be a number"),
    ],
)
def test_values_that_a_configuration_must_not_have(content, words):
    with pytest.raises(UserError, match=words):
        read_transformers(content, {})


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
@pytest.mark.parametrize(
    "pipe",
    [
        "torch_resize(18,'bicubic')|torch_center_crop(16)|value_range(-1,1)",
        "torch_resize(17,'bilinear')|torch_center_crop(16)|value_range(-1,1)",
        "torch_resize((16,16),'lanczos')|value_range(-1,1)",
    ],
)
def test_a_folder_states_names_and_preprocessing(pipe, layout, tmp_path):
    model, params = small()
    model = dataclasses.replace(model, preprocess=pipe, class_names=tuple("abcde"))
    vit_jax.save(tmp_path / "x", model, params, layout=layout)
    again, _ = vit_jax.load(tmp_path / "x")
    assert (again.spec, again.preprocess, again.class_names) == (model.spec, pipe, model.class_names)
    if layout == "huggingface":
        stated = json.loads((tmp_path / "x" / "preprocessor_config.json").read_text())
        assert stated["do_rescale"] and stated["do_normalize"]


def test_another_range_of_values_becomes_mean_and_deviation(tmp_path):
    model, params = small()
    model = dataclasses.replace(model, preprocess="resize((16,16))|value_range(0,1)")
    vit_jax.save(tmp_path / "x", model, params, layout="timm")
    cfg = json.loads((tmp_path / "x" / "config.json").read_text())["pretrained_cfg"]
    # The model takes pixel p in [0, 1] to p as if from [-1, 1]: ((p + 1) / 2 - 0.5) / 0.5 = p.
    assert (cfg["mean"], cfg["std"]) == ([0.0] * 3, [1.0] * 3)
    other = create(model.name, **model.fields | {"image_mean": (0.1, 0.2, 0.3)})
    assert published_config.preparation_of(other)[1:] == ([0.1, 0.2, 0.3], [0.5] * 3)


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
@pytest.mark.parametrize("target", ["timm/", "huggingface/", "ours.npz", "alone.safetensors"])
def test_the_loss_of_the_head_is_kept(target, loss, tmp_path, capsys):
    model, params = small()
    layout = target[:-1] if target.endswith("/") else None
    vit_jax.save(tmp_path / target, dataclasses.replace(model, loss=loss), params, layout=layout)
    assert vit_jax.load(tmp_path / target)[0].loss == loss
    assert "assumed" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["google", "big_vision"])
def test_a_loss_that_a_file_cannot_state_is_told(layout, tmp_path, capsys):
    model = create("ViT-mu/4", num_classes=3, resolution=16, loss="sigmoid")
    vit_jax.save(tmp_path / "m.npz", model, model.init(jax.random.key(0), np.zeros((1, 16, 16, 3))))
    convert.main(["convert", f"{tmp_path}/m.npz", f"{tmp_path}/x.npz", f"--layout={layout}"])
    assert f"the {layout} layout does not store that its loss was the sigmoid; keep" in capsys.readouterr().err
    assert vit_jax.load(tmp_path / "x.npz")[0].loss == "softmax"
    assert "softmax assumed (loss= states another)" in capsys.readouterr().err
    assert vit_jax.load(tmp_path / "x.npz", loss="sigmoid")[0].loss == "sigmoid"
    assert "assumed" not in capsys.readouterr().err
    convert.main(["convert", f"{tmp_path}/x.npz", f"{tmp_path}/stated.npz", "--loss=sigmoid"])
    assert vit_jax.load(tmp_path / "stated.npz")[0].loss == "sigmoid"


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
def test_arguments_of_a_pipe_may_be_named(layout, tmp_path):
    model, params = small()
    named = "decode|resize(method='bicubic', size=16, antialias=True)|value_range(high=1, low=-1)"
    vit_jax.save(tmp_path / "x", dataclasses.replace(model, preprocess=named), params, layout=layout)
    assert vit_jax.load(tmp_path / "x")[0].preprocess == "torch_resize((16,16),'bicubic')|value_range(-1,1)"


def test_a_stated_pipe_decides_the_resolution(tmp_path, capsys):
    """DINOv2 is published so: the positions are of 518 pixels, the processor crops 224."""
    model, params = small()
    pipe = "torch_resize(9,'bicubic')|torch_center_crop(8)|value_range(-1,1)"
    vit_jax.save(tmp_path / "x", dataclasses.replace(model, preprocess=pipe), params, layout="huggingface")
    capsys.readouterr()
    stated, _ = vit_jax.load(tmp_path / "x")
    assert (stated.image_size, stated.preprocess) == ((8, 8), pipe)
    told = f"its preprocessing, {pipe}, gives images of 8x8 pixels, 2 tokens, which are taken; its positions are for"
    assert f"{told} 16x16 pixels, 5 tokens\n" in capsys.readouterr().err
    whole, _ = vit_jax.load(tmp_path / "x", resolution="native")
    assert whole.image_size == (16, 16) and whole.spec == model.spec
    assert whole.preprocess == "torch_resize(18,'bicubic')|torch_center_crop(16)|value_range(-1,1)"
    words = f"its preprocessing, {pipe}, becomes {whole.preprocess} for images of 16x16 pixels, 5 tokens\n"
    assert words in capsys.readouterr().err
    assert vit_jax.load(tmp_path / "x", resolution=8)[0].preprocess == pipe
    assert "preprocessing" not in capsys.readouterr().err
    assert vit_jax.load(tmp_path / "x", resolution=(8, 16))[0].preprocess == "resize((8,16))|value_range(-1,1)"
    [image] = np.random.default_rng(0).integers(0, 256, (1, 20, 20, 3)).astype(np.uint8)
    assert data.load_image(image, whole.preprocess).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("pipe", "size", "scaled"),
    [
        ("resize_small(256)|central_crop(224)|value_range(-1,1)", (384, 384), "resize_small(439)|central_crop(384)|"),
        ("decode|resize((24, 32),'area',False)|value_range(-1,1)", (48, 64), "decode|resize((48, 64),'area',False)|"),
        ("central_crop(24)|randaug(2,10)|value_range(-1,1)", (48, 48), "resize((48,48))|"),
        ("value_range(-1,1)", (224, 224), ""),
        ("value_range(-1,1)", (48, 48), "resize((48,48))|"),
    ],
)
def test_sizes_of_a_pipe_are_scaled_in_proportion(pipe, size, scaled):
    assert published_config.scale_pipe(pipe, (224, 224), size) == f"{scaled}value_range(-1,1)"


def test_what_no_library_states_is_refused(tmp_path):
    model, params = small()
    for pipe in ("resize(", "resize", "f.resize(16)|value_range(-1,1)", "resize(open)|value_range(-1,1)"):
        with pytest.raises(UserError, match="the layouts timm and huggingface cannot store the preprocessing"):
            published_config.read_pipe(pipe)
    model = dataclasses.replace(model, preprocess="resize(16)|flip_lr|value_range(-1,1)")
    for layout in ("timm", "huggingface"):
        with pytest.raises(UserError, match="the layouts timm and huggingface cannot store the preprocessing"):
            vit_jax.save(tmp_path / "x", model, params, layout=layout)
    assert not (tmp_path / "x").exists()


class Recorded(dict):
    """A configuration that notes the keys that are asked for."""

    def __init__(self, *content, **more):
        super().__init__(*content, **more)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def test_the_table_of_keys_is_that_of_the_code():
    """What is read is in the table as read, and nothing else is; no key has two rules."""
    source = Recorded(TIMM["pretrained_cfg"] | {"fixed_input_size": True})
    args = Recorded(img_size=224, patch_size=[16, 16], act_layer="gelu", num_heads=3)
    content = Recorded(TIMM | {"pretrained_cfg": source, "model_args": args})
    del content["label_names"]
    read_timm(content)
    asked = [(timm_config.KEYS, content), (timm_config.SOURCE_KEYS, source), (timm_config.ARGUMENT_KEYS, args)]
    labels, vision = Recorded(id2label={"0": "a"}, model_type="siglip"), Recorded(patch_size=16, image_size=224)
    labels["vision_config"] = vision
    processor = Recorded(size={"shortest_edge": 8}, do_center_crop=True)
    read_transformers(labels, processor, transformers_families.SIGLIP)
    plain = Recorded(VIT | {"patch_size": 16, "mlp_ratio": 4})
    read_transformers(plain, {})
    plain.asked |= labels.asked
    asked += [(transformers_config.KEYS, plain), (transformers_config.PROCESSOR_KEYS, processor)]
    flat = timm_config.SOURCE_KEYS.read  # of older files
    for keys, content in asked:
        assert content.asked - {"model_args", "pretrained_cfg"} <= keys.read, keys.file
        assert keys.read - content.asked <= (flat if keys is timm_config.KEYS else set()), keys.file
        rules = [*keys.read, *keys.without_effect, *keys.supported]
        assert len(rules) == len(set(rules)), keys.file


def test_older_files_of_timm_state_the_same():
    flat = {key: value for key, value in TIMM.items() if key != "pretrained_cfg"} | TIMM["pretrained_cfg"]
    assert read_timm(timm(crop_pct=0.9)) == read_timm(flat)


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        (
            "model_args",
            "pool_include_prefix",
            True,
            "model_args states pool_include_prefix True, which vit_jax does not",
        ),
        (
            "model_args",
            "norm_layer",
            "groupnorm",
            "model_args states norm_layer 'groupnorm', .* but only 'layernorm' or",
        ),
        ("model_args", "use_naflex", True, "model_args states use_naflex, which vit_jax does not know; if it does not"),
        ("pretrained_cfg", "label_offset", 1, "pretrained_cfg states label_offset 1"),
        ("timm", "tomorrow", 1, r"config\.json states tomorrow, which vit_jax does not know"),
        ("transformers", "problem_type", "regression", "problem_type in its configuration must be one of"),
        (
            "transformers",
            "num_channels",
            1,
            r"config\.json states num_channels 1, which vit_jax does not compute, but .* 3",
        ),
        ("transformers", "tomorrow", 1, r"config\.json states tomorrow, which vit_jax does not know"),
        ("preprocessor", "do_rescale", False, r"preprocessor_config\.json states do_rescale False"),
        ("preprocessor", "do_pad", True, r"preprocessor_config\.json states do_pad True"),
    ],
)
def test_what_is_stated_is_not_passed_over(file, key, value, words):
    stated = {key: value}
    cases = {
        "model_args": lambda: read_timm(TIMM | {"model_args": stated}),
        "pretrained_cfg": lambda: read_timm(timm(**stated)),
        "timm": lambda: read_timm(TIMM | stated),
        "transformers": lambda: read_transformers(VIT | stated, {}),
        "preprocessor": lambda: read_transformers(VIT, {"size": 8} | stated),
    }
    with pytest.raises(UserError, match=words):
        cases[file]()


@pytest.mark.parametrize("any_size", [{}, {"dynamic_img_size": True}])
def test_the_size_of_the_positions_is_that_of_the_model_args(any_size):
    """2x8 patches are as many as 4x4. Images are of another size only if the model takes any."""
    args = {"img_size": [32, 128], "patch_size": 16, **any_size}
    stated = read_timm(TIMM | {"model_args": args})
    assert stated.resolution == (32, 128)
    assert ("torch_center_crop(224)" in (stated.preprocess or "")) == bool(any_size)
    assert read_timm(TIMM | {"model_args": {"img_size": 64}}).resolution == (64, 64)


HYBRID = {"stem": "resnet", "stages": (), "stem_epsilons": "timm"}
TINY = {"width": 24, "depth": 1, "mlp_dim": 48, "num_heads": 3, "num_classes": 5}


def written(folder, layout, name="ViT/8", **fields):
    """A model of zeros that was saved as a folder, and what its config.json states."""
    model = create(name, **({"resolution": 32} | fields))
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    vit_jax.save(folder / "x", model, params, layout=layout)
    return model, json.loads((folder / "x" / "config.json").read_text())


@pytest.mark.parametrize("stem", [{}, HYBRID])
def test_arguments_for_timm_are_those_of_every_field(stem, tmp_path):
    fields = {"pooling": "gap", "registers": 3, "position_rows": "patches", "qk_norm": True, "layer_scale": 1e-5}
    model, config = written(tmp_path, "timm", **TINY, **fields, **stem)
    args = config["model_args"]
    stated = [args[key] for key in ("global_pool", "class_token", "fc_norm", "reg_tokens", "no_embed_class", "qk_norm")]
    assert stated == ["avg", False, False, 3, True, True]
    assert (args["init_values"], args["pos_embed"], int(args["mlp_ratio"] * 24)) == (1e-5, "learn", 48)
    assert args["patch_size"] == 8 // model.spec.stem.stride == model.spec.stem.kernel_size
    assert vit_jax.load(tmp_path / "x")[0].spec == model.spec


@pytest.mark.parametrize(
    ("layout", "key", "stated"),
    [
        ("timm", "architecture", "deit_base_distilled_patch16_224"),
        ("huggingface", "architectures", ["DeiTForImageClassificationWithTeacher"]),
    ],
)
def test_a_second_head_is_that_of_a_class_of_the_library(layout, key, stated, tmp_path):
    model, config = written(tmp_path, layout, **TINY, activation="gelu", registers=1, distilled_head=True)
    assert config[key] == stated and "reg_tokens" not in config.get("model_args", {})
    again, _ = vit_jax.load(tmp_path / "x")
    assert again.spec == model.spec and again.field("distilled_head")


def test_a_distilled_model_has_the_nearest_architecture_of_timm():
    model = create("ViT-B/16", activation="gelu", registers=1, distilled_head=True, resolution=400)
    assert timm_config.nearest_name(model) == "deit_base_distilled_patch16_384"


@pytest.mark.parametrize(
    ("layout", "name", "fields", "sentence"),
    [
        ("timm", "ViT/8", TINY | HYBRID | {"activation": "swiglu"}, "does not support a hybrid with swiglu"),
        ("timm", "ViT/8", TINY | HYBRID | {"stem_width": 32}, "ResNet stages () and stem_width 32; use --layout=ours"),
        ("timm", "BiT-R50x1", {"stages": (1, 1)}, "timm has no BiT of these sizes; its BiTs are BiT-R50x1,"),
        ("huggingface", "ViT/8", TINY | {"pooling": "token_gap"}, "does not support layer_scale 0 in a dinov2"),
        (
            "huggingface",
            "ViT/8",
            TINY | {"pooling": "token_gap", "layer_scale": 1e-5, "resolution": (16, 32)},
            "images of 16x32 pixels in a dinov2",
        ),
        (
            "huggingface",
            "ViT/8",
            TINY | {"pooling": "map", "num_classes": 0, "resolution": (16, 32)},
            "images of 16x32 pixels in a siglip_vision_model",
        ),
    ],
)
def test_what_a_library_would_not_load_is_refused(layout, name, fields, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        written(tmp_path, layout, name, **fields)
    assert sentence in str(error.value) and not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
@pytest.mark.parametrize("resolution", [(16, 64), (32, 64)])
def test_stated_images_that_are_not_square_are_read_as_stated(resolution, layout, tmp_path):
    """2x8 patches are as many as 4x4; 2x4 and a class token as many as 3x3."""
    patches = {"position_rows": "patches" if layout == "timm" else "all"}
    model, _ = written(
        tmp_path, layout, "ViT/16" if resolution[0] == 32 else "ViT/8", **TINY, **patches, resolution=resolution
    )
    again, _ = vit_jax.load(tmp_path / "x")
    assert again.image_size == resolution and again.spec == model.spec


@pytest.mark.parametrize("model_type", ["vit", "dinov2", "vit_mae"])
def test_a_configuration_of_another_family_is_refused(model_type, tmp_path):
    """It would give the arrays its defaults, such as another epsilon of the norms."""
    written(tmp_path, "huggingface", **TINY, pooling="token_gap", layer_scale=1e-5, registers=2, position_rows="class")
    path = tmp_path / "x" / "config.json"
    content = json.loads(path.read_text()) | {"model_type": model_type}
    del content["layer_norm_eps"]
    path.write_text(json.dumps(content))
    words = f"its model_type is {model_type}, but .* vit_jax reads only dinov2_with_registers"
    with pytest.raises(UserError, match=words):
        vit_jax.load(tmp_path / "x")


def test_dinov2_has_the_mask_token_of_its_class(tmp_path):
    fields = {"pooling": "token_gap", "layer_scale": 1e-5, "registers": 2, "position_rows": "class"}
    written(tmp_path, "huggingface", **TINY, **fields)
    with archives.open_archive(tmp_path / "x" / "model.safetensors") as archive:
        assert archive["dinov2_with_registers.embeddings.mask_token"].shape == (1, 24)
