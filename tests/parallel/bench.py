"""What each rank of a test runs: ``mlx-linattn bench`` with the words given. The shape "tiny" is one of the tests'; with TEST_WRONG_RANK
in the environment, one rank's kernels compute something else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_shapes import TINY

from mlx_linattn import cli
from mlx_linattn.bench import parity, shapes

shapes.SHAPES["tiny"] = TINY["mixture"] | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
if os.environ.get("TEST_WRONG_RANK") == os.environ["MLX_RANK"]:
    parity.difference = lambda got, expected: 1.0
sys.exit(cli.main(["bench", *sys.argv[1:]]))
