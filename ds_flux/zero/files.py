"""The files of a ZeRO checkpoint, memory-mapped: every tensor of the model as pieces of what the ranks wrote.

Imports torch and nothing heavier: DeepSpeed's classes in the files are read as the plain stand-ins below, and nothing else
may be in them (torch's weights_only).
"""

import math
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_flux.manifest import Manifest
from ds_flux.streaming import Piece, TensorPieces, between, stored, whole


class ZeroStageEnum(IntEnum):
    """Stands in for deepspeed.runtime.zero.config.ZeroStageEnum."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class Inert:
    """Stands in for classes whose state does not matter here."""


STAND_INS: list[Any] = [
    (ZeroStageEnum, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load(path: Path) -> Any:
    """A file of a rank, its tensors memory-mapped, with nothing but tensors and the stand-ins allowed in it."""
    with torch.serialization.safe_globals(STAND_INS):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def read_checkpoint(folder: Path, manifest: Manifest) -> list[TensorPieces]:
    """Every tensor of the model in fp32 pieces (stage 0: as the module holds it), in the model's own order."""
    model_files = by_rank(folder, manifest, "model_states.pt")
    optimizer_files = by_rank(folder, manifest, "optim_states.pt")
    model = load(model_files[0])
    if manifest.zero_stage == 0:
        return in_one_piece(model["module"])
    buffers = in_one_piece({name: tensor for name, tensor in model["module"].items() if name in set(model["buffer_names"])})
    optimizers = [load(path)["optimizer_state_dict"] for path in optimizer_files]
    if manifest.zero_stage == 3:
        frozen = partitioned_frozen(model, [load(path) for path in model_files])
        return buffers + frozen + partitioned_by_tensor(model["param_shapes"], optimizers)
    return (
        buffers + in_one_piece(model["frozen_param_fragments"] or {}) + partitioned_by_group(model["param_shapes"], optimizers)
    )


def by_rank(folder: Path, manifest: Manifest, ending: str) -> list[Path]:
    """The files of one kind, rank 0 first; the rank is the first number in DeepSpeed's names."""
    names = [name for name in manifest.files if name.endswith(ending)]
    return [folder / name for name in sorted(names, key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])]


def in_one_piece(tensors: dict[str, Tensor]) -> list[TensorPieces]:
    """Tensors that a single file holds."""
    return [whole(name, tensor, is_mapped=True) for name, tensor in tensors.items()]


def partitioned_by_tensor(groups: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> list[TensorPieces]:
    """Stage 3: each tensor is cut into equal slices, padded at the end; a rank's flat group holds its slices in order."""
    world_size, tensors = len(optimizers), []
    for group, shapes in enumerate(groups):
        flats = [optimizer["fp32_flat_groups"][group] for optimizer in optimizers]
        offset = 0
        for name, shape in shapes.items():
            per_rank = math.ceil(shape.numel() / world_size)
            tensors.append(TensorPieces(name, tuple(shape), slices(flats, offset, per_rank, shape.numel())))
            offset += per_rank
    return tensors


def partitioned_frozen(model: dict[str, Any], models: list[dict[str, Any]]) -> list[TensorPieces]:
    """Stage 3: the frozen tensors, whose slices are in the ranks' model files; none where the checkpoint left them out."""
    tensors = []
    for name in model["frozen_param_fragments"] or {}:
        shape = model["frozen_param_shapes"][name]
        flats = [rank_model["frozen_param_fragments"][name] for rank_model in models]
        tensors.append(TensorPieces(name, tuple(shape), slices(flats, 0, flats[0].numel(), shape.numel())))
    return tensors


def slices(flats: list[Tensor], offset: int, per_rank: int, numel: int) -> list[Piece]:
    """The slices of one tensor on each rank, without the padding."""
    counts = [max(0, min(per_rank, numel - rank * per_rank)) for rank in range(len(flats))]
    return [stored(flat, offset, count) for flat, count in zip(flats, counts) if count]


def partitioned_by_group(groups: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> list[TensorPieces]:
    """Stages 1 and 2: a group's tensors follow one another in one long vector, which the ranks hold in equal parts."""
    tensors = []
    for group, shapes in enumerate(groups):
        flats = [optimizer["single_partition_of_fp32_groups"][group] for optimizer in optimizers]
        vector = [stored(flat, 0, flat.numel()) for flat in flats]
        offset = 0
        for name, shape in shapes.items():
            tensors.append(TensorPieces(name, tuple(shape), between(vector, offset, offset + shape.numel())))
            offset += shape.numel()
    return tensors
