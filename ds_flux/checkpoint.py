"""Save, find, load and rotate checkpoints: DeepSpeed's own files, plus a manifest that makes one complete.

A checkpoint is complete or absent: DeepSpeed writes into `checkpoint-N.partial`; then come the manifest, the real name,
`latest`, and last the deletion of the oldest.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_flux import UserError, runtime

MANIFEST = "ds_flux.json"
NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is; written last into its folder."""

    step: int
    family: str
    transformer_class: str
    transformer_config: dict[str, Any]
    base_fingerprint: str
    """identity of the weights the run started from; a LoRA belongs to this base and no other"""
    lora: dict[str, Any] | None
    """rank, alpha and layers, or None where all weights train"""
    zero_stage: int
    world_size: int
    data: dict[str, Any]
    """what the order of samples follows from: seed, number of samples, global batch size"""
    files: dict[str, int] = field(default_factory=dict)
    """{file in the folder: its size in bytes}"""


def save(engine: DeepSpeedEngine, output_dir: Path, manifest: Manifest, total_limit: int | None) -> Path:
    """Write a checkpoint, complete or not at all; then drop the oldest beyond `total_limit`.  A collective."""
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
    runtime.on_main(lambda: publish(partial, final, manifest, total_limit), "naming the checkpoint")
    return final


def publish(partial: Path, final: Path, manifest: Manifest, total_limit: int | None) -> None:
    """The steps after DeepSpeed's files are written; on rank 0."""
    files = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()}
    write_atomically(partial / MANIFEST, json.dumps({**asdict(manifest), "files": files}, indent=2, default=list))
    remove(final)  # of an earlier run that went further than the checkpoint this one resumed from
    partial.rename(final)
    write_atomically(final.parent / "latest", final.name)
    if total_limit is not None:
        for old in checkpoints(final.parent)[:-total_limit]:
            remove(old)


def remove(folder: Path) -> None:
    """Delete a folder if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, then name."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find(output_dir: Path, wanted: str) -> Path | None:
    """The folder that --resume_from_checkpoint means; None: `latest`, and there is none yet.

    Raises:
        UserError: the path is no complete checkpoint.
    """
    if wanted == "latest":
        return next(reversed(checkpoints(output_dir)), None)
    for folder in (Path(wanted), output_dir / wanted):
        if (folder / MANIFEST).is_file():
            return folder.resolve()
    if Path(wanted).is_dir():
        raise UserError(f"--resume_from_checkpoint {wanted} is no checkpoint of ds_flux: it has no {MANIFEST}")
    raise UserError(f"--resume_from_checkpoint {wanted}: no such folder")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, whole.  Raises UserError otherwise."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read: {error}") from None
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{folder} is not whole: {name} is missing")
        if path.stat().st_size != size:
            raise UserError(f"{folder} is not whole: {name} has {path.stat().st_size} bytes, {size} were written")
    return manifest


def check_fits(folder: Path, found: Manifest, run: Manifest) -> list[str]:
    """Whether a run may go on from a checkpoint; returns what the user should know if it may.

    Raises:
        UserError: another model, base, adapter, ZeRO stage or number of processes.
    """
    same = (
        ("transformer_class", "another model"),
        ("transformer_config", "another model"),
        ("lora", "another LoRA, or one of LoRA and all weights"),
        ("zero_stage", "another ZeRO stage"),
        ("world_size", "another number of processes"),
    )
    run_facts = json.loads(json.dumps(asdict(run), default=list))
    for name, what in same:
        mine, theirs = run_facts[name], vars(found)[name]
        if mine != theirs:
            raise UserError(f"cannot resume from {folder}: it is of {what} ({name}: {differences(theirs, mine)})")
    if run.lora is not None and found.base_fingerprint != run.base_fingerprint:
        raise UserError(
            f"cannot resume from {folder}: its LoRA was trained on other base weights "
            f"(fingerprint {found.base_fingerprint}, these have {run.base_fingerprint})"
        )
    return [
        f"{name} is {run.data[name]}, the checkpoint was made with {value}: the order of samples is not the one it had"
        for name, value in found.data.items()
        if run.data[name] != value
    ]


def differences(theirs: Any, mine: Any) -> str:
    """"there X, here Y", of dictionaries only the entries that differ."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        keys = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
        theirs, mine = {k: theirs.get(k) for k in keys}, {k: mine.get(k) for k in keys}
    return f"there {theirs}, here {mine}"


def load(engine: DeepSpeedEngine, folder: Path, manifest: Manifest) -> None:
    """Weights, optimizer and schedule out of a checked checkpoint.  A collective."""
    with only_weights():
        loaded, _ = engine.load_checkpoint(
            str(folder.parent), tag=folder.name, load_module_strict=manifest.lora is None
        )
    if runtime.any_rank(loaded is None):
        raise UserError(f"{folder}: DeepSpeed could not load it")


@contextmanager
def only_weights() -> Iterator[None]:
    """DeepSpeed unpickles with no restriction; inside this block torch allows tensors and the classes named here only."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler]):
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
