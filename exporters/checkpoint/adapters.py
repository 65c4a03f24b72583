"""Adapters (LoRA and its kin, of the library PEFT): changes to a model, which are no model by themselves."""

from __future__ import annotations

import re

from edgeinfer.common.arguments import shown
from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint.folder import Folder

CONFIG = "adapter_config.json"
_FILES = r"adapter_config\.json|adapter_model(-\d+-of-\d+)?\.(safetensors|bin)"
_MODEL = r"(?!adapter_).*\.safetensors(\.index\.json)?"
_OF_ADAPTER = re.compile(
    r"base_model\.model\..*|.*\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)\b.*"
)
_HOW = (
    "merge it first: peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload().save_pretrained(OTHER), "
    "and the same for the tokenizer"
)


def refuse_adapter(folder: Folder) -> None:
    """Raises UnsupportedModel for a folder with an adapter and no model."""
    if not folder.names(_FILES) or folder.names(_MODEL):
        return
    raise UnsupportedModel(f"{folder.path}: is an adapter (PEFT){_base_of(folder)}, no model: {_HOW}")


def adapter_files(folder: Folder) -> list[str]:
    """Names of the files of an adapter in a folder, also of one in a folder of its own there. Raises ModelFileError."""
    inner = [name for name in folder.names(r"[^.].*") if (folder.path / name / CONFIG).is_file()]
    return [*folder.names(_FILES), *(f"{name}/{CONFIG}" for name in inner)]


def refuse_unmerged(folder: Folder, names: list[str]) -> None:
    """Raises UnsupportedModel where tensors are those of a model with an adapter that is not merged into it."""
    found = next((name for name in names if _OF_ADAPTER.fullmatch(name)), None)
    if found is not None:
        raise UnsupportedModel(f"{folder.path}: tensor {found:.120} is of an adapter (PEFT) that is not merged: {_HOW}")


def _base_of(folder: Folder) -> str:
    """Of which model, where the adapter says it."""
    try:
        base = folder.optional_json(CONFIG).get("base_model_name_or_path")
    except ModelFileError:
        return ""
    return f" of {shown(base)}" if isinstance(base, str) and base else ""
