"""What a checkpoint without our manifest does not say: which transformer it is of, and which names are the transformer's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_flux import UserError
from ds_flux.families.spelling import SPELLINGS
from ds_flux.streaming import TensorPieces

WRAPPERS = ("module.", "_orig_mod.", "transformer.", "model.")
"""what DDP, torch.compile and modules that hold a transformer put before its names"""


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The class and config of a transformer, from its folder, the folder of its model, or its config.json.

    Raises:
        UserError: there is none, or it is of no transformer known here.
    """
    places = (path, path / "config.json", path / "transformer" / "config.json")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise UserError(f"--config {path}: neither a config.json nor the folder of a transformer or of a model")
    try:
        stored = json.loads(file.read_text())
        transformer_class = stored["_class_name"]
        config = {key: value for key, value in stored.items() if not key.startswith("_")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--config {file} is no config of a diffusers transformer: {type(error).__name__} {error}") from None
    if transformer_class not in SPELLINGS:
        raise UserError(f"--config {file} is of a {transformer_class}: expected one of {', '.join(SPELLINGS)}")
    return transformer_class, config


def transformers_own(tensors: list[TensorPieces], folder: Path) -> tuple[list[TensorPieces], list[str]]:
    """The transformer's tensors by diffusers' names, and the names of those that are of something beside it.

    Raises:
        UserError: they are a LoRA's, or two have one name.
    """
    others: list[str] = []
    while prefix := wrapper_of(tensors):
        inside = [tensor for tensor in tensors if tensor.name.startswith(prefix)]
        others += [tensor.name for tensor in tensors if not tensor.name.startswith(prefix)]
        tensors = [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in inside]
    adapter = next((tensor.name for tensor in tensors if ".lora_" in tensor.name), None)
    if adapter is not None:
        raise UserError(f"{folder} is of a LoRA ({adapter}), whose alpha it does not hold: only all weights are read from it")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise UserError(f"{folder} holds several tensors of one name")
    return tensors, others


def wrapper_of(tensors: list[TensorPieces]) -> str | None:
    """A prefix that all names have; or `transformer.`, where something else stands beside it."""
    names = [tensor.name for tensor in tensors]
    common = (prefix for prefix in WRAPPERS if names and all(name.startswith(prefix) for name in names))
    return next(common, "transformer." if any(name.startswith("transformer.") for name in names) else None)
