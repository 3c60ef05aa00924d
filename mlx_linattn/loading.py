"""From a folder, a Hub id or ``demo`` to a model that is ready to run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from .model import Model
    from .parallel import Group

DEMO = "demo"
FILES = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
FILES += ["tiktoken.model", "tokenization_*.py"]  # whose literals are read; its code never runs
DTYPES = ("float32", "float16", "bfloat16")


def resolve(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a model: a folder, ``demo``, or a Hub id that is downloaded (or found in the cache)."""
    return local_folder(path_or_id) or _download(str(path_or_id), revision)


def local_folder(path_or_id: str | Path) -> Path | None:
    """The folder of a model that is here, or None for a Hub id; raises CheckpointError for what is neither."""
    if str(path_or_id) == DEMO and not Path(DEMO).is_dir():
        return Path(str(resources.files("mlx_linattn") / "data" / DEMO))
    folder = Path(os.path.expanduser(path_or_id))
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the folder that holds config.json and the weights")
    text = str(path_or_id)
    if text.startswith((".", "/", "~")) or text.count("/") != 1 or "\\" in text:
        raise CheckpointError(f"{text}: no such folder, and not a Hub id such as Qwen/Qwen3.5-4B either")
    return None


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors(repository, revision):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FILES))


@contextmanager
def hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Whatever goes wrong with the Hub inside becomes a CheckpointError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(f"{repository}: no such folder, and not a Hub id either ({error})") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repository}: its owner asks you to accept terms first: open its page on the Hub, then run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repository}: has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repository}: no such folder here and no such model on the Hub (or it is private: run `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{repository}: not in the local cache and not to be had from the Hub now ({reason})"
        ) from error


def convert_tokenizer(source: Path, target: Path) -> None:
    """Where a folder's tokenizer needs Python code beside it (tiktoken.model), write one that does not into ``target``."""
    from .interop import tiktoken

    if tiktoken.is_tiktoken(source):
        tiktoken.write(source, target)


def load_tokenizer(folder: Path, config: dict, extra: dict[str, Any] | None = None):
    """The tokenizer of a model folder; raises TokenizerError where it has none or a damaged one."""
    from .interop.tokenizer import load_tokenizer as load_it

    return load_it(folder, config, extra)


def load_model(
    path_or_id: str | Path,
    lazy: bool = False,
    *,
    revision: str | None = None,
    dtype: Any = None,
    memory_limit: float | None = None,
    group: Group | None = None,
    on_every_rank: Callable[[Model], None] | None = None,
) -> tuple[Model, dict]:
    """A model without its tokenizer, and its config.

    Args:
        path_or_id: a folder, a Hub id, or ``demo``.
        lazy: leave the weights on disk until they are first used.
        revision: branch, tag or commit on the Hub.
        dtype: "float32", "float16" or "bfloat16" (or the mlx dtype) for the weights; as stored by default.
            Norms, decays and routers are float32 in any case.
        memory_limit: bytes; weights that would need more raise MemoryLimitError before they are read. By default the
            device's working set; ``float("inf")`` never refuses.
        group: the ranks to share the model with, as :func:`mlx_linattn.parallel.start` returns them. The first rank gets
            a model like any other; on the others this function does what the first rank's model does, and exits with it.
        on_every_rank: called with the model before, by all ranks at the same time. An error of this library ends them all.

    Raises CheckpointError where the folder or the download is not what a model needs, UnsupportedModelError for a family that
    is not known, RequestError for a dtype that is none, and MemoryLimitError.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from . import budget, parallel
    from .arch import family
    from .model import Model
    from .weights import load_weights
    from .weights.checkpoint import Checkpoint

    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise RequestError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        dtype = getattr(mx, dtype)
    share = None
    with nullcontext({}) if group is None else parallel.together(group, dtype=str(dtype)) as facts:
        checkpoint = Checkpoint(resolve(path_or_id, revision))
        module = family(checkpoint.config)
        if group is None:
            model = Model(module.spec(checkpoint.config))
        else:
            facts["weights"] = parallel.digest(checkpoint)
            model, ranks = parallel.build(checkpoint, module, group)
            share = ranks.share

        def check(nbytes: int) -> None:
            budget.require_weights(nbytes, memory_limit, str(checkpoint.folder))

        load_weights(model, checkpoint, module, dtype, share, check)
        if not lazy and group is None:
            weights = [array for _, array in tree_flatten(model.parameters())]
            check(sum(array.nbytes for array in weights))
            for array in weights:  # one after the other, so that no more than one tensor's sources are held beside it
                mx.eval(array)
    if group is not None:
        parallel.run(model, ranks, on_every_rank)
    return model, checkpoint.config


def load(
    path_or_hf_repo: str | Path,
    tokenizer_config: dict[str, Any] | None = None,
    *,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    dtype: Any = None,
    memory_limit: float | None = None,
    group: Group | None = None,
):
    """A model and its tokenizer, from a folder, a Hub id or ``demo``; with ``return_config`` the config as well.

    Arguments and errors as in :func:`load_model`; ``tokenizer_config`` goes to the tokenizer, which raises TokenizerError.
    """
    model, config = load_model(
        path_or_hf_repo, lazy, revision=revision, dtype=dtype, memory_limit=memory_limit, group=group
    )
    tokenizer = load_tokenizer(resolve(path_or_hf_repo, revision), config, tokenizer_config)
    return (model, tokenizer, config) if return_config else (model, tokenizer)
