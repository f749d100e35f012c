"""The loss on samples that are not trained on, at fixed noise levels: a figure that can be compared between runs.

Each sample has a noise of its own that neither the run's seed nor the step changes, so the same weights give the same figure on
any number of ranks, whenever they are asked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_flux import UserError, caching, inputs, models, progress, runtime
from ds_flux.caching import grouped
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.images import Batches, RawBatch, SampleDataset
from ds_flux.data.sources import Source
from ds_flux.objective import Objective
from ds_flux.randomness import sample_generator
from ds_flux.sections import DataConfig

SEED = 0  # of the noise: the same for all runs
NO_CHANCE = dict(
    random_flip=False, center_crop=True, proportion_empty_prompts=0.0, text_encoder_dropout=0.0, text_encoder_2_dropout=0.0,
    reference_dropout=0.0, shuffle_tags=False, vae_encode_mode="mode",
)  # fmt: skip
ALL_OF_IT = dict(streaming=False, dataset_weights=None, precomputation_items=None)
Figures = dict[str, float]


@dataclass(frozen=True)
class Validation:
    """The samples of this rank, and what they are measured by."""

    samples: SampleDataset
    conditioner: Conditioner
    sigmas: tuple[float, ...]
    by_sample: bool
    """each sample at one of the sigmas, instead of at all"""
    batches: list[tuple[list[int], list[float]]]
    """as many on every rank, of one shape in each: samples, and 1 for each or 0 where it only fills up"""
    told: set[str] = field(default_factory=set)
    """what was said of samples that cannot be used"""

    def figures(self, engine: Any, objective: Objective) -> Figures:
        """The mean loss, and that at each sigma.  A collective; leaves the engine as it was."""
        sums = torch.zeros(2, len(self.sigmas), dtype=torch.float64)
        bad: list[str] = []
        loader = Batches(self.samples, [[(sample, 0) for sample in samples] for samples, _ in self.batches])
        engine.eval()
        with torch.no_grad():
            for _, fills in progress.bar(self.batches, desc="validate", unit="step", leave=False):
                with runtime.together("reading the validation samples"):
                    raw = next(loader)
                bad += [str(one) for one in raw.bad]
                self.add(sums, partial(objective.loss_at, engine), raw, raw.weights * torch.tensor(fills))
        engine.train()
        losses, counts = runtime.all_reduce_sum(sums)
        self.tell(bad, counts)
        losses = (losses / counts).tolist()
        by_sigma = {f"validation_loss_by_sigma/{sigma:.4f}": loss for sigma, loss in zip(self.sigmas, losses)}
        return {"validation_loss": sum(losses) / len(losses), **by_sigma}

    def add(self, sums: Tensor, loss_at: Callable[..., Tensor], raw: RawBatch, weights: Tensor) -> None:
        """Count one batch: of each sigma the losses (first row) and the samples (second row)."""
        batch = self.conditioner(raw)
        shape, device = batch.latents.shape[1:], batch.latents.device
        noises = [torch.randn(shape, generator=sample_generator(SEED, *key, "validation")) for key in raw.keys]
        noise = torch.stack(noises).to(device)
        numbers = torch.tensor([sample % len(self.sigmas) for sample, _ in raw.keys])
        for turn in range(1 if self.by_sample else len(self.sigmas)):
            places = numbers if self.by_sample else torch.full_like(numbers, turn)
            sigma = torch.tensor(self.sigmas)[places].to(device)
            loss = loss_at(batch, sigma, noise).double().cpu()
            sums[0].index_add_(0, places, loss * weights)
            sums[1].index_add_(0, places, weights.double())

    def tell(self, bad: list[str], counts: Tensor) -> None:
        """Of samples that could not be used, once.  A collective; raises UserError where a sigma has none."""
        for one in sorted(set(runtime.gathered(bad)) - self.told):
            runtime.log(f"validation goes without a sample: {one}")
            self.told.add(one)
        if not counts.all():
            raise UserError(f"the validation set has no sample for {int((counts == 0).sum())} of {len(counts)} noise levels")


def prepare(
    config: Config, architecture: models.Architecture, conditioner: Conditioner, kept: Source | None
) -> Validation | None:
    """Open and encode the validation set, if there is one.  A collective.

    Args:
        conditioner: with its encoders.
        kept: what was held out of the run's own data.

    Raises:
        UserError: it cannot be read.
    """
    settings = config.validation
    if settings.validation_dataset is None and kept is None:
        return None
    config = replace(config, data=data_of(config.data, settings.validation_dataset))
    with runtime.together("opening the validation set"):
        rules = inputs.image_rules(config, architecture)
    source = kept or runtime.on_each_node_first(lambda: inputs.open_source(config.data), "opening the validation set")
    what = "looking at the validation set"
    shapes = runtime.on_main(lambda: inputs.look_at_samples(config, architecture, source, rules), what)
    inputs.check_shares(config, architecture, shapes)
    samples = SampleDataset(source, config.data, SEED, rules, partial(shapes.sizes, seed=SEED))
    conditioner = replace(conditioner, posterior_seed=None)
    component = architecture.family.large_encoder.component
    shape_of = partial(shapes.of, config=config.data, seed=SEED, encoder=component)
    return Validation(
        samples=caching.with_cached_latents(config, conditioner, samples),
        conditioner=replace(caching.with_cached_text(config, conditioner, source), autoencoder=None),
        sigmas=mid_points(settings.validation_sigmas),
        by_sample=settings.validation_sigma_by_sample,
        batches=dealt(
            grouped(list(range(len(source))), lambda sample: shape_of((sample, 0)), lambda _: 10**9),
            config.train.train_batch_size,
            max(1, runtime.world_size() // config.zero.sequence_parallel),
            runtime.rank() // config.zero.sequence_parallel,
        ),
    )


def data_of(data: DataConfig, dataset: str | None) -> DataConfig:
    """The data settings of the validation set: the run's, with nothing left to chance."""
    place = next((name for name in ("instance_data_dir", "data_files") if vars(data)[name] is not None), "dataset_name")
    return replace(data, **NO_CHANCE, **ALL_OF_IT, **({} if dataset is None else {place: dataset}))


def mid_points(num: int) -> tuple[float, ...]:
    """(i + 0.5) / num."""
    return tuple((number + 0.5) / num for number in range(num))


def dealt(alike: list[list[int]], size: int, dp_size: int, dp_rank: int) -> list[tuple[list[int], list[float]]]:
    """A rank's batches, as many as every other's; what is missing at an end is filled up, and weighs 0.

    Args:
        alike: lists of samples of one shape.
        size: samples in a batch.
    """
    batches = []
    for samples in alike:
        for start in range(0, len(samples), size * dp_size):
            ours = samples[start : start + size * dp_size][dp_rank::dp_size]
            num = min(size, -(-len(samples[start:]) // dp_size))
            batches.append(((ours + samples[:1] * num)[:num], [1.0] * len(ours) + [0.0] * (num - len(ours))))
    return batches
