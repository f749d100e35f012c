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

import torch
from torch import Tensor

from ds_flux import UserError
from ds_flux.data.shards import (
    DATA,
    DTYPE_NAMES,
    INDEX,
    UNFINISHED,
    UNFINISHED_INDEX,
    DamagedError,
    Shard,
    free_space,
    open_shard,
    readable,
    write_shard,
)

SHARD_BYTES = 64 << 20
IDLE_S = 3600.0


class Store:
    """What was in the folder when it was opened or last refreshed; it may be copied to other processes.

    A record carries a fingerprint of all that it was made from.  `missing` compares it; `read` does not.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shards: dict[str, Shard] = {}
        self.newest: dict[str, Shard] = {}
        """{key: the shard that has its newest record}"""
        self.ignored: dict[str, str] = {}
        """{shard that does not count: what is wrong with it}; one without an index may be one that is being written"""
        folder.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """See what others have added and removed since."""
        data = {path.stem for path in self.folder.glob(f"*{DATA}")}
        indexed = {path.stem for path in self.folder.glob(f"*{INDEX}")}  # second: it may be just coming
        ignored = {name: self.ignored.get(name, "it has no index") for name in data - indexed}
        self.shards = {name: shard for name, shard in self.shards.items() if name in indexed}
        for name in indexed - self.shards.keys():
            try:
                self.shards[name] = open_shard(self.folder / f"{name}{INDEX}")
            except DamagedError as error:
                ignored[name] = str(error)
        self.ignored = dict(sorted(ignored.items()))
        self.newest = {key: self.shards[name] for name in sorted(self.shards) for key in self.shards[name].records}

    def __len__(self) -> int:
        return len(self.newest)

    def __contains__(self, key: str) -> bool:
        return key in self.newest

    def __iter__(self) -> Iterator[str]:
        return iter(self.newest)

    def missing(self, wanted: Mapping[str, str]) -> list[str]:
        """Which of {key: fingerprint} have to be made: there is no such record, or it was made from something else."""
        return [key for key, fingerprint in wanted.items() if key not in self or self.fingerprint(key) != fingerprint]

    def fingerprint(self, key: str) -> str:
        """Of what the record was made from."""
        return self.newest[key].records[key].fingerprint

    def read(self, key: str) -> dict[str, Tensor]:
        """A record, mapped from its file; see `Shard.read`.

        Raises:
            KeyError: there is none.
            UserError: its shard is damaged; from now on that no longer counts, here and for whoever opens the store.
        """
        shard = self.newest[key]
        try:
            return shard.read(key)
        except DamagedError as error:
            self.condemn(shard, str(error))
            raise UserError(
                f"{shard.path} cannot be used: {error}; start again, and its {len(shard.records)} records are made again"
            ) from None

    def verify(self) -> dict[str, str]:
        """Read everything; the records of damaged shards count as missing from now on.  Returns what is ignored, and why."""
        for shard in list(self.shards.values()):
            try:
                shard.verify()
            except DamagedError as error:
                self.condemn(shard, str(error))
        return self.ignored

    def condemn(self, shard: Shard, reason: str) -> None:
        """Let a shard count no longer."""
        self.let_go([shard.path.stem])
        self.ignored[shard.path.stem] = reason
        with suppress(OSError):  # of a folder that others write
            shard.path.with_suffix(INDEX).unlink(missing_ok=True)

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
        keys = set(keys)
        touched = {name: shard for name, shard in self.shards.items() if not keys.isdisjoint(shard.records)}
        emptied = [name for name, shard in touched.items() if keys.issuperset(shard.records)]
        self.drop(emptied)  # first: it makes room on a full disk for what follows
        for name in touched.keys() - set(emptied):
            touched[name].forget(keys)
        self.newest = {key: shard for key, shard in self.newest.items() if key not in keys}

    def delete_superseded(self) -> None:
        """Remove shards of which every record has a newer one."""
        current = {shard.path.stem for shard in self.newest.values()}
        self.drop(self.shards.keys() - current)

    def drop(self, names: Iterable[str]) -> None:
        """Remove whole shards."""
        for shard in self.let_go(names):
            shard.remove()

    def let_go(self, names: Iterable[str]) -> list[Shard]:
        """Know shards no longer; they stay on disk."""
        gone = {name: self.shards.pop(name) for name in list(names)}
        self.newest = {key: shard for key, shard in self.newest.items() if shard.path.stem not in gone}
        return list(gone.values())

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
            write_shard(self.folder / f"{self.age:06d}-{self.num_written:06d}-{self.name}-{self.token}{DATA}", records)
            self.num_written += 1
