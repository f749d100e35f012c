"""`ds-flux sample`: images from the base model, a consolidated transformer or a LoRA, in one process or sharded over many."""

from functools import partial
from pathlib import Path

from ds_flux import UserError, assemble, lora, models, runtime, sampling
from ds_flux.checks import check_colour
from ds_flux.commands import SampleCommand
from ds_flux.config import Config, LoraConfig
from ds_flux.flags import names_of
from ds_flux.sampling import Sampler, Shots


def sample(config: Config, command: SampleCommand) -> list[Path]:
    """Write the images this rank makes; prompts are dealt out over ranks, each image decided by (seed, its number).

    Raises:
        UserError: nothing to show, a size the model cannot have, or a reference that is no image.
    """
    prompts = check(command)
    check_colour(config.data.alpha_background)
    if command.transformer:
        config = assemble.with_transformer(config, command.transformer)
    runtime.init(config.run.timeout_s)
    with runtime.together("looking for the model"):
        references = sampling.open_references(names_of(command.image), "--image", config.data)
        architecture = models.find_architecture(config.model)
        is_distilled = models.is_distilled(architecture, config.model)
        sampling.check_guidance(command.sample_guidance_scale, "--sample_guidance_scale", is_distilled, architecture)
        default = None if references else max(config.data.resolutions)
        height, width = sampling.size_of(command.height, command.width, default, models.pixels_per_token(config.model))
        lora_config = lora.config_of_file(Path(command.lora), architecture.family) if command.lora else LoraConfig()
    transformer = assemble.build_frozen_transformer(config, architecture, lora_config)
    conditioner = assemble.build_conditioner(config, architecture)
    with runtime.together("preparing the samples"):
        scheduler = models.build_scheduler(architecture.family, config.model)
    shots = Shots(prompts, references, height, width, command.num_inference_steps, command.sample_guidance_scale)
    sampler = Sampler(
        family=architecture.family,
        shots=shots,
        text_of=partial(sampling.encode, conditioner),
        autoencoder=conditioner.autoencoder,
        scheduler=scheduler,
        is_distilled=is_distilled,
        seed=config.run.seed,
    )
    written = sampler.write(transformer, Path(command.sample_dir))
    runtime.barrier()
    runtime.log(f"{len(prompts)} images in {command.sample_dir}")
    return list(written.values())


def check(command: SampleCommand) -> list[str]:
    """The prompt of every image.  Raises UserError."""
    prompts = [command.prompt] if isinstance(command.prompt, str) else command.prompt
    if not any(prompts):
        raise UserError("--prompt is missing: what shall the images show?")
    for name in ("num_images_per_prompt", "num_inference_steps"):
        if vars(command)[name] < 1:
            raise UserError(f"--{name} {vars(command)[name]} must be 1 or more")
    return [prompt for prompt in prompts for _ in range(command.num_images_per_prompt)]
