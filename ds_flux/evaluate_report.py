"""What an evaluation leaves: its figures as JSON, a short page with the grid, and a line beside the run's own figures."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ds_flux import UserError, fid, gallery, runtime
from ds_flux.manifest import write_atomically
from ds_flux.sampling import as_png

Facts = dict[str, Any]
IN_GRID, THUMBNAIL = 64, 256  # images, pixels
NAMES = {"validation_loss": "validation loss", "clip_score": "CLIP score", "fid": "FID"}


@dataclass(frozen=True)
class Results:
    """Of one evaluation; the same on every rank."""

    title: str
    """of what was evaluated"""
    facts: dict[str, Facts | None]
    """what was evaluated, and the settings that each figure follows from; None: it was not asked for"""
    figures: dict[str, float]

    @property
    def main_figures(self) -> dict[str, float]:
        """Those that sum the others up."""
        return {name: value for name, value in self.figures.items() if "/" not in name}


def grid(images: dict[int, Path], num_columns: int) -> bytes:
    """A PNG of the first images of all ranks, made small.

    Args:
        images: {number: file} of this rank.
    """
    with runtime.together("reading the images"):
        mine = [(number, thumbnail(path)) for number, path in images.items() if number < IN_GRID]
    everyone = sorted(runtime.gathered(mine))
    shown = [Image.open(io.BytesIO(png)) for _, png in everyone]
    return as_png(Image.fromarray(gallery.grid_of(shown, num_columns)), {})


def num_columns(num_images: int, num_per_prompt: int) -> int:
    """A row for each prompt, or about a square where each has one image."""
    return num_per_prompt if num_per_prompt > 1 else math.ceil(math.sqrt(min(num_images, IN_GRID)))


def thumbnail(path: Path) -> bytes:
    """A small copy."""
    image = Image.open(path)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return as_png(image, {})


def write(results: Results, picture: bytes | None, folder: Path) -> None:
    """Everything into a folder; the JSON last, so that it is there when all is.  Raises UserError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if picture is not None:
            write_atomically(folder / "grid.png", picture)
        write_atomically(folder / "evaluation.md", page(results))
        content = {"evaluated": results.title, "figures": results.figures, **results.facts}
        write_atomically(folder / "evaluation.json", json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--evaluate_dir {folder} cannot be written: {error.strerror}") from None


def add_to_run(run: Path, step: int, figures: dict[str, float]) -> None:
    """A line for this checkpoint in the run's logs/scores.jsonl."""
    try:
        (run / "logs").mkdir(exist_ok=True)
        with (run / "logs/scores.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
    except OSError as error:
        runtime.log(f"{run / 'logs/scores.jsonl'} cannot be written: {error.strerror}")


def page(results: Results) -> str:
    """In Markdown."""
    facts = results.facts
    rows = [f"| {NAMES[name]} | {value:.5g} | {facts[name]['meaning']} |" for name, value in results.main_figures.items()]
    lines = [f"# {results.title}", "", "| figure | value | |", "|---|---|---|", *rows]
    if facts["images"] is not None:
        lines += ["", described(facts["images"]), "", "![the first images](grid.png)"]
    if facts["fid"] is not None:
        lines += ["", *notes(facts["fid"])]
    return "\n".join(lines) + "\n"


def described(images: Facts) -> str:
    """The images in words."""
    prompts = images["prompts"] if isinstance(images["prompts"], str) else "given"
    guidance = "" if images["guidance_scale"] is None else f", guidance {images['guidance_scale']}"
    num_images, num_prompts = counted(images["num_images"], "image"), counted(images["num_prompts"], "prompt")
    return (
        f"{num_images} of {num_prompts} ({prompts}), {images['size']}, "
        f"{images['num_inference_steps']} steps{guidance}, seed {images['seed']}: `images/`"
    )


def counted(num: int, what: str) -> str:
    """ "1 image", "2 images"."""
    return f"{num} {what}{'' if num == 1 else 's'}"


def notes(facts: Facts) -> list[str]:
    """What one must know to compare an FID."""
    lines = [f"FID is that of torch-fidelity's {facts['variant']} (torchmetrics with antialias=False)."]
    if min(facts["num_images"], facts["num_reference_images"]) < fid.FEW:
        lines.append(
            f"Of fewer than {fid.FEW} images it comes out too high: compare it only with figures of as many "
            f"({facts['num_images']} against {facts['num_reference_images']})."
        )
    return lines
