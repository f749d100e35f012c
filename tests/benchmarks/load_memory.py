"""Peak memory of a rank while it loads its slice of a transformer, by the operating system's count.

    python -m tests.benchmarks.load_memory [--ranks 2] [--folder out/benchmarks]

The bar: the rank's share, the largest tensor, and 15 % of both.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

from tests.benchmarks import assets
from tests.distributed import launch


def status_bytes(field: str) -> int:
    """A memory field of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load_on_this_rank(folder: Path) -> None:
    """Load in bf16 from fp32 files, partitioned, and print peak and bar from every rank."""
    from diffusers import FluxTransformer2DModel

    from ds_flux import runtime
    from ds_flux.zero.weights import SafetensorsFolder, fill_module

    runtime.init()
    with torch.device("meta"):
        module = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(folder / "model/transformer"))
    source = SafetensorsFolder(folder / "model/transformer", "diffusion_pytorch_model")
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    fill_module(module, source, torch.bfloat16, ds_config)
    peak = status_bytes("VmHWM") - before
    numels = [math.prod(entry.shape) for entry in source.entries.values()]
    share, largest = sum(numels) * 2 / runtime.world_size(), max(numels) * 2
    print(
        f"rank {runtime.rank()}: peak {peak / 1e6:.0f} MB; share {share / 1e6:.0f} MB + largest tensor {largest / 1e6:.0f} MB "
        f"-> {peak / (share + largest):.2f} (bar 1.15; the whole model has {sum(numels) * 2 / 1e6:.0f} MB)",
        flush=True,
    )


def main() -> None:
    """Launch the ranks and show their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    done = launch(options.ranks, "tests.benchmarks.load_memory", "rank", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("rank")))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if words[:1] == ["rank"]:
        load_on_this_rank(Path(words[1]))
    else:
        main()
