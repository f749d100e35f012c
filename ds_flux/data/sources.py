"""Where images and captions come from: a data set of the `datasets` library, or a folder of files.

Images are opened, and not yet decoded.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.captions import Captions, read_caption_file
from ds_flux.data.decode import BadSample, open_image
from ds_flux.data.tables import load_rows, name_of, root_of, undecoded
from ds_flux.flags import check_known, names_of

if TYPE_CHECKING:
    import datasets


CAPTION_ENDINGS = (".txt", ".caption")


@dataclass(frozen=True)
class Folder:
    """Images of a folder, captions in files of the same name, else one prompt for all."""

    paths: tuple[Path, ...]
    caption_paths: tuple[Path | None, ...]
    prompt: str | None
    max_pixels: int

    def __len__(self) -> int:
        return len(self.paths)

    def caption(self, index: int) -> Captions:
        """The caption of a row, or several.  Raises BadSample."""
        path = self.caption_paths[index]
        if path is None:
            return self.prompt
        lines = read_caption_file(path)
        return lines if len(lines) > 1 else lines[0]

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a row."""
        return (open_image(self.paths[index], self.max_pixels),)

    def references(self, _index: int) -> tuple[Image.Image, ...]:
        """A folder has none."""
        return ()

    def fingerprint(self, index: int) -> str:
        """Of the image's bytes."""
        return digest_of([self.paths[index]])

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return str(self.paths[index])


@dataclass(frozen=True)
class Table:
    """A split of a data set, whose image columns are not decoded by the library."""

    rows: "datasets.Dataset"
    image_column: str
    caption_column: str | None
    prompt: str | None
    max_pixels: int
    reference_columns: tuple[str, ...] = ()
    root: Path = Path()
    """where relative paths in cells begin"""

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, index: int) -> tuple[Image.Image, ...]:
        """The image of a row."""
        return (self.open_cell(self.images_alone[index][self.image_column]),)

    @cached_property
    def images_alone(self) -> "datasets.Dataset":
        """The rows with one column: the others are not read."""
        return self.rows.select_columns([self.image_column])

    @cached_property
    def captions_alone(self) -> "datasets.Dataset":
        """The same of the captions."""
        return self.rows.select_columns([str(self.caption_column)])

    @cached_property
    def references_alone(self) -> "datasets.Dataset":
        """The same of the references."""
        return self.rows.select_columns(list(self.reference_columns))

    def caption(self, index: int) -> Captions:
        """The caption of a row, or several, as stored."""
        return self.prompt if self.caption_column is None else self.captions_alone[index][self.caption_column]

    def references(self, index: int) -> tuple[Image.Image, ...]:
        """The reference images of a row, column after column; an empty cell is none, a list is several."""
        if not self.reference_columns:
            return ()
        row = self.references_alone[index]
        values = [value for column in self.reference_columns for value in as_list(row[column])]
        return tuple(self.open_cell(value) for value in values)

    def open_cell(self, value: Any) -> Image.Image:
        """An image of a cell.  Raises BadSample, with the path where the cell has one: the row's number does not tell it."""
        value = self.root / value if isinstance(value, str) else value
        try:
            return open_image(value, self.max_pixels)
        except BadSample as reason:
            path = value.get("path") if isinstance(value, dict) else value
            raise BadSample(f"{path}: {reason}" if isinstance(path, str | Path) else str(reason)) from None

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return f"row {index} of the data set"

    def fingerprint(self, index: int) -> str:
        """Of the bytes of the image and its references."""
        values = [self.images_alone[index][self.image_column]]
        if self.reference_columns:
            row = self.references_alone[index]
            values += [value for column in self.reference_columns for value in as_list(row[column])]
        return digest_of([self.root / value if isinstance(value, str) else value for value in values])


Source = Folder | Table


def digest_of(values: list[Any]) -> str:
    """Of the bytes that cells hold or point to; a file that cannot be read is its name."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, dict):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        try:
            digest.update(value if isinstance(value, bytes) else Path(value).read_bytes())
        except (OSError, TypeError):
            digest.update(repr(value).encode())
        digest.update(b"|")
    return digest.hexdigest()


def as_list(value: Any) -> list[Any]:
    """A cell as a list of its images."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if value is not None]


def open_source(config: DataConfig) -> Source:
    """The images that the data flags name.

    Raises:
        UserError: nothing is there, a column is missing, or there are no images.
    """
    source = open_folder(config) if config.instance_data_dir else open_table(config)
    if len(source) == 0:
        raise UserError(f"{config.instance_data_dir or name_of(config)}: no images there")
    return source


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
    return Folder(paths, caption_paths, config.instance_prompt, config.max_image_pixels)


def caption_files(files: Iterable[Path]) -> dict[Path, Path]:
    """{path without its ending: caption file}; .txt before .caption, both in any case."""
    found = {}
    for ending in reversed(CAPTION_ENDINGS):
        found |= {path.with_suffix(""): path for path in files if path.suffix.lower() == ending}
    return found


def open_table(config: DataConfig) -> Table:
    """--dataset_name and --data_files: the split `train` of what the `datasets` library makes of them."""
    rows = load_rows(config)
    references = names_of(config.cond_image_column)
    flags = {"image_column": [config.image_column], "cond_image_column": references, "caption_column": []}
    if config.caption_column is not None:
        flags["caption_column"] = [config.caption_column]
    for flag, columns in flags.items():
        check_known(columns, rows.column_names, f"column (--{flag}) of {name_of(config)}")
    rows = undecoded(rows, [config.image_column, *references])
    return Table(
        rows=rows,
        image_column=config.image_column,
        caption_column=config.caption_column,
        prompt=config.instance_prompt,
        max_pixels=config.max_image_pixels,
        reference_columns=tuple(references),
        root=root_of(config),
    )
