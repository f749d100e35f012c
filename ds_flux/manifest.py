"""What a checkpoint folder is: its manifest, which makes it complete, and how one is found and checked.

Imports neither torch nor DeepSpeed: `ds-flux consolidate` starts from here.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_flux import UserError

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
    stream: dict[str, Any] | None = None
    """of data that are read as a stream: how far each lane has come"""
    files: dict[str, int] = field(default_factory=dict)
    """{file in the folder: its size in bytes}"""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside, flush to disk, then name."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(folder.name.removeprefix("checkpoint-"))


def find(output_dir: Path, wanted: str) -> Path | None:
    """The folder that --resume_from_checkpoint means; None: `latest`, and there is none yet.

    Raises:
        UserError: the path is no complete checkpoint.
    """
    if wanted == "latest":
        named = output_dir / (output_dir / "latest").read_text().strip() if (output_dir / "latest").is_file() else None
        complete = checkpoints(output_dir)
        return named if named in complete else next(reversed(complete), None)
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
    """ "there X, here Y", of dictionaries only the entries that differ."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        keys = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
        theirs, mine = {k: theirs.get(k) for k in keys}, {k: mine.get(k) for k in keys}
    return f"there {theirs}, here {mine}"
