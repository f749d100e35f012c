"""How long training stands still for a checkpoint, written in the background and not; and how many bytes it has.

    python -m tests.benchmarks.saving [--folder out/benchmarks]

Two ranks under ZeRO-3 hold a transformer of about 160 million weights, in bf16 with fp32 Adam.  Both ways take turns, with
steps between them; a step's time while a checkpoint is being written is given beside that of one without.
"""

import argparse
import json
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

from tests.benchmarks import assets
from tests.distributed import launch

NUM_TURNS, NUM_STEPS = 3, 3


def measure(argv: list[str], path: str) -> None:
    """On each rank: stalls and steps in s, by way; rank 0 writes them."""
    from ds_flux import checkpoint, commands, config, runtime, trainer
    from ds_flux.data.images import Batches
    from ds_flux.run import setup
    from ds_flux.zero.weights import num_elements

    run = setup(config.load(argv, "benchmark", commands.TrainCommand)[0])
    output_dir = Path(run.config.run.output_dir)
    batches = Batches(run.samples, run.schedule.micro_batches(0, run.last_step))
    savers = {way: checkpoint.Saver(output_dir / way, run.disk, 1, way == "background") for way in ("background", "at once")}
    stalls, steps = ({way: [] for way in (*savers, "none")} for _ in range(2))

    def step(way: str) -> None:
        began_s = time.perf_counter()
        trainer.train_step(run, batches)
        steps[way].append(time.perf_counter() - began_s)

    step("none")
    steps["none"].clear()
    for turn in range(NUM_TURNS):
        for way, saver in savers.items():
            for _ in range(NUM_STEPS):
                step("none")
            runtime.barrier()
            began_s = time.perf_counter()
            saver.save(run.engine, replace(run.manifest, step=turn + 1))
            stalls[way].append(time.perf_counter() - began_s)
            while saver.writing and len(steps[way]) < (turn + 1) * NUM_STEPS:
                step(way)
                saver.poll()
            saver.finish()
    if runtime.rank() == 0:
        folder = output_dir / "at once" / f"checkpoint-{NUM_TURNS}"
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        trained = sum(num_elements(p) for p in run.engine.module.parameters() if p.requires_grad)
        Path(path).write_text(json.dumps({"stalls": stalls, "steps": steps, "num_bytes": num_bytes, "trained": trained}))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    args = parser.parse_args()
    folder = args.folder.resolve()
    shutil.rmtree(folder / "saving", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    argv = assets.flags(folder, folder / "saving", 10 * NUM_TURNS * NUM_STEPS)
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([{"function": "tests.benchmarks.saving:measure", "args": [argv, str(folder / "found.json")]}]))
    done = launch(2, "tests.distributed", str(jobs), timeout_s=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    for way, stalls in found["stalls"].items():
        if stalls:
            print(f"{way:12} stands still {statistics.median(stalls):.2f} s; all: {', '.join(f'{one:.2f}' for one in stalls)}")
    for way, steps in found["steps"].items():
        if steps:
            print(f"{way:12} a step takes {statistics.median(steps):.2f} s while it is written")
    print(f"{found['num_bytes'] / 1e9:.3f} GB: {found['num_bytes'] / found['trained']:.2f} bytes for each trained weight")


if __name__ == "__main__":
    main()
