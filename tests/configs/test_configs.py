"""Configurations: every field is declared, read and explained; mistakes are answered in a sentence."""

import ast
import importlib
import json
import math
import re
import sys

import pytest

from configs import base
from tests.conftest import ROOT
from vit_jax import UserError, data, main, nearest
from vit_jax.config import (
    DURATIONS,
    EVAL_KINDS,
    FIELDS,
    Field,
    check_config,
    check_resumes,
    flatten_config,
    list_places,
    load_config,
    parse_command_line,
    parse_config,
    resolve_config,
    save_config,
)
from vit_jax.config.fields import ADVICE, FOREIGN_NAMES, REMOVED, RENAMED, SYNONYMS
from vit_jax.config.resolve import epochs_field
from vit_jax.config.stored import CONFIG_VERSION
from vit_jax.data.preprocess import parse_pipe
from vit_jax.model import create
from vit_jax.models import variants
from vit_jax.optim import make_schedule
from vit_jax.program import prepare

BASE = base.get_config()
DECLARED = set(flatten_config(BASE))
OF_EVALUATIONS = {f"evals.*.{field}" for kind in EVAL_KINDS for field in base.evaluation(kind)}
KNOWN = {re.sub(r"^evals\.\w+\.", "evals.*.", key) for key in DECLARED} | OF_EVALUATIONS
# Files that recipes share have no get_config.
RUNNABLE = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if "def get_config(" in path.read_text())
CONFIGS = [name for name in RUNNABLE if name != "base"]


def field_of(node: ast.AST) -> str | None:
    """`config.data.source` -> data.source, `config.evals[name].split` -> evals.*.split; None for anything else."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Name):
            start = {"config": [], "eval_config": ["evals", "*"]}.get(node.id)
            return None if start is None else ".".join([*start, *parts])
        if isinstance(node, ast.Attribute) and node.attr == "_config":
            return ".".join(parts)
        if isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
        elif isinstance(node, ast.Subscript):
            parts.insert(0, "*")
        else:
            return None
        node = node.value


def fields_read() -> set[str]:
    """The fields that the package reads from a configuration."""
    methods = set(dir(type(BASE)))
    found = set()
    for path in (ROOT / "vit_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = field_of(node) if isinstance(node, ast.Attribute) else None
            if text:
                text = ".".join(part for part in text.split(".") if part not in methods)
                parent = text.rpartition(".")[0]
                found.add(parent if parent in KNOWN else text)  # a method of the field's value
    return {text for text in found if text and not any(other.startswith(f"{text}.") for other in found)}


def test_every_field_is_read_and_every_read_field_is_declared():
    reads = fields_read()
    # Durations are read by config.count_steps, the fields of the model by create as keywords.
    indirect = {key for key in KNOWN if key.startswith("model.") or key.endswith("_epochs")}
    groups = {key.partition(".")[0] for key in KNOWN if "." in key}
    assert reads - groups - {"*"} <= KNOWN, "read but not declared"
    assert KNOWN - indirect <= reads, "declared but read by nothing"
    for key in DURATIONS:
        assert {key, epochs_field(key)} <= KNOWN
    assert indirect - {epochs_field(key) for key in DURATIONS} == {k for k in KNOWN if k[:6] == "model."}


def test_models_take_every_field_of_the_model_group():
    given = {"width": 64, "depth": 1, "mlp_dim": 64, "num_heads": 2, "dtype": "float32", "attention": "heads_first"}
    given |= {"pre_logits": True, "representation_size": 32}
    fields = {key: given.get(key, value) for key, value in BASE.model.items() if key != "name"}
    model = create("ViT-B/16", **fields)
    of_bit = {"stages": (1, 1), "unit": "post_activation", "border": "lowest", "se_reduction": 16, "root": "attention"}
    for key, value in of_bit.items():
        assert create("BiT-R50x1", **{key: value}).spec != create("BiT-R50x1", **{key: None}).spec
    for key, value in ((key, value) for key, value in fields.items() if key not in of_bit):
        # What a field needs, or excludes.
        needed = {"pre_logits": {"representation_size": 0}, "rotary_grid": {"rotary": "axial"}}
        needed |= {"rotary_theta": {"rotary": "centred"}, "projection": {"pre_logits": False, "representation_size": 0}}
        needed |= {"class_token": {"pooling": "gap"}, "stem_epsilons": {"stem": "resnet"}}
        needed |= {"attention_window": {"attention_pattern": "local"}}
        needed |= {"distilled_head": {"registers": 1, "pre_logits": False, "representation_size": 0}}
        needed |= {name: {"position": "relative"} for name in ("relative_tables", "relative_clip")}
        needed |= {name: {"pooling": "map"} for name in ("map_heads", "map_mlp_dim", "map_prefix")}
        both = fields | needed.get(key, {})
        changed = create("ViT-B/16", **(both | {key: other(key, value)}))
        same = model if key == "pre_logits" else create("ViT-B/16", **both)
        assert changed.spec != same.spec, key


def other(key, value):
    """Another legal value of a field."""
    words = {"pooling": "gap", "position": "none", "dtype": "bfloat16", "attention": "tokens_first"}
    words |= {"mlp": "shard_map", "remat": "full", "final_norm": "pooled", "class_token": "always", "registers": 4}
    words |= {"position_rows": "patches", "rotary": "axial", "rotary_grid": 16, "activation": "gelu"}
    words |= {
        "rotary_theta": 100.0,
        "qkv_bias": "none",
        "projection": 8,
        "map_heads": 4,
        "map_mlp_dim": 8,
        "norm": "rms",
    }
    words |= {"attention_pattern": "strided", "attention_window": 7, "stochastic_depth_schedule": "constant"}
    words |= {"position_place": "shared", "relative_tables": "head", "relative_clip": 2}
    words |= {"stem_epsilons": "timm", "image_mean": (0.4, 0.5, 0.6), "image_std": (0.2, 0.3, 0.4)}
    if key in words:
        return words[key]
    return (not value) if isinstance(value, bool) else value / 2 + 0.25 if isinstance(value, float) else value * 2


def test_every_field_says_what_it_means():
    assert all(len(field.meaning) > 5 and "\n" not in field.meaning for field in FIELDS.values())


def test_configs_are_recipes():
    for name in CONFIGS:
        module = importlib.import_module(f"configs.{name}")
        config = module.get_config()
        check_config(config)
        assert config.is_locked
        assert set(flatten_config(config)) - DECLARED <= {k for k in flatten_config(config) if k.startswith("evals.")}
        assert f"python -m vit_jax.main --config=configs/{name}.py" in module.__doc__
        assert re.search(r"Ours: (\d|not run|no number)|no number", module.__doc__) and "NOT" not in module.__doc__
        create(config.model.name)
        for resolution in {config.resolution, 384 if config.resolution == 224 else config.resolution}:
            shapes = {parse_pipe(one.preprocess, resolution).shape for one in (config.data, *config.evals.values())}
            assert shapes == {(resolution, resolution, 3)}


def test_evaluations_of_a_recipe_share_no_field():
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").get_config()
        evaluations = dict(config.evals.items())
        for changed, evaluation in evaluations.items():
            for field, value in evaluation.items():
                before = {other: one.to_dict() for other, one in evaluations.items()}
                kind = evaluation.get_type(field)
                evaluation[field] = f"{value}!" if kind is str else (*value, 7) if kind is tuple else kind(7.5)
                after = {other: one.to_dict() for other, one in evaluations.items()}
                assert after.pop(changed) != before.pop(changed), (name, changed, field)
                assert after == before, (name, changed, field)


def test_configs_survive_the_disk(tmp_path):
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").get_config()
        with config.unlocked():
            config.evals.frozen = base.evaluation("fewshot")  # which has a field of several numbers
        save_config(config, tmp_path / "config.json")
        again = load_config(tmp_path / "config.json")
        assert flatten_config(again) == flatten_config(config)
        assert check_resumes(again, config, "here") == []


def test_a_config_file_of_another_version(tmp_path):
    path, config = tmp_path / "config.json", base.get_config()
    save_config(config, path)
    written = json.loads(path.read_text())
    assert written["version"] == CONFIG_VERSION
    del written["version"], written["seed"], written["data"]["fast"]  # as if they were younger than the file

    def read(**younger):
        known = {name: Field(name, value, "", since="9") for name, value in younger.items()}
        return parse_config(json.dumps(written).encode(), "config.json", known)

    assert flatten_config(read(**{"seed": 7, "data.fast": True})) == flatten_config(config) | {
        "seed": 7,
        "data.fast": True,
    }
    younger = read(**{"new.group.field": 1, "evals.*.younger": 2})
    assert (younger.new.group.field, younger.evals.test.younger) == (1, 2)
    path.write_text(json.dumps(written | {"version": CONFIG_VERSION + 1}))
    with pytest.raises(UserError, match=r"config\.json was written by a later version"):
        load_config(path)
    with pytest.raises(UserError, match=r"cannot read .*nothing\.json"):
        load_config(tmp_path / "nothing.json")
    for text in ("", "[]", "null", '{"version": "x"}', '{"model": 1}', '{"optim": 1}', path.read_text()[:-20]):
        path.write_text(text)
        with pytest.raises(UserError, match=r"config\.json is damaged"):
            load_config(path)


def test_a_stored_run_with_a_removed_field_goes_on_if_it_had_the_behaviour_that_is_left(tmp_path):
    save_config(base.get_config(), tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    for name, (accepted, since) in REMOVED.items():
        group, key = name.split(".")
        assert name not in FIELDS
        for value in (accepted, "another"):
            text = json.dumps(written | {group: written[group] | {key: value}}).encode()
            if value == accepted:
                assert flatten_config(parse_config(text, "here")) == flatten_config(base.get_config())
                continue
            with pytest.raises(UserError, match=f"^here has {name}=another, but version {since} removed this field"):
                parse_config(text, "here")


def test_an_earlier_name_of_a_field_is_read_from_recipes_files_and_command_lines(tmp_path):
    assert dict(RENAMED) == {"optim.rates": "optim.lr_multipliers"}
    config = base.get_config()
    config.optim.rates = "head/.*=10"  # as a recipe written for version 0.1.0 does
    assert flatten_config(config)["optim.lr_multipliers"] == "head/.*=10"
    config.total_steps = 5
    resolved = resolve_config(config)
    assert resolved.optim.lr_multipliers == "head/.*=10" and "rates" not in resolved.optim
    save_config(resolved, tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["optim"]["lr_multipliers"] == "head/.*=10" and "rates" not in written["optim"]
    written["optim"]["rates"] = written["optim"].pop("lr_multipliers")
    again = parse_config(json.dumps(written).encode(), "config.json")
    assert check_resumes(again, resolved, "here") == [] and "rates" not in again.optim
    for name in ("rates", "lr_multipliers"):
        config, _ = parse(f"--config.optim.{name}=head/.*=10")
        assert config.optim.lr_multipliers == "head/.*=10" and "rates" not in config.optim


def test_a_base_of_an_earlier_version_is_read_too(tmp_path):
    (tmp_path / "old.py").write_text(
        "from configs import base\ndef get_config():\n  config = base.get_config()\n  with config.unlocked():\n"
        "    del config.optim.lr_multipliers, config.optim.rates\n    config.optim.rates = ''\n  return config\n"
    )
    config, _ = parse_command_line(["main.py", f"--config={tmp_path}/old.py", "--config.optim.rates=head/.*=0"])
    assert config.optim.lr_multipliers == "head/.*=0" and "rates" not in config.optim


def parse(*words):
    return parse_command_line(["main.py", f"--config={ROOT}/configs/digits.py", *words])


def test_overrides():
    config, workdir = parse("--config.base_lr=0.5", "--config.total_epochs=3", "--config.evals.test.split=test[:10]")
    assert (config.base_lr, config.total_epochs, config.evals.test.split) == (0.5, 3.0, "test[:10]")
    assert str(workdir) == "workdirs/digits"
    for text, value in (("True", True), ("true", True), ("1", True), ("False", False)):
        assert parse(f"--config.model.scan={text}")[0].model.scan is value
    config, _ = parse("--config.total_steps=7")  # the recipe says total_epochs
    assert (config.total_steps, config.total_epochs, config.warmup_epochs) == (7, None, 5.0)
    assert str(parse("--workdir=/tmp/x")[1]) == "/tmp/x"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config.btch=3"], "unknown config field 'btch'; did you mean 'batch'?"),
        (["--config.model.nmae=3"], "unknown config field 'model.nmae'; did you mean 'model.name'?"),
        (["--config.batch_size=3"], "unknown config field 'batch_size'; did you mean 'batch'?"),
        (["--config.learning_rate=3"], "unknown config field 'learning_rate'; did you mean 'base_lr'?"),
        (["--config.optim.lr=3"], "unknown config field 'optim.lr'; did you mean 'base_lr'?"),
        (["--config.model=ViT-Ti/16"], "unknown config field 'model'; did you mean 'model.name'?"),
        (["--config.data.augment=x"], "unknown config field 'data.augment'; did you mean 'data.preprocess'?"),
        (["--config.rates=head=1"], "unknown config field 'rates'; did you mean 'optim.lr_multipliers'?"),
        (["--config.mixup=0.2"], "unknown config field 'mixup'; did you mean 'task.mixup'?"),
        (["--config.evals.val.split=x"], "unknown config field 'evals.val.split'; did you mean 'evals.test.split'?"),
        (["--config.resume=True"], "unknown config field 'resume'; the same command with the same --workdir continues"),
        (["--batch-size", "3"], "Unknown command line flag 'batch-size'; did you mean --config.batch=VALUE?"),
        (["--lr=3"], "Unknown command line flag 'lr'; did you mean --config.base_lr=VALUE?"),
        (
            ["--output_dir=x"],
            "Unknown command line flag 'output_dir'; the folder of the run is a flag of its own, --work",
        ),
        (["--zzz=x"], "Unknown command line flag 'zzz'; fields are written --config.KEY=VALUE."),
        (["--config.batch=abc"], "--config.batch=abc: the value must be a whole number."),
        (["--config.batch=1.5"], "--config.batch=1.5: the value must be a whole number."),
        (["--config.data.workers=many"], "--config.data.workers=many: the value must be a whole number, or auto."),
        (["--config.base_lr=fast"], "--config.base_lr=fast: the value must be a number."),
        (["--config.model.scan=maybe"], "--config.model.scan=maybe: the value must be true or false."),
        (["--workdri=x"], "workdri"),
        (["--config.batch", "3"], "unexpected '3'"),
    ],
)
def test_mistakes_on_the_command_line(words, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse(*words)


def test_workers_are_a_number_or_a_word_which_may_change_on_resume():
    asked = [parse(f"--config.data.workers={word}")[0] for word in ("0", "16", "auto")]
    assert [config.data.workers for config in asked] == [0, 16, "auto"]
    for config in asked:
        check_config(config)
    assert check_resumes(asked[1], asked[2], "here") == ["data.workers: 16 -> auto"]
    asked[0].data.workers = "all"
    with pytest.raises(UserError, match=r"data\.workers=all must be a whole number, or auto"):
        check_config(asked[0])


def test_a_letter_too_few_leads_to_the_field():
    fields = flatten_config(base.get_config())
    names = {field.rpartition(".")[2] for field in fields}
    for field in fields:
        for place in range(1, len(field) - 1):  # without the last letter it may be one of two
            word = field[:place] + field[place + 1 :]
            if word.rpartition(".")[2] not in names:  # such as border
                assert nearest(word, fields, SYNONYMS) == field, word


def test_the_names_of_other_trainers_lead_to_ours():
    fields = flatten_config(base.get_config())
    assert set(FOREIGN_NAMES) <= set(fields)
    assert len(SYNONYMS) == sum(
        len(names.split()) for names in (FOREIGN_NAMES | ADVICE).values()
    )  # each stands there once
    for name, ours in SYNONYMS.items():
        group = name in base.get_config()
        assert group or name not in {field.rpartition(".")[2] for field in fields}, f"{name} needs no row"
        for word in (name, name.upper(), *([] if group else [f"train.{name}", name.replace("_", "-")])):
            assert nearest(word, fields, SYNONYMS) == ours, word
    words = "batch_size lr learning_rate epochs num_epochs weight_decay wd img_size image_size arch dataset num_workers"
    words += " mixup label_smoothing drop_path output_dir resume per_device_train_batch_size num_train_epochs seed"
    known = SYNONYMS.keys() | {field.rpartition(".")[2] for field in fields}
    assert set(words.split()) <= known


def test_advice_for_foreign_names_names_fields_that_exist():
    fields = flatten_config(base.get_config())
    for advice in ADVICE:
        for named in re.findall(r"--config\.([\w.]+\w)", advice):
            assert named in fields, advice
    with pytest.raises(UserError, match="mlp_ratio'; the hidden channels are given by number"):
        parse(f"--config={ROOT}/configs/digits.py", "--config.model.mlp_ratio=4")


OF_A_VIT = [f"--config.model.{field}=None" for field in ("depth", "mlp_dim", "num_heads")]
OF_A_VIT += ["--config.model.pooling=token", "--config.model.position=learned"]


def test_fields_of_the_other_family_are_unset_as_the_message_says(capsys):
    words = [f"--config={ROOT}/configs/digits.py", "--config.model.name=BiT-R50x1"]
    with pytest.raises(
        UserError, match="BiT-R50x1, a BiT, has no depth, mlp_dim, num_heads, pooling, position"
    ) as said:
        printed(capsys, *words)  # what `main` refuses
    assert re.findall(r"--config\S+\w", str(said.value)) == OF_A_VIT
    fields, _ = printed(capsys, *words, *OF_A_VIT)
    assert fields["model.stages"][2] == "(3, 4, 6, 3)"
    tiny = ["--config.model.name=BiT", "--config.model.stages=1,2", "--config.model.width=32"]
    fields, _ = printed(capsys, words[0], *tiny, *OF_A_VIT)
    assert fields["model.stages"][1:3] == ("command line", "(1, 2)")


@pytest.mark.parametrize(("text", "value"), [("", ()), ("()", ()), ("3,4", (3, 4)), ("(3, 4)", (3, 4)), ("None", None)])
def test_several_numbers_in_one_flag(text, value):
    config, _ = parse_command_line(["", f"--config={ROOT}/configs/smoke.py", f"--config.model.stages={text}"])
    assert config.model.stages == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--config.model.name=ViT-S/5"], "patch"),
        (["--config.resolution=32"], "data.preprocess produces images of 16x16 pixels, but resolution=32"),
        (["--config.model.num_heads=5"], "5"),
        (["--config.model.pooling=gpa"], "unknown pooling 'gpa'; did you mean 'gap'?"),
        (["--config.model.head_std=-1"], "model.head_std=-1.0 must be at least 0."),
        (["--config.evals.test.preprocess=resize(8)|value_range(-1,1)"], "evals.test.preprocess gives images of"),
    ],
)
def test_what_a_run_refuses_is_not_printed_and_refused_before_the_data_are_opened(words, sentence, capsys):
    with pytest.raises(UserError, match=re.escape(sentence)):
        printed(capsys, f"--config={ROOT}/configs/digits.py", *words)
    with pytest.raises(UserError, match=re.escape(sentence)):
        prepare(parse(*words, "--config.data.source=folder:nowhere")[0])


def printed(capsys, *words):
    """What `--print` says: field -> (differs from the base, origin, value, meaning)."""
    main.main(["main.py", *words, "--print"])
    lines = capsys.readouterr().out.splitlines()
    pattern = r"([* ]) (\S+) +(base|recipe|argument|command line|derived) +(.*?) +# (.+)"
    found = [re.fullmatch(pattern, line) for line in lines[1:]]
    return {line[2]: (line[1] == "*", *line.groups()[2:]) for line in found if line}, lines


def test_the_row_of_the_models_name_lists_all_sizes():
    resnets, sizes = re.search(r"\[{(.*)}\+\]ViT-{(.*)}/", FIELDS["model.name"].meaning).groups()
    assert sizes.split(",") == [*variants.SIZES] and set(resnets.split(",")) == {name for name, _ in variants.HYBRIDS}


def test_a_resolved_recipe_is_printed_with_origins_and_meanings(capsys):
    file = f"--config={ROOT}/configs/finetune.py:dataset=cifar10,split=dev"
    fields, lines = printed(capsys, file, "--config.base_lr=0.003", "--config.optim.rates=head/.*=10")
    assert len(fields) == len(lines) - 1 == len(DECLARED)
    assert fields["seed"][:3] == (False, "base", "0") and fields["seed"][3].startswith("seed of the initial weights")
    assert fields["optim.name"][:3] == (True, "recipe", "sgd")
    assert fields["data.source"][:3] == (True, "argument", "tfds:cifar10")
    assert fields["evals.val.split"][1:] == ("argument", "train[98%:]", "split to evaluate on, as TFDS writes it")
    assert fields["base_lr"][1:] == ("command line", "0.003", "the learning rate after the warm-up")
    assert fields["optim.lr_multipliers"][1:3] == ("command line", "head/.*=10")
    assert fields["batch_eval"][:3] == (True, "derived", "512")
    assert fields["model.width"][:3] == (True, "derived", "768") and fields["model.name"][:2] == (False, "base")
    assert fields["grad_norm_clip"][2] == "1.0" and fields["init_from"][2] == "unset"


def test_durations_are_printed_in_steps_where_they_are_known(capsys):
    fields, lines = printed(capsys, f"--config={ROOT}/configs/vit_b16_imagenet2012.py", "--config.batch=1000")
    assert fields["total_epochs"][1:3] == ("recipe", "300.0")
    assert fields["total_steps"][1:3] == ("derived", str(int(300 * 1_281_167 / 1000)))
    fields, lines = printed(capsys, f"--config={ROOT}/configs/digits.py", "--config.total_steps=7")
    assert fields["total_steps"][1:3] == ("command line", "7") and fields["total_epochs"][1:3] == ("derived", "unset")
    assert lines[-1].startswith("data.num_examples is unset")
    with pytest.raises(UserError, match="unknown config field 'btch'"):
        printed(capsys, f"--config={ROOT}/configs/digits.py", "--config.btch=7")


def test_a_recipe_of_the_package_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, workdir = parse_command_line(["main.py", "--config=configs/finetune.py:model=ViT-L/16"])
    assert (config.model.name, workdir) == ("ViT-L/16", "workdirs/finetune")
    with pytest.raises(UserError, match=r"no config file configs/digit\.py; did you mean 'configs/digits\.py'"):
        parse_command_line(["main.py", "--config=configs/digit.py"])
    own = tmp_path / "configs"
    own.mkdir()
    (own / "shared.py").write_text("BATCH = 7\n")
    (own / "digits.py").write_text(
        "from configs import base, shared\ndef get_config():\n"
        "  config = base.get_config()\n  config.batch = shared.BATCH\n  return config\n"
    )
    config, _ = parse_command_line(["main.py", "--config=configs/digits.py"])  # one's own comes first
    assert config.batch == 7 and config.seed == 0
    monkeypatch.delitem(sys.modules, "configs.shared")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("configs/digit.py", "configs/digits.py"),
        ("configs/digits", "configs/digits.py"),
        ("config/digits.py", "configs/digits.py"),
        ("digits.py", "configs/digits.py"),
        ("vit_b16_imagnet21k.py", "configs/vit_b16_imagenet21k.py"),
        (f"{ROOT}/configs/Digits.py:x=1", f"{ROOT}/configs/digits.py"),
        ("configs/nothing-like-it.py", None),
        ("no/such/folder/x.py", None),
    ],
)
def test_a_misspelt_recipe_leads_to_the_nearest(typed, meant, monkeypatch):
    monkeypatch.chdir(ROOT)
    hint = f"; did you mean {meant!r}?" if meant else "."
    with pytest.raises(UserError, match=re.escape(f"there is no config file {typed.partition(':')[0]}{hint}") + "$"):
        parse_command_line(["main.py", f"--config={typed}"])


def test_the_stages_of_cifar5():
    parsed = [
        parse_command_line(["main.py", f"--config={ROOT}/configs/cifar5.py{arg}"])[0] for arg in ("", ":stage=finetune")
    ]
    first, second = map(flatten_config, parsed)
    assert {key for key in first if key.startswith("model.") and first[key] != second[key]} == set()
    assert (first["resolution"], second["resolution"]) == (32, 48)
    assert [flat["data.source"][-3:] for flat in (first, second)] == ["0-4", "5-9"]
    for arg in ("stage=fine", "finetune", "stage="):
        with pytest.raises(UserError, match=rf"'{arg}' is not stage=pretrain\|finetune|{arg} must be"):
            parse_command_line(["main.py", f"--config={ROOT}/configs/cifar5.py:{arg}"])


def test_the_help_names_common_fields_as_they_are_called(capsys):
    main.main(["main.py", "--help"])
    words = re.search(r"^Common fields:.*?\n\n", capsys.readouterr().out, re.M | re.S)[0].replace("(", " ").split()
    named = {word.strip(",.") for word in words} & set(DECLARED)
    assert {"batch", "base_lr", "total_steps", "model.name", "data.source"} <= named


def test_no_config_and_no_such_config(monkeypatch):
    with pytest.raises(UserError, match="--config=FILE"):
        parse_command_line(["main.py"])
    for given in ("configs/digits.py", "configs/finetune.py:dataset=cifar10"):
        with pytest.raises(UserError, match=rf"^'{given}' is not a flag; did you mean --config={given}\?$"):
            parse_command_line(["main.py", given, "--config.batch=8"])
    with pytest.raises(UserError, match="no config file"):
        parse_command_line(["main.py", "--config=configs/nothing.py"])
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the flag loads every file into this one module
    with pytest.raises(UserError, match=r"configs/jft\.py is not a recipe: it defines no get_config\(\)\."):
        parse_command_line(["main.py", f"--config={ROOT}/configs/jft.py"])
    for name in ("digits", "vit_b16_jft"):
        sentence = rf"^the recipe \S*configs/{name}\.py takes no argument, but was given 'aug=medium1'\.$"
        with pytest.raises(UserError, match=sentence):
            parse_command_line(["main.py", f"--config={ROOT}/configs/{name}.py:aug=medium1"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"decay_type": "cosin"}, "unknown decay_type 'cosin'; did you mean 'cosine'"),
        ({"optim.name": "adam"}, "unknown optim.name 'adam'; did you mean 'adamw'"),
        ({"task.loss": "hinge"}, "unknown task.loss 'hinge'; choose from"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"batch_eval": 0}, "batch_eval=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0 and at most 4294967295"),
        ({"data.bad_images": "skip"}, "unknown data.bad_images 'skip'; choose from fail, replace"),
        ({"optim.ema_decay": 1.5}, "optim.ema_decay=1.5 must be at least 0 and at most 0.9999999"),
        ({"optim.ema_decay": 1.0}, "optim.ema_decay=1.0 must be at least 0 and at most 0.9999999"),
        ({"optim.name": "muon", "optim.momentum": 1.0}, "optim.momentum=1.0 must be at least 0 and at most 0.9999999"),
        ({"total_epochs": math.inf}, "total_epochs=inf must be finite"),
        ({"linear_end": math.nan}, "linear_end=nan must be finite"),
        ({"model.norm_epsilon": math.inf}, "model.norm_epsilon=inf must be finite"),
        ({"cooldown_steps": 5}, "decay_type=cosine has no cooldown; set cooldown_steps=0, or decay_type to rsqrt or"),
        ({"checkpoint.best_metric": "test/acuracy"}, "did you mean 'test/accuracy'"),
        ({"checkpoint.best_is": "smallest"}, "unknown checkpoint.best_is 'smallest'; choose from highest, lowest"),
        ({"task.effective_beta": 0.9}, "task.effective_beta=0.9 needs --config.task.class_weights=effective; leave"),
        ({"stop_after": 0}, "stop_after=0 must be at least 1"),
        (
            {"stop_after": 3, "eval_every_epochs": None},
            "stop_after=3 counts evaluations during the training, but",
        ),
        ({"stop_after": 3, "checkpoint.keep_best": 0, "eval_every": 5}, "set --config.checkpoint.keep_best=1 or more"),
        ({"stop_cooldown": 10}, "stop_cooldown and stop_difference need stop_after; set --config.stop_after, or leave"),
        ({"evals": {}}, "declare an evaluation"),
        ({"total_steps": 5}, "set total_steps or total_epochs, not both"),
        ({"total_epochs": None}, "set the length of training with total_steps or total_epochs"),
    ],
)
def test_values_that_make_no_sense(change, sentence):
    config, _ = parse()
    if "evals" in change:
        with config.unlocked():
            del config.evals["test"]
    else:
        config.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_config(config)


def test_every_field_is_declared_once():
    assert set(FIELDS) == KNOWN
    for path in (ROOT / "vit_jax/config").glob("*.py"):
        source = path.read_text() if path.name != "fields.py" else ""
        for name in FIELDS:
            assert "." not in name or f'"{name}"' not in source or name == "checkpoint.best_metric", (path, name)


def test_every_field_that_names_a_place_says_so():
    """Launchers check all of them: a new field of free text has a place, or joins those that have none."""
    texts = {name for name, row in FIELDS.items() if str in (row.optional, type(row.default)) and not row.choices}
    named = {name for name in texts if FIELDS[name].place}
    splits = {"data.split", "evals.*.split", "evals.*.train_split"}
    others = {"wandb", "compiler_options", "data.group_column", "optim.lr_multipliers", "checkpoint.best_metric"}
    pipes = {"data.preprocess", "evals.*.preprocess"}
    assert {name for name in texts - named if not name.startswith("model.")} == splits | others | pipes
    config = base.get_config()
    config.update_from_flattened_dict({name: "x" for name in named if "*" not in name})
    with config.unlocked():
        config.evals.other = base.evaluation("predictions", source="a", labels="b", class_map="c")
        config.evals.words = base.evaluation("zeroshot", texts="d")
    places = {name: row.place for name, row in FIELDS.items() if row.place}
    listed = {name: place for name, _, place in list_places(config)}
    owners = {name: "words" if name == "evals.*.texts" else "other" for name in places}
    assert listed == {name.replace("*", owners[name]): place for name, place in places.items()}


def test_an_evaluation_is_given_another_kind_with_its_fields():
    kind, labels = "--config.evals.test.kind=predictions", "--config.evals.test.labels=real.json"
    before, (config, _) = parse()[0].evals.test, parse(labels, kind)
    expected = base.evaluation(**{**before, "kind": "predictions", "labels": "real.json"})
    assert config.evals.test.to_dict() == expected.to_dict()
    check_config(config)
    with pytest.raises(UserError, match=r"unknown evals\.test\.kind 'prediction'; did you mean 'predictions'"):
        check_config(parse("--config.evals.test.kind=prediction")[0])


def test_optional_fields_may_be_unset_and_others_not():
    config, _ = parse("--config.grad_norm_clip=None", "--config.total_epochs=None", "--config.total_steps=3")
    assert config.grad_norm_clip is None and config.total_epochs is None
    check_config(config)
    with pytest.raises(UserError, match="batch must be set"):
        check_config(parse("--config.batch=None")[0])


def test_every_number_has_a_range():
    numbers = {
        k for k, v in flatten_config(BASE).items() if type(v) in (int, float) or k.endswith(("_steps", "_epochs"))
    }
    free = {"mesh.data", "mesh.fsdp", "linear_end"}
    for name in numbers - free:
        assert name.startswith("model.") or FIELDS[name].minimum in (0, 1), name


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"total_steps": 1, "warmup_steps": 1}, "the learning rate of the only step would be 0, as the warm-up"),
        (
            {"total_steps": 100, "warmup_steps": 51, "cooldown_steps": 50, "decay_type": "constant"},
            "would not reach base_lr: the warm-up of 51 and the cooldown of 50 steps are longer than the 100 steps",
        ),
        ({"total_steps": 2**31}, "total_steps=2147483648 is more than the 2,147,483,647 steps that a run can count"),
        ({"total_epochs": 1e308}, "total_epochs=1e+308 is more than the 2,147,483,647 steps"),
        ({"total_steps": 100, "eval_every_epochs": 1e300}, "eval_every_epochs=1e+300 is more than the 2,147,483,647"),
    ],
)
def test_durations_that_make_no_sense(fields, sentence):
    config = base.get_config()
    config.update_from_flattened_dict(fields | {"data.num_examples": 1_000_000})
    with pytest.raises(UserError, match=re.escape(sentence)):
        resolve_config(config)


def test_a_warm_up_and_a_cooldown_may_fill_the_run():
    config = base.get_config()
    fields = {"total_steps": 100, "warmup_steps": 50, "cooldown_steps": 50, "decay_type": "constant"}
    config.update_from_flattened_dict(fields)
    schedule = make_schedule(resolve_config(config))
    assert schedule(50) == config.base_lr and schedule(100) == 0


def test_unsetting_one_unit_of_a_duration_leaves_the_other():
    config, _ = parse("--config.total_steps=None")
    assert config.total_epochs == 60.0


def test_durations_in_epochs():
    config, _ = parse()
    config.update_from_flattened_dict(
        {"total_epochs": 2.5, "batch": 100, "warmup_epochs": 0.5, "eval_every_epochs": 0.001, "data.num_examples": 1010}
    )
    resolved = resolve_config(config)
    assert (resolved.total_steps, resolved.warmup_steps, resolved.eval_every) == (25, 5, config.log_every)
    config.update_from_flattened_dict({"eval_every_epochs": 20.0})
    assert resolve_config(config).eval_every == 202
    config.update_from_flattened_dict({"eval_every_epochs": None, "eval_every": 2})
    assert resolve_config(config).eval_every == 2  # what is said in steps holds


def test_a_run_whose_evaluation_was_written_otherwise_goes_on():
    old, new = base.get_config(), base.get_config()
    old.evals.test.preprocess = "resize_small(256)|central_crop({resolution})|value_range(-1,1)"
    pipes = [parse_pipe(config.evals.test.preprocess, 224).text for config in (old, new)]
    assert pipes == ["resize_small(256)|central_crop(224)|value_range(-1,1)"] * 2
    [line] = check_resumes(old, new, "here")
    assert line.startswith("evals.test.preprocess: resize_small(256)|")


def test_an_evaluation_that_cannot_run_is_refused_without_data():
    config = base.get_config()
    config.resolution, config.data.num_classes, config.data.num_examples = 384, 10, 90
    assert data.spec(config).image_shape == (384, 384, 3)
    config.evals.test.preprocess = "resize_small(256)|central_crop({resolution})|value_range(-1,1)"
    sentence = (
        "in evals.test: a crop of 384 x 384 pixels does not fit into an image whose shorter side is 256 pixels; put"
    )
    for opens in (data.spec, data.complete_config):
        with pytest.raises(UserError, match=sentence):
            opens(config)


def test_a_resumed_run_must_be_the_same_run():
    old, new = parse()[0], parse()[0]
    new.base_lr, new.log_every = 0.1, 7
    assert check_resumes(old, new, "here") == ["base_lr: 0.002 -> 0.1", "log_every: 50 -> 7"]
    new.data.bad_images, new.data.source = "replace", "folder:moved"  # the data's fingerprint is compared instead
    assert len(check_resumes(old, new, "here")) == 4
    for change in (
        {"model.depth": 3},
        {"seed": 1},
        {"batch": 64},
        {"optim.name": "sgd"},
        {"optim.frozen_blocks": 1},
        {"adapt.rank": 2},
        {"data.split": "train[:5]"},
    ):
        new = parse()[0]
        new.update_from_flattened_dict(change)
        with pytest.raises(
            UserError, match=f"the workdir here contains a run with other settings .*{next(iter(change))}"
        ):
            check_resumes(old, new, "here")
