"""Adapters: inject them into a frozen transformer, start them from a file, and their names in the file that others load."""

import json
import math
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ds_flux import UserError
from ds_flux.config import LoraConfig
from ds_flux.flags import check_known, names_of

if TYPE_CHECKING:
    from ds_flux.families.spec import FluxFamily

FILE_NAME = "pytorch_lora_weights.safetensors"
ADAPTER = "default"  # diffusers' name of the only adapter
ADAPTER_METADATA = "lora_adapter_metadata"  # where diffusers keeps peft's settings in a file's header


def inject(transformer: Any, config: LoraConfig, family: "FluxFamily", seed: int) -> None:
    """Freeze the transformer and add trainable adapters, the same on every rank and at every ZeRO stage.

    Raises:
        UserError: a name in --lora_layers matches no linear layer, or --lora_init_from does not fit.
    """
    from peft import LoraConfig as PeftConfig  # slow to import, and only here

    layers = matched_layers(transformer, adapted_layers(config, family))
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
        start_from(transformer, config, family)


def adapted_layers(config: LoraConfig, family: "FluxFamily") -> list[str]:
    """--lora_layers, or the family's."""
    return names_of(config.lora_layers) or list(family.lora_layers)


def matched_layers(transformer: nn.Module, layers: list[str]) -> list[str]:
    """The paths of all linear layers that `layers` mean: each is the end of a path, or a pattern with * for one.

    Raises:
        UserError: one of them means no linear layer; the nearest that does is named.
    """
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    known = {path for name in linear for path in tails(name)}
    check_known([layer for layer in layers if "*" not in layer], known, "LoRA layer (--lora_layers)")
    for pattern in layers:
        if not any(means(pattern, name) for name in linear):
            raise UserError(f"--lora_layers {pattern} matches no linear layer; there are {', '.join(summary(linear))}")
    return [name for name in linear if any(means(layer, name) for layer in layers)]


def means(layer: str, path: str) -> bool:
    """Whether a name or pattern stands for a layer."""
    return fnmatchcase(path, layer) or fnmatchcase(path, f"*.{layer}")


def summary(paths: list[str]) -> list[str]:
    """Paths that differ in a block's number alone as one: "blocks.{0..18}.attn.to_q"."""
    blocks: dict[str, list[int]] = {}
    for path in paths:
        number = re.search(r"\.(\d+)\.", path)
        name = path.replace(number[0], ".{}.", 1) if number else path
        blocks.setdefault(name, []).append(int(number[1]) if number else 0)
    return [name.replace("{}", f"{{{min(n)}..{max(n)}}}") for name, n in blocks.items()]


def tails(path: str) -> list[str]:
    """ "a.b.c" -> ["c", "b.c", "a.b.c"]."""
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def start_from(transformer: nn.Module, config: LoraConfig, family: "FluxFamily") -> None:
    """Copy the adapters of --lora_init_from; UserError unless it has exactly the tensors this run trains."""
    file = LoraFile.open(Path(str(config.lora_init_from)), family)
    wanted = {file_name(name): parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    here = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
    if here != shapes:
        differ = min(name for name in {**here, **shapes} if here.get(name) != shapes.get(name))
        raise UserError(
            f"{file.path} does not fit --rank {config.rank} and --lora_layers: {differ} is {here.get(differ, 'missing')} "
            f"there and {shapes.get(differ, 'missing')} here"
        )
    if not math.isclose(file.alpha, config.alpha, rel_tol=1e-6):  # files hold it in fp32
        raise UserError(f"{file.path} has lora_alpha {file.alpha:g}: give --lora_alpha {file.alpha:g}")
    with torch.no_grad():
        for name, tensor in file.tensors.items():
            wanted[name].copy_(tensor)


@dataclass(frozen=True)
class LoraFile:
    """A LoRA on disk, in diffusers' names whatever its own spelling."""

    path: Path
    tensors: dict[str, Tensor]
    alpha: float
    """of all layers; a file that has none means the rank"""

    @property
    def rank(self) -> int:
        """Rows of the first down projection."""
        return next(tensor.shape[0] for name, tensor in self.tensors.items() if name.endswith(".lora_A.weight"))

    @staticmethod
    def open(path: Path, family: "FluxFamily") -> "LoraFile":
        """Read it.  Raises UserError when it is absent or no LoRA of this family."""
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"LoRA {path}: no such file")
        try:
            with safe_open(path, "pt") as file:
                metadata = json.loads((file.metadata() or {}).get(ADAPTER_METADATA, "{}"))
            stored = load_file(path)
            alphas = {tensor.item() for name, tensor in stored.items() if name.endswith(".alpha")}
            is_ours = all(name.endswith((".lora_A.weight", ".lora_B.weight", ".alpha")) for name in stored)
            if not (is_ours and all(name.startswith("transformer.") for name in stored)):
                # diffusers reads the other spellings, and multiplies their alpha into the weights
                stored, alphas = family.lora_loader.lora_state_dict(dict(stored)), set()
        except (SafetensorError, ValueError, KeyError, AssertionError) as error:
            raise UserError(f"LoRA {path} cannot be read: {' '.join(str(error).split())[:300]}") from None
        tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(".alpha")}
        strange = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
        if strange or not tensors or len(alphas) > 1:
            raise UserError(f"LoRA {path}: expected lora_A and lora_B weights with one alpha, found {strange[:1] or alphas}")
        file = LoraFile(path, tensors, 0.0)
        alpha = metadata.get("transformer.lora_alpha", file.rank)
        return replace(file, alpha=float(alphas.pop() if alphas else alpha))


def config_of_file(path: Path, family: "FluxFamily") -> LoraConfig:
    """The settings that inject and load the adapters of a file."""
    file = LoraFile.open(path, family)
    downs = [name for name in file.tensors if name.endswith(".lora_A.weight")]
    layers = [name.removeprefix("transformer.").removesuffix(".lora_A.weight") for name in downs]
    return LoraConfig(rank=file.rank, lora_alpha=file.alpha, lora_layers=layers, lora_init_from=str(file.path))


def file_name(parameter_name: str) -> str:
    """`x.lora_A.default.weight` -> `transformer.x.lora_A.weight`, the only form that every loader takes."""
    return "transformer." + parameter_name.replace(f".{ADAPTER}.", ".")
