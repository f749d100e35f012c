"""`ds-flux evaluate`: validation loss, CLIP score and FID of weights, on any number of ranks.

What is large is here by turns: the text encoder with the transformer, both sharded, as for `ds-flux sample`; then CLIP, whole
on every rank; Inception (0.1 GB) from the beginning, so that what is wrong with its files shows before images are made.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_flux import (
    UserError,
    __version__,
    assemble,
    caching,
    clip,
    disks,
    evaluate_checks,
    evaluate_report,
    fid,
    gallery,
    inputs,
    judges,
    models,
    runtime,
    sampling,
    subject,
    validation,
)
from ds_flux.commands import EvaluateCommand
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.decode import Size
from ds_flux.data.sources import open_source
from ds_flux.evaluate_report import Facts, Results
from ds_flux.run import make_objective
from ds_flux.sampling import Sampler, Shots
from ds_flux.subject import Subject
from ds_flux.validation import Validation


@dataclass(frozen=True)
class Judges:
    """Of the images, as far as they are asked for."""

    clip: clip.Clip | None
    fid: judges.FidJudge | None
    size: Size
    """(width, height) of every image"""


def evaluate(config: Config, command: EvaluateCommand) -> Results:
    """Measure what the flags ask for, and write it into the folder for the results.

    Raises:
        UserError: a contradiction, something that is missing or cannot be used; before the transformer is loaded.
    """
    evaluate_checks.check(config, command)
    given = None if command.prompts is None else gallery.prompts_of(command.prompts, "--prompts")
    runtime.init(config.run.timeout_s)
    with runtime.together("looking for what is evaluated"):
        # whole sequences: nothing is kept for a backward pass
        one = subject.find(replace(config, zero=replace(config.zero, sequence_parallel=1)), command)
    judging = find_judges(one, command) if evaluate_checks.wants_images(command) else None
    conditioner = assemble.build_conditioner(one.config, one.architecture)
    measured_by = open_validation(one, conditioner)
    sampler = None if judging is None else make_sampler(one, command, judging.size, conditioner, given or captions(measured_by))
    transformer = subject.load(one)
    figures = {} if measured_by is None else measure(one, measured_by, transformer)
    images = {} if sampler is None else sampler.write(transformer.eval(), one.folder / "images")
    for module in (transformer, conditioner.autoencoder, *conditioner.encoders.values()):
        runtime.free(module)
    if sampler is not None:
        figures |= scores(judging, images, sampler.shots.prompts)
    facts = facts_of(one, command, measured_by, judging, sampler)
    return leave(one, Results(one.title, facts, figures), images, command.num_images_per_prompt)


def find_judges(one: Subject, command: EvaluateCommand) -> Judges:
    """Look at CLIP's files and at what FID compares with.  A collective; raises UserError."""
    grid = models.pixels_per_token(one.config.model)
    with runtime.together("looking at the size"):
        height, width = sampling.size_of(command.height, command.width, max(one.config.data.resolutions), grid)
    size = (int(width or 0), int(height or 0))
    looks = None
    if command.clip_model is not None:
        name = command.clip_model
        looks = runtime.on_each_node_first(lambda: clip.find(name), "looking at CLIP")
    return Judges(looks, judges.find_fid_judge(command, one.config.data, size), size)


def open_validation(one: Subject, conditioner: Conditioner) -> Validation | None:
    """The validation set of the run, encoded, if there is one.  A collective; raises UserError."""
    config, kept = one.config, None
    if not evaluate_checks.has_validation(config):
        return None
    disks.check_cache(caching.cache_folder(config))
    if config.validation.validation_fraction:
        source = runtime.on_each_node_first(lambda: open_source(config.data), "opening the data")
        with runtime.together("holding samples out"):
            _, kept = inputs.parts_of(config, source)
    return validation.prepare(config, one.architecture, conditioner, kept)


def captions(measured_by: Validation | None) -> list[str]:
    """Those of the validation set, one of each sample.  A collective; raises UserError where there is none."""
    samples = measured_by.samples  # there is one: the flags were checked

    def look() -> list[str]:
        found = [samples.prompts((number, 0)) for number in range(len(samples.source))]
        return [next(iter(prompts.values())) for prompts, trouble in found if trouble is None]

    texts = runtime.on_main(look, "reading the captions")
    if not texts:
        raise UserError("no caption of the validation set can be used: give --prompts")
    return texts


def make_sampler(one: Subject, command: EvaluateCommand, size: Size, conditioner: Conditioner, prompts: list[str]) -> Sampler:
    """What makes the images.  A collective; raises UserError."""
    with runtime.together("preparing the images"):
        is_distilled = models.is_distilled(one.architecture, one.config.model)
        guidance = command.sample_guidance_scale
        sampling.check_guidance(guidance, "--sample_guidance_scale", is_distilled, one.architecture)
        scheduler = models.build_scheduler(one.architecture.family, one.config.model)
    of_images = [prompt for prompt in prompts for _ in range(command.num_images_per_prompt)]
    return Sampler(
        family=one.architecture.family,
        shots=Shots(of_images, [], size[1], size[0], command.num_inference_steps, guidance),
        text_of=partial(sampling.encode, conditioner),
        autoencoder=conditioner.autoencoder,
        scheduler=scheduler,
        is_distilled=is_distilled,
        seed=one.config.run.seed,
    )


def measure(one: Subject, measured_by: Validation, transformer: Any) -> dict[str, float]:
    """The validation loss, and that at each noise level.  A collective."""
    with runtime.together("preparing the validation"):
        objective = make_objective(one.config, one.architecture)
    return measured_by.figures(transformer, objective)


def scores(judging: Judges, images: dict[int, Path], prompts: list[str]) -> dict[str, float]:
    """Of the images of all ranks.  A collective."""
    found = {}
    if judging.clip is not None:
        found["clip_score"] = judges.clip_score(judging.clip, images, prompts)
    if judging.fid is not None:
        found["fid"] = judging.fid.score(images, judging.size)
    return found


def facts_of(
    one: Subject, command: EvaluateCommand, measured_by: Validation | None, judging: Judges | None, sampler: Sampler | None
) -> dict[str, Facts | None]:
    """What the figures follow from."""
    prompts = [] if sampler is None else sampler.shots.prompts
    return {
        "weights": weights_facts(one, command),
        "validation_loss": None if measured_by is None else validation_facts(one.config, measured_by),
        "images": None if sampler is None else images_facts(command, sampler),
        "clip_score": None if judging is None or judging.clip is None else clip_facts(command, judging.clip, prompts),
        "fid": None if judging is None or judging.fid is None else fid_facts(command, judging.fid, len(prompts)),
        "made_by": {"ds_flux": __version__, "num_processes": runtime.world_size()},
    }


def weights_facts(one: Subject, command: EvaluateCommand) -> Facts:
    """Whose they are."""
    checkpoint, model = one.checkpoint, one.config.model
    return {
        "base": model.pretrained_model_name_or_path,
        "transformer": model.transformer_path,
        "lora": command.lora,
        "checkpoint": None if checkpoint is None else str(checkpoint.folder),
        "step": None if checkpoint is None else checkpoint.manifest.step,
        "kind": None if checkpoint is None else checkpoint.weights,
        "mixed_precision": model.mixed_precision,
    }


def validation_facts(config: Config, measured_by: Validation) -> Facts:
    """What the loss was taken on."""
    settings, num_samples = config.validation, len(measured_by.samples.source)
    what = settings.validation_dataset or f"--validation_fraction {settings.validation_fraction} of the data"
    return {
        "meaning": f"at {settings.validation_sigmas} noise levels, {num_samples} samples: {what}; lower is better",
        "dataset": settings.validation_dataset,
        "fraction": settings.validation_fraction,
        "num_samples": num_samples,
        "sigmas": settings.validation_sigmas,
        "sigma_by_sample": settings.validation_sigma_by_sample,
    }


def images_facts(command: EvaluateCommand, sampler: Sampler) -> Facts:
    """How they were made."""
    shots = sampler.shots
    return {
        "num_images": len(shots.prompts),
        "num_prompts": len(shots.prompts) // command.num_images_per_prompt,
        "prompts": command.prompts or "captions of the validation set",
        "size": judges.in_words((shots.width, shots.height)),
        "num_inference_steps": shots.num_inference_steps,
        "guidance_scale": shots.guidance_scale,
        "seed": sampler.seed,
    }


def clip_facts(command: EvaluateCommand, looks: clip.Clip, prompts: list[str]) -> Facts:
    """What the CLIP score was made by."""
    num_cut = looks.num_cut(prompts)
    if num_cut:
        runtime.log(
            f"{num_cut} of {len(prompts)} prompts are longer than CLIP's {looks.num_tokens} tokens: their ends do not count"
        )
    return {
        "meaning": f"100 x cosine by {command.clip_model}; higher is better",
        "model": command.clip_model,
        "num_prompts_cut": num_cut,
    }


def fid_facts(command: EvaluateCommand, judge: judges.FidJudge, num_images: int) -> Facts:
    """What FID was made by."""
    reference, what = judge.reference, command.fid_dataset or command.fid_statistics
    return {
        "meaning": f"against {reference.num_images} images of {what}; lower is better",
        "variant": fid.VARIANT,
        "weights": command.fid_weights,
        "weights_fingerprint": judge.inception.fingerprint,
        "reference": what,
        "reference_size": reference.size,
        "num_reference_images": reference.num_images,
        "num_images": num_images,
    }


def leave(one: Subject, results: Results, images: dict[int, Path], num_per_prompt: int) -> Results:
    """Write the results, and say them.  A collective."""
    made, picture = results.facts["images"], None
    if made is not None:
        picture = evaluate_report.grid(images, evaluate_report.num_columns(made["num_images"], num_per_prompt))
    runtime.on_main(lambda: evaluate_report.write(results, picture, one.folder), "writing the results")
    if one.checkpoint is not None:
        mark = "_ema" if one.checkpoint.weights == "ema" else ""
        line = {f"{name}{mark}": value for name, value in results.main_figures.items()}
        step = one.checkpoint.manifest.step
        runtime.on_main(lambda: evaluate_report.add_to_run(one.checkpoint.run, step, line), "adding to the run's scores")
    said = ", ".join(f"{name} {value:.5g}" for name, value in results.main_figures.items())
    runtime.log(f"{results.title}: {said}; {one.folder / 'evaluation.md'}")
    return results
