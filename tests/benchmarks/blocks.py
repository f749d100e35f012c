"""CPU time of a step and peak memory of a rank with each way to treat the blocks, beside none of them.

    python -m tests.benchmarks.blocks [--repeats 2] [--steps 6] [--folder out/benchmarks]

The model and the two ranks of `train_loop`.  All ways take turns, so that a noisy neighbour meets each.
"""

import argparse
import shutil
import time
from pathlib import Path

from tests.benchmarks import assets
from tests.benchmarks.train_loop import worst_rank
from tests.distributed import launch

WAYS = {
    "plain": [],
    "compiled": ["--compile=true"],
    "checkpointed": ["--gradient_checkpointing=true"],
    "every second block": ["--gradient_checkpointing=true", "--gradient_checkpointing_every=2"],
    "checkpointed and compiled": ["--gradient_checkpointing=true", "--compile=true"],
}


def main() -> None:
    """Print the best of each way, and its ratio to the plain one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way, flags in WAYS.items():
            out = folder / f"blocks-{time.time_ns()}"
            job = ("rank", "ours", str(folder), str(options.steps), str(out), *flags)
            done = launch(2, "tests.benchmarks.train_loop", *job, timeout_s=900)
            assert done.returncode == 0, done.stderr[-3000:]
            found[way].append(worst_rank(out))
            shutil.rmtree(f"{out}-run")
    plain = {key: min(row[key] for row in found["plain"]) for key in ("step_s", "peak_gib")}
    for way, rows in found.items():
        best = {key: min(row[key] for row in rows) for key in plain}
        ratios = ", ".join(f"{key} {best[key]:.2f} ({best[key] / plain[key]:.2f})" for key in plain)
        print(f"{way:26} {ratios}; first step {min(row['first_step_s'] for row in rows):.0f} s")


if __name__ == "__main__":
    main()
