"""`ds-flux sample`: images from the base model, a consolidated transformer or a LoRA, in one process or sharded over many."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ds_flux import UserError, assemble, lora, models, runtime
from ds_flux.conditioning import LiveConditioner, decode_latents
from ds_flux.config import Config, LoraConfig, SampleCommand
from ds_flux.randomness import sample_generator
from ds_flux.sampling import sample_latents, sampling_sigmas


def sample(config: Config, command: SampleCommand) -> list[Path]:
    """Write the images this rank makes; prompts are dealt out over ranks, each image decided by (seed, its number).

    Raises:
        UserError: nothing to show, or a size the model cannot have.
    """
    height, width = command.height or config.data.resolution, command.width or config.data.resolution
    prompts = [command.prompt] if isinstance(command.prompt, str) else command.prompt
    if not any(prompts):
        raise UserError("--prompt is missing: what shall the images show?")
    if height % 16 or width % 16:
        raise UserError(f"--height {height} and --width {width} must be multiples of 16")
    for name in ("num_images_per_prompt", "num_inference_steps"):
        if vars(command)[name] < 1:
            raise UserError(f"--{name} {vars(command)[name]} must be 1 or more")
    prompts = [prompt for prompt in prompts for _ in range(command.num_images_per_prompt)]
    if command.transformer:
        config = replace(config, model=replace(config.model, transformer_path=command.transformer))
    runtime.init()
    with runtime.together("looking for the model"):
        architecture = models.find_architecture(config.model)
        lora_config = lora.config_of_file(Path(command.lora)) if command.lora else LoraConfig()
    transformer = assemble.build_frozen_transformer(config, architecture, lora_config)
    conditioner = assemble.build_conditioner(config, architecture)
    with runtime.together("preparing the samples"):
        scheduler = models.build_scheduler(config.model)
        Path(command.sample_dir).mkdir(parents=True, exist_ok=True)
    written = []
    rounds = -(-len(prompts) // runtime.world_size())  # every rank calls the engines this often
    for turn in range(rounds):
        number = turn * runtime.world_size() + runtime.rank()
        prompt = prompts[min(number, len(prompts) - 1)]
        noise = make_noise(architecture, conditioner, height, width, config.run.seed, number)
        pixels = make_image(transformer, conditioner, scheduler, prompt, noise, command, architecture.has_guidance)
        if number < len(prompts):
            written.append(Path(command.sample_dir) / f"{number:04d}.png")
            save_png(pixels, written[-1])
    runtime.barrier()
    runtime.log(f"{len(prompts)} images in {command.sample_dir}")
    return written


def make_noise(
    architecture: models.Architecture, conditioner: LiveConditioner, height: int, width: int, seed: int, number: int
) -> Tensor:
    """(1, C, H, W) of image `number`, the same whichever rank makes it."""
    side = models.pixels_per_token(conditioner.autoencoder)
    shape = (1, architecture.config["in_channels"], height // side, width // side)
    return torch.randn(shape, generator=sample_generator(seed, number, 0, "noise")).to(conditioner.device)


def make_image(
    transformer: Any,
    conditioner: LiveConditioner,
    scheduler: Any,
    prompt: str,
    noise: Tensor,
    command: SampleCommand,
    has_guidance: bool,
) -> Tensor:
    """Pixels (3, height, width) in [0, 1]; a collective where an engine is sharded."""
    family = conditioner.family
    text = conditioner.encode_text({encoder: [prompt] for encoder in conditioner.encoders})
    sigmas = sampling_sigmas(scheduler, family, noise.shape[-2] * noise.shape[-1], command.num_inference_steps)
    guidance = torch.full((1,), command.sample_guidance_scale, device=noise.device) if has_guidance else None
    progress = runtime.rank() == 0
    latents = sample_latents(transformer, family, text, noise, sigmas, guidance, progress)
    with torch.no_grad():
        return decode_latents(conditioner.autoencoder, family, latents)[0]


def save_png(pixels: Tensor, path: Path) -> None:
    """Pixels (3, height, width) in [0, 1] as an 8-bit PNG."""
    Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).cpu().numpy()).save(path)
