"""What must be equal within a batch: the sizes of a sample's references, and the window its prompt fills."""

import hashlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tqdm import tqdm

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.images import ReferenceRules, Size, drops_prompt, drops_references, upright_size
from ds_flux.data.schedule import SampleKey
from ds_flux.data.sources import Source

CHUNK, MAX_LOOKED_AT = 1000, 10_000


@dataclass(frozen=True)
class Shapes:
    """The shape of every sample, before dropout takes its prompt or its references away."""

    references: list[tuple[Size, ...]]
    """of each sample; empty: no sample has references"""
    windows: list[int]
    """text tokens of each sample, padding included; empty: all have the same"""
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
            window = self.null_window if drops_prompt(config, seed, key, encoder) else self.windows[key[0]]
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
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{source.name(index)}: a reference cannot be read: {' '.join(str(error).split())}") from None
        if config.augment_references:
            sizes.append(((config.resolution, config.resolution),) * len(found))
        else:
            sizes.append(tuple(rules.final(size, len(found) == 1) for size in found))
    return sizes


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
