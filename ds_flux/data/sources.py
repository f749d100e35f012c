"""Where images and captions come from: a data set of the `datasets` library, or a folder of files.

Images are opened, and not yet decoded.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.captions import Captions, read_caption_file
from ds_flux.data.columns import Columns, columns_of, digest_of, name_of_row
from ds_flux.data.decode import open_image
from ds_flux.data.tables import each_data_set, load_rows, name_of, root_of, undecoded
from ds_flux.randomness import key_seed

if TYPE_CHECKING:
    import datasets


CAPTION_ENDINGS = (".txt", ".caption")


@dataclass(frozen=True)
class Folder:
    """Images of a folder, captions in files of the same name, else one prompt for all."""

    folder: Path
    images_in_it: np.ndarray  # of bytes: names take a tenth of what as many paths would
    captions_in_it: np.ndarray  # of bytes, empty where there is none
    prompt: str | None
    max_pixels: int

    def __len__(self) -> int:
        return len(self.images_in_it)

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.folder / os.fsdecode(self.images_in_it[index])

    def caption(self, index: int) -> Captions:
        """The caption of a row, or several.  Raises BadSample."""
        name = os.fsdecode(self.captions_in_it[index])
        if not name:
            return self.prompt
        lines = read_caption_file(self.folder / name)
        return lines if len(lines) > 1 else lines[0]

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a row."""
        return (open_image(self.path(index), self.max_pixels),)

    def references(self, _index: int) -> tuple[Image.Image, ...]:
        """A folder has none."""
        return ()

    def fingerprint(self, index: int) -> str:
        """Of the image's bytes."""
        return digest_of([self.path(index)])

    def identity(self, index: int) -> str:
        """What stays when the folder moves, or other images come."""
        return os.fsdecode(self.images_in_it[index])

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return str(self.path(index))


@dataclass(frozen=True)
class Table:
    """A split of a data set, whose image columns are not decoded by the library."""

    rows: "datasets.Dataset"
    columns: Columns
    title: str

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def images_alone(self) -> "datasets.Dataset":
        """The rows with what the image takes: other columns are not read."""
        return self.rows.select_columns(self.columns.for_image)

    @cached_property
    def captions_alone(self) -> "datasets.Dataset":
        """The same of the captions."""
        return self.rows.select_columns(self.columns.for_caption)

    @cached_property
    def references_alone(self) -> "datasets.Dataset":
        """The same of the references."""
        return self.rows.select_columns(list(self.columns.references))

    @cached_property
    def names_alone(self) -> "datasets.Dataset":
        """The same of the rows' names."""
        return self.rows.select_columns(self.columns.identity)

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a row."""
        return (self.columns.image_of(self.images_alone[index]),)

    def caption(self, index: int) -> Captions:
        """The caption of a row, or several, as stored."""
        return self.columns.caption_of(self.captions_alone[index] if self.columns.caption else {})

    def references(self, index: int) -> tuple[Image.Image, ...]:
        """The reference images of a row."""
        return self.columns.references_of(self.references_alone[index] if self.columns.references else {})

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return name_of_row(self.names_alone[index] if self.columns.identity else {}) or f"row {index} of {self.title}"

    def fingerprint(self, index: int) -> str:
        """Of the bytes of the image and its references."""
        values = [self.images_alone[index][self.columns.image]]
        if self.columns.references:
            values += self.columns.reference_values(self.references_alone[index])
        return digest_of([self.columns.at_root(value) for value in values])

    def identity(self, index: int) -> str:
        """What stays when the data set moves, or rows are added behind."""
        return name_of_row(self.names_alone[index] if self.columns.identity else {}) or str(index)


@dataclass(frozen=True)
class Several:
    """Data sets, one behind the other."""

    parts: tuple[Folder | Table, ...]

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Samples of each."""
        return [len(part) for part in self.parts]

    def at(self, index: int) -> tuple[Folder | Table, int]:
        """The data set that a sample is of, and its number there."""
        for part, size in zip(self.parts, self.sizes):
            if index < size:
                return part, index
            index -= size
        raise IndexError

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a sample."""
        part, index = self.at(index)
        return part.images(index)

    def caption(self, index: int) -> Captions:
        """The caption of a sample, or several.  Raises BadSample."""
        part, index = self.at(index)
        return part.caption(index)

    def references(self, index: int) -> tuple[Image.Image, ...]:
        """The reference images of a sample."""
        part, index = self.at(index)
        return part.references(index)

    def fingerprint(self, index: int) -> str:
        """Of the bytes of the image and its references."""
        part, index = self.at(index)
        return part.fingerprint(index)

    def identity(self, index: int) -> str:
        """What stays when data sets move, or others come behind."""
        part, number = self.at(index)
        place = next(place for place, one in enumerate(self.parts) if one is part)
        return f"{place} {part.identity(number)}"

    def name(self, index: int) -> str:
        """How to find a sample, for messages."""
        part, index = self.at(index)
        return part.name(index)


@dataclass(frozen=True)
class Part:
    """Some of the samples of a source, numbered anew."""

    whole: Folder | Table | Several
    numbers: np.ndarray
    """which, in the whole"""
    title: str
    """what part it is"""

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def sizes(self) -> list[int]:
        """Samples of each data set of the whole."""
        ends = np.cumsum(self.whole.sizes if isinstance(self.whole, Several) else [len(self.whole)])
        return np.diff(np.searchsorted(self.numbers, ends), prepend=0).tolist()

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a sample."""
        return self.whole.images(int(self.numbers[index]))

    def caption(self, index: int) -> Captions:
        """The caption of a sample, or several.  Raises BadSample."""
        return self.whole.caption(int(self.numbers[index]))

    def references(self, index: int) -> tuple[Image.Image, ...]:
        """The reference images of a sample."""
        return self.whole.references(int(self.numbers[index]))

    def fingerprint(self, index: int) -> str:
        """Of the bytes of the image and its references."""
        return self.whole.fingerprint(int(self.numbers[index]))

    def name(self, index: int) -> str:
        """How to find a sample, for messages."""
        return self.whole.name(int(self.numbers[index]))


Source = Folder | Table | Several | Part


def held_out(whole: Folder | Table | Several, share: float) -> tuple[Part, Part]:
    """What is trained on, and about `share` of the samples that are not.

    A sample's name decides: it stays on its side when others come or go, and whatever the seed of the run.

    Raises:
        UserError: nothing is left on one of the sides.
    """
    limit = int(share * 2**63)
    is_out = np.array([key_seed("held out", whole.identity(index)) < limit for index in range(len(whole))])
    if is_out.all() or not is_out.any():
        raise UserError(f"--validation_fraction {share} holds {is_out.sum()} of {len(whole)} samples out: choose another share")
    return Part(whole, np.flatnonzero(~is_out), f"all but {share}"), Part(whole, np.flatnonzero(is_out), f"{share}")


def open_source(config: DataConfig) -> Source:
    """The images that the data flags name.

    Raises:
        UserError: nothing is there, a column is missing, or there are no images.
    """
    parts = tuple(open_folder(one) if one.instance_data_dir else open_table(one) for one in each_data_set(config))
    for part, one in zip(parts, each_data_set(config)):
        if len(part) == 0:
            raise UserError(f"{one.instance_data_dir or name_of(one)}: no images there")
    return parts[0] if len(parts) == 1 else Several(parts)


def open_folder(config: DataConfig) -> Folder:
    """--instance_data_dir: every file PIL has a reader for by its ending, sorted by name."""
    folder = Path(str(config.instance_data_dir))
    if not folder.is_dir():
        raise UserError(f"--instance_data_dir {folder}: no such folder")
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = sorted(folder.rglob("*"))
    paths = tuple(path for path in files if path.suffix.lower() in endings)
    texts = caption_files(files)
    caption_paths = tuple(texts.get(path.with_suffix("")) for path in paths)
    bare = [path for path, text in zip(paths, caption_paths) if text is None]
    if bare and config.instance_prompt is None:
        raise UserError(
            f"{len(bare)} of {len(paths)} images in {folder} have no caption (the first: {bare[0].name}): "
            "add .txt or .caption files, or give --instance_prompt"
        )
    names = [names_in(folder, some) for some in (paths, caption_paths)]
    return Folder(folder, *names, config.instance_prompt, config.max_image_pixels)


def names_in(folder: Path, paths: Iterable[Path | None]) -> np.ndarray:
    """Paths below a folder as bytes; empty for None."""
    return np.array([os.fsencode(path.relative_to(folder)) if path else b"" for path in paths], dtype=np.bytes_)


def caption_files(files: Iterable[Path]) -> dict[Path, Path]:
    """{path without its ending: caption file}; .txt before .caption, both in any case."""
    found = {}
    for ending in reversed(CAPTION_ENDINGS):
        found |= {path.with_suffix(""): path for path in files if path.suffix.lower() == ending}
    return found


def open_table(config: DataConfig) -> Table:
    """--dataset_name and --data_files: the split `train` of what the `datasets` library makes of them."""
    rows = load_rows(config)
    columns = columns_of(config, rows.column_names, root_of(config), name_of(config))
    return Table(undecoded(rows, [columns.image, *columns.references]), columns, name_of(config))
