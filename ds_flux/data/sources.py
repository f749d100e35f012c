"""Where images and captions come from: a data set of the `datasets` library, or a folder of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.flags import check_known

if TYPE_CHECKING:
    import datasets

Row = tuple[Image.Image, str]  # an image as stored, and its caption


@dataclass(frozen=True)
class Folder(Sequence[Row]):
    """Images of a folder, captions in .txt files of the same name, else one prompt for all."""

    paths: tuple[Path, ...]
    prompt: str | None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Row:
        path = self.paths[index]
        caption = path.with_suffix(".txt")
        return Image.open(path), caption.read_text().strip() if caption.exists() else str(self.prompt)

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return str(self.paths[index])


@dataclass(frozen=True)
class Table(Sequence[Row]):
    """A split of a data set."""

    rows: "datasets.Dataset"
    image_column: str
    caption_column: str | None
    prompt: str | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        image, caption = row[self.image_column], row[self.caption_column] if self.caption_column else self.prompt
        if not isinstance(caption, str):
            raise UserError(f"{self.name(index)}: the caption is a {type(caption).__name__}, expected text")
        return image if isinstance(image, Image.Image) else Image.open(image), caption

    def name(self, index: int) -> str:
        """How to find a row, for messages."""
        return f"row {index} of the data set"


Source = Folder | Table


def open_source(config: DataConfig) -> Source:
    """The images that the data flags name.

    Raises:
        UserError: nothing is there, a column is missing, or there are no images.
    """
    source = open_table(config) if config.dataset_name else open_folder(config)
    if len(source) == 0:
        raise UserError(f"{config.dataset_name or config.instance_data_dir}: no images there")
    return source


def open_folder(config: DataConfig) -> Folder:
    """--instance_data_dir: every file PIL has a reader for by its ending, sorted by name."""
    folder = Path(str(config.instance_data_dir))
    if not folder.is_dir():
        raise UserError(f"--instance_data_dir {folder}: no such folder")
    endings = Image.registered_extensions()
    paths = tuple(sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings))
    bare = [path for path in paths if not path.with_suffix(".txt").exists()]
    if bare and config.instance_prompt is None:
        raise UserError(
            f"{len(bare)} of {len(paths)} images in {folder} have no caption (the first: {bare[0].name}): "
            "add .txt files or give --instance_prompt"
        )
    return Folder(paths, config.instance_prompt)


def open_table(config: DataConfig) -> Table:
    """--dataset_name: a folder that `save_to_disk` wrote, or whatever `load_dataset` knows; the split `train`."""
    rows = load_rows(str(config.dataset_name), config.dataset_config_name)
    for flag in ("image_column", "caption_column"):
        column = vars(config)[flag]
        if column is not None:
            check_known([column], rows.column_names, f"column (--{flag}) of {config.dataset_name}")
    return Table(rows, config.image_column, config.caption_column, config.instance_prompt)


def load_rows(name: str, config_name: str | None) -> "datasets.Dataset":
    """The `train` split; UserError in place of the library's errors."""
    import datasets  # a second and 85 MB on every rank, which a run on a folder of images does without

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UserError(f"--dataset_name {name}: no such folder")
    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded: Any = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config_name)
    except IndexError:  # what the library makes of a data set without rows
        raise UserError(f"--dataset_name {name}: no images there") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"--dataset_name {name}: {' '.join(str(error).split())}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    check_known(["train"], loaded, f"split of {name}")
    return loaded["train"]
