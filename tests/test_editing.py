"""Editing with references from the command line: the published example, caches, dropout, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image, ImageOps

from ds_flux.config import DataConfig
from ds_flux.data.buckets import Buckets
from ds_flux.data.images import drops_references
from ds_flux.data.schedule import Schedule
from ds_flux.data.shapes import Shapes, look_at_sizes
from ds_flux.data.sources import open_source
from ds_flux.data.store import Store
from ds_flux.families import tiny
from tests.conftest import Done
from tests.distributed import launch, metrics
from tests.pairs import EDIT, Pairs, dataset_of, rules_of
from tests.test_errors import one_line

ONE = Buckets({32: ((32, 32),)})


def table(folder: Path, **columns: list) -> Path:
    """A data set; columns of images are those whose names begin with `im` or `ref`."""
    kinds = {name: datasets.Image() if name.startswith(("im", "ref")) else datasets.Value("string") for name in columns}
    kinds |= {name: datasets.List(datasets.Image()) for name, cells in columns.items() if isinstance(cells[0], list)}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(folder)
    return folder


def picture(width: int, height: int, grey: int = 0) -> Image.Image:
    return Image.new("RGB", (width, height), (grey, grey, grey))


def config_of(folder: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"dataset_name": str(folder), "caption_column": "text", "resolution": 32, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# the published example


def published_command(pairs: Pairs, output_dir: Path) -> list[str]:
    """The flags of diffusers' example for FLUX.2 image-to-image as its authors give it for FSDP, in their spelling.

    Model, data, sizes and steps are small, and the line for NPUs is for the test below.
    """
    return f"""
        --pretrained_model_name_or_path={pairs.model("flux2")}
        --dataset_name={output_dir.parent / "example"}
        --image_column=output --cond_image_column=file_name --caption_column=instruction
        --resolution=32
        --train_batch_size=2
        --guidance_scale=1
        --mixed_precision=bf16
        --max_grad_norm=1
        --dataloader_num_workers=0
        --gradient_accumulation_steps=2
        --learning_rate=1e-03
        --lr_scheduler=constant
        --lr_warmup_steps=0
        --gradient_checkpointing
        --max_train_steps=4
        --checkpointing_steps=5000
        --rank=16
        --seed=0
        --skip_final_inference
        --cache_latents
        --offload
        --fsdp_text_encoder
        --output_dir={output_dir}
    """.split()


@pytest.fixture(scope="module")
def example(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, after the example ran on two processes."""
    folder = tmp_path_factory.mktemp("example")
    features = {"output": datasets.Image(), "file_name": datasets.Image(), "instruction": datasets.Value("string")}
    rows = {"output": pairs.edits * 4, "file_name": pairs.references * 4, "instruction": [EDIT] * 16}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(folder / "example")
    done = launch(2, "ds_flux", "train", *published_command(pairs, folder / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "said").write_text(done.stderr)
    return folder / "run"


def test_the_published_example_runs_as_it_is(example: Path) -> None:
    assert len({row["loss"] for row in metrics(example)}) == 4
    said = (example.parent / "said").read_text()
    assert "training a LoRA of rank 16" in said and "that prompts never touch are left out" in said
    assert len(Store(next((example / "cache").glob("latents-*")))) == 16 and "0 of 16 images are in" in said
    assert (example / "checkpoint-4/ds_flux.json").exists()


def test_npu_attention_fails_where_there_is_no_npu(pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    flags = pairs.flags("flux2", tmp_path / "run", max_train_steps=1)
    done = run_main("train", *flags, "--enable_npu_flash_attention")
    one_line(done, "--attention_backend _native_npu does not run here")
    assert "these do: native," in done.errors and not (tmp_path / "run").exists()
    done = run_main("train", *flags, "--attention_backend", "nativ")
    one_line(done, "unknown --attention_backend: nativ; the nearest known one is native")
    (tmp_path / "run.yaml").write_text("fsdp_text_encoder: true\n")
    done = run_main("train", "--config", tmp_path / "run.yaml", *flags)
    one_line(done, "is another name: write shard_text_encoder: True")


def test_cached_is_as_live(pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    """Centre crop, so that nothing differs between visits: the same losses."""
    losses = {}
    for cached in ("false", "true"):
        flags = dict(cache_latents=cached, center_crop="true", reference_dropout=0.4, max_train_steps=4, train_batch_size=4)
        done = run_main("train", *pairs.flags("flux3", tmp_path / cached, **flags, deepspeed_config="ds_configs/zero0.json"))
        assert done.status == 0, done.errors
        losses[cached] = [row["loss"] for row in metrics(tmp_path / cached)]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# rows, shapes, dropout


def test_a_row_may_have_fewer_references(tmp_path: Path) -> None:
    columns = dict(
        image=[picture(40, 40)] * 3,
        text=["a"] * 3,
        ref=[picture(100, 64), None, picture(64, 64)],
        ref_more=[[picture(72, 72), picture(33, 50)], [], []],
    )
    config = config_of(table(tmp_path / "rows", **columns), cond_image_column="ref, ref_more")
    source = open_source(config)
    assert [len(source.references(index)) for index in range(3)] == [3, 0, 1]
    _, sizes, _ = look_at_sizes(source, config, rules_of(config))
    assert sizes == [((96, 64), (72, 72), (32, 48)), (), ((64, 64),)]
    samples = dataset_of(config, 0)
    for index, expected in enumerate(sizes):
        shapes = [tuple(image.shape[:0:-1]) for image in samples[(index, 0)].images]
        assert shapes == [(32, 32), *expected], "the header tells the shape that the pixels have"


def test_a_camera_turns_the_shape_as_well(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(100, 60).save(tmp_path / "turned.jpg", exif=exif)
    (tmp_path / "rows").mkdir()
    rows = {"image": [str(tmp_path / "turned.jpg")] * 2, "ref": [str(tmp_path / "turned.jpg")] * 2, "text": ["a", "b"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")  # columns of paths
    config = config_of(tmp_path / "rows", cond_image_column="ref")
    source = open_source(config)
    assert look_at_sizes(source, config, rules_of(config))[1][0] == ((56, 96),)
    assert dataset_of(config, 0)[(0, 0)].images[1].shape == (3, 96, 56)


def test_batches_have_one_shape_and_lose_nothing() -> None:
    """Three shapes, of which one is rarer than a batch is long: its samples wait."""
    config = DataConfig(reference_dropout=0.3)
    sizes = [((64, 64),)] * 9 + [((96, 64),)] * 5 + [()] * 7
    shapes = Shapes(ONE, [], sizes, [], 0)

    def shape_of(key: tuple[int, int]) -> object:
        return shapes.of(key, config, 3, "text_encoder")

    plan = dict(num_samples=21, seed=3, micro_batch_size=2, gradient_accumulation_steps=2, dp_rank=0, dp_size=1)
    batches = list(Schedule(**plan, shape_of=shape_of).micro_batches(0, 40))
    assert all(len({shape_of(key) for key in batch}) == 1 for batch in batches)
    steps = [batches[2 * i] + batches[2 * i + 1] for i in range(40)]
    assert all(len({shape_of(key) for key in step}) == 1 for step in steps), "an optimizer step has one shape"
    seen = [key for step in steps for key in step]
    assert len(set(seen)) == len(seen)
    first = {sample for sample, visit in seen if visit == 0}
    assert first == set(range(21)), "none of the first epoch is lost"
    assert list(Schedule(**plan, shape_of=shape_of).micro_batches(15, 20)) == batches[30:40], "resume is a position"


def test_windows_follow_the_prompt_and_its_dropout() -> None:
    config = DataConfig(proportion_empty_prompts=0.5)
    shapes = Shapes(ONE, [], [], [(80,), (160,), (240,)], null_window=80)
    found = {key: shapes.of(key, config, 0, "text_encoder").window for key in [(s, v) for s in range(3) for v in range(20)]}
    assert {found[(2, visit)] for visit in range(20)} == {80, 240}
    assert {found[(0, visit)] for visit in range(20)} == {80}


def test_prompts_of_different_windows_train_in_turn(pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    """Windows of 80 and 160 tokens and references of two shapes, dropped now and then: every batch can be stacked."""
    texts = ["a cat", "dog " * 120] * 4
    columns = dict(image=[picture(40, 40)] * 8, text=texts, ref=[picture(64, 64), picture(64, 64), picture(96, 64), None] * 2)
    flags = dict(dataset_name=table(tmp_path / "rows", **columns), max_sequence_length=None, max_train_steps=5)
    flags |= dict(train_batch_size=2, proportion_empty_prompts=0.3, reference_dropout=0.3, mixed_precision="bf16")
    done = run_main("train", *pairs.flags("flux3", tmp_path / "run", **flags), "--dry_run")
    assert "8 images in " in done.output and " shapes" in done.output
    done = run_main("train", *pairs.flags("flux3", tmp_path / "run", **flags))
    assert done.status == 0, done.errors
    assert all(row["loss"] > 0.1 for row in metrics(tmp_path / "run"))
    more = {**flags, "max_train_steps": 6, "resume_from_checkpoint": "latest", "reference_dropout": 0.4}
    done = run_main("train", *pairs.flags("flux3", tmp_path / "run", **more))
    assert (done.status, "the order of samples is not the one it had" in done.errors) == (0, True)


def test_reference_dropout_is_the_samples_own(tmp_path: Path) -> None:
    columns = dict(image=[picture(40, 40)] * 2, text=["a"] * 2, ref=[picture(64, 64)] * 2)
    config = config_of(table(tmp_path / "rows", **columns), cond_image_column="ref", reference_dropout=0.5)
    samples = dataset_of(config, 7)
    counts = {key: len(samples[key].images) for key in [(s, v) for s in range(2) for v in range(30)]}
    assert all(count == (1 if drops_references(config, 7, key) else 2) for key, count in counts.items())
    assert 15 < sum(count == 1 for count in counts.values()) < 45


def test_crop_and_flip_together_only_when_asked(tmp_path: Path) -> None:
    noise = Image.effect_noise((96, 64), 100).convert("RGB")
    columns = dict(image=[noise], text=["a"], ref=[ImageOps.invert(noise)])
    folder = table(tmp_path / "rows", **columns)
    together = config_of(folder, cond_image_column="ref", augment_references=True, random_flip=True)
    samples = dataset_of(together, 0)
    flips = set()
    for visit in range(8):
        image, reference = samples[(0, visit)].images
        torch.testing.assert_close(reference, -image, atol=0.03, rtol=0)
        flips.add(image.numpy().tobytes())
    assert len(flips) > 4
    apart = config_of(folder, cond_image_column="ref")
    images = [dataset_of(apart, 0)[(0, visit)].images for visit in range(4)]
    assert all(torch.equal(images[0][1], other[1]) for other in images), "the reference stays whole"
    assert images[0][1].shape == (3, 64, 96)


# ---------------------------------------------------------------------------------------------------------------------
# refusals

BAD = [
    ("flux2", {"cond_image_column": "reff"}, "(--cond_image_column) of", "the nearest known one is ref"),
    ("flux2", {"random_flip": "true"}, "--random_flip would mirror the image and not its references"),
    ("flux2", {"cond_image_column": None, "reference_dropout": 0.5}, "have no effect without --cond_image_column"),
    ("flux2", {"text_encoder_2_dropout": 0.5}, "--text_encoder_2_dropout has no effect: this model has no text_encoder_2"),
    ("flux2-klein", {"guidance_scale": 3.5}, "--guidance_scale has no effect: this model has no guidance embedding"),
    ("flux3", {"guidance_scale": 3.5}, "--guidance_scale has no effect"),
    ("flux2", {"text_encoder_path": "{klein}/text_encoder"}, "tokenizer does not fit its text_encoder: it has "),
    ("flux2", {"text_encoder_path": "{flux1}/text_encoder"}, "unknown text encoder for a Flux2Transformer2DModel"),
    ("flux2", {"transformer_path": "{narrow}"}, "the transformer does not fit its text_encoder: it takes features of width 48"),
    ("flux2", {"transformer_path": "{strange}"}, "unknown transformer class", "SomeTransformer2DModel"),
    ("flux2", {"rank": 4, "lora_layers": "blocks.*.nothing"}, "--lora_layers blocks.*.nothing matches no linear layer"),
]


@pytest.mark.parametrize("family, flags, messages", [(family, flags, messages) for family, flags, *messages in BAD])
def test_bad_input(
    pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done], family: str, flags: dict, messages: list[str]
) -> None:
    for name, changes in {"narrow": {"joint_attention_dim": 48}, "strange": {"_class_name": "SomeTransformer2DModel"}}.items():
        folder = shutil.copytree(pairs.model("flux2") / "transformer", tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
    places = {"klein": pairs.model("flux2-klein"), "flux1": pairs.model("flux1"), "narrow": tmp_path / "narrow"}
    places["strange"] = tmp_path / "strange"
    flags = {key: value.format(**places) if isinstance(value, str) else value for key, value in flags.items()}
    done = run_main("train", *pairs.flags(family, tmp_path / "run", max_train_steps=1, **flags))
    for message in messages:
        one_line(done, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["missing", "unreadable"])
def test_a_reference_that_cannot_be_read_is_named_before_the_start(
    pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done], kind: str
) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    picture(64, 64).save(good)
    if kind == "unreadable":
        bad.write_bytes(b"no image")
    rows = {"image": [str(good)] * 4, "ref": [str(good), str(good), str(bad), None], "text": ["a"] * 4}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    done = run_main("train", *pairs.flags("flux2", tmp_path / "run", dataset_name=tmp_path / "rows", max_train_steps=1))
    one_line(done, f"1 of 4 samples cannot be used (the first: row 2 of {tmp_path / 'rows'} cannot be used: ")
    assert "bad.png" in done.errors and not (tmp_path / "run").exists()


def test_captions_longer_than_the_window_are_counted(pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    columns = dict(image=[picture(40, 40)] * 4, text=["a cat " * 30, "a", "dog " * 40, "bee"])
    flags = dict(dataset_name=table(tmp_path / "rows", **columns), cond_image_column=None, max_train_steps=1)
    for name in tiny.TINY:
        done = run_main("train", *pairs.flags(name, tmp_path / name, **{**flags, "max_sequence_length": 40}), "--dry_run")
        assert done.status == 0, done.errors
        assert "2 of 4 captions are longer than 40 tokens (the longest has " in done.errors, (name, done.errors[-500:])
