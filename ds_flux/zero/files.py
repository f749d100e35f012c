"""The files of a ZeRO checkpoint, memory-mapped: every tensor of the model as pieces of what the ranks wrote.

Imports torch and nothing heavier: DeepSpeed's classes in the files are read as the plain stand-ins below, and nothing else
may be in them (torch's weights_only).
"""

import math
import pickle
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_flux import UserError
from ds_flux.manifest import Manifest
from ds_flux.streaming import Piece, TensorPieces, between, stored, whole

MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
BASE_OPTIMIZER = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""{stage: the name in a rank's file} of the fp32 weights, one flat tensor a group, and of what torch's optimizer says"""
EMA_FILE = "_ema.pt"
"""ends the names of the files with the averages of the weights"""


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
    """A file of a rank, its tensors memory-mapped, with nothing but tensors and the stand-ins allowed in it.

    Raises:
        UserError: something else is in it, which might run code; or it is damaged.
    """
    try:
        with torch.serialization.safe_globals(STAND_INS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  (a damaged pickle raises whatever its bytes lead to)
        refused = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if refused:
            raise UserError(f"{path} is refused: it asks for {refused[1]}, and files may hold tensors only, not code") from None
        reason = "no zip archive of torch.save" if "mmap can only" in str(error) else str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read: {reason or type(error).__name__}") from None


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
    else:
        frozen = in_one_piece(model["frozen_param_fragments"] or {})
    return buffers + frozen + masters(manifest.zero_stage, model["param_shapes"], optimizers)


def has_ema(manifest: Manifest) -> bool:
    """Whether a checkpoint holds averages of the weights."""
    return any(name.endswith(EMA_FILE) for name in manifest.files)


def read_ema(folder: Path, manifest: Manifest) -> list[TensorPieces]:
    """The averages of the weights that train, in fp32 pieces; of any stage.

    Raises:
        UserError: the checkpoint has none.
    """
    if not has_ema(manifest):
        raise UserError(f"{folder} has no EMA weights: it was made without --ema_decay")
    ranks = [load(path) for path in by_rank(folder, manifest, EMA_FILE)]
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in ranks[0]["shapes"]]
    flats = [[rank["flats"][group] for rank in ranks] for group in range(len(shapes))]
    return partitioned(manifest.zero_stage, shapes, flats, ranks[0]["gaps"])


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizers of all ranks hold together, whatever their number and stage was."""

    masters: dict[str, TensorPieces]
    """the fp32 weights, by name"""
    moments: dict[str, dict[str, TensorPieces]]
    """{torch's name, e.g. exp_avg: a tensor for each of the weights, by the weight's name}"""
    numbers: dict[str, Any]
    """what is the same for all weights: step"""
    hyperparameters: dict[str, Any]
    """lr and others, as they were at this step"""


def read_optimizer(folder: Path, manifest: Manifest, model: dict[str, Any]) -> OptimizerState:
    """The trained weights of a checkpoint of stage 1, 2 or 3 in fp32, and the state of their optimizer, all in pieces.

    Args:
        model: the model file of rank 0.
    """
    stage, shapes = manifest.zero_stage, model["param_shapes"]
    optimizers = [load(path)["optimizer_state_dict"] for path in by_rank(folder, manifest, "optim_states.pt")]
    bases = [optimizer[BASE_OPTIMIZER[stage]] for optimizer in optimizers]
    first = bases[0]["state"][0]
    keys = [key for key, value in first.items() if isinstance(value, Tensor) and value.dim() > 0]
    paddings = optimizers[0].get("param_alignment_paddings")

    def moment(key: str) -> dict[str, TensorPieces]:
        flats = [[base["state"][group][key] for base in bases] for group in range(len(shapes))]
        return {tensor.name: tensor for tensor in partitioned(stage, shapes, flats, paddings)}

    return OptimizerState(
        masters={tensor.name: tensor for tensor in masters(stage, shapes, optimizers)},
        moments={key: moment(key) for key in keys},
        numbers={key: number(value) for key, value in first.items() if key not in keys},
        hyperparameters={key: value for key, value in bases[0]["param_groups"][0].items() if key != "params"},
    )


def number(value: Any) -> Any:
    """A number as Python's own; torch counts steps in a tensor of fp32, DeepSpeed in an int."""
    value = value.item() if isinstance(value, Tensor) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def masters(stage: int, groups: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> list[TensorPieces]:
    """The fp32 weights that the ranks' optimizers hold."""
    flats = [[optimizer[MASTERS[stage]][group] for optimizer in optimizers] for group in range(len(groups))]
    return partitioned(stage, groups, flats, optimizers[0].get("param_alignment_paddings"))


def partitioned(
    stage: int, groups: list[dict[str, torch.Size]], flats: list[list[Tensor]], paddings: list[list[int]] | None
) -> list[TensorPieces]:
    """Tensors out of the flat tensors that the ranks hold of each group.

    Args:
        groups: of each group, {name: shape} in the order they follow one another.
        flats: flats[group][rank], 1-D.
        paddings: of each group, the elements that lie behind each of its tensors; stages 1 and 2 only.
    """
    if stage == 3:
        return [tensor for shapes, ranks in zip(groups, flats) for tensor in partitioned_by_tensor(shapes, ranks)]
    gaps = paddings or [[0] * len(shapes) for shapes in groups]
    return [tensor for args in zip(groups, flats, gaps) for tensor in partitioned_by_group(*args)]


def by_rank(folder: Path, manifest: Manifest, ending: str) -> list[Path]:
    """The files of one kind, rank 0 first; the rank is the first number in DeepSpeed's names."""
    names = [name for name in manifest.files if name.endswith(ending)]
    return [folder / name for name in sorted(names, key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])]


def in_one_piece(tensors: dict[str, Tensor]) -> list[TensorPieces]:
    """Tensors that a single file holds."""
    return [whole(name, tensor, is_mapped=True) for name, tensor in tensors.items()]


def partitioned_by_tensor(shapes: dict[str, torch.Size], flats: list[Tensor]) -> list[TensorPieces]:
    """Stage 3: each tensor is cut into equal slices, padded at the end; a rank's flat tensor holds its slices in order."""
    tensors, offset = [], 0
    for name, shape in shapes.items():
        per_rank = math.ceil(shape.numel() / len(flats))
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


def partitioned_by_group(shapes: dict[str, torch.Size], flats: list[Tensor], paddings: list[int]) -> list[TensorPieces]:
    """Stages 1 and 2: a group's tensors follow one another in one long vector, which the ranks hold in equal parts."""
    vector = [stored(flat, 0, flat.numel()) for flat in flats]
    tensors, offset = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings):
        tensors.append(TensorPieces(name, tuple(shape), between(vector, offset, offset + shape.numel())))
        offset += shape.numel() + padding
    return tensors
