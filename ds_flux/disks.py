"""Which ranks see the same folder: those of all nodes on a shared disk, those of one node on its own.

Where each node keeps its own files (`use_node_local_storage` in DeepSpeed's JSON), the first rank on each disk does there what
rank 0 does on a shared one.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_flux import UserError, runtime

LAG_S = 2.0
"""a shared file system may show a new file to other nodes so much later"""


@dataclass(frozen=True)
class Disk:
    """Where this rank's folder lies."""

    ranks: list[int]
    """who sees it, in order; this rank is one of them"""
    is_shared: bool
    """by all ranks of the run"""

    @property
    def first(self) -> int:
        """The rank that makes folders and names files there."""
        return self.ranks[0]

    @property
    def part(self) -> tuple[int, int]:
        """(number of this rank, number of ranks) there: who reads which share of the files."""
        return self.ranks.index(runtime.rank()), len(self.ranks)

    def on_first(self, function: Callable[[], Any], what: str) -> Any:
        """The first rank on each disk calls `function`; None elsewhere.  If one fails, all do.  A collective."""
        result = None
        with runtime.together(what):
            if runtime.rank() == self.first:
                result = function()
        return result


def shared() -> Disk:
    """One for all ranks."""
    return Disk(list(range(runtime.world_size())), True)


def look(folder: Path) -> Disk:
    """Who sees what this rank writes into a folder, or would if it is not there yet.  A collective.

    Raises:
        UserError: the folder cannot be written.
    """
    if runtime.env_local_world_size() == runtime.world_size():
        return shared()
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    name = runtime.on_main(lambda: f".ds_flux-{os.getpid()}-{time.time_ns()}", "naming a file")
    with runtime.together(f"writing to {folder}"):
        try:
            (there / f"{name}-{runtime.rank()}").touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    firsts = runtime.gathered([lowest_seen(there / name)])
    (there / f"{name}-{runtime.rank()}").unlink()
    ranks = [rank for rank, first in enumerate(firsts) if first == firsts[runtime.rank()]]
    return Disk(ranks, is_shared=max(firsts) == 0)


def lowest_seen(path: Path) -> int:
    """The lowest rank whose file is seen here."""
    for is_last in (False, True):
        seen = next(rank for rank in range(runtime.rank() + 1) if Path(f"{path}-{rank}").exists())
        if seen == 0 or is_last:
            return seen
        time.sleep(LAG_S)
    raise AssertionError("unreachable")


def of_checkpoints(output_dir: Path, ds_config: dict[str, Any], path: str) -> Disk:
    """Where a run keeps its checkpoints.  A collective.

    Args:
        ds_config: the run's, read from `path`.

    Raises:
        UserError: the nodes have disks of their own and the config does not say so, or the other way round.
    """
    disk = look(output_dir)
    offload = ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}
    is_local = ds_config.get("checkpoint", {}).get("use_node_local_storage", False)
    if is_local and disk.is_shared and runtime.env_local_world_size() < runtime.world_size():
        raise UserError(
            f"{path} says use_node_local_storage, but all nodes see the same --output_dir {output_dir}: take it out"
        )
    if is_local and offload.get("device") == "nvme":
        raise UserError(
            f"{path}: use_node_local_storage does not go with an optimizer on NVMe, which goes on from the files of all ranks"
        )
    if not is_local and not disk.is_shared:
        raise UserError(
            f"--output_dir {output_dir} is not shared: ranks {others(disk)} do not see what rank 0 writes there.  Name a "
            f'folder on a shared disk, or add {{"checkpoint": {{"use_node_local_storage": true}}}} to {path}: then each node '
            "keeps its own files, for you to gather"
        )
    return disk


def check_cache(folder: Path) -> None:
    """All ranks read what each has encoded.  Raises UserError where they cannot.  A collective."""
    disk = look(folder)
    if not disk.is_shared:
        raise UserError(
            f"the cache {folder} is not shared: ranks {others(disk)} do not see what rank 0 writes there.  Give --cache_dir on "
            "a shared disk, or leave out --cache_latents and --cache_text"
        )


def others(disk: Disk) -> str:
    """The ranks on other disks than rank 0's.  A collective."""
    on_first = runtime.gathered([disk.first == 0])
    return ", ".join(str(rank) for rank, is_there in enumerate(on_first) if not is_there)
