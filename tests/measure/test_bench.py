"""``mlx-linattn bench``: what it measures, that it reads nothing twice, goes on where it stopped, and refuses what is wrong."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
from helpers import FIXTURES, materialize
from terminal import Terminal

from mlx_linattn import cli
from mlx_linattn.bench import chart, parity, predict, sides
from mlx_linattn.bench import run as run_module
from mlx_linattn.bench.machine import traffic
from mlx_linattn.bench.rows import FILLED, MEASURED, PREDICTED, Report, Row
from mlx_linattn.generation import prefill
from mlx_linattn.layers.gated_delta import GatedDelta
from mlx_linattn.loading import load_model
from mlx_linattn.ops.backend import forced_backend
from mlx_linattn.state import KVOptions

SMALL = ("--tokens", "4", "--max-kv-size", "64", "--kv-group-size", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return materialize(FIXTURES / "qwen3_5", tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)[0]


@pytest.fixture
def quick(monkeypatch):
    """Without the check of the fast paths, and without measuring how fast memory is."""
    monkeypatch.setattr(parity, "check", lambda *_: 0.0)
    monkeypatch.setattr(run_module, "bandwidth", lambda: 1e9)


@pytest.fixture
def bench(folder, capsys):
    """Run the command; what JSON it printed, and what it said."""

    def run(*arguments, status=0):
        assert cli.main(["bench", str(folder), *SMALL, "--json", *arguments]) == status
        out, err = capsys.readouterr()
        return (json.loads(out) if out else None), " ".join(err.split())

    return run


@pytest.fixture
def reads(monkeypatch):
    """From where to where our side reads, call by call."""
    spans, original = [], sides.prefill

    def watched(model, ids, state, *rest):
        spans.append((state.offset, state.offset + len(ids)))
        return original(model, ids, state, *rest)

    monkeypatch.setattr(sides, "prefill", watched)
    return spans


def rows(report, mode, library="mlx_linattn"):
    return [row for row in report["rows"] if (row["mode"], row["library"]) == (mode, library)]


def test_each_interval_is_read_once_and_the_rest_is_predicted(bench, reads):
    report, _ = bench("--contexts", "64,128,512,2k", "--max-context", "512")
    assert reads == [(0, 64), (64, 128), (128, 512)] * 3
    for mode in ("exact", "quantized-kv", "constant"):
        found = rows(report, mode)
        assert [row["context"] for row in found] == [64, 128, 512, 2048]
        assert [row["kind"] for row in found] == [MEASURED] * 3 + [PREDICTED]
        assert [row["read"] for row in found] == [64, 64, 384, 1536]
        assert all(row["prefill_tps"] > 0 and row["decode_ms"] > 0 for row in found)
        assert all(row["peak_bytes"] >= row["active_bytes"] for row in found)
        assert report["parity"][mode] < 1e-2
    constant = rows(report, "constant")
    assert len({row["active_bytes"] for row in constant[:3]}) == 1 and {row["kv_bytes"] for row in constant} == {0}
    assert constant[3]["active_bytes"] == pytest.approx(constant[2]["active_bytes"], abs=2**15)
    exact, packed = rows(report, "exact"), rows(report, "quantized-kv")
    for one, other in zip(exact, packed):
        assert one["state_bytes"] == other["state_bytes"] and one["kv_bytes"] > 2 * other["kv_bytes"] > 0


def test_bytes_of_a_predicted_row_are_those_of_the_measured_one(bench, quick):
    predicted, _ = bench("--contexts", "64,1k", "--max-context", "64")
    measured, _ = bench("--contexts", "64,1k")
    for mode in ("exact", "quantized-kv", "constant"):
        guess, truth = rows(predicted, mode)[-1], rows(measured, mode)[-1]
        assert (guess["kind"], truth["kind"]) == (PREDICTED, MEASURED)
        room = 256  # columns that writing needs
        assert guess["state_bytes"] == truth["state_bytes"]
        assert truth["kv_bytes"] == guess["kv_bytes"] // 1024 * (1024 + room)
        grown = truth["kv_bytes"] - guess["kv_bytes"]
        assert truth["active_bytes"] - grown == pytest.approx(guess["active_bytes"], abs=2**15)  # MLX rounds to pages


def test_a_context_that_is_not_read_weighs_as_much(bench, reads, quick):
    modes = ("--modes", "exact,constant")
    filled, _ = bench("--contexts", "64,128,1k", "--read-limit", "96", *modes)
    assert reads == [(0, 64), (64, 96)] * 2
    read, _ = bench("--contexts", "64,128,1k", *modes)
    for mode in ("exact", "constant"):
        for one, other in zip(rows(filled, mode), rows(read, mode)):
            assert one["kind"] == (FILLED if one["context"] > 96 else MEASURED)
            assert {key: one[key] for key in ("state_bytes", "kv_bytes")} == {
                key: other[key] for key in ("state_bytes", "kv_bytes")
            }
            assert one["decode_ms"] > 0
        assert [row["prefill_tps"] is not None for row in rows(filled, mode)] == [True, True, False]


def test_started_again_it_goes_on_from_its_rows(bench, reads, tmp_path, quick):
    name, mode = str(tmp_path / "out"), ("--modes", "exact", "--output", str(tmp_path / "out"))
    first, _ = bench("--contexts", "64,128", *mode)
    reads.clear()
    second, said = bench("--contexts", "64,128,512", *mode)
    assert reads == [(0, 128), (128, 512)] and "going on: 2 rows" in said
    assert rows(second, "exact")[:2] == rows(first, "exact")
    assert json.loads(Path(name + ".json").read_text())["rows"] == second["rows"]
    assert Path(name + ".csv").read_text().count("\n") == 4
    assert "<svg" in Path(name + ".svg").read_text()
    reads.clear()
    third, _ = bench("--contexts", "64,128,512", *mode)
    assert reads == [] and third["rows"] == second["rows"]
    _, said = bench("--contexts", "64", *mode, "--dtype", "bfloat16", status=2)
    assert "was measured with dtype None, this is bfloat16" in said
    Path(name + ".json").write_text('{"format": 1, "settings": 3}')
    assert "not a bench" in bench("--contexts", "64", *mode, status=2)[1]


def test_an_interrupt_keeps_what_was_measured(bench, monkeypatch, tmp_path, quick):
    original, calls = sides.Ours.write, []

    def write(self, *arguments):
        calls.append(self.state.offset)
        if self.state.offset == 128:
            assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1, "a kill would lose the first row"
            raise KeyboardInterrupt
        return original(self, *arguments)

    output = ("--modes", "exact", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(sides.Ours, "write", write)
    report, said = bench("--contexts", "64,128,512", *output, status=130)
    assert [row["kind"] for row in report["rows"]] == [MEASURED, PREDICTED, PREDICTED] and "stopped" in said
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == report["rows"]
    monkeypatch.setattr(sides.Ours, "write", original)
    again, _ = bench("--contexts", "64,128,512", *output)
    assert [row["kind"] for row in again["rows"]] == [MEASURED] * 3 and again["rows"][0] == report["rows"][0]


def test_ctrl_c_in_a_terminal_shows_the_table(folder):
    screen = Terminal("bench", str(folder), *SMALL, "--contexts", "64,4M", "--force", "--minutes", "1e9", columns=160)
    screen.expect("exact, 64: ")
    screen.expect("reading to 4M")
    screen.type("\x03")
    screen.expect("stopped")
    screen.expect("prefill tok/s")
    screen.expect("~4M")
    assert screen.process.wait(timeout=30) == 130


def test_nothing_is_measured_where_a_fast_path_is_wrong(bench, monkeypatch):
    original = GatedDelta.__call__

    def wrong(self, x, state, span):
        y = original(self, x, state, span)
        return y if forced_backend() == "reference" or span.T > 1 else y * 1.05  # in single steps only

    monkeypatch.setattr(GatedDelta, "__call__", wrong)
    report, said = bench("--contexts", "64", status=2)
    assert report is None and "layer 0 (GatedDelta) differs from its reference by 5." in said


def test_a_check_leaves_the_model_as_it_was(model):
    before = [type(layer.mixer) for layer in model.layers]
    assert parity.check(model, KVOptions(max_kv_size=64)) < 1e-3
    assert [type(layer.mixer) for layer in model.layers] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--modes", "exact,fast"), "'fast' is not known; choose from exact, quantized-kv, constant"),
        (("--modes", ","), "--modes is empty"),
        (("--max-kv-size", "3"), "max_kv_size is 3"),
        (("--kv-bits", "7"), "kv_bits is 7"),
        (("--tokens", "1"), "--tokens is 1"),
        (("--minutes", "0"), "--minutes is 0"),
        (("--prefill-step-size", "0"), "--prefill-step-size is 0"),
        (("--memory-limit", "-1"), "--memory-limit is -1"),
        (("--output", "/no/such/folder/out"), "there is no folder /no/such/folder"),
        (("--model", "/no/such/model"), "no such folder"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


@pytest.mark.parametrize("contexts", ["0", "4q", "", "1k,,2k", "-4"])
def test_a_context_is_a_number_of_tokens(contexts, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", f"--contexts={contexts}"])
    assert stop.value.code == 2 and "not a number of tokens" in capsys.readouterr().err


def test_rows_that_memory_or_time_forbids_are_said_and_predicted(bench, quick):
    held = mx.get_active_memory() / 1e9
    report, said = bench("--contexts", "64,64M", "--modes", "exact", "--memory-limit", str(held + 1))
    assert "not run: exact at 64M needs" in said and [row["kind"] for row in report["rows"]] == [MEASURED, PREDICTED]
    report, said = bench("--contexts", "64,64M", "--modes", "exact", "--force", "--minutes", "0.5")
    assert "not run: exact at 64M would take some" in said
    assert [row["kind"] for row in report["rows"]] == [MEASURED, PREDICTED]


def row(context, read, seconds_a_token, decode_ms, kv=1):
    return Row("mlx_linattn", "exact", context, read, 1 / seconds_a_token, decode_ms, 1, kv, 1, 1)


def test_times_lie_on_a_line_that_does_not_fall():
    cost = lambda begin, end: 1e-3 + 1e-6 * (begin + end) / 2  # noqa: E731 - a token costs 1 ms and 1 us for each before it
    found = [row(end, end - begin, cost(begin, end), 2 + end / 1000) for begin, end in ((0, 1000), (1000, 4000))]
    assert predict.seconds_to_read(found, 4000, 16000) == pytest.approx(12000 * cost(4000, 16000))
    assert predict.seconds_to_read(found[:1], 1000, 2000) == pytest.approx(1000 * cost(0, 1000))
    assert predict.seconds_to_read([], 0, 1000) is None
    falling = [row(1000, 1000, 2e-3, 1), row(4000, 3000, 1e-3, 1)]
    assert predict.seconds_to_read(falling, 4000, 5000) == pytest.approx(1000 * 1.5e-3)
    level = [replace(one, kv_bytes=0) for one in found]
    assert predict.seconds_to_read(level, 4000, 5000) == pytest.approx(1000 * (cost(0, 1000) + cost(1000, 4000)) / 2)


def test_traffic_is_weights_state_twice_and_the_attended_context(model):
    for options, context in ((KVOptions(), 40), (KVOptions(max_kv_size=32), 32)):
        state = model.make_cache(options)
        prefill(model, list(range(40)), state)
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        recurrent = sum(layer.nbytes for layer in state if type(layer).__name__ == "RecurrentState")
        attended = 2 * 2 * 32 * 4 * context  # keys and values of two heads of 32 features in float32
        assert traffic(model, state) == weights + 2 * recurrent + attended


def test_the_picture_is_the_same_each_time(tmp_path):
    report = Report({"model": "tiny"}, {"name": "here", "device": "cpu", "cores": 2, "system": "Linux", "blas": "", "python": "3",
                                       "mlx-linattn": "1", "mlx": "1", "mlx-lm": None})  # fmt: skip
    report.rows = [row(1024, 1024, 1e-3, 2.0), replace(row(4096, 3072, 1e-3, 3.0), kind=PREDICTED)]
    plt, files = chart.pyplot(), [tmp_path / name for name in ("a.svg", "b.svg", "c.png")]
    for file in files:
        chart.draw(plt, report, file)
    first, second, third = (file.read_bytes() for file in files)
    assert first == second and b"time of a token" in first and b"dashed: predicted" in first
    assert third.startswith(b"\x89PNG")
