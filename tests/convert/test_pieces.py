"""A stack of experts that is converted piece by piece is what it is converted at once."""

from helpers import model_bytes

from mlx_linattn.convert import convert, prepare, tensors


def test_pieces_make_the_same_bytes(fixture_folder, tmp_path, monkeypatch):
    source = fixture_folder("qwen3_5_moe_fp8")
    options = {"quantize": True, "q_mode": "nvfp4", "dtype": "float32"}
    convert(source, tmp_path / "whole", **options)
    monkeypatch.setattr(tensors, "PIECE", 1)
    conversion = prepare(source, tmp_path / "pieces", **options)
    cut = [
        len(list(tensors.pieces(entry, conversion.tensors)))
        for entry in conversion.plan.entries
        if "switch_mlp" in entry.name
    ]
    assert set(cut) == {4}
    conversion.write()
    assert model_bytes(tmp_path / "pieces") == model_bytes(tmp_path / "whole")


def test_only_memory_of_one_piece_is_held(fixture_folder, tmp_path):
    """Whatever was read is let go of before the next tensor is read."""
    conversion = prepare(fixture_folder("qwen3_next"), tmp_path / "out")
    checkpoint, most = conversion.tensors.checkpoint, 0

    def look(done, total, name):
        nonlocal most
        most = max(most, len(checkpoint._taken))

    conversion.write(look, verify=False)
    assert most == 0
