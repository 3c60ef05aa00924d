"""Peak memory of one rank's load: a synthetic mixture of experts, loaded as rank 0 of 1, 2 and 4, each in a process of its own.

    python tests/bench/parallel_memory.py [--gigabytes 1] [--bits 4]

Prints for each number of ranks the bytes of the rank's weights, MLX's peak and the peak of the process's own memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import convert_memory

LOAD = """
import resource, sys
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_linattn.arch import family
from mlx_linattn.model import Model
from mlx_linattn.parallel import tensor_plan
from mlx_linattn.weights import Checkpoint, load_weights
from pathlib import Path

ranks = int(sys.argv[2])
files = Checkpoint(Path(sys.argv[1]))
module = family(files.config)
share = tensor_plan(module.spec(files.config), ranks).share(0)
model = Model(share.spec)
load_weights(model, files, module, None, share)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
print(f"{ranks:>5} {weights / 1e9:>10.3f} {mx.get_peak_memory() / 1e9:>10.3f} {peak / 1e9:>10.3f}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bits", type=int, help="quantize the model first")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        source.mkdir()
        convert_memory.make(source, args.gigabytes)
        if args.bits:
            words = ["convert", str(source), "-o", str(Path(folder) / "quantized"), "-q", "--q-bits", str(args.bits)]
            subprocess.run(
                [sys.executable, "-m", "mlx_linattn", *words, "--no-verify"], check=True, capture_output=True
            )
            source = Path(folder) / "quantized"
        print(f"{'ranks':>5} {'weights':>10} {'MLX peak':>10} {'resident':>10}  GB, rank 0")
        for ranks in (1, 2, 4):
            subprocess.run([sys.executable, "-c", LOAD, str(source), str(ranks)], check=True)


if __name__ == "__main__":
    main()
