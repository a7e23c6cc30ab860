"""What a run makes of the times that were measured where it starts."""

import threading

import jax
import pytest

from tests.distributed.test_coordination import everywhere, make_groups
from vit_jax import train
from vit_jax.config import keep_choices, load_config, save_config
from vit_jax.distributed import SINGLE_HOST
from vit_jax.execution import attention_sizes
from vit_jax.kernel_trials import times
from vit_jax.kernel_trials.times import AttentionTime, find_slower, read_times, remember_times, settle_attention
from vit_jax.model import create
from vit_jax.storage import cache as cache_folder

KIND = "cpu"  # of the devices here
FOUND = "the attention heads_first takes 1.50 times as long as the plain form, as vit_jax.measure found here; "


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def resized(config, resolution):
    config.resolution, config.evals.test.preprocess = resolution, f"resize({resolution})|value_range(-1,1)"
    return config


def time_of(config, seconds=1.5, **fields):
    """What is measured of the attention of a configuration, beside one second of the plain form."""
    spec = create(config.model.name, resolution=config.resolution, **fields).spec
    sizes = attention_sizes(spec, 1)
    return AttentionTime(sizes.heads, sizes.head_dim, sizes.tokens, "float32", "heads_first", seconds, 1.0)


def test_times_are_kept_for_a_kind_of_device_and_this_code(tiny, monkeypatch):
    assert read_times(KIND) == []
    remember_times(KIND, [time_of(tiny)])
    assert read_times(KIND) == [time_of(tiny)] and read_times("TPU v4") == []
    monkeypatch.setattr(times.versions, "source_digest", lambda folder: "another")
    assert read_times(KIND) == []


def test_only_the_same_attention_is_slower(tiny):
    tiny.use_measured_times = True
    assert find_slower(tiny) is None
    remember_times(KIND, [time_of(tiny, 1.04)])
    assert find_slower(tiny) is None
    remember_times(KIND, [time_of(tiny)])
    assert find_slower(tiny) == FOUND.partition(",")[0]
    for change in (
        {"model.attention": "heads_first"},
        {"model.dtype": "bfloat16"},
        {"model.num_heads": 1},
        {"model.attention_pattern": "strided"},
        {"model.name": "BiT-R50x1", "model.depth": None, "model.dropout_rate": 0.0, "model.stochastic_depth": 0.0},
    ):
        config = tiny.copy_and_resolve_references()
        config.update_from_flattened_dict(change)
        assert find_slower(config) is None, change
    assert find_slower(resized(tiny, 32)) is None  # 65 tokens instead of 17


def test_a_class_token_more_takes_as_long(tiny):
    resized(tiny, 224).model.name, tiny.use_measured_times = "ViT-mu/16", True
    remember_times(KIND, [time_of(tiny, pooling="gap")])
    assert find_slower(tiny)  # 197 tokens fill as many tiles as 196


def test_times_are_read_only_if_a_field_says_so(tiny, tmp_path, monkeypatch, caplog):
    """A run depends on nothing in the cache; one whose first start chose the plain form keeps it without the field."""
    place = str(tmp_path)
    remember_times(KIND, [time_of(tiny)])
    monkeypatch.setattr(times, "read_times", lambda kind: pytest.fail("the times were read"))
    assert settle_attention(keep_choices(tiny, place), place, SINGLE_HOST) == tiny and not caplog.messages
    stored = tiny.copy_and_resolve_references()
    stored.model.attention = "tokens_first"
    stored.use_measured_times = True
    save_config(stored, tmp_path / "config.json")
    assert settle_attention(keep_choices(tiny, place), place, SINGLE_HOST).model.attention == "tokens_first"


def test_the_first_start_chooses_and_later_measurements_only_advise(tiny, tmp_path, caplog):
    place = str(tmp_path)
    tiny.use_measured_times = True
    remember_times(KIND, [time_of(tiny)])
    first = settle_attention(keep_choices(tiny, place), place, SINGLE_HOST)
    assert (tiny.model.attention, first.model.attention) == ("auto", "tokens_first")
    assert caplog.messages == [f"{FOUND}this run uses the plain form, model.attention=tokens_first."]
    save_config(first, tmp_path / "config.json")
    remember_times(KIND, [])  # the plain form is not slower any more: the run goes on with it
    assert settle_attention(keep_choices(tiny, place), place, SINGLE_HOST).model.attention == "tokens_first"
    assert len(caplog.messages) == 1
    save_config(tiny, tmp_path / "config.json")  # of a run that began before anything was measured
    remember_times(KIND, [time_of(tiny)])
    assert settle_attention(keep_choices(tiny, place), place, SINGLE_HOST).model.attention == "auto"
    advice = "this run keeps its attention; --config.model.attention=tokens_first sets the plain form."
    assert caplog.messages[1:] == [FOUND + advice]
    tiny.model.attention = "heads_first"  # whoever asks for a form gets it
    assert keep_choices(tiny, place).model.attention == "heads_first"


def test_host_0_decides(tiny, tmp_path, monkeypatch, caplog):
    folders = threading.local()
    tiny.use_measured_times = True
    monkeypatch.setattr(cache_folder, "root", lambda: folders.path)

    def settle(group, measured):
        folders.path = tmp_path / str(group.host)
        folders.path.mkdir(exist_ok=True)
        remember_times(KIND, [time_of(tiny)] if group.host == measured else [])
        return settle_attention(tiny, str(tmp_path / "run"), group).model.attention

    assert everywhere([lambda group=group: settle(group, 0) for group in make_groups(3)]) == ["tokens_first"] * 3
    assert everywhere([lambda group=group: settle(group, 1) for group in make_groups(3)]) == ["auto"] * 3
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_a_run_stores_what_it_chose(quick, tmp_path):
    fields = {name: quick.model[name] for name in ("width", "depth", "mlp_dim", "num_heads", "pooling")}
    remember_times(KIND, [time_of(quick, **fields)])
    quick.use_measured_times = True
    quick.total_steps = quick.eval_every = 4
    quick.checkpoint_every = 2
    train.train(quick, tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.json").model.attention == "tokens_first"
    assert jax.local_devices()[0].device_kind == KIND
    quick.use_measured_times = False  # the run keeps its form
    quick.total_steps = 8
    train.train(quick, tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.json").model.attention == "tokens_first"
    assert "model.attention" not in (tmp_path / "run" / "train.log").read_text()
