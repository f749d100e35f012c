"""What must be equal within a batch: the size of the image, those of its references, and the window its prompt fills."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets, Size
from ds_flux.data.images import ImageRules, drops_prompt, drops_references, upright_size
from ds_flux.data.schedule import SampleKey
from ds_flux.data.sources import Source

CHUNK, MAX_LOOKED_AT = 1000, 10_000


class Shape(NamedTuple):
    """Of one sample at one visit."""

    image: Size
    references: tuple[Size, ...]
    window: int
    """text tokens with padding; 0: all prompts have the same"""

    def num_tokens(self, grid: int) -> int:
        """Of the images, one for each square of `grid` pixels."""
        return sum(width * height // grid**2 for width, height in (self.image, *self.references))


@dataclass(frozen=True)
class Shapes:
    """The shape of every sample, before dropout takes its prompt or its references away."""

    buckets: Buckets
    images: list[Size]
    """size of each sample's image as stored; empty: all come to one size"""
    references: list[tuple[Size | None, ...]]
    """final size of each sample's references, None: the size its image comes to; empty: no sample has references"""
    windows: list[int]
    """text tokens of each sample, padding included; empty: all have the same"""
    null_window: int
    """of the empty prompt"""

    @property
    def are_one(self) -> bool:
        """Whether every sample fits beside every other."""
        return not self.images and not self.references and not self.windows

    def digest(self, config: DataConfig) -> str | None:
        """What the order of samples follows from beside the seed; None where it does not depend on shapes."""
        if self.are_one:
            return None
        rates = [config.reference_dropout, config.proportion_empty_prompts, config.text_encoder_dropout]
        facts = repr((self.buckets, self.images, self.references, self.windows, self.null_window, rates))
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def of(self, key: SampleKey, config: DataConfig, seed: int, encoder: str) -> Shape:
        """The shape of one visit."""
        size = self.buckets.of(self.images[key[0]] if self.images else (1, 1), key, seed)
        references = self.references[key[0]] if self.references else ()
        if references and drops_references(config, seed, key):
            references = ()
        window = 0
        if self.windows:
            window = self.null_window if drops_prompt(config, seed, key, encoder) else self.windows[key[0]]
        return Shape(size, tuple(reference or size for reference in references), window)


def look_at_sizes(source: Source, config: DataConfig, rules: ImageRules) -> tuple[list[Size], list[tuple[Size | None, ...]]]:
    """Sizes of all images, and final sizes of all references, from the files' headers; empty where nothing depends on them.

    Raises:
        UserError: one is missing or no image; it names the row.
    """
    wants_images, wants_references = not rules.buckets.is_one, config.cond_image_column is not None
    images, references = [], []
    if wants_images or wants_references:
        for index in tqdm(range(len(source)), desc="look at the images", disable=len(source) < CHUNK):
            if wants_images:
                images += sizes_of(source.images, source, index)
            if wants_references:
                found = sizes_of(source.references, source, index)
                one = len(found) == 1
                together = config.augment_references
                references.append(tuple(None if together else rules.references.final(size, one) for size in found))
    return images, references


def sizes_of(images: Callable[[int], tuple[Image.Image, ...]], source: Source, index: int) -> list[Size]:
    """Upright sizes of the images that a method of the source opens in a row."""
    try:
        return [upright_size(image) for image in images(index)]
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{source.name(index)} cannot be read: {' '.join(str(error).split())}") from None


def caption_lengths(source: Source, count_tokens: Callable[[list[str]], list[int]], every: bool) -> list[int]:
    """Tokens of the captions; unless `every` one is needed, of at most ten thousand, evenly spaced."""
    indices = range(0, len(source), 1 if every else max(1, len(source) // MAX_LOOKED_AT))
    lengths: list[int] = []
    for start in tqdm(range(0, len(indices), CHUNK), desc="count tokens", disable=len(indices) < 10 * CHUNK):
        lengths += count_tokens([caption_of(source, index) for index in indices[start : start + CHUNK]])
    return lengths


def caption_of(source: Source, index: int) -> str:
    """A caption, or none where it cannot be read: the row is named when its turn comes."""
    try:
        return source.caption(index)
    except (OSError, ValueError, UserError):
        return ""


def window_of(num_tokens: int, multiple: int, longest: int) -> int:
    """The window that a prompt fills: its length rounded up, and cut at the longest."""
    return min(math.ceil(num_tokens / multiple) * multiple, longest)
