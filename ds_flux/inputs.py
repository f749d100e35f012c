"""What a run is fed with: its data, what is known of them beforehand, and which samples come when."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from ds_flux import UserError, models, runtime
from ds_flux.config import Config
from ds_flux.data.buckets import make_buckets
from ds_flux.data.images import ImageRules, ReferenceRules, SampleDataset
from ds_flux.data.schedule import Schedule, one_shape
from ds_flux.data.shapes import Shapes, caption_lengths, captions_of, look_at_sizes, window_of
from ds_flux.data.sources import Source, held_out, open_source
from ds_flux.data.stream import Stream, StreamSchedule, open_stream

NUM_LOOKED_AT = 256  # of the rows of a stream


@dataclass(frozen=True)
class Inputs:
    """What was found."""

    source: Source | Stream
    shapes: Shapes
    samples: SampleDataset
    held_out: Source | None
    """what is kept for validation"""


def look_at_data(config: Config, architecture: models.Architecture) -> Inputs:
    """The data, and the shape of every sample.  A collective.

    Raises:
        UserError: there is none, or too much of it cannot be used.
    """
    with runtime.together("looking at the sizes"):
        rules = image_rules(config, architecture)
    source = runtime.on_each_node_first(lambda: open_data(config, architecture, rules), "opening the data")
    with runtime.together("holding samples out"):
        source, kept = parts_of(config, source)
    shapes = runtime.on_main(lambda: look(config, architecture, source, rules), "looking at the samples")
    check_shares(config, architecture, shapes)
    samples = SampleDataset(source, config.data, config.run.seed, rules, partial(shapes.sizes, seed=config.run.seed))
    return Inputs(source, shapes, samples, kept)


def open_data(config: Config, architecture: models.Architecture, rules: ImageRules) -> Source | Stream:
    """What the data flags name.  Raises UserError."""
    weights = tuple(config.data.dataset_weights or ())
    if config.data.streaming:
        check_can_stream(config, architecture, rules)
        return open_stream(config.data, config.run.seed, weights)
    return open_source(config.data)


def parts_of(config: Config, source: Source | Stream) -> tuple[Source | Stream, Source | None]:
    """What is trained on, and what --validation_fraction keeps from it.  Raises UserError."""
    share = config.validation.validation_fraction
    return held_out(source, share) if share else (source, None)


def check_can_stream(config: Config, architecture: models.Architecture, rules: ImageRules) -> None:
    """A stream is not looked at beforehand: what stands beside each other in a batch must fit without.  Raises UserError."""
    differs = {
        "--use_aspect_ratio_buckets or several --resolution": not rules.buckets.is_one,
        "--cond_image_column": config.data.cond_image_column is not None,
        "prompts of this model": architecture.family.text_window is not None,
    }
    for what, does in differs.items():
        if does and config.train.train_batch_size > 1:
            raise UserError(f"--streaming: {what} make samples of different shapes: they need --train_batch_size 1")


def image_rules(config: Config, architecture: models.Architecture) -> ImageRules:
    """How large images and references are for this model."""
    grid = models.pixels_per_token(config.model)
    references = ReferenceRules(config.data.reference_max_pixels, grid, architecture.family.pads_single_reference)
    return ImageRules(make_buckets(config.data, grid), references)


def look(config: Config, architecture: models.Architecture, source: Source | Stream, rules: ImageRules) -> Shapes:
    """What is known beforehand of the samples, as far as batches depend on it."""
    if not isinstance(source, Stream):
        return look_at_samples(config, architecture, source, rules)
    count = partial(architecture.family.count_tokens, models.build_tokenizers(architecture.family, config.model))
    lengths = [tuple(count(captions_of(row, config.data, 0))) for row in islice(source.once(), NUM_LOOKED_AT)]
    name_long_captions(lengths, models.text_length(config.model, architecture))
    return Shapes(rules.buckets, [], [], [], 0)


def look_at_samples(config: Config, architecture: models.Architecture, source: Source, rules: ImageRules) -> Shapes:
    """The shapes that batches are made by; and tells of captions that are too long.  Reads headers and captions.

    Raises:
        UserError: too many images whose sizes matter cannot be read.
    """
    family, longest = architecture.family, models.text_length(config.model, architecture)
    count = partial(family.count_tokens, models.build_tokenizers(family, config.model))
    lengths = caption_lengths(source, config.data, count, every=family.text_window is not None)
    name_long_captions(lengths, longest)
    images, references, bad = look_at_sizes(source, config.data, rules)
    if bad and (config.data.on_bad_sample == "error" or len(bad) > config.data.max_bad_fraction * len(source)):
        raise UserError(
            f"{len(bad)} of {len(source)} samples cannot be used (the first: {bad[0]}), more than --on_bad_sample "
            f"{config.data.on_bad_sample} with --max_bad_fraction {config.data.max_bad_fraction} allows"
        )
    windows, null_window = [], 0
    if family.text_window is not None:
        windows = [tuple(window_of(length, family.text_window, longest) for length in of_sample) for of_sample in lengths]
        null_window = window_of(count([""])[0], family.text_window, longest)
    return Shapes(rules.buckets, images, references, windows, null_window)


def check_shares(config: Config, architecture: models.Architecture, shapes: Shapes) -> None:
    """Every segment of every sequence can be cut into --sequence_parallel equal shares.  Raises UserError."""
    size, grid = config.zero.sequence_parallel, models.pixels_per_token(config.model)
    sizes = {("image", one) for sizes in shapes.buckets.by_resolution.values() for one in sizes}
    sizes |= {("reference", one) for of_sample in shapes.references for one in of_sample if one}
    windows = {window for of_sample in shapes.windows for window in of_sample} | {shapes.null_window}
    lengths = windows - {0} or {models.text_length(config.model, architecture)}
    segments = {f"{what} of {width}x{height}": width * height // grid**2 for what, (width, height) in sorted(sizes)}
    segments |= {f"prompt (--max_sequence_length) of {length} tokens": length for length in sorted(lengths)}
    for what, num_tokens in segments.items():
        if num_tokens % size:
            raise UserError(
                f"--sequence_parallel {size} does not divide the {num_tokens} tokens of the {what}: change it, or that size"
            )


def name_long_captions(lengths: list[tuple[int, ...]], longest: int) -> None:
    """Tell of captions that are cut."""
    num_captions = sum(map(len, lengths))
    too_long = [length for of_sample in lengths for length in of_sample if length > longest]
    if too_long:
        runtime.log(
            f"{len(too_long)} of {num_captions} captions are longer than {longest} tokens (the longest has {max(too_long)}) "
            "and are cut there; see --max_sequence_length"
        )


def make_schedule(
    config: Config, architecture: models.Architecture, source: Source | Stream, shapes: Shapes
) -> Schedule | StreamSchedule:
    """The data schedule of this rank."""
    plan = {
        "seed": config.run.seed,
        "micro_batch_size": config.train.train_batch_size,
        "gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "dp_size": max(1, runtime.env_world_size() // config.zero.sequence_parallel),
        "dp_rank": runtime.env_rank() // config.zero.sequence_parallel,
    }
    if isinstance(source, Stream):
        return StreamSchedule(**plan, stream=source)
    weights = tuple(config.data.dataset_weights or ())
    component = architecture.family.large_encoder.component
    shape_of = partial(shapes.of, config=config.data, seed=config.run.seed, encoder=component)
    tokens, grid = config.train.tokens_per_batch, models.pixels_per_token(config.model)
    return Schedule(
        **plan,
        num_samples=len(source),
        sizes=tuple(source.sizes) if weights else (),
        weights=weights,
        shape_of=one_shape if shapes.are_one and tokens is None else shape_of,
        micro_batch_size_of=None if tokens is None else lambda shape: max(1, tokens // shape.num_tokens(grid)),
    )


def num_steps(config: Config, schedule: Schedule | StreamSchedule) -> int:
    """Optimizer steps of the run; tells of shapes that are too rare for it."""
    if isinstance(schedule, StreamSchedule):
        return int(config.train.max_train_steps or 0)
    counts = counts_of_shapes(schedule)
    last_step = config.train.max_train_steps or math.ceil(
        config.train.num_train_epochs * config.train.repeats * steps_per_epoch(schedule, counts) - 1e-9
    )
    name_rare_shapes(schedule, counts, last_step)
    return last_step


def counts_of_shapes(schedule: Schedule) -> Counter[Any]:
    """{shape: samples that have it in the first epoch}."""
    return Counter(map(schedule.shape_of, islice(schedule.visits(), schedule.num_samples)))


def steps_per_epoch(schedule: Schedule, counts: Counter[Any]) -> float:
    """The last one of an epoch is filled up from the next."""
    return sum(count / schedule.size_of(shape) for shape, count in counts.items())


def name_rare_shapes(schedule: Schedule, counts: Counter[Any], last_step: int) -> None:
    """Tell of shapes whose samples are too few to fill one step of this run: they wait, and are not trained on."""
    num_epochs = last_step / steps_per_epoch(schedule, counts)
    rare = {shape: count for shape, count in counts.items() if count * math.ceil(num_epochs) < schedule.size_of(shape)}
    for shape, count in rare.items():
        runtime.log(
            f"{count} of {schedule.num_samples} samples have the shape {described(shape)}: a step takes "
            f"{schedule.size_of(shape)}, so this run never trains on them"
        )


def described(shape: Any) -> str:
    """In words."""
    references = "".join(f", reference {width}x{height}" for width, height in shape.references)
    window = f", {shape.window} text tokens" if shape.window else ""
    return f"{shape.image[0]}x{shape.image[1]}{references}{window}"
