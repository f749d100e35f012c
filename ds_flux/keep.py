"""`ds-flux checkpoint`: the checkpoints of a run listed, read back, or deleted.

Imports neither torch nor DeepSpeed.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jsonargparse import ArgumentParser

from ds_flux import UserError, progress
from ds_flux.flags import parse
from ds_flux.manifest import MANIFEST, NAME, Manifest, check_contents, lacking, parse_manifest, step_of

SAVING_S = 600.0
"""a folder that was written to this lately may be of a run that is saving now"""


@dataclass(frozen=True)
class Shelf:
    """What a run's folder holds of checkpoints."""

    folder: Path
    checkpoints: list[Path]
    """by their names, oldest first, whole or not"""
    torn: list[Path]
    """of which only a beginning was written, or what was left when one was deleted"""
    latest: str | None
    """the name in the file `latest`"""


@dataclass(frozen=True)
class Finding:
    """One checkpoint, by its manifest and the sizes of its files."""

    folder: Path
    manifest: Manifest | None
    lacks: list[str]


def main(argv: list[str]) -> int:
    """`ds-flux checkpoint list|verify|prune RUN`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in ACTIONS:
        raise UserError(f"unknown action {argv[0]}: expected ds-flux checkpoint {'|'.join(ACTIONS)} RUN")
    parser = ArgumentParser(prog=f"ds-flux checkpoint {argv[0]}", exit_on_error=False)
    parser.add_argument("run", type=str, help="folder of a run (output_dir), or one checkpoint of it")
    if argv[0] == "prune":
        parser.add_argument("--keep", type=int, help="whole checkpoints to leave, the newest; beside them, what `latest` names")
    settings = parse(parser, argv[1:])
    if argv[0] == "prune":
        return prune(Path(settings.run), settings.keep)
    return (show if argv[0] == "list" else verify)(look(Path(settings.run)))


ACTIONS = {
    "list": "one line for each: size, date, how it was made, whether it is whole (by the sizes of its files)",
    "verify": "read every file and compare its checksum; exit status 2 if one differs",
    "prune": "delete the oldest whole ones beyond --keep N, and torn leftovers",
}


def usage() -> str:
    """One line for each action."""
    return "\n".join(["usage: ds-flux checkpoint ACTION RUN", "", *(f"  {name:8}{what}" for name, what in ACTIONS.items())])


# ---------------------------------------------------------------------------------------------------------------------
# looking


def look(path: Path) -> Shelf:
    """The checkpoints in a run's folder, or the one that the path is.  Raises UserError where there is none at all."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if (path / MANIFEST).is_file():
        return Shelf(path.absolute().parent, [path], [], latest_of(path.absolute().parent))
    folders = [found for found in path.glob("checkpoint-*") if found.is_dir()]
    named = sorted((found for found in folders if NAME.fullmatch(found.name)), key=step_of)
    torn = sorted(found for found in folders if found.name.endswith(".partial"))
    if not named and not torn:
        raise UserError(f"{path} has no checkpoints: expected folders such as checkpoint-500")
    return Shelf(path, named, torn, latest_of(path))


def latest_of(folder: Path) -> str | None:
    """What the file `latest` names."""
    file = folder / "latest"
    return file.read_text(errors="replace").strip() if file.is_file() else None


def examine(folder: Path) -> Finding:
    """What a checkpoint is and lacks; none of its files but the manifest is read."""
    try:
        manifest = parse_manifest(folder)
        return Finding(folder, manifest, list(lacking(folder, manifest)))
    except UserError as error:
        return Finding(folder, None, [str(error).removeprefix(f"{folder} is not whole: ").removeprefix(f"{folder}/")])


def num_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def written_at(folder: Path) -> float:
    """When something in it was last written, in seconds since 1970."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def size_in_words(size: int) -> str:
    """In powers of ten, as `df -H` and weight files have it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, "TB"
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


# ---------------------------------------------------------------------------------------------------------------------
# list


def show(shelf: Shelf) -> int:
    """Print one line for each checkpoint and each torn leftover."""
    rows = [row(examine(folder), shelf.latest) for folder in shelf.checkpoints]
    rows += [(folder.name, size_in_words(num_bytes(folder)), date_of(folder), "torn") for folder in shelf.torn]
    width = max(len(name) for name, *_ in rows)
    for name, size, date, words in rows:
        print(f"{name:{width}}  {size:>9}  {date}  {words}")
    if shelf.latest is not None and shelf.latest not in [folder.name for folder in shelf.checkpoints]:
        print(f"latest names {shelf.latest}, which is not there")
    return 0


def row(finding: Finding, latest: str | None) -> tuple[str, str, str, str]:
    """Name, size, date and the rest of a checkpoint's line."""
    words = [*made_as(finding.manifest)] if finding.manifest else []
    words.append("lacks: " + "; ".join(finding.lacks) if finding.lacks else "whole")
    words += ["latest"] if finding.folder.name == latest else []
    return finding.folder.name, size_in_words(num_bytes(finding.folder)), date_of(finding.folder), ", ".join(words)


def made_as(manifest: Manifest) -> Iterator[str]:
    """How a checkpoint was made."""
    yield f"step {manifest.step}"
    yield f"stage {manifest.zero_stage}"
    yield "1 process" if manifest.world_size == 1 else f"{manifest.world_size} processes"
    yield "full" if manifest.lora is None else f"LoRA of rank {manifest.lora.get('rank')}"
    if manifest.elsewhere:
        yield f"the part of this node, the rest is on {', '.join(manifest.elsewhere)}"


def date_of(folder: Path) -> str:
    """Of the manifest, which is written last; else of what was."""
    file = folder / MANIFEST
    seconds = file.stat().st_mtime if file.is_file() else written_at(folder)
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


# ---------------------------------------------------------------------------------------------------------------------
# verify


def verify(shelf: Shelf) -> int:
    """Read every file; print what is damaged, and return 2 if anything is."""
    findings = [examine(folder) for folder in shelf.checkpoints]
    total = sum(sum(finding.manifest.files.values()) for finding in findings if finding.manifest)
    with progress.bar(total=total, unit="B", unit_scale=True, desc="verify") as bar:
        damaged = {finding.folder: damages(finding, bar) for finding in findings}
    for folder, lines in damaged.items():
        for line in lines:
            print(f"{folder} is not whole: {line}")
    for finding in findings:
        manifest = finding.manifest
        unknown = len(manifest.files.keys() - manifest.checksums.keys()) if manifest else 0
        if unknown:
            print(f"{finding.folder}: of {unknown} files no checksum was written, only that their sizes are right is known")
    num_whole = sum(not lines for lines in damaged.values())
    print(f"{num_whole} of {len(findings)} checkpoints are whole")
    return 0 if num_whole == len(findings) else 2


def damages(finding: Finding, bar: progress.Bar) -> list[str]:
    """What is to be said of a checkpoint, and of each file that is there and does not hold what was written."""
    found = list(finding.lacks)
    manifest = finding.manifest
    for name in manifest.files if manifest else ():
        if any(lack.startswith(f"{name} ") for lack in found):
            continue
        try:
            check_contents(finding.folder, manifest, [name], bar.update)
        except UserError as error:
            found.append(str(error).removeprefix(f"{finding.folder} is not whole: "))
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# prune


def prune(run: Path, keep: int | None) -> int:
    """Delete the oldest whole checkpoints beyond `keep` and torn leftovers; never what `latest` names."""
    if keep is None or keep < 1:
        raise UserError("prune needs --keep N, the number of checkpoints to leave, 1 or more")
    if (run / MANIFEST).is_file():
        raise UserError(f"{run} is a checkpoint: give the folder of its run")
    shelf, freed = look(run), 0
    findings = [examine(folder) for folder in shelf.checkpoints]
    whole = [finding.folder for finding in findings if not finding.lacks]
    for folder in shelf.torn:
        freed += delete(folder) if is_left(folder) else 0
    for folder in whole[:-keep]:
        freed += delete(folder) if folder.name != shelf.latest else 0
    for finding in findings:
        if finding.lacks:
            print(f"left {finding.folder}, which is not whole: {finding.lacks[0]}")
    print(f"freed {size_in_words(freed)}")
    return 0


def is_left(folder: Path) -> bool:
    """Whether nobody is at work on a torn folder; says so if somebody may be."""
    age_s = time.time() - written_at(folder)
    if age_s < SAVING_S:
        print(f"left {folder}: it was written to {age_s:.0f} s ago, a run may be saving it")
    return age_s >= SAVING_S


def delete(folder: Path) -> int:
    """Delete a folder and say so; returns the bytes it had."""
    size, aside = num_bytes(folder), folder
    try:
        if (folder / MANIFEST).is_file():  # never half a checkpoint under a whole one's name
            aside = folder.rename(folder.with_name(f"{folder.name}.deleted.partial"))
        shutil.rmtree(aside)
    except OSError as error:
        raise UserError(f"{aside} cannot be deleted: {error.strerror}") from None
    print(f"deleted {folder} ({size_in_words(size)})")
    return size
