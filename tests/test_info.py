"""``mlx-linattn info``: its figures for published configs, and where it reads them."""

import json

import pytest
from huggingface_hub.errors import NotASafetensorsRepoError
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata
from huggingface_hub.utils import TensorInfo as HubTensor
from mlx.utils import tree_flatten
from published_configs import fla, jamba, kimi, kimi_k3, ling3, ling26, minimax, olmo, qwen, recurrent_gemma, ring_mini

from mlx_linattn import info
from mlx_linattn.errors import CheckpointError, UnsupportedModelError
from mlx_linattn.figures import figures
from mlx_linattn.loading import load_model
from mlx_linattn.state import KVState
from mlx_linattn.weights.checkpoint import Checkpoint

PUBLISHED = {  # config, constant MiB, bytes a token of the caches
    "Qwen3-Next-80B-A3B": (qwen(48, 16, 32, 2, 2048, 16, "qwen3_next"), 73.69, 24_576),
    "Qwen3.5-0.8B": (qwen(24, 16, 16, 2, 1024, 8), 18.63, 12_288),
    "Qwen3.5-4B": (qwen(32, 16, 32, 4, 2560, 16), 49.12, 32_768),
    "Qwen3.5-27B": (qwen(64, 16, 48, 4, 5120, 24), 146.81, 65_536),
    "Qwen3.5-35B-A3B": (qwen(40, 16, 32, 2, 2048, 16, "qwen3_5_moe"), 61.41, 20_480),
    "Qwen3.5-122B-A10B": (qwen(48, 16, 64, 2, 3072, 32, "qwen3_5_moe"), 146.53, 24_576),
    "Qwen3.5-397B-A17B": (qwen(60, 16, 64, 2, 4096, 32, "qwen3_5_moe"), 183.16, 30_720),
    "Kimi-Linear-48B-A3B": (kimi(), 41.41, 8_064),
    "Kimi-K3": (kimi_k3(), 428.55, 27_648),
    "Ling-3.0-Flash": (ling3(), 72.46, 8_064),
    "Olmo-Hybrid-7B": (olmo(), 52.21, 122_880),
    "MiniMax-Text-01": (minimax(), 280.00, 40_960),
    "Ring-mini-linear-2.0": (ring_mini(), 16.00, 8_192),
    "Ling-2.6-flash": (ling26(), 56.00, 4_608),
    "Jamba-v0.1": (jamba(32, 4096, 8, 4, 32, 8, 256, 16), 15.31, 16_384),
    "Jamba-Reasoning-3B": (jamba(28, 2560, 14, 7, 20, 1, 160, 1), 8.89, 1_024),
    "RecurrentGemma-2B": (recurrent_gemma(), 0.44, 0),
    "RetNet-1.3B": (fla("retnet", 24, 8, hidden_ratio=2), 96.00, 0),
    "Gated DeltaNet, fla defaults": (fla("gated_deltanet", 21, 6, head_dim=256, expand_v=2), 63.74, 0),
    "GLA-1.3B": (fla("gla", 24, 4), 48.00, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_state_and_cache_of_published_models(name):
    config, constant, per_token = PUBLISHED[name]
    found = figures(config)
    assert round(found.state_bytes / 2**20, 2) == pytest.approx(constant, abs=0.0051)
    assert found.kv_bytes_per_token == per_token


def test_a_window_is_counted_until_it_is_full():
    found = figures(recurrent_gemma())
    assert (found.window_bytes_per_token, found.window) == (8192, 2048)
    assert found.layers == {"RG-LRU": 18, "window attention": 8}
    assert found.context_bytes(1000) == found.state_bytes + 1000 * 8192
    assert found.context_bytes(10**6) == found.state_bytes + 2048 * 8192


def test_retnet_has_the_published_number_of_parameters():
    found = figures(fla("retnet", 24, 8, hidden_ratio=2))
    assert found.layers == {"linear attention": 24}
    assert found.parameters == 1_351_727_104


def test_a_delta_rule_without_decay_is_called_deltanet():
    assert figures(fla("delta_net", 24, 16)).layers == {"DeltaNet": 24}


def test_kimi_in_full():
    found = figures(kimi())
    assert found.layers == {"Kimi Delta Attention": 20, "latent attention": 7}
    assert found.experts == (256, 8)
    assert found.parameters == 49_122_681_728
    assert 3.0e9 < found.active_parameters < 3.2e9  # "48B-A3B"
    assert found.weights["bfloat16"] == pytest.approx(2 * found.parameters, rel=1e-3)
    assert found.weights["4-bit"] == pytest.approx(4.5 / 8 * found.parameters, rel=1e-2)
    memory = found.memory()["4-bit"]
    assert memory[2**20] - memory[2**16] == 8064 * (2**20 - 2**16)
    assert memory[8192] == found.weights["4-bit"] + found.state_bytes + 8064 * 8192


def test_a_model_of_any_size_costs_no_memory():
    import mlx.core as mx

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    figures(PUBLISHED["Qwen3.5-397B-A17B"][0])
    assert mx.get_peak_memory() - before < 2**24


@pytest.mark.parametrize("name", ["kimi_linear", "olmo_hybrid", "bailing_hybrid_v3", "qwen3_5_fp8", "qwen3_5_moe"])
def test_figures_are_what_the_loaded_model_holds(name, fixture_folder):
    folder = fixture_folder(name)
    found, (model, _) = info.inspect(folder), load_model(folder)
    parameters = dict(tree_flatten(model.parameters()))
    assert found.parameters == sum(array.size for array in parameters.values())
    assert found.on_disk == {
        code: sum(t.nbytes for t in Checkpoint(folder).tensors.values() if t.dtype == code) for code in found.on_disk
    }
    assert sum(found.on_disk.values()) <= (folder / "model.safetensors").stat().st_size
    model, _ = load_model(folder, dtype="bfloat16")
    assert found.weights["bfloat16"] == sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    state = model.make_cache()
    model([[1, 2, 3]], state)
    assert found.state_bytes == state.recurrent_nbytes
    columns = next(layer.exact[0].shape[2] for layer in state if isinstance(layer, KVState))
    assert found.kv_bytes_per_token * columns == state.kv_nbytes


def test_stored_weights_of_a_quantized_mlx_folder(fixture_folder, tmp_path):
    import stock

    converted = stock.convert(fixture_folder("olmo_hybrid"), tmp_path / "mlx", {"group_size": 32, "bits": 4})
    found, (model, _) = info.inspect(converted), load_model(converted)
    assert set(found.on_disk) == {"U32", "F32"}
    assert found.weights["stored"] == sum(array.nbytes for _, array in tree_flatten(model.parameters()))


class Hub:
    """Stands in for the Hub's client: a repository with a config and two shards, of which only headers can be had."""

    def __init__(self, folder, monkeypatch, metadata=None):
        self.folder, self.asked = folder, []
        self.metadata = metadata
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.download)
        monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", self.headers)

    def download(self, repository, file, revision=None):
        self.asked.append((repository, file, revision))
        return str(self.folder / file)

    def headers(self, repository, revision=None):
        if self.metadata is None:
            raise NotASafetensorsRepoError("no safetensors here")
        return self.metadata


def headers_of(folder, metadata):
    tensors = list(Checkpoint(folder).tensors.items())
    shards = {"model-00001-of-00002.safetensors": tensors[::2], "model-00002-of-00002.safetensors": tensors[1::2]}
    files = {
        shard: SafetensorsFileMetadata(
            metadata=metadata, tensors={name: HubTensor(t.dtype, list(t.shape), (0, t.nbytes)) for name, t in part}
        )
        for shard, part in shards.items()
    }
    return SafetensorsRepoMetadata(metadata=None, sharded=True, weight_map={}, files_metadata=files)


def test_a_hub_id_needs_the_config_and_the_headers_only(fixture_folder, monkeypatch):
    folder = fixture_folder("kimi_linear")
    local, metadata = info.inspect(folder), headers_of(folder, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    hub = Hub(folder, monkeypatch, metadata)
    assert info.inspect("someone/kimi", "v1") == local
    assert hub.asked == [("someone/kimi", "config.json", "v1")]


def test_a_repository_without_safetensors_is_an_error(fixture_folder, monkeypatch):
    folder = fixture_folder("kimi_linear")
    (folder / "model.safetensors").unlink()
    Hub(folder, monkeypatch)
    with pytest.raises(CheckpointError, match="someone/kimi: has no readable safetensors"):
        info.inspect("someone/kimi")


def test_a_config_alone_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(kimi()))
    found = info.inspect(tmp_path)
    assert found.on_disk == {} and "stored" not in found.weights


def test_unknown_models_and_places_are_errors(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="llama"):
        info.inspect(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        info.inspect("./nowhere")


def test_the_command_prints_people_s_numbers_and_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(kimi()))
    assert info.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for part in ("20 Kimi Delta Attention, 7 latent attention", "49.12 B", "41.41 MiB", "8,064 bytes a token", "1M"):
        assert part in text
    assert info.main([str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["state_bytes"] == figures(kimi()).state_bytes
    assert data["memory"]["4-bit"]["8192"] == figures(kimi()).memory()["4-bit"][8192]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Kimi-K3", "MiniMax-Text-01", "Jamba-v0.1"])
def test_a_rank_has_its_part_of_a_published_model(name, ranks):
    config = PUBLISHED[name][0]
    one, whole = figures(config, ranks=ranks), figures(config)
    for format, size in one.weights.items():
        assert whole.weights[format] / ranks <= size < 1.02 * whole.weights[format] / ranks
    assert whole.state_bytes / ranks <= one.state_bytes < 1.02 * whole.state_bytes / ranks
    assert one.whole == ()


def test_what_is_not_dealt_out_is_said(capsys):
    assert info.main(["demo", "--ranks", "3"]) == 0
    told = capsys.readouterr().out
    assert "one of 3 ranks" in told
    assert "not dealt out    mixer of 6 layers: 4 value heads do not divide among 3 ranks" in told
