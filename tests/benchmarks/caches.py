"""What caches cost and save, with the demo's model and its 1,797 digits, in one process but for what says otherwise.

    python -m tests.benchmarks.caches [--folder out/benchmarks/caches]

- how long a cached batch takes to be ready, beside a training step;
- how fast precompute is, beside the bare autoencoder on the same batches;
- how fast two ranks are beside one;
- how much memory goes back when the encoders are let go.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_flux.conditioning import Conditioner
    from ds_flux.config import Config
    from ds_flux.data.images import SampleDataset

os.environ.setdefault("DS_ACCELERATOR", "cpu")
NUM_STEPS, NUM_TURNS = 20, 5


def rss_mib() -> float:
    """Anonymous memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def keys_of(settings: "Config", samples: "SampleDataset") -> list[tuple[int, int]]:
    """First visits of as many samples as make about the same work at every resolution: all of them at 64 pixels."""
    return [(sample, 0) for sample in range(len(samples.source) * 64**2 // settings.data.resolution**2)]


def settings_of(flags: list[str]) -> "Config":
    """Checked."""
    from ds_flux import checks, commands, config

    settings = config.load(flags, "benchmark", commands.TrainCommand)[0]
    checks.check(settings)
    return settings


def time_precompute(argv: list[str], path: str) -> None:
    """Encode the images NUM_TURNS times; rank 0 adds lines with the wall time, and the most CPU time of a rank, in s."""
    import torch

    from ds_flux import assemble, caching, inputs, runtime
    from ds_flux.data.cache import LatentCache

    settings = settings_of(argv)
    architecture = assemble.find_model(settings)
    samples = inputs.look_at_data(settings, architecture).samples
    conditioner = assemble.build_conditioner(settings, architecture)
    pictures, keys = caching.pictures_of(settings, samples), keys_of(settings, samples)
    times: list[tuple[float, float]] = []
    for turn in range(NUM_TURNS):
        folder = caching.cache_folder(settings) / f"{runtime.world_size()} ranks, {turn}"
        runtime.on_main(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True), "clearing")
        cache = LatentCache(caching.open_store(folder))
        with timed(times):
            caching.fill_latents(conditioner, cache, pictures, keys, lambda *_: None)
    worst = runtime.all_reduce_max(torch.tensor(times)).tolist()
    if runtime.rank() == 0:
        with Path(path).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in worst)


def compare_ranks(flags: list[str], folder: Path) -> None:
    """Two ranks beside one, in turns."""
    from tests.distributed import run_jobs

    for _ in range(2):
        for num in (1, 2):
            run_jobs(num, [{"function": "tests.benchmarks.caches:time_precompute", "args": [flags, f"{folder}/{num}"]}], folder)
    one, two = ([median(kind) for kind in zip(*map(json.loads, (folder / num).read_text().splitlines()))] for num in "12")
    print(
        f"two ranks: {two[0]:.2f} s, one {one[0]:.2f} s: {one[0] / two[0]:.2f} times as fast; CPU time of a rank {two[1]:.2f}"
        f" s, of the one {one[1]:.2f} s: {one[1] / two[1]:.2f}"
    )


@contextmanager
def timed(times: list[tuple[float, float]]) -> Iterator[None]:
    """Adds the block's wall time and its CPU time in this process alone, in s."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    times.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))


def compare_images(settings: "Config", conditioner: "Conditioner", samples: "SampleDataset") -> None:
    """Precompute of all images, with and without a worker process, beside the bare autoencoder on the same batches."""
    from ds_flux import caching
    from ds_flux.data.cache import LatentCache

    keys = keys_of(settings, samples)
    pictures = caching.pictures_of(settings, samples)
    began_s = time.perf_counter()
    ready = [pictures[key] for key in keys]
    decoding_s = time.perf_counter() - began_s
    num = caching.IMAGES_AT_ONCE  # all are of one size, and small enough
    batches = [caching.stacked(ready[start : start + num])[2] for start in range(0, len(ready), num)]
    in_workers = replace(samples, config=replace(samples.config, dataloader_num_workers=1))
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": [], "with a worker": []}
    for turn in range(NUM_TURNS):
        with timed(times["bare"]):
            for batch in batches:
                conditioner.encode_images(batch)
        for name, how in (("ours", samples), ("with a worker", in_workers)):
            cache = LatentCache(
                caching.open_store(caching.cache_folder(settings) / f"{settings.data.resolution} {name} {turn}")
            )
            with timed(times[name]):
                caching.fill_latents(conditioner, cache, replace(pictures, samples=how), keys, lambda *_: None)
            assert len(cache.store) == len(keys)
    bare, ours, with_worker = ([median(of_kind) for of_kind in zip(*of_one)] for of_one in times.values())
    print(
        f"{len(keys)} images of {settings.data.resolution} pixels, medians of {NUM_TURNS}; decoding takes {decoding_s:.2f} s\n"
        f"  the bare autoencoder on the same batches: {bare[0]:.2f} s\n"
        f"  precompute: {ours[0]:.2f} s, {bare[0] / ours[0]:.2f} of the bare speed; {(bare[0] + decoding_s) / ours[0]:.2f} of"
        f" decoding and encoding one after another\n"
        f"  with a worker process: {with_worker[0]:.2f} s, {bare[0] / with_worker[0]:.2f}; CPU time of the process that encodes"
        f" {with_worker[1]:.2f} s, bare {bare[1]:.2f} s: {bare[1] / with_worker[1]:.2f}"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks/caches"))
    folder = parser.parse_args().folder.resolve()
    import torch

    from ds_flux import assemble, caching, demo, inputs, runtime, trainer
    from ds_flux.data.images import Batches
    from ds_flux.run import setup

    shutil.rmtree(folder, ignore_errors=True)
    demo.main(["--output_dir", str(folder), "--autoencoder_steps", "20"])
    flags = ["--config", str(folder / "run.yaml"), "--deepspeed_config", "ds_configs/zero1.json"]
    flags += ["--cache_latents", "true", "--cache_text", "true", "--center_crop", "true", "--resolution"]
    compare_ranks([*flags, "64"], folder)
    runtime.init()
    for resolution in ("256", "64"):
        settings = settings_of([*flags, resolution])
        architecture = assemble.find_model(settings)
        data = inputs.look_at_data(settings, architecture)
        conditioner = assemble.build_conditioner(settings, architecture)
        compare_images(settings, conditioner, data.samples)
    before = rss_mib()
    cached, _ = caching.cache_latents(settings, conditioner, data.samples)
    caching.cache_text(settings, cached, data.source)
    print(f"memory: {before:.0f} MiB with the encoders, {rss_mib():.0f} MiB without")

    run = setup(settings)
    batches = Batches(run.samples, run.schedule.micro_batches(0, 3 * NUM_STEPS))
    for _ in range(NUM_STEPS // 2):
        trainer.train_step(run, batches)
    began_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        run.conditioner(next(batches))
    ready_s = (time.perf_counter() - began_s) / NUM_STEPS
    began_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        trainer.train_step(run, batches)
    step_s = (time.perf_counter() - began_s) / NUM_STEPS
    print(f"batch of {settings.train.train_batch_size}: ready in {1000 * ready_s:.1f} ms, a step takes {1000 * step_s:.1f} ms: "
          f"{ready_s / step_s:.3f}")  # fmt: skip
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
