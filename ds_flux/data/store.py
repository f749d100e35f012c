"""Encoded tensors on disk: {key: {name: tensor}}, written by many processes at once, read by any number.  Knows no model.

There are no locks.  Every writer has file names of its own, a shard counts once its index is there, and an index is written
last: whatever kills a writer leaves complete shards, and files that nothing believes.  Names sort by age, so of two records
of a key the newer is known without a clock.
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_flux import UserError
from ds_flux.data.shards import (
    DATA,
    DTYPE_NAMES,
    FINGERPRINT,
    INDEX,
    KEY,
    RECORDS,
    UNFINISHED,
    UNFINISHED_INDEX,
    DamagedError,
    Records,
    Shard,
    free_space,
    hashed,
    open_shard,
    readable,
    write_shard,
)

SHARD_BYTES = 64 << 20
IDLE_S = 3600.0
GONE = -1  # in the place of a shard's number


class Store:
    """What was in the folder when it was opened or last refreshed; it may be copied to other processes.

    A record carries a fingerprint of all that it was made from.  `missing` compares it; `read` does not.  Of a record it holds
    45 bytes, and no objects: a run has millions of them, in each of its processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shards: list[Shard] = []
        """oldest first"""
        self.records: Records = np.zeros(0, RECORDS)
        """of all shards, sorted by key; those of one key by age"""
        self.compared = np.zeros(0, bool)
        """of which records this process has seen the checksum to be right; apart, as forked processes write into it"""
        self.ignored: dict[str, str] = {}
        """{shard that does not count: what is wrong with it}; one without an index may be one that is being written"""
        folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """See what others have added and removed since."""
        data = {path.stem for path in self.folder.glob(f"*{DATA}")}
        indexed = {path.stem for path in self.folder.glob(f"*{INDEX}")}  # second: it may be just coming
        ignored = {name: self.ignored.get(name, "it has no index") for name in data - indexed}
        shards = [shard for shard in self.shards if shard.name in indexed]
        new: dict[str, Records] = {}
        for name in indexed - {shard.name for shard in shards}:
            try:
                shard, new[name] = open_shard(self.folder, name)
                shards.append(shard)
            except DamagedError as error:
                ignored[name] = str(error)
        self.ignored = dict(sorted(ignored.items()))
        if new or len(shards) < len(self.shards):
            self.know(shards, new)

    def know(self, shards: list[Shard], new: Mapping[str, Records]) -> None:
        """These shards and no others, with the records of those that are new."""
        shards = sorted(shards, key=lambda shard: shard.name)
        number_of = {shard.name: number for number, shard in enumerate(shards)}
        numbers = np.array([number_of.get(shard.name, GONE) for shard in self.shards], np.int32)
        self.records["shard"] = numbers[self.records["shard"]]
        for name, its_records in new.items():
            its_records["shard"] = number_of[name]
        records = np.concatenate([self.records, *new.values()])
        compared = np.concatenate([self.compared, np.zeros(len(records) - len(self.compared), bool)])
        order = np.lexsort((records["shard"], records["key"]))
        order = order[records["shard"][order] != GONE]
        self.shards, self.records, self.compared = shards, records[order], compared[order]

    def newest(self) -> NDArray[np.bool_]:
        """Of each record, whether its key has no newer one."""
        keys = self.records["key"]
        return np.append(keys[1:] != keys[:-1], True)[: len(keys)]

    def __len__(self) -> int:
        return np.count_nonzero(self.newest())

    def __contains__(self, key: str) -> bool:
        return bool(found(np.void(hashed(key, KEY)), self.records["key"])[1])

    def missing(self, wanted: Mapping[str, str]) -> list[str]:
        """Which of {key: fingerprint} have to be made: there is no such record, or it was made from something else."""
        places, there = found(all_hashed(wanted, KEY), self.records["key"])
        fingerprints = all_hashed(wanted.values(), FINGERPRINT)
        there[there] = self.records["fingerprint"][places[there]] == fingerprints[there]
        return [key for key, is_there in zip(wanted, there) if not is_there]

    def read(self, key: str) -> dict[str, Tensor]:
        """A record, mapped from its file; see `Shard.read`.

        Raises:
            KeyError: there is none.
            UserError: its shard is damaged; from now on that no longer counts, here and for whoever opens the store.
        """
        place, there = found(np.void(hashed(key, KEY)), self.records["key"])
        if not there:
            raise KeyError(key)
        record = self.records[place]
        shard = self.shards[record["shard"]]
        try:
            tensors = shard.read(record, compare=not self.compared[place])
        except DamagedError as error:
            num = np.count_nonzero(self.records["shard"] == record["shard"])
            self.condemn(shard, str(error))
            raise UserError(
                f"{shard.path()} cannot be used: {error}; start again, and its {num} records are made again"
            ) from None
        self.compared[place] = True
        return tensors

    def verify(self) -> dict[str, str]:
        """Read everything; damaged shards count no longer.  Returns what is ignored, and why."""
        damaged: list[tuple[Shard, str]] = []
        for number, shard in enumerate(self.shards):
            try:
                shard.verify(self.records[self.records["shard"] == number])
            except DamagedError as error:
                damaged.append((shard, str(error)))
        for shard, reason in damaged:
            self.condemn(shard, reason)
        self.compared[:] = True
        return self.ignored

    def condemn(self, shard: Shard, reason: str) -> None:
        """Let a shard count no longer."""
        self.know([other for other in self.shards if other is not shard], {})
        self.ignored[shard.name] = reason
        with suppress(OSError):  # of a folder that others write
            shard.path(INDEX).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------------------
    # writing

    @contextmanager
    def writer(self, name: str, shard_bytes: int = SHARD_BYTES) -> Iterator["Writer"]:
        """Adds records until the block ends; what was added before an error is kept.  See them with `refresh`.

        Args:
            name: of this process, for the names of its files: letters, digits, dashes.
        """
        assert re.fullmatch(r"[\w-]+", name), f"{name!r} is no name for a writer"
        ages = [int(path.name[:6]) for path in self.folder.iterdir() if re.match(r"\d{6}-", path.name)]
        writer = Writer(self.folder, name, max(ages, default=0) + 1, shard_bytes)
        try:
            yield writer
        finally:
            writer.flush()

    def room(self, num_bytes: int) -> None:
        """Raises UserError unless the disk under the folder can hold that much more."""
        if shutil.disk_usage(self.folder).free < num_bytes:
            raise UserError(
                f"{self.folder}: {readable(num_bytes)} are needed there, and the disk has {free_space(self.folder)} left"
            )

    # ------------------------------------------------------------------------------------------------------------------
    # removing; by one process at a time, and only what no other run reads

    def delete(self, keys: Iterable[str]) -> None:
        """Forget records.  Their bytes leave the disk with the last record of their shard."""
        _places, gone = found(self.records["key"], np.sort(all_hashed(keys, KEY)))
        touched = {self.shards[number].name for number in np.unique(self.records["shard"][gone])}
        self.records, self.compared = self.records[~gone], self.compared[~gone]
        self.keep(self.records)  # first: it makes room on a full disk for what follows
        for number, shard in enumerate(self.shards):
            if shard.name in touched:
                shard.write_index(self.records[self.records["shard"] == number])

    def delete_superseded(self) -> None:
        """Remove shards of which every record has a newer one."""
        self.keep(self.records[self.newest()])

    def keep(self, records: Records) -> None:
        """Remove all shards but those that have one of these records."""
        numbers = set(np.unique(records["shard"]).tolist())
        gone = [shard for number, shard in enumerate(self.shards) if number not in numbers]
        self.know([shard for number, shard in enumerate(self.shards) if number in numbers], {})
        for shard in gone:
            shard.remove()

    def sweep(self, idle_s: float = IDLE_S) -> None:
        """Remove what killed writers left and what is damaged, if nothing has written it for so long.

        A shard is written within seconds, so an hour tells a dead writer from a live one, whatever their clocks say.
        """
        self.refresh()
        left = [path for suffix in (UNFINISHED, UNFINISHED_INDEX) for path in self.folder.glob(f"*{suffix}")]
        left += [self.folder / f"{name}{suffix}" for name in self.ignored for suffix in (INDEX, DATA)]
        for path in left:
            with suppress(FileNotFoundError):  # another run sweeps as well
                if time.time() - path.stat().st_mtime >= idle_s:
                    path.unlink()
        self.refresh()


class Writer:
    """Collects the records of a shard in memory, and writes it when it is large enough."""

    def __init__(self, folder: Path, name: str, age: int, shard_bytes: int):
        self.folder, self.name, self.age, self.shard_bytes = folder, name, age, shard_bytes
        self.token = secrets.token_hex(4)  # two runs may give the same name
        self.num_written = 0
        self.records: dict[str, tuple[str, dict[str, Tensor]]] = {}
        self.num_bytes = 0

    def add(self, key: str, fingerprint: str, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors.

        Raises:
            UserError: the disk is full; the records that are not in a complete shard are lost.
        """
        unknown = {tensor.dtype for tensor in tensors.values()} - DTYPE_NAMES.keys()
        assert not unknown, f"cannot store {unknown}"
        copies = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        for name, copy in copies.items():  # of its elements only: a row of a batch would keep the whole batch
            copy.copy_(tensors[name].detach())
        self.records[key] = (fingerprint, copies)
        self.num_bytes += sum(copy.nbytes for copy in copies.values())
        if self.num_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Let what was added so far count.  Raises UserError as `add` does."""
        records, self.records, self.num_bytes = self.records, {}, 0
        if records:
            # oldest first: the run, then the shard within it
            write_shard(self.folder, f"{self.age:06d}-{self.num_written:06d}-{self.name}-{self.token}", records)
            self.num_written += 1


def all_hashed(texts: Iterable[str], kind: np.dtype[np.void]) -> NDArray[np.void]:
    """The hash of each."""
    return np.frombuffer(b"".join(hashed(text, kind) for text in texts), kind)


def found(sought: NDArray[np.void] | np.void, keys: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of one key or of each, the last of its places among the sorted keys, and whether it is there."""
    end = keys.searchsorted(sought, "right")
    return end - 1, keys.searchsorted(sought, "left") < end
