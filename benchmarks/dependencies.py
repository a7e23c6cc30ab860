"""Tries the oldest and the newest version of every declared dependency, and an installation without extras.

python -m benchmarks.dependencies --python 3.11 3.12 3.13 --tests --write=CONTRIBUTING.md

For each line of the table, uv (`pip install uv`) makes a fresh environment. There are three kinds: the lowest version
of every declared dependency with all extras, the highest version with all extras, and the highest version without
extras. Extras never include those of CUDA, which are large. In each environment the recipes smoke and digits run.
Digits then runs again, is stopped by SIGTERM and continued, which must give the same numbers bit by bit. Plans, pages
and logs of Weights & Biases are made or, without extras, refused in a sentence that names the extra. A line that failed
says BROKEN, and the exit code is then 1.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from docs.pages import replace_section
from tests.faults.hosts import metrics
from tests.faults.table import Broken, check, same, write_photos

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ",".join(name for name in PROJECT["optional-dependencies"] if not name.startswith("cuda"))
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest", "no extras": "highest"}
SHOWN = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
HEADER = ["Python", "versions", *SHOWN, "smoke", "digits", "digits, resumed", "extras", "tests"]
VERSIONS = "import platform; from importlib.metadata import version as v; print(platform.python_version(), *map(v, {}))"
DATA = "--config.data.num_classes=10 --config.data.num_examples=1438"
PLAN = f"vit_jax.plan --config=configs/smoke.py {DATA} --topology=v5e:2x2"
# Command that needs an extra -> the extra, which the command must name if it is missing.
NEEDS = {
    PLAN: "plan",
    f"{PLAN} --html=plan.html": "plot",
    "vit_jax.look smoke photos/test --out=look": "plot",
    "vit_jax.report smoke": "plot",
    "vit_jax.main --config=configs/smoke.py --config.wandb=project --workdir=wandb": "wandb",
}
NEEDS_AND_NETWORK = {
    "vit_jax.main --config=configs/smoke.py --workdir=gs://bucket/run": "gcs",
    "vit_jax.main --config=configs/smoke.py --workdir=s3://bucket/run": "s3",
    "vit_jax.predict hf-hub:owner/name photos/test": "hub",
}


class Environment:
    """A fresh Python environment in a folder. Its commands also run in that folder."""

    def __init__(self, folder: Path, python: str, kind: str):
        self.folder, self.python = folder, f"{folder}/env/bin/python"
        self.variables = {**os.environ, "VIT_JAX_CACHE": f"{folder}/cache", "WANDB_MODE": "offline"}
        self.variables.pop("PYTHONPATH", None)
        extras = "" if kind == "no extras" else f"[{EXTRAS}]"
        self.call(["uv", "venv", "--quiet", f"--python={python}", "env"])
        resolution = f"--resolution={RESOLUTIONS[kind]}"
        self.call(["uv", "pip", "install", "--quiet", f"--python={self.python}", resolution, "-e", f"{ROOT}{extras}"])

    def call(self, words: list[str], code: int = 0, folder: Path | None = None) -> str:
        """Runs a command in a folder and returns its output; raises Broken if it does not end with exit code `code`."""
        place = folder or self.folder
        ended = subprocess.run(words, cwd=place, env=self.variables, text=True, capture_output=True)
        printed = ended.stdout + ended.stderr
        check(ended.returncode == code, f"{' '.join(words)}: exit code {ended.returncode}:\n{printed}")
        return printed

    def run(self, line: str, code: int = 0) -> str:
        """Runs a command of the package, given as module and arguments, as `call` does."""
        return self.call([self.python, "-m", *line.split()], code)

    def resume(self) -> None:
        """Runs digits, stops it after its first metrics and continues it, and checks that the numbers stay the same."""
        line = "vit_jax.main --config=configs/digits.py --workdir=stopped"
        with (self.folder / "log").open("w") as log:
            run = subprocess.Popen([self.python, "-m", *line.split()], cwd=self.folder, env=self.variables, stderr=log)
        while run.poll() is None and not metrics(self.folder / "stopped"):
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        check(run.wait() == 42, f"exit code {run.returncode} after SIGTERM: {(self.folder / 'log').read_text()}")
        self.run(line)
        check(same(self.folder / "digits", self.folder / "stopped"), "other numbers than those of a run never stopped")

    def cells(self, without_extras: bool, tests: bool) -> list[str]:
        """Runs all checks, and returns the cells of the table, without the one of the kind of environment."""
        python, *versions = self.call([self.python, "-c", VERSIONS.format(SHOWN)]).split()
        self.run("vit_jax.main --config=configs/smoke.py --workdir=smoke")
        self.run("vit_jax.main --config=configs/digits.py --workdir=digits")
        accuracy = metrics(self.folder / "digits")[-1]["test/accuracy"]
        check(accuracy > 0.97, f"digits: {accuracy:.2%}")
        self.resume()
        write_photos(self.folder / "photos")
        if without_extras:
            for line, extra in {**NEEDS, **NEEDS_AND_NETWORK}.items():
                told = self.run(line, 2)
                check(told.count("\n") == 1 and f"pip install -e '.[{extra}]'" in told, f"{line}: {told}")
            return [python, *versions, "runs", f"{accuracy:.2%}", "equal", "named", ""]
        for line in NEEDS:
            self.run(line)
        passed = self.call([self.python, "-m", "pytest"], folder=ROOT) if tests else ""
        return [python, *versions, "runs", f"{accuracy:.2%}", "equal", "run", passed.strip().rpartition("\n")[2]]


def try_versions(python: str, kind: str, tests: bool) -> tuple[list[str], bool]:
    """Returns the cells of a line of the table, and whether everything worked."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            first, *others = Environment(Path(folder), python, kind).cells(kind == "no extras", tests)
            return [first, kind, *others], True
        except Broken as error:
            print(error, file=sys.stderr)
            return [python, kind, f"BROKEN: {str(error).strip().splitlines()[-1]}"], False


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], help="each a version or a path, as uv takes it"
    )
    parser.add_argument("--only", default="", help="regular expression: which of 'oldest', 'newest', 'no extras'")
    parser.add_argument("--tests", action="store_true", help="run the tests, too, where they are installed")
    parser.add_argument("--write", type=Path, help="Markdown file whose table to replace")
    args = parser.parse_args(argv[1:])
    kinds = [kind for kind in RESOLUTIONS if re.search(args.only, kind)]
    if kinds and not shutil.which("uv"):
        parser.error("uv makes the environments: pip install uv.")
    tried = [try_versions(python, kind, args.tests) for python in args.python for kind in kinds]
    lines = [HEADER, ["---"] * len(HEADER), *(cells for cells, _ in tried)]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    print(text, end="")
    if args.write:
        replace_section(args.write, "dependencies", text)
    return 0 if all(worked for _, worked in tried) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
