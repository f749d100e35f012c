"""What a checkpoint folder is: its manifest, which makes it complete, and how one is found and checked.

Imports neither torch nor DeepSpeed: `ds-flux consolidate` starts from here.
"""

import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
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
    elsewhere: dict[str, dict[str, int]] = field(default_factory=dict)
    """{host: {file: bytes}} of what other nodes keep of it on disks of their own"""
    checksums: dict[str, str] = field(default_factory=dict)
    """{file: its CRC-32, eight hexadecimal digits}; none in checkpoints of before there were any"""


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


def candidates(output_dir: Path, wanted: str) -> list[Path]:
    """The folders that --resume_from_checkpoint may mean, the first choice first; none: `latest`, and there is none yet.

    Several for `latest`: what it names and all of before, newest first, for the case that one is not whole.

    Raises:
        UserError: the path is no checkpoint of ours.
    """
    if wanted == "latest":
        found = sorted((path for path in output_dir.glob("checkpoint-*") if NAME.fullmatch(path.name)), key=step_of)
        name = (output_dir / "latest").read_text().strip() if (output_dir / "latest").is_file() else None
        # later ones than it are of a run that the one it is of has branched off from
        end = found.index(output_dir / name) + 1 if output_dir / str(name) in found else None
        return found[:end][::-1]
    for folder in (Path(wanted), output_dir / wanted):
        if (folder / MANIFEST).is_file():
            return [folder.resolve()]
    if Path(wanted).is_dir():
        raise UserError(f"--resume_from_checkpoint {wanted} is no checkpoint of ds_flux: it has no {MANIFEST}")
    raise UserError(f"--resume_from_checkpoint {wanted}: no such folder")


def find(output_dir: Path) -> Path | None:
    """The latest complete checkpoint of a run, if there is one."""
    return next((folder for folder in candidates(output_dir, "latest") if (folder / MANIFEST).is_file()), None)


def read_manifest(folder: Path, of_node: bool = False) -> Manifest:
    """The manifest of a checkpoint whose files are all there and of their sizes.  Raises UserError otherwise.

    Args:
        of_node: what this node keeps of it on a disk of its own is enough.
    """
    manifest = parse_manifest(folder)
    if manifest.elsewhere and not of_node:
        raise UserError(f"{folder} is not whole here: {how_to_gather(folder, manifest)}")
    for what in lacking(folder, manifest):
        raise UserError(f"{folder} is not whole: {what}")
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whole or not; with the files of other nodes as its own where they were brought here.

    Raises:
        UserError: there is none, or it is another thing.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is not whole: {MANIFEST} is missing")
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} cannot be read: {error}") from None
    others = {name: size for files in manifest.elsewhere.values() for name, size in files.items()}
    if any((folder / name).exists() for name in others):
        return replace(manifest, files={**others, **manifest.files}, elsewhere={})
    return manifest


def with_elsewhere(here: Manifest, everyone: list[tuple[str, Manifest]]) -> Manifest:
    """The manifest of what one node keeps, with what the others do.

    Args:
        everyone: (host, manifest of what it keeps) of all nodes.
    """
    elsewhere: dict[str, dict[str, int]] = {}
    checksums = dict(here.checksums)
    for host, manifest in everyone:
        for name, size in manifest.files.items():
            if name not in here.files:
                elsewhere.setdefault(host, {})[name] = size
                checksums[name] = manifest.checksums[name]
    return replace(here, elsewhere=elsewhere, checksums=checksums)


def how_to_gather(folder: Path, manifest: Manifest) -> str:
    """Which command brings the files of the other nodes here."""
    path = folder.absolute()
    commands = [f"rsync -a {host}:{path}/ {path}/" for host in manifest.elsewhere]
    return f"the rest is on {', '.join(manifest.elsewhere)}; on {socket.gethostname()}: {' && '.join(commands)}"


def lacking(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What a checkpoint's files lack by their sizes; nothing of them is read."""
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, {size} were written"


def dealt(files: dict[str, int], part: int, num_parts: int) -> list[str]:
    """One of `num_parts` parts of about equally many bytes, out of {name: size in bytes}."""
    return sorted(files, key=lambda name: (files[name], name))[part::num_parts]


def checksum(path: Path, on_read: Callable[[int], object] = int) -> str:
    """The CRC-32 of a file, read a piece at a time; `on_read` is told the bytes of each."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
            on_read(len(piece))
    return f"{value:08x}"


def check_contents(folder: Path, manifest: Manifest, names: Iterable[str], on_read: Callable[[int], object] = int) -> None:
    """Raises UserError unless these files hold what was written; those without a checksum pass."""
    for name in names:
        if manifest.checksums.get(name, "") not in ("", checksum(folder / name, on_read)):
            raise UserError(f"{folder} is not whole: {name} does not hold what was written (its checksum differs)")


def check_fits(folder: Path, found: Manifest, run: Manifest) -> list[str]:
    """Whether a run may go on from a checkpoint; returns what the user should know if it may.

    Raises:
        UserError: another model, base or adapter, or stage 0 on one side only.
    """
    same = (
        ("transformer_class", "another model"),
        ("transformer_config", "another model"),
        ("lora", "another LoRA, or one of LoRA and all weights"),
    )
    run_facts = json.loads(json.dumps(asdict(run), default=list))
    for name, what in same:
        mine, theirs = run_facts[name], vars(found)[name]
        if mine != theirs:
            raise UserError(f"cannot resume from {folder}: it is of {what} ({name}: {differences(theirs, mine)})")
    if 0 in (found.zero_stage, run.zero_stage) and found.zero_stage != run.zero_stage:
        raise UserError(
            f"cannot resume from {folder}: it is of ZeRO stage {found.zero_stage}, this run of {run.zero_stage}, and there is "
            "no way from or to stage 0"
        )
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
