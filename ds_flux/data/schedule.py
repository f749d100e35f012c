"""Which sample comes when: one global sequence of global batches, a pure function of (seed, number of samples).

The sequence is epoch after epoch of shuffled samples; each waits with those of its own shape until they fill a global
batch.  So a global batch has one shape, and left-over samples open the next epoch instead of vanishing.  A process count,
micro batch or accumulation only decides who takes which slice; a resume is a position.
"""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from ds_flux import UserError
from ds_flux.randomness import epoch_order

SampleKey = tuple[int, int]  # (sample id, visit): visit counts how often the run has seen the sample
GOLDEN = (math.sqrt(5) - 1) / 2


def one_shape(_key: SampleKey) -> Hashable:
    """Where every sample fits beside every other."""
    return None


def shuffled(seed: int, num_samples: int, first: int = 0) -> Iterator[SampleKey]:
    """The samples from `first` on, epoch after epoch."""
    for epoch in count():
        for sample in epoch_order(seed, epoch, num_samples).numpy():  # a tensor would make a tensor of each
            yield first + int(sample), epoch


def turn_of(number: int, weights: Sequence[float]) -> int:
    """Which of several data sets the sample of this number is taken from, in shares that are true in any stretch.

    The fractional parts of multiples of the golden ratio fill [0, 1) as evenly as a sequence can.
    """
    place = number * GOLDEN % 1 * sum(weights)
    return min(bisect(list(accumulate(weights)), place), len(weights) - 1)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """How global batches are dealt out: this rank's part of them."""

    seed: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_size: int
    """data-parallel ranks: those that have samples of their own"""
    dp_rank: int

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step, over all ranks."""
        return self.micro_batch_size * self.num_micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Per optimizer step, over all ranks."""
        return self.gradient_accumulation_steps * self.dp_size


@dataclass(frozen=True, kw_only=True)
class Schedule(Slices):
    """The slices of one rank.

    Raises:
        UserError: a global batch is larger than the data.
    """

    num_samples: int
    sizes: tuple[int, ...] = ()
    """samples of each of several data sets, where they are mixed by weight"""
    weights: tuple[float, ...] = ()
    """of each: how much of what is trained on comes from it; none: each sample comes once in an epoch"""
    shape_of: Callable[[SampleKey], Hashable] = one_shape
    """what must be equal within a batch"""
    micro_batch_size_of: Callable[[Hashable], int] | None = None
    """images of a shape in a micro batch, where it is not the same for all"""

    def __post_init__(self) -> None:
        if self.micro_batch_size_of is None and self.global_batch_size > self.num_samples:
            raise UserError(
                f"one optimizer step takes {self.global_batch_size} images (train_batch_size {self.micro_batch_size} x "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} x {self.dp_size} processes) but the "
                f"data holds {self.num_samples}: lower the batch"
            )

    @property
    def described(self) -> str:
        """What it is a schedule of, in words."""
        return f"{self.num_samples} images"

    def size_of(self, shape: Hashable) -> int:
        """Images of this shape in an optimizer step, over all ranks."""
        per_micro_batch = self.micro_batch_size_of(shape) if self.micro_batch_size_of else self.micro_batch_size
        return per_micro_batch * self.num_micro_batches

    def global_batches(self) -> Iterator[list[SampleKey]]:
        """The endless sequence of global batches, the same on every rank."""
        waiting: dict[Hashable, list[SampleKey]] = defaultdict(list)
        for key in self.visits():
            shape = self.shape_of(key)
            waiting[shape].append(key)
            if len(waiting[shape]) == self.size_of(shape):
                yield waiting.pop(shape)

    def visits(self) -> Iterator[SampleKey]:
        """The endless sequence of samples: epoch after epoch; of a mixture, each data set has epochs of its own."""
        if not self.weights:
            yield from shuffled(self.seed, self.num_samples)
        firsts = [0, *accumulate(self.sizes)]
        parts = [shuffled(self.seed, size, first) for first, size in zip(firsts, self.sizes)]
        for number in count():
            yield next(parts[turn_of(number, self.weights)])

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[list[SampleKey]]:
        """This rank's micro batches of the optimizer steps first_step <= step < last_step."""
        for keys in islice(self.global_batches(), first_step, last_step):
            size = len(keys) // self.num_micro_batches
            for micro_step in range(self.gradient_accumulation_steps):
                start = (micro_step * self.dp_size + self.dp_rank) * size
                yield keys[start : start + size]
