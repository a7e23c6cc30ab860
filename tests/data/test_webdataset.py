"""Tar files: which are read, in what order, with which labels; what is wrong with them is named."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from tests.data.test_array_record import picture
from tests.data.test_formats import FIXTURES, config_of, examples, here, there  # noqa: F401
from tests.data.test_sources import open_source
from vit_jax import UserError, data, describe
from vit_jax.data.images import DecodeError
from vit_jax.data.shards.tar_file import tar_index
from vit_jax.data.sources import SourceConfig, file_pattern, list_splits, open_split
from vit_jax.storage import filesystem

SET = FIXTURES / "webdataset"


def write_tar(path, *samples, **more):
    """Samples are (key, extension -> content)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **more) as tar:
        for key, members in samples:
            for extension, content in members.items():
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return f"webdataset:{path}"


def sample(number, **members):
    return f"{number:03}", {"png": picture(number), **members}


def opened(source, split="train", **fields):
    return open_source(source, split, **{"num_classes": 3, **fields})


def test_braces_stand_for_names():
    assert file_pattern.expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert file_pattern.expand_braces("{a,b}/{9..10}") == ["a/9", "a/10", "b/9", "b/10"]
    assert file_pattern.expand_braces("plain*.tar") == ["plain*.tar"]
    assert file_pattern.read_options("x-{a,b}.tar,label=kind,image=seg.png", ("label", "image")) == (
        "x-{a,b}.tar",
        {"label": "kind", "image": "seg.png"},
    )
    for wrong in ("x,labels=kind", "x,label="):
        with pytest.raises(
            UserError, match=r"labels?=\w* is no option of the data source x; write ,label=NAME after the pattern$"
        ):
            file_pattern.read_options(wrong, ("label",))
    with pytest.raises(UserError, match=r"the option label of the data source x is given twice; give it once"):
        file_pattern.read_options("x,label=kind,label=seg", ("label",))


def test_files_state_their_splits():
    names = {
        "imagenet1k-train-0001.tar": "train",
        "imagenet1k-validation-01.tar": "validation",
        "val/0001.tar": "validation",
        "0001.tar": "train",
        "test-00000-of-00016.parquet": "test",
        "data/unlabeled-00000-of-00016.parquet": "unlabeled",
        "constrain-test.tar": "test",
    }
    found = [file_pattern.FoundFile(name, name, None, None) for name in names]
    splits = {file.name: split for split, files in file_pattern.files_of_splits(found).items() for file in files}
    assert splits == names


def test_a_path_that_exists_is_no_pattern(tmp_path):
    folder = tmp_path / "run[1] {a,b}"
    folder.mkdir()
    for name in ("a[0].tar", "a0.tar", "b{1}.tar", "c.tar"):
        (folder / name).write_bytes(b"")

    def found(pattern):
        return [file.name for file in file_pattern.find_files(str(pattern), ".tar")]

    assert found(folder) == found(folder / "*.tar") == ["a0.tar", "a[0].tar", "b{1}.tar", "c.tar"]
    assert found(folder / "a[0].tar") == ["a[0].tar"] and found(folder / "b{1}.tar") == ["b{1}.tar"]
    assert found(folder / "[bc].tar") == found(folder / "{c,c}.tar") == ["c.tar"]


@pytest.mark.parametrize("source", ["webdataset", "parquet"])
def test_a_link_to_nothing_is_a_sentence(source, tmp_path):
    suffix = {"webdataset": ".tar", "parquet": ".parquet"}[source]
    (tmp_path / f"a{suffix}").symlink_to(tmp_path / "gone")
    (tmp_path / f"b{suffix}").write_bytes(b"")
    with pytest.raises(UserError, match=rf"a{suffix} is a link to a file that is missing; restore that file, or"):
        opened(f"{source}:{tmp_path}")
    assert [file.name for file in file_pattern.find_files(f"{tmp_path}/{{b,b}}{suffix}", suffix)] == [f"b{suffix}"]


@pytest.mark.parametrize("place", ["here", "there"])
def test_patterns_choose_files(place, request):
    folder = f"{request.getfixturevalue(place)}/webdataset"
    levels = {
        f"{folder}/tiny-train-{{02..02}}.tar": range(16, 20),
        f"{folder}/tiny-train-{{02,00}}.tar": [*range(16, 20), *range(8)],
        f"{folder}/tiny-train-*.tar": range(20),
        f"{folder}/tiny-train-01.tar": range(8, 16),
        f"{folder}/": range(20),
        folder: range(20),
    }
    for pattern, expected in levels.items():
        assert examples(opened(f"webdataset:{pattern}")) == [(level, level % 3) for level in expected]
    assert list_splits(SourceConfig(f"webdataset:{folder}")) == ["train", "test"]
    assert len(opened(f"webdataset:{folder}/tiny-*.tar", "test[:50%]")) == 4
    for pattern, sentence in (
        ("tiny-train-{00..04}.tar", r"2 of the 5 files of .* are missing in .*, such as tiny-train-03.tar"),
        ("small-*.tar", "there are no files .*small-"),
        ("nothing", r"there are no files .*nothing/\*.tar"),
    ):
        with pytest.raises(UserError, match=sentence):
            opened(f"webdataset:{folder}/{pattern}")
    with pytest.raises(UserError, match=r"unknown split of .*: 'val'|unknown split of .* 'val'"):
        opened(f"webdataset:{folder}", "val")
    with pytest.raises(UserError, match=r"the number of classes of .* is not known; set --config.data.num_classes, or"):
        opened(f"webdataset:{folder}", num_classes=None)


def test_keys_are_names_and_lengths_need_no_info(here):  # noqa: F811
    config = config_of("webdataset", here)
    stated = open_split(config, "train")
    assert [stated.example_name(row) for row in (0, 4)] == ["cat/000", "dog/004"]
    (here / "webdataset" / "_info.json").unlink()
    tar_index.cache_clear()
    counted = open_split(config, "train")
    assert tar_index.cache_info().misses == 3  # the test split is not opened
    assert counted.fingerprint == stated.fingerprint and counted.shards.runs == stated.shards.runs


@pytest.mark.parametrize("place", ["here", "there"])
def test_a_folder_is_described_once(place, request, capsys, monkeypatch):
    folder = f"{request.getfixturevalue(place)}/webdataset"
    published = json.loads(filesystem.read_bytes(f"{folder}/_info.json"))
    words = ["vit_jax.describe", f"webdataset:{folder}", "--num-classes=3"]
    with pytest.raises(UserError, match=r"_info.json exists already; to count again, remove it and repeat the command"):
        describe.main(words)
    request.getfixturevalue("here")
    if place == "there":
        filesystem.remove_files(folder, ["_info.json"])
        monkeypatch.setenv("VIT_JAX_CACHE_GB", "1e-5")
        with pytest.raises(UserError, match=r"since no _info.json is .* webdataset:mem.*webdataset -"):
            open_split(SourceConfig(f"webdataset:{folder}", num_classes=3), "train", streams=True)
        monkeypatch.setenv("VIT_JAX_CACHE_GB", "1")
    else:
        (request.getfixturevalue("here") / "webdataset" / "_info.json").unlink()
    describe.main(words)
    assert "_info.json: written; 27 images (test 7, train 20), 4 shards" in capsys.readouterr().out
    written = json.loads(filesystem.read_bytes(f"{folder}/_info.json"))
    assert written["splits"] == published["splits"] and written["num_classes"] == 3
    assert opened(f"webdataset:{folder}", num_classes=None).num_classes == 3
    with pytest.raises(UserError, match=r"name the folder instead of .*tiny-\*.tar"):
        describe.main(["vit_jax.describe", f"webdataset:{folder}/tiny-*.tar", "--num-classes=3"])


def test_labels_are_where_they_are_said_to_be(tmp_path):
    row = {"cls": b" 2\n", "json": {"label": 1, "fine": 0, "many": [0, 2]}}
    source = write_tar(tmp_path / "a.tar", sample(0, **row), sample(1, **row))
    assert [opened(source)[0]["label"], opened(f"{source},label=label")[0]["label"]] == [2, 1]
    assert opened(f"{source},label=fine")[1]["label"] == 0
    assert opened(f"{source},label=many", max_labels=3)[1]["label"].tolist() == [0, 2, -1]
    assert len({opened(f"{source}{option}").fingerprint for option in ("", ",label=label", ",label=fine")}) == 3
    only_json = write_tar(tmp_path / "b.tar", sample(0, json={"label": 1}))
    assert opened(only_json)[0]["label"] == 1
    info = {"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [2], "alt_label": "fine"}}}
    (tmp_path / "_info.json").write_text(json.dumps({**info, "num_classes": 2, "class_names": ["x", "y"]}))
    stated = opened(source, num_classes=2)
    assert stated[0]["label"] == 0 and stated.class_names == ("x", "y")


def test_splits_with_their_labels_in_different_fields_are_not_read_as_one(tmp_path):
    splits = {}
    for split, field in (("train", "fine"), ("test", "coarse"), ("val", None)):
        write_tar(tmp_path / f"{split}.tar", sample(0, json={"label": 0, "fine": 1, "coarse": 2}))
        splits[split] = {"filenames": [f"{split}.tar"], "shard_lengths": [1], "alt_label": field}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits, "num_classes": 3}))
    source = f"webdataset:{tmp_path}"
    assert [opened(source, split)[0]["label"] for split in ("train", "test", "val")] == [1, 2, 0]
    with pytest.raises(UserError, match=r"alt_label, fine for train and coarse for test; .* ,label=fine after the"):
        opened(source, "train+test")
    assert [row["label"] for row in opened(f"{source},label=coarse", "train+test")] == [2, 2]


@pytest.mark.parametrize(
    ("members", "options", "sentence"),
    [
        (
            {"txt": b"a cat"},
            "",
            r"record 0 of .*a.tar \(000\) has no label label: its members are png, txt, and it has",
        ),
        (
            {"json": {"x": 1}},
            "",
            r"has no label label: its members are png, json, and its json has the fields x; write the label into",
        ),
        (
            {"cls": b"0", "json": b"{"},
            ",label=x",
            r"has no label x: its members are png, cls, json, and it has",
        ),
        ({"cls": b"cat"}, "", r"the label of record 0 of .*\(000\) must be a number, or a list of numbers, not 'cat'"),
        ({"cls": b"-2"}, "", r"record 0 of .*a.tar has the label -2, but there are 3 classes"),
        ({"json": {"label": 1.5}}, "", r"must be a number, or a list of numbers, not 1.5"),
        ({"json": {"label": [0, 1]}}, "", r"has 2 labels, but one is expected"),
        ({"cls": b"0"}, ",image=seg.png", r"cannot read record 0 of .*: its members png, cls contain no seg.png"),
    ],
)
def test_labels_that_are_missing_or_wrong(tmp_path, members, options, sentence):
    source = write_tar(tmp_path / "a.tar", sample(0, **members))
    with pytest.raises((UserError, DecodeError), match=sentence):
        opened(f"{source}{options}")[0]


def test_a_tar_without_images_is_an_unreadable_image(tmp_path):
    source = write_tar(tmp_path / "a.tar", ("x", {"cls": b"0", "wav": b"sound"}))
    with pytest.raises(DecodeError, match=r"cannot read record 0 of .*a.tar: its members cls, wav contain no image"):
        opened(source)[0]


def test_odd_members(tmp_path):
    """Long names, folders, upper case, names without extension, hidden files, and keys in several folders."""
    long = f"{'deep/' * 40}{'n' * 120}"
    path = tmp_path / "a.tar"
    write_tar(
        path,
        (long, {"PNG": picture(1), "cls": b"1"}),
        ("a/x", {"png": picture(2), "cls": b"2"}),
        ("b/x", {"seg.png": b"mask", "png": picture(0), "cls": b"0"}),
    )
    with tarfile.open(path, "a") as tar:
        for name, kind in (("folder", tarfile.DIRTYPE), ("README", tarfile.REGTYPE), (".hidden", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
    source = opened(f"webdataset:{path}")
    assert examples(source) == [(1, 1), (2, 2), (0, 0)]
    assert [source.example_name(row) for row in range(3)] == [long, "a/x", "b/x"]


def test_damaged_tars_are_named(tmp_path):
    path = tmp_path / "a.tar"
    source = write_tar(path, *(sample(number, cls=b"0") for number in range(4)))
    whole = path.read_bytes()
    for content, sentence in (
        (
            whole[:700],
            r"cannot read .*a.tar: it is truncated, compressed or no tar file \(unexpected end of data\);",
        ),
        (gzip.compress(whole), "it is truncated, compressed or no tar file"),
        (b"", r"it is truncated, compressed or no tar file \(empty file\)"),
        (whole[:2048] + b"x" * 512 + whole[2560:], r"no tar file \(the header at byte 2048 is damaged\)"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            opened(source)
    path.write_bytes(whole)
    (tmp_path / "_info.json").write_text('{"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [5]}}}')
    with pytest.raises(UserError, match=r"a.tar has 4 records, but its data set states 5; copy or pack it again"):
        opened(source)[0]


def test_no_archive_ends_early_without_a_word(tmp_path):
    """Cut at any block, also with zeros in place of what is missing; with a block of zeros; twice in one file."""
    path = tmp_path / "a.tar"
    source = write_tar(path, *(sample(number, cls=b"0") for number in range(8)))
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        headers = [member.offset for member in tar]
    complete = -(-len(whole.rstrip(b"\0")) // 512) * 512 + 1024  # with the two blocks that end an archive
    cut = [whole[:size] for size in range(512, complete, 512)]
    filled = [content.ljust(len(whole) + 20480, b"\0") for content in cut]
    zeroed = [whole[:at] + bytes(512) + whole[at + 512 :] for at in headers[1:]]
    for content in (*cut, *filled, *zeroed, whole + whole, whole + b"more"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*a.tar: .* copy or pack it again"):
            opened(source)
    for content in (whole, whole[:complete], whole.ljust(-(-len(whole) // 10240) * 10240, b"\0")):
        path.write_bytes(content)
        assert len(opened(source)) == 8


@pytest.mark.parametrize("members", [{}, {"cls": b"a word"}, {"json": {}}])
def test_images_to_predict_need_no_labels(tmp_path, members):
    source = write_tar(tmp_path / "test.tar", *(sample(number, **members) for number in range(3)))
    assert [int(np.asarray(image.read())[0, 0, 0]) for image in data.list_source_images(source, "test")] == [0, 1, 2]


def test_an_info_is_compared_with_the_files(tmp_path):
    """Samples it states are the samples found, each file is one of one split, and no file is passed over in silence."""
    for name in "abc":
        source = write_tar(tmp_path / f"{name}.tar", *(sample(number, cls=b"0") for number in range(3)))
    source = f"webdataset:{tmp_path}"

    def opened_with(**splits):
        stated = {
            split: {"filenames": [f"{one}.tar" for one in names], "shard_lengths": [3] * len(names), **more}
            for split, (names, more) in splits.items()
        }
        (tmp_path / "_info.json").write_text(json.dumps({"splits": stated}))
        return opened(source)

    with pytest.raises(UserError, match=r"_info.json: the file a.tar is listed twice"):
        opened_with(train=("aba", {}))
    with pytest.raises(UserError, match=r"_info.json: the file b.tar is listed twice"):
        opened_with(train=("ab", {}), test=("bc", {}))
    with pytest.raises(
        UserError, match=r"_info.json: splits.train states num_samples 7, but its shard_lengths sum to 6"
    ):
        opened_with(train=("ab", {"num_samples": 7}))
    assert len(opened_with(train=("abc", {"num_samples": 9}))) == 9
    assert not opened(source).notes
    partial = opened_with(train=("ab", {"num_samples": 6}))
    assert len(partial) == 6 and partial.notes == (
        f"{tmp_path} has 1 tar files that its _info.json does not name, such as c.tar; they are not read",
    )


def test_members_that_stand_for_others_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    source = write_tar(path, sample(0, cls=b"0"), sample(0, cls=b"1"))
    with pytest.raises(UserError, match=r"two members \S+\.\w+ follow each other, so samples cannot be told apart"):
        opened(source)
    write_tar(path, sample(0, cls=b"0"))
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("001.png")
        link.type, link.linkname = tarfile.LNKTYPE, "000.png"
        tar.addfile(link)
    with pytest.raises(UserError, match=r"001.png is a link to another member; copy or pack it again"):
        opened(source)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("GNUSparseFile.0/x.png")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x.png"}
        info.pax_headers["GNU.sparse.realsize"] = "2000"
        content = b"1\n1000\n8\n".ljust(512, b"\0") + b"8 bytes."
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    with pytest.raises(UserError, match=r"x.png is stored as a sparse file; copy or pack it again"):
        opened(source)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot read .*_info.json: JSONDecodeError"),
        ("[]", "_info.json: it must be an object"),
        ('{"splits": []}', r"_info.json: splits must be an object of objects, not \[\]"),
        ('{"num_classes": 3}', "_info.json: splits is missing; it must be an object of objects"),
        ('{"splits": {"train": {}, "train": {}}}', "ValueError: the key 'train' occurs twice in an object"),
        ('{"splits": {"train": {"filenames": ["a.tar"]}}}', "splits.train.shard_lengths is missing; it must be a l"),
        (
            '{"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [1.5]}}}',
            r"splits.train.shard_lengths must be a list of whole numbers, not \[1.5\]",
        ),
        (
            '{"splits": {"train": {"filenames": ["a.tar", "b.tar"], "shard_lengths": [1, 1]}}}',
            "lacks 1 files that its _info.json names, such as b.tar",
        ),
        (
            '{"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [1, 1]}}}',
            "_info.json: splits.train has 1 filenames, but 2 lengths",
        ),
        ('{"splits": {}, "num_classes": "3"}', "num_classes must be null or a whole number"),
        ('{"splits": {}, "num_classes": 3, "class_names": ["a"]}', "class_names has 1 names, but num_classes is 3"),
    ],
)
def test_a_wrong_info_is_named(tmp_path, text, sentence):
    write_tar(tmp_path / "a.tar", sample(0, cls=b"0"))
    (tmp_path / "_info.json").write_text(text)
    with pytest.raises(UserError, match=sentence):
        opened(f"webdataset:{tmp_path}")
