"""Partitioned loading, the text engine, a run that is stopped, and a small model that learns four images by heart."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from ds_flux import demo
from ds_flux.consolidate import main as consolidate_command
from tests.conftest import Assets, Done
from tests.distributed import ROOT, environment, launch, launch_command, metrics, run_jobs


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
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
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
    done = launch(2, "ds_flux", "train", *assets.flags(run, resume_from_checkpoint="latest", **flags))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in metrics(run)] == list(range(1, second + 3))
    assert [path.name for path in run.glob("checkpoint-*")] == [f"checkpoint-{second + 2}"]


@pytest.mark.timeout(300)
def test_four_images_for_four_prompts(assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    """A model trained on four images gives each back for its prompt, through the stock pipeline and through our own."""
    images, labels = demo.digits()
    chosen = [labels.index(digit) for digit in (0, 1, 4, 7)]
    prompts = [demo.caption(labels[i]) for i in chosen]
    (tmp_path / "data").mkdir()
    for copy in range(8):  # each image eight times, for larger batches
        for i in chosen:
            images[i].save(tmp_path / f"data/{copy}-{i}.png")
            (tmp_path / f"data/{copy}-{i}.txt").write_text(demo.caption(labels[i]))
    flags = {
        "dataset_name": None, "caption_column": None, "instance_data_dir": tmp_path / "data", "random_flip": None,
        "proportion_empty_prompts": None, "text_encoder_2_dropout": None, "train_batch_size": 16, "max_train_steps": 220,
        "learning_rate": 1e-2, "lr_warmup_steps": 20, "checkpointing_steps": 1000,
    }  # fmt: skip
    done = launch(2, "ds_flux", "train", *assets.flags(tmp_path / "run", **flags))
    assert done.returncode == 0, done.stderr[-3000:]
    assert consolidate_command([str(tmp_path / "run"), str(tmp_path / "transformer"), "--dtype", "fp32"]) == 0

    expected = np.stack([np.array(images[i]) for i in chosen]) / 255
    transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    pipeline = FluxPipeline.from_pretrained(assets.model, transformer=transformer)
    size = {"height": 32, "width": 32, "num_inference_steps": 20, "max_sequence_length": 8}
    stock = pipeline(prompts, **size, generator=torch.Generator().manual_seed(0), output_type="np").images
    check_each_is_nearest_to_its_own(stock, expected)

    command = ["--pretrained_model_name_or_path", assets.model, "--transformer", tmp_path / "transformer"]
    command += ["--prompt", json.dumps(prompts), "--resolution", 32, "--max_sequence_length", 8]
    command += ["--mixed_precision", "no", "--sample_dir", tmp_path / "samples", "--num_inference_steps", 20]
    done = run_main("sample", *command)
    assert done.status == 0, done.errors
    from PIL import Image

    ours = np.stack([np.array(Image.open(path)) for path in sorted((tmp_path / "samples").iterdir())]) / 255
    check_each_is_nearest_to_its_own(ours, expected)
    sharded = [str(word) for word in command[:-4]] + ["--sample_dir", str(tmp_path / "sharded"), *map(str, command[-2:])]
    done = launch(2, "ds_flux", "sample", *sharded)
    assert done.returncode == 0, done.stderr[-3000:]
    again = np.stack([np.array(Image.open(path)) for path in sorted((tmp_path / "sharded").iterdir())]) / 255
    assert np.abs(again - ours).max() <= 2 / 255


def check_each_is_nearest_to_its_own(made: np.ndarray, expected: np.ndarray) -> None:
    distance = np.square(made[:, None] - expected[None]).mean(axis=(2, 3, 4))  # (made, expected)
    assert distance.argmin(axis=1).tolist() == list(range(len(expected))), distance
    assert distance.diagonal().max() < 0.02, distance
