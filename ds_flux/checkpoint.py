"""Save, load and rotate checkpoints: DeepSpeed's own files, plus a manifest that makes one complete.

A checkpoint is complete or absent: the ranks' files are written into `checkpoint-N.partial`; then come the manifest, the real
name, `latest`, and last the deletion of the oldest.  All but a copy of the ranks' shards in host memory is done in the
background, while training goes on.
"""

import copy
import json
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.utils import _pytree as pytree

from ds_flux import UserError, runtime
from ds_flux.disks import Disk
from ds_flux.manifest import (
    MANIFEST,
    Manifest,
    checkpoints,
    checksum,
    dealt,
    how_to_gather,
    step_of,
    with_elsewhere,
    write_atomically,
)
from ds_flux.zero import elastic, nvme
from ds_flux.zero import files as rank_files

SCRIPT_BYTES = 1 << 16  # more than zero_to_fp32.py has
Files = dict[str, Any]  # {name in the checkpoint: what `torch.save` writes}


class Collector(CheckpointEngine):
    """Stands where DeepSpeed writes its files, and keeps what it would write.  Nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.files: Files = {}

    def create(self, info: Any) -> None:
        """The folder is there already."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The same."""

    def save(self, state_dict: Any, path: str) -> None:
        """A file of this rank."""
        self.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Not used."""
        raise NotImplementedError

    def commit(self, info: Any) -> None:
        """Left to `publish`."""


class Saver:
    """Writes the checkpoints of a run, one at a time.  A save that fails leaves the ones before it, and training goes on.

    All methods are collectives.
    """

    def __init__(self, output_dir: Path, disk: Disk, total_limit: int | None, in_background: bool):
        self.output_dir, self.disk, self.total_limit, self.in_background = output_dir, disk, total_limit, in_background
        self.limit_now = total_limit
        self.thread = ThreadPoolExecutor(1)
        self.writing: tuple[Manifest, Future] | None = None
        self.failure: str | None = None
        """why the last checkpoint could not be written"""

    def save(self, engine: DeepSpeedEngine, manifest: Manifest, more: Files | None = None, deletes: bool = True) -> None:
        """Begin a checkpoint, once the one before it is done.

        Args:
            more: files of this rank beside DeepSpeed's.
            deletes: the oldest beyond the limit, afterwards.
        """
        self.finish()
        self.limit_now = self.total_limit if deletes else None
        partial = self.partial(manifest)
        try:
            self.disk.on_first(lambda: make_anew(partial), f"making {partial.name}")
            files = collect(engine, partial, manifest) | (more or {})
            self.look_for_room(files)
        except (UserError, RuntimeError) as error:
            self.failed(manifest, str(error))
            return
        if self.in_background and fits_memory(files):
            self.writing = manifest, self.thread.submit(write, snapshot(files), partial)
            return
        self.writing = manifest, self.thread.submit(write, files, partial)
        self.finish()

    def partial(self, manifest: Manifest) -> Path:
        """Where it is written."""
        return self.output_dir / f"checkpoint-{manifest.step}.partial"

    def look_for_room(self, files: Files) -> None:
        """Raises UserError where a disk cannot hold the files of all its ranks."""
        of_ranks = runtime.gathered([num_bytes(files)])
        needed = sum(of_ranks[rank] for rank in self.disk.ranks)

        def compare() -> None:
            free = shutil.disk_usage(self.output_dir).free
            if free < needed:
                raise UserError(f"it takes {needed / 2**30:.3g} GiB and {self.output_dir} has {free / 2**30:.3g} left")

        self.disk.on_first(compare, "looking for room")

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if all ranks have written their files."""
        if self.writing and not runtime.any_rank(not self.writing[1].done()):
            self.complete()

    def finish(self) -> None:
        """Wait for it."""
        if self.writing:
            self.complete()

    def complete(self) -> None:
        """Name what was written, or tell why it could not be."""
        (manifest, future), self.writing = self.writing, None  # type: ignore[misc]
        partial = self.partial(manifest)
        try:
            with runtime.together(f"writing {partial.name}"):
                mine = future.result()
            self.publish(manifest, partial, runtime.gathered([mine]))
            self.failure = None
        except (UserError, RuntimeError) as error:
            self.failed(manifest, str(error))

    def publish(self, manifest: Manifest, partial: Path, checksums: list[dict[str, str]]) -> None:
        """Name it on every disk that holds a part of it.

        Args:
            checksums: of the files of each rank.
        """
        here = dict(sorted(entry for rank in self.disk.ranks for entry in checksums[rank].items()))
        kept = self.disk.on_first(lambda: with_files(manifest, partial, here), f"looking at {partial.name}")
        everyone = runtime.gathered([(socket.gethostname(), kept)] if kept else [])
        self.disk.on_first(lambda: publish(partial, with_elsewhere(kept, everyone), self.limit_now), "naming it")

    def failed(self, manifest: Manifest, reason: str) -> None:
        """Remove what there is of it."""
        self.disk.on_first(lambda: shutil.rmtree(self.partial(manifest), ignore_errors=True), "removing it")
        self.failure = f"checkpoint-{manifest.step} could not be written: {reason}"
        runtime.log(f"{self.failure}; training goes on, and the checkpoints before it stay")

    def close(self) -> None:
        """Wait, and end.  Raises UserError if the last checkpoint could not be written."""
        self.finish()
        self.thread.shutdown()
        if self.failure:
            raise UserError(self.failure)


def make_anew(partial: Path) -> None:
    """An empty folder, with room for the script that DeepSpeed copies on rank 0 alone, which must not fail there."""
    try:
        remove(partial)
        partial.mkdir(parents=True)
        (partial / "try").write_bytes(bytes(SCRIPT_BYTES))
        (partial / "try").unlink()
    except OSError as error:
        raise UserError(f"{partial.parent} cannot be written: {error.strerror}") from None


def collect(engine: DeepSpeedEngine, partial: Path, manifest: Manifest) -> Files:
    """This rank's files as DeepSpeed would write them; their tensors are the engine's own.  A collective."""
    collector, before = Collector(), engine.checkpoint_engine
    engine.checkpoint_engine = collector
    on_nvme = engine.zero_nvme_offload_optimizer()
    engine.zero_nvme_offload_optimizer = lambda: False  # it would copy its swap files beside ours
    try:
        engine.save_checkpoint(
            str(partial.parent),
            tag=partial.name,
            client_state={"step": manifest.step},
            save_latest=False,
            exclude_frozen_parameters=manifest.lora is not None,
        )
    finally:
        engine.checkpoint_engine = before
        del engine.zero_nvme_offload_optimizer
    if not on_nvme:
        return collector.files
    with runtime.together("reading the optimizer from NVMe"):
        return {name: with_optimizer(engine, content) for name, content in collector.files.items()}


def with_optimizer(engine: DeepSpeedEngine, content: Any) -> Any:
    """Of a rank's optimizer file, what is on NVMe as well; another file as it is."""
    if "optimizer_state_dict" not in content:
        return content
    return content | {"optimizer_state_dict": nvme.brought_back(engine.optimizer, content["optimizer_state_dict"])}


def num_bytes(files: Files) -> int:
    """Of all tensors."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(files) if isinstance(leaf, Tensor))


def fits_memory(files: Files) -> bool:
    """Whether every node has memory for copies of all its ranks' files.  A collective."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return not runtime.any_rank(num_bytes(files) * runtime.env_local_world_size() > available / 2)


def snapshot(value: Any) -> Any:
    """A copy in host memory, which later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # of its own kind
        copied.update({key: snapshot(item) for key, item in value.items()})
        return copied
    return type(value)(map(snapshot, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


def write(files: Files, partial: Path) -> dict[str, str]:
    """Write this rank's files and flush them to the disk; {name: checksum}.

    Raises:
        UserError: the disk is full, or cannot be written.
    """
    checksums = {}
    try:
        for name, content in files.items():
            with (partial / name).open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            checksums[name] = checksum(partial / name)
    except (OSError, RuntimeError) as error:  # the latter is what torch makes of a disk that is full
        raise UserError(f"{partial.parent}: {error.strerror if isinstance(error, OSError) else error}") from None
    return checksums


def with_files(manifest: Manifest, partial: Path, checksums: dict[str, str]) -> Manifest:
    """The manifest of what is in the folder now."""
    files = sizes(partial)
    others = {name: checksum(partial / name) for name in files.keys() - checksums.keys()}  # what is copied from NVMe
    return replace(manifest, files=files, checksums={**checksums, **others})


def sizes(folder: Path) -> dict[str, int]:
    """{file: bytes} of all that is in a folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def publish(partial: Path, manifest: Manifest, total_limit: int | None) -> None:
    """The steps after the ranks' files are written; on one rank for each disk."""
    final = partial.with_suffix("")
    write_atomically(partial / MANIFEST, json.dumps(asdict(manifest), indent=2, default=list))
    remove(final)  # of an earlier run that went further than the checkpoint this one resumed from
    partial.rename(final)
    write_atomically(final.parent / "latest", final.name)
    if total_limit is not None:
        # later ones are of a run that this one branched off from: not ours to count or delete
        ours = [folder for folder in checkpoints(final.parent) if step_of(folder) <= manifest.step]
        for old in ours[:-total_limit]:
            remove(old)


def remove(folder: Path) -> None:
    """Delete a folder if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def load(engine: DeepSpeedEngine, folder: Path, manifest: Manifest, disk: Disk) -> None:
    """Weights, optimizer and schedule out of a checked checkpoint, whatever layout it was made in.  A collective.

    Args:
        manifest: the checkpoint's.

    Raises:
        UserError: a file carries code, or the layouts do not go together.
    """
    with runtime.together("looking into the checkpoint"):
        pickles = {name: size for name, size in sizes(folder).items() if name.endswith(".pt")}
        for name in dealt(pickles, *disk.part):
            rank_files.load(folder / name)  # DeepSpeed's reader would name neither the file nor what is wrong with it
    layout = runtime.on_main(lambda: elastic.layout_of_files(folder, manifest), "reading the checkpoint")
    here = elastic.layout_of(engine)
    # at stage 0 there is one file for all ranks
    if (layout != here and (layout.stage, here.stage) != (0, 0)) or here.optimizer_device == "nvme":
        if manifest.elsewhere:
            raise UserError(
                f"cannot resume from {folder}: it was made on {layout.words}, this is {here.words}, and its files are on the "
                f"nodes' own disks; gather it first: {how_to_gather(folder, manifest)}"
            )
        elastic.load(engine, folder, manifest, layout)
        return
    with only_weights():
        loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=manifest.lora is None)
    if runtime.any_rank(loaded is None):
        raise UserError(f"{folder}: DeepSpeed could not load it")


@contextmanager
def only_weights() -> Iterator[None]:
    """DeepSpeed unpickles with no restriction; inside this block torch allows tensors and the classes named here only."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
