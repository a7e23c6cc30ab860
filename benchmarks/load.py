"""Loading a published checkpoint against reading its file with NumPy: time, and memory beyond the weights.

Example:
  python -m benchmarks.load --model=ViT-L/16 --rounds=5

Makes a file with random weights in each layout. Every reading is a process of its own, the kinds in turn; the file is
in the page cache. Measured is the call alone: seconds by the clock and of the processor, and the peak of the process's
memory above what it was before, in copies of the weights. A virtual machine may take seconds to find memory for either:
the least of the rounds tells of the work itself.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = ("numpy", "vit_jax")
ROOT = Path(__file__).parent.parent


def peak():
    """Returns the most bytes that this process has had in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def read(kind, path):
    """Prints the seconds and the bytes of one reading."""
    import numpy as np

    import vit_jax
    from vit_jax import interop, tree

    interop.load  # noqa: B018 (imports are not measured)
    before, start, busy = peak(), time.perf_counter(), time.process_time()
    if kind == "numpy":
        with np.load(path) as file:
            leaves = [file[name] for name in file.files]
    else:
        leaves = tree.flatten(vit_jax.load(path)[1]).values()
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    size = sum(leaf.nbytes for leaf in leaves)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "copies": (peak() - before) / size, "bytes": size}))


def write(path, name, layout):
    """Writes a model with random weights."""
    import jax
    import numpy as np

    import vit_jax

    model = vit_jax.create(name)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    vit_jax.save(path, model, params, layout=layout)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-L/16")
    parser.add_argument("--layouts", default="google,big_vision,ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv[1:])
    if args.read:
        return read(*args.read)
    with tempfile.TemporaryDirectory() as folder:
        for layout in args.layouts.split(","):
            path = Path(folder) / f"{layout}.npz"
            write(path, args.model, layout)
            results = {kind: [] for kind in KINDS}
            for _ in range(args.rounds):
                for kind in KINDS:
                    command = [sys.executable, "-m", "benchmarks.load", "--read", kind, str(path)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
                    results[kind].append(json.loads(done.stdout))
            path.unlink()
            print(f"{layout}, {results['numpy'][0]['bytes'] / 1e9:.2f} GB")
            for what in ("seconds", "cpu", "copies"):
                columns = [[one[what] for one in results[kind]] for kind in KINDS]
                ratios = [ours / numpys for numpys, ours in zip(*columns, strict=True)]
                middle = [statistics.median(column) for column in columns]
                least = [min(column) for column in columns]
                print(
                    f"  {what:8} medians: numpy {middle[0]:.2f}, vit_jax {middle[1]:.2f}, "
                    f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
                    f"least: {least[0]:.2f}, {least[1]:.2f}, ratio {least[1] / least[0]:.2f}"
                )


if __name__ == "__main__":
    main(sys.argv)
