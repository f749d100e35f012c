"""The validation loss: the same figure on any number of ranks at any stage, and no trace of it in the training."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

from ds_flux import UserError
from ds_flux.consolidate import consolidate
from ds_flux.data.sources import held_out, open_source
from ds_flux.sections import DataConfig
from ds_flux.validation import dealt, mid_points
from tests.conftest import NUM_IMAGES, Assets
from tests.distributed import metrics, run_jobs
from tests.pairs import Pairs
from tests.test_errors import one_line

FRACTION = {"validation_fraction": 0.3, "validation_steps": 2}
FEW = 3  # samples of the other data set: fewer than four ranks

# name: (ranks, stage, flags); all have eight images in a step
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "1 process, stage 0": (1, 0, {}),
    "1 process, stage 1, EMA": (1, 1, {"ema_decay": 0.5}),
    "2 processes, stage 1, live": (2, 1, {}),
    "2 processes, stage 2, cached": (2, 2, {"cache_text": "true"}),
    "2 processes, stage 3, EMA": (2, 3, {"ema_decay": 0.5}),
    "2 processes, stage 3, shared sequences": (2, 3, {"sequence_parallel": 2, "train_batch_size": 8}),
    "4 processes, stage 3": (4, 3, {}),
}


def rows_of(output_dir: Path) -> list[dict[str, float]]:
    return [row for row in metrics(output_dir) if "validation_loss" in row]


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, with and without validation where that is asked for, and a run that is stopped and resumed."""
    folder = tmp_path_factory.mktemp("validation")
    datasets.load_from_disk(str(assets.digits)).select(range(FEW)).save_to_disk(folder / "few")

    def job(name: str, ranks: int, stage: int, **flags: Any) -> list[str]:
        common = {"train_batch_size": 8 // ranks, "checkpointing_steps": 2, "max_train_steps": 4, **FRACTION, **flags}
        return assets.flags(folder / name, deepspeed_config=assets.ds_config(stage), **common)

    for ranks in (1, 2, 4):
        jobs = [job(name, ranks, stage, **flags) for name, (num, stage, flags) in CASES.items() if num == ranks]
        if ranks == 2:
            jobs.append(job("without", 2, 3, validation_fraction=None, validation_steps=None))
            jobs.append(job("with", 2, 3, validation_fraction=None, validation_dataset=folder / "few", ema_decay=0.5))
            resumed = {"resume_from_checkpoint": folder / "2 processes, stage 3, EMA/checkpoint-2", "ema_decay": 0.5}
            jobs.append(job("resumed", 2, 3, **resumed))
        if ranks == 4:
            few = {"validation_dataset": folder / "few", "validation_fraction": None, "validation_sigmas": 2}
            log = {"mlperf_log": folder / "log", "target_validation_loss": 100.0}
            jobs.append(job("few", 4, 3, **few, **log))
            each = {"validation_sigma_by_sample": "true"}
            jobs.append(job("each at one", 4, 3, **few, **each))
        run_jobs(ranks, jobs, folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_the_same_weights_give_the_same_figure(folder: Path, name: str) -> None:
    expected, got = rows_of(folder / "1 process, stage 0"), rows_of(folder / name)
    assert [row["step"] for row in got] == [0, 2, 4]
    sigmas = [f"validation_loss_by_sigma/{sigma:.4f}" for sigma in mid_points(8)]
    for key in ("validation_loss", *sigmas):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=2e-5), key
    for row in got:
        assert row["validation_loss"] == pytest.approx(sum(row[key] for key in sigmas) / 8, rel=1e-6)
    assert got[2]["validation_loss"] < got[0]["validation_loss"], "it learns something"


def test_averages_are_measured_too(folder: Path) -> None:
    alone, shared = (rows_of(folder / name) for name in ("1 process, stage 1, EMA", "2 processes, stage 3, EMA"))
    key = "validation_loss_ema"
    assert [row[key] for row in shared] == pytest.approx([row[key] for row in alone], rel=2e-5)
    assert shared[0][key] == pytest.approx(shared[0]["validation_loss"], rel=1e-6), "before the first step they are the weights"
    assert shared[2]["validation_loss"] < shared[2][key] < shared[0][key], "and then follow them"


def test_training_does_not_notice(folder: Path, tmp_path: Path) -> None:
    """Bit for bit, with the averages swapped in and out; and a run that is resumed measures what the other did."""
    weights = {}
    pairs = {"with": "without", "resumed": "2 processes, stage 3, EMA"}
    for name in (*pairs, *pairs.values()):
        consolidate(folder / name / "checkpoint-4", tmp_path / name, torch.float32, 10**9)
        weights[name] = load_file(tmp_path / name / "diffusion_pytorch_model.safetensors")
    for name, other in pairs.items():
        assert all(torch.equal(tensor, weights[other][key]) for key, tensor in weights[name].items()), name
    whole, resumed = rows_of(folder / "2 processes, stage 3, EMA"), rows_of(folder / "resumed")
    assert [row["step"] for row in resumed] == [4]
    assert resumed[0]["validation_loss"] == whole[2]["validation_loss"]
    assert resumed[0]["validation_loss_ema"] == whole[2]["validation_loss_ema"]


def test_fewer_samples_than_ranks_and_the_target_and_its_log(folder: Path) -> None:
    rows, each = rows_of(folder / "few"), rows_of(folder / "each at one")
    assert [row["step"] for row in rows] == [0, 2], "the target ends the run"
    assert (folder / "few/checkpoint-2").is_dir() and not (folder / "few/checkpoint-4").exists()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in (folder / "log").read_text().splitlines()]
    found = [(event["value"], event["metadata"]["samples_count"]) for event in events if event["key"] == "eval_accuracy"]
    assert found == [(row["validation_loss"], 8 * row["step"]) for row in rows]
    assert (events[-1]["key"], events[-1]["metadata"]["status"]) == ("run_stop", "success")
    assert [row["step"] for row in each] == [0, 2, 4]
    assert each[0]["validation_loss"] != rows[0]["validation_loss"]


def test_held_out_samples_stay_out(assets: Assets, tmp_path: Path) -> None:
    """Whatever else comes: a sample's name decides."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(40):
        for name in (f"{number}.png", f"{number}.txt"):
            (images / name).write_text("a")
    config = DataConfig(instance_data_dir=str(images))
    kept, out = held_out(open_source(config), 0.25)
    assert len(kept) + len(out) == 40 and 3 <= len(out) <= 17
    names = {Path(out.name(index)).name for index in range(len(out))}
    assert names.isdisjoint({Path(kept.name(index)).name for index in range(len(kept))})
    for number in range(40, 80):
        for name in (f"{number}.png", f"{number}.txt"):
            (images / name).write_text("a")
    moved = images.rename(tmp_path / "moved")
    config = DataConfig(instance_data_dir=str(moved))
    kept, out = held_out(open_source(config), 0.25)
    assert names <= {Path(out.name(index)).name for index in range(len(out))}
    with pytest.raises(UserError, match="holds 0 of 80 samples out"):
        held_out(open_source(config), 1e-9)


@pytest.mark.parametrize("sizes, size, dp_size", [([5], 2, 2), ([1, 7, 3], 2, 4), ([9], 1, 4), ([3], 8, 1)])
def test_every_sample_counts_once_on_some_rank(sizes: list[int], size: int, dp_size: int) -> None:
    numbers = iter(range(100))
    alike = [[next(numbers) for _ in range(count)] for count in sizes]
    ranks = [dealt(alike, size, dp_size, rank) for rank in range(dp_size)]
    assert len({tuple(len(samples) for samples, _ in batches) for batches in ranks}) == 1, "all ranks in step"
    counted = [s for batches in ranks for samples, fills in batches for s, fill in zip(samples, fills, strict=True) if fill]
    assert sorted(counted) == list(range(sum(sizes)))
    assert all(len({id(a) for a in alike for s in samples if s in a}) == 1 for batches in ranks for samples, _ in batches)


BAD = {
    "both": ({"validation_fraction": 0.5, "validation_dataset": "x"}, "contradict each other"),
    "steps without data": (
        {"validation_steps": 5},
        "--validation_steps has no effect without --validation_dataset, --validation_fraction or",
    ),
    "nowhere": ({"validation_dataset": "./nowhere"}, "nowhere"),
    "all": ({"validation_fraction": 0.9999999}, f"of {NUM_IMAGES} samples out"),
    "share": ({"validation_fraction": 1.5}, "--validation_fraction 1.5 is not between 0 and 1"),
    "no sigma": ({"validation_fraction": 0.5, "validation_sigmas": 0}, "--validation_sigmas 0 must be 1 or more"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_flags(assets: Assets, tmp_path: Path, run_main: Any, kind: str) -> None:
    flags, message = BAD[kind]
    one_line(run_main("train", *assets.flags(tmp_path / "run", **flags)), message)
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_sample_that_cannot_be_used_is_named_once(assets: Assets, tmp_path: Path, run_main: Any) -> None:
    images = tmp_path / "images"
    images.mkdir()
    rows = datasets.load_from_disk(str(assets.digits))
    for number in range(3):
        rows[number]["image"].save(images / f"{number}.png")
    (images / "broken.png").write_text("no image")
    own = {"dataset_name": None, "caption_column": None, "instance_data_dir": images, "instance_prompt": "a"}
    flags = {"validation_dataset": images, "validation_steps": 1, "max_train_steps": 2, "train_batch_size": 1}
    flags |= {"deepspeed_config": assets.ds_config(0), "max_bad_fraction": 0.5, "shard_text_encoder": "false"}
    done = run_main("train", *assets.flags(tmp_path / "run", **own, **flags))
    assert done.status == 0, done.errors
    assert done.errors.count("validation goes without a sample") == 1 and "broken.png" in done.errors
    assert len(rows_of(tmp_path / "run")) == 3


def test_editing_models_are_measured_with_their_references(pairs: Pairs, assets: Assets, tmp_path: Path, run_main: Any) -> None:
    """Of two shapes, and none."""
    flags = {"validation_fraction": 0.4, "max_train_steps": 1, "deepspeed_config": assets.ds_config(0), "train_batch_size": 2}
    done = run_main(
        "train", *pairs.flags("kontext", tmp_path / "run", **flags, text_encoder_deepspeed_config=assets.ds_config(3))
    )
    assert done.status == 0, done.errors
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1]
