"""Compute Engine: the launcher before a stand-in for gcloud, whose machines run their script for real."""

import re
import shlex
import socket
import sys

import pytest

from launch import clouds, compute_engine, gke, instance_groups, tpu_vm
from launch.instance_groups import InstanceGroups, capacity_flags
from launch.machines import error_line
from launch.queued_resource import make_steps
from tests.conftest import ROOT
from tests.launch.cloud_flags import TABLE, unknown_words
from tests.launch.helpers import HOSTILE, SLICES, make_run
from tests.launch.play import Play
from vit_jax import UserError
from vit_jax.planning import parse_topology

pytestmark = pytest.mark.flaky(reruns=1)  # the launcher waits for processes, by the clock

# The file `machines` has a line for each machine: its group, its name, and the number that its metadata tell.
GCLOUD = r"""
for word; do
  case $word in --command=*) line=${word#--command=} ;; esac
done
case "$2 $3 $4" in
  "instance-groups managed list-instances")
    case $5 in *-slice-[1-9]*) ;; *) [ "$(wc -l < "$PLAY/states")" -eq 1 ] || sed -i 1d "$PLAY/states" ;; esac
    state=$(head -n 1 "$PLAY/states")
    case $state in
      none)
        echo "ERROR: (gcloud.compute.instance-groups.managed.list-instances) Could not fetch resource:" >&2
        echo " - The resource 'projects/p/zones/z/instanceGroupManagers/$5' was not found" >&2
        exit 1 ;;
      empty) echo "[]" ;;
      *)
        read -r status action error <<< "$state"
        [ "$status" != - ] || status=
        [ -z "$error" ] || error=', "lastAttempt": {"errors": {"errors": [{"code": "'$error'", "message": "Sorry."}]}}'
        grep "^$5 " "$PLAY/machines" | while read -r group name number; do
          printf '%s{"instance": "https://c/p/zones/z/instances/%s", ' "${comma:-[}" "$name"
          printf '"instanceStatus": "%s", "currentAction": "%s"%s}' "$status" "$action" "$error"
          comma=", "
        done
        echo "]" ;;
    esac ;;
  *" create "* | *" create")
    if [ -e "$PLAY/refuse" ] && [ "$3" = managed ]; then cat "$PLAY/refuse" >&2; exit 1; fi ;;
  *" delete "*)
    if [ "$3" = managed ]; then rm -rf "$PLAY"/worker-*; else
      echo "ERROR: The resource 'projects/p/$5' was not found" >&2; exit 1
    fi ;;
  ssh* | scp*)
    name=$3
    [ "$2" = ssh ] || name=${4%%:*}
    ! grep -qxF "$name" "$PLAY/away" || exit 255
    case "$* " in *"worker.sh follow "*) [ ! -e "$PLAY/cut" ] || exit 255 ;; esac
    mkdir -p "$PLAY/worker-$name"
    if [ "$2" = scp ]; then cp "$3" "$PLAY/worker-$name/${4#*:}"; exit; fi
    cd "$PLAY/worker-$name" && HOME=$PWD bash -c "$line" ;;
esac
"""
# The metadata server: agent-worker-number is not there, as on the machines that have been described.
CURL = r"""
case "$*" in
  *metadata.google.internal*/worker-id) sed -n "s/.* ${HOME##*/worker-} //p" "$PLAY/machines" | grep . ;;
  *) exit 22 ;;
esac
"""
RUN = ["compute_engine", "run", "r", "--zone=us-central1-c", "--allow-local-output"]


@pytest.fixture
def play(tmp_path, monkeypatch):
    argv = [*RUN, "--topology=tpu7x:2x2x2"]
    cloud = Play(tmp_path, monkeypatch, compute_engine.main, argv, GCLOUD, curl=CURL)
    cloud.write(states="x\nnone\n- CREATING\nRUNNING NONE\n", machines="r r-aaaa 1\nr r-bbbb 0\n", away="")
    yield cloud
    (tmp_path / "go").touch()


FIRST = [
    *("managed list-instances", "managed delete", "instance-templates delete", "resource-policies delete"),
    *("instance-templates create", "resource-policies create", "managed create"),
    *["managed list-instances"] * 2,
    *["status"] * 2,
    *["scp"] * 2,
    *["install"] * 2,
    *["number"] * 2,
    *["start"] * 2,
    "follow",
    *["status"] * 2,
    *("managed list-instances", "managed delete", "instance-templates delete", "resource-policies delete"),
]


def test_a_run_from_nothing_to_nothing(play, capfd):
    assert play.run("--spot", "--project=p", command=("bash", "program.sh", *HOSTILE)) == 0
    calls = play.calls()
    assert play.verbs(calls) == FIRST
    assert all("--project=p" in call and "--quiet" in call for call in calls)
    for machine in ("r-aaaa", "r-bbbb"):  # all words came through two shells
        heard = (play.folder / f"words-worker-{machine}").read_text().split("\0")[:-1]
        assert heard == HOSTILE
    output = capfd.readouterr()
    assert "output of worker-r-bbbb" in output.out and "output of worker-r-aaaa" not in output.out  # bbbb is the first
    assert "launch: r is CREATING\n" in output.err and output.err.endswith("r is deleted\n")


def variables(play, machine):
    """The variables that the command had on a machine."""
    return dict(line.split("=", 1) for line in (play.folder / f"variables-worker-{machine}").read_text().split())


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hosts_find_each_other(play, told):
    """Numbered as the metadata number them, which libtpu reads too, or else by name."""
    if not told:
        play.write(machines="r r-bbbb\nr r-aaaa\n")
    assert play.run("--keep") == 0
    first, second = ("r-bbbb", "r-aaaa") if told else ("r-aaaa", "r-bbbb")
    for number, machine in enumerate((first, second)):
        assert variables(play, machine) == {
            "JAX_COORDINATOR_ADDRESS": f"{first}:8482",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(number),
        }


JOIN = """
import os
from vit_jax.distributed import coordination
group = coordination.join_cluster()
told = group.all_gather("machine", os.path.basename(os.environ["HOME"]))
open(f"{os.environ['PLAY']}/joined-{group.host}", "w").write(" ".join(told))
"""


@pytest.mark.slow
def test_a_run_joins_the_hosts_by_these_variables(play):
    """Only the address is another: the names of the machines are known in their network alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"JAX_COORDINATOR_ADDRESS=localhost:{free.getsockname()[1]}"
    command = ["env", address, "JAX_PLATFORMS=cpu", f"PYTHONPATH={ROOT}", sys.executable, "-c", JOIN]
    assert play.run("--keep", command=command) == 0
    for number in (0, 1):
        assert (play.folder / f"joined-{number}").read_text() == "worker-r-bbbb worker-r-aaaa"


@pytest.mark.slow
def test_slices_are_groups_which_megascale_joins(play):
    lines = [f"r-slice-{n} r-slice-{n}-{end} {number}\n" for n in (0, 1) for end, number in (("aaaa", 1), ("bbbb", 0))]
    play.write(machines="".join(lines))
    assert play.run("--slices=2", "--keep") == 0
    calls = play.calls()
    groups = [call for call in calls if call[:4] == ["compute", "instance-groups", "managed", "create"]]
    assert [call[4] for call in groups] == ["r-slice-0", "r-slice-1"]
    assert all({"--size=2", "--template=r", "--target-size-policy-mode=bulk"} <= set(call) for call in groups)
    for number, machine in enumerate(("r-slice-0-bbbb", "r-slice-0-aaaa", "r-slice-1-bbbb", "r-slice-1-aaaa")):
        assert variables(play, machine) == {
            "JAX_COORDINATOR_ADDRESS": "r-slice-0-bbbb:8482",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": str(number),
            "MEGASCALE_COORDINATOR_ADDRESS": "r-slice-0-bbbb:8080",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(number // 2),
        }
        heard = (play.folder / f"words-worker-{machine}").read_text().split("\0")[:-1]
        assert heard == ["--config.mesh.slice=2"]


def test_ctrl_c_leaves_the_machines_and_the_same_line_follows(play, capfd):
    def interrupt():
        raise KeyboardInterrupt

    play.write(ends="wait\n", cut="")  # the connection does not last
    play.on_pause = [lambda: None, lambda: None, interrupt]
    with pytest.raises(KeyboardInterrupt):
        play.run("--project=p")
    [line] = re.findall(r"stay; they cost until: (.*)\n", capfd.readouterr().err)
    assert line == "python -m launch.compute_engine delete r --zone=us-central1-c --project=p"
    play.calls()
    play.on_pause = [(play.folder / "go").touch, (play.folder / "cut").unlink]
    assert play.run("--project=p", "--keep") == 0
    assert set(play.verbs()) == {"managed list-instances", "status", "number", "follow"} and play.starts() == [1, 1]
    compute_engine.main(shlex.split(line)[2:], play.sleep)
    assert play.verbs() == FIRST[-4:]


def test_a_spot_group_that_was_taken_away_is_deleted_and_created_again(play, capfd):
    def preempt():
        play.kill("r-aaaa")
        play.kill("r-bbbb")
        play.write(
            away="r-aaaa\nr-bbbb\n", states="x\nSTOPPING NONE\nTERMINATED NONE\nTERMINATED NONE\nnone\nRUNNING NONE\n"
        )

    play.write(ends="wait\n0\n", cut="")
    play.on_pause = [lambda: None, lambda: None, preempt, lambda: None, lambda: None, lambda: play.write(away="")]
    assert play.run("--spot", "--restarts=0") == 0
    verbs = play.verbs()
    assert verbs.count("managed create") == 2 and play.starts() == [2, 2]
    output = capfd.readouterr().err
    assert "r is PREEMPTED\n" in output and "ended with 134, preempted; again" in output


@pytest.mark.slow
def test_other_machines_are_waited_for_and_no_preemption_is_counted(play, capfd):
    def restart():
        play.kill("r-aaaa")
        play.kill("r-bbbb")
        play.write(away="r-aaaa\n", states="x\nTERMINATED NONE\nREPAIRING NONE\nSTAGING NONE\nRUNNING NONE\n")

    play.write(ends="wait\n42\n0\n", cut="")
    play.on_pause = [lambda: None, lambda: None, restart, lambda: None, lambda: None, lambda: play.write(away="")]
    assert play.run("--restarts=0") == 0
    assert play.verbs().count("managed create") == 1 and play.starts() == [3, 3]
    assert "r is STAGING\n" in capfd.readouterr().err


@pytest.mark.slow
def test_a_fault_is_counted_and_an_error_ends_the_run(play):
    play.write(ends="134\n134\n")
    assert play.run("--restarts=1") == 134
    assert play.starts() == [2, 2] and "managed delete" not in play.verbs()[7:]
    play.write(ends="\n\n1\n")
    assert play.run() == 1 and play.starts() == [3, 3]


@pytest.mark.slow
def test_machines_whose_time_is_over_are_requested_again(play):
    play.write(states="x\nempty\nnone\nempty\n- CREATING QUOTA_EXCEEDED\nRUNNING NONE\n")
    assert play.run("--flex-start=7d") == 0
    verbs = play.verbs()
    assert verbs[:4] == [
        "managed list-instances",
        "managed delete",
        "instance-templates delete",
        "resource-policies delete",
    ]
    assert verbs.count("managed create") == 1


@pytest.mark.slow
def test_what_the_cloud_says_is_told(play, capfd):
    play.write(states="x\nnone\n- CREATING QUOTA_EXCEEDED\nRUNNING NONE\n")
    assert play.run() == 0
    assert "launch: r is CREATING: QUOTA_EXCEEDED Sorry.\n" in capfd.readouterr().err
    play.write(
        refuse="ERROR: (gcloud.compute) Could not fetch resource:\n - Quota 'TPUS' exceeded.\n", states="x\nnone\n"
    )
    with pytest.raises(
        UserError, match=r"rejected the request to create r: ERROR: .* resource: Quota 'TPUS' exceeded\.$"
    ):
        compute_engine.main([*RUN, "--topology=tpu7x:2x2x2", "--", "x"], play.sleep)
    assert "they cost" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("main", "options", "sentence"),
    [
        (compute_engine, ["--topology=v4:2x2x1"], r"no machines with v4; use launch\.tpu_vm, with the same words\."),
        (compute_engine, ["--topology=v5e:4x4"], r"no machines with v5e; use launch\.tpu_vm, with the same words\."),
        (tpu_vm, ["--topology=tpu7x:2x2x1"], r"does not have tpu7x; use launch\.compute_engine, with the same words\."),
        (compute_engine, ["--topology=v6e:4x4", "--spot", "--flex-start=1d"], "use only one of --spot"),
        (compute_engine, ["--topology=v6e:4x4", "--flex-start=soon"], r"write for example --flex-start=7d\."),
    ],
)
def test_what_a_cloud_does_not_have_is_refused(main, options, sentence):
    with pytest.raises(UserError, match=sentence):
        main.main([*RUN, *options, "--dry-run", "--", "x"])


@pytest.mark.parametrize(
    ("text", "machine", "hosts"),
    [
        ("v5p:2x2x1", "ct5p-hightpu-4t", 1),
        ("v5p:2x2x2", "ct5p-hightpu-4t", 2),
        ("v6e:1x1", "ct6e-standard-1t", 1),
        ("v6e:2x2", "ct6e-standard-4t", 1),
        ("v6e:2x4", "ct6e-standard-8t", 1),
        ("v6e:4x4", "ct6e-standard-4t", 4),
        ("tpu7x:2x2x1", "tpu7x-standard-4t", 1),
        ("tpu7x:4x4x4", "tpu7x-standard-4t", 16),
    ],
)
def test_machine_types(text, machine, hosts):
    """As docs.cloud.google.com/compute/docs/tpus/tpu-machines lists them."""
    tpu = parse_topology(text)
    assert (clouds.machine_type(tpu), tpu.hosts) == (machine, hosts)


def all_commands():
    """The commands of all launchers, for slices of all kinds and all ways to get machines."""
    capacities = [capacity_flags(*given) for given in [(True, None, None), (False, "a", None), (False, None, "7d")]]
    for text in [*(text for text, *_ in SLICES), "tpu7x:2x2x1", "tpu7x:4x4x4"]:
        tpu = parse_topology(text)
        for slices in (1, 2):
            job = make_run("x", slices=slices)
            yield from gke.node_pool_commands(job, tpu, spot=slices == 2)
            if clouds.CHIP_NAMES[tpu.kind].accelerator:
                steps = make_steps(job, tpu, "z", "p", spot=True)
                yield from (argv for commands in steps.values() for argv in commands)
            for capacity in [[], *capacities] if clouds.CHIP_NAMES[tpu.kind].image else []:
                groups = InstanceGroups(job, tpu, "us-east5-a", "p", capacity, None, lambda seconds: None)
                yield from (argv for step in instance_groups.NOTES for argv in groups.commands(step))


def test_no_command_has_a_flag_that_no_reference_page_lists():
    commands = [argv for argv in all_commands() if argv[0] == "gcloud"]
    assert {word for argv in commands for word in unknown_words(argv)} == set()
    asked = {
        next(name for name in TABLE if " ".join(argv).startswith(f"{name} ") and name != "gcloud") for argv in commands
    }
    assert asked == {name for name in TABLE if name.startswith("gcloud ")}
    assert all(row["page"].startswith("https://") for row in TABLE.values())
    for made_up in (["--tpu-size=4"], ["--provisioning-model=CHEAP"], ["--target-size-policy-mode"]):
        assert unknown_words(["gcloud", "compute", "instance-templates", "create", "r", *made_up]) == made_up


def test_a_flag_that_gcloud_does_not_have_is_refused(play, capfd):
    flags = (play.folder / "flags").read_text()
    play.write(flags=flags.replace("managed create --target-size-policy-mode\n", "managed create\n"), states="none\n")
    with pytest.raises(UserError, match=r"gcloud is too old to create r; update it: gcloud components update\.$"):
        compute_engine.main([*RUN, "--topology=tpu7x:2x2x2", "--", "x"], play.sleep)
    assert "they cost" not in capfd.readouterr().err


def test_errors_of_gcloud_are_one_line():
    assert error_line("x\nERROR: (a) Could not:\n - One.\n - Two.\ny\n") == "ERROR: (a) Could not: One. Two."
    assert error_line("ERROR: plain\nnoise\n") == "ERROR: plain"
    assert error_line("") == "it does not say why"
