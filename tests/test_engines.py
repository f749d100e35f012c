"""Partitioned loading, the text engine, a run that is stopped, and a small model that learns four images by heart."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import Assets
from tests.distributed import ROOT, environment, launch, launch_command, metrics, run_jobs
from tests.test_progress import check_nobody_else_speaks


def test_loading_text_engine_and_agreement(assets: Assets, tmp_path: Path) -> None:
    """Two ranks: weights equal the file's; T5 in its engine equals T5 whole, with and without offload; errors are shared."""
    offloaded = assets.folder / "text_offload.json"
    offload = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    offloaded.write_text(json.dumps({"zero_optimization": offload}))
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    configs = {"plain": assets.ds_config(3), "offload": str(offloaded)}
    jobs = [
        {"function": "tests.workers:text_engine_equals_whole", "args": [str(assets.model), config, str(tmp_path / name)]}
        for name, config in configs.items()
    ]
    folder = str(assets.model / "transformer")
    jobs.append({"function": "tests.workers:partitioned_weights_equal_file", "args": [folder, zero]})
    jobs.append({"function": "tests.workers:ranks_fail_together", "args": []})
    run_jobs(2, jobs, tmp_path)
    for name in configs:
        assert torch.load(tmp_path / name).item() == 0.0


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    """Start a run on two ranks, in a process group of its own, as a terminal would."""
    with log.open("w") as file:
        return subprocess.Popen(
            launch_command(2, "ds_flux", "train", *arguments),
            cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, log: Path, limit_s: float = 90) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return next(child for child in children if f"--local_rank={rank}" in child.cmdline())


@pytest.mark.timeout(240)
def test_a_stopped_run_is_saved_and_goes_on(assets: Assets, tmp_path: Path) -> None:
    """SIGTERM to one rank, then Ctrl-C to a resumed run: each time all ranks save and leave; `latest` finishes the run."""
    run, log = tmp_path / "run", tmp_path / "log"

    def has_steps(number: int) -> Callable[[], bool]:
        return lambda: (run / "logs/metrics.jsonl").exists() and len(metrics(run)) >= number

    flags = {"max_train_steps": 400, "checkpointing_steps": 1000, "checkpoints_total_limit": 1}
    process = start(assets.flags(run, **flags), log)
    wait_until(has_steps(3), process, log)
    rank_process(process, 1).send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    first = len(metrics(run))
    assert f"stopped by SIGTERM after step {first}: " in log.read_text()
    assert (run / f"checkpoint-{first}/ds_flux.json").exists()

    process = start(assets.flags(run, resume_from_checkpoint="latest", **flags), log)
    wait_until(has_steps(first + 3), process, log)
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: "stopped by SIGINT after step" in log.read_text(), process, log)
    assert process.wait(timeout=60) != 0
    second = len(metrics(run))
    wait_until(lambda: [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{second}"], process, log)

    flags["max_train_steps"] = second + 2
    flags |= {"validation_prompt": "a handwritten one", "num_validation_inference_steps": 1}
    done = launch(2, "ds_flux", "train", *assets.flags(run, resume_from_checkpoint="latest", **flags))
    assert done.returncode == 0, done.stderr[-3000:]
    check_nobody_else_speaks(done.stderr)
    of_the_launcher = ("[launch.py:", "[runner.py:")
    assert all(any(mark in line for mark in of_the_launcher) for line in done.stdout.splitlines()), done.stdout
    assert [row["step"] for row in metrics(run)] == list(range(1, second + 3))
    assert [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{second + 2}"]
