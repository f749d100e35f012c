"""`ds-flux demo`: a small model of any family and scikit-learn's handwritten digits, and the score of what a run made.

The model folder has the layout and the classes of the released one; only the sizes differ.  Text encoders and transformer
are random, the tokenizers are built from the captions' words, the autoencoder is trained here.  Nothing is downloaded.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from jsonargparse import ArgumentParser
from PIL import Image

from ds_flux import UserError, report
from ds_flux.families import stock, tiny, tiny_autoencoder
from ds_flux.flags import check_known, parse
from ds_flux.manifest import find, write_atomically
from ds_flux.models import initial_weight

DIGITS = "zero one two three four five six seven eight nine".split()
WORDS = ["a", "handwritten", *DIGITS]
RESOLUTION = 32
NUM_SCORED = 100


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """demo"""

    family: str = next(iter(tiny.TINY))
    """which model: one of those in families/tiny.py"""
    output_dir: str = "demo"
    """where to write model/, digits/ and run.yaml, or where they are"""
    score: str | None = None
    """instead of writing: score this consolidated transformer folder with the stock pipeline, and the samples of the run"""
    began: int | None = None
    """with --score: when the whole demo began, in seconds since 1970, to report how long it took"""
    autoencoder_steps: int = 250
    """training steps of the autoencoder"""
    seed: int = 0
    """of the random weights and of the scored images"""


def main(argv: list[str]) -> int:
    """Write the demo, or score a run of it."""
    parser = ArgumentParser(prog="ds-flux demo", exit_on_error=False)
    parser.add_class_arguments(DemoConfig)
    config = DemoConfig(**parse(parser, argv).as_dict())
    check_known([config.family], tiny.TINY, "--family")
    folder = Path(config.output_dir)
    if config.score:
        print_outcome(outcome(config.family, folder, Path(config.score), config.seed, config.began))
        return 0
    images, labels = digits()
    write_model(config.family, folder / "model", images, config.autoencoder_steps, config.seed)
    write_dataset(folder / "digits", images, labels)
    (folder / "run.yaml").write_text(recipe(folder, config.family))
    print(f"wrote {folder / 'model'}, {folder / 'digits'} ({len(images)} images) and {folder / 'run.yaml'}")
    return 0


def caption(digit: int) -> str:
    """The prompt of a digit."""
    return f"a handwritten {DIGITS[digit]}"


def digits() -> tuple[list[Image.Image], list[int]]:
    """scikit-learn's 1,797 scanned digits, 8 x 8 with 17 grey levels, enlarged; and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the demo needs scikit-learn: pip install 'ds_flux[demo]'") from None
    data = load_digits()
    small = [Image.fromarray((image * 255 / 16).round().astype(np.uint8)) for image in data.images]
    size = (RESOLUTION, RESOLUTION)
    return [image.resize(size, Image.Resampling.BICUBIC).convert("RGB") for image in small], data.target.tolist()


def write_dataset(folder: Path, images: list[Image.Image], labels: list[int]) -> None:
    """A data set for `--dataset_name`, with the columns image and text."""
    rows = {"image": images, "text": [caption(label) for label in labels]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)


def recipe(folder: Path, name: str) -> str:
    """The settings of the demo's run; `launch/recipes` has those of real ones."""
    return f"""\
pretrained_model_name_or_path: {folder / "model"}
dataset_name: {folder / "digits"}
caption_column: text
output_dir: {folder / "out"}
resolution: {RESOLUTION}
max_sequence_length: {tiny.TINY[name].text_length}
mixed_precision: 'no'
weighting_scheme: logit_normal
train_batch_size: 32
max_train_steps: 700
learning_rate: 2.0e-3
adam_beta2: 0.99
adam_weight_decay: 0.01
lr_scheduler: cosine
lr_warmup_steps: 50
proportion_empty_prompts: 0.0
checkpointing_steps: 500
checkpoints_total_limit: 2
validation_fraction: 0.05
validation_steps: 140
validation_sigmas: 4
validation_prompt: {json.dumps([caption(digit) for digit in range(10)])}
num_validation_images: 2
num_validation_inference_steps: 6
"""


def write_model(name: str, folder: Path, images: list[Image.Image], autoencoder_steps: int, seed: int) -> None:
    """A model folder of a family, its autoencoder trained on these images."""
    torch.manual_seed(seed)
    autoencoder = tiny_autoencoder.make(tiny.TINY[name].autoencoder_class)
    autoencoder = tiny_autoencoder.train(autoencoder, images, autoencoder_steps)
    tiny.write(name, folder, autoencoder, seed, WORDS, tiny.TINY[name].demo)
    random_transformer(name, folder, seed)


def random_transformer(name: str, folder: Path, seed: int) -> None:
    """Replace the transformer of a model folder by the one that pre-training would start from."""
    transformer = tiny.TINY[name].transformer_class.from_pretrained(folder / "transformer")
    with torch.no_grad():
        for key, parameter in transformer.named_parameters():
            initial_weight(key, parameter, seed)
    transformer.save_pretrained(folder / "transformer")


def outcome(name: str, folder: Path, transformer: Path, seed: int, began: int | None) -> dict[str, Any]:
    """What the run of the demo came to, with its page; losses are means over the first and the last 20 steps."""
    recognised, grid = score(name, folder, transformer, seed)
    run = folder / "out"
    shares = list(recognised_shares(run).values())
    rows = report.lines_of(run / "logs/metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]  # there is none before the first step
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    page = report.write(run)
    return {
        "digits_recognised": recognised,
        "loss_first": round(sum(losses[:20]) / 20, 4),
        "loss_last": round(sum(losses[-20:]) / 20, 4),
        **first_and_last("validation_loss", validation),
        **first_and_last("recognised_share", shares),
        "report": str(page),
        "seconds": round(time.time() - began) if began else None,
        "checkpoint": str(find(folder / "out")),
        "transformer": str(transformer),
        "grid": str(grid),
    }


def first_and_last(name: str, values: list[float]) -> dict[str, float]:
    """Of a figure that was taken now and then."""
    return {f"{name}_first": round(values[0], 4), f"{name}_last": round(values[-1], 4)} if values else {}


def print_outcome(figures: dict[str, Any]) -> None:
    """For a person, then the same as one line of JSON."""
    for name in ("loss", "validation_loss", "recognised_share"):
        if f"{name}_first" in figures:
            print(f"{name.replace('_', ' ')} {figures[f'{name}_first']} -> {figures[f'{name}_last']}")
    print(
        f"{figures['digits_recognised']} of {NUM_SCORED} generated digits are recognised as the digit asked for\n"
        f"look at them:          {figures['grid']}\n"
        f"ZeRO checkpoint:       {figures['checkpoint']}\n"
        f"diffusers transformer: {figures['transformer']}\n"
        f"the run on one page:   {figures['report']}"
    )
    print(json.dumps(figures))


def score(name: str, folder: Path, transformer: Path, seed: int) -> tuple[int, Path]:
    """Ask the stock pipeline for each digit ten times; how many a classifier recognises, and a picture of all."""
    images, labels = digits()
    pipeline = stock.load(folder / "model", transformer)
    num_each = NUM_SCORED // len(DIGITS)
    wanted = [digit for digit in range(len(DIGITS)) for _ in range(num_each)]
    made = stock.generate(
        pipeline, [caption(digit) for digit in wanted], torch.Generator().manual_seed(seed),
        height=RESOLUTION, width=RESOLUTION, num_inference_steps=20, max_sequence_length=tiny.TINY[name].text_length,
    )  # fmt: skip
    seen = classify(images, labels, made)
    save_grid(made, num_each, folder / "digits.png")
    return sum(a == b for a, b in zip(wanted, seen)), folder / "digits.png"


def recognised_shares(run: Path) -> dict[int, float]:
    """{step: the share of the digits shown then that are recognised}; also written into logs/scores.jsonl, beside others."""
    asked = {caption(digit): digit for digit in range(len(DIGITS))}
    shown = {path: report.text_of(path) for path in run.glob("samples/step-*/*.png") if not path.parent.name.endswith("-ema")}
    wanted = {path: asked[prompt] for path, prompt in shown.items() if prompt in asked}
    seen = classify(*digits(), [Image.open(path) for path in wanted]) if wanted else []
    right: dict[int, list[bool]] = defaultdict(list)
    for (path, digit), found in zip(wanted.items(), seen, strict=True):
        right[int(path.parent.name.removeprefix("step-"))].append(found == digit)
    shares = {step: sum(right[step]) / len(right[step]) for step in sorted(right)}
    if shares:
        record_shares(run / "logs/scores.jsonl", shares)
    return shares


def record_shares(path: Path, shares: dict[int, float]) -> None:
    """Write the lines of this score anew, and leave those of others as they are."""
    others = [row for row in report.lines_of(path) if "recognised_share" not in row]
    rows = others + [{"step": step, "recognised_share": round(share, 4)} for step, share in shares.items()]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def classify(images: list[Image.Image], labels: list[int], made: list[Image.Image]) -> list[int]:
    """What a support vector machine trained on the real digits takes the made ones for."""
    from sklearn.svm import SVC

    def features(batch: list[Image.Image]) -> np.ndarray:
        small = [image.convert("L").resize((8, 8), Image.Resampling.BOX) for image in batch]
        return np.stack([np.array(image).flatten() / 255 * 16 for image in small])

    return SVC(gamma=0.001).fit(features(images), labels).predict(features(made)).tolist()


def save_grid(images: list[Image.Image], columns: int, path: Path, scale: int = 2) -> None:
    """One PNG of all images, row by row."""
    width, height = images[0].width * scale, images[0].height * scale
    grid = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for place, image in enumerate(images):
        row, column = divmod(place, columns)
        grid.paste(image.resize((width, height), Image.Resampling.NEAREST), (column * width, row * height))
    grid.save(path)
