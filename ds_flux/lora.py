"""Adapters: inject them into a frozen transformer, start them from a file, and their names in the file that others load."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ds_flux import UserError
from ds_flux.config import LoraConfig
from ds_flux.flags import check_known

FILE_NAME = "pytorch_lora_weights.safetensors"
ADAPTER = "default"  # diffusers' name of the only adapter


def inject(transformer: Any, config: LoraConfig, default_layers: tuple[str, ...], seed: int) -> None:
    """Freeze the transformer and add trainable adapters, the same on every rank and at every ZeRO stage.

    Raises:
        UserError: a name in --lora_layers matches no linear layer.
    """
    from peft import LoraConfig as PeftConfig  # slow to import, and only here

    layers = adapted_layers(config, default_layers)
    check_layers(transformer, layers)
    transformer.requires_grad_(False)
    torch.manual_seed(seed)
    transformer.add_adapter(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.lora_dropout,
            target_modules=layers,
            init_lora_weights="gaussian",
        )
    )
    if config.lora_init_from:
        start_from(transformer, config)


def adapted_layers(config: LoraConfig, default_layers: tuple[str, ...]) -> list[str]:
    """--lora_layers, or the family's."""
    return [name.strip() for name in config.lora_layers.split(",")] if config.lora_layers else list(default_layers)


def check_layers(transformer: nn.Module, layers: list[str]) -> None:
    """Every name is the end of the path of some linear layer."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    known = {path for name in linear for path in tails(name)}
    check_known(layers, known, "LoRA layer (--lora_layers)")


def tails(path: str) -> list[str]:
    """ "a.b.c" -> ["c", "b.c", "a.b.c"]."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def start_from(transformer: nn.Module, config: LoraConfig) -> None:
    """Copy the adapters of --lora_init_from; UserError unless it has exactly the tensors this run trains."""
    file = LoraFile.open(Path(str(config.lora_init_from)))
    wanted = {file_name(name): parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    here = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    if here != shapes:
        differ = min(name for name in {**here, **shapes} if here.get(name) != shapes.get(name))
        raise UserError(
            f"{file.path} does not fit --rank {config.rank} and --lora_layers: {differ} is {here.get(differ, 'missing')} "
            f"there and {shapes.get(differ, 'missing')} here"
        )
    if file.alpha != config.alpha:
        raise UserError(f"{file.path} has lora_alpha {file.alpha:g}: give --lora_alpha {file.alpha:g}")
    with torch.no_grad():
        for name, tensor in file.tensors.items():
            wanted[name].copy_(tensor)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA on disk, as `ds-flux consolidate` writes it."""

    path: Path
    tensors: dict[str, Tensor]
    alpha: float
    """of all layers; a file that has none means the rank"""

    @property
    def rank(self) -> int:
        """Rows of the first down projection."""
        return next(tensor.shape[0] for name, tensor in self.tensors.items() if name.endswith(".lora_A.weight"))

    @staticmethod
    def open(path: Path) -> "LoraFile":
        """Read it.  Raises UserError when it is absent or no LoRA."""
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"LoRA {path}: no such file")
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise UserError(f"LoRA {path} cannot be read: {error}") from None
        alphas = {tensor.item() for name, tensor in stored.items() if name.endswith(".alpha")}
        tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(".alpha")}
        strange = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
        if strange or not tensors or len(alphas) > 1:
            raise UserError(f"LoRA {path}: expected lora_A and lora_B weights with one alpha, found {strange[:1] or alphas}")
        file = LoraFile(path, tensors, 0.0)
        return replace(file, alpha=alphas.pop() if alphas else float(file.rank))


def config_of_file(path: Path) -> LoraConfig:
    """The settings that inject and load the adapters of a file."""
    file = LoraFile.open(path)
    downs = [name for name in file.tensors if name.endswith(".lora_A.weight")]
    layers = ",".join(name.removeprefix("transformer.").removesuffix(".lora_A.weight") for name in downs)
    return LoraConfig(rank=file.rank, lora_alpha=file.alpha, lora_layers=layers, lora_init_from=str(file.path))


def file_name(parameter_name: str) -> str:
    """`x.lora_A.default.weight` -> `transformer.x.lora_A.weight`, the only form that every loader takes."""
    return "transformer." + parameter_name.replace(f".{ADAPTER}.", ".")
