"""Killed anywhere and started again, a conversion ends byte-identical to one that nobody disturbed."""

import os
import random
import signal
import subprocess
import sys
from functools import partial

import pytest
from helpers import folder_bytes, model_bytes

from mlx_linattn.convert import convert as convert_and_verify
from mlx_linattn.errors import CheckpointError, ConvertError
from mlx_linattn.loading import load_model

convert = partial(convert_and_verify, verify=False)

# Kills itself at the given one of everything it does to the file system below the target, tensors included.
PROGRAM = """
import os, signal, sys
from mlx_linattn.convert import convert

source, target, moment = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = 0

def tick(*_):
    global seen
    seen += 1
    if seen == moment:
        os.kill(os.getpid(), signal.SIGKILL)

def watch(event, arguments):
    if event.split(".")[0] in ("open", "os", "shutil") and any(str(a).startswith(target) for a in arguments):
        tick()

sys.addaudithook(watch)
convert(source, target, quantize=True, q_group_size=32, keep_mtp=True, shard_size=40_000, progress=tick, verify=False)
print(seen)
"""


def run(source, target, moment):
    words = [sys.executable, "-c", PROGRAM, str(source), str(target), str(moment)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_kill_at_ten_random_moments(fixture_folder, tmp_path):
    source, target = fixture_folder("qwen3_5"), tmp_path / "out"
    whole = run(source, target, 0)
    moments = int(whole.stdout)
    assert moments > 40, whole.stderr
    want = folder_bytes(target)
    target.rename(tmp_path / "undisturbed")
    shards = 0
    choose = random.Random(7)
    for _ in range(10):
        killed = run(source, target, choose.randrange(1, 25))
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not target.exists() or (target / "config.json").exists()
        if not target.exists():
            with pytest.raises(CheckpointError):
                load_model(tmp_path / "out.partial")
        now = len(list(tmp_path.glob("out.partial/model*.safetensors")))
        assert now >= shards  # what is finished is not done again
        shards = now
    assert run(source, target, 0).returncode == 0 or killed.returncode == 0
    assert folder_bytes(target) == want
    assert [file.name for file in tmp_path.glob("out*")] == ["out"]
    load_model(target)


@pytest.mark.parametrize("moment", range(1, 5))
def test_kill_at_each_renaming(moment, fixture_folder, tmp_path, monkeypatch):
    """Where files and the folder get their names."""
    source, target = fixture_folder("qwen3_5_untied_text"), tmp_path / "out"
    convert(source, target)
    want = folder_bytes(target)
    target.rename(tmp_path / "undisturbed")

    class Killed(BaseException):
        pass

    steps = []
    originals = {name: getattr(os, name) for name in ("replace", "unlink")}

    def spy(name):
        def step(*arguments, **kwargs):
            steps.append(name)
            if len(steps) == moment:
                raise Killed
            return originals[name](*arguments, **kwargs)

        return step

    for name in originals:
        monkeypatch.setattr(os, name, spy(name))
    killed = False
    try:
        convert(source, target)
    except Killed:
        killed = True
    assert killed or sys.version_info < (3, 11)  # before 3.11 pathlib unlinks by a name of its own
    monkeypatch.undo()
    if folder_bytes(target) != want:
        convert(source, target)
    assert folder_bytes(target) == want
    assert not (tmp_path / "out.partial").exists()


def test_another_plan_starts_afresh(fixture_folder, tmp_path):
    source, target = fixture_folder("qwen3_5"), tmp_path / "out"

    def stop(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, quantize=True, q_group_size=32, shard_size=20_000, progress=stop)
    assert len(list(tmp_path.glob("out.partial/model*.safetensors"))) > 2
    convert(source, target)
    convert(source, tmp_path / "clean")
    assert model_bytes(target) == model_bytes(tmp_path / "clean")


def test_two_runs_do_not_write_to_one_folder(fixture_folder, tmp_path):
    source, target = fixture_folder("qwen3_5"), tmp_path / "out"

    def meanwhile(done, total, name):
        if done == 0 and name:
            with pytest.raises(ConvertError, match="another conversion is writing"):
                convert(source, target)

    convert(source, target, progress=meanwhile)
    load_model(target)


def test_a_read_only_place_is_one_sentence(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(tmp_path), "mkdir", refuse)
    with pytest.raises(ConvertError, match=r"cannot write .*Permission denied"):
        convert("demo", tmp_path / "out")
