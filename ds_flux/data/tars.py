"""Tar archives as webdataset has them: files that follow each other and differ in their endings only are one row.

The `datasets` library reads them as well, but takes an archive that ends early for a shorter one, and stops at the first
caption that is missing or not UTF-8.  Here each is one row that says what is wrong.
"""

import tarfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import fsspec

from ds_flux import UserError
from ds_flux.data.columns import KEY, TROUBLE, URL
from ds_flux.flags import check_known

NUM_LOOKED_AT = 100  # files, for the endings that there are


def load_tars(patterns: list[str], flags: dict[str, list[str]], streaming: bool) -> Any:
    """A data set with the bytes of some columns; an archive is a shard.

    Args:
        patterns: paths or URLs, with * for several.
        flags: {flag: columns that it names}, a column is the ending of its files.

    Raises:
        UserError: there is no such archive, or none of its first files has such an ending.
    """
    import datasets  # late, as in tables

    try:
        files = datasets.data_files.DataFilesList.from_patterns(patterns)
        check_endings(files[0], flags)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{', '.join(patterns)}: {' '.join(str(error).split())}") from None
    columns = [column for names in flags.values() for column in names]
    features = datasets.Features(
        {KEY: datasets.Value("string"), URL: datasets.Value("string"), TROUBLE: datasets.Value("string")}
        | {column: datasets.Value("binary") for column in columns}
    )
    if streaming:
        return datasets.IterableDataset.from_generator(read_tars, features, {"files": list(files), "columns": tuple(columns)})
    # the copy on disk is found again by these arguments: so they tell when an archive has changed
    arguments = {"files": list(files), "columns": tuple(columns), "stamps": tuple(files.origin_metadata)}
    return datasets.Dataset.from_generator(read_tars, features, gen_kwargs=arguments)


def check_endings(file: str, flags: dict[str, list[str]]) -> None:
    """The archive has files for each column.  Raises UserError."""
    with fsspec.open(file, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        endings = {ending_of(member.name) for member in islice(archive, NUM_LOOKED_AT) if member.isfile()}
    for flag, columns in flags.items():
        check_known(columns, endings, f"column (--{flag}) of {file}")


def ending_of(name: str) -> str:
    """Of a file in an archive, as webdataset has it: all behind the first dot of its last part, in small letters."""
    return PurePosixPath(name).name.partition(".")[2].lower()


def read_tars(files: list[str], columns: tuple[str, ...], stamps: Any = None) -> Iterator[dict[str, Any]]:
    """The rows of archives.  Where the rest of one cannot be read, a row says so."""
    for file in files:
        key = None
        try:
            for row in rows_of(file, columns):
                key = row[KEY]
                yield row
        except (OSError, tarfile.TarError, EOFError) as error:
            reason = f"the rest of the archive cannot be read: {' '.join(str(error).split())}"
            yield {KEY: f"behind {key}", URL: file, TROUBLE: reason} | dict.fromkeys(columns)


def rows_of(file: str, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of one archive.  Raises OSError, TarError or EOFError where it is damaged, or ends early."""
    row: dict[str, Any] = {}
    with fsspec.open(file, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            archive.members.clear()  # which would hold them all
            if not member.isfile():
                continue
            key = member.name[: len(member.name) - len(ending_of(member.name)) - 1]
            if row and row[KEY] != key:
                yield row
                row = {}
            row = row or {KEY: key, URL: file, TROUBLE: None} | dict.fromkeys(columns)
            if ending_of(member.name) in columns:
                row[ending_of(member.name)] = archive.extractfile(member).read()  # type: ignore[union-attr]
        if row:
            yield row
        if is_cut_off(archive):
            raise EOFError("it ends early")


def is_cut_off(archive: tarfile.TarFile) -> bool:
    """Whether an archive that was read to its end lacks the empty block that ends it: `tarfile` takes that for an end, too."""
    return archive.fileobj.tell() < archive.offset + tarfile.BLOCKSIZE  # type: ignore[union-attr]
