"""Rows by the `datasets` library, which is imported only where rows are asked for."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.flags import check_known, names_of

if TYPE_CHECKING:
    import datasets

BUILDERS = {".tar": "webdataset", ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def name_of(config: DataConfig) -> str:
    """What the user called the data."""
    return str(config.dataset_name or ", ".join(names_of(config.data_files)))


def root_of(config: DataConfig) -> Path:
    """Where relative paths of images begin: beside the files, or in the folder, if it is one."""
    if config.data_files is not None:
        return Path(names_of(config.data_files)[0]).expanduser().parent
    folder = Path(str(config.dataset_name)).expanduser()
    return folder if folder.is_dir() else Path()


def load_rows(config: DataConfig) -> "datasets.Dataset":
    """The `train` split; UserError in place of the library's errors."""
    import datasets  # a second and 85 MB on every rank, which a run on a folder of images does without

    try:
        loaded = load(config)
    except IndexError:  # what the library makes of a data set without rows
        raise UserError(f"{name_of(config)}: no images there") from None
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name_of(config)}: {' '.join(str(error).split())}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    check_known(["train"], loaded, f"split of {name_of(config)}")
    return loaded["train"]


def load(config: DataConfig) -> Any:
    """A folder that `save_to_disk` wrote, data files, or whatever `load_dataset` knows."""
    import datasets

    name = config.dataset_name
    if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UserError(f"--dataset_name {name}: no such folder")
    if name is not None and any((Path(name) / f"dataset_{kind}.json").exists() for kind in ("info", "dict")):
        return datasets.load_from_disk(name)
    if config.data_files is None:
        return datasets.load_dataset(name, config.dataset_config_name)
    files = names_of(config.data_files)
    builder = name
    if builder is None:
        endings = {Path(file).suffix.lower() for file in files}
        if len(endings) != 1 or not endings <= BUILDERS.keys():
            raise UserError(f"--data_files {', '.join(files)}: expected files of one kind, {', '.join(BUILDERS)}")
        builder = BUILDERS[endings.pop()]
    return datasets.load_dataset(builder, config.dataset_config_name, data_files=files)


def undecoded(rows: "datasets.Dataset", columns: Iterable[str]) -> "datasets.Dataset":
    """The rows with the images of these columns as stored: opened here, so that a bad one can be named."""
    import datasets

    one = datasets.Image(decode=False)
    for column in columns:
        kind = rows.features[column]
        if isinstance(kind, datasets.Image):
            rows = rows.cast_column(column, one)
        elif isinstance(kind, datasets.List) and isinstance(kind.feature, datasets.Image):
            rows = rows.cast_column(column, datasets.List(one))
    return rows
