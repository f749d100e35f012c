"""What caches cost and save, with the demo's model and its 1,797 digits, in one process.

    python -m tests.benchmarks.caches [--folder out/benchmarks/caches]

- how long a cached batch takes to be ready, beside a training step;
- how fast precompute is, beside the bare autoencoder on the same batches;
- how much memory goes back when the encoders are let go.
"""

import argparse
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

    keys = [(sample, 0) for sample in range(len(samples.source))]
    pictures = caching.pictures_of(settings, samples)
    began_s = time.perf_counter()
    ready = [pictures[key] for key in keys]
    decoding_s = time.perf_counter() - began_s
    num = caching.IMAGES_AT_ONCE  # all are of one size, and small
    batches = [caching.stacked(ready[start : start + num])[2] for start in range(0, len(ready), num)]
    in_workers = replace(samples, config=replace(samples.config, dataloader_num_workers=1))
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": [], "with a worker": []}
    for turn in range(NUM_TURNS):
        with timed(times["bare"]):
            for batch in batches:
                conditioner.encode_images(batch)
        for name, how in (("ours", samples), ("with a worker", in_workers)):
            cache = LatentCache(caching.open_store(caching.cache_folder(settings) / f"{name} {turn}"))
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
    """Print the three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks/caches"))
    folder = parser.parse_args().folder.resolve()
    import torch

    from ds_flux import assemble, caching, checks, config, demo, runtime, trainer
    from ds_flux.data.images import load_batches

    shutil.rmtree(folder, ignore_errors=True)
    demo.main(["--output_dir", str(folder), "--autoencoder_steps", "20"])
    flags = ["--config", str(folder / "run.yaml"), "--deepspeed_config", "ds_configs/zero1.json"]
    flags += ["--cache_latents", "true", "--cache_text", "true", "--center_crop", "true", "--resolution", "64"]
    settings = config.load(flags, "benchmark", config.TrainCommand)[0]
    checks.check(settings)
    runtime.init()
    architecture = assemble.find_model(settings)
    inputs = assemble.look_at_data(settings, architecture)
    conditioner = assemble.build_conditioner(settings, architecture)
    compare_images(settings, conditioner, inputs.samples)
    before = rss_mib()
    cached, _ = caching.cache_latents(settings, conditioner, inputs.samples)
    caching.cache_text(settings, cached, inputs.source)
    print(f"memory: {before:.0f} MiB with the encoders, {rss_mib():.0f} MiB without")

    run = trainer.setup(settings)
    batches = load_batches(run.samples, run.schedule.micro_batches(0, 3 * NUM_STEPS))
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
