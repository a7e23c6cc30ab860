"""Slices by name, and which links of theirs a collective uses."""

import pytest

from vit_jax import UserError
from vit_jax.planning import chips, collectives


def test_slices_by_name():
    assert [chips.parse_topology(text).chips for text in ("v5e:16x16", "v4:2x2x4", "v6e:1x1")] == [256, 16, 1]
    for text, wraps in {"v5e:16x16": (1, 1), "v5e:8x16": (0, 1), "v5e:8x8": (0, 0), "v4:2x2x4": (0, 0, 0)}.items():
        assert chips.parse_topology(text).wraps == wraps
    assert chips.parse_topology("v4:4x4x8").wraps == (True, True, True)
    assert [chips.parse_topology(text).link_bandwidth for text in ("v4:2x2x1", "v5e:2x4")] == [50e9, 50e9]
    assert str(chips.parse_topology("v5p:2x2x2")) == "v5p:2x2x2"
    two_devices_a_chip = chips.parse_topology("tpu7x:2x2x2")
    assert (two_devices_a_chip.chips, two_devices_a_chip.devices, two_devices_a_chip.hosts) == (8, 16, 2)
    assert two_devices_a_chip.link_bandwidth == 100e9
    for text in ("v5e", "v5e:4x4x4", "v4:4x4", "v5e:0x4", "v5e:4x", "v5e:4x4 "):
        with pytest.raises(UserError, match="dimensions; write --topology=v"):
            chips.parse_topology(text)
    with pytest.raises(UserError, match="did you mean 'v5e'"):
        chips.parse_topology("v5ee:4x4")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("v5e-8", r"write the topology 'v5e-8' \(8 chips\) as a shape: --topology=v5e:2x4\.$"),
        ("v5litepod-256", "--topology=v5e:16x16"),
        ("v6e-1", "--topology=v6e:1x1"),
        ("v5e:8", "--topology=v5e:2x4"),
        ("TPU-v5-lite-4", "--topology=v5e:2x2"),
        ("v4-32", r"\(32 cores, 16 chips\) as a shape: --topology=v4:2x2x4"),
        ("v5p-8", "--topology=v5p:2x2x1"),
        ("v5e-2x4", "'v5e-2x4' as a shape: --topology=v5e:2x4"),
        ("v5e-5", "no cloud offers a v5e slice of 5 chips; choose from 1x1, 2x2"),
        ("v4-4", "no cloud offers a v4 slice of 4 cores, 2 chips; choose from 2x2x1"),
        ("tpu7x-8", r"\(8 cores, 4 chips\) as a shape: --topology=tpu7x:2x2x1"),
        ("ironwood-128", "--topology=tpu7x:4x4x4"),
        ("v7x-16", "--topology=tpu7x:2x2x2"),
        ("v3-8", "unknown TPU 'v3-8'"),
    ],
)
def test_names_that_clouds_give_lead_to_ours(text, sentence):
    with pytest.raises(UserError, match=sentence):
        chips.parse_topology(text)


def line(*steps):
    """Places along the second axis of a flat slice."""
    return [(0, 0, step) for step in steps]


SQUARE = [(0, x, y) for x in range(4) for y in range(4)]


@pytest.mark.parametrize(
    ("kind", "groups", "places", "wraps", "shape", "expected"),
    [
        # Of 80 bytes in a group of n a chip sends (n - 1) / n, of an all-reduce twice that; over so many links.
        ("all-reduce", [], SQUARE, (False, False), (4, 4), 2 * 80 * 15 / 16 / 2),
        ("all-reduce", [], SQUARE, (True, True), (4, 4), 2 * 80 * 15 / 16 / 4),
        ("all-gather", [], SQUARE, (False, True), (4, 4), 80 * 15 / 16 / 3),
        (
            "all-reduce",
            [(0, 1), (2, 3)],
            line(0, 1, 2, 3),
            (False, False),
            (1, 4),
            2 * 80 / 2 / 1,
        ),  # one link of a chip
        ("reduce-scatter", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80 / 2 * 2),  # two share it
        ("all-gather", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 / 2),  # there is a way round, too
        ("all-gather", [(0, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 / 2),  # neighbours where it closes
        ("all-gather", [(0, 1, 2, 3)], line(0, 1, 2, 3), (False, True), (1, 4), 80 * 3 / 4 / 2),
        ("all-gather", [range(i, i + 4) for i in range(0, 16, 4)], SQUARE, (False, False), (4, 4), 80 * 3 / 4),
        ("all-gather", [(0, 1, 4, 5), (2, 3, 6, 7)], SQUARE, (False, False), (4, 4), 80 * 3 / 4 / 2),
        ("all-gather", [(0, 1, 2)], [(0, 0, 0), (0, 0, 1), (0, 1, 1)], (False, False), (2, 2), 80 * 2 / 3),  # no box
        # Two devices of each chip: one crossing of a link for both, unless they belong to two groups.
        ("all-reduce", [], [*SQUARE, *SQUARE], (False, False), (4, 4), 2 * 80 * 15 / 16 / 2),
        ("all-gather", [(0, 2), (1, 3)], line(0, 0, 1, 1), (False, False), (1, 2), 80 / 2 * 2),
        ("all-reduce", [(0, 1), (2, 3)], line(0, 0, 1, 1), (False, False), (1, 2), 2 * 80 / 2 / 6),  # inside the chips
        ("all-to-all", [(0, 1, 2, 3)], line(0, 0, 1, 1), (False, False), (1, 2), 80 / 4 * 4),
        ("all-reduce", [(0,), (1,)], line(0, 1), (False, False), (1, 2), 0),
        ("all-reduce", [(0, 1)], [(0, 0, 0), (1, 0, 0)], (False, False), (1, 1), 0),  # of two slices
        ("collective-permute", [(0, 1), (1, 2), (2, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80),
        ("collective-permute", [(0, 1), (1, 2), (2, 3), (3, 0)], line(0, 1, 2, 3), (False, True), (1, 4), 80),
        ("collective-permute", [(0, 2), (1, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 2 * 80),
        (
            "collective-permute",
            [(0, 1), (2, 3)],
            [(0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 1, 0)],
            (False,) * 2,
            (2, 2),
            80,
        ),
        ("collective-permute", [(1, 1)], line(0, 1), (False, False), (1, 2), 0),
        ("all-to-all", [(0, 1, 2, 3)], line(0, 1, 2, 3), (False, False), (1, 4), 80 / 4 * 4),  # four cross the middle
    ],
)
def test_a_collective_uses_the_links_that_its_group_has(kind, groups, places, wraps, shape, expected):
    assert collectives.link_bytes(kind, 80, groups, places, wraps, shape) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["v5e:4x2", "v6e:2x8", "v5e:32x32", "v4:1x1x1", "v5p:2x1x1"])
def test_slices_that_no_cloud_offers(text):
    with pytest.raises(UserError, match="no cloud offers"):
        chips.parse_topology(text)
