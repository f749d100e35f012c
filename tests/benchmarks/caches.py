"""What caches cost and save, with the demo's model and its 1,797 digits, in one process.

    python -m tests.benchmarks.caches [--folder out/benchmarks/caches]

- how long a cached batch takes to be ready, beside a training step;
- how fast precompute is, beside the bare encoders on the same inputs in the same order;
- how much memory goes back when the encoders are let go.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
NUM_STEPS = 20


def rss_mib() -> float:
    """Anonymous memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def main() -> None:
    """Print the three figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks/caches"))
    folder = parser.parse_args().folder.resolve()
    import torch

    from ds_flux import assemble, caching, checks, commands, config, demo, inputs, runtime, trainer
    from ds_flux.data.images import Batches
    from ds_flux.run import setup

    shutil.rmtree(folder, ignore_errors=True)
    demo.main(["--output_dir", str(folder), "--autoencoder_steps", "20"])
    flags = ["--config", str(folder / "run.yaml"), "--deepspeed_config", "ds_configs/zero1.json"]
    flags += ["--cache_latents", "true", "--cache_text", "true", "--center_crop", "true"]
    settings = config.load(flags, "benchmark", commands.TrainCommand)[0]
    checks.check(settings)
    runtime.init()
    architecture = assemble.find_model(settings)
    data = inputs.look_at_data(settings, architecture)
    conditioner = assemble.build_conditioner(settings, architecture)

    began_s = time.perf_counter()
    for sample in range(len(data.source)):
        pixels, *_ = data.samples.images((sample, 0))
    decoding_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    for _ in range(len(data.source)):
        conditioner.encode_images((pixels[0][None],))
    bare_s = time.perf_counter() - began_s
    before = rss_mib()
    began_s = time.perf_counter()
    cached, samples = caching.cache_latents(settings, conditioner, data.samples)
    ours_s = time.perf_counter() - began_s
    print(
        f"images: precompute {ours_s:.2f} s, the bare autoencoder {bare_s:.2f} s and decoding {decoding_s:.2f} s: "
        f"{bare_s / ours_s:.2f} of the bare encoder's speed, {(bare_s + decoding_s) / ours_s:.2f} of both"
    )
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
