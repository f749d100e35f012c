"""ZeRO checkpoint -> safetensors that diffusers and others load; one process, streaming, any stage and number of ranks.

The ranks' files are memory-mapped and written out in pieces, so memory does not grow with the model.  This module imports
torch and nothing heavier: DeepSpeed's classes in the files are read as the plain stand-ins below, and nothing else may be in
them (torch's weights_only).
"""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from tqdm import tqdm

from ds_flux import UserError, lora
from ds_flux.flags import parse
from ds_flux.manifest import MANIFEST, Manifest, find, read_manifest

SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE_NUMEL = 1 << 20
FLUSH_BYTES = 64 << 20
WEIGHTS_NAME = "diffusion_pytorch_model"


@dataclass(frozen=True, kw_only=True)
class ConsolidateConfig:
    """consolidation"""

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """of the tensors written"""
    max_shard_size: str = "10GB"
    """largest weight file, e.g. 5GB or 500MB"""


@dataclass(frozen=True)
class Piece:
    """A run of elements of one rank's flat tensor."""

    source: Tensor  # 1-D, memory-mapped
    start: int
    count: int


@dataclass(frozen=True)
class TensorPieces:
    """One tensor of the model, and the pieces that follow one another in it."""

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def main(argv: list[str]) -> int:
    """`ds-flux consolidate CHECKPOINT OUT`."""
    parser = ArgumentParser(prog="ds-flux consolidate", exit_on_error=False)
    parser.add_argument("checkpoint", type=str, help="folder of a checkpoint, or of a run: then its latest one")
    parser.add_argument("out", type=str, help="folder to write; it must not exist")
    parser.add_class_arguments(ConsolidateConfig)
    settings = parse(parser, argv)
    folder = find_checkpoint(Path(settings.checkpoint))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.dtype]
    written = consolidate(folder, Path(settings.out), dtype, parse_size(settings.max_shard_size))
    print(f"{folder} -> {', '.join(map(str, written[:3]))}{' ...' if len(written) > 3 else ''}")
    return 0


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the latest one of a run's folder."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    found = path if (path / MANIFEST).exists() else find(path, "latest")
    if found is None:
        raise UserError(f"{path} is no checkpoint and has none in it: there is no {MANIFEST}")
    return found


def parse_size(text: str) -> int:
    """ "5GB" -> bytes (powers of ten, as in transformers and diffusers)."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise UserError(f"--max_shard_size {text}: expected a number and KB, MB or GB, e.g. 5GB") from None
    if size <= 0:
        raise UserError(f"--max_shard_size {text} must be more than nothing")
    return size


def consolidate(folder: Path, out: Path, dtype: torch.dtype, max_shard_bytes: int) -> list[Path]:
    """Write the weights of a checkpoint to folder `out`, complete or not at all.

    All weights: `diffusion_pytorch_model*.safetensors`, their index and config.json.  A LoRA: one file.

    Raises:
        UserError: the checkpoint is not whole, or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or choose another name")
    manifest = read_manifest(folder)
    tensors = read_checkpoint(folder, manifest)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if manifest.lora is not None:
        write_lora(partial / lora.FILE_NAME, tensors, dtype, manifest.lora)
    else:
        write_shards(partial, tensors, dtype, max_shard_bytes)
        config = {"_class_name": manifest.transformer_class, **manifest.transformer_config}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(out)
    return sorted(out.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# reading


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
    buffers = [whole(name, tensor) for name, tensor in model["module"].items() if name in set(model["buffer_names"])]
    if manifest.zero_stage == 0:
        return [whole(name, tensor) for name, tensor in model["module"].items()]
    optimizers = [load(path)["optimizer_state_dict"] for path in optimizer_files]
    if manifest.zero_stage == 3:
        frozen = partitioned_frozen(model, [load(path) for path in model_files])
        return buffers + frozen + partitioned_by_tensor(model["param_shapes"], optimizers)
    frozen = [whole(name, tensor) for name, tensor in (model["frozen_param_fragments"] or {}).items()]
    return buffers + frozen + partitioned_by_group(model["param_shapes"], optimizers)


def by_rank(folder: Path, manifest: Manifest, ending: str) -> list[Path]:
    """The files of one kind, rank 0 first; the rank is the first number in DeepSpeed's names."""
    names = [name for name in manifest.files if name.endswith(ending)]
    return [folder / name for name in sorted(names, key=lambda name: [int(n) for n in name.split("_") if n.isdigit()])]


def whole(name: str, tensor: Tensor) -> TensorPieces:
    """A tensor that is in one piece."""
    return TensorPieces(name, tuple(tensor.shape), [Piece(tensor.contiguous().view(-1), 0, tensor.numel())])


def partitioned_by_tensor(groups: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> list[TensorPieces]:
    """Stage 3: each tensor is cut into equal slices, padded at the end; a rank's flat group holds its slices in order."""
    world_size, tensors = len(optimizers), []
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            per_rank = math.ceil(shape.numel() / world_size)
            flats = [optimizer["fp32_flat_groups"][group] for optimizer in optimizers]
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
    return [Piece(flat, offset, count) for flat, count in zip(flats, counts) if count]


def partitioned_by_group(groups: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> list[TensorPieces]:
    """Stages 1 and 2: a group's tensors follow one another in one long vector, which the ranks hold in equal parts."""
    tensors = []
    for group, shapes in enumerate(groups):
        flats = [optimizer["single_partition_of_fp32_groups"][group] for optimizer in optimizers]
        offset = 0
        for name, shape in shapes.items():
            tensors.append(TensorPieces(name, tuple(shape), stretch(flats, offset, shape.numel())))
            offset += shape.numel()
    return tensors


def stretch(flats: list[Tensor], offset: int, numel: int) -> list[Piece]:
    """Elements offset .. offset + numel of the vector that the flats form one after the other."""
    pieces, start_of_flat = [], 0
    for flat in flats:
        first, last = max(offset, start_of_flat), min(offset + numel, start_of_flat + flat.numel())
        if first < last:
            pieces.append(Piece(flat, first - start_of_flat, last - first))
        start_of_flat += flat.numel()
    return pieces


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write_shards(out: Path, tensors: list[TensorPieces], dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Weight files of at most max_shard_bytes (a larger tensor has one of its own) and, for several, their index."""
    shards: list[list[TensorPieces]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel * dtype.itemsize
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    total = sum(tensor.numel for tensor in tensors) * dtype.itemsize
    one = len(shards) == 1
    weight_map = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="consolidate") as bar:
        for number, shard in enumerate(shards, 1):
            name = f"{WEIGHTS_NAME}{'' if one else f'-{number:05d}-of-{len(shards):05d}'}.safetensors"
            write_safetensors(out / name, shard, dtype, bar)
            weight_map |= {tensor.name: name for tensor in shard}
    if not one:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (out / f"{WEIGHTS_NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_lora(path: Path, tensors: list[TensorPieces], dtype: torch.dtype, adapter: dict[str, Any]) -> None:
    """The adapters by the names that every loader takes, with an alpha for each layer where it is not the rank."""
    named = [TensorPieces(lora.file_name(tensor.name), tensor.shape, tensor.pieces) for tensor in tensors]
    if adapter["alpha"] != adapter["rank"]:
        layers = [tensor.name.removesuffix(".lora_A.weight") for tensor in named if tensor.name.endswith(".lora_A.weight")]
        named += [whole(f"{layer}.alpha", torch.tensor(float(adapter["alpha"]))) for layer in layers]
    with tqdm(total=sum(tensor.numel for tensor in named) * dtype.itemsize, unit="B", unit_scale=True) as bar:
        write_safetensors(path, named, dtype, bar)


def write_safetensors(path: Path, tensors: list[TensorPieces], dtype: torch.dtype, bar: tqdm) -> None:
    """One safetensors file (format: github.com/huggingface/safetensors), its header first, then piece after piece."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.numel * dtype.itemsize
        header[tensor.name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        flushed = 0
        for piece in (piece for tensor in tensors for piece in cut(tensor.pieces)):
            bar.update(write_all(file, piece.to(dtype)))
            give_back(piece)
            if file.tell() - flushed >= FLUSH_BYTES:
                # have the disk begin, so that the wait at the end is short
                os.posix_fadvise(file.fileno(), flushed, file.tell() - flushed, os.POSIX_FADV_DONTNEED)
                flushed = file.tell()
        os.fsync(file.fileno())


def cut(pieces: list[Piece]) -> Iterator[Tensor]:
    """Pieces small enough to convert without a trace in memory."""
    for piece in pieces:
        for start in range(piece.start, piece.start + piece.count, PIECE_NUMEL):
            yield piece.source[start : min(start + PIECE_NUMEL, piece.start + piece.count)]


def write_all(file: BinaryIO, tensor: Tensor) -> int:
    """Write a contiguous tensor's bytes; returns how many."""
    view = memoryview(tensor.view(torch.uint8).numpy())
    while view:
        view = view[file.write(view) :]
    return tensor.numel() * tensor.itemsize


def give_back(tensor: Tensor) -> None:
    """Tell the kernel that the mapped pages under a tensor are done with, so that they do not count as this process's."""
    page, dont_need = os.sysconf("SC_PAGE_SIZE"), 4
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // page * page
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), dont_need)
