"""Measures time and memory of loading a published checkpoint, compared with reading its file by the format's library.

Example:
  python -m benchmarks.load --model=ViT-L/16 --rounds=5

Writes a file with random weights in each layout. Loading an .npz file is compared with NumPy. Loading a .safetensors
file is compared with its library plus one transposed copy of each array, because PyTorch stores kernels with other
axes. Each measurement runs in a new process, both readers take turns, and the file is in the page cache. Only the call
is measured: wall-clock seconds, processor seconds, and the increase of the process's peak memory as a multiple of the
size of the weights. A virtual machine may take seconds to allocate memory for either reader, so the minimum over the
rounds shows the work itself best.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READERS = ("library", "vit_jax")
ROOT = Path(__file__).parent.parent


def peak_memory():
    """Returns the peak resident memory of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(kind, path):
    """Reads a file once and prints the time and memory as JSON.

    Args:
        kind: the reader, one of `READERS`.
        path: the path of the file.
    """
    import numpy as np
    import safetensors.numpy

    import vit_jax
    from vit_jax import checkpoint, interop, tree

    (interop.load, checkpoint.find_checkpoint)  # noqa: B018 (imports are not measured)
    before, start, busy = peak_memory(), time.perf_counter(), time.process_time()
    if kind == "library" and path.endswith(".safetensors"):
        arrays = safetensors.numpy.load_file(path, backend="pread")
        leaves = [np.ascontiguousarray(arrays.pop(name).T) for name in list(arrays)]
    elif kind == "library":
        with np.load(path) as file:
            leaves = [file[name] for name in file.files]
    else:
        leaves = tree.flatten(vit_jax.load(path)[1]).values()
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    size = sum(leaf.nbytes for leaf in leaves)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "copies": (peak_memory() - before) / size, "bytes": size}))


def write_checkpoint(path, name, layout):
    """Writes a model with random weights in a layout to a path."""
    import jax
    import numpy as np

    import vit_jax

    model = vit_jax.create(name)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    vit_jax.save(path if path.suffix == ".npz" else path.parent, model, params, layout=layout)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-L/16")
    parser.add_argument("--layouts", default="google,big_vision,ours,timm,huggingface")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv[1:])
    if args.read:
        return measure(*args.read)
    with tempfile.TemporaryDirectory() as folder:
        for layout in args.layouts.split(","):
            path = Path(folder) / (
                f"{layout}/model.safetensors" if layout in ("timm", "huggingface") else f"{layout}.npz"
            )
            write_checkpoint(path, args.model, layout)
            results = {kind: [] for kind in READERS}
            for _ in range(args.rounds):
                for kind in READERS:
                    command = [sys.executable, "-m", "benchmarks.load", "--read", kind, str(path)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
                    results[kind].append(json.loads(done.stdout))
            path.unlink()
            print(f"{layout}, {results['library'][0]['bytes'] / 1e9:.2f} GB")
            for what in ("seconds", "cpu", "copies"):
                columns = [[one[what] for one in results[kind]] for kind in READERS]
                ratios = [ours / theirs for theirs, ours in zip(*columns, strict=True)]
                middle = [statistics.median(column) for column in columns]
                least = [min(column) for column in columns]
                print(
                    f"  {what:8} medians: library {middle[0]:.2f}, vit_jax {middle[1]:.2f}, "
                    f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
                    f"least: {least[0]:.2f}, {least[1]:.2f}, ratio {least[1] / least[0]:.2f}"
                )


if __name__ == "__main__":
    main(sys.argv)
