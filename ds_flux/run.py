"""A run before its first step: everything that a step uses, built in order."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_flux import (
    UserError,
    assemble,
    caching,
    checkpoint,
    disks,
    fingerprints,
    gallery,
    inputs,
    lora,
    models,
    runtime,
    validation,
    wholeness,
)
from ds_flux.clock import Clock
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config, OptimConfig
from ds_flux.data.images import SampleDataset
from ds_flux.data.schedule import Schedule
from ds_flux.data.shapes import Shapes
from ds_flux.data.skipped import SkippedSamples
from ds_flux.data.stream import StreamSchedule
from ds_flux.flops import ModelFlops
from ds_flux.gallery import Gallery
from ds_flux.latents import WHOLE, TokenShard
from ds_flux.manifest import Manifest, candidates, check_fits, checkpoints
from ds_flux.objective import Objective
from ds_flux.validation import Validation
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero import engines
from ds_flux.zero.ema import Ema
from ds_flux.zero.files import has_ema
from ds_flux.zero.machine import check_machine
from ds_flux.zero.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class Run:
    """Everything a step uses."""

    config: Config
    engine: engines.Engine
    conditioner: Conditioner
    objective: Objective
    samples: SampleDataset
    skipped: SkippedSamples
    schedule: Schedule | StreamSchedule
    manifest: Manifest  # of step 0
    disk: disks.Disk  # of checkpoints
    first_step: int
    last_step: int
    ema: Ema | None
    validation: Validation | None
    gallery: Gallery | None
    clock: Clock
    flops: ModelFlops


def setup(config: Config) -> Run:
    """Build everything; nothing but caches is written before this has succeeded.  A collective."""
    with runtime.together("looking for the model"):
        architecture = assemble.find_model(config)
        on_meta = models.transformer_on_meta(architecture)
        ds_config = assemble.transformer_ds_config(config, zero_config.ModelSize.of(on_meta))
        check_machine(ds_config)
        if config.lora.rank is not None:
            lora.matched_layers(on_meta, lora.adapted_layers(config.lora, architecture.family))
    data = inputs.look_at_data(config, architecture)
    schedule = inputs.make_schedule(config, architecture, data.source, data.shapes)
    last_step = inputs.num_steps(config, schedule)
    manifest = describe(config, architecture, ds_config, data_facts(config, schedule, data.shapes))
    disk = disks.of_checkpoints(Path(config.run.output_dir), ds_config, config.zero.deepspeed_config)
    if config.data.cache_text or config.data.cache_latents:
        disks.check_cache(caching.cache_folder(config))
    resumed = find_resume(config, manifest, disk)
    if isinstance(schedule, StreamSchedule) and resumed:
        schedule = schedule.behind(resumed[1].stream)

    group = share_sequences(config.zero.sequence_parallel)
    conditioner = replace(assemble.build_conditioner(config, architecture), group=group)
    measured_by = validation.prepare(config, architecture, conditioner, data.held_out)
    shown_in = gallery.prepare(config, architecture, conditioner, group)
    conditioner, samples = caching.prepare(config, conditioner, data.samples)
    clock = Clock()
    partition_by = ds_config if zero_config.stage_of(ds_config) == 3 else None
    with runtime.together("loading the transformer"):
        transformer = models.build_transformer(architecture, config.model, config.lora, config.run.seed, partition_by, group)
    engine = engines.train_engine(transformer, ds_config, assemble.lr_schedule(config, last_step))
    if resumed:
        checkpoint.load(engine, *resumed, disk)
    return Run(
        config=config,
        engine=engine,
        conditioner=replace(conditioner, clock=clock),
        objective=make_objective(config, architecture, group.shard if group else WHOLE),
        samples=samples,
        skipped=SkippedSamples(
            Path(config.run.output_dir) / "skipped.jsonl", manifest.data["num_samples"], config.data, engine.global_steps > 0
        ),
        schedule=schedule,
        manifest=manifest,
        disk=disk,
        first_step=engine.global_steps,
        last_step=last_step,
        ema=keep_ema(config.optim, engine, resumed),
        validation=measured_by,
        gallery=shown_in,
        clock=clock,
        flops=ModelFlops.of_model(architecture, config.model, config.lora),
    )


def share_sequences(size: int) -> SequenceGroup | None:
    """The group that shares this rank's sequences, if it is more than one rank.  A collective; raises UserError."""
    if size > runtime.world_size():
        raise UserError(f"--sequence_parallel {size} needs as many processes, and there is {runtime.world_size()}")
    return SequenceGroup.of_size(size) if size > 1 else None


def keep_ema(optim: OptimConfig, engine: engines.Engine, resumed: tuple[Path, Manifest] | None) -> Ema | None:
    """The average of the weights of an engine that is ready, if one is asked for: the checkpoint's, or a new one."""
    is_saved = resumed is not None and has_ema(resumed[1])
    if optim.ema_decay is None:
        if is_saved:
            runtime.log(f"{resumed[0].name} has EMA weights, which end here: there is no --ema_decay")
        return None
    ema = Ema.start(engine, optim.ema_decay, optim.ema_device)
    if is_saved:
        with runtime.together("reading the EMA weights"):
            ema.load(*resumed)
    elif resumed:
        runtime.log(f"{resumed[0].name} has no EMA weights: they start as its weights")
    return ema


def make_objective(config: Config, architecture: models.Architecture, shard: TokenShard = WHOLE) -> Objective:
    """The objective of a run."""
    return Objective(
        family=architecture.family,
        flow=config.flow,
        seed=config.run.seed,
        mu_of=mu_of(config, architecture),
        guidance_scale=guidance_scale(config, architecture),
        is_flow_map=architecture.is_flow_map,
        shard=shard,
    )


def mu_of(config: Config, architecture: models.Architecture) -> Callable[[int], float]:
    """--timestep_shift as a log-SNR shift for images of so many tokens."""
    shift = config.flow.timestep_shift
    if shift == "resolution":
        scheduler = models.build_scheduler(architecture.family, config.model).config
        if scheduler.use_dynamic_shifting:
            return lambda num_tokens: architecture.family.sampling_mu(num_tokens, 50)
        return lambda _num_tokens: math.log(scheduler.shift)
    return lambda _num_tokens: 0.0 if shift == "none" else math.log(float(shift))


def guidance_scale(config: Config, architecture: models.Architecture) -> float | None:
    """The distilled guidance to train at, for a model that takes one."""
    if not architecture.has_guidance:
        return None
    return 3.5 if config.flow.guidance_scale is None else config.flow.guidance_scale


def data_facts(config: Config, schedule: Schedule | StreamSchedule, shapes: Shapes) -> dict[str, Any]:
    """What the order of samples follows from."""
    is_stream = isinstance(schedule, StreamSchedule)
    return {
        "seed": config.run.seed,
        "num_samples": None if is_stream else schedule.num_samples,
        "global_batch_size": schedule.global_batch_size,
        "shapes": shapes.digest(config.data),
        "dataset_weights": config.data.dataset_weights,
        "num_shards": [part.num_shards for part in schedule.stream.parts] if is_stream else None,
        "shuffle_buffer": config.data.shuffle_buffer if is_stream else None,
    }


def describe(config: Config, architecture: models.Architecture, ds_config: dict[str, Any], data: dict[str, Any]) -> Manifest:
    """The manifest of this run at step 0."""
    adapter = None
    if config.lora.rank is not None:
        layers = lora.adapted_layers(config.lora, architecture.family)
        adapter = {"rank": config.lora.rank, "alpha": config.lora.alpha, "layers": layers}
    return Manifest(
        step=0,
        family=architecture.family.name,
        transformer_class=architecture.family.transformer_class.__name__,
        transformer_config=architecture.config,
        base_fingerprint=runtime.on_main(
            lambda: fingerprints.base_fingerprint(architecture, config.model, config.run.seed), "reading the base weights"
        ),
        lora=adapter,
        zero_stage=zero_config.stage_of(ds_config),
        world_size=runtime.world_size(),
        data=data,
    )


def find_resume(config: Config, manifest: Manifest, disk: disks.Disk) -> tuple[Path, Manifest] | None:
    """The checked checkpoint to go on from and what it is, if one is asked for and there.  A collective."""
    wanted, output_dir = config.checkpoint.resume_from_checkpoint, Path(config.run.output_dir)

    def look() -> list[Path]:
        if wanted is None and checkpoints(output_dir):
            raise UserError(
                f"{output_dir} holds checkpoints of an earlier run: go on with --resume_from_checkpoint latest, or give "
                "another --output_dir"
            )
        return candidates(output_dir, wanted) if wanted else []

    folders = runtime.on_main(look, "looking for the checkpoint")
    if not folders:
        if wanted:
            runtime.log(f"no checkpoint in {output_dir} yet: starting anew")
        return None
    folder, found = wholeness.first_whole(folders, disk)
    for note in runtime.on_main(lambda: check_fits(folder, found, manifest), "looking at the checkpoint"):
        runtime.log(note)
    return folder, found
