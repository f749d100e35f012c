"""Save, load and rotate checkpoints: DeepSpeed's own files, plus a manifest that makes one complete.

A checkpoint is complete or absent: DeepSpeed writes into `checkpoint-N.partial`; then come the manifest, the real name,
`latest`, and last the deletion of the oldest.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_flux import UserError, runtime
from ds_flux.manifest import (
    MANIFEST,
    Manifest,
    check_contents,
    checkpoints,
    checksum,
    dealt,
    read_manifest,
    step_of,
    write_atomically,
)
from ds_flux.zero import elastic


def save(
    engine: DeepSpeedEngine, output_dir: Path, manifest: Manifest, total_limit: int | None, more: dict[str, Any] | None = None
) -> Path:
    """Write a checkpoint, complete or not at all; then drop the oldest beyond `total_limit`.  A collective.

    Args:
        more: {file: what torch is to save in it} of this rank, beside DeepSpeed's.
    """
    final = output_dir / f"checkpoint-{manifest.step}"
    partial = final.with_name(final.name + ".partial")
    runtime.on_main(lambda: remove(partial), "clearing a torn checkpoint")
    engine.save_checkpoint(
        str(output_dir),
        tag=partial.name,
        client_state={"step": manifest.step},
        save_latest=False,
        exclude_frozen_parameters=manifest.lora is not None,
    )
    with runtime.together("writing the checkpoint"):
        for name, content in (more or {}).items():
            torch.save(content, partial / name)
    files = runtime.on_main(lambda: sizes(partial), "listing the checkpoint")
    with runtime.together("reading the checkpoint back"):
        mine = [(name, checksum(partial / name)) for name in dealt(files, runtime.rank(), runtime.world_size())]
    complete = replace(manifest, files=files, checksums=dict(sorted(runtime.gathered(mine))))
    runtime.on_main(lambda: publish(partial, final, complete, total_limit), "naming the checkpoint")
    return final


def sizes(folder: Path) -> dict[str, int]:
    """{file: bytes} of all that is in a folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def publish(partial: Path, final: Path, manifest: Manifest, total_limit: int | None) -> None:
    """The steps after DeepSpeed's files are written; on rank 0."""
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


def first_whole(folders: list[Path]) -> tuple[Path, Manifest]:
    """The first that is whole, and its manifest; says of those before it what they lack.  A collective.

    Raises:
        UserError: none is; of the last one.
    """
    *others, last = folders
    for folder in others:
        try:
            return folder, check(folder)
        except UserError as error:
            runtime.log(f"{error}; looking at the one before it")
    return last, check(last)


def check(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files hold what was written; each rank reads a part of them.  A collective.

    Raises:
        UserError: it is not whole; on all ranks alike.
    """
    manifest = runtime.on_main(lambda: read_manifest(folder), "looking at the checkpoint")
    with runtime.together("checking the checkpoint"):
        check_contents(folder, manifest, dealt(manifest.files, runtime.rank(), runtime.world_size()))
    return manifest


def load(engine: DeepSpeedEngine, folder: Path, manifest: Manifest) -> None:
    """Weights, optimizer and schedule out of a checked checkpoint, whatever layout it was made in.  A collective.

    Args:
        manifest: the checkpoint's.
    """
    layout = runtime.on_main(lambda: elastic.layout_of_files(folder, manifest), "reading the checkpoint")
    here = elastic.layout_of(engine)
    # at stage 0 there is one file for all ranks
    if layout != here and (layout.stage, here.stage) != (0, 0):
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
