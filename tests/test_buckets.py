"""Aspect buckets, several resolutions, and batches by tokens."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets, ladder, make_buckets
from ds_flux.data.schedule import Schedule
from ds_flux.data.shapes import Shapes, look_at_sizes
from ds_flux.data.sources import open_source
from tests.conftest import Assets, Done
from tests.distributed import metrics
from tests.pairs import dataset_of, rules_of
from tests.test_errors import one_line

SIZES = [(64, 64)] * 9 + [(96, 64)] * 8 + [(64, 128)] * 3 + [(200, 64)] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of four shapes, with captions."""
    (tmp_path / "images").mkdir()
    for number, size in enumerate(SIZES):
        Image.linear_gradient("L").resize(size).convert("RGB").save(tmp_path / f"images/{number:02d}.png")
        (tmp_path / f"images/{number:02d}.txt").write_text("a handwritten one")
    return tmp_path / "images"


def test_a_ladder_is_whole_tokens_and_never_larger_than_the_square() -> None:
    for resolution, grid in [(512, 16), (1024, 16), (32, 8)]:
        sizes = ladder(resolution, grid)
        assert (resolution, resolution) in sizes
        assert all(width % grid == height % grid == 0 and width * height <= resolution**2 for width, height in sizes)
        assert {(height, width) for width, height in sizes} == set(sizes), "wide ones as tall ones"
    assert len(ladder(1024, 16)) == 11


def test_the_nearest_shape_and_a_resolution_the_image_is_large_enough_for() -> None:
    buckets = make_buckets(DataConfig(resolution=[256, 512], use_aspect_ratio_buckets=True), 16)
    seen = {buckets.of((1500, 1000), (0, visit), seed=1) for visit in range(20)}
    assert seen == {(304, 208), (624, 416)}, "drawn anew for each visit"
    assert {buckets.of((300, 200), (0, visit), seed=1) for visit in range(20)} == {(304, 208)}
    assert buckets.of((1000, 1500), (0, 0), 1)[0] < buckets.of((1000, 1500), (0, 0), 1)[1]
    own = make_buckets(DataConfig(use_aspect_ratio_buckets=True, aspect_ratio_buckets="512,768;1024,256"), 16)
    assert own.of((300, 200), (0, 0), 0) == (768, 512) and own.of((10, 40), (0, 0), 0) == (256, 1024)
    for wrong in ("512", "512,500", "0,16", "a,b"):
        with pytest.raises(UserError, match="--aspect_ratio_buckets"):
            make_buckets(DataConfig(use_aspect_ratio_buckets=True, aspect_ratio_buckets=wrong), 16)


def test_what_the_headers_say_is_what_the_pixels_are(folder: Path) -> None:
    config = DataConfig(instance_data_dir=str(folder), resolution=[32, 64], use_aspect_ratio_buckets=True)
    source, rules = open_source(config), rules_of(config)
    images, *_ = look_at_sizes(source, config, rules)
    assert images == SIZES
    shapes, samples = Shapes(rules.buckets, images, [], [], 0), dataset_of(config)
    for key in [(sample, visit) for sample in range(len(SIZES)) for visit in range(3)]:
        width, height = shapes.of(key, config, 0, "text_encoder").image
        assert samples[key].images[0].shape == (3, height, width)


def test_tokens_decide_how_many_images_a_batch_has() -> None:
    """A quarter of the pixels, four times the images; on any number of ranks the same global batches."""
    buckets = Buckets({16: ((16, 16),), 32: ((32, 32),)})
    images = [(16, 16)] * 40 + [(32, 32)] * 40

    def size_of(shape: object) -> int:
        return 16 // shape.num_tokens(8)  # type: ignore[attr-defined]

    config = DataConfig()
    shapes = Shapes(buckets, images, [], [], 0)
    plans = {}
    for ranks in (1, 2):
        plan = dict(num_samples=80, seed=0, micro_batch_size=1, gradient_accumulation_steps=2 // ranks, dp_size=ranks)
        steps: list[list[tuple[int, int]]] = [[] for _ in range(30)]
        for rank in range(ranks):
            shape_of = partial(shapes.of, config=config, seed=0, encoder="text_encoder")
            schedule = Schedule(**plan, dp_rank=rank, shape_of=shape_of, micro_batch_size_of=size_of)
            for number, keys in enumerate(schedule.micro_batches(0, 30)):
                steps[number // (2 // ranks)] += keys
        plans[ranks] = steps
    assert [sorted(step) for step in plans[1]] == [sorted(step) for step in plans[2]]
    for step in plans[1]:
        kinds = {shapes.of(key, config, 0, "text_encoder").image for key in step}
        assert len(kinds) == 1 and len(step) == {16: 8, 32: 2}[kinds.pop()[0]]


def test_a_run_in_buckets(assets: Assets, folder: Path, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    """Losses, images per step that follow the tokens, a shape that is too rare named; the same after a resume."""
    own = {
        "dataset_name": None,
        "caption_column": None,
        "instance_data_dir": folder,
        "use_aspect_ratio_buckets": "true",
        "train_batch_size": None,
        "tokens_per_batch": 48,
        "max_train_steps": 6,
        "timestep_shift": "resolution",
        "deepspeed_config": assets.ds_config(0),
        "checkpointing_steps": 3,
    }
    done = run_main("train", *assets.flags(tmp_path / "run", **own), "--dry_run")
    assert done.status == 0 and "24 images in 4 shapes" in done.output and "9 x 32x32" in done.output, done.output[-500:]
    done = run_main("train", *assets.flags(tmp_path / "run", **own))
    assert done.status == 0, done.errors
    rows = metrics(tmp_path / "run")
    assert {row["num_images"] for row in rows} <= {3, 4, 6} and len({row["num_images"] for row in rows}) > 1
    more = {**own, "resume_from_checkpoint": tmp_path / "run/checkpoint-3"}
    done = run_main("train", *assets.flags(tmp_path / "again", **more))
    assert done.status == 0, done.errors
    assert [row["loss"] for row in metrics(tmp_path / "again")] == [row["loss"] for row in rows[3:]]
    rare = {**own, "tokens_per_batch": 200, "max_train_steps": 2}
    done = run_main("train", *assets.flags(tmp_path / "rare", **rare))
    assert "3 of 24 samples have the shape 24x40: a step takes 13, so this run never trains on them" in done.errors


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"aspect_ratio_buckets": "32,32"}, "--aspect_ratio_buckets needs --use_aspect_ratio_buckets"),
        ({"use_aspect_ratio_buckets": "true", "aspect_ratio_buckets": "32"}, "expected height,width;height,width"),
        ({"resolution": "[32, 33]"}, "--resolution [32, 33] is not a multiple of 16"),
        ({"resolution": "[]"}, "--resolution [] is not a multiple of 16"),
        ({"tokens_per_batch": 64}, "--tokens_per_batch and --train_batch_size contradict each other"),
        ({"cache_latents": "true", "resolution": "[32, 64]"}, "--cache_latents keeps one size of each image"),
    ],
)
def test_bad_bucket_flags(
    assets: Assets, tmp_path: Path, run_main: Callable[..., Done], flags: dict[str, object], message: str
) -> None:
    one_line(run_main("train", *assets.flags(tmp_path / "run", **flags)), message)
    assert not (tmp_path / "run").exists()
