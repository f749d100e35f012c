"""Planned beside measured peak memory of a rank: stages, offload, full and LoRA, with and without gradient checkpointing.

    python -m tests.benchmarks.plan [--folder out/benchmarks] [--steps 3] [--only zero3 ...]

Each cell is `ds-flux train` on two gloo ranks of one thread with the benchmarks' model of 160 million weights, bf16.  The
device is the CPU, so what the plan has on the GPU, pinned and pageable adds up.  Measured: the operating system's own peak of
the rank that has most, less what the same process had after a run of a very small model, with code and kernels loaded.  Every
buffer from 64 KiB on is mapped by itself: what is compared is tensors, without the holes in glibc's heap (0.05 to 0.15 GiB
here).  Last, how long the plans of the released models take.
"""

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.benchmarks import assets
from tests.benchmarks.load_memory import status_bytes
from tests.distributed import ROOT, launch

CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload_optimizer", "zero3_offload")
MAPPED_BYTES = 1 << 16
TINY = {"_class_name": "FluxTransformer2DModel", **assets.TRANSFORMER, "num_layers": 1, "num_single_layers": 1}
TINY |= {"num_attention_heads": 1}


def cell_flags(folder: Path, config: str, own: list[str], num_steps: int) -> list[str]:
    """Of `ds-flux train`."""
    flags = [flag for flag in assets.flags(folder, folder / "plan-run", num_steps) if not flag.startswith("--deepspeed_config")]
    return [*flags, f"--deepspeed_config={ROOT / f'ds_configs/{config}.json'}", "--save_nothing=true", *own]


def rank(path: str) -> None:
    """One rank of a cell: warm up on the very small model, then measure; rank 0 prints the peak of both."""
    import torch

    from ds_flux import commands, config, runtime, trainer

    runtime.keep_heap_small = partial(runtime.keep_heap_small, MAPPED_BYTES)
    warm_up, measured = (
        config.load(argv, "benchmark", commands.TrainCommand)[0] for argv in json.loads(Path(path).read_text())
    )
    trainer.train(warm_up)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.train(measured)
    peak = runtime.all_reduce_max(torch.tensor([(status_bytes("VmHWM") - before) / 2**20]))
    if runtime.rank() == 0:
        print(f"peak {peak.item()}", flush=True)
    runtime.shutdown()


def measured_gib(folder: Path, flags: list[str]) -> float:
    """The peak of one cell."""
    tiny, jobs = folder / "plan-tiny.json", folder / "plan-jobs.json"
    tiny.write_text(json.dumps(TINY))
    jobs.write_text(json.dumps([[*flags, "--from_scratch=true", f"--transformer_config={tiny}"], flags]))
    done = launch(2, "tests.benchmarks.plan", "rank", str(jobs), timeout_s=900)
    peaks = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak ")]
    assert done.returncode == 0 and peaks, done.stderr[-3000:]
    return peaks[0] / 2**10


def planned_gib(flags: list[str]) -> float:
    """What the plan says of it."""
    from ds_flux import commands, config, outline
    from ds_flux.plan import GIB, Machine, Planner, Setting

    settings, _ = config.load(flags, "benchmark", commands.TrainCommand)
    much = float("inf")
    machine = Machine(num_nodes=1, gpus_per_node=2, gpu_bytes=much, host_bytes=much, nvme_bytes=much, device_is_host=True)
    row = Planner(settings, outline.draw(settings), machine).row(Setting.of(settings))
    return (row.device_bytes + row.host_bytes) / GIB


def seconds_of_plan(name: str) -> float:
    """CPU time of the whole process that plans a released model without its weights."""
    recipe = ["--config", ROOT / "launch/recipes/flux1_dev_full.yaml", "--from_scratch", "--ds_configs", ROOT / "ds_configs"]
    machine = ["--transformer_config", name, "--num_gpus", "8", "--gpu_memory_gib", "80"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "ds_flux", "plan", *recipe, *machine], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a line for each cell, the worst of them, and how long plans take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=CONFIGS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    worst = 0.0
    for config in options.only:
        for kind, rank in {"full": [], "LoRA": ["--rank=16"]}.items():
            for checkpointing in ("false", "true"):
                own = [*rank, f"--gradient_checkpointing={checkpointing}"]
                flags = cell_flags(folder, config, own, options.steps)
                planned = planned_gib(flags)
                measured = measured_gib(folder, flags)
                worst = max(worst, abs(planned / measured - 1))
                print(
                    f"{config:24} {kind:5} checkpointing {checkpointing:6} measured {measured:6.3f} GiB  planned {planned:6.3f}"
                    f" {100 * (planned / measured - 1):+5.1f} %",
                    flush=True,
                )
    print(f"worst: {100 * worst:.1f} %")
    for name in ("dev", "flux2-dev"):
        print(f"plan of {name}: {seconds_of_plan(name):.1f} s of CPU time")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if words[:1] == ["rank"]:
        rank(words[1])
    else:
        main()
