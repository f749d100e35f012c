"""Cached prompts and images: the same losses, only what is missing or changed is encoded, and any number of ranks reads it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from ds_flux import config
from ds_flux.caching import prompts_in_batches
from ds_flux.conditioning import Conditioner
from ds_flux.data.shapes import window_of
from ds_flux.data.store import Store
from ds_flux.models import build_tokenizers, find_architecture
from tests.conftest import Assets, Done
from tests.distributed import launch, metrics, run_jobs
from tests.pairs import Pairs
from tests.test_errors import one_line

BOTH = {"cache_latents": "true", "cache_text": "true"}

pytestmark = pytest.mark.timeout(600)  # several launches of two ranks


@pytest.fixture(scope="module")
def folder(pairs: Pairs, assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Live on one process and cached on two, of two families; a run of one process on what two have cached."""
    folder = tmp_path_factory.mktemp("caching")
    own = dict(max_train_steps=4, center_crop="true", proportion_empty_prompts=0.3)
    first = dict(own, random_flip="false", text_encoder_2_dropout=0.4)
    third = dict(own, reference_dropout=0.3, vae_encode_mode="sample")
    one, two = dict(train_batch_size=8), dict(train_batch_size=4, cache_dir=folder / "cache")
    zero = {"deepspeed_config": assets.ds_config(0)}
    run_jobs(
        1,
        [
            assets.flags(folder / "live 1", **first, **one, **zero),
            pairs.flags("flux3", folder / "live 3", **third, **one, **zero),
        ],
        folder,
    )
    two3 = {**two, "cache_dir": folder / "cache 3"}
    run_jobs(
        2,
        [
            assets.flags(folder / "cached 1", **first, **two, **BOTH),
            pairs.flags("flux3", folder / "cached 3", **third, **two3, **BOTH),
        ],
        folder,
    )
    shutil.copytree(folder / "cache", folder / "cache of two")
    again = {**first, **one, **zero, **BOTH, "cache_dir": folder / "cache"}
    run_jobs(1, [assets.flags(folder / "again 1", **again)], folder)
    return folder


@pytest.mark.parametrize("name", ["cached 1", "cached 3", "again 1"])
def test_cached_is_as_live(folder: Path, name: str) -> None:
    rows, expected = metrics(folder / name), metrics(folder / f"live {name[-1]}")
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=2e-5), key


def test_one_process_reads_what_two_wrote(folder: Path) -> None:
    names = [sorted(path.relative_to(folder / c) for path in (folder / c).rglob("*")) for c in ("cache", "cache of two")]
    assert names[0] == names[1], "nothing was encoded again"
    text = Store(next((folder / "cache").glob("text-*")))
    assert "" in text and len(text) == 11, "each distinct prompt once, and the empty one"
    assert text.read("")["encoder_hidden_states"].shape == (8, 32)


def test_only_what_changed_is_encoded_again(assets: Assets, tmp_path: Path) -> None:
    """`precompute` on two processes: a changed image, a changed caption, another resolution."""
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 40), (40 * number, 0, 99)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"a handwritten {'one two six'.split()[number % 3]}")
    own = dict(dataset_name=None, caption_column=None, instance_data_dir=images, random_flip=None, center_crop="true")
    own |= dict(cache_dir=tmp_path / "cache", train_batch_size=1)
    said = []
    changes = [{}, {}, {"resolution": 48, "verbose": "true"}]
    for number, change in enumerate(changes):
        done = launch(2, "ds_flux", "precompute", *assets.flags(tmp_path / "run", **{**own, **change}))
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stderr)
        assert ("init_distributed" in done.stdout) == ("verbose" in change), "what DeepSpeed says of itself"
        if number == 0:
            Image.new("RGB", (40, 40), (1, 2, 3)).save(images / "2.png")
            (images / "3.txt").write_text("a handwritten nine")
    assert "0 of 4 prompts are in" in said[0] and "0 of 6 images are in" in said[0]
    assert "4 of 5 prompts are in" in said[1] and "5 of 6 images are in" in said[1]
    assert "5 of 5 prompts are in" in said[2] and "0 of 6 images are in" in said[2]
    assert "records will take about" in said[0] and not (tmp_path / "run").exists()


def test_prompts_of_one_window_are_encoded_together(pairs: Pairs) -> None:
    """Features are as long as the window of the longest prompt in the batch."""
    model = config.ModelConfig(pretrained_model_name_or_path=str(pairs.model("flux3")))
    family = find_architecture(model).family
    conditioner = Conditioner(family, {}, build_tokenizers(family, model), None, 240, torch.device("cpu"))
    prompts = [" ".join(["ant"] * number) for number in range(0, 200, 3)]
    batches = prompts_in_batches(conditioner, prompts)
    assert sorted(prompt for batch in batches for prompt in batch) == sorted(prompts)
    counts = [family.count_tokens(conditioner.tokenizers, batch) for batch in batches]
    windows = [{window_of(count, 80, 240) for count in of_batch} for of_batch in counts]
    assert {len(of_batch) for of_batch in windows} == {1} and set().union(*windows) == {80, 160, 240}
    assert max(counts[0]) == max(map(max, counts)), "the longest first"


def test_cached_text_and_shuffled_tags_do_not_go_together(
    assets: Assets, tmp_path: Path, run_main: Callable[..., Done]
) -> None:
    done = run_main("train", *assets.flags(tmp_path / "run", cache_text="true", shuffle_tags="true"))
    one_line(done, "--cache_text keeps every prompt, and --shuffle_tags makes new ones")
