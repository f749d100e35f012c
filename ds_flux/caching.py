"""Encode every prompt and every image once, across all ranks, before the first step; only what is missing or has changed."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ds_flux import models, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.cache import LatentCache, TextCache
from ds_flux.data.captions import texts_of, with_words_in_front
from ds_flux.data.decode import BadSample
from ds_flux.data.images import SampleDataset
from ds_flux.data.sources import Source
from ds_flux.data.store import Store

PROMPTS_AT_ONCE = 32  # a sharded encoder gathers its layers for each batch: at 1 it costs many times what it costs at 32

LATENTS_FOLLOW_FROM = (  # of the data flags: which images, and how they are brought to latents; not how they are read
    "dataset_name", "data_files", "dataset_config_name", "instance_data_dir", "image_column", "cond_image_column",
    "reference_max_pixels", "augment_references", "resolution", "use_aspect_ratio_buckets", "aspect_ratio_buckets",
    "center_crop", "random_flip", "alpha_background", "vae_encode_mode",
)  # fmt: skip


def prepare(config: Config, conditioner: Conditioner, samples: SampleDataset) -> tuple[Conditioner, SampleDataset]:
    """Cache what --cache_text and --cache_latents say.  A collective."""
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


def fingerprints(items: list[Any], fingerprint: Any) -> dict[str, str]:
    """{key: fingerprint} of all items, each computed by one rank.  A collective."""
    share = items[runtime.rank() :: runtime.world_size()]
    with runtime.together("looking at what to encode"):
        mine = [(str(item), fingerprint(item)) for item in share]
    return dict(runtime.gathered(mine))


def open_store(folder: Path, wanted: dict[str, str], what: str) -> tuple[Store, list[str]]:
    """The store, and the keys that have to be encoded.  A collective.

    Rank 0 says which: another run may be writing, and ranks that looked by themselves would not all see the same.
    """

    def look() -> list[str]:
        store = Store(folder)
        store.sweep()
        return sorted(store.missing(wanted))

    missing = runtime.on_main(look, f"looking at the cache of {what}")
    with runtime.together(f"opening the cache of {what}"):
        store = Store(folder)
    for name, reason in store.ignored.items():
        runtime.log(f"{folder / name} is not used: {reason}")
    runtime.log(f"{len(wanted) - len(missing)} of {len(wanted)} {what} are in {folder}")
    return store, missing


# ---------------------------------------------------------------------------------------------------------------------
# prompts


def distinct_prompts(source: Source, config: Config) -> list[str]:
    """Every prompt that a visit may have: all captions with what goes in front of them, and the empty prompt."""
    prompts = {""}
    for index in tqdm(range(len(source)), desc="collect the prompts", disable=runtime.rank() > 0 or len(source) < 1000):
        try:
            texts = texts_of(source.caption(index))
        except (BadSample, OSError, ValueError):
            continue  # named when its turn comes
        prompts |= {with_words_in_front(text, config.data) for text in texts}
    return sorted(prompts)


def cache_text(config: Config, conditioner: Conditioner, source: Source) -> Conditioner:
    """The conditioner with the features of all prompts on disk, and without its text encoders.  A collective."""
    family = conditioner.family
    prompts = runtime.on_main(lambda: distinct_prompts(source, config), "collecting the prompts")
    made_by = runtime.on_main(lambda: models.text_fingerprint(family, config.model), "reading the text encoders' files")
    settings = hashed(made_by, conditioner.max_sequence_length)
    wanted = {prompt: hashed(prompt, settings) for prompt in prompts}
    store, missing = open_store(cache_folder(config) / f"text-{settings[:8]}", wanted, "prompts")
    encode_prompts(conditioner, store, missing, wanted)
    cache = TextCache(store, {spec.component: spec.argument for spec in family.text_encoders})
    for encoder in conditioner.encoders.values():
        runtime.free(encoder)
    return replace(conditioner, encoders={}, offloaded=(), text_cache=cache)


def encode_prompts(conditioner: Conditioner, store: Store, missing: list[str], wanted: dict[str, str]) -> None:
    """In batches of prompts of like length, dealt out over the ranks; each calls the encoders equally often.  A collective."""
    lengths = dict(zip(missing, conditioner.family.count_tokens(conditioner.tokenizers, missing))) if missing else {}
    ordered = sorted(missing, key=lambda prompt: (lengths[prompt], prompt))
    batches = [ordered[start : start + PROMPTS_AT_ONCE] for start in range(0, len(ordered), PROMPTS_AT_ONCE)]
    rounds = math.ceil(len(batches) / runtime.world_size())
    with store.writer(f"rank-{runtime.rank()}") as writer:
        for turn in tqdm(range(rounds), desc="encode the prompts", disable=runtime.rank() > 0):
            number = turn * runtime.world_size() + runtime.rank()
            batch = batches[number] if number < len(batches) else [""]  # nothing of its own left, and still called
            features = conditioner.encode_text(dict.fromkeys(conditioner.encoders, batch))
            with runtime.together("writing the features"):
                if turn == 0:
                    room_for(store, sum(value.nbytes for value in features.values()) // len(batch), len(missing))
                if number < len(batches):
                    for place, prompt in enumerate(batch):
                        writer.add(prompt, wanted[prompt], {name: value[place] for name, value in features.items()})
        with runtime.together("writing the features"):
            writer.flush()
    store.refresh()


def room_for(store: Store, bytes_each: int, num_missing: int) -> None:
    """Say how large the cache will be, from its first records.  Raises UserError when the disk cannot hold it."""
    num_bytes = bytes_each * num_missing
    runtime.log(f"{num_missing} records will take about {num_bytes / 2**30:.3g} GiB in {store.folder}")
    store.room(num_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# images


def cache_latents(config: Config, conditioner: Conditioner, samples: SampleDataset) -> tuple[Conditioner, SampleDataset]:
    """Samples with all latents on disk, and the conditioner without its autoencoder.  A collective."""
    made_by = runtime.on_main(lambda: models.autoencoder_fingerprint(config.model), "reading the autoencoder's files")
    if samples.config.random_flip or not samples.config.center_crop:
        runtime.log("--cache_latents: each sample keeps the crop and flip of its first visit")

    def fingerprint(sample: int) -> str:
        return hashed(samples.source.fingerprint(sample), samples.transform((sample, 0)), made_by)

    # a folder for each data set and way to encode it, so that runs with others do not write over its records
    settings = hashed(made_by, [vars(samples.config)[name] for name in LATENTS_FOLLOW_FROM], samples.seed)
    wanted = fingerprints(list(range(len(samples.source))), fingerprint)
    store, missing = open_store(cache_folder(config) / f"latents-{settings[:8]}", wanted, "images")
    share = missing[runtime.rank() :: runtime.world_size()]
    with runtime.together("encoding the images"), store.writer(f"rank-{runtime.rank()}") as writer:
        for number, key in enumerate(tqdm(share, desc="encode the images", disable=runtime.rank() > 0)):
            pixels, _, trouble = samples.images((int(key), 0))
            encoded = conditioner.encode_images(tuple(image[None] for image in pixels))
            latents = [mean[0] for mean, _ in encoded]
            spread = None if conditioner.posterior_seed is None else encoded[0][1][0]
            if number == 0:
                tensors = [*latents, *([] if spread is None else [spread])]
                room_for(store, sum(x.nbytes for x in tensors), len(missing))
            LatentCache.write(writer, int(key), wanted[key], latents, spread, trouble)
    store.refresh()
    runtime.free(conditioner.autoencoder)
    return replace(conditioner, autoencoder=None, offloaded=()), replace(samples, cache=LatentCache(store))
