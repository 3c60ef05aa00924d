"""Peak memory of one rank's load: a synthetic mixture of experts, loaded as the first or last rank of 1, 2 and 4 ranks, each in a process of
its own.

    python tests/bench/parallel_memory.py [--gigabytes 1] [--bits 4]

Prints for each way to share the model and each number of ranks the bytes of the rank's weights, MLX's peak and the peak of the process's own memory.
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
from pathlib import Path
from types import SimpleNamespace
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_linattn.arch import family
from mlx_linattn.cuts import Deal
from mlx_linattn.model import Model
from mlx_linattn.parallel.load import ARRANGEMENTS
from mlx_linattn.weights import Checkpoint, load_weights

kind, rank, ranks = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
files = Checkpoint(Path(sys.argv[1]))
module = family(files.config)
share = ARRANGEMENTS[kind].of(files, module, SimpleNamespace(rank=rank, size=ranks, deal=Deal(rank, ranks))).share
model = Model(share.spec)
load_weights(model, files, module, None, share)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
weights = sum(array.nbytes for name, array in tree_flatten(model.parameters()) if share.has(name))
name = f"{kind}, rank {rank} of {ranks}"
print(f"{name:<24} {weights / 1e9:>10.3f} {mx.get_peak_memory() / 1e9:>10.3f} {peak / 1e9:>10.3f}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bits", type=int, help="quantize the model first")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        source.mkdir()
        convert_memory.make(source, args.gigabytes, 8, packed=False, text=False)
        if args.bits:
            words = ["convert", str(source), "-o", str(Path(folder) / "quantized"), "-q", "--q-bits", str(args.bits)]
            subprocess.run(
                [sys.executable, "-m", "mlx_linattn", *words, "--no-verify"], check=True, capture_output=True
            )
            source = Path(folder) / "quantized"
        print(f"{'':<24} {'weights':>10} {'MLX peak':>10} {'resident':>10}  GB")
        for kind, rank, ranks in (
            ("tensor", 0, 1), ("tensor", 0, 2), ("tensor", 0, 4), ("pipeline", 0, 2), ("pipeline", 1, 2), ("pipeline", 0, 4), ("pipeline", 3, 4),
        ):  # fmt: skip
            subprocess.run([sys.executable, "-c", LOAD, str(source), kind, str(rank), str(ranks)], check=True)


if __name__ == "__main__":
    main()
