"""The tensors of a checkpoint by the names that others read: diffusers', the original repositories', ComfyUI's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_flux import UserError, lora
from ds_flux.families.spelling import Layer, Spelling, spelling_of
from ds_flux.streaming import TensorPieces, computed, concatenated, in_memory, rows, whole, with_halves_swapped, zeros

Format = Literal["diffusers", "bfl", "comfyui"]


def weights(tensors: list[TensorPieces], transformer_class: str, form: Format) -> list[TensorPieces]:
    """All weights.  ComfyUI reads the original names.  Raises UserError where a tensor has none, or not all of its parts."""
    if form == "diffusers":
        return tensors
    spelling, by_name = spelling_of(transformer_class), {tensor.name: tensor for tensor in tensors}
    originals: dict[str, TensorPieces] = {}
    for tensor in tensors:
        layer_name, _, kind = tensor.name.rpartition(".")
        layer = spelling.find(layer_name)
        # what an RMS norm multiplies by is called scale there
        name = f"{layer.original}.{'scale' if layer.original.endswith('_norm') else kind}"
        parts = [f"{part}.{kind}" for part in layer.parts]
        missing = [part for part in parts if part not in by_name]
        if missing:
            raise UserError(f"{name} cannot be put together: {missing[0]} is missing")
        originals[name] = in_order(layer, concatenated(name, [by_name[part] for part in parts]))
    return list(originals.values())


def in_order(layer: Layer, tensor: TensorPieces) -> TensorPieces:
    """The rows as the original has them."""
    return with_halves_swapped(tensor) if layer.is_swapped else tensor


# ---------------------------------------------------------------------------------------------------------------------
# LoRA


@dataclass(frozen=True)
class Lora:
    """What a LoRA adds to each layer's weight: alpha / rank * up @ down."""

    layers: dict[str, tuple[TensorPieces, TensorPieces]]
    """{diffusers' name: (down (rank, in), up (out, rank))}"""
    alpha: float

    @property
    def rank(self) -> int:
        """Of every layer."""
        return next(iter(self.layers.values()))[0].shape[0]

    @property
    def scale(self) -> float:
        """What up @ down is multiplied by."""
        return self.alpha / self.rank


def lora_of(tensors: list[TensorPieces], alpha: float) -> Lora:
    """The tensors sorted by layer.  Raises UserError unless each has its two, all of one rank."""
    sides: dict[str, dict[str, TensorPieces]] = {}
    for tensor in tensors:
        found = re.fullmatch(r"transformer\.(.+)\.lora_([AB])\.weight", lora.file_name(tensor.name))
        if not found:
            raise UserError(f"expected lora_A and lora_B weights by diffusers' names, found {tensor.name}")
        sides.setdefault(found[1], {})[found[2]] = tensor
    ranks = {tensor.shape["AB".index(side)] for pair in sides.values() for side, tensor in pair.items()}
    if len(ranks) != 1 or any(len(pair) != 2 for pair in sides.values()):
        raise UserError(f"expected a lora_A and a lora_B for each layer, all of one rank; found ranks {sorted(ranks)}")
    return Lora({layer: (pair["A"], pair["B"]) for layer, pair in sides.items()}, alpha)


def read_lora_file(path: Path) -> Lora:
    """A file that `diffusers_lora` named the tensors of.

    Raises:
        UserError: it is absent or something else, perhaps with a scale that is told in another way.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"LoRA {path} cannot be read: {error}") from None
    alphas = [stored.pop(name).item() for name in list(stored) if name.endswith(".alpha")]
    found = lora_of([whole(name.removeprefix("transformer."), tensor, is_mapped=True) for name, tensor in stored.items()], 0.0)
    if "lora_adapter_metadata" in metadata or len(set(alphas)) > 1 or len(alphas) not in (0, len(found.layers)):
        raise UserError(f"LoRA {path} has scales that ds-flux consolidate does not write: merge it with the tool that made it")
    return replace(found, alpha=alphas[0] if alphas else float(found.rank))


def lora_weights(adapters: Lora, transformer_class: str, form: Format) -> list[TensorPieces]:
    """A LoRA's file.  Raises UserError for a format that has none."""
    if form == "bfl":
        raise UserError("--format bfl has no LoRA files: choose diffusers or comfyui, or --merge_lora BASE for all weights")
    spelling = spelling_of(transformer_class)
    if form == "diffusers":
        return list(diffusers_lora(adapters, spelling.reads_alpha))
    return list(kohya_lora(adapters, spelling) if spelling.reads_kohya else dotted_lora(adapters, spelling))


def diffusers_lora(adapters: Lora, reads_alpha: bool) -> Iterator[TensorPieces]:
    """With `.alpha` where it is not the rank; or, where the loader refuses it, with the scale in lora_B.

    Not as `lora_adapter_metadata` in the header, which ComfyUI does not read.
    """
    for layer, (down, up) in adapters.layers.items():
        yield replace(down, name=lora.file_name(f"{layer}.lora_A.weight"))
        yield replace(up if reads_alpha else scaled(up, adapters.scale), name=lora.file_name(f"{layer}.lora_B.weight"))
        if reads_alpha and adapters.alpha != adapters.rank:
            yield number(lora.file_name(f"{layer}.alpha"), adapters.alpha)


def dotted_lora(adapters: Lora, spelling: Spelling) -> Iterator[TensorPieces]:
    """The original names with lora_A and lora_B, the scale in lora_B; for families whose layers are not fused."""
    for name, (down, up) in adapters.layers.items():
        layer = spelling.find(name)
        yield replace(down, name=f"diffusion_model.{layer.original}.lora_A.weight")
        up = in_order(layer, scaled(up, adapters.scale))
        yield replace(up, name=f"diffusion_model.{layer.original}.lora_B.weight")


def kohya_lora(adapters: Lora, spelling: Spelling) -> Iterator[TensorPieces]:
    """The original names as sd-scripts writes them, with an alpha each.

    A fused layer of n parts has rank n * rank and n times the alpha: the downs one below the other, the ups block-diagonal.
    Parts without an adapter are zeros: loaders know the form by its n equal blocks.  ComfyUI reads any layer; diffusers' own
    converters those inside the blocks, others not at all or without the scale.
    """
    for layer in {layer.original: layer for layer in map(spelling.find, adapters.layers)}.values():
        name = "lora_unet_" + layer.original.replace(".", "_")
        parts = complete([adapters.layers.get(part) for part in layer.parts], layer.shares)
        yield concatenated(f"{name}.lora_down.weight", [down for down, _ in parts])
        up = concatenated(f"{name}.lora_up.weight", block_diagonal([up for _, up in parts]))
        yield in_order(layer, up)
        yield number(f"{name}.alpha", adapters.alpha * len(parts))


def complete(
    parts: list[tuple[TensorPieces, TensorPieces] | None], shares: tuple[int, ...]
) -> list[tuple[TensorPieces, TensorPieces]]:
    """With zeros for the parts of a layer that have no adapter; their rows follow from those of one that has."""
    (down, up), share = next((part, share) for part, share in zip(parts, shares) if part is not None)
    rank, unit = down.shape[0], up.shape[0] // share
    absent = [(zeros("", down.shape), zeros("", (unit * share, rank))) for share in shares]
    return [part or zero for part, zero in zip(parts, absent)]


def block_diagonal(blocks: list[TensorPieces]) -> list[TensorPieces]:
    """The rows of each block with zeros to its left and right."""
    width = sum(block.shape[1] for block in blocks)

    def widened(block: TensorPieces, left: int) -> TensorPieces:
        def make(first: int, last: int) -> Tensor:
            out = torch.zeros(last - first, width)
            out[:, left : left + block.shape[1]] = in_memory(rows(block, first, last))
            return out

        return computed(block, width, make)

    return [widened(block, sum(before.shape[1] for before in blocks[:i])) for i, block in enumerate(blocks)]


def scaled(tensor: TensorPieces, factor: float) -> TensorPieces:
    """A matrix times a number."""
    return computed(tensor, tensor.shape[1], lambda first, last: in_memory(rows(tensor, first, last)) * factor)


def number(name: str, value: float) -> TensorPieces:
    """A scalar, exact to fp32 whatever the weights are."""
    return replace(whole(name, torch.tensor(value)), dtype=torch.float32)
