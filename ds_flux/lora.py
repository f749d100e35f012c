"""Adapters: inject them into a frozen transformer, start them from a file, and their names in the file that others load."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ds_flux import UserError
from ds_flux.config import LoraConfig, check_known

FILE_NAME = "pytorch_lora_weights.safetensors"
ADAPTER = "default"  # diffusers' name of the only adapter


def inject(transformer: Any, config: LoraConfig, default_layers: tuple[str, ...], seed: int) -> None:
    """Freeze the transformer and add trainable adapters, the same on every rank and at every ZeRO stage.

    Raises:
        UserError: a name in --lora_layers matches no linear layer.
    """
    from peft import LoraConfig as PeftConfig  # slow to import, and only here

    layers = [name.strip() for name in config.lora_layers.split(",")] if config.lora_layers else list(default_layers)
    check_layers(transformer, layers)
    transformer.requires_grad_(False)
    torch.manual_seed(seed)
    transformer.add_adapter(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.lora_alpha if config.lora_alpha is not None else config.rank,
            lora_dropout=config.lora_dropout,
            target_modules=layers,
            init_lora_weights="gaussian",
        )
    )
    if config.lora_init_from:
        start_from(transformer, config)


def check_layers(transformer: nn.Module, layers: list[str]) -> None:
    """Every name is the end of the path of some linear layer."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    known = {path for name in linear for path in tails(name)}
    check_known(layers, known, "LoRA layer (--lora_layers)")


def tails(path: str) -> list[str]:
    """"a.b.c" -> ["c", "b.c", "a.b.c"]."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def start_from(transformer: nn.Module, config: LoraConfig) -> None:
    """Copy the adapters of --lora_init_from; UserError unless it has exactly the tensors this run trains."""
    path = Path(str(config.lora_init_from))
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--lora_init_from {path}: no such file")
    found = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(".alpha")}
    wanted = {file_name(name): parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    if {n: tuple(t.shape) for n, t in found.items()} != {n: tuple(p.shape) for n, p in wanted.items()}:
        differ = sorted(set(found) ^ set(wanted)) or sorted(n for n in found if found[n].shape != wanted[n].shape)
        raise UserError(f"--lora_init_from {path} does not fit --rank {config.rank} and --lora_layers: {differ[0]} differs")
    if read_alpha(path, config.rank) != (config.lora_alpha or config.rank):
        raise UserError(f"--lora_init_from {path} has lora_alpha {read_alpha(path, config.rank)}: give the same --lora_alpha")
    with torch.no_grad():
        for name, tensor in found.items():
            wanted[name].copy_(tensor)


def read_alpha(path: Path, rank: int | None) -> float | None:
    """The alpha that a LoRA file carries, or its rank, which is what a file without one means."""
    with safe_open(path, "pt") as file:
        name = next((name for name in file.keys() if name.endswith(".alpha")), None)
        return file.get_tensor(name).item() if name else rank


def file_name(parameter_name: str) -> str:
    """`x.lora_A.default.weight` -> `transformer.x.lora_A.weight`, the only form that every loader takes."""
    return "transformer." + parameter_name.replace(f".{ADAPTER}.", ".")
