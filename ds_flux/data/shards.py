"""One shard of a `Store`: a safetensors file of many records, and beside it the index that makes it count.

A record is {name: tensor}.  Any string may be its key, so both files know it by a hash of that (BLAKE2b, 16 bytes): in the
data its tensors are called "<hash>/<name>", and lie one behind the other.  The index is in the format of safetensors as well:
a tensor for each of `COLUMNS`, and as metadata the size of the data, a checksum of their header, and the records' layouts.

Records are read by the index alone; the header is for other readers.  A record's checksum is of its bytes and of what the
index says of it, so that every byte of the data and every word of the index that is used is covered by a checksum.
"""

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from ds_flux import UserError
from ds_flux.manifest import write_atomically
from ds_flux.streaming import write_all

DATA, INDEX, UNFINISHED, UNFINISHED_INDEX = ".safetensors", ".index", ".partial", ".index.tmp"
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
ALIGNMENT = 8  # bytes: what the largest items need
FULL = {errno.ENOSPC, errno.EDQUOT}

KEY = np.dtype("V16")  # a hash that differs from those of millions of other keys
FINGERPRINT = np.dtype("V8")  # one that differs from that of the key's other record
RECORDS = np.dtype(
    [("key", KEY), ("fingerprint", FINGERPRINT), ("checksum", "u4"), ("first", "i8"), ("layout", "u4"), ("shard", "i4")]
)
"""What is held of a record, 44 bytes: the hashes of its key and fingerprint, its checksum, where it begins (bytes from the
start of the file), and the numbers of its layout in the shard and of the shard in the store."""
COLUMNS = ("key", "fingerprint", "checksum", "first", "layout")  # of an index

Records = NDArray[np.void]  # of RECORDS
NewRecords = Mapping[str, tuple[str, dict[str, Tensor]]]  # {key: (fingerprint, {name: contiguous tensor on the CPU})}


class DamagedError(Exception):
    """A shard that must not be used; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # bytes from the start of the record
    last: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What the tensors of a record are, and where they lie in it."""

    said: str
    """the layout in JSON, as `layout_of` takes it"""
    places: dict[str, Place]
    num_bytes: int
    """of the whole record, with what fills it up"""


@cache  # thousands of records have the same
def layout_of(said: str) -> Layout:
    """The layout of records with these tensors: [[name, dtype, shape], ...].

    The largest items come first, and the end is filled up: so each begins at a multiple of its item, in every record.
    """
    described, places, offset = json.loads(said), {}, 0
    for name, dtype, shape in sorted(described, key=lambda tensor: -DTYPES[tensor[1]].itemsize):
        last = offset + math.prod(shape) * DTYPES[dtype].itemsize
        places[name] = Place(DTYPES[dtype], tuple(shape), offset, last)
        offset = last
    return Layout(said, {name: places[name] for name, *_ in described}, offset + -offset % ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Shard:
    """A complete shard.  Holds neither the file nor a mapping of it: it goes to another process as it is."""

    folder: Path  # the store's own, not one for each shard
    name: str
    num_bytes: int
    header_num_bytes: int
    header_checksum: int
    layouts: tuple[Layout, ...]

    def path(self, suffix: str = DATA) -> Path:
        """One of its files."""
        return self.folder / f"{self.name}{suffix}"

    def read(self, record: np.void, compare: bool) -> dict[str, Tensor]:
        """A record as mapped pages of the file: of no other memory, and let go with its tensors.

        The mapping is private, so whoever writes into a tensor changes nothing for others.

        Args:
            record: its row of RECORDS.
            compare: the checksum.  The first time, when the bytes come from the disk, it costs more than all the rest.

        Raises:
            DamagedError: the file is gone, of another size, or holds other bytes than were written.
        """
        path = f"{self.folder}/{self.name}{DATA}"  # a Path costs as much as the mapping
        self.check_size(path)
        try:
            storage = torch.UntypedStorage.from_file(path, shared=False, nbytes=self.num_bytes)
        except RuntimeError as error:  # too many mappings, or no memory: the file may be sound
            raise UserError(f"{path} cannot be mapped: {str(error).splitlines()[0]}") from None
        first, layout = int(record["first"]), self.layouts[record["layout"]]
        if compare:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)[first : first + layout.num_bytes]
            if checksum(record["key"], record["fingerprint"], layout, [content]) != record["checksum"]:
                raise DamagedError("the checksum of a record is wrong")
        return {name: mapped(storage, first, place) for name, place in layout.places.items()}

    def verify(self, records: Records) -> None:
        """Read the header, and every byte of its records.  Raises DamagedError."""
        self.check_size(self.path())
        with self.path().open("rb") as file:
            if zlib.crc32(file.read(self.header_num_bytes)) != self.header_checksum:
                raise DamagedError("the checksum of its header is wrong")
        for record in records:
            self.read(record, compare=True)

    def check_size(self, path: str | Path) -> None:
        """A shorter file must not be mapped: touching what is missing kills the process (SIGBUS)."""
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise DamagedError("its data are gone") from None
        if size != self.num_bytes:
            raise DamagedError(f"it has {size} bytes, {self.num_bytes} were written")

    def remove(self) -> None:
        """From the disk: the index first, so that it never counts without its data."""
        for suffix in (INDEX, DATA):
            self.path(suffix).unlink(missing_ok=True)

    def write_index(self, records: Records) -> None:
        """Let these records count and no others; the bytes of others stay until the shard is removed.

        Raises:
            UserError: the disk is full, or cannot be written.
        """
        columns = {name: np.ascontiguousarray(records[name]) for name in COLUMNS}
        for name in ("key", "fingerprint"):
            columns[name] = columns[name].view(np.uint8).reshape(len(records), -1)
        facts = {
            "num_bytes": str(self.num_bytes),
            "header_num_bytes": str(self.header_num_bytes),
            "header_checksum": str(self.header_checksum),
            "layouts": json.dumps([json.loads(layout.said) for layout in self.layouts]),
        }
        index = save(columns, facts)
        with said_if_full(self.folder, len(index)):
            write_atomically(self.path(INDEX), index)


def open_shard(folder: Path, name: str) -> tuple[Shard, Records]:
    """A shard and its records; reads the index only.

    Raises:
        DamagedError: the index cannot be read, or the data are gone or of another size.
    """
    try:
        with safe_open(folder / f"{name}{INDEX}", "numpy") as file:
            facts, columns = file.metadata(), {column: file.get_tensor(column) for column in COLUMNS}
        layouts = tuple(layout_of(json.dumps(said)) for said in json.loads(facts["layouts"]))
        numbers = (int(facts[fact]) for fact in ("num_bytes", "header_num_bytes", "header_checksum"))
        shard = Shard(folder, name, *numbers, layouts)
        records = np.zeros(len(columns["key"]), RECORDS)
        for column, values in columns.items():
            records[column] = values.view(RECORDS[column]).reshape(-1)
        if records["layout"].max(initial=0) >= len(layouts):
            raise IndexError("a layout is missing")
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"its index cannot be read ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise DamagedError(f"its index cannot be read ({error})") from None
    shard.check_size(shard.path())
    return shard, records


def write_shard(folder: Path, name: str, new: NewRecords) -> None:
    """Write beside, flush to disk, then name; the index last.  Leaves nothing behind where it fails.

    Raises:
        UserError: the disk is full, or cannot be written.
    """
    records, layouts, parts = laid_out(new)
    header = header_of(records, layouts)
    records["first"] += len(header)
    num_bytes = len(header) + sum(part.nbytes for part in parts)
    shard = Shard(folder, name, num_bytes, len(header), zlib.crc32(header), layouts)
    with said_if_full(folder, num_bytes), nothing_left_on_failure(shard):
        with shard.path(UNFINISHED).open("wb", buffering=0) as file:
            for part in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *parts):
                write_all(file, part.view(-1))
            os.fsync(file.fileno())
        shard.path(UNFINISHED).replace(shard.path())
        shard.write_index(records)


@contextmanager
def nothing_left_on_failure(shard: Shard) -> Iterator[None]:
    """Remove what was written of a shard if not all of it was."""
    try:
        yield
    except BaseException:
        for suffix in (INDEX, UNFINISHED_INDEX, UNFINISHED, DATA):
            shard.path(suffix).unlink(missing_ok=True)
        raise


def laid_out(new: NewRecords) -> tuple[Records, tuple[Layout, ...], list[Tensor]]:
    """The records with their first bytes counted from the end of the header, their layouts, and all that comes behind it."""
    records, offset = np.zeros(len(new), RECORDS), 0
    numbers: dict[str, int] = {}
    parts: list[Tensor] = []
    for row, (key, (fingerprint, tensors)) in enumerate(new.items()):
        described = [[name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
        layout = layout_of(json.dumps(described))
        its_parts = [tensors[name] for name in sorted(tensors, key=lambda name: layout.places[name].first)]
        if fill := layout.num_bytes - sum(part.nbytes for part in its_parts):
            its_parts.append(torch.zeros(fill, dtype=torch.uint8))
        hashes = np.void(hashed(key, KEY)), np.void(hashed(fingerprint, FINGERPRINT))
        number = numbers.setdefault(layout.said, len(numbers))
        records[row] = (*hashes, checksum(*hashes, layout, its_parts), offset, number, 0)
        parts += its_parts
        offset += layout.num_bytes
    return records, tuple(map(layout_of, numbers)), parts


def header_of(records: Records, layouts: tuple[Layout, ...]) -> bytes:
    """The header of the data (format: github.com/huggingface/safetensors)."""
    header = {}
    for record in records:
        key, layout, start = record["key"].tobytes().hex(), layouts[record["layout"]], int(record["first"])
        places = {f"{key}/{name}": place for name, place in layout.places.items()}
        end = max((place.last for place in places.values()), default=0)
        if end < layout.num_bytes:  # the format has no gaps
            places[f"{key} end"] = Place(torch.uint8, (layout.num_bytes - end,), end, layout.num_bytes)
        for name, place in places.items():
            offsets = [start + place.first, start + place.last]
            header[name] = {"dtype": DTYPE_NAMES[place.dtype], "shape": place.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def mapped(storage: torch.UntypedStorage, first: int, place: Place) -> Tensor:
    """A tensor of the record that begins with byte `first` of the file."""
    return torch.empty(0, dtype=place.dtype).set_(storage, (first + place.first) // place.dtype.itemsize, place.shape)


def hashed(text: str, kind: np.dtype[np.void]) -> bytes:
    """As many bytes as the kind has."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=kind.itemsize).digest()


def checksum(key: np.void, fingerprint: np.void, layout: Layout, parts: Iterable[Tensor]) -> int:
    """CRC-32 of a record's bytes, and of whose and what they are: a damaged index passes nothing off as another."""
    value = zlib.crc32(key.tobytes() + fingerprint.tobytes() + layout.said.encode())
    for part in parts:
        value = zlib.crc32(part.view(-1).view(torch.uint8).numpy(), value)
    return value


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
