"""Cloud TPU: the launcher before a stand-in for gcloud, whose workers run their script for real."""

import itertools
import os
import re
import shutil
import subprocess

import pytest

from launch import tpu_vm
from launch.machines import STEP_NOTES
from launch.queued_resource import make_steps
from tests.faults.preemptions import TAKEN, cloud_tpu
from tests.launch.helpers import HOSTILE, make_run
from tests.launch.play import PROGRAM, Play
from vit_jax import UserError
from vit_jax.planning import parse_topology

pytestmark = pytest.mark.flaky(reruns=1)  # the launcher waits for processes, by the clock

# Workers are folders, in which their commands are run for real.
GCLOUD = r"""
verb=$4
for word; do
  case $word in --command=*) command=${word#--command=} ;; esac
done
case $verb in
  describe)
    state=$(head -n 1 "$PLAY/states")
    [ "$(wc -l < "$PLAY/states")" -eq 1 ] || sed -i 1d "$PLAY/states"
    case $state in
      none) echo "ERROR: NOT_FOUND: Resource was not found" >&2; exit 1 ;;
      lasting) cat "$PLAY/lasting" >&2; exit 1 ;;
      broken) echo "ERROR: the network is down" >&2; exit 1 ;;
      *) echo "$state" ;;
    esac ;;
  create)
    if [ -e "$PLAY/refuse" ]; then cat "$PLAY/refuse" >&2; exit 1; fi ;;
  delete) rm -rf "$PLAY"/worker-* ;;
  *)
    last=$(cat "$PLAY/workers") code=0
    if [ -s "$PLAY/away" ]; then # one worker is not reached, and nothing is said of it
      sed -i 1d "$PLAY/away"
      last=$((last - 1))
    fi
    case "$* " in *"worker.sh follow "*) [ ! -e "$PLAY/cut" ] || exit 255; last=1 ;; esac
    for ((n = 0; n < last; n++)); do
      mkdir -p "$PLAY/worker-$n"
      if [ "$verb" = scp ]; then
        cp "$5" "$PLAY/worker-$n/${6#*:}"
      else
        (cd "$PLAY/worker-$n" && HOME=$PWD bash -c "$command") || code=$?
      fi
    done
    exit "$code" ;;
esac
"""

RUN = ["tpu_vm", "run", "r", "--zone=us-west4-a", "--allow-local-output"]


@pytest.fixture
def play(tmp_path, monkeypatch):
    argv = [*RUN, "--topology=v5e:2x4", "--slices=2"]
    cloud = Play(tmp_path, monkeypatch, tpu_vm.main, argv, GCLOUD)
    cloud.write(states="none\nPROVISIONING\nACTIVE\n", workers="2")
    yield cloud
    (tmp_path / "go").touch()


FIRST = ["describe", "create", "describe", "describe", "status", "pack", "copy", "install", "start", "follow", "status"]


def said(verbs):
    """Steps of a plan as gcloud hears of them."""
    return [{"copy": "scp"}.get(verb, verb) for verb in verbs if verb != "pack"]


def test_a_run_from_nothing_to_nothing(play, capfd):
    assert play.run("--spot", command=("bash", "program.sh", *HOSTILE)) == 0
    calls = play.calls()
    words = {tuple(call[:5]): call for call in calls}
    create = words["compute", "tpus", "queued-resources", "create", "r"]
    assert {"--node-count=2", "--node-prefix=r", "--accelerator-type=v5litepod-8", "--spot"} <= set(create)
    for call in calls:
        assert "--zone=us-west4-a" in call and "--quiet" in call
        if call[3] in ("ssh", "scp"):
            everywhere = "follow" not in call[-3]
            assert ("--worker=all" in call, "--node=all" in call) == (everywhere, everywhere)
    for worker in ("worker-0", "worker-1"):  # all words came through two shells
        heard = (play.folder / f"words-{worker}").read_text().split("\0")[:-1]
        assert heard == [*HOSTILE, "--config.mesh.slice=2"]
    output = capfd.readouterr()
    assert "output of worker-0" in output.out and "output of worker-1" not in output.out
    assert play.starts() == [1, 1]
    assert "launch: r is PROVISIONING\n" in output.err and output.err.endswith("r is deleted\n")
    assert not list(play.folder.glob("worker-*"))


def test_steps_come_in_order_and_code_that_git_does_not_know_stays(play):
    assert play.run("--keep", "--project=p") == 0
    calls = play.calls()
    assert all("--project=p" in call for call in calls)
    assert play.verbs(calls) == said(FIRST)
    code = play.folder / "worker-1" / "r" / "code"
    assert sorted(path.name for path in code.iterdir()) == ["launch", "program.sh"]


def test_the_same_command_again_follows_what_runs(play, capfd):
    def interrupt():
        raise KeyboardInterrupt

    play.write(ends="wait\n", cut="")  # the connection does not last
    play.on_pause = [lambda: None, lambda: None, interrupt]
    with pytest.raises(KeyboardInterrupt):
        play.run()
    assert (
        "the machines and what runs on them stay; they cost until: python -m launch.tpu_vm delete r --zone=us-west4-a\n"
        in capfd.readouterr().err
    )
    assert play.verbs()[-2:] == ["follow", "status"]

    with pytest.raises(UserError, match="another command is running on r;"):
        tpu_vm.main([*RUN, "--topology=v5e:2x4", "--slices=2", "--", "true"], play.sleep)
    assert set(play.verbs()) == {"describe", "status"}

    play.on_pause = [(play.folder / "go").touch, (play.folder / "cut").unlink]
    assert play.run() == 0
    assert set(play.verbs()) == {"describe", "status", "follow", "delete"} and play.starts() == [1, 1]


@pytest.mark.slow
def test_workers_start_nothing_beside_what_runs(play):
    play.write(ends="wait\n", cut="")
    play.on_pause = [lambda: None, lambda: None, lambda: play.begun(0) and play.begun(1) / 0]
    with pytest.raises(ZeroDivisionError):
        play.run("--keep")
    worker = play.folder / "worker-0"
    start = ["bash", "r/code/launch/worker.sh", "start", "mark", "bash", "program.sh"]
    subprocess.run(start, cwd=worker, check=True, env={**os.environ, "HOME": str(worker)}, stdout=subprocess.DEVNULL)
    assert play.starts() == [1, 1] and (worker / "r" / "mark").read_text() != "mark\n"


@pytest.mark.parametrize("code", [1, *(pytest.param(code, marks=pytest.mark.slow) for code in (2, 127))])
def test_what_somebody_should_look_at_is_not_started_again(play, code, capfd):
    play.write(ends=f"{code}\n")
    assert play.run() == code
    output = capfd.readouterr().err
    assert f"launch: r has ended with {code}\n" in output and "delete r --zone=us-west4-a" in output
    assert play.starts() == [1, 1] and "delete" not in play.verbs()


def test_preemption_is_answered_by_another_start_on_the_same_machines(play):
    play.write(ends="42\n0\n")
    assert play.run() == 0
    assert play.starts() == [2, 2] and play.verbs().count("create") == 1


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "pauses"),
    [
        (["0"], 9, 0, []),
        (["139", "134", "137", "0"], 9, 0, [30, 60, 120]),
        (["42", "1"], 9, 1, [30]),
        (["134"] * 8, 7, 134, [30, 60, 120, 240, 480, 600, 600]),
        (["42", "134", "42", "42", "134", "42", "0"], 2, 0, [30, 30, 30, 30, 60, 30]),
    ],
)
def test_restarts_have_an_end_and_pauses_a_limit(ends, restarts, code, pauses, tmp_path):
    assert cloud_tpu(tmp_path / "cloud", ends, restarts) == (code, len(ends), [30, *pauses])  # 30: for machines


def test_faults_are_counted_anew_after_an_hour_of_running(tmp_path):
    """The clock is only asked before and after a run."""
    clock = itertools.count(step=4000).__next__
    assert cloud_tpu(tmp_path / "cloud", ["134", TAKEN] * 3 + ["0"], 2, clock)[:2] == (0, 7)


def test_waiting_for_machines_does_not_count_as_running(tmp_path):
    waited = []
    ends = ["134", TAKEN] * 3 + ["0"]
    ended = cloud_tpu(tmp_path / "cloud", ends, 2, lambda: 4000 * len(waited), on_pause=lambda: waited.append(1))
    assert ended[:2] == (134, 5)


def test_the_log_keeps_what_the_runs_before_have_said(play, capfd):
    play.write(ends="42\n134\n0\n")
    (play.folder / "code" / "program.sh").write_text(f"{PROGRAM.replace('exit', 'seq 5; exit')}")
    assert play.run("--keep") == 0
    log = (play.folder / "worker-1" / "r" / "log").read_text()
    assert re.findall(r"^(?:launch|output).*", re.sub(r"\d{4}-\S+Z", "NOW", log), re.M) == [
        *("launch: start 1, NOW", "output of worker-1, to end with 42"),
        *("launch: start 2, NOW", "output of worker-1, to end with 134"),
        *("launch: start 3, NOW", "output of worker-1, to end with 0"),
    ]
    shown = capfd.readouterr().out  # of each start its own lines
    assert [shown.count(f"to end with {code}\n") for code in (42, 134, 0)] == [1, 1, 1]
    assert shown.count("\n5\n") == shown.count("launch: start") == 3


def test_machines_that_are_taken_away_are_asked_for_again(play, capfd):
    def preempt():
        play.kill(0)
        play.kill(1)
        play.write(states="SUSPENDED\nSUSPENDED\nSUSPENDED\nnone\nACTIVE\n", workers="0")

    play.write(ends="wait\n0\n", cut="")
    back = [lambda: play.write(workers="2")]
    play.on_pause = [lambda: None, lambda: None, preempt, lambda: None, lambda: None, *back]
    assert play.run() == 0
    verbs = play.verbs()
    assert verbs.count("create") == 2 and play.starts() == [2, 2]
    assert verbs.index("delete") < len(verbs) - 1 - verbs[::-1].index("create")
    output = capfd.readouterr().err
    assert "the machines are lost\n" in output and "r is SUSPENDED\n" in output
    assert "ended with 134, preempted; again" in output


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_process_that_vanishes_from_machines_that_stay_is_a_fault(play, restarts):
    def kill():
        play.kill(1)
        (play.folder / "go").touch()

    play.write(ends="wait\n0\n", cut="")
    play.on_pause = [lambda: None, lambda: None, kill]
    assert play.run(f"--restarts={restarts}") == (0 if restarts else 134)
    assert play.starts() == [1 + restarts] * 2


def test_nothing_is_begun_before_all_workers_answer(play):
    play.write(away="\n" * 3)
    assert play.run() == 0
    assert play.verbs()[4:9] == ["status"] * 4 + ["scp"] and play.starts() == [1, 1]


@pytest.mark.parametrize("step", [*(pytest.param(s, marks=pytest.mark.slow) for s in ("scp", "install")), "start"])
def test_a_worker_that_misses_a_step_is_not_left_behind(play, step):
    miss = f'''case "$*" in *"{step} "*) [ -e "$PLAY/missed" ] || echo | tee "$PLAY/away" > "$PLAY/missed" ;; esac'''
    gcloud = play.folder / "bin" / "gcloud"
    gcloud.write_text(gcloud.read_text().replace("verb=$4\n", f"verb=$4\n{miss}\n"))
    play.write(ends="42\n0\n0\n" if step == "start" else "0\n")  # who starts alone gives up
    assert play.run() == 0
    assert (play.folder / "missed").exists() and min(play.starts()) >= 1
    assert step == "start" or (play.starts(), play.verbs().count("start")) == ([1, 1], 1)


def test_what_the_cloud_refuses_is_reported_in_its_words(play, capfd):
    argv = [*RUN, "--topology=v5e:2x4", "--", "x"]
    play.write(refuse="Some noise\nERROR: RESOURCE_EXHAUSTED: no quota for v5e\n", states="none\n")
    with pytest.raises(
        UserError, match="rejected the request to create r: ERROR: RESOURCE_EXHAUSTED: no quota for v5e"
    ):
        tpu_vm.main(argv, play.sleep)
    assert "they cost" not in capfd.readouterr().err
    play.write(states="none\nPROVISIONING\n")  # the cloud has agreed, though gcloud could not tell
    with pytest.raises(UserError, match="rejected the request to create"):
        tpu_vm.main(argv, play.sleep)
    assert "they cost until" in capfd.readouterr().err
    (play.folder / "refuse").unlink()
    play.write(states="none\nFAILED\n")
    with pytest.raises(
        UserError, match=r"cannot provide the machines; to see why: gcloud .* describe r --zone=us-west4-a\."
    ):
        tpu_vm.main(argv, play.sleep)
    play.write(states="broken\n")
    play.pauses.clear()
    capfd.readouterr()
    with pytest.raises(UserError, match="gcloud cannot describe r: ERROR: the network is down"):
        tpu_vm.main(argv, play.sleep)
    told = (
        r"launch: gcloud cannot describe r: ERROR: the network is down; again in 30 s, giving up at about \d\d:\d\d\n"
    )
    assert re.fullmatch(f"({told}){{9}}", capfd.readouterr().err.partition("launch: the machines")[0])
    assert play.pauses == [30] * 9


@pytest.mark.parametrize("verb", ["run", "delete"])
@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        (
            "ERROR: (gcloud) Error parsing [queued_resource].\nFailed to find attribute [project]. It can be set",
            r"gcloud has no project\. Set one: gcloud config set project PROJECT\.$",
        ),
        ("ERROR: (gcloud) The required property [project] is not currently set.", "gcloud has no project"),
        ("ERROR: (gcloud) You do not currently have an active account selected.", "Log in: gcloud auth login"),
        (
            "ERROR: (gcloud) PERMISSION_DENIED: Permission 'tpu.queuedResources.get' denied.\n- '@type': details",
            r"may not describe r: ERROR: .* denied; see gcloud auth list",
        ),
    ],
)
def test_what_lasts_is_told_at_once(play, verb, printed, sentence):
    play.write(states="lasting\n", lasting=f"{printed}\n")
    words = ["--allow-local-output", "--topology=v5e:2x4", "--", "x"] if verb == "run" else []
    with pytest.raises(UserError, match=sentence):
        tpu_vm.main(["tpu_vm", verb, "r", "--zone=us-west4-a", *words], play.sleep)
    assert play.pauses == [] and play.verbs() == ["describe"]


def test_what_has_failed_before_and_a_network_that_comes_back_are_no_obstacle(play):
    play.write(states="broken\nFAILED\nDELETING\nnone\nbroken\nbroken\nACTIVE\n")
    assert play.run() == 0
    verbs = play.verbs()
    assert verbs.index("delete") < verbs.index("create") and verbs.count("create") == 1


def test_code_that_cannot_be_installed_or_packed(play, monkeypatch, capfd):
    argv = [*RUN, "--topology=v5e:2x4", "--slices=2", "--", "x"]
    play.write(**{"no-uv": ""})
    with pytest.raises(UserError, match="cannot install the code on a worker"):
        tpu_vm.main(argv, play.sleep)
    assert "they cost until" in capfd.readouterr().err
    shutil.rmtree(play.folder / "code" / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(play.folder))
    with pytest.raises(UserError, match="cannot pack the code; start in the folder of the code"):
        tpu_vm.main(argv, play.sleep)


def test_delete_is_repeatable(play):
    play.write(states="ACTIVE\nnone\n")
    for verbs in (["describe", "delete"], ["describe", "delete"]):
        tpu_vm.main(["tpu_vm", "delete", "r", "--zone=us-west4-a"], play.sleep)
        calls = play.calls()
        assert [call[3] for call in calls] == verbs
        assert all("--force" in call for call in calls if call[3] == "delete")


def test_one_slice_is_one_node():
    steps = make_steps(make_run("x"), parse_topology("v4:2x2x2"), "z", runtime="mine")
    [create] = steps["create"]
    assert "--node-id=run" in create and not any("--node-count" in word for word in create)
    assert "--runtime-version=mine" in create and "--spot" not in create
    assert set(STEP_NOTES) == set(steps) and list(STEP_NOTES) == list(steps)
