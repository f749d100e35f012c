"""Images while a model trains: those that the stock pipeline makes of the consolidated weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds_flux.consolidate import consolidate
from ds_flux.randomness import sample_generator
from tests.conftest import Assets
from tests.distributed import run_jobs
from tests.pairs import Pairs, distance
from tests.test_errors import one_line

PROMPTS = ["zero", "one two"]
IMAGES = {"validation_prompt": "[zero, one two]", "num_validation_images": 3, "num_validation_inference_steps": 3}
SHARED = {"sequence_parallel": 2, "train_batch_size": 8}


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, five images: with averages, with shared sequences and caches, and without any."""
    folder = tmp_path_factory.mktemp("gallery")
    common = {"max_train_steps": 2, "validation_steps": 1, "seed": 3, "learning_rate": 3e-3}
    kinds = {
        "averages": {**IMAGES, "ema_decay": 0.5},
        "shared": {**IMAGES, **SHARED, "cache_text": "true", "cache_latents": "true", "skip_final_inference": "true"},
        "without": {**SHARED, "cache_text": "true", "cache_latents": "true", "validation_steps": None},
    }
    run_jobs(2, [assets.flags(folder / kind, **{**common, **flags}) for kind, flags in kinds.items()], folder)
    return folder


@pytest.mark.parametrize("of", ["weights", "averages"])
def test_they_are_those_of_the_stock_pipeline(assets: Assets, folder: Path, tmp_path: Path, of: str) -> None:
    weights = "ema" if of == "averages" else "trained"
    consolidate(folder / "averages/checkpoint-2", tmp_path / "transformer", torch.float32, 10**9, weights=weights)
    transformer = FluxTransformer2DModel.from_pretrained(tmp_path / "transformer")
    pipeline = FluxPipeline.from_pretrained(assets.model, transformer=transformer, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    shown = sorted((folder / f"averages/samples/step-2{'-ema' if of == 'averages' else ''}").glob("*.png"))
    assert len(shown) == 6
    for number, path in enumerate(shown):
        image, prompt = Image.open(path), PROMPTS[number // 3]
        assert (image.text["prompt"], image.text["seed"], image.text["number"]) == (prompt, "3", str(number))
        generator = sample_generator(3, number, 0, "noise")
        sizes = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 8}
        expected = pipeline(prompt, generator=generator, **sizes).images[0]
        assert distance(image.convert("RGB"), expected) < 0.002, path


def test_events_and_their_grids(folder: Path) -> None:
    first, second = (Image.open(folder / f"averages/samples/step-{step}/0000.png") for step in (1, 2))
    assert distance(first.convert("RGB"), second.convert("RGB")) > 0, "the model has changed in between"
    board = EventAccumulator(str(folder / "averages/logs"), size_guidance={"images": 0}).Reload()
    assert set(board.Tags()["images"]) == {"samples", "samples_ema"}
    shown = board.Images("samples")
    assert [(event.step, event.width, event.height) for event in shown] == [(1, 96, 64), (2, 96, 64)]
    assert [path.name for path in (folder / "shared/samples").iterdir()] == ["step-1"], "--skip_final_inference"


def test_training_does_not_notice(folder: Path) -> None:
    """Sequences that are shared are so again afterwards."""
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        one, other = (torch.load(folder / kind / "checkpoint-2" / name, weights_only=False) for kind in ("shared", "without"))
        flats = [state["optimizer_state_dict"]["fp32_flat_groups"] for state in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*flats, strict=True))


def test_edits_of_a_reference(pairs: Pairs, assets: Assets, tmp_path: Path, run_main: Any) -> None:
    pairs.references[2].save(tmp_path / "reference.png")
    flags = {
        "max_train_steps": 1, "train_batch_size": 2, "deepspeed_config": assets.ds_config(0), "shard_text_encoder": "false",
        "validation_prompt": "invert the colors", "validation_image": tmp_path / "reference.png",
        "num_validation_inference_steps": 2,
    }  # fmt: skip
    done = run_main("train", *pairs.flags("flux2-klein", tmp_path / "run", **flags))
    assert done.status == 0, done.errors
    assert Image.open(tmp_path / "run/samples/step-1/0000.png").size == pairs.references[2].size


def test_a_folder_that_cannot_be_made_does_not_end_the_run(assets: Assets, tmp_path: Path, run_main: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples").write_text("")
    flags = {**IMAGES, "max_train_steps": 1, "deepspeed_config": assets.ds_config(0)}
    done = run_main("train", *assets.flags(tmp_path / "run", **flags))
    assert (done.status, "run/samples/step-1 cannot be written" in done.errors) == (0, True), done.errors


BAD = {
    "an empty line": ({"validation_prompt": "{folder}/prompts.txt"}, "prompts.txt: prompt 2 is empty"),
    "no file": ({"validation_prompt": "{folder}/nowhere.txt"}, "nowhere.txt: no such file"),
    "no reference": ({"validation_prompt": "a", "validation_image": "{folder}/no.png"}, "no.png cannot be read"),
    "no prompt": ({"num_validation_images": 2}, "--num_validation_images has no effect without --validation_prompt"),
    "none": ({"validation_prompt": "a", "num_validation_images": 0}, "--num_validation_images 0 must be 1 or more"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_flags(assets: Assets, tmp_path: Path, run_main: Any, kind: str) -> None:
    (tmp_path / "prompts.txt").write_text("a\n\nb\n")
    flags, message = BAD[kind]
    flags = {name: str(value).format(folder=tmp_path) for name, value in flags.items()}
    one_line(run_main("train", *assets.flags(tmp_path / "run", **flags)), message)
    assert not (tmp_path / "run").exists()
