"""Run things in N gloo processes through the real `deepspeed` launcher, with a time limit.

As a module (`--module tests.distributed JOBS.json`) it is what the launcher starts: it runs several jobs one after another
in one process group, since starting two ranks costs about ten seconds.  A job is the argument list of `ds-flux train`, or
the name of a plain function as "module:function" with arguments.
"""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ds_flux.runtime import free_port

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """One thread for each rank, on the CPU, and no network."""
    quiet = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def launch_command(num_ranks: int, module: str, *args: str) -> list[str]:
    """The command line of the real launcher."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(num_ranks)]
    return [*launcher, "--master_port", str(free_port()), "--module", module, *args]


def launch(num_ranks: int, module: str, *args: str, timeout_s: int = 240) -> subprocess.CompletedProcess:
    """Run a module on every rank; returns when all have ended."""
    command = launch_command(num_ranks, module, *args)
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)


def run_jobs(num_ranks: int, jobs: list[Any], folder: Path, timeout_s: int = 240) -> None:
    """Run jobs in one launch; fails with the ranks' output unless every rank ended well."""
    path = folder / f"jobs-{num_ranks}.json"
    path.write_text(json.dumps(jobs))
    done = launch(num_ranks, "tests.distributed", str(path), timeout_s=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def metrics(output_dir: Path) -> list[dict[str, float]]:
    """The figures of each step of a run."""
    return [json.loads(line) for line in (output_dir / "logs/metrics.jsonl").read_text().splitlines()]


def main(path: str) -> None:
    """One rank of `run_jobs`."""
    from ds_flux import checks, commands, config, runtime, trainer

    runtime.init()
    for job in json.loads(Path(path).read_text()):
        faulthandler.dump_traceback_later(200, exit=True)
        if isinstance(job, dict):
            module, function = job["function"].split(":")
            getattr(importlib.import_module(module), function)(*job["args"])
            continue
        settings, _ = config.load(job, "ds-flux train", commands.TrainCommand)
        checks.check(settings)
        trainer.train(settings)
    runtime.shutdown()


if __name__ == "__main__":
    main(sys.argv[-1])
