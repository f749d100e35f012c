"""Images from prompts by the stock pipelines: each rank makes its share, and all call the transformer equally often."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ds_flux import UserError, models, progress, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.data.decode import BadSample, open_image
from ds_flux.data.images import ReferenceRules, upright
from ds_flux.families.spec import FluxFamily, SampleRequest
from ds_flux.randomness import sample_generator
from ds_flux.sections import DataConfig

Features = dict[str, Tensor]  # {transformer argument: features of one prompt, batch of one}


@dataclass(frozen=True)
class Shots:
    """What the images shall be; the same on every rank."""

    prompts: list[str]
    """of each image"""
    references: list[Image.Image]
    height: int | None
    """pixels; None: the pipeline's choice, the size of the reference"""
    width: int | None
    num_inference_steps: int
    guidance_scale: float | None
    """None: the pipeline's default"""


@dataclass(frozen=True)
class Sampler:
    """Makes images with a transformer; each is decided by (seed, its number)."""

    family: FluxFamily
    shots: Shots
    text_of: Callable[[str], Features]
    """of a prompt; a collective where the text encoder is sharded"""
    autoencoder: Any
    scheduler: Any
    is_distilled: bool
    seed: int

    def images(self, transformer: Any) -> Iterator[tuple[int, Image.Image | None]]:
        """(number, image) of this rank in each turn, None where it has nothing left to make.  A collective in every turn.

        Raises:
            UserError: the pipeline refuses the request.
        """
        null_text, num, num_steps = self.text_of(""), len(self.shots.prompts), self.shots.num_inference_steps
        num_turns = -(-num // runtime.world_size())
        with progress.bar(total=num_turns * num_steps, desc="sample", unit="step", leave=False) as bar:
            for turn in range(num_turns):
                number = turn * runtime.world_size() + runtime.rank()
                text = self.text_of(self.shots.prompts[min(number, num - 1)])  # nothing left to make, and still it calls
                with each_step(transformer, bar.update):
                    image = self.image(transformer, text, null_text, number)
                bar.update((turn + 1) * num_steps - bar.n)  # whatever steps there were
                bar.set_postfix_str(f"{min(num, (turn + 1) * runtime.world_size())} of {num} images")
                yield number, image if number < num else None

    def write(self, transformer: Any, folder: Path) -> dict[int, Path]:
        """Make the images and write them, one PNG each; {number: file} of this rank.  A collective in every turn."""
        with runtime.together("making the folder of the images"), writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        written = {}
        for number, image in self.images(transformer):
            with runtime.together("writing an image"), writing(folder):
                if image is not None:
                    written[number] = folder / f"{number:04d}.png"
                    written[number].write_bytes(as_png(image, self.facts(number)))
        return written

    def facts(self, number: int) -> dict[str, str]:
        """What is written into an image's file."""
        return {"prompt": self.shots.prompts[number], "seed": str(self.seed), "number": str(number)}

    def image(self, transformer: Any, text: Features, null_text: Features, number: int) -> Image.Image:
        """One, by the stock pipeline."""
        request = SampleRequest(
            text=text,
            null_text=null_text,
            references=self.shots.references,
            height=self.shots.height,
            width=self.shots.width,
            num_inference_steps=self.shots.num_inference_steps,
            guidance_scale=self.shots.guidance_scale,
            is_distilled=self.is_distilled,
            generator=sample_generator(self.seed, number, 0, "noise"),
        )
        components = {"transformer": transformer, "vae": self.autoencoder, "scheduler": self.scheduler}
        try:
            return self.family.sample(components, request)
        except ValueError as error:  # what the pipeline checks: the same on every rank, for all have the same request
            raise UserError(f"the pipeline refuses: {' '.join(str(error).split())}") from None


@contextmanager
def each_step(transformer: Any, tell: Callable[[], Any]) -> Iterator[None]:
    """Call `tell` with each step of a sampler: where the transformer is asked for another time; guidance asks twice for one."""
    time = None

    def look(_module: Any, _inputs: Any, arguments: dict[str, Any]) -> None:
        nonlocal time
        now = arguments["timestep"].flatten()[0].item()
        if now != time:
            tell()
        time = now

    hook = transformer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def encode(conditioner: Conditioner, prompt: str) -> Features:
    """Features of one prompt.  A collective where the text encoder is sharded."""
    return conditioner.encode_text({encoder: [prompt] for encoder in conditioner.encoders})


def as_png(image: Image.Image, facts: dict[str, str]) -> bytes:
    """A file's content, with text in it."""
    info, file = PngInfo(), io.BytesIO()
    for name, value in facts.items():
        info.add_itxt(name, value)
    image.save(file, "PNG", pnginfo=info)
    return file.getvalue()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses inside is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def size_of(height: int | None, width: int | None, default: int | None, grid: int) -> tuple[int | None, int | None]:
    """--height and --width in pixels, or the default; None: the pipeline's choice.  Raises UserError."""
    height, width = height or default, width or default
    if any(size is not None and (size % grid or size < grid) for size in (height, width)):
        raise UserError(f"--height {height} and --width {width} must be multiples of {grid} for this model")
    return height, width


def open_references(paths: list[str], flag: str, data: DataConfig) -> list[Image.Image]:
    """Reference images at their own shape; the pipeline brings them to whole tokens.  Raises UserError."""
    references = []
    for path in paths:
        try:
            image = upright(open_image(path, data.max_image_pixels), data)
        except BadSample as reason:
            raise UserError(f"{flag} {path} cannot be read: {reason}") from None
        scaled = ReferenceRules(data.reference_max_pixels, 1, False).scaled(image.size)
        references.append(image if scaled == image.size else image.resize(scaled, Image.Resampling.LANCZOS))
    return references


def check_guidance(scale: float | None, flag: str, is_distilled: bool, architecture: models.Architecture) -> None:
    """Raise UserError for a guidance that the model does not take."""
    if scale is not None and is_distilled and not architecture.has_guidance:
        raise UserError(f"{flag} has no effect: this model is distilled to sample without; leave it out")
