"""Caches of a few steps at a time: the same losses as live, never more than two windows on disk, nothing left at the end."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from ds_flux.data.schedule import Schedule
from ds_flux.rolling import spans_of
from tests.conftest import Assets, Done
from tests.distributed import metrics, run_jobs
from tests.test_errors import RunMain, one_line

NUM_IMAGES, NUM_STEPS = 12, 6  # four images in each step, so two epochs
NUM_ITEMS = 10  # two steps
ROLLING = {"cache_latents": "true", "cache_text": "true", "precomputation_items": NUM_ITEMS}
WORDS = "zero one two three four five".split()

pytestmark = pytest.mark.timeout(600)  # several launches of two ranks


def write_images(folder: Path) -> Path:
    """Twice as wide as high: a crop matters; of tags: their order matters."""
    folder.mkdir()
    for number in range(NUM_IMAGES):
        noise = torch.rand(32, 64, 3, generator=torch.Generator().manual_seed(number))
        Image.fromarray((noise * 255).byte().numpy()).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a , handwritten , {WORDS[number % len(WORDS)]}")
    return folder


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live, rolling and wholly cached on one process; rolling on two, in one go and stopped in the middle of a window."""
    folder = tmp_path_factory.mktemp("rolling")
    own = dict(dataset_name=None, caption_column=None, instance_data_dir=write_images(folder / "images"))
    own |= dict(max_train_steps=NUM_STEPS, shuffle_tags="true", proportion_empty_prompts=0.2, text_encoder_2_dropout=0.3)

    def flags(name: str, **changes: object) -> list[str]:
        return assets.flags(folder / name, **{**own, "train_batch_size": 4, **changes})

    def looking(name: str, stop_after: int, **changes: object) -> dict[str, object]:
        argv = flags(name, **ROLLING, **changes)
        return {"function": "tests.workers:train_and_look", "args": [argv, str(folder / name / "cache"), stop_after]}

    latents_alone = flags("latents cached", cache_latents="true", deepspeed_config=assets.ds_config(0))
    told = looking("told to end", 2)
    run_jobs(1, [flags("live", deepspeed_config=assets.ds_config(0)), looking("on 1", 0), latents_alone, told], folder)
    two = dict(train_batch_size=1, gradient_accumulation_steps=2, dataloader_num_workers=1, cache_dir=folder / "shared")
    stopped = dict(train_batch_size=2)
    jobs = [flags("on 2", **two, **ROLLING), looking("stopped", 3, **stopped)]
    run_jobs(2, [*jobs, looking("stopped", 0, **stopped, resume_from_checkpoint="latest")], folder)
    return folder


@pytest.mark.parametrize("name", ["on 1", "on 2", "stopped"])
def test_rolling_is_as_live(folder: Path, name: str) -> None:
    rows, expected = metrics(folder / name), metrics(folder / "live")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=2e-5), key


def test_the_images_of_later_visits_are_others(folder: Path) -> None:
    """What is cached before the first step keeps the first visit's crop: so the losses above do tell."""
    losses = [[row["loss"] for row in metrics(folder / name)] for name in ("latents cached", "live")]
    assert losses[0][:3] == pytest.approx(losses[1][:3], rel=2e-5)
    assert losses[0][3:] != pytest.approx(losses[1][3:], rel=1e-3)


def looks(folder: Path) -> list[dict[str, int]]:
    """{file of the cache: its size} after each step."""
    return [json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]


def windows_of(look: dict[str, int]) -> list[int]:
    """The first steps of the windows that are there."""
    return sorted({int(name.split("after-step-")[1][:6]) for name in look})


def test_never_more_than_two_windows(folder: Path) -> None:
    assert [windows_of(look) for look in looks(folder / "on 1")] == [[0], [0], [0, 2], [0, 2], [2, 4], [2, 4]]
    sizes = [sum(look.values()) for look in looks(folder / "on 1")]
    assert max(sizes) < 2.5 * sizes[0]
    assert not [path for name in ("on 1/cache", "stopped/cache", "shared") for path in (folder / name).iterdir()]


def test_a_resumed_run_encodes_nothing_again(folder: Path) -> None:
    before, after = looks(folder / "stopped")[2:4]
    assert windows_of(before) == [0, 2]
    now = {name: size for name, size in after.items() if "after-step-000002" in name}
    assert now == {name: size for name, size in before.items() if "after-step-000002" in name}, "file names are drawn anew"


def test_a_signal_ends_the_encoding(folder: Path) -> None:
    """It comes after the last step of a window: the next one is not encoded to its end first."""
    assert (folder / "told to end/checkpoint-2/ds_flux.json").exists() and len(metrics(folder / "told to end")) == 2
    (next_window,) = (folder / "told to end/cache").glob("*/after-step-000002")
    assert not list((next_window / "latents").iterdir())


def test_a_disk_for_one_window(assets: Assets, small_disk: Path, tmp_path: Path, run_main: RunMain) -> None:
    """The window behind goes first when the next does not fit beside it; a window that does not fit at all ends the run."""
    subprocess.run(["mount", "-o", "remount,size=440k", small_disk], check=True)
    # latents and spread of each image take 32 KiB, so those of two windows of eight 512 KiB
    own = {**ROLLING, "resolution": 128, "vae_encode_mode": "sample", "max_train_steps": 6, "cache_dir": small_disk}
    own["deepspeed_config"] = assets.ds_config(0)
    done = run_main("train", *assets.flags(tmp_path / "run", **own))
    assert done.status == 0, done.errors
    assert "8 records will take about 0.000244 GiB" in done.errors
    assert len(metrics(tmp_path / "run")) == 6 and not list(small_disk.iterdir())
    done = run_main("train", *assets.flags(tmp_path / "too large", **{**own, "precomputation_items": 16}))
    one_line(done, "512.0 KiB are needed there, and the disk has")


def test_spans_are_whole_steps_of_every_rank() -> None:
    plan = dict(num_samples=20, seed=0, micro_batch_size=1, gradient_accumulation_steps=2, dp_size=2)
    schedules = [Schedule(**plan, dp_rank=rank) for rank in range(2)]
    for num_items, expected in ((4, 1), (3, 1), (9, 2), (100, 7)):
        spans = [list(spans_of(schedule, num_items, 7)) for schedule in schedules]
        assert max(len(span.steps) for span in spans[0]) == expected
        assert [span.first_step for span in spans[0]] == [span.first_step for span in spans[1]]
        assert spans[0][-1].last_step == 7
        micro_batches = [keys for span in spans[0] for step in span.steps for keys in step]
        assert micro_batches == list(schedules[0].micro_batches(0, 7))


def test_contradictions(assets: Assets, tmp_path: Path, run_main: RunMain) -> None:
    flags = assets.flags(tmp_path / "run", precomputation_items=8)
    one_line(run_main("train", *flags), "--precomputation_items has no effect without --cache_text or --cache_latents")
    done: Done = run_main("precompute", *flags, "--cache_text", "true")
    one_line(done, "--precomputation_items encodes while the run trains")
