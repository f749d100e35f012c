"""Samples that cannot be used: left out on all ranks alike, named, bounded; and looked at alone by `doctor --data`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Assets, Done
from tests.distributed import metrics, run_jobs
from tests.test_errors import one_line

NUM = 40


def images_with(folder: Path, *bad: int) -> Path:
    """Coloured images, of which some are damaged in one way or another, or have no caption."""
    folder.mkdir()
    for number in range(NUM):
        path = folder / f"{number:02d}.png"
        Image.new("RGB", (40, 40), (6 * number, 255 - 6 * number, 99)).save(path)
        path.with_suffix(".txt").write_text("a handwritten one")
        if number in bad:
            damages = [
                lambda path=path: path.write_bytes(path.read_bytes()[:40]),
                lambda path=path: path.write_bytes(b""),
                lambda path=path: path.with_suffix(".txt").write_bytes(b"\xff\xfe\x00"),
            ]
            damages[bad.index(number) % 3]()
    return folder


def flags(assets: Assets, output_dir: Path, folder: Path, **changes: object) -> list[str]:
    own = dict(dataset_name=None, caption_column=None, instance_data_dir=folder, max_train_steps=5, max_bad_fraction=0.1)
    return assets.flags(output_dir, **{**own, **changes})


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process and two over the same data, live and from cached latents: forty samples, an epoch of five steps."""
    folder = tmp_path_factory.mktemp("skipped")
    images = images_with(folder / "images", 3, 17, 30)
    whole = flags(assets, folder / "one", images, train_batch_size=8, deepspeed_config=assets.ds_config(0))
    run_jobs(1, [whole], folder)
    two = dict(train_batch_size=4, deepspeed_config=assets.ds_config(3))
    more = dict(train_batch_size=2, gradient_accumulation_steps=2, deepspeed_config=assets.ds_config(3))
    cached = dict(two, cache_latents="true", center_crop="true", random_flip="false")
    live = dict(cached, cache_latents="false")
    jobs = [("two", two), ("more", more), ("cached", cached), ("live", live)]
    run_jobs(2, [flags(assets, folder / name, images, **changes) for name, changes in jobs], folder)
    return folder


@pytest.mark.parametrize("name, expected", [("two", "one"), ("more", "one"), ("cached", "live")])
def test_the_loss_is_the_mean_over_the_good_ones_whoever_has_them(folder: Path, name: str, expected: str) -> None:
    rows, wanted = metrics(folder / name), metrics(folder / expected)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted], rel=2e-5), key
    assert [row["num_images"] for row in rows] == [row["num_images"] for row in wanted]
    assert sum(row["num_images"] for row in rows) == NUM - 3


@pytest.mark.parametrize("name", ["one", "two", "more", "cached"])
def test_each_is_listed_once_with_its_reason(folder: Path, name: str) -> None:
    rows = [json.loads(line) for line in (folder / name / "skipped.jsonl").read_text().splitlines()]
    assert sorted(row["sample"] for row in rows) == [3, 17, 30]
    reasons = {row["sample"]: row["reason"] for row in rows}
    assert reasons[17] == "the file is empty" and "not UTF-8" in reasons[30] and reasons[3]
    assert all(row["name"].endswith(f"{row['sample']:02d}.png") for row in rows)


def test_a_run_says_so_stops_or_goes_on(assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    images = images_with(tmp_path / "images", 3, 17, 30)
    one = dict(train_batch_size=8, deepspeed_config=assets.ds_config(0))
    done = run_main("train", *flags(assets, tmp_path / "run", images, **one))
    assert done.status == 0 and "17.png cannot be used: the file is empty; it is left out" in done.errors
    assert "3 samples were left out: " in done.errors
    done = run_main("train", *flags(assets, tmp_path / "stop", images, **one, on_bad_sample="error"))
    one_line(done, "cannot be used: ")
    done = run_main("train", *flags(assets, tmp_path / "few", images, **{**one, "max_bad_fraction": 0.05}))
    one_line(done, "3 of 40 samples cannot be used, more than --max_bad_fraction 0.05")
    buckets = {**one, "max_bad_fraction": 0.01, "use_aspect_ratio_buckets": "true"}
    done = run_main("train", *flags(assets, tmp_path / "buckets", images, **buckets))
    one_line(done, "of 40 samples cannot be used (the first: ")
    assert not (tmp_path / "buckets").exists(), "the headers tell before the start"


def test_doctor_looks_at_the_data_alone(tmp_path: Path, run_main: Callable[..., Done]) -> None:
    images = images_with(tmp_path / "images", 3, 17, 30)
    done = run_main("doctor", "--data", "--instance_data_dir", images)
    assert done.status == 2, done.output
    assert "40 samples, 0 references, 3 that cannot be used" in done.output
    assert "17.png cannot be used: the file is empty" in done.output and "37 x 40x40" in done.output
    done = run_main("doctor", "--data", "--instance_data_dir", images, "--max_bad_fraction", 0.1)
    assert done.status == 0 and "a run would leave these out" in done.output
    one_line(run_main("doctor", "--data", "--instance_data_dir", tmp_path / "nowhere"), "no such folder")
