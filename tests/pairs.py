"""A small model folder of every family, and a data set that is learnt by heart: four prompts, and four edits of a reference."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image, ImageOps

from ds_flux.config import DataConfig
from ds_flux.data.buckets import make_buckets
from ds_flux.data.images import ImageRules, ReferenceRules, SampleDataset
from ds_flux.data.shapes import Shapes, look_at_sizes
from ds_flux.data.sources import open_source
from ds_flux.families import tiny, tiny_autoencoder

NAMES = "ant bee cat dog".split()
EDIT = "invert the colors"
WORDS = ["a", *NAMES, *EDIT.split()]
# one color for each quarter of a picture; no picture has another's inverse
COLORS = ["rygb", "bbyr", "gybk", "wkrg", "kwbg", "rkwy", "ygkw", "bwrr"]
RGB = {
    "r": (220, 30, 30), "g": (30, 190, 60), "b": (40, 50, 220), "y": (230, 210, 40), "k": (20, 20, 20), "w": (235, 235, 235),
}  # fmt: skip
RESOLUTION = 32
COPIES = 4  # of each row: a batch is never larger than the data
REFERENCE_SIZES = [(64, 64), (64, 64), (96, 64), (96, 64)]  # at least 64, which FLUX.2's pipeline asks for


@dataclass(frozen=True)
class Pairs:
    """Paths, and what belongs to what."""

    folder: Path
    prompts: list[str]
    pictures: list[Image.Image]  # of each prompt
    references: list[Image.Image]
    edits: list[Image.Image]  # of each reference, all by the same prompt

    @property
    def rows(self) -> Path:
        """The data set, with the columns image, text and ref; the first four rows have no reference."""
        return self.folder / "rows"

    def model(self, name: str) -> Path:
        """The model folder of a family."""
        return self.folder / name

    def flags(self, name: str, output_dir: Path, **changes: object) -> list[str]:
        """Arguments of `ds-flux train` on all eight rows."""
        flags = {
            "pretrained_model_name_or_path": self.model(name),
            "dataset_name": self.rows,
            "caption_column": "text",
            "cond_image_column": "ref",
            "output_dir": output_dir,
            "resolution": RESOLUTION,
            "max_sequence_length": tiny.TINY[name].text_length,
            "mixed_precision": "no",
            "train_batch_size": 4,
            **changes,
        }
        return [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", str(value))]


def write(folder: Path, transformer: dict[str, Any], autoencoder_steps: int) -> Pairs:
    """Everything, on disk."""
    shown, edited = COLORS[:4], COLORS[4:]
    pairs = Pairs(
        folder=folder,
        prompts=[" ".join([name] * 4) for name in NAMES],
        pictures=[quarters(colors, (RESOLUTION, RESOLUTION)) for colors in shown],
        references=[quarters(colors, size) for colors, size in zip(edited, REFERENCE_SIZES)],
        edits=[ImageOps.invert(quarters(colors, (RESOLUTION, RESOLUTION))) for colors in edited],
    )
    features = {"image": datasets.Image(), "text": datasets.Value("string"), "ref": datasets.Image()}
    rows = {
        "image": [*pairs.pictures, *pairs.edits] * COPIES,
        "text": [*pairs.prompts, *[EDIT] * 4] * COPIES,
        "ref": [*[None] * 4, *pairs.references] * COPIES,
    }
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(pairs.rows)
    seen = [*pairs.pictures, *pairs.edits, *(image.crop((0, 0, 32, 32)) for image in pairs.references)]
    autoencoders: dict[type, Any] = {}
    for name, small in tiny.TINY.items():
        torch.manual_seed(0)
        if small.autoencoder_class not in autoencoders:
            fresh = tiny_autoencoder.make(small.autoencoder_class)
            autoencoders[small.autoencoder_class] = tiny_autoencoder.train(fresh, seen, autoencoder_steps, batch_size=12)
        tiny.write(name, pairs.model(name), autoencoders[small.autoencoder_class], 0, WORDS, transformer)
    return pairs


def rules_of(config: DataConfig, grid: int = 8) -> ImageRules:
    """The sizes that a run with these settings would use, for a model whose tokens have this side."""
    return ImageRules(make_buckets(config, grid), ReferenceRules(config.reference_max_pixels, grid, pads_single=False))


def dataset_of(config: DataConfig, seed: int = 0, grid: int = 8) -> SampleDataset:
    """The samples as a run with these settings prepares them."""
    source, rules = open_source(config), rules_of(config, grid)
    images, references, _ = look_at_sizes(source, config, rules)
    shapes = Shapes(rules.buckets, images, references, [], 0)
    return SampleDataset(source, config, seed, rules, partial(shapes.sizes, seed=seed))


def quarters(colors: str, size: tuple[int, int]) -> Image.Image:
    """A picture of four rectangles."""
    small = Image.new("RGB", (2, 2))
    small.putdata([RGB[color] for color in colors])
    return small.resize(size, Image.Resampling.NEAREST)


def nearest(image: Image.Image, others: list[Image.Image]) -> int:
    """Which of the others an image is most like."""
    return min(range(len(others)), key=lambda index: distance(image, others[index]))


def distance(image: Image.Image, other: Image.Image) -> float:
    """Root of the mean squared error of two pictures, in units of the whole range."""
    one, two = (torch.tensor(list(picture.tobytes())) / 255 for picture in (image, other))
    return float((one - two).square().mean().sqrt())
