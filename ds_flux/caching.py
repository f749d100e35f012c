"""Encode every prompt and every image once, across all ranks, before the first step; only what is missing or has changed."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ds_flux import fingerprints, progress, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.cache import LatentCache, TextCache
from ds_flux.data.captions import texts_of, with_words_in_front
from ds_flux.data.decode import BadSample, Size
from ds_flux.data.images import SampleDataset
from ds_flux.data.schedule import SampleKey
from ds_flux.data.shapes import window_of
from ds_flux.data.sources import Part, Source
from ds_flux.data.store import Store

Stopped = Callable[[], bool]  # whether this rank was told to end; before the first step a signal ends it at once
Room = Callable[[int, int], None]  # (bytes, records): raises UserError where the disk cannot hold them

PROMPTS_AT_ONCE = 32  # a sharded encoder gathers its layers for each batch: at 1 it costs many times what it costs at 32
IMAGES_AT_ONCE, PIXELS_AT_ONCE = 32, 1 << 21  # two of 1024 x 1024: the autoencoder's own activations are large

LATENTS_FOLLOW_FROM = (  # of the data flags: which images, and how they are brought to latents; not how they are read
    "dataset_name", "data_files", "dataset_config_name", "instance_data_dir", "image_column", "cond_image_column",
    "reference_max_pixels", "augment_references", "resolution", "use_aspect_ratio_buckets", "aspect_ratio_buckets",
    "center_crop", "random_flip", "alpha_background", "vae_encode_mode",
)  # fmt: skip


def prepare(config: Config, conditioner: Conditioner, samples: SampleDataset) -> tuple[Conditioner, SampleDataset]:
    """Cache what --cache_text and --cache_latents say, unless that is done from window to window.  A collective."""
    if config.data.precomputation_items is not None:
        return conditioner, samples
    if config.data.cache_text:
        conditioner = cache_text(config, conditioner, samples.source)
    if config.data.cache_latents:
        conditioner, samples = cache_latents(config, conditioner, samples)
    return conditioner, samples


def cache_folder(config: Config) -> Path:
    """--cache_dir, or a folder of the run's."""
    return Path(config.data.cache_dir or f"{config.run.output_dir}/cache")


def hashed(*facts: Any) -> str:
    """A fingerprint of what can be written as JSON."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=list).encode(), digest_size=16).hexdigest()


def open_store(folder: Path) -> Store:
    """The store in a folder, once what killed writers left there is cleared away.  A collective."""
    runtime.on_main(lambda: Store(folder).sweep(), f"looking at {folder}")
    with runtime.together(f"opening {folder}"):
        store = Store(folder)
    for name, reason in store.ignored.items():
        runtime.log(f"{folder / name} is not used: {reason}")
    return store


def room_for(store: Store, num_bytes: int, num_missing: int) -> None:
    """Say how large the missing records will be.  Raises UserError when the disk cannot hold them."""
    runtime.log(f"{num_missing} records will take about {num_bytes / 2**30:.3g} GiB in {store.folder}")
    store.room(num_bytes)


def grouped(items: list[Any], kind: Callable[[Any], Hashable], num: Callable[[Any], int]) -> list[list[Any]]:
    """Batches of one kind each, in the order in which the kinds come, with at most num(kind) items."""
    alike = defaultdict(list)
    for item in items:
        alike[kind(item)].append(item)
    return [
        of_kind[start : start + num(name)] for name, of_kind in alike.items() for start in range(0, len(of_kind), num(name))
    ]


# ---------------------------------------------------------------------------------------------------------------------
# prompts


def distinct_prompts(source: Source, config: Config) -> list[str]:
    """Every prompt that a visit may have: all captions with what goes in front of them, and the empty prompt."""
    prompts = {""}
    for index in progress.bar(range(len(source)), desc="collect the prompts", unit="sample"):
        try:
            texts = texts_of(source.caption(index))
        except (BadSample, OSError, ValueError):
            continue  # named when its turn comes
        prompts |= {with_words_in_front(text, config.data) for text in texts}
    return sorted(prompts)


def text_settings(config: Config, conditioner: Conditioner) -> str:
    """A fingerprint of what features follow from beside the prompt.  A collective."""
    made_by = runtime.on_main(
        lambda: fingerprints.text_fingerprint(conditioner.family, config.model), "reading the text encoders' files"
    )
    return hashed(made_by, conditioner.max_sequence_length)


def cache_text(config: Config, conditioner: Conditioner, source: Source) -> Conditioner:
    """The conditioner with the features of all prompts on disk, and without its text encoders.  A collective."""
    cached = with_cached_text(config, conditioner, source)
    for encoder in conditioner.encoders.values():
        runtime.free(encoder)
    return cached


def with_cached_text(config: Config, conditioner: Conditioner, source: Source) -> Conditioner:
    """A conditioner that reads the features of all prompts from the disk, where they are once this is done.  A collective."""
    prompts = runtime.on_main(lambda: distinct_prompts(source, config), "collecting the prompts")
    settings = text_settings(config, conditioner)
    store = open_store(cache_folder(config) / f"text-{settings[:8]}")
    fill_text(conditioner, store, prompts, settings, partial(room_for, store))
    return replace(conditioner, encoders={}, text_cache=text_cache(conditioner, store))


def text_cache(conditioner: Conditioner, store: Store) -> TextCache:
    """How a run's batches read it."""
    return TextCache(store, {spec.component: spec.argument for spec in conditioner.family.text_encoders})


def wanted_text(prompts: list[str], settings: str) -> dict[str, str]:
    """{prompt: fingerprint}"""
    return {prompt: hashed(prompt, settings) for prompt in prompts}


def fill_text(
    conditioner: Conditioner, store: Store, prompts: list[str], settings: str, room: Room, stopped: Stopped | None = None
) -> None:
    """Encode what the store lacks of these prompts; every rank calls the encoders equally often.  A collective."""
    wanted = wanted_text(prompts, settings)
    missing = runtime.on_main(lambda: sorted(store.missing(wanted)), f"looking at {store.folder}")
    runtime.log(f"{len(wanted) - len(missing)} of {len(wanted)} prompts are in {store.folder}")
    batches = prompts_in_batches(conditioner, missing)
    with (
        store.writer(f"rank-{runtime.rank()}") as writer,
        progress.bar(total=len(missing), desc="encode the prompts", unit="prompt") as bar,
    ):
        for turn in range(0, len(batches), runtime.world_size()):
            if stopped and runtime.any_rank(stopped()):
                break
            batch = next(iter(batches[turn + runtime.rank() :]), [])  # nothing of its own left, and still it calls
            features = conditioner.encode_text(dict.fromkeys(conditioner.encoders, batch or [""]))
            if turn == 0:
                num_bytes = sum(value.nbytes for value in features.values()) * len(missing) // len(batch or [""])
                runtime.on_main(partial(room, num_bytes, len(missing)), f"looking for room in {store.folder}")
            with runtime.together("writing the features"):
                for place, prompt in enumerate(batch):
                    writer.add(prompt, wanted[prompt], {name: value[place] for name, value in features.items()})
            bar.update(sum(map(len, batches[turn : turn + runtime.world_size()])))
        with runtime.together("writing the features"):
            writer.flush()
    store.refresh()


def prompts_in_batches(conditioner: Conditioner, prompts: list[str]) -> list[list[str]]:
    """Of one window and of like length; the longest first, so that what has no room fails at once."""
    family, longest = conditioner.family, conditioner.max_sequence_length
    lengths = dict(zip(prompts, family.count_tokens(conditioner.tokenizers, prompts))) if prompts else {}

    def window(prompt: str) -> int | None:
        return None if family.text_window is None else window_of(lengths[prompt], family.text_window, longest)

    ordered = sorted(prompts, key=lambda prompt: (-lengths[prompt], prompt))
    return grouped(ordered, window, lambda _window: PROMPTS_AT_ONCE)


# ---------------------------------------------------------------------------------------------------------------------
# images


@dataclass(frozen=True)
class Pictures(Dataset):
    """{sample key: what is encoded of a visit}; worker processes prepare it."""

    samples: SampleDataset
    made_by: str
    """fingerprint of the autoencoder"""

    def fingerprint(self, key: SampleKey) -> str:
        """Of all that the latents follow from; reads the files."""
        return hashed(self.samples.source.fingerprint(key[0]), self.samples.transform(key), self.made_by)

    def __getitem__(self, key: SampleKey) -> tuple[SampleKey, str, tuple[Tensor, ...], str | None]:
        """Key, fingerprint, pixels of image and references each (3, h, w), and what is wrong with them."""
        pixels, _, trouble = self.samples.images(key)
        return key, self.fingerprint(key), pixels, trouble

    def num_pixels(self, key: SampleKey) -> int:
        """Of image and references together."""
        return sum(width * height for width, height in self.samples.sizes_of(key))


def stacked(items: list[tuple[SampleKey, str, tuple[Tensor, ...], str | None]]) -> tuple[Any, ...]:
    """Pictures of the same sizes: keys, fingerprints, pixels of image and references each (B, 3, h, w), troubles."""
    keys, fingerprints, pixels, troubles = zip(*items)
    return keys, fingerprints, tuple(torch.stack(images) for images in zip(*pixels, strict=True)), troubles


def cache_latents(config: Config, conditioner: Conditioner, samples: SampleDataset) -> tuple[Conditioner, SampleDataset]:
    """Samples with all latents on disk, and the conditioner without its autoencoder.  A collective."""
    if samples.config.random_flip or not samples.config.center_crop:
        runtime.log("--cache_latents: each sample keeps the crop and flip of its first visit")
    samples = with_cached_latents(config, conditioner, samples)
    runtime.free(conditioner.autoencoder)
    return replace(conditioner, autoencoder=None), samples


def with_cached_latents(config: Config, conditioner: Conditioner, samples: SampleDataset) -> SampleDataset:
    """Samples whose latents are read from the disk, where they are once this is done.  A collective."""
    pictures = pictures_of(config, samples)
    cache = LatentCache(open_store(latents_folder(config, pictures)))
    keys = [(sample, 0) for sample in range(len(samples.source))]
    fill_latents(conditioner, cache, pictures, keys, partial(room_for, cache.store))
    return replace(samples, cache=cache)


def latents_folder(config: Config, pictures: Pictures) -> Path:
    """One for each data set and way to encode it, so that runs with others do not write over its records."""
    facts = [vars(pictures.samples.config)[name] for name in LATENTS_FOLLOW_FROM]
    facts += [pictures.samples.source.title] if isinstance(pictures.samples.source, Part) else []
    return cache_folder(config) / f"latents-{hashed(pictures.made_by, facts, pictures.samples.seed)[:8]}"


def pictures_of(config: Config, samples: SampleDataset) -> Pictures:
    """What is encoded of the samples.  A collective."""
    made_by = runtime.on_main(lambda: fingerprints.autoencoder_fingerprint(config.model), "reading the autoencoder's files")
    return Pictures(samples, made_by)


def fill_latents(
    conditioner: Conditioner,
    cache: LatentCache,
    pictures: Pictures,
    keys: list[SampleKey],
    room: Room,
    stopped: Stopped | None = None,
) -> None:
    """Encode what the cache lacks of these visits, those of the same sizes together.  A collective."""
    missing = missing_latents(cache, pictures, keys)
    runtime.log(f"{len(keys) - len(missing)} of {len(keys)} images are in {cache.store.folder}")
    if missing:
        look = partial(room, bytes_of(conditioner, pictures, missing), len(missing))
        runtime.on_main(look, f"looking for room in {cache.store.folder}")
    at_once = min(IMAGES_AT_ONCE, math.ceil(len(missing) / runtime.world_size()))
    batches = grouped(missing, pictures.samples.sizes_of, lambda sizes: max(1, min(at_once, PIXELS_AT_ONCE // largest(sizes))))
    share = batches[runtime.rank() :: runtime.world_size()]
    num_ranks = runtime.world_size()
    in_turns = [sum(map(len, batches[first : first + num_ranks])) for first in range(0, len(batches), num_ranks)]
    num_workers = pictures.samples.config.dataloader_num_workers
    with (
        runtime.together("encoding the images"),
        cache.store.writer(f"rank-{runtime.rank()}") as writer,
        progress.bar(total=len(missing), desc="encode the images", unit="image") as bar,
    ):
        loader = DataLoader(pictures, batch_sampler=share, collate_fn=stacked, num_workers=num_workers)
        for (keys_here, fingerprints, images, troubles), num in zip(loader, in_turns):
            if stopped and stopped():
                break
            records = encoded(conditioner, images)
            for key, fingerprint, (latents, spread), trouble in zip(keys_here, fingerprints, records, troubles):
                cache.write(writer, key, fingerprint, latents, spread, trouble)
            bar.update(num)  # the other ranks are about as far
    cache.store.refresh()


def largest(sizes: tuple[Size, ...]) -> int:
    """Pixels of the largest."""
    return max(width * height for width, height in sizes)


def missing_latents(cache: LatentCache, pictures: Pictures, keys: list[SampleKey]) -> list[SampleKey]:
    """Those without a record, or whose files have changed since; only files of those with one are read.  A collective.

    Rank 0 says which: another run may be writing, and ranks that looked by themselves would not all see the same.
    """
    what = f"looking at {cache.store.folder}"
    known = runtime.on_main(lambda: [key for key in keys if cache.name(key) in cache.store], what)
    with runtime.together(what):
        mine = [(cache.name(key), pictures.fingerprint(key)) for key in known[runtime.rank() :: runtime.world_size()]]
    wanted = dict.fromkeys(map(cache.name, keys), "") | dict(runtime.gathered(mine))

    def look() -> list[SampleKey]:
        missing = set(cache.store.missing(wanted))
        return [key for key in keys if cache.name(key) in missing]

    return runtime.on_main(look, what)


def encoded(conditioner: Conditioner, images: tuple[Tensor, ...]) -> list[tuple[list[Tensor], Tensor | None]]:
    """Of each sample the latents of image and references, each (C, H, W), and how far the image's spread if that is used."""
    means, spreads = zip(*conditioner.encode_images(images))
    latents = zip(*(mean.cpu() for mean in means))
    spread = [None] * len(images[0]) if conditioner.posterior_seed is None else spreads[0].cpu()
    return [(list(of_sample), its_spread) for of_sample, its_spread in zip(latents, spread)]


def bytes_of(conditioner: Conditioner, pictures: Pictures, keys: list[SampleKey]) -> int:
    """About what the latents of these will take: so many bytes for each pixel as of a grey picture in place of the first."""
    grey = tuple(torch.zeros(1, 3, height, width) for width, height in pictures.samples.sizes_of(keys[0]))
    ((latents, spread),) = encoded(conditioner, grey)
    num_bytes = sum(tensor.nbytes for tensor in (*latents, *([] if spread is None else [spread])))
    return num_bytes * sum(map(pictures.num_pixels, keys)) // pictures.num_pixels(keys[0])
