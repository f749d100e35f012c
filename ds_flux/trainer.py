"""A training run: one optimizer step, and the loop."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_flux import UserError, checkpoint, rolling, runtime
from ds_flux.config import Config
from ds_flux.data.images import Batches, RawBatch
from ds_flux.data.stream import StreamSchedule
from ds_flux.failures import Heart, explained
from ds_flux.flags import names_of, steps_of
from ds_flux.flops import num_tokens
from ds_flux.interval import Interval, Step
from ds_flux.manifest import MANIFEST, Manifest, write_atomically
from ds_flux.metrics import LossSums, MetricsWriter, peak_host_memory_gib
from ds_flux.mlperf import MlperfLog
from ds_flux.planned import Planned, advice
from ds_flux.profiling import Profiler
from ds_flux.requests import Request, Requests, command_to_go_on
from ds_flux.run import Run, setup
from ds_flux.speeds import peak_tflops
from ds_flux.zero import engines, waits
from ds_flux.zero.monitors import open_monitors
from ds_flux.zero.weights import num_elements

NUM_NAMED = 5  # samples in a message


def train_step(run: Run, batches: Iterator[RawBatch]) -> Step:
    """One optimizer step on every rank; what it was, the same on all of them.

    It is not taken where the loss or the gradient norm is not finite.
    """
    accumulation, clock = run.schedule.gradient_accumulation_steps, run.clock
    with clock("data_wait"), runtime.together("reading images"):
        raws = [next(batches) for _ in range(accumulation)]
    share = share_that_counts(run, raws)
    losses, of_samples = LossSums(runtime.device()), []
    for micro_step, raw in enumerate(raws):
        batch = run.conditioner(raw)
        with clock("forward"):
            loss, sigma = run.objective.loss(run.engine, batch, raw.keys)
        weights = raw.weights.to(loss.device)
        with clock("backward"):
            run.engine.backward((loss * weights).mean() / share)
        losses.add(loss, sigma, weights, num_tokens(batch), run.flops.of(batch))
        of_samples.append(loss.detach())
        if micro_step < accumulation - 1:
            run.engine.step()  # counts; the optimizer steps at the boundary
    # each of the ranks that share a sequence has counted its samples
    sums, lr = runtime.all_reduce_sum(losses.sums) / run.objective.shard.size, run.engine.get_lr()[0]
    with clock("optimizer"):
        grad_norm = engines.optimizer_step(run.engine)
    step = Step(sums, lr, grad_norm, is_taken=math.isfinite(sums[0]) and math.isfinite(grad_norm))
    if not step.is_taken:
        name_what_is_not_finite(run, raws, of_samples, step.loss, grad_norm)
    elif run.ema:
        with clock("optimizer"):
            run.ema.update()
    return step


def name_what_is_not_finite(run: Run, raws: list[RawBatch], losses: list[Tensor], loss: float, grad_norm: float) -> None:
    """Tell of a step that was not taken, and of the samples that it was for.  A collective."""
    names = [name for raw in raws for name in raw.names]
    here = [name for name, one in zip(names, torch.cat(losses).tolist(), strict=True) if not math.isfinite(one)]
    everywhere = sorted(set(runtime.gathered(here)))
    of_samples = f"not finite for {', '.join(everywhere[:NUM_NAMED])}" if everywhere else "finite for each sample"
    more = f" and {len(everywhere) - NUM_NAMED} more" if len(everywhere) > NUM_NAMED else ""
    runtime.log(
        f"step {run.engine.global_steps} was not taken: the loss is {loss:.4g} ({of_samples}{more}), "
        f"the gradient norm {grad_norm:.4g}"
    )


def share_that_counts(run: Run, raws: list[RawBatch]) -> float:
    """Of the samples of this step, on all ranks, those that can be used; the others are named.  A collective.

    The loss is the mean over these alone, whichever rank has them.
    """
    bad = [one for raw in raws for one in raw.bad]
    num_bad, num = runtime.all_reduce_sum(torch.tensor([len(bad), sum(len(raw.keys) for raw in raws)])).tolist()
    if num_bad:
        run.skipped.agree(bad, (run.engine.global_steps + 1) * run.schedule.global_batch_size)
    if num_bad == num:
        raise UserError(f"none of the {num} samples of step {run.engine.global_steps + 1} can be used; see {run.skipped.path}")
    return 1 - num_bad / num


def train(config: Config) -> None:
    """The whole run, or as much of it as it is asked for.

    Raises:
        UserError: what all ranks know and the user can mend.
        LoneError: what this rank alone can say.
    """
    runtime.init(config.run.timeout_s)
    heart = Heart()
    try:
        run_to_the_end(config)
    except UserError:
        raise
    except Exception as error:
        raise explained(error, heart, config.run.timeout_s, partial(advice, config)) from error
    finally:
        heart.stop()


def run_to_the_end(config: Config) -> None:
    """Set up, train, and say what was left out.  A collective."""
    began_s, planned = time.perf_counter(), Planned.start(config)
    run = setup(config)
    setup_s = time.perf_counter() - began_s
    output_dir = Path(config.run.output_dir)
    runtime.on_main(lambda: record(run, output_dir, planned.facts()), "writing the settings")
    mlperf = MlperfLog(config.validation.mlperf_log if runtime.rank() == 0 else None, run.schedule.global_batch_size)
    with runtime.together("opening --report_to"):
        monitor = open_monitors(names_of(config.log.report_to), output_dir / "logs")
    writer = MetricsWriter(output_dir, run.first_step, run.last_step, runtime.rank() == 0, mlperf, monitor)
    saver = make_saver(run)
    with Requests(output_dir) as requests, closing(writer), waits.clocked(run.clock):
        announce(run, setup_s)
        planned.say()
        mlperf.start(seed=config.run.seed, opt_base_learning_rate=config.optim.learning_rate)
        try:
            mlperf.stop(is_reached=loop(run, saver, writer, requests))
        except UserError:  # known to all ranks: what is being written can still be completed
            saver.finish()
            raise
    planned.compare(*runtime.all_reduce_max(torch.tensor([peak_host_memory_gib(), runtime.peak_device_memory_gib()])).tolist())
    if run.skipped.reasons:
        runtime.log(f"{len(run.skipped.reasons)} samples were left out: {run.skipped.path}")


def make_saver(run: Run) -> checkpoint.Saver:
    """What writes the run's checkpoints."""
    config = run.config.checkpoint
    return checkpoint.Saver(
        Path(run.config.run.output_dir), run.disk, config.checkpoints_total_limit, config.save_in_background
    )


def make_profiler(run: Run) -> Profiler:
    """What looks into the steps of --profile that this run has."""
    asked = steps_of("--profile", run.config.log.profile)
    steps = (max(asked[0], run.first_step + 1), min(asked[1], run.last_step)) if asked else None
    if steps and steps[0] > steps[1]:
        runtime.log(f"--profile {run.config.log.profile}: these steps are not among those to come")
        steps = None
    folder = Path(run.config.run.output_dir) / "profile"
    return Profiler(steps, folder, run.engine.module, not run.config.model.compile)


def loop(run: Run, saver: checkpoint.Saver, writer: MetricsWriter, requests: Requests) -> bool:
    """Step after step, to the last one or until it is asked to stop; returns whether --target_validation_loss was reached.

    While steps are not taken there are no checkpoints, and at the end none is deleted: the weights may be spoilt since before.
    """
    steps, num_skipped = (run.first_step, run.last_step), 0
    if run.validation and run.first_step == 0:
        writer.write(0, measure(run))
    interval, profiler = Interval(run.clock, peak_tflops_of(run.config)), make_profiler(run)
    is_asked = lambda: requests.number != 0  # noqa: E731
    for window in rolling.windows(run.config, run.schedule, run.conditioner, run.samples, steps, is_asked):
        run = replace(run, conditioner=window.conditioner, samples=window.samples)
        batches = Batches(run.samples, window.micro_batches)
        for step in window.steps:
            if request := requests.agreed():
                answer(run, saver, step - 1, batches, request)
                if request.stops:
                    if interval.steps:
                        writer.write(step - 1, line(run, interval))
                    return False
            saver.poll()
            with profiler.looking(step):
                done = train_step(run, batches)
            interval.add(done)
            writer.advance(done.loss, done.sums[1].item())
            num_skipped = 0 if done.is_taken else num_skipped + 1
            figures = {}
            if is_time_to_validate(run, step):
                figures = validate(run, step, writer)
                interval.set_validation_apart()
            is_reached, is_spoilt = reaches_target(run, figures), num_skipped == run.config.train.max_skipped_steps
            if step % run.config.log.logging_steps == 0 or step == run.last_step or is_reached or is_spoilt:
                figures = line(run, interval) | figures
            if figures:
                writer.write(step, figures)
            is_due = step % run.config.checkpoint.checkpointing_steps == 0 and not num_skipped
            if (is_due or step == run.last_step or is_reached) and not run.config.checkpoint.save_nothing:
                with run.clock("saving"):
                    saver.save(run.engine, manifest_of(run, step, batches), ema_files(run), deletes=not num_skipped)
            if is_spoilt:
                raise UserError(
                    f"{num_skipped} steps in a row were not finite (--max_skipped_steps): the weights are those of step "
                    f"{step - num_skipped}; resume with a lower --learning_rate, or without those samples"
                )
            if is_reached:
                saver.close()
                runtime.log(f"--target_validation_loss is reached after step {step}: {figures['validation_loss']:.5f}")
                return True
    saver.close()
    if num_skipped:
        runtime.log(f"the last {num_skipped} steps were not taken: the weights are those of step {run.last_step - num_skipped}")
    saved = "" if run.config.checkpoint.save_nothing else f"; {saver.output_dir / f'checkpoint-{run.last_step}'}"
    runtime.log(f"done: {run.last_step} steps{saved}")
    return False


def line(run: Run, interval: Interval) -> dict[str, Any]:
    """The figures since the last line.  A collective."""
    return {**interval.figures(), "skipped_samples": len(run.skipped.reasons)}


def peak_tflops_of(config: Config) -> float | None:
    """Of a device at the run's precision, if it is given or known."""
    known = peak_tflops(runtime.device_name()) if config.model.mixed_precision == "bf16" else None
    return config.log.peak_tflops or known


def is_time_to_validate(run: Run, step: int) -> bool:
    """After this step, if there is anything to validate; always after the last."""
    every = run.config.validation.validation_steps or run.config.checkpoint.checkpointing_steps
    return (run.validation or run.gallery) is not None and (step % every == 0 or step == run.last_step)


def validate(run: Run, step: int, writer: MetricsWriter) -> dict[str, float]:
    """Measure and show the weights and their average; returns the figures.  A collective."""
    with run.clock("validation"):
        figures = measure(run) if run.validation else {}
        if run.gallery and not (step == run.last_step and run.config.run.skip_final_inference):
            writer.show(step, "samples", run.gallery.show(run.engine, f"step-{step}"))
            if run.ema:
                with run.ema.swapped():
                    writer.show(step, "samples_ema", run.gallery.show(run.engine, f"step-{step}-ema"))
    return figures


def measure(run: Run) -> dict[str, float]:
    """The validation loss of the weights, and of their average.  A collective."""
    figures = run.validation.figures(run.engine, run.objective)
    if run.ema:
        with run.ema.swapped():
            of_average = run.validation.figures(run.engine, run.objective)
        figures |= {name.replace("validation_loss", "validation_loss_ema"): value for name, value in of_average.items()}
    return figures


def reaches_target(run: Run, figures: dict[str, float]) -> bool:
    """Whether the validation loss is low enough to end; the same on every rank, as it is a sum over all."""
    target = run.config.validation.target_validation_loss
    return target is not None and "validation_loss" in figures and figures["validation_loss"] <= target


def manifest_of(run: Run, step: int, batches: Batches) -> Manifest:
    """Of a checkpoint behind a finished step.  A collective."""
    stream = None
    if isinstance(run.schedule, StreamSchedule):
        stream = run.schedule.record(runtime.gathered(list(batches.positions.items())))
    return replace(run.manifest, step=step, stream=stream)


def ema_files(run: Run) -> checkpoint.Files:
    """Of this rank."""
    return run.ema.contents(run.disk.first == runtime.rank()) if run.ema else {}


def answer(run: Run, saver: checkpoint.Saver, step: int, batches: Batches, request: Request) -> None:
    """Save what is not saved yet, and say how to go on where the run ends.  A collective."""
    saver.finish()
    folder = saver.output_dir / f"checkpoint-{step}"
    is_saved = runtime.on_main((folder / MANIFEST).exists, "looking for the checkpoint")
    if step > run.first_step and not is_saved and not run.config.checkpoint.save_nothing:
        saver.save(run.engine, manifest_of(run, step, batches), ema_files(run))
    if not request.stops:
        runtime.log(f"asked by {request.reason} after step {step}")
        return
    saver.close()
    saved = f"{folder} is saved" if step else "there was no step to save"
    runtime.log(f"stopped by {request.reason} after step {step}: {saved}; go on with: {command_to_go_on()}")


def record(run: Run, output_dir: Path, plan: str) -> None:
    """Put the resolved settings and the planned memory into the run's folder.  Raises UserError where that cannot be."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(output_dir / "config.yaml", run.config.to_yaml())
        write_atomically(output_dir / "ds_config.json", json.dumps(run.engine.config, indent=2))
        write_atomically(output_dir / "plan.json", plan)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be written: {error.strerror}") from None


def announce(run: Run, setup_s: float) -> None:
    """What trains, on what, from where to where."""
    counts = [num_elements(p) for p in run.engine.module.parameters() if p.requires_grad]
    what = "all weights" if run.manifest.lora is None else f"a LoRA of rank {run.manifest.lora['rank']}"
    stage, schedule = run.manifest.zero_stage, run.schedule
    tokens = run.config.train.tokens_per_batch
    per_step = schedule.global_batch_size if tokens is None else f"{tokens * schedule.num_micro_batches} image tokens"
    sharing = run.objective.shard.size
    runtime.log(
        f"training {what} ({sum(counts):,} parameters in {len(counts)} tensors) at ZeRO stage {stage} on "
        f"{runtime.world_size()} processes{f', each sequence on {sharing} of them' if sharing > 1 else ''}; "
        f"{schedule.described}, {per_step} per step; "
        f"steps {run.first_step + 1} to {run.last_step}; set up in {setup_s:.0f} s"
    )
