"""Rows by the `datasets` library, which is imported only where rows are asked for."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.columns import columns_by_flag
from ds_flux.data.tars import load_tars
from ds_flux.flags import check_known, names_of

if TYPE_CHECKING:
    import datasets

BUILDERS = {".tar": None, ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
NUM_PARTS = 64


def each_data_set(config: DataConfig) -> list[DataConfig]:
    """The flags of each data set, where --dataset_name or --instance_data_dir names several."""
    flag = "instance_data_dir" if config.instance_data_dir else "dataset_name"
    value = vars(config)[flag]
    if value is None or isinstance(value, str) and Path(value).exists():  # whose name may have a comma
        return [config]
    return [replace(config, **{flag: name}) for name in names_of(value)]


def name_of(config: DataConfig) -> str:
    """What the user called a data set."""
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

    loaded = in_plain_words(config, streaming=False)
    return loaded if isinstance(loaded, datasets.Dataset) else train_split(loaded, config)


def load_stream(config: DataConfig) -> "datasets.IterableDataset":
    """The same, to be read from front to back; a data set that is stored as one table gets parts to be read by themselves."""
    import datasets

    loaded = in_plain_words(config, streaming=True)
    rows = loaded if isinstance(loaded, datasets.Dataset | datasets.IterableDataset) else train_split(loaded, config)
    if isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), NUM_PARTS))
    if rows.column_names is None:
        raise UserError(f"{name_of(config)}: its columns are not known beforehand, so it cannot be streamed")
    return rows


def train_split(loaded: Any, config: DataConfig) -> Any:
    """The one to train on."""
    check_known(["train"], loaded, f"split of {name_of(config)}")
    return loaded["train"]


def in_plain_words(config: DataConfig, streaming: bool) -> Any:
    """`load`; UserError in place of the library's errors."""
    import datasets

    try:
        return load(config, streaming)
    except (IndexError, StopIteration):  # what the library makes of a data set without rows
        raise UserError(f"{name_of(config)}: no images there") from None
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name_of(config)}: {' '.join(str(error).split())}") from error


def load(config: DataConfig, streaming: bool) -> Any:
    """A folder that `save_to_disk` wrote, data files, or whatever `load_dataset` knows."""
    import datasets

    name = config.dataset_name
    if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise UserError(f"--dataset_name {name}: no such folder")
    if name is not None and any((Path(name) / f"dataset_{kind}.json").exists() for kind in ("info", "dict")):
        return datasets.load_from_disk(name)
    if config.data_files is None:
        return datasets.load_dataset(name, config.dataset_config_name, streaming=streaming)
    files = names_of(config.data_files)
    builder = name
    if builder is None:
        endings = {Path(file).suffix.lower() for file in files}
        if len(endings) != 1 or not endings <= BUILDERS.keys():
            raise UserError(f"--data_files {', '.join(files)}: expected files of one kind, {', '.join(BUILDERS)}")
        builder = BUILDERS[endings.pop()]
        if builder is None:
            return load_tars(files, columns_by_flag(config), streaming)
    return datasets.load_dataset(builder, config.dataset_config_name, data_files=files, streaming=streaming)


def undecoded(rows: Any, columns: Iterable[str]) -> Any:
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
