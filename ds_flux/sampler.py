"""`ds-flux sample`: images by the stock pipelines, from the base model, a consolidated transformer or a LoRA.

One process, or sharded over many: the pipeline is given the transformer inside its engine, and text that is encoded already.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from ds_flux import UserError, assemble, lora, models, runtime
from ds_flux.checks import check_colour
from ds_flux.commands import SampleCommand
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config, DataConfig, LoraConfig
from ds_flux.data.decode import BadSample, open_image
from ds_flux.data.images import ReferenceRules, upright
from ds_flux.families.spec import SampleRequest
from ds_flux.flags import names_of
from ds_flux.randomness import sample_generator


def sample(config: Config, command: SampleCommand) -> list[Path]:
    """Write the images this rank makes; prompts are dealt out over ranks, each image decided by (seed, its number).

    Raises:
        UserError: nothing to show, a size the model cannot have, or a reference that is no image.
    """
    prompts = check(command)
    check_colour(config.data.alpha_background)
    if command.transformer:
        config = replace(config, model=replace(config.model, transformer_path=command.transformer))
    runtime.init(config.run.timeout_s)
    with runtime.together("looking for the model"):
        references = open_references(command, config.data)
        architecture = models.find_architecture(config.model)
        is_distilled = models.is_distilled(architecture, config.model)
        if command.sample_guidance_scale is not None and is_distilled and not architecture.has_guidance:
            raise UserError("--sample_guidance_scale has no effect: this model is distilled to sample without; leave it out")
        height, width = size_of(command, max(config.data.resolutions), models.pixels_per_token(config.model), references)
        lora_config = lora.config_of_file(Path(command.lora), architecture.family) if command.lora else LoraConfig()
    components, conditioner = build(config, architecture, lora_config)
    with runtime.together("preparing the samples"):
        Path(command.sample_dir).mkdir(parents=True, exist_ok=True)
    null_text = conditioner.encode_text({encoder: [""] for encoder in conditioner.encoders})
    written = []
    rounds = -(-len(prompts) // runtime.world_size())  # every rank calls the engines this often
    for turn in range(rounds):
        number = turn * runtime.world_size() + runtime.rank()
        text = {encoder: [prompts[min(number, len(prompts) - 1)]] for encoder in conditioner.encoders}
        request = SampleRequest(
            text=conditioner.encode_text(text),
            null_text=null_text,
            references=references,
            height=height,
            width=width,
            num_inference_steps=command.num_inference_steps,
            guidance_scale=command.sample_guidance_scale,
            is_distilled=is_distilled,
            generator=sample_generator(config.run.seed, number, 0, "noise"),
            show_progress=runtime.rank() == 0,
        )
        try:
            image = architecture.family.sample(components, request)
        except ValueError as error:  # what the pipeline checks: the same on every rank, for all have the same request
            raise UserError(f"the pipeline refuses: {' '.join(str(error).split())}") from None
        with runtime.together("writing an image"):
            if number < len(prompts):
                written.append(Path(command.sample_dir) / f"{number:04d}.png")
                image.save(written[-1])
    runtime.barrier()
    runtime.log(f"{len(prompts)} images in {command.sample_dir}")
    return written


def check(command: SampleCommand) -> list[str]:
    """The prompt of every image.  Raises UserError."""
    prompts = [command.prompt] if isinstance(command.prompt, str) else command.prompt
    if not any(prompts):
        raise UserError("--prompt is missing: what shall the images show?")
    for name in ("num_images_per_prompt", "num_inference_steps"):
        if vars(command)[name] < 1:
            raise UserError(f"--{name} {vars(command)[name]} must be 1 or more")
    return [prompt for prompt in prompts for _ in range(command.num_images_per_prompt)]


def open_references(command: SampleCommand, data: DataConfig) -> list[Image.Image]:
    """The images of --image at their own shape; the pipeline brings them to whole tokens.  Raises UserError."""
    references = []
    for path in names_of(command.image):
        try:
            image = upright(open_image(path, data.max_image_pixels), data)
        except BadSample as reason:
            raise UserError(f"--image {path} cannot be read: {reason}") from None
        scaled = ReferenceRules(data.reference_max_pixels, 1, False).scaled(image.size)
        references.append(image if scaled == image.size else image.resize(scaled, Image.Resampling.LANCZOS))
    return references


def size_of(command: SampleCommand, resolution: int, grid: int, references: list[Image.Image]) -> tuple[int | None, int | None]:
    """Height and width in pixels; None: that of the reference, by the pipeline's own rule.  Raises UserError."""
    default = None if references else resolution
    height, width = command.height or default, command.width or default
    if any(size is not None and (size % grid or size < grid) for size in (height, width)):
        raise UserError(f"--height {height} and --width {width} must be multiples of {grid} for this model")
    return height, width


def build(config: Config, architecture: models.Architecture, lora_config: LoraConfig) -> tuple[dict[str, Any], Conditioner]:
    """What the stock pipelines are made of, and what encodes the prompts.  A collective."""
    transformer = assemble.build_frozen_transformer(config, architecture, lora_config)
    conditioner = assemble.build_conditioner(config, architecture)
    with runtime.together("loading the scheduler"):
        scheduler = models.build_scheduler(architecture.family, config.model)
    components = {"transformer": transformer, "vae": conditioner.autoencoder, "scheduler": scheduler}
    return components, conditioner
