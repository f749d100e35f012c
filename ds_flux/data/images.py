"""A row of a source -> pixels and prompts, all of it decided by the sample's identity; micro batches of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.schedule import SampleKey
from ds_flux.data.sources import Source
from ds_flux.randomness import sample_generator

TEXT_ENCODER_DROPOUTS = {"text_encoder": "text_encoder_dropout", "text_encoder_2": "text_encoder_2_dropout"}


@dataclass(frozen=True)
class RawBatch:
    """A micro batch of one rank before anything is encoded."""

    pixels: Tensor  # (B, 3, height, width) in [-1, 1]
    prompts: dict[str, list[str]]  # {text encoder: B prompts}
    keys: list[SampleKey]


@dataclass(frozen=True)
class Sample:
    """One row, prepared."""

    pixels: Tensor  # (3, height, width) in [-1, 1]
    prompts: dict[str, str]
    key: SampleKey


class SampleDataset(Dataset):
    """{sample key: prepared sample}."""

    def __init__(self, source: Source, config: DataConfig, seed: int):
        self.source, self.config, self.seed = source, config, seed

    def __getitem__(self, key: SampleKey) -> Sample | UserError:
        """A bad row comes back as a value: an exception would lose its kind on the way out of a worker process."""
        try:
            image, caption = self.source[key[0]]
            return Sample(
                prepare_pixels(image, self.config, self.seed, key), prepare_prompts(caption, self.config, self.seed, key), key
            )
        except (OSError, ValueError, SyntaxError, UserError) as error:
            return UserError(f"{self.source.name(key[0])} cannot be read: {' '.join(str(error).split())}")


def uniform(seed: int, key: SampleKey, purpose: str, num: int = 1) -> list[float]:
    """Numbers in [0, 1) that the sample's identity decides."""
    return torch.rand(num, generator=sample_generator(seed, *key, purpose)).tolist()


def prepare_pixels(image: Image.Image, config: DataConfig, seed: int, key: SampleKey) -> Tensor:
    """(3, resolution, resolution) in [-1, 1]: turned as the camera says, shorter side scaled, cropped, perhaps flipped."""
    size = config.resolution
    image = ImageOps.exif_transpose(image).convert("RGB")
    scale = size / min(image.size)
    image = image.resize(
        (max(size, round(image.width * scale)), max(size, round(image.height * scale))), Image.Resampling.LANCZOS
    )
    across, down = (0.5, 0.5) if config.center_crop else uniform(seed, key, "crop", 2)
    left, top = round(across * (image.width - size)), round(down * (image.height - size))
    image = image.crop((left, top, left + size, top + size))
    if config.random_flip and uniform(seed, key, "flip")[0] < 0.5:
        image = ImageOps.mirror(image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def prepare_prompts(caption: str, config: DataConfig, seed: int, key: SampleKey) -> dict[str, str]:
    """{text encoder: caption}, emptied for all encoders at once or for one alone by the dropout flags."""
    dropped = uniform(seed, key, "prompt dropout")[0] < config.proportion_empty_prompts
    return {
        encoder: "" if dropped or uniform(seed, key, flag)[0] < vars(config)[flag] else caption
        for encoder, flag in TEXT_ENCODER_DROPOUTS.items()
    }


def collate(samples: list[Sample | UserError]) -> RawBatch | UserError:
    """Samples of one size -> a batch; the first bad one instead, if there is one."""
    bad = next((sample for sample in samples if isinstance(sample, UserError)), None)
    if bad is not None:
        return bad
    return RawBatch(
        pixels=torch.stack([sample.pixels for sample in samples]),
        prompts={encoder: [sample.prompts[encoder] for sample in samples] for encoder in TEXT_ENCODER_DROPOUTS},
        keys=[sample.key for sample in samples],
    )


def load_batches(
    source: Source, config: DataConfig, seed: int, micro_batches: Iterable[list[SampleKey]]
) -> Iterator[RawBatch | UserError]:
    """The micro batches of a schedule, prepared in --dataloader_num_workers processes."""
    return iter(
        DataLoader(
            SampleDataset(source, config, seed),
            batch_sampler=micro_batches,
            collate_fn=collate,
            num_workers=config.dataloader_num_workers,
        )
    )
