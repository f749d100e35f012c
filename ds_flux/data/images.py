"""A row of a source -> pixels and prompts, all of it decided by the sample's identity; micro batches of them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets
from ds_flux.data.cache import LatentCache
from ds_flux.data.captions import Captions, caption_of
from ds_flux.data.decode import BadSample, Size, decode, upright_size
from ds_flux.data.schedule import SampleKey
from ds_flux.data.skipped import Bad
from ds_flux.data.sources import Source
from ds_flux.data.stream import Position, Stream, StreamedRow
from ds_flux.randomness import uniform

TEXT_ENCODER_DROPOUTS = {"text_encoder": "text_encoder_dropout", "text_encoder_2": "text_encoder_2_dropout"}
MIN_PADDED_SIDE = 64


@dataclass(frozen=True)
class RawBatch:
    """A micro batch of one rank before anything is encoded."""

    images: tuple[Tensor, ...]  # the image, then its references: pixels (B, 3, height, width) in [-1, 1], or latents
    prompts: dict[str, list[str]]  # {text encoder: B prompts}
    keys: list[SampleKey]
    names: tuple[str, ...] = ()
    are_latents: bool = False
    spread: Tensor | None = None  # (B, C, H, W) of latents from a cache that holds it
    bad: tuple[Bad, ...] = ()  # samples that cannot be used; their place is held by zeros, and does not count
    weights: Tensor | None = None  # (B,): 0 for them, 1 for the others; None: all count
    positions: tuple[tuple[int, Position], ...] = ()  # of a stream: lanes, and how far this batch has brought them

    def part(self, samples: list[int]) -> "RawBatch":
        """What encoding some of its samples needs."""
        return RawBatch(
            images=tuple(image[samples] for image in self.images),
            prompts={encoder: [prompts[sample] for sample in samples] for encoder, prompts in self.prompts.items()},
            keys=[self.keys[sample] for sample in samples],
            are_latents=self.are_latents,
            spread=None if self.spread is None else self.spread[samples],
        )


@dataclass(frozen=True)
class Sample:
    """One row, prepared."""

    images: tuple[Tensor, ...]  # the image, then its references: pixels (3, height, width) in [-1, 1], or latents
    prompts: dict[str, str]
    key: SampleKey
    name: str
    are_latents: bool
    spread: Tensor | None = None  # of the image's latents
    bad: Bad | None = None
    position: tuple[int, Position] | None = None  # of a stream


@dataclass(frozen=True)
class ReferenceRules:
    """The size of a reference: its own, made smaller if it is too large, in whole tokens."""

    max_pixels: int
    grid: int
    """side of the square of pixels that one token stands for"""
    pads_single: bool
    """pad a reference that is the only one of its row, as its pipeline does, instead of cropping it"""

    def scaled(self, size: Size) -> Size:
        """The size at most `max_pixels` large, and at least one token."""
        scale = min(1.0, math.sqrt(self.max_pixels / (size[0] * size[1])))
        scale = max(scale, self.grid / min(size))
        return (max(self.grid, int(size[0] * scale + 1e-6)), max(self.grid, int(size[1] * scale + 1e-6)))

    def final(self, size: Size, is_single: bool) -> Size:
        """The size in pixels that the autoencoder sees."""
        width, height = self.scaled(size)
        if self.pads_single and is_single:
            return self.padded(width), self.padded(height)
        return width // self.grid * self.grid, height // self.grid * self.grid

    def padded(self, side: int) -> int:
        """A side rounded up to whole tokens, as diffusers' `Flux3ImageProcessor._get_canvas_height_width` does."""
        return max(MIN_PADDED_SIDE, math.ceil(side / self.grid) * self.grid)


@dataclass(frozen=True)
class ImageRules:
    """The sizes of images and of references."""

    buckets: Buckets
    references: ReferenceRules


@dataclass(frozen=True)
class SampleDataset(Dataset):
    """{sample key, or row of a stream: prepared sample}.

    Args:
        source: of the rows; a row of a stream brings its own.
        sizes_of: the sizes that the images of a visit must have, for the sake of its batch.
        cache: take latents from here instead of decoding images.
    """

    source: Source | Stream | StreamedRow
    config: DataConfig
    seed: int
    rules: ImageRules
    sizes_of: Callable[[SampleKey], tuple[Size, ...]]
    cache: LatentCache | None = None

    def __getitem__(self, asked: SampleKey | StreamedRow) -> Sample:
        """By its identity alone."""
        if not isinstance(asked, StreamedRow):
            return self.prepare(asked)
        sample = replace(self, source=asked).prepare(asked.key)
        return sample if asked.position is None else replace(sample, position=(asked.lane, asked.position))

    def prepare(self, key: SampleKey) -> Sample:
        """A sample that cannot be used comes with the reason, and with zeros in the sizes that its batch needs."""
        images, spread, trouble = self.cache.read(key) if self.cache else self.images(key)
        prompts, trouble_of_caption = self.prompts(key)
        trouble = trouble or trouble_of_caption
        images = images[:1] if drops_references(self.config, self.seed, key) else images
        name = self.source.name(key[0])
        bad = Bad(key[0], name, trouble) if trouble else None
        return Sample(images, prompts, key, name, self.cache is not None, spread, bad)

    def prompts(self, key: SampleKey) -> tuple[dict[str, str], str | None]:
        """{text encoder: prompt} of a visit; or empty ones, and what is wrong with the caption."""
        try:
            return prepare_prompts(self.source.caption(key[0]), self.config, self.seed, key), None
        except (BadSample, OSError, ValueError) as error:
            return dict.fromkeys(TEXT_ENCODER_DROPOUTS, ""), in_one_line(error)

    def images(self, key: SampleKey) -> tuple[tuple[Tensor, ...], None, str | None]:
        """The pixels of image and references; or grey in their place, and what is wrong with them."""
        try:
            return self.pixels(key), None, None
        except (BadSample, OSError, ValueError) as error:
            return tuple(torch.zeros(3, height, width) for width, height in self.sizes_of(key)), None, in_one_line(error)

    def transform(self, key: SampleKey) -> list[Any]:
        """What a visit's pixels follow from beside the files."""
        config = self.config
        crop = None if config.center_crop else uniform(self.seed, key, "crop", 2)
        flip = config.random_flip and uniform(self.seed, key, "flip")[0] < 0.5
        return [self.sizes_of(key), crop, flip, config.augment_references, config.alpha_background, config.vae_encode_mode]

    def pixels(self, key: SampleKey) -> tuple[Tensor, ...]:
        """The image and all its references.

        Raises:
            BadSample: one of them cannot be decoded.
        """
        (stored,), references = self.source.images(key[0]), self.source.references(key[0])
        size = self.rules.buckets.of(upright_size(stored), key, self.seed)
        image = prepare_pixels(stored, size, self.config, self.seed, key)
        if self.config.augment_references:
            return image, *(prepare_pixels(other, size, self.config, self.seed, key) for other in references)
        is_single = len(references) == 1
        return image, *(as_pixels(fit(upright(other, self.config), self.rules.references, is_single)) for other in references)


def in_one_line(error: Exception) -> str:
    """What an error says."""
    return " ".join(str(error).split())


def happens(rate: float, seed: int, key: SampleKey, purpose: str) -> bool:
    """Whether something that happens to a share of all samples happens to this one; draws nothing where it never does."""
    return rate > 0 and uniform(seed, key, purpose)[0] < rate


def upright(image: Image.Image, config: DataConfig) -> Image.Image:
    """Turned as the camera says, in RGB, by the flags.  Raises BadSample."""
    return decode(image, ImageColor.getcolor(config.alpha_background, "RGB"), config.max_image_pixels)


def as_pixels(image: Image.Image) -> Tensor:
    """(3, height, width) in [-1, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def prepare_pixels(image: Image.Image, size: Size, config: DataConfig, seed: int, key: SampleKey) -> Tensor:
    """(3, height, width) in [-1, 1]: scaled until it covers (width, height), cropped, perhaps flipped."""
    width, height = size
    image = upright(image, config)
    scale = max(width / image.width, height / image.height)
    image = image.resize(
        (max(width, round(image.width * scale)), max(height, round(image.height * scale))), Image.Resampling.LANCZOS
    )
    across, down = (0.5, 0.5) if config.center_crop else uniform(seed, key, "crop", 2)
    left, top = round(across * (image.width - width)), round(down * (image.height - height))
    image = image.crop((left, top, left + width, top + height))
    if config.random_flip and uniform(seed, key, "flip")[0] < 0.5:
        image = ImageOps.mirror(image)
    return as_pixels(image)


def fit(image: Image.Image, rules: ReferenceRules, is_single: bool) -> Image.Image:
    """A reference at its final size: scaled, then its centre cropped, or padded with its own reflection."""
    scaled = rules.scaled(image.size)
    image = image if image.size == scaled else image.resize(scaled, Image.Resampling.LANCZOS)
    width, height = rules.final(image.size, is_single)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if not (rules.pads_single and is_single):
        return image.crop((left, top, left + width, top + height))
    left, top = (width - image.width) // 2, (height - image.height) // 2
    around = ((top, height - image.height - top), (left, width - image.width - left), (0, 0))
    mode = "reflect" if min(image.size) > rules.grid else "symmetric"  # a reflection leaves out the edge itself
    return Image.fromarray(np.pad(np.asarray(image), around, mode=mode))


def drops_references(config: DataConfig, seed: int, key: SampleKey) -> bool:
    """Whether --reference_dropout takes the references of this sample away."""
    return happens(config.reference_dropout, seed, key, "reference dropout")


def drops_prompt(config: DataConfig, seed: int, key: SampleKey, encoder: str) -> bool:
    """Whether the prompt of this sample is emptied, for all encoders at once or for this one alone."""
    flag = TEXT_ENCODER_DROPOUTS[encoder]
    rates = {"prompt dropout": config.proportion_empty_prompts, flag: vars(config)[flag]}
    return any(happens(rate, seed, key, purpose) for purpose, rate in rates.items())


def prepare_prompts(captions: Captions, config: DataConfig, seed: int, key: SampleKey) -> dict[str, str]:
    """{text encoder: the caption of this visit, or nothing}.  Raises BadSample where there is none."""
    caption = caption_of(captions, config, seed, key)
    return {encoder: "" if drops_prompt(config, seed, key, encoder) else caption for encoder in TEXT_ENCODER_DROPOUTS}


def collate(samples: list[Sample]) -> RawBatch:
    """Samples of one shape -> a batch."""
    return RawBatch(
        images=tuple(torch.stack(images) for images in zip(*(sample.images for sample in samples), strict=True)),
        prompts={encoder: [sample.prompts[encoder] for sample in samples] for encoder in TEXT_ENCODER_DROPOUTS},
        keys=[sample.key for sample in samples],
        names=tuple(sample.name for sample in samples),
        are_latents=samples[0].are_latents,
        spread=None if samples[0].spread is None else torch.stack([sample.spread for sample in samples]),
        bad=tuple(sample.bad for sample in samples if sample.bad),
        weights=torch.tensor([0.0 if sample.bad else 1.0 for sample in samples]),
        positions=tuple(sample.position for sample in samples if sample.position),
    )


class Batches:
    """The micro batches of a schedule, prepared in --dataloader_num_workers processes; of a stream, knows how far they are."""

    def __init__(self, samples: SampleDataset, micro_batches: Iterable[list[Any]]):
        num_workers = samples.config.dataloader_num_workers
        self.loader = iter(DataLoader(samples, batch_sampler=micro_batches, collate_fn=collate, num_workers=num_workers))
        self.positions: dict[int, Position] = {}
        """{lane: how far the batches given out have brought it}"""

    def __iter__(self) -> Iterator[RawBatch]:
        return self

    def __next__(self) -> RawBatch:
        raw = next(self.loader)
        self.positions |= raw.positions
        return raw
