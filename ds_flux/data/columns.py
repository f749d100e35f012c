"""What the columns of a row mean: its image, its captions, its references."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ds_flux.config import DataConfig
from ds_flux.data.captions import Captions, decoded
from ds_flux.data.decode import BadSample, open_image
from ds_flux.flags import check_known, names_of

# of rows that webdataset archives hold: their key, their archive, and why there is nothing in one
KEY, URL, TROUBLE = "__key__", "__url__", "__trouble__"
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
    present: frozenset[str]
    """all that the rows have"""

    @property
    def identity(self) -> list[str]:
        """Those that say which row it is."""
        return [name for name in (KEY, URL) if name in self.present]

    @property
    def for_image(self) -> list[str]:
        """What `image_of` asks for."""
        return [self.image, *({TROUBLE} & self.present)]

    @property
    def for_caption(self) -> list[str]:
        """What `caption_of` asks for."""
        return [self.caption, *({TROUBLE} & self.present)] if self.caption else []

    @property
    def all_used(self) -> list[str]:
        """What a row must bring."""
        return list(dict.fromkeys([*self.for_image, *self.for_caption, *self.references, *self.identity]))

    def image_of(self, row: Row) -> Image.Image:
        """The image, not yet decoded.  Raises BadSample."""
        check_whole(row)
        return self.open(row[self.image])

    def caption_of(self, row: Row) -> Captions:
        """The caption, or several, as stored.  Raises BadSample."""
        check_whole(row)
        caption = self.prompt if self.caption is None else row[self.caption]
        return decoded(caption, "the caption") if isinstance(caption, bytes) else caption

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


def columns_by_flag(config: DataConfig) -> dict[str, list[str]]:
    """{flag: columns that it names}."""
    captions = [] if config.caption_column is None else [config.caption_column]
    references = names_of(config.cond_image_column)
    return {"image_column": [config.image_column], "cond_image_column": references, "caption_column": captions}


def columns_of(config: DataConfig, present: list[str], root: Path, name: str) -> Columns:
    """The columns that the flags name.

    Args:
        present: columns of the data set `name`.

    Raises:
        UserError: it does not have one of them; the nearest is named.
    """
    for flag, columns in columns_by_flag(config).items():
        check_known(columns, present, f"column (--{flag}) of {name}")
    return Columns(
        image=config.image_column,
        caption=config.caption_column,
        references=tuple(names_of(config.cond_image_column)),
        prompt=config.instance_prompt,
        max_pixels=config.max_image_pixels,
        root=root,
        present=frozenset(present),
    )


def check_whole(row: Row) -> None:
    """Raise BadSample where a row stands for what could not be read."""
    if row.get(TROUBLE):
        raise BadSample(row[TROUBLE])


def name_of_row(row: Row) -> str | None:
    """How to find a row that has a key."""
    return f"{Path(row[URL]).name}: {row[KEY]}" if KEY in row and URL in row else None


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
