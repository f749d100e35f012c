"""The parts of a run from its settings: schedules, DeepSpeed configs, frozen models in their engines."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers.optimization import get_scheduler

from ds_flux import UserError, models, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config, LoraConfig
from ds_flux.data.buckets import make_buckets
from ds_flux.data.images import TEXT_ENCODER_DROPOUTS, ImageRules, ReferenceRules, SampleDataset
from ds_flux.data.schedule import Schedule, one_shape
from ds_flux.data.shapes import Shapes, caption_lengths, look_at_sizes, window_of
from ds_flux.data.sources import Source, open_source
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero import engines


@dataclass(frozen=True)
class Inputs:
    """What a run is fed with."""

    source: Source
    shapes: Shapes
    samples: SampleDataset


def find_model(config: Config) -> models.Architecture:
    """The model that the flags name.  Raises UserError where a component is missing or does not fit."""
    architecture = models.find_architecture(config.model)
    check_fits_model(config, architecture)
    for component in models.components(architecture.family):
        models.component_folder(config.model, component)
    return architecture


def look_at_data(config: Config, architecture: models.Architecture) -> Inputs:
    """The data, and the shape of every sample.  A collective.

    Raises:
        UserError: there is none, or too much of it cannot be used.
    """
    with runtime.together("looking at the sizes"):
        rules = image_rules(config, architecture)
    source = runtime.on_each_node_first(lambda: open_source(config.data), "opening the data")
    shapes = runtime.on_main(lambda: look_at_samples(config, architecture, source, rules), "looking at the samples")
    sizes_of = partial(shapes.sizes, seed=config.run.seed)
    samples = SampleDataset(source, config.data, config.run.seed, rules, sizes_of)
    return Inputs(source, shapes, samples)


def check_fits_model(config: Config, architecture: models.Architecture) -> None:
    """No setting is for something that the model does not have.  Raises UserError."""
    components = {name for spec in architecture.family.text_encoders for name in (spec.component, spec.tokenizer)}
    for encoder, flag in TEXT_ENCODER_DROPOUTS.items():
        if encoder not in components and config.flat()[flag] > 0:
            raise UserError(f"--{flag} has no effect: this model has no {encoder}")
    for component in ("text_encoder_2", "tokenizer_2"):
        if component not in components and config.flat()[f"{component}_path"] is not None:
            raise UserError(f"--{component}_path has no effect: this model has no {component}")
    if config.flow.guidance_scale is not None and not architecture.has_guidance:
        raise UserError("--guidance_scale has no effect: this model has no guidance embedding; leave it out")


def text_length(config: Config, architecture: models.Architecture) -> int:
    """The most text tokens the transformer sees."""
    return config.model.max_sequence_length or architecture.family.text_length(architecture.config)


def image_rules(config: Config, architecture: models.Architecture) -> ImageRules:
    """How large images and references are for this model."""
    grid = models.pixels_per_token(config.model)
    references = ReferenceRules(config.data.reference_max_pixels, grid, architecture.family.pads_single_reference)
    return ImageRules(make_buckets(config.data, grid), references)


def look_at_samples(config: Config, architecture: models.Architecture, source: Source, rules: ImageRules) -> Shapes:
    """The shapes that batches are made by; and tells of captions that are too long.  Reads headers and captions.

    Raises:
        UserError: too many images whose sizes matter cannot be read.
    """
    family, longest = architecture.family, text_length(config, architecture)
    tokenizers = models.build_tokenizers(family, config.model)
    count = partial(family.count_tokens, tokenizers)
    lengths = caption_lengths(source, config.data, count, every=family.text_window is not None)
    num_captions = sum(map(len, lengths))
    too_long = [length for of_sample in lengths for length in of_sample if length > longest]
    if too_long:
        runtime.log(
            f"{len(too_long)} of {num_captions} captions are longer than {longest} tokens (the longest has {max(too_long)}) "
            "and are cut there; see --max_sequence_length"
        )
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


def make_schedule(config: Config, architecture: models.Architecture, num_samples: int, shapes: Shapes) -> Schedule:
    """The data schedule of this rank."""
    component = architecture.family.large_encoder.component
    shape_of = partial(shapes.of, config=config.data, seed=config.run.seed, encoder=component)
    tokens, grid = config.train.tokens_per_batch, models.pixels_per_token(config.model)
    return Schedule(
        num_samples=num_samples,
        seed=config.run.seed,
        micro_batch_size=config.train.train_batch_size,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
        world_size=runtime.env_world_size(),
        rank=runtime.env_rank(),
        shape_of=one_shape if shapes.are_one and tokens is None else shape_of,
        micro_batch_size_of=None if tokens is None else lambda shape: max(1, tokens // shape.num_tokens(grid)),
    )


def counts_of_shapes(schedule: Schedule) -> Counter[Any]:
    """{shape: samples that have it at their first visit}."""
    return Counter(schedule.shape_of((sample, 0)) for sample in range(schedule.num_samples))


def num_steps(config: Config, schedule: Schedule, counts: Counter[Any]) -> int:
    """Optimizer steps of the run; the last one of an epoch is filled up from the next."""
    per_epoch = sum(count / schedule.size_of(shape) for shape, count in counts.items())
    return config.train.max_train_steps or math.ceil(config.train.num_train_epochs * config.train.repeats * per_epoch - 1e-9)


def name_rare_shapes(schedule: Schedule, counts: Counter[Any], last_step: int) -> None:
    """Tell of shapes whose samples are too few to fill one step of this run: they wait, and are not trained on."""
    num_epochs = last_step / sum(count / schedule.size_of(shape) for shape, count in counts.items())
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


def lr_schedule(config: Config, last_step: int) -> engines.LRSchedule:
    """diffusers' schedule, counted in optimizer steps: it does not know the number of processes."""
    optim = config.optim
    return lambda optimizer: get_scheduler(
        optim.lr_scheduler,
        optimizer,
        num_warmup_steps=optim.lr_warmup_steps,
        num_training_steps=last_step,
        num_cycles=optim.lr_num_cycles,
        power=optim.lr_power,
    )


def transformer_ds_config(config: Config, size: zero_config.ModelSize) -> dict[str, Any]:
    """The final DeepSpeed config of the training engine."""
    bf16 = config.model.mixed_precision == "bf16"
    return zero_config.train_config(
        config.zero.deepspeed_config, config.optim, config.train, bf16, runtime.env_world_size(), size
    )


def frozen_ds_config(config: Config, size: zero_config.ModelSize) -> dict[str, Any]:
    """The final DeepSpeed config of a frozen engine over a model of this size."""
    bf16 = config.model.mixed_precision == "bf16"
    return zero_config.inference_config(config.zero.text_encoder_deepspeed_config, bf16, size, config.model.offload)


def build_conditioner(config: Config, architecture: models.Architecture) -> Conditioner:
    """Frozen encoders: the large one in an engine of its own, the others whole on every rank.  A collective."""
    family = architecture.family
    encoders: dict[str, Any] = {}
    whole: list[Any] = []
    for spec in family.text_encoders:
        ds_config = None
        with runtime.together(f"loading {spec.component}"):
            if spec.is_large and config.model.shard_text_encoder:
                folder = models.component_folder(config.model, spec.component)
                ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.text_encoder_on_meta(spec, folder)))
            encoder = models.build_text_encoder(spec, config.model, ds_config)
        encoders[spec.component] = engines.inference_engine(encoder, ds_config) if ds_config else encoder
        whole += [] if ds_config else [encoder]
    with runtime.together("loading the autoencoder"):
        autoencoder = models.build_autoencoder(family, config.model)
    return Conditioner(
        family=family,
        encoders=encoders,
        tokenizers=models.build_tokenizers(family, config.model),
        autoencoder=autoencoder,
        max_sequence_length=text_length(config, architecture),
        device=runtime.device(),
        posterior_seed=config.run.seed if config.data.vae_encode_mode == "sample" else None,
        offloaded=(*whole, autoencoder) if config.model.offload else (),
    )


def build_frozen_transformer(config: Config, architecture: models.Architecture, lora_config: LoraConfig) -> Any:
    """The transformer for sampling: sharded over the ranks, or whole where there is only one.  A collective."""
    ds_config = None
    with runtime.together("loading the transformer"):
        if runtime.world_size() > 1:
            ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.transformer_on_meta(architecture)))
        transformer = models.build_transformer(architecture, config.model, lora_config, config.run.seed, ds_config)
    if ds_config:
        return engines.inference_engine(transformer, ds_config).module  # its layers gather themselves as they run
    return transformer.to(models.weight_dtype(config.model)).requires_grad_(False).eval()
