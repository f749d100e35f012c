"""What the columns of a row mean: its image, its captions, its references."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ds_flux.config import DataConfig
from ds_flux.data.captions import Captions
from ds_flux.data.decode import BadSample, open_image
from ds_flux.flags import check_known, names_of

Row = Mapping[str, Any]  # {column: cell}, images as stored


@dataclass(frozen=True)
class Columns:
    """Names of columns; reads the cells of any row that has them."""

    image: str
    caption: str | None
    references: tuple[str, ...]
    prompt: str | None
    """the caption of every row, where no column has any"""
    max_pixels: int
    root: Path
    """where relative paths in cells begin"""

    @property
    def names(self) -> list[str]:
        """All that a row must have."""
        return [self.image, *([self.caption] if self.caption else []), *self.references]

    def image_of(self, row: Row) -> Image.Image:
        """The image, not yet decoded.  Raises BadSample."""
        return self.open(row[self.image])

    def caption_of(self, row: Row) -> Captions:
        """The caption, or several, as stored."""
        return self.prompt if self.caption is None else row[self.caption]

    def references_of(self, row: Row) -> tuple[Image.Image, ...]:
        """The references, column after column; an empty cell is none, a list is several.  Raises BadSample."""
        return tuple(self.open(value) for value in self.reference_values(row))

    def reference_values(self, row: Row) -> list[Any]:
        """The references as stored."""
        return [value for column in self.references for value in as_list(row[column])]

    def open(self, value: Any) -> Image.Image:
        """An image of a cell.  Raises BadSample, with the path where the cell has one: the row's number does not tell it."""
        value = self.at_root(value)
        try:
            return open_image(value, self.max_pixels)
        except BadSample as reason:
            path = value.get("path") if isinstance(value, dict) else value
            raise BadSample(f"{path}: {reason}" if isinstance(path, str | Path) else str(reason)) from None

    def at_root(self, value: Any) -> Any:
        """A cell, whose path is relative, where it is."""
        return self.root / value if isinstance(value, str) else value


def columns_of(config: DataConfig, present: list[str], root: Path, name: str) -> Columns:
    """The columns that the flags name.

    Args:
        present: columns of the data set `name`.

    Raises:
        UserError: it does not have one of them; the nearest is named.
    """
    references = names_of(config.cond_image_column)
    captions = [] if config.caption_column is None else [config.caption_column]
    flags = {"image_column": [config.image_column], "cond_image_column": references, "caption_column": captions}
    for flag, columns in flags.items():
        check_known(columns, present, f"column (--{flag}) of {name}")
    return Columns(
        image=config.image_column,
        caption=config.caption_column,
        references=tuple(references),
        prompt=config.instance_prompt,
        max_pixels=config.max_image_pixels,
        root=root,
    )


def as_list(value: Any) -> list[Any]:
    """A cell as a list of its images."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if value is not None]


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
