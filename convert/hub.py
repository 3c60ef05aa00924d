"""The Hub: a plan from headers alone, without downloading weights, and uploading a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from mlx_linattn.errors import CheckpointError, ConvertError, LinAttnError
from mlx_linattn.weights.checkpoint import DTYPES, Checkpoint, TensorInfo, read_json

NETWORK = ("huggingface_hub", "httpx", "httpx2", "requests")


class Headers(Checkpoint):
    """A checkpoint of which only config and headers are here: enough for a plan. Its tensors read as zeros."""

    def __init__(self, name: str, config: dict, tensors: dict[str, TensorInfo], metadata: list[dict[str, str]]):
        self.folder, self.config, self.tensors, self.metadata = Path(name), config, tensors, metadata
        self.is_mlx = self._is_mlx({one.get("format") for one in metadata})

    def read(self, name: str, rows: slice | None = None):
        info = self.tensors[name]
        return mx.zeros(info.shape, getattr(mx, DTYPES.get(info.dtype, "uint8")))

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def headers(repository: str, revision: str | None = None) -> Headers:
    """What the Hub says about a repository's weights, some hundred kilobytes; raises CheckpointError where it says nothing."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with _told_plainly(repository, CheckpointError):
        try:
            config = read_json(Path(hf_hub_download(repository, "config.json", revision=revision)), "a model")
            found = HfApi().get_safetensors_metadata(repository, revision=revision)
        except NotASafetensorsRepoError as error:
            raise CheckpointError(f"{repository}: has no safetensors files; pickles (.bin) are not read") from error
        except SafetensorsParsingError as error:
            raise CheckpointError(f"{repository}: a weight file has a damaged header ({_first_line(error)})") from error
    tensors = {
        name: TensorInfo(Path(file), info.dtype, tuple(info.shape))
        for file, header in found.files_metadata.items()
        for name, info in header.tensors.items()
    }
    return Headers(repository, config, tensors, [header.metadata or {} for header in found.files_metadata.values()])


def upload(folder: Path, repository: str, private: bool = False) -> str:
    """Put a converted model on the Hub; returns its address. What was uploaded before an interruption is not sent again."""
    from huggingface_hub import HfApi

    with _told_plainly(repository, ConvertError):
        api = HfApi()
        address = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Converted with mlx_linattn", ignore_patterns=[".*"]
        )
    return str(address)


@contextmanager
def _told_plainly(repository: str, kind: type[LinAttnError]) -> Iterator[None]:
    try:
        yield
    except LinAttnError:
        raise
    except Exception as error:  # huggingface_hub lets the errors of its HTTP library through, whichever that is
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in NETWORK:
            raise kind(f"{repository}: the Hub cannot be reached or refuses ({_first_line(error)})") from error
        raise


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
