"""``mlx-linattn info``: does this model fit? Its figures, without loading or downloading its weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointError, RequestError
from .loading import hub_errors, local_folder

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

if TYPE_CHECKING:
    from .figures import Figures
    from .weights.checkpoint import TensorInfo


def inspect(path_or_id: str | Path, revision: str | None = None, ranks: int = 1) -> Figures:
    """The figures of a folder, a Hub id or ``demo``; of a Hub id, only the config and the weights' headers are fetched.

    ``ranks``: of the part that one of so many ranks has.

    Raises CheckpointError where there is no such model, UnsupportedModelError where no family answers for it.
    """
    from .figures import figures
    from .weights.checkpoint import Checkpoint, read_json

    folder = local_folder(path_or_id)
    if folder is None:
        config, tensors, is_mlx = _remote(str(path_or_id), revision)
        return figures(config, tensors, is_mlx, ranks)
    if not any(folder.glob("*.safetensors")):
        return figures(read_json(folder / "config.json", "a model folder"), ranks=ranks)
    checkpoint = Checkpoint(folder)
    return figures(checkpoint.config, checkpoint.tensors, checkpoint.is_mlx, ranks)


def _remote(repository: str, revision: str | None) -> tuple[dict, dict[str, TensorInfo], bool]:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    from .weights.checkpoint import Checkpoint, TensorInfo, read_json

    with hub_errors(repository, revision):
        file = Path(hf_hub_download(repository, "config.json", revision=revision))
        config = read_json(file, "a model")
        try:
            checkpoint = Checkpoint(file.parent)  # downloaded before, and whole
            return config, checkpoint.tensors, checkpoint.is_mlx
        except CheckpointError:
            pass
        try:
            found = get_safetensors_metadata(repository, revision=revision)
        except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
            raise CheckpointError(f"{repository}: has no readable safetensors files ({error})") from error
    tensors = {
        name: TensorInfo(Path(shard), info.dtype, tuple(info.shape))
        for shard, header in found.files_metadata.items()
        for name, info in header.tensors.items()
    }
    formats = {header.metadata.get("format") for header in found.files_metadata.values()}
    return config, tensors, formats == {"mlx"}


def render(name: str, figures: Figures) -> str:
    """The figures as a few aligned lines."""
    count, kinds = sum(figures.layers.values()), [f"{n} {kind}" for kind, n in figures.layers.items()]
    experts = "" if figures.experts is None else "; mixtures of {} experts, {} for a token".format(*figures.experts)
    rows = [
        ("layers", f"{count}: {', '.join(kinds)}{experts}"),
        ("parameters", f"{_count(figures.parameters)}, of which a token meets {_count(figures.active_parameters)}"),
        ("longest context", f"{figures.max_positions:,} tokens"),
        ("constant state", _size(figures.state_bytes)),
        ("keys and values", f"{figures.kv_bytes_per_token:,} bytes a token"),
    ]
    if figures.window:
        full = _size(figures.window_bytes_per_token * figures.window)
        rows.append(
            ("window", f"{figures.window_bytes_per_token:,} bytes a token up to {figures.window:,} tokens ({full})")
        )
    if figures.on_disk:
        stored = ", ".join(
            f"{_size(size)} {code}" for code, size in sorted(figures.on_disk.items(), key=lambda x: -x[1])
        )
        rows.append(("on disk", stored))
    of = f", one of {figures.ranks} ranks" if figures.ranks > 1 else ""
    rows += [("not dealt out", text) for text in figures.whole]
    lines = [f"{name} ({figures.model_type}){of}", *(f"  {label:<16} {text}" for label, text in rows), ""]
    memory = figures.memory()
    contexts = list(next(iter(memory.values())))
    head = "".join(f"{f'{tokens // 1024}k' if tokens < 2**20 else '1M':>12}" for tokens in contexts)
    lines.append(f"  {'memory':<16}{'weights':>12}{head}  tokens")
    for label, sizes in memory.items():
        cells = "".join(f"{_size(size):>12}" for size in (figures.weights[label], *sizes.values()))
        lines.append(f"  {label:<16}{cells}")
    return "\n".join(lines)


def _size(size: int) -> str:
    unit, name = next((unit for unit in UNITS if size >= unit[0]), UNITS[-1])
    return f"{size / unit:,.2f} {name}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mlx-linattn info",
        description="What a model needs: layers, parameters, state, cache and memory. Downloads no weights.",
    )
    parser.add_argument("model", help="folder, Hub id, or demo")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="what each of N processes has with --parallel tensor"
    )
    parser.add_argument("--json", action="store_true", help="the same figures, in bytes, as JSON")
    args = parser.parse_args(argv)
    if args.ranks < 1:
        raise RequestError(f"--ranks is {args.ranks}, expected 1 or more")
    figures = inspect(args.model, args.revision, args.ranks)
    if args.json:
        print(json.dumps({"model": args.model, **asdict(figures), "memory": figures.memory()}, indent=2))
    else:
        print(render(args.model, figures))
    return 0
