"""Base weights with a LoRA added: read, added in fp32 and written piece by piece; only the adapters are in memory."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_flux import UserError
from ds_flux.streaming import TensorPieces, computed, in_memory, rows, whole

WEIGHTS_NAME = "diffusion_pytorch_model"


def read_base(path: Path, flag: str = "--merge_lora") -> tuple[str, dict[str, Any], list[TensorPieces]]:
    """The class name, config and tensors of a transformer in diffusers' layout, or of the one in a model folder.

    Raises:
        UserError: there is none, or a file is missing or cut short; `flag` is what gave the path.
    """
    files = weight_files(path, flag)
    try:
        stored = json.loads((transformer_folder(path) / "config.json").read_text())
        transformer_class = stored["_class_name"]
        tensors = [tensor for file in files for tensor in read_file(file)]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from None
    config = {key: value for key, value in stored.items() if not key.startswith("_")}
    return transformer_class, config, tensors


def transformer_folder(path: Path) -> Path:
    """The path itself, or the transformer's folder in a model's."""
    return path / "transformer" if (path / "transformer").is_dir() else path


def weight_files(path: Path, flag: str) -> list[Path]:
    """The weight files of a transformer in diffusers' layout, by its index where it has one.  Raises as read_base."""
    folder = transformer_folder(path)
    index = folder / f"{WEIGHTS_NAME}.safetensors.index.json"
    if not (folder / "config.json").is_file():
        raise UserError(f"{flag} {path}: neither a transformer in diffusers' layout nor a folder with one: no config.json")
    if not index.is_file():
        return [folder / f"{WEIGHTS_NAME}.safetensors"]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{flag} {index} cannot be read: {error}") from None


def read_file(path: Path) -> list[TensorPieces]:
    """Every tensor of a safetensors file, which safe_open maps into memory."""
    with safe_open(path, "pt") as file:
        return [whole(name, file.get_tensor(name), is_mapped=True) for name in file.keys()]  # noqa: SIM118


def merged(
    base: list[TensorPieces], adapters: dict[str, tuple[TensorPieces, TensorPieces]], scale: float
) -> list[TensorPieces]:
    """Every weight of the base, plus scale * up @ down where there is an adapter {layer: (down, up)}.

    Raises:
        UserError: an adapter finds no layer, or one of another shape.
    """
    shapes = {tensor.name: tensor.shape for tensor in base}
    for layer, (down, up) in adapters.items():
        here, there = shapes.get(f"{layer}.weight"), (up.shape[0], down.shape[1])
        if here != there:
            raise UserError(f"the LoRA is of another base: it changes {layer} {there}, which is {here or 'missing'} there")
    in_full = {f"{layer}.weight": (in_memory(down), in_memory(up)) for layer, (down, up) in adapters.items()}
    return [plus(tensor, *in_full[tensor.name], scale) if tensor.name in in_full else tensor for tensor in base]


def plus(weight: TensorPieces, down: Tensor, up: Tensor, scale: float) -> TensorPieces:
    """weight (out, in) + scale * up (out, rank) @ down (rank, in)."""

    def make(first: int, last: int) -> Tensor:
        return in_memory(rows(weight, first, last)) + scale * (up[first:last] @ down)

    return computed(weight, weight.shape[1], make)
