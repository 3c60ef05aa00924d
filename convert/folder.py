"""Everything in a model folder that is not weights: config.json as mlx_lm writes it, tokenizer, chat template."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from pathlib import Path

from .plan import MTP_FILE, Options, Plan

SIDE_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.tiktoken", "chat_template*",
    "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
MODEL_FILE = "modeling_mlx.py"
SHIM = '''\
"""Lets stock mlx_lm run a model type that it does not know; it asks to be told to trust remote code."""

try:
    from mlx_linattn.interop.stock import Model, ModelArgs
except ImportError as error:
    raise ImportError("this model needs mlx-linattn: pip install mlx-linattn") from error

__all__ = ["Model", "ModelArgs"]
'''
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def result_config(plan: Plan, options: Options) -> dict:
    """The config of the result, from the source's."""
    result = {
        key: copy.deepcopy(value) for key, value in plan.config.items() if key not in ("_name_or_path", "vision_config")
    }
    for part in (result, result.get("text_config") or {}):
        part.pop("quantization", None)
        part.pop("quantization_config", None)
    result["model_type"] = plan.model_type
    result.pop("model_file", None)
    if plan.stock_problem:
        result["model_file"] = MODEL_FILE
    if options.dtype is not None:
        _set_dtype(result, NAMES[options.dtype])
    block = quantization_block(plan)
    if block is not None:
        result["quantization"] = result["quantization_config"] = block
    return dict(sorted(result.items()))


def _set_dtype(config: dict, dtype: str) -> None:
    parts = [part for part in (config, config.get("text_config") or {}) if {"dtype", "torch_dtype"} & part.keys()]
    for part in parts:
        part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
    if not parts:
        config["dtype"] = dtype


def quantization_block(plan: Plan) -> dict | None:
    """config.json's block: the commonest quantization, and by module every other one."""
    used = {entry.module: entry.quantization for entry in plan.entries if entry.quantization is not None}
    if not used:
        return None
    default = Counter(used.values()).most_common(1)[0][0]
    others = {module: one.config() for module, one in used.items() if one != default}
    return default.config() | others


def side_files(folder: Path, options: Options) -> list[Path]:
    """What goes along unchanged."""
    patterns = (*SIDE_FILES, MTP_FILE) if options.keep_mtp else SIDE_FILES
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def missing(folder: Path) -> list[str]:
    """What a complete model folder has and this one lacks, as sentences."""
    notes = []
    if not any((folder / name).exists() for name in TOKENIZERS):
        notes.append(f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}): the result can be loaded, not chatted with")
    return notes


def copy_files(files: list[Path], target: Path) -> None:
    for file in files:
        if file.is_dir():
            shutil.copytree(file, target / file.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, target / file.name)


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
