"""What clusters do to a run: losses that are not finite, signals, requests by file, ranks that fail alone."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from ds_flux import UserError, checkpoint
from tests.benchmarks import kills
from tests.conftest import Assets
from tests.distributed import launch, launch_command, metrics, run_jobs
from tests.test_caching_ends import started, wait_for
from tests.test_engines import rank_process
from tests.test_errors import RunMain, one_line

STAGES = {"0": (0, False), "1": (1, False), "2": (2, True), "3": (3, False), "3 offload": (3, True)}
PRECISIONS = ("no", "bf16")
BAD = 5  # the sample whose latents are not finite


@pytest.fixture(scope="module")
def poisoned(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the latents of one image are not finite, and runs at every stage that meet it on one of two ranks."""
    folder = tmp_path_factory.mktemp("poisoned")
    own = dict(cache_latents="true", cache_dir=folder / "cache", center_crop="true", random_flip=None, train_batch_size=4)
    fills = [
        assets.flags(folder / f"fill {one}", **{**own, "mixed_precision": one, "max_train_steps": 1}) for one in PRECISIONS
    ]
    run_jobs(1, [*fills, *({"function": "tests.workers:poison", "args": [fill, [BAD]]} for fill in fills)], folder)
    runs = {name: assets.ds_config(stage, offload) for name, (stage, offload) in STAGES.items()}
    jobs = [assets.flags(folder / name, **own, deepspeed_config=path) for name, path in runs.items()]
    run_jobs(2, [*jobs, assets.flags(folder / "bf16", **{**own, "mixed_precision": "bf16"})], folder)
    return folder


@pytest.mark.parametrize("name", [*STAGES, "bf16"])
def test_a_step_that_is_not_finite_is_not_taken(poisoned: Path, name: str) -> None:
    """Twice in two epochs; the others go on with the weights and the learning rate they would have had."""
    rows = metrics(poisoned / name)
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert len(rows) == 6 and len(skipped) == 2 and skipped[0] <= 3 < skipped[1]
    assert [row["loss"] for row in rows if row["skipped"]] == [None, None]
    assert [row["lr"] for row in rows if row["step"] == skipped[0] + 1] == [rows[skipped[0] - 1]["lr"]]
    if name != "bf16":
        for key in ("loss", "grad_norm"):
            expected = [row[key] for row in metrics(poisoned / "0") if not row["skipped"]]
            assert [row[key] for row in rows if not row["skipped"]] == pytest.approx(expected, rel=2e-5), key


def test_steps_that_are_never_finite_end_the_run(poisoned: Path, assets: Assets, tmp_path: Path) -> None:
    own = dict(cache_latents="true", cache_dir=poisoned / "cache", center_crop="true", random_flip=None, max_skipped_steps=2)
    flags = assets.flags(tmp_path / "run", **own)
    run_jobs(1, [{"function": "tests.workers:poison", "args": [flags, list(range(24))]}], tmp_path)
    done = launch(2, "ds_flux", "train", *flags)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ds-flux:")]
    assert any("step 1 was not taken: the loss is nan (not finite for row" in line and "and 3 more" in line for line in lines)
    assert (
        "ds-flux: error: 2 steps in a row were not finite (--max_skipped_steps): the weights are those of step 0" in lines[-1]
    )
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_comes_to_the_same_weights(assets: Assets, tmp_path: Path) -> None:
    """Inside saves and between them; the long form is tests/benchmarks/kills.py."""
    own = dict(max_train_steps=10, checkpointing_steps=2, checkpoints_total_limit=2)
    flags = {name: assets.flags(tmp_path / name, **own) for name in ("undisturbed", "killed")}
    kills.survive(flags["undisturbed"], tmp_path / "undisturbed", 0, seed=0)
    assert sum(kills.survive(flags["killed"], tmp_path / "killed", 3, seed=0).values()) == 3
    assert kills.weights(tmp_path / "killed", 10) == kills.weights(tmp_path / "undisturbed", 10)
    left = {path.name for path in (tmp_path / "killed").glob("checkpoint-*")}
    assert left == {"checkpoint-8", "checkpoint-10"}


@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_disk_that_fills_up(assets: Assets, small_disk: Path, tmp_path: Path, in_background: str) -> None:
    """One checkpoint fits: the second is not written, the first stays, training goes on to its end, which then fails."""
    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    own = dict(max_train_steps=4, checkpointing_steps=2, save_in_background=in_background)
    done = launch(2, "ds_flux", "train", *assets.flags(small_disk / "run", **own))
    assert len(metrics(small_disk / "run")) == 4
    assert "checkpoint-4 could not be written: it takes 0.00" in done.stderr and "the checkpoints before it stay" in done.stderr
    assert done.returncode != 0 and "ds-flux: error: checkpoint-4 could not be written" in done.stderr
    assert [path.name for path in (small_disk / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    subprocess.run(["mount", "-o", "remount,size=9m", small_disk], check=True)
    again = launch(2, "ds_flux", "train", *assets.flags(small_disk / "run", **own, resume_from_checkpoint="latest"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert (small_disk / "run/checkpoint-4/ds_flux.json").exists()


def test_a_disk_that_is_full_to_the_last_byte(assets: Assets, small_disk: Path) -> None:
    """Neither figures nor the checkpoint can be written: training goes on to its end, and says so."""
    with started(launch_command(2, "ds_flux", "train", *assets.flags(small_disk / "run", max_train_steps=60))) as process:
        wait_for(small_disk / "run", "logs/metrics.jsonl", process)
        with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
            file.write(bytes(4096))
        _, errors = process.communicate(timeout=200)
    assert errors.count("the figures cannot be written: No space left on device; training goes on") == 1
    assert process.returncode != 0 and "ds-flux: error: checkpoint-60 could not be written: " in errors
    assert "ds_flux/" not in errors.replace(str(small_disk), ""), "the one traceback is of TensorBoard's own thread"


def test_a_folder_that_cannot_be_written(assets: Assets, small_disk: Path, run_main: RunMain) -> None:
    """At the start it ends the run; a checkpoint that cannot be begun does not touch what is there."""
    (small_disk / "checkpoint-2.partial").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = run_main("train", *assets.flags(small_disk / "run", deepspeed_config=assets.ds_config(0)))
    one_line(done, "run cannot be written: Read-only file system")
    with pytest.raises(UserError, match="disk cannot be written: Read-only file system"):
        checkpoint.make_anew(small_disk / "checkpoint-2.partial")
    assert (small_disk / "checkpoint-2.partial").is_dir()


def test_requests_by_file_and_signal(assets: Assets, tmp_path: Path) -> None:
    """`save` goes on, `stop` ends the run with status 0 and the command that resumes it; SIGUSR1 to one rank does the same."""
    flags = assets.flags(tmp_path / "run", max_train_steps=9000, checkpointing_steps=9000, checkpoints_total_limit=9)
    with started(launch_command(2, "ds_flux", "train", *flags)) as process:
        wait_for(tmp_path / "run", "logs/metrics.jsonl", process)
        (tmp_path / "run/save").touch()
        wait_for(tmp_path / "run", "checkpoint-*/ds_flux.json", process)
        (tmp_path / "run/stop").touch()
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert not (tmp_path / "run/save").exists() and not (tmp_path / "run/stop").exists()
    line = next(line for line in errors.splitlines() if "stopped by the file stop after step" in line)
    assert line.endswith(" --resume_from_checkpoint latest") and "deepspeed [...] --module ds_flux train --pretrained" in line
    with started(launch_command(2, "ds_flux", "train", *flags, "--resume_from_checkpoint", "latest")) as process:
        assert process.stderr
        while "training all weights" not in (said := process.stderr.readline()):
            assert said
        rank_process(process, 1).send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and "stopped by SIGUSR1 after step" in errors


LONE_FAULTS = {
    "memory": "rank 1 ran out of memory",
    "bug": "a fault of the program",
    "image": "a fault of the pipeline",
}


@pytest.mark.parametrize(("kind", "message"), LONE_FAULTS.items())
def test_a_rank_that_fails_alone_ends_all(assets: Assets, tmp_path: Path, kind: str, message: str) -> None:
    """With its own words; where it is memory, with what to do."""
    flags = {"validation_prompt": "zero", "validation_steps": 2} if kind == "image" else {}
    job = {"function": "tests.workers:fails_alone", "args": [assets.flags(tmp_path / "run", **flags), kind]}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    done = launch(2, "tests.distributed", str(tmp_path / "jobs.json"), timeout_s=200)
    assert done.returncode != 0 and message in done.stderr, done.stderr[-3000:]
    if kind == "memory":
        assert "Traceback" not in done.stderr
        advice = next(line for line in done.stderr.splitlines() if message in line)
        assert re.search(r"planned were [\d.e-]+ GiB .*; --deepspeed_config .* would take [\d.e-]+ GiB", advice), advice
        assert "`ds-flux plan`" in advice
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_answers_no_longer_is_named(assets: Assets, tmp_path: Path, number: int) -> None:
    flags = assets.flags(tmp_path / "run", max_train_steps=4000, timeout_s=5)
    with started(launch_command(2, "ds_flux", "train", *flags)) as process:
        wait_for(tmp_path / "run", "logs/metrics.jsonl", process)
        rank_process(process, 1).send_signal(number)
        _, errors = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "ds-flux: error: rank 1 of 2 does not answer any more" in errors, errors[-3000:]
    assert "Traceback" not in errors
