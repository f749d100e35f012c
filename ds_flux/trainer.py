"""A training run: set up, one optimizer step, the loop."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_flux import UserError, assemble, caching, checkpoint, lora, models, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.images import RawBatch, SampleDataset, load_batches
from ds_flux.data.schedule import Schedule
from ds_flux.data.shapes import Shapes
from ds_flux.data.skipped import SkippedSamples
from ds_flux.manifest import MANIFEST, Manifest, candidates, check_fits, checkpoints, write_atomically
from ds_flux.metrics import LossSums, MetricsWriter, peak_host_memory_gib
from ds_flux.objective import Objective
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero import engines
from ds_flux.zero.weights import num_elements


@dataclass(frozen=True)
class Run:
    """Everything a step uses."""

    config: Config
    engine: engines.Engine
    conditioner: Conditioner
    objective: Objective
    samples: SampleDataset
    skipped: SkippedSamples
    schedule: Schedule
    manifest: Manifest  # of step 0
    first_step: int
    last_step: int


def setup(config: Config) -> Run:
    """Build everything; nothing but caches is written before this has succeeded.  A collective."""
    with runtime.together("looking for the model"):
        architecture = assemble.find_model(config)
        on_meta = models.transformer_on_meta(architecture)
        ds_config = assemble.transformer_ds_config(config, zero_config.ModelSize.of(on_meta))
        if config.lora.rank is not None:
            lora.matched_layers(on_meta, lora.adapted_layers(config.lora, architecture.family))
    inputs = assemble.look_at_data(config, architecture)
    schedule = assemble.make_schedule(config, architecture, len(inputs.source), inputs.shapes)
    counts = assemble.counts_of_shapes(schedule)
    last_step = assemble.num_steps(config, schedule, counts)
    assemble.name_rare_shapes(schedule, counts, last_step)
    manifest = describe(config, architecture, ds_config, schedule, inputs.shapes)
    resumed = find_resume(config, manifest)

    conditioner, samples = caching.prepare(config, assemble.build_conditioner(config, architecture), inputs.samples)
    partition_by = ds_config if zero_config.stage_of(ds_config) == 3 else None
    with runtime.together("loading the transformer"):
        transformer = models.build_transformer(architecture, config.model, config.lora, config.run.seed, partition_by)
    engine = engines.train_engine(transformer, ds_config, assemble.lr_schedule(config, last_step))
    if resumed:
        checkpoint.load(engine, *resumed)
    return Run(
        config=config,
        engine=engine,
        conditioner=conditioner,
        objective=make_objective(config, architecture),
        samples=samples,
        skipped=SkippedSamples(
            Path(config.run.output_dir) / "skipped.jsonl", len(inputs.source), config.data, goes_on=engine.global_steps > 0
        ),
        schedule=schedule,
        manifest=manifest,
        first_step=engine.global_steps,
        last_step=last_step,
    )


def make_objective(config: Config, architecture: models.Architecture) -> Objective:
    """The objective of a run."""
    return Objective(
        family=architecture.family,
        flow=config.flow,
        seed=config.run.seed,
        mu_of=mu_of(config, architecture),
        guidance_scale=guidance_scale(config, architecture),
        is_flow_map=architecture.is_flow_map,
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


def describe(
    config: Config, architecture: models.Architecture, ds_config: dict[str, Any], schedule: Schedule, shapes: Shapes
) -> Manifest:
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
            lambda: models.fingerprint(architecture, config.model, config.run.seed), "reading the base weights"
        ),
        lora=adapter,
        zero_stage=zero_config.stage_of(ds_config),
        world_size=runtime.world_size(),
        data={
            "seed": config.run.seed,
            "num_samples": schedule.num_samples,
            "global_batch_size": schedule.global_batch_size,
            "shapes": shapes.digest(config.data),
        },
    )


def find_resume(config: Config, manifest: Manifest) -> tuple[Path, Manifest] | None:
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
    folder, found = checkpoint.first_whole(folders)
    for note in runtime.on_main(lambda: check_fits(folder, found, manifest), "looking at the checkpoint"):
        runtime.log(note)
    return folder, found


def train_step(run: Run, batches: Iterator[RawBatch]) -> dict[str, float]:
    """One optimizer step on every rank; its figures, the same on all of them."""
    accumulation = run.schedule.gradient_accumulation_steps
    with runtime.together("reading images"):
        raws = [next(batches) for _ in range(accumulation)]
    share = share_that_counts(run, raws)
    losses = LossSums(runtime.device())
    for micro_step, raw in enumerate(raws):
        batch = run.conditioner(raw)
        loss, sigma = run.objective.loss(run.engine, batch, raw.keys)
        weights = raw.weights.to(loss.device)
        run.engine.backward((loss * weights).mean() / share)
        losses.add(loss, sigma, weights)
        if micro_step < accumulation - 1:
            run.engine.step()  # counts; the optimizer steps at the boundary
    figures = LossSums.figures(runtime.all_reduce_sum(losses.sums))
    if not math.isfinite(figures["loss"]):
        raise UserError(
            f"the loss of step {run.engine.global_steps + 1} is {figures['loss']}: the step was not taken; "
            "resume from the last checkpoint with a lower --learning_rate"
        )
    lr, grad_norm = run.engine.get_lr()[0], engines.optimizer_step(run.engine)
    if not math.isfinite(grad_norm):
        raise UserError(
            f"the gradient norm of step {run.engine.global_steps} is {grad_norm}: the weights are spoilt; "
            "resume from the last checkpoint with a lower --learning_rate"
        )
    return {**figures, "lr": lr, "grad_norm": grad_norm}


def share_that_counts(run: Run, raws: list[RawBatch]) -> float:
    """Of the samples of this step, on all ranks, those that can be used; the others are named.  A collective.

    The loss is the mean over these alone, whichever rank has them.
    """
    bad = [one for raw in raws for one in raw.bad]
    num_bad, num = runtime.all_reduce_sum(torch.tensor([len(bad), sum(len(raw.keys) for raw in raws)])).tolist()
    if num_bad:
        run.skipped.agree(bad)
    if num_bad == num:
        raise UserError(f"none of the {num} samples of step {run.engine.global_steps + 1} can be used; see {run.skipped.path}")
    return 1 - num_bad / num


def train(config: Config) -> int:
    """The whole run; returns the exit status: 0, or 128 + the signal that ended it early."""
    began_s = time.perf_counter()
    runtime.init()
    run = setup(config)
    output_dir = Path(config.run.output_dir)
    runtime.on_main(lambda: record(run, output_dir), "writing the settings")
    announce(run, time.perf_counter() - began_s)
    writer = MetricsWriter(output_dir, run.first_step, run.last_step, active=runtime.rank() == 0)
    with runtime.StopSignal() as stop, closing(writer):
        signal_number = loop(run, output_dir, writer, stop)
    if signal_number == 0:
        runtime.log(f"done: {run.last_step} steps; {output_dir / f'checkpoint-{run.last_step}'}")
    if run.skipped.reasons:
        runtime.log(f"{len(run.skipped.reasons)} samples were left out: {run.skipped.path}")
    return 128 + signal_number if signal_number else 0


def loop(run: Run, output_dir: Path, writer: MetricsWriter, stop: runtime.StopSignal) -> int:
    """Step after step, to the last one or to a signal, whose number it returns."""
    micro_batches = run.schedule.micro_batches(run.first_step, run.last_step)
    batches = load_batches(run.samples, micro_batches)
    for step in range(run.first_step + 1, run.last_step + 1):
        signal_number = stop.agreed()
        if signal_number:
            leave_early(run, output_dir, step - 1, signal_number)
            return signal_number
        figures = train_step(run, batches)
        peaks = torch.tensor([peak_host_memory_gib(), runtime.peak_device_memory_gib()])
        figures |= dict(zip(("peak_host_memory_gib", "peak_device_memory_gib"), runtime.all_reduce_max(peaks).tolist()))
        writer.write(step, figures)
        if step % run.config.checkpoint.checkpointing_steps == 0 or step == run.last_step:
            save_checkpoint(run, output_dir, step)
    return 0


def save_checkpoint(run: Run, output_dir: Path, step: int) -> Path:
    """Write the checkpoint of a finished step.  A collective."""
    manifest = Manifest(**{**vars(run.manifest), "step": step})
    return checkpoint.save(run.engine, output_dir, manifest, run.config.checkpoint.checkpoints_total_limit)


def leave_early(run: Run, output_dir: Path, step: int, signal_number: int) -> None:
    """A signal came: save what is not saved yet and say how to go on.  A collective."""
    folder = output_dir / f"checkpoint-{step}"
    is_saved = runtime.on_main((folder / MANIFEST).exists, "looking for the checkpoint")
    if step > run.first_step and not is_saved:
        save_checkpoint(run, output_dir, step)
    saved = f"{folder} is saved; go on with --resume_from_checkpoint latest" if step else "there was no step to save"
    runtime.log(f"stopped by {signal.Signals(signal_number).name} after step {step}: {saved}")


def record(run: Run, output_dir: Path) -> None:
    """Put the resolved settings into the run's folder."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(output_dir / "config.yaml", run.config.to_yaml())
    write_atomically(output_dir / "ds_config.json", json.dumps(run.engine.config, indent=2))


def announce(run: Run, setup_s: float) -> None:
    """What trains, on what, from where to where."""
    counts = [num_elements(p) for p in run.engine.module.parameters() if p.requires_grad]
    what = "all weights" if run.manifest.lora is None else f"a LoRA of rank {run.manifest.lora['rank']}"
    stage, schedule = run.manifest.zero_stage, run.schedule
    tokens = run.config.train.tokens_per_batch
    per_step = schedule.global_batch_size if tokens is None else f"{tokens * schedule.num_micro_batches} image tokens"
    runtime.log(
        f"training {what} ({sum(counts):,} parameters in {len(counts)} tensors) at ZeRO stage {stage} on "
        f"{schedule.world_size} processes; {schedule.num_samples} images, {per_step} per step; "
        f"steps {run.first_step + 1} to {run.last_step}; set up in {setup_s:.0f} s"
    )
