"""Which sample comes when: one global sequence of global batches, a pure function of (seed, number of samples).

The sequence is epoch after epoch of shuffled samples, cut into global batches without regard for epoch borders, so left-over
samples open the next epoch instead of vanishing.  A process count, micro batch or accumulation only decides who takes which
slice; a resume is a position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ds_flux import UserError
from ds_flux.randomness import epoch_order

SampleKey = tuple[int, int]  # (sample id, visit): visit counts how often the run has seen the sample


@dataclass(frozen=True)
class Schedule:
    """The slices of one rank.

    Raises:
        UserError: a global batch is larger than the data.
    """

    num_samples: int
    seed: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    world_size: int
    rank: int

    def __post_init__(self) -> None:
        if self.global_batch_size > self.num_samples:
            raise UserError(
                f"one optimizer step takes {self.global_batch_size} images (train_batch_size {self.micro_batch_size} x "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} x {self.world_size} processes) but the "
                f"data holds {self.num_samples}: lower the batch"
            )

    @property
    def global_batch_size(self) -> int:
        """Images per optimizer step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[list[SampleKey]]:
        """This rank's micro batches of the optimizer steps first_step <= step < last_step."""
        order, order_epoch = None, -1
        for micro_step in range(first_step * self.gradient_accumulation_steps, last_step * self.gradient_accumulation_steps):
            start = (micro_step * self.world_size + self.rank) * self.micro_batch_size
            keys = []
            for position in range(start, start + self.micro_batch_size):
                epoch, place = divmod(position, self.num_samples)
                if epoch != order_epoch:
                    order, order_epoch = epoch_order(self.seed, epoch, self.num_samples), epoch
                keys.append((int(order[place]), epoch))
            yield keys
