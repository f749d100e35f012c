"""One shard of a `Store`: a safetensors file of many records, and beside it the index that makes it count.

A record is {name: tensor}; in the file its tensors are called "<number of the record>/<name>", so that any string may be
a key.  The index is JSON: the size of the file, a checksum of its header (which says where each tensor lies) and of each
record, so that every byte of the file and every word of the index that is used is covered by one of them.
"""

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_flux import UserError
from ds_flux.manifest import write_atomically
from ds_flux.streaming import write_all

DATA, INDEX, UNFINISHED, UNFINISHED_INDEX = ".safetensors", ".json", ".partial", ".json.tmp"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FULL = {errno.ENOSPC, errno.EDQUOT}

NewRecords = Mapping[str, tuple[str, dict[str, Tensor]]]  # {key: (fingerprint, {name: contiguous tensor on the CPU})}


class DamagedError(Exception):
    """A shard that must not be used; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # bytes from the start of the file
    last: int


@dataclass(frozen=True, slots=True)
class Record:
    """What the index and the header say of a record."""

    fingerprint: str
    checksum: int
    places: dict[str, Place]


@dataclass(frozen=True)
class Shard:
    """A complete shard.  Holds neither the file nor a mapping of it: it goes to another process as it is."""

    path: Path
    num_bytes: int
    header_num_bytes: int
    header_checksum: int
    records: dict[str, Record]
    checked: set[str] = field(default_factory=set)
    """keys whose checksum this process has seen to be right"""

    def read(self, key: str) -> dict[str, Tensor]:
        """A record as mapped pages of the file: of no other memory, and let go with its tensors.

        The mapping is private, so whoever writes into a tensor changes nothing for others.  The checksum is compared the
        first time only: that is when the bytes come from the disk, and costs more than all the rest.

        Raises:
            DamagedError: the file is gone, of another size, or holds other bytes than were written.
        """
        self.check_size()
        record = self.records[key]
        try:
            storage = torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.num_bytes)
        except RuntimeError as error:  # too many mappings, or no memory: the file may be sound
            raise UserError(f"{self.path} cannot be mapped: {str(error).splitlines()[0]}") from None
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        tensors = {name: mapped(whole, place) for name, place in record.places.items()}
        if key not in self.checked:
            if checksum(key, record.fingerprint, tensors) != record.checksum:
                raise DamagedError("the checksum of a record is wrong")
            self.checked.add(key)
        return tensors

    def verify(self) -> None:
        """Read every byte.  Raises DamagedError."""
        self.checked.clear()
        self.read_header()
        for key in self.records:
            self.read(key)

    def check_size(self) -> None:
        """A shorter file must not be mapped: touching what is missing kills the process (SIGBUS)."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise DamagedError("its data are gone") from None
        if size != self.num_bytes:
            raise DamagedError(f"it has {size} bytes, {self.num_bytes} were written")

    def read_header(self) -> dict[str, Place]:
        """{tensor in the file: where it lies}."""
        self.check_size()
        with self.path.open("rb") as file:
            raw = file.read(self.header_num_bytes)
        if zlib.crc32(raw) != self.header_checksum:
            raise DamagedError("the checksum of its header is wrong")
        return {
            name: Place(DTYPES[info["dtype"]], tuple(info["shape"]), *(len(raw) + offset for offset in info["data_offsets"]))
            for name, info in json.loads(raw[8:]).items()
        }

    def remove(self) -> None:
        """From the disk: the index first, so that it never counts without its data."""
        for path in (self.path.with_suffix(INDEX), self.path):
            path.unlink(missing_ok=True)

    def forget(self, keys: Iterable[str]) -> None:
        """Take records out of the index; their bytes stay until the shard is removed."""
        for key in keys:
            self.records.pop(key, None)
        index = self.path.with_suffix(INDEX)
        with said_if_full(index.parent, index.stat().st_size):
            said = json.loads(index.read_text())
            said["records"] = {key: record for key, record in said["records"].items() if key in self.records}
            write_atomically(index, json.dumps(said))


def open_shard(index: Path) -> Shard:
    """The shard of an index; reads that and the header.

    Raises:
        DamagedError: the index or the header cannot be read, or the file has another size.
    """
    try:
        said = json.loads(index.read_text())
        shard = Shard(index.with_suffix(DATA), said["num_bytes"], said["header_num_bytes"], said["header_checksum"], records={})
        places = shard.read_header()
        for key, record in said["records"].items():
            its_places = {name: places[f"{record['number']}/{name}"] for name in record["names"]}
            shard.records[key] = Record(record["fingerprint"], record["checksum"], its_places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"its index cannot be read ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise DamagedError(f"it cannot be read ({error.strerror})") from None
    return shard


def write_shard(path: Path, records: NewRecords) -> None:
    """Write beside, flush to disk, then name; the index last.  Leaves nothing behind where it fails.

    Raises:
        UserError: the disk is full, or cannot be written.
    """
    header, tensors = lay_out(records)
    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
    index = {
        "num_bytes": num_bytes,
        "header_num_bytes": len(header),
        "header_checksum": zlib.crc32(header),
        "records": {key: described(number, key, *record) for number, (key, record) in enumerate(records.items())},
    }
    with said_if_full(path.parent, num_bytes), nothing_left_on_failure(path):
        partial = path.with_suffix(UNFINISHED)
        with partial.open("wb", buffering=0) as file:
            for tensor in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors):
                write_all(file, tensor.view(-1))
            os.fsync(file.fileno())
        partial.replace(path)
        write_atomically(path.with_suffix(INDEX), json.dumps(index))


@contextmanager
def nothing_left_on_failure(path: Path) -> Iterator[None]:
    """Remove what was written of a shard if not all of it was."""
    try:
        yield
    except BaseException:
        for suffix in (INDEX, UNFINISHED_INDEX, UNFINISHED, DATA):
            path.with_suffix(suffix).unlink(missing_ok=True)
        raise


def lay_out(records: NewRecords) -> tuple[bytes, list[Tensor]]:
    """The header of the file (format: github.com/huggingface/safetensors), and the tensors in its order."""
    named = [
        (f"{number}/{name}", tensor)
        for number, (_fingerprint, tensors) in enumerate(records.values())
        for name, tensor in tensors.items()
    ]
    named.sort(key=lambda entry: -entry[1].itemsize)  # the format has no gaps: so each begins at a multiple of its item
    header, offset = {}, 0
    for name, tensor in named:
        offsets = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensor for _name, tensor in named]


def described(number: int, key: str, fingerprint: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A record as the index has it."""
    value = checksum(key, fingerprint, tensors)
    return {"number": number, "fingerprint": fingerprint, "names": list(tensors), "checksum": value}


def checksum(key: str, fingerprint: str, tensors: dict[str, Tensor]) -> int:
    """CRC-32 of the bytes of all tensors, and of what they are called: a damaged index passes nothing off as another."""
    value = zlib.crc32(json.dumps([key, fingerprint, list(tensors)]).encode())
    for tensor in tensors.values():
        value = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy(), value)
    return value


def mapped(whole: Tensor, place: Place) -> Tensor:
    """A tensor of the file whose bytes are `whole`."""
    return whole[place.first : place.last].view(place.dtype).view(place.shape)


@contextmanager
def said_if_full(folder: Path, num_bytes: int) -> Iterator[None]:
    """Errors of writing num_bytes into the folder, as what the user can mend."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None
        raise UserError(f"{folder} is full: {readable(num_bytes)} are to be written, {free_space(folder)} are free") from None


def free_space(folder: Path) -> str:
    """What is left on the disk under a folder."""
    return readable(shutil.disk_usage(folder).free)


def readable(num_bytes: int) -> str:
    """A size in the unit that suits it."""
    power = min(int(math.log(max(num_bytes, 1), 1024)), 4)
    return f"{num_bytes / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{num_bytes} B"
