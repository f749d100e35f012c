"""Images of a model while it trains: from fixed prompts and fixed noise, so that events can be laid side by side."""

import io
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ds_flux import UserError, models, runtime, sampling
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.flags import names_of
from ds_flux.sampling import Features, Sampler, Shots
from ds_flux.zero.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class Gallery:
    """Where the images go, and what makes them."""

    sampler: Sampler
    folder: Path
    per_prompt: int
    group: SequenceGroup | None

    def show(self, engine: Any, title: str) -> np.ndarray:
        """Make the images of an event and write them; returns their grid (height, width, 3).  A collective."""
        engine.eval()
        with self.group.apart(engine.module) if self.group else nullcontext():
            made = [(number, image) for number, image in self.sampler.images(engine.module) if image]
        engine.train()
        mine = [(number, sampling.as_png(image, self.sampler.facts(number))) for number, image in made]
        everyone = sorted(runtime.gathered(mine))
        runtime.on_main(lambda: self.write(everyone, self.folder / title), "writing the images")
        return grid_of([Image.open(io.BytesIO(png)) for _, png in everyone], self.per_prompt)

    def write(self, images: list[tuple[int, bytes]], folder: Path) -> None:
        """One file each; a full disk does not end the run."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number, png in images:
                (folder / f"{number:04d}.png").write_bytes(png)
        except OSError as error:
            runtime.log(f"{folder} cannot be written: {error.strerror}; training goes on")


def grid_of(images: list[Image.Image], num_columns: int) -> np.ndarray:
    """Row after row, (height, width, 3)."""
    width, height = (max(image.size[axis] for image in images) for axis in (0, 1))
    num_rows = -(-len(images) // num_columns)
    grid = Image.new("RGB", (width * num_columns, height * num_rows))
    for place, image in enumerate(images):
        grid.paste(image, (place % num_columns * width, place // num_columns * height))
    return np.asarray(grid)


def prepare(
    config: Config, architecture: models.Architecture, conditioner: Conditioner, group: SequenceGroup | None
) -> Gallery | None:
    """Read and encode what --validation_prompt asks for.  A collective.

    Args:
        conditioner: with its encoders.

    Raises:
        UserError: there is no prompt, or a reference is no image.
    """
    settings = config.validation
    if settings.validation_prompt is None:
        return None
    with runtime.together("looking at the validation prompts"):
        shots = shots_of(config, architecture)
        is_distilled = models.is_distilled(architecture, config.model)
        guidance = settings.validation_guidance_scale
        sampling.check_guidance(guidance, "--validation_guidance_scale", is_distilled, architecture)
        scheduler = models.build_scheduler(architecture.family, config.model)
    features: dict[str, Features] = {}
    for prompt in ("", *dict.fromkeys(shots.prompts)):
        features[prompt] = sampling.encode(conditioner, prompt)
    autoencoder = conditioner.autoencoder
    if config.data.cache_latents:  # which lets the other one go
        with runtime.together("loading the autoencoder"):
            autoencoder = models.build_autoencoder(architecture.family, config.model)
    return Gallery(
        sampler=Sampler(
            family=architecture.family,
            shots=shots,
            text_of=features.__getitem__,
            autoencoder=autoencoder,
            scheduler=scheduler,
            is_distilled=is_distilled,
            seed=config.run.seed,
        ),
        folder=Path(config.run.output_dir) / "samples",
        per_prompt=settings.num_validation_images,
        group=group,
    )


def shots_of(config: Config, architecture: models.Architecture) -> Shots:
    """The images of every event.  Raises UserError."""
    settings, resolution = config.validation, max(config.data.resolutions)
    references = sampling.open_references(names_of(settings.validation_image), "--validation_image", config.data)
    size = None if references else resolution
    return Shots(
        prompts=[
            prompt
            for prompt in prompts_of(settings.validation_prompt, "--validation_prompt")
            for _ in range(settings.num_validation_images)
        ],
        references=references,
        height=size,
        width=size,
        num_inference_steps=settings.num_validation_inference_steps,
        guidance_scale=settings.validation_guidance_scale,
    )


def prompts_of(given: str | list[str] | None, flag: str) -> list[str]:
    """One, several, or the lines of a .txt file.  Raises UserError for an empty one."""
    where = flag
    if isinstance(given, str) and given.endswith(".txt"):
        where = f"{flag} {given}"
        if not Path(given).is_file():
            raise UserError(f"{where}: no such file")
        given = Path(given).read_text(encoding="utf-8").splitlines()
    prompts = [given] if isinstance(given, str) else list(given or [])
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt.strip()]
    if empty or not prompts:
        raise UserError(f"{where}: prompt {(empty or [1])[0]} is empty")
    return prompts
