"""The schedule, the sources, and what a sample's identity decides."""

import tarfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.images import Batches, prepare_pixels, prepare_prompts
from ds_flux.data.schedule import Schedule
from ds_flux.data.sources import open_source
from tests.pairs import dataset_of


def schedule(**changes: int) -> Schedule:
    settings = dict(num_samples=10, seed=3, micro_batch_size=2, gradient_accumulation_steps=2, dp_size=1, dp_rank=0)
    return Schedule(**{**settings, **changes})


def global_batches(num_steps: int, first: int = 0, **changes: int) -> list[set[tuple[int, int]]]:
    """The samples of each optimizer step, over all ranks."""
    steps: list[set] = [set() for _ in range(first, num_steps)]
    for rank in range(changes.get("dp_size", 1)):
        plan = schedule(**changes, dp_rank=rank)
        for number, keys in enumerate(plan.micro_batches(first, num_steps)):
            steps[number // plan.gradient_accumulation_steps] |= set(keys)
    return steps


@pytest.mark.parametrize(
    "split",
    [
        dict(micro_batch_size=4, gradient_accumulation_steps=1),
        dict(micro_batch_size=1, gradient_accumulation_steps=2, dp_size=2),
        dict(micro_batch_size=1, gradient_accumulation_steps=1, dp_size=4),
        dict(micro_batch_size=1, gradient_accumulation_steps=4),
    ],
)
def test_any_split_sees_the_same_global_batches(split: dict[str, int]) -> None:
    assert global_batches(9, **split) == global_batches(9)


def test_every_sample_comes_once_an_epoch_and_none_is_lost() -> None:
    seen = [key for step in schedule().micro_batches(0, 5) for key in step]  # 20 samples of 10: two epochs exactly
    assert sorted(seen) == [(sample, visit) for sample in range(10) for visit in range(2)]
    first_epoch = [sample for sample, visit in seen if visit == 0]
    second_epoch = [sample for sample, visit in seen if visit == 1]
    assert first_epoch != second_epoch
    assert [visit for _, visit in seen] == [0] * 10 + [1] * 10


def test_resume_is_a_position() -> None:
    assert global_batches(9, first=4) == global_batches(9)[4:]


def test_batch_larger_than_the_data() -> None:
    with pytest.raises(UserError, match="12 images .* data holds 10"):
        schedule(micro_batch_size=6)


def picture(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (40, 60)) -> Path:
    Image.new("RGB", size, color).save(path)
    return path


def test_folder_with_captions(tmp_path: Path) -> None:
    picture(tmp_path / "b.png", (255, 0, 0))
    picture(tmp_path / "a.jpg", (0, 0, 255))
    (tmp_path / "b.txt").write_text(" red \n")
    config = DataConfig(instance_data_dir=str(tmp_path), instance_prompt="plain")
    source = open_source(config)
    assert [source.caption(i) for i in range(2)] == ["plain", "red"]
    with pytest.raises(UserError, match="1 of 2 images .*a.jpg.*--instance_prompt"):
        open_source(DataConfig(instance_data_dir=str(tmp_path)))


def test_dataset_from_a_folder_of_images(tmp_path: Path) -> None:
    picture(tmp_path / "0.png", (255, 0, 0))
    (tmp_path / "metadata.csv").write_text("file_name,text\n0.png,red\n")
    source = open_source(DataConfig(dataset_name=str(tmp_path), caption_column="text"))
    assert (source.images(0)[0].size, source.caption(0), len(source)) == ((40, 60), "red", 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(instance_data_dir="nowhere"), "no such folder"),
        (dict(instance_data_dir="."), "no images"),
        (dict(dataset_name="./nowhere"), "no such folder"),
        (dict(dataset_name="{rows}", image_column="img"), "column .*img; the nearest known one is image"),
        (dict(dataset_name="{rows}", caption_column="txt"), "column .*txt; the nearest known one is text"),
        (dict(dataset_name="{empty}"), "no images"),
    ],
)
def test_bad_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict, message: str) -> None:
    rows = datasets.Dataset.from_dict({"image": ["x.png"], "text": ["x"]})
    rows.save_to_disk(tmp_path / "rows")
    rows.select([]).save_to_disk(tmp_path / "empty")
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path / "bare")
    flags = {key: value.format(rows=tmp_path / "rows", empty=tmp_path / "empty") for key, value in flags.items()}
    with pytest.raises(UserError, match=message):
        open_source(DataConfig(**{"instance_prompt": "p", **flags}))


def test_identity_decides_crop_flip_and_dropout() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8))
    config = DataConfig(resolution=32, random_flip=True, proportion_empty_prompts=0.3, text_encoder_2_dropout=0.3)
    keys = [(sample, visit) for sample in range(30) for visit in range(2)]
    pixels = {key: prepare_pixels(image, (32, 32), config, 0, key) for key in keys}
    assert all(torch.equal(pixels[key], prepare_pixels(image, (32, 32), config, 0, key)) for key in keys)
    assert len({pixels[key].numpy().tobytes() for key in keys}) > 20
    prompts = [prepare_prompts("cat", config, 0, key) for key in keys]
    both = sum(p["text_encoder"] == "" for p in prompts)
    second_alone = sum(p["text_encoder_2"] == "" and p["text_encoder"] == "cat" for p in prompts)
    assert 8 < both < 30
    assert 5 < second_alone < 30
    assert not any(p["text_encoder"] == "" and p["text_encoder_2"] == "cat" for p in prompts)


def test_pixels_are_scaled_cropped_and_turned() -> None:
    image = Image.new("RGB", (100, 50), (255, 0, 0))
    image.paste((0, 0, 255), (50, 0, 100, 50))
    config = DataConfig(resolution=32, center_crop=True)
    pixels = prepare_pixels(image, (32, 32), config, 0, (0, 0))
    assert pixels.shape == (3, 32, 32)
    assert (pixels[0, :, 0] > 0.9).all() and (pixels[2, :, -1] > 0.9).all()
    assert (pixels.min(), pixels.max()) >= (torch.tensor(-1.0), torch.tensor(0.9))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image.info["exif"] = exif.tobytes()
    image.getexif()[0x0112] = 6
    turned = prepare_pixels(image, (32, 32), config, 0, (0, 0))
    assert (turned[0, 0] > 0.9).all() and (turned[2, -1] > 0.9).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_image_is_named_and_does_not_count(tmp_path: Path, num_workers: int) -> None:
    picture(tmp_path / "a.png", (255, 0, 0))
    (tmp_path / "b.png").write_bytes(b"no image")
    config = DataConfig(instance_data_dir=str(tmp_path), instance_prompt="p", resolution=16, dataloader_num_workers=num_workers)
    good, mixed = Batches(dataset_of(config, 0, 16), [[(0, 0)], [(0, 1), (1, 0)]])
    assert good.keys == [(0, 0)] and not good.bad and good.weights.tolist() == [1.0]
    assert mixed.weights.tolist() == [1.0, 0.0] and mixed.images[0].shape == (2, 3, 16, 16)
    assert [(bad.sample, bad.name) for bad in mixed.bad] == [(1, str(tmp_path / "b.png"))]


# ---------------------------------------------------------------------------------------------------------------------
# files of every kind


def write_files(folder: Path, kind: str) -> str:
    """Three red, green and blue pictures with captions, as `kind`; returns what --data_files is given."""
    colors = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}
    for name, color in colors.items():
        picture(folder / f"{name}.png", color)
    rows = {"image": [f"{name}.png" for name in colors], "text": [f"a {name} one" for name in colors]}
    if kind == "tar":
        for shard, names in enumerate([["red", "green"], ["blue"]]):
            with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
                for name in names:
                    (folder / f"{name}.txt").write_text(f"a {name} one")
                    tar.add(folder / f"{name}.png", f"{name}.png")
                    tar.add(folder / f"{name}.txt", f"{name}.txt")
        return str(folder / "shard-*.tar")
    table = datasets.Dataset.from_dict(rows)
    match kind:
        case "csv":
            table.to_csv(folder / "rows.csv")
        case "jsonl":
            table.to_json(folder / "rows.jsonl")
        case "parquet":
            table.to_parquet(folder / "rows.parquet")
        case "parquet with bytes":
            stored = {**rows, "image": [{"bytes": (folder / name).read_bytes(), "path": None} for name in rows["image"]]}
            features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
            embedded = datasets.Dataset.from_dict(stored, features=features)
            embedded.to_parquet(folder / "rows.parquet")
            for name in rows["image"]:
                (folder / name).unlink()
    return str(folder / f"rows.{kind.split()[0]}")


@pytest.mark.parametrize("kind", ["tar", "csv", "jsonl", "parquet", "parquet with bytes"])
def test_files_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The paths in a table begin beside it, wherever the run is started."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = write_files(tmp_path, kind)
    columns = dict(image_column="png", caption_column="txt") if kind == "tar" else dict(caption_column="text")
    config = DataConfig(data_files=files, resolution=16, **columns)
    samples = dataset_of(config, 0, 16)
    found = {}
    for index in range(len(samples.source)):
        sample = samples[(index, 0)]
        assert sample.bad is None, sample.bad
        found[sample.prompts["text_encoder"]] = sample.images[0][:, 8, 8].add(1).mul(127.5).round().int().tolist()
    assert found == {"a red one": [255, 0, 0], "a green one": [0, 128, 0], "a blue one": [0, 0, 255]}


@pytest.mark.parametrize(
    "files, message",
    [("nowhere/*.tar", "nowhere"), ("a.txt", "expected files of one kind"), (["a.csv", "b.tar"], "of one kind")],
)
def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: object, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        open_source(DataConfig(data_files=files, instance_prompt="p"))
