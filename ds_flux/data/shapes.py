"""What must be equal within a batch: the sizes of a sample's references, and the window its prompt fills."""

import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice

from tqdm import tqdm

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.captions import drawn, texts_of, with_words_in_front
from ds_flux.data.decode import BadSample, Size, upright_size
from ds_flux.data.images import ReferenceRules, drops_prompt, drops_references
from ds_flux.data.schedule import SampleKey
from ds_flux.data.sources import Source

CHUNK, MAX_LOOKED_AT = 1000, 10_000


@dataclass(frozen=True)
class Shapes:
    """The shape of every sample, before dropout takes its prompt or its references away."""

    references: list[tuple[Size, ...]]
    """of each sample; empty: no sample has references"""
    windows: list[tuple[int, ...]]
    """of each sample: text tokens of each of its captions, padding included; empty: all have the same"""
    null_window: int
    """of the empty prompt"""

    @property
    def are_one(self) -> bool:
        """Whether every sample fits beside every other."""
        return not self.references and not self.windows

    def digest(self, config: DataConfig) -> str | None:
        """What the order of samples follows from beside the seed; None where it does not depend on shapes."""
        if self.are_one:
            return None
        rates = [config.reference_dropout, config.proportion_empty_prompts, config.text_encoder_dropout]
        facts = repr((self.references, self.windows, self.null_window, rates))
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def of(self, key: SampleKey, config: DataConfig, seed: int, encoder: str) -> Hashable:
        """The shape of one visit."""
        sizes = self.references[key[0]] if self.references else ()
        if sizes and drops_references(config, seed, key):
            sizes = ()
        window = 0
        if self.windows:
            of_captions = self.windows[key[0]]
            is_empty = drops_prompt(config, seed, key, encoder)
            window = self.null_window if is_empty else of_captions[drawn(len(of_captions), seed, key)]
        return sizes, window


def reference_sizes(source: Source, config: DataConfig, rules: ReferenceRules) -> list[tuple[Size, ...]]:
    """The final size of every reference of every row, from the files' headers.

    Raises:
        UserError: a reference is missing or no image; it names the row.
    """
    sizes = []
    for index in tqdm(range(len(source)), desc="look at the references", disable=len(source) < CHUNK):
        try:
            images = source.references(index)
            found = [upright_size(image) for image in images]
        except (BadSample, OSError, ValueError) as error:
            raise UserError(f"{source.name(index)}: a reference cannot be read: {' '.join(str(error).split())}") from None
        if config.augment_references:
            sizes.append(((config.resolution, config.resolution),) * len(found))
        else:
            sizes.append(tuple(rules.final(size, len(found) == 1) for size in found))
    return sizes


def caption_lengths(
    source: Source, config: DataConfig, count_tokens: Callable[[list[str]], list[int]], every: bool
) -> list[tuple[int, ...]]:
    """Tokens of the captions of each sample; unless `every` one is needed, of at most ten thousand, evenly spaced.

    With trigger word and prefix, and tags in the order they are stored in.  Another order may have a token or two more or
    less: where that crosses the end of a window, the batch is padded to its longest prompt.
    """
    indices = range(0, len(source), 1 if every else max(1, len(source) // MAX_LOOKED_AT))
    lengths: list[tuple[int, ...]] = []
    for start in tqdm(range(0, len(indices), CHUNK), desc="count tokens", disable=len(indices) < 10 * CHUNK):
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
