"""Caches of a few steps at a time: encode what the next steps need, train on them, forget what is behind.

A window of steps has a folder of its own, so that forgetting it gives all of its room back.  What a window has in common
with the one behind is copied, not encoded again.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path

from ds_flux import caching, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config
from ds_flux.data.cache import LatentCache
from ds_flux.data.images import SampleDataset
from ds_flux.data.schedule import SampleKey, Schedule
from ds_flux.data.store import Store


@dataclass(frozen=True)
class Window:
    """Consecutive optimizer steps, counted from 1, and what they are fed with."""

    steps: range
    micro_batches: Iterable[list[SampleKey]]
    """of this rank"""
    conditioner: Conditioner
    samples: SampleDataset


@dataclass(frozen=True)
class Span:
    """The steps of a window, and this rank's micro batches of each."""

    first_step: int  # steps before it
    steps: list[list[list[SampleKey]]]

    @property
    def last_step(self) -> int:
        """The step it ends with, counted from 1."""
        return self.first_step + len(self.steps)


def windows(
    config: Config,
    schedule: Schedule,
    conditioner: Conditioner,
    samples: SampleDataset,
    steps: tuple[int, int],
    stopped: Callable[[], bool],
) -> Iterator[Window]:
    """The steps of a run, first < step <= last, window after window; all in one unless --precomputation_items says otherwise.

    Each turn is a collective.  A window is whole unless `stopped`: then no step of it may be taken.

    Raises:
        UserError: the disk cannot hold a window.
    """
    first_step, last_step = steps
    if config.data.precomputation_items is None:
        yield Window(range(first_step + 1, last_step + 1), schedule.micro_batches(*steps), conditioner, samples)
        return
    encoder = Encoder.of(config, conditioner, samples, stopped)
    behind: Path | None = None
    spans = spans_of(schedule, config.data.precomputation_items, last_step)
    for span, ahead in pairwise(chain(spans, [None])):
        if span.last_step <= first_step:
            continue
        # at first, a run that was killed may have encoded more than its last checkpoint knows
        beside = behind or (encoder.folder(ahead) if ahead else None)
        done = max(0, first_step - span.first_step)
        yield encoder.window(span, done, beside, is_last=ahead is None)
        behind = encoder.folder(span)
    runtime.on_main(lambda: shutil.rmtree(encoder.root, ignore_errors=True), "removing the last window's cache")


def spans_of(schedule: Schedule, num_items: int, last_step: int) -> Iterator[Span]:
    """The steps from the first on, as many in each span as come to num_items samples of all ranks at most; at least one."""
    micro_batches = schedule.micro_batches(0, last_step)
    span, num = Span(0, []), 0
    while step := list(islice(micro_batches, schedule.gradient_accumulation_steps)):
        size = sum(map(len, step)) * schedule.dp_size
        if span.steps and num + size > num_items:
            yield span
            span, num = Span(span.last_step, []), 0
        span.steps.append(step)
        num += size
    yield span


@dataclass(frozen=True)
class Encoder:
    """Fills the folders of windows."""

    conditioner: Conditioner
    samples: SampleDataset
    text_settings: str | None
    """fingerprint of what encodes prompts; None: they are not cached"""
    pictures: caching.Pictures | None
    """None: images are not cached"""
    root: Path
    stopped: Callable[[], bool]

    @staticmethod
    def of(config: Config, conditioner: Conditioner, samples: SampleDataset, stopped: Callable[[], bool]) -> "Encoder":
        """By a run's settings.  A collective."""
        of_run = caching.hashed(str(Path(config.run.output_dir).resolve()))  # others may have the same --cache_dir
        return Encoder(
            conditioner=conditioner,
            samples=samples,
            text_settings=caching.text_settings(config, conditioner) if config.data.cache_text else None,
            pictures=caching.pictures_of(config, samples) if config.data.cache_latents else None,
            root=caching.cache_folder(config) / f"rolling-{of_run[:8]}",
            stopped=stopped,
        )

    def folder(self, span: Span) -> Path:
        """Of a window; the same in a run that is resumed."""
        return self.root / f"after-step-{span.first_step:06d}"

    def window(self, span: Span, done: int, beside: Path | None, is_last: bool) -> Window:
        """Encode what the steps of a span need but for the first `done`, and keep one other window.  A collective."""
        here, steps = self.folder(span), span.steps[done:]
        runtime.on_main(partial(self.keep, here, beside), f"clearing {self.root}")
        micro_batches = [keys for step in steps for keys in step]
        keys = [key for keys in micro_batches for key in keys]
        conditioner, samples = self.conditioner, self.samples
        if self.text_settings is not None:
            store = self.text(keys, here, beside, self.text_settings)
            conditioner = replace(conditioner, text_cache=caching.text_cache(conditioner, store))
        if self.pictures is not None:
            samples = replace(samples, cache=self.latents(keys, here, beside, self.pictures))
        if is_last:
            conditioner = self.let_go(conditioner)
        return Window(range(span.first_step + done + 1, span.last_step + 1), micro_batches, conditioner, samples)

    def text(self, keys: list[SampleKey], here: Path, beside: Path | None, settings: str) -> Store:
        """The features of all prompts that the visits of all ranks have.  A collective."""
        components = [spec.component for spec in self.conditioner.family.text_encoders]
        with runtime.together("reading the captions"):
            mine = {self.samples.prompts(key)[0][component] for key in keys for component in components}
        prompts = sorted(set(runtime.gathered(sorted(mine))))
        store = caching.open_store(here / "text")
        if beside is not None:
            carry_over(store, beside / "text", caching.wanted_text(prompts, settings))
        caching.fill_text(self.conditioner, store, prompts, settings, partial(self.room, beside, store), self.stopped)
        return store

    def latents(self, keys: list[SampleKey], here: Path, beside: Path | None, pictures: caching.Pictures) -> LatentCache:
        """The latents of the visits of all ranks, each with a crop and flip of its own.  A collective."""
        cache = LatentCache(caching.open_store(here / "latents"), each_visit=True)
        room = partial(self.room, beside, cache.store)
        caching.fill_latents(self.conditioner, cache, pictures, sorted(set(runtime.gathered(keys))), room, self.stopped)
        return cache

    def keep(self, here: Path, beside: Path | None) -> None:
        """Remove all other windows; and the one beside where there is no room for another as large."""
        for folder in self.root.glob("after-step-*"):
            if folder not in (here, beside):
                shutil.rmtree(folder)
        if beside is not None and beside.exists():
            make_room(beside, sum(path.stat().st_size for path in beside.rglob("*")))

    def room(self, beside: Path | None, store: Store, num_bytes: int, num_missing: int) -> None:
        """Give up the window beside if this one needs its place.  Raises UserError when the disk cannot hold it even then."""
        if beside is not None:
            make_room(beside, num_bytes)
        caching.room_for(store, num_bytes, num_missing)

    def let_go(self, conditioner: Conditioner) -> Conditioner:
        """Without what the last window has used for the last time.  A collective."""
        if self.text_settings is not None:
            for encoder in conditioner.encoders.values():
                runtime.free(encoder)
            conditioner = replace(conditioner, encoders={})
        if self.pictures is not None:
            runtime.free(conditioner.autoencoder)
            conditioner = replace(conditioner, autoencoder=None)
        return conditioner


def make_room(beside: Path, num_bytes: int) -> None:
    """Remove a window where less than num_bytes are free."""
    if beside.exists() and shutil.disk_usage(beside).free < num_bytes:
        shutil.rmtree(beside)


def carry_over(store: Store, beside: Path, wanted: dict[str, str]) -> None:
    """Copy records that another window has, each rank its share.  A collective."""
    what = f"taking over what {beside} has"
    if not runtime.on_main(beside.exists, what):
        return
    with runtime.together(what):
        other = Store(beside)
    lacking = runtime.on_main(lambda: sorted(set(store.missing(wanted)) - set(other.missing(wanted))), what)
    with runtime.together(what), store.writer(f"rank-{runtime.rank()}") as writer:
        for key in lacking[runtime.rank() :: runtime.world_size()]:
            writer.add(key, wanted[key], other.read(key))
    store.refresh()
