"""What must be equal within a batch: the size of the image, those of its references, and the window its prompt fills."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from PIL import Image

from ds_flux import progress
from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets
from ds_flux.data.captions import drawn, texts_of, with_words_in_front
from ds_flux.data.decode import BadSample, Size, upright_size
from ds_flux.data.images import ImageRules, drops_prompt, drops_references, in_one_line
from ds_flux.data.schedule import SampleKey
from ds_flux.data.skipped import Bad
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
    windows: list[tuple[int, ...]]
    """of each sample: text tokens of each of its captions, padding included; empty: all have the same"""
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

    def sizes(self, key: SampleKey, seed: int) -> tuple[Size, ...]:
        """Of the image and all its references at one visit."""
        size = self.buckets.of(self.images[key[0]] if self.images else (1, 1), key, seed)
        references = self.references[key[0]] if self.references else ()
        return size, *(reference or size for reference in references)

    def of(self, key: SampleKey, config: DataConfig, seed: int, encoder: str) -> Shape:
        """The shape of one visit."""
        size, *references = self.sizes(key, seed)
        if references and drops_references(config, seed, key):
            references = []
        window = 0
        if self.windows:
            of_captions = self.windows[key[0]]
            is_empty = drops_prompt(config, seed, key, encoder)
            window = self.null_window if is_empty else of_captions[drawn(len(of_captions), seed, key)]
        return Shape(size, tuple(references), window)


def look_at_sizes(
    source: Source, config: DataConfig, rules: ImageRules
) -> tuple[list[Size], list[tuple[Size | None, ...]], list[Bad]]:
    """Sizes of all images, and final sizes of all references, from the files' headers; empty where nothing depends on them.

    One that is missing or no image counts as none: its sample is left out when its turn comes.  Returns with them what is
    wrong with such samples.
    """
    wants_images, wants_references = not rules.buckets.is_one, config.cond_image_column is not None
    images: list[Size] = []
    references: list[tuple[Size | None, ...]] = []
    bad: list[Bad] = []
    if wants_images or wants_references:
        for index in progress.bar(range(len(source)), desc="look at the images", unit="sample", disable=len(source) < CHUNK):
            if wants_images:
                images += sizes_of(source.images, source, index, bad) or [(1, 1)]
            if wants_references:
                found = sizes_of(source.references, source, index, bad)
                one, together = len(found) == 1, config.augment_references
                references.append(tuple(None if together else rules.references.final(size, one) for size in found))
    return images, references, bad


def sizes_of(images: Callable[[int], tuple[Image.Image, ...]], source: Source, index: int, bad: list[Bad]) -> list[Size]:
    """Upright sizes of the images that a method of the source opens in a row; none where one cannot be read."""
    try:
        return [upright_size(image) for image in images(index)]
    except (BadSample, OSError, ValueError) as error:
        bad.append(Bad(index, source.name(index), in_one_line(error)))
        return []


def caption_lengths(
    source: Source, config: DataConfig, count_tokens: Callable[[list[str]], list[int]], every: bool
) -> list[tuple[int, ...]]:
    """Tokens of the captions of each sample; unless `every` one is needed, of at most ten thousand, evenly spaced.

    With trigger word and prefix, and tags in the order they are stored in.  Another order may have a token or two more or
    less: where that crosses the end of a window, the batch is padded to its longest prompt.
    """
    indices = range(0, len(source), 1 if every else max(1, len(source) // MAX_LOOKED_AT))
    lengths: list[tuple[int, ...]] = []
    starts = range(0, len(indices), CHUNK)
    for start in progress.bar(starts, desc="count tokens", unit="chunk", disable=len(starts) < 10):
        captions = [captions_of(source, config, index) for index in indices[start : start + CHUNK]]
        counts = iter(count_tokens([text for texts in captions for text in texts]))
        lengths += [tuple(islice(counts, len(texts))) for texts in captions]
    return lengths


def captions_of(source: Source, config: DataConfig, index: int) -> list[str]:
    """The captions of a sample, or an empty one where they cannot be read: the row is named when its turn comes."""
    try:
        return [with_words_in_front(text, config) for text in texts_of(source.caption(index))]
    except (BadSample, OSError, ValueError):
        return [""]


def window_of(num_tokens: int, multiple: int, longest: int) -> int:
    """The window that a prompt fills: its length rounded up, and cut at the longest."""
    return min(math.ceil(num_tokens / multiple) * multiple, longest)
