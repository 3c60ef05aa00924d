"""Models on the Hub: planned from headers, downloaded, converted and uploaded, against a local stand-in for the Hub."""

import os
import subprocess
import sys

import pytest
from helpers import folder_bytes, model_bytes
from hub_stand_in import COMMIT, running

from mlx_linattn.convert import convert
from mlx_linattn.loading import load_model


@pytest.fixture
def hub():
    with running() as stand_in:
        yield stand_in


@pytest.fixture
def command(hub, tmp_path):
    """The command line in a process that takes the stand-in for the Hub."""

    def run(*arguments, **changes):
        names = ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_test",
            "NO_PROXY": "*",
        }
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **changes}
        words = [sys.executable, "-m", "mlx_linattn.cli", "convert", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)

    return run


def test_dry_run_downloads_no_weights(hub, command, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5_moe_fp8", shards=3)
    hub.repositories["org/model"] = folder_bytes(source)
    told = command("org/model", "-q", "--q-group-size", "32", "--dry-run", "--revision", COMMIT)
    assert told.returncode == 0, told.stderr
    assert told.stdout == command(source, "-q", "--q-group-size", "32", "--dry-run").stdout
    fetched = sum(count for _, path, count in hub.log if ".safetensors" in path and not path.endswith(".json"))
    headers = sum(
        8 + int.from_bytes(data[:8], "little") for data in hub.repositories["org/model"].values() if data[8:9] == b"{"
    )
    assert fetched <= max(headers, 3 * 100_001)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_download_convert_upload_and_use_again_offline(hub, command, fixture_folder, tmp_path):
    source = fixture_folder("qwen3_5")
    hub.repositories["org/model"] = folder_bytes(source)
    done = command(
        "org/model", "-o", tmp_path / "out", "-q", "--q-group-size", "32", "--upload-repo", "me/mine", "--private"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.url}/me/mine"
    assert hub.private == {"me/mine": True}
    uploaded = hub.repositories["me/mine"]
    uploaded.pop(".gitattributes", None)
    assert uploaded == folder_bytes(tmp_path / "out")
    assert b"base_model: org/model" in uploaded["README.md"]
    convert(source, tmp_path / "local", quantize=True, q_group_size=32)
    assert model_bytes(tmp_path / "out") == model_bytes(tmp_path / "local")
    load_model(tmp_path / "out")
    again = command("org/model", "-o", tmp_path / "again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr


def test_a_connection_that_breaks_is_one_line_or_mended(hub, command, fixture_folder, tmp_path):
    hub.repositories["org/model"] = folder_bytes(fixture_folder("qwen3_5"))
    hub.drops = 1
    first = command("org/model", "-o", tmp_path / "out")
    if first.returncode:
        assert first.returncode == 2 and "Traceback" not in first.stderr
        first = command("org/model", "-o", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    load_model(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["org/other", "--dry-run"], "org/other: the Hub cannot be reached or refuses"),
        (["org/other"], "no such model on the Hub"),
        (["org/model", "--dry-run", "--revision", "none"], "org/model: the Hub cannot be reached or refuses"),
        (["org/model", "--revision", "none"], "no revision 'none'"),
        (["org/pickle", "--dry-run"], "has no safetensors files"),
    ],
)
def test_what_the_hub_lacks_is_one_line(arguments, sentence, hub, command, fixture_folder, tmp_path):
    hub.repositories["org/model"] = folder_bytes(fixture_folder("qwen3_5"))
    config = hub.repositories["org/model"]["config.json"]
    hub.repositories["org/pickle"] = {"config.json": config, "pytorch_model.bin": b"x"}
    failed = command(*arguments, "-o", tmp_path / "out")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert sentence in failed.stderr.splitlines()[-1], failed.stderr
    assert not (tmp_path / "out").exists()


def test_an_upload_that_fails_keeps_the_result(hub, command, fixture_folder, tmp_path):
    failed = command(fixture_folder("qwen3_5"), "-o", tmp_path / "out", "--upload-repo", "not a name")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    load_model(tmp_path / "out")
