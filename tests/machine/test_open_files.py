"""The limit of open files is raised as far as it may be, and named where it is reached."""

import errno
import io
import os
import resource
import subprocess
import sys
import tarfile

import pytest

from tests.conftest import ROOT
from vit_jax import UserError, reason, user_errors
from vit_jax.checkpoint.integrity import storage_errors
from vit_jax.data.shards import readers
from vit_jax.machine import raise_open_files_limit

FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.fixture
def limits():
    """The limits of this process, which are set back."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def test_the_limit_is_raised_and_never_lowered(limits):
    _, hard = limits
    most = min(hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1000, hard))
    assert raise_open_files_limit() == most == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert raise_open_files_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert hard > readers.MAX_OPEN + readers.MAX_STREAMED


def test_a_sentence_names_the_limit_and_not_another_folder(limits):
    limit = f"this process has as many files open as it may, {limits[0]:,}; raise this limit with ulimit -n"
    with pytest.raises(UserError, match=f"^cannot write x: {limit}$"), user_errors("cannot write x", advice="move it"):
        raise FULL
    assert reason(RuntimeError("open() failed: Too many open files; open /x")) == limit
    with pytest.raises(UserError, match=f"cannot be written: {limit}$"), storage_errors("/x", "written"):
        raise ValueError("NOT_FOUND: Error opening: Too many open files [tensorstore_spec='{...}']")
    assert reason(OSError(errno.ENFILE, os.strerror(errno.ENFILE))) == os.strerror(errno.ENFILE)


@pytest.mark.parametrize("format", readers.FORMATS)
def test_a_shard_that_cannot_be_opened_is_not_called_damaged(format, tmp_path, limits):
    (tmp_path / "shard").touch()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    with pytest.raises(UserError, match="shard: this process has as many files open as it may, 3; raise"):
        readers.open_reader(str(tmp_path / "shard"), str(tmp_path / "shard"), format=format)


RUN = """
import resource, sys
where, workdir, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
if where.startswith("memory://"):
    import fsspec
    fsspec.filesystem("memory").put(workdir.removesuffix("run") + "set", where, recursive=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from configs import smoke
from vit_jax import train
config = smoke.get_config()
config.task.mixup = 0.0
config.batch, config.batch_eval, config.total_steps, config.checkpoint_every, config.eval_every = 80, 8, 20, 10, 20
config.data.source = config.evals.test.source = f"webdataset:{where}"
config.data.split, config.evals.test.split, config.data.num_classes = "train", "train[:8]", 2
train.train(config, workdir)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "count", "limit"), [("", 300, 256), ("memory://b/set", 640, 1024)])
def test_a_run_reads_more_shards_than_may_be_open(where, count, limit, tmp_path):
    (tmp_path / "set").mkdir()
    image = b"P6 1 1 255 abc"
    for number in range(count):
        with tarfile.open(tmp_path / "set" / f"train-{number:05}.tar", "w") as tar:
            for name, content in ((f"{number}.ppm", image), (f"{number}.cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    command = [sys.executable, "-c", RUN, where or str(tmp_path / "set"), str(tmp_path / "run"), str(limit)]
    variables = os.environ | {"VIT_JAX_CACHE": str(tmp_path / "cache"), "VIT_JAX_CACHE_GB": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (tmp_path / "run" / "model.npz").exists()
