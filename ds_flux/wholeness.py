"""The checkpoint that a run goes on from: whole, on every disk that holds a part of it."""

import socket
from pathlib import Path

from ds_flux import UserError, runtime
from ds_flux.disks import Disk
from ds_flux.manifest import Manifest, check_contents, dealt, how_to_gather, read_manifest


def first_whole(folders: list[Path], disk: Disk) -> tuple[Path, Manifest]:
    """The first that is whole, and its manifest; says of those before it what they lack.  A collective.

    Raises:
        UserError: none is; of the last one.
    """
    *others, last = folders
    for folder in others:
        try:
            return folder, check(folder, disk)
        except UserError as error:
            runtime.log(f"{error}; looking at the one before it")
    return last, check(last, disk)


def check(folder: Path, disk: Disk) -> Manifest:
    """The manifest of a checkpoint whose files hold what was written; each rank reads a part of them.  A collective.

    Where the nodes have disks of their own it says what is on this rank's, and its own files are there.

    Raises:
        UserError: it is not whole; on all ranks alike.
    """
    if disk.is_shared:
        manifest = runtime.on_main(lambda: read_manifest(folder), "looking at the checkpoint")
    else:
        with runtime.together("looking at the checkpoint"):
            manifest = read_manifest(folder, of_node=True)
            check_is_here(folder, manifest)
    with runtime.together("checking the checkpoint"):
        check_contents(folder, manifest, dealt(manifest.files, *disk.part))
    return manifest


def check_is_here(folder: Path, manifest: Manifest) -> None:
    """Raises UserError where a checkpoint lies on the nodes' own disks and this rank's files on another node's."""
    is_alike = manifest.world_size == runtime.world_size()
    if manifest.elsewhere and not (is_alike and any(f"_rank_{runtime.rank()}_" in name for name in manifest.files)):
        raise UserError(
            f"{folder} was made by {manifest.world_size} processes that left it on their nodes' disks, and the files of rank "
            f"{runtime.rank()} are not on {socket.gethostname()}: start as many on each node, in the same order, or gather "
            f"it: {how_to_gather(folder, manifest)}"
        )
