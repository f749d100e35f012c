"""What scores the images of a model: CLIP by their prompts, Inception by another set of images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ds_flux import UserError, clip, fid, progress, runtime
from ds_flux.commands import EvaluateCommand
from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets
from ds_flux.data.decode import Size
from ds_flux.data.images import Batches, ImageRules, RawBatch, ReferenceRules, SampleDataset
from ds_flux.data.sources import Source, open_source
from ds_flux.validation import SEED, data_of

AT_ONCE = 16  # images
NUM_NAMED = 5  # images in a message


@dataclass(frozen=True)
class FidJudge:
    """Inception, and what it has seen of the set to compare with."""

    inception: fid.Inception
    reference: fid.Statistics

    def score(self, images: dict[int, Path], size: Size) -> float:
        """The FID of the images of all ranks.  A collective.

        Args:
            images: {number: file} of this rank, all of one size (width, height).
        """
        turns = portions(list(images.values()), "FID")
        batches = (torch.stack([pixels(Image.open(path)) for path in paths]) for paths in turns)
        found = fid.statistics(self.inception, batches, in_words(size))
        return runtime.on_main(lambda: fid.distance(found, self.reference), "comparing what Inception saw")


def clip_score(judge: clip.Clip, images: dict[int, Path], prompts: list[str]) -> float:
    """The CLIP score of the images of all ranks; the model is here only meanwhile.  A collective.

    Args:
        images: {number: file} of this rank.
        prompts: of every number.
    """
    with runtime.together("loading CLIP"):
        model = judge.load()
    sums = torch.zeros(2, dtype=torch.float64)
    with runtime.together("looking at images for the CLIP score"):
        for numbers in portions(sorted(images), "CLIP score"):
            shown = [Image.open(images[number]).convert("RGB") for number in numbers]
            scores = judge.scores(model, shown, [prompts[number] for number in numbers])
            sums += torch.stack([scores.sum(), torch.tensor(float(len(numbers)), dtype=torch.float64)])
    runtime.free(model)
    total, num = runtime.all_reduce_sum(sums).tolist()
    return max(total / num, 0.0)


def find_fid_judge(command: EvaluateCommand, data: DataConfig, size: Size) -> FidJudge | None:
    """Inception, if it is asked for; looks at --fid_dataset.  A collective.

    Args:
        data: of the run: how a data set is read.
        size: (width, height) that the set's images are brought to.

    Raises:
        UserError: a file or the set cannot be used.
    """
    if command.fid_weights is None:
        return None
    with runtime.together("loading Inception"):
        inception = fid.load_inception(Path(command.fid_weights))
        reference = None
        if command.fid_statistics is not None:
            reference = fid.Statistics.read(Path(command.fid_statistics), inception.fingerprint)
            if reference.size != in_words(size):
                runtime.log(f"--fid_statistics are of images of {reference.size}; those of the model have {in_words(size)}")
    inception.network.to(runtime.device())
    if reference is None:
        reference = look_at_set(inception, str(command.fid_dataset), data, size)
        if command.save_fid_statistics is not None:
            path = Path(command.save_fid_statistics)
            runtime.on_main(lambda: reference.save(path), f"writing {path}")
    return FidJudge(inception, reference)


def look_at_set(inception: fid.Inception, name: str, data: DataConfig, size: Size) -> fid.Statistics:
    """What FID knows of a set of images, each of which one rank has seen.  A collective.

    Raises:
        UserError: there are none, or too many that cannot be read.
    """
    config = data_of_set(data, name)
    source = runtime.on_each_node_first(lambda: open_set(config), "opening --fid_dataset")
    rules = ImageRules(Buckets({0: (size,)}), ReferenceRules(config.reference_max_pixels, 1, False))
    samples = SampleDataset(source, config, SEED, rules, partial(sizes, size))
    keys = [(number, 0) for number in range(runtime.rank(), len(source), runtime.world_size())]
    bad: list[str] = []
    found = fid.statistics(inception, usable(Batches(samples, portions(keys, "look at --fid_dataset")), bad), in_words(size))
    tell(sorted(runtime.gathered(bad)), len(source), config)
    return found


def open_set(config: DataConfig) -> Source:
    """Its images.  Raises UserError."""
    try:
        return open_source(config)
    except UserError as error:
        raise UserError(f"--fid_dataset: {error}") from None


def data_of_set(data: DataConfig, name: str) -> DataConfig:
    """How --fid_dataset is read: a folder with images in it as that, all else as --data_files or --dataset_name would be."""
    folder, known = Path(name).expanduser(), Image.registered_extensions()
    is_folder = folder.is_dir() and any(path.suffix.lower() in known for path in folder.rglob("*"))
    place = "instance_data_dir" if is_folder else "data_files" if data.data_files is not None else "dataset_name"
    empty = dict.fromkeys(("instance_data_dir", "data_files", "dataset_name", "caption_column", "cond_image_column"))
    nothing_left_to_chance = data_of(data, None)
    return replace(nothing_left_to_chance, **{**empty, place: name, "instance_prompt": "-"})  # captions are not read


def sizes(size: Size, _key: object) -> tuple[Size, ...]:
    """Of every image."""
    return (size,)


def usable(batches: Iterator[RawBatch], bad: list[str]) -> Iterator[Tensor]:
    """The images (B, 3, height, width), uint8, that could be decoded; what is said of others goes to `bad`."""
    for raw in batches:
        bad += [str(one) for one in raw.bad]
        images = raw.images[0][raw.weights > 0]
        if len(images):
            yield ((images + 1) * 127.5).round().to(torch.uint8)


def tell(bad: list[str], num_samples: int, config: DataConfig) -> None:
    """Of images that are left out.  Raises UserError where they are more than the run's flags allow."""
    if not bad:
        return
    if config.on_bad_sample == "error" or len(bad) > config.max_bad_fraction * num_samples:
        raise UserError(
            f"{len(bad)} of {num_samples} images of --fid_dataset cannot be used (the first: {bad[0]}), more than "
            f"--on_bad_sample {config.on_bad_sample} with --max_bad_fraction {config.max_bad_fraction} allows"
        )
    more = f" and {len(bad) - NUM_NAMED} more" if len(bad) > NUM_NAMED else ""
    runtime.log(f"--fid_dataset: {len(bad)} of {num_samples} images are left out: {'; '.join(bad[:NUM_NAMED])}{more}")


def pixels(image: Image.Image) -> Tensor:
    """(3, height, width), uint8."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def portions(items: list[Any], what: str) -> Iterable[list[Any]]:
    """So many at once, with a progress bar."""
    turns = [items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE)]
    return progress.bar(turns, desc=what, unit="turn")


def in_words(size: Size) -> str:
    """ "width x height"."""
    return f"{size[0]} x {size[1]}"
