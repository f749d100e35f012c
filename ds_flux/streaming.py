"""Tensors that are never whole in memory: runs of elements that are read, converted and written one piece after another."""

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ds_flux import progress

SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_NUMEL = 1 << 20
FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Elements start .. start + count of something flat."""

    read: Callable[[int, int], Tensor]
    """(first, last) -> the elements between, 1-D, of any float dtype"""
    start: int
    count: int
    is_mapped: bool = False
    """what `read` gives is memory of a mapped file, and leaves nothing in this process once it is given back"""

    def chunks(self) -> Iterator[Tensor]:
        """Small enough to convert without a trace in memory; one is valid until the next is asked for."""
        end = self.start + self.count
        for first in range(self.start, end, CHUNK_NUMEL):
            chunk = self.read(first, min(first + CHUNK_NUMEL, end))
            yield chunk
            if self.is_mapped:
                give_back(chunk)


@dataclass(frozen=True)
class TensorPieces:
    """A tensor by the name it is to have, and the pieces that follow one another in it."""

    name: str
    shape: tuple[int, ...]
    pieces: list[Piece]
    dtype: torch.dtype | None = None
    """of the file; None: the one that all others have"""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """In a file of tensors of `dtype`."""
        return self.numel * (self.dtype or dtype).itemsize


def stored(flat: Tensor, start: int, count: int, is_mapped: bool = True) -> Piece:
    """A run of elements of a 1-D tensor, of a mapped file or in memory."""
    return Piece(lambda first, last: flat[first:last], start, count, is_mapped)


def whole(name: str, tensor: Tensor, is_mapped: bool = False) -> TensorPieces:
    """A tensor that is in one piece."""
    mapped = is_mapped and tensor.is_contiguous()  # else the next line copies it
    return TensorPieces(name, tuple(tensor.shape), [stored(tensor.contiguous().view(-1), 0, tensor.numel(), mapped)])


def zeros(name: str, shape: tuple[int, ...]) -> TensorPieces:
    """A tensor of zeros."""
    return TensorPieces(name, shape, [Piece(lambda first, last: torch.zeros(last - first), 0, math.prod(shape))])


def between(pieces: list[Piece], first: int, last: int) -> list[Piece]:
    """Elements first .. last of what the pieces form one after the other."""
    found, offset = [], 0
    for piece in pieces:
        begin, end = max(first - offset, 0), min(last - offset, piece.count)
        if begin < end:
            found.append(replace(piece, start=piece.start + begin, count=end - begin))
        offset += piece.count
    return found


def concatenated(name: str, tensors: list[TensorPieces]) -> TensorPieces:
    """Along the first dimension."""
    rows = sum(tensor.shape[0] for tensor in tensors)
    return TensorPieces(name, (rows, *tensors[0].shape[1:]), [piece for tensor in tensors for piece in tensor.pieces])


def rows(tensor: TensorPieces, first: int, last: int) -> TensorPieces:
    """Rows first .. last."""
    width = math.prod(tensor.shape[1:])
    return replace(tensor, shape=(last - first, *tensor.shape[1:]), pieces=between(tensor.pieces, first * width, last * width))


def with_halves_swapped(tensor: TensorPieces) -> TensorPieces:
    """The second half of the rows first."""
    num_rows = tensor.shape[0]
    return concatenated(tensor.name, [rows(tensor, num_rows // 2, num_rows), rows(tensor, 0, num_rows // 2)])


def in_memory(tensor: TensorPieces) -> Tensor:
    """The tensor itself, a copy in fp32."""
    flat, offset = torch.empty(tensor.numel), 0
    for chunk in (chunk for piece in tensor.pieces for chunk in piece.chunks()):
        flat[offset : offset + chunk.numel()] = chunk
        offset += chunk.numel()
    return flat.view(tensor.shape)


def computed(tensor: TensorPieces, num_columns: int, make: Callable[[int, int], Tensor]) -> TensorPieces:
    """A matrix with the name and the number of rows of `tensor`, made when it is written.

    Args:
        make: (first, last) -> those rows, (last - first, num_columns).
    """

    def read(first: int, last: int) -> Tensor:
        top, bottom = first // num_columns, -(-last // num_columns)
        return make(top, bottom).view(-1)[first - top * num_columns : last - top * num_columns]

    num_rows = tensor.shape[0]
    return replace(tensor, shape=(num_rows, num_columns), pieces=[Piece(read, 0, num_rows * num_columns)])


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write_shards(folder: Path, name: str, tensors: list[TensorPieces], dtype: torch.dtype, max_shard_bytes: int) -> None:
    """Files of at most max_shard_bytes (a larger tensor has one of its own) and, for several, their index."""
    shards: list[list[TensorPieces]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = tensor.num_bytes(dtype)
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    if len(shards) == 1:
        write_files(folder, {f"{name}.safetensors": tensors}, dtype)
        return
    files = {f"{name}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    write_files(folder, files, dtype)
    total = sum(tensor.num_bytes(dtype) for tensor in tensors)
    weight_map = {tensor.name: file for file, shard in files.items() for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_files(folder: Path, files: dict[str, list[TensorPieces]], dtype: torch.dtype) -> None:
    """Safetensors files with a progress bar over all of them."""
    total = sum(tensor.num_bytes(dtype) for tensors in files.values() for tensor in tensors)
    with progress.bar(total=total, unit="B", unit_scale=True, desc="consolidate") as bar:
        for name, tensors in files.items():
            write_safetensors(folder / name, tensors, dtype, bar)


def write_safetensors(path: Path, tensors: list[TensorPieces], dtype: torch.dtype, bar: progress.Bar) -> None:
    """One safetensors file (format: github.com/huggingface/safetensors), its header first, then chunk after chunk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes(dtype)
        kind = SAFETENSORS_NAMES[tensor.dtype or dtype]
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        flushed = 0
        for tensor in tensors:
            for chunk in (chunk for piece in tensor.pieces for chunk in piece.chunks()):
                bar.update(write_all(file, chunk.to(tensor.dtype or dtype)))
                if file.tell() - flushed >= FLUSH_BYTES:
                    # have the disk begin, so that the wait at the end is short
                    os.posix_fadvise(file.fileno(), flushed, file.tell() - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = file.tell()
        os.fsync(file.fileno())


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
