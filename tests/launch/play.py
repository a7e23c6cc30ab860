"""Clouds that keep to a script: a stand-in for gcloud, whose workers run their script for real."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.conftest import ROOT
from tests.launch.cloud_flags import CHECK, flag_lines
from tests.launch.helpers import install_programs

# Keeps what gcloud is asked for, and refuses flags that it does not have.
ASKED = (
    """
printf '%s\\0' "$@" >> "$PLAY/calls"; echo >> "$PLAY/calls"
"""
    + CHECK
)
# What gcloud is asked to do: a verb, or a kind of thing and a verb.
VERB = re.compile(r"queued-resources (\w+)|(managed [\w-]+|instance-templates \w+|resource-policies \w+)|compute (scp)")
UV = 'mkdir -p venv/bin; touch venv/bin/python; chmod +x venv/bin/python; [ ! -e "$PLAY/no-uv" ]'

# What is run: keeps its words, and ends as is written for this time of its being started.
PROGRAM = r"""
name=$(basename "$HOME")
echo >> "$PLAY/started-$name"
echo $$ > "$PLAY/pid-$name"
printf '%s\0' "$@" > "$PLAY/words-$name"
env | grep -E '^(JAX_(COORD|NUM|PROC)|MEGASCALE)' | sort > "$PLAY/variables-$name"
end=$(sed -n "$(wc -l < "$PLAY/started-$name")p" "$PLAY/ends")
echo "output of $name, to end with $end"
if [ "$end" = wait ]; then
  until [ -e "$PLAY/go" ]; do sleep 0.02; done
  end=0
fi
exit "$end"
"""


class Play:
    """A cloud that keeps to a script.

    Attributes:
        folder: has the workers, and the files that its script reads and writes.
        pauses: seconds that the launcher would have waited.
        on_pause: what happens meanwhile, once each.
    """

    def __init__(self, folder, monkeypatch, main, argv, gcloud, **programs):
        """Prepares a cloud.

        Args:
            folder: an empty one.
            monkeypatch: of pytest; the current folder becomes that of some code.
            main: of the launcher.
            argv: of the launcher, up to its further options.
            gcloud: a script for bash, which stands in for gcloud.
            programs: scripts of other programs, by name.
        """
        self.folder, self.pauses, self.on_pause = folder, [], []
        self._main, self._argv = main, argv
        install_programs(folder, monkeypatch, gcloud=f"{ASKED}{gcloud}", uv=UV, **programs)
        self.write(flags=flag_lines(), ends="0\n")
        code = folder / "code"
        (code / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "worker.sh", code / "launch")
        (code / "program.sh").write_text(PROGRAM)
        (code / "data").write_text("git does not know it")
        subprocess.run("git init -q . && git add launch program.sh", shell=True, cwd=code, check=True)
        monkeypatch.chdir(code)

    def write(self, **files):
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        if self.on_pause:
            self.on_pause.pop(0)()

    def run(self, *options, command=("bash", "program.sh")):
        """Launches, and returns the exit code."""
        with pytest.raises(SystemExit) as end:
            self._main([*self._argv, *options, "--", *command], self.sleep)
        return end.value.code

    def calls(self):
        """What was asked of gcloud since the last time, in words."""
        path = self.folder / "calls"
        calls = [line.split("\0") for line in path.read_text().split("\0\n")[:-1]] if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def verbs(self, calls=None):
        """What was asked of the script of the workers or, else, of gcloud."""
        lines = [" ".join(call) for call in calls or self.calls()]
        found = [re.search(r"worker\.sh (\w+)", line) or VERB.search(line) for line in lines]
        return [next(filter(None, match.groups())) for match in found]

    def begun(self, worker=0):
        """Waits for the program on a worker, and returns its process's number."""
        path, deadline = self.folder / f"pid-worker-{worker}", time.monotonic() + 60
        while not (path.exists() and path.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return int(path.read_text())

    def kill(self, worker):
        """Kills what runs on a worker, and all that it has started."""
        os.killpg(os.getpgid(self.begun(worker)), signal.SIGKILL)

    def starts(self):
        """How often the program was started on each worker."""
        return [len(path.read_text()) for path in sorted(self.folder.glob("started-*"))]
