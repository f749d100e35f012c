"""Every recipe at full size, without a weight: names, shapes, LoRA layers and what the text encoder leaves out.

`published/` holds config files with the sizes of the released models; tokenizers are those of the small ones.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from PIL import Image

from tests.conftest import Done
from tests.distributed import ROOT
from tests.pairs import Pairs
from tests.tars import write_shards

PUBLISHED = Path(__file__).with_name("published")
DATA = {"instance_data_dir": "images", "data_files": "*.tar", "dataset_name": "rows"}  # of each kind: where it is
# recipe: (sizes, tokenizers, what the dry run must say)
RECIPES = {
    "flux1_dev_full": ("flux1-dev", "flux1", ["11,901,408,320 parameters in 1160 tensors of FluxTransformer2DModel"]),
    "flux1_dev_lora": ("flux1-dev", "flux1", ["on 342 layers", "transformer_blocks.{0..18}.attn.to_q"]),
    "flux1_schnell_pretrain_cc12m": (
        "flux1-schnell",
        "flux1",
        ["11,891,178,560 parameters in 1156 tensors", "40000 optimizer steps of 1 images", "a stream of 2 shards in 2 lanes"],
    ),
    "flux1_schnell_pretrain_mlperf": (
        "flux1-schnell",
        "flux1",
        ["11,891,178,560 parameters in 1156 tensors", "14141 optimizer steps of 1 images", "4 images in 1 shape"],
    ),
    "flux1_kontext_lora": ("flux1-kontext", "kontext", ["on 342 layers", "4 images in 2 shapes"]),
    "flux2_dev_edit_lora": (
        "flux2-dev",
        "flux2",
        ["on 160 layers", "single_transformer_blocks.{0..47}.attn.to_qkv_mlp_proj", "(32,223,281,152 parameters)", "2 shapes"],
    ),
    "flux2_klein_full": ("flux2-klein-9b", "flux2-klein", ["9,078,581,248 parameters in", "Flux2Transformer2DModel"]),
    "flux3_lora": ("flux3", "flux3", ["single_transformer_blocks.{0..27}.ff.linear_in", "(5,538,458,368 parameters)"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, archives, and a table with the columns that the recipes name."""
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder, 2, 2)
    (folder / "images").mkdir()
    pictures = [Image.new("RGB", size) for size in [(96, 64), (64, 64), (96, 64), (64, 64)]]
    for number, picture in enumerate(pictures):
        picture.save(folder / f"images/{number}.png")
        (folder / f"images/{number}.txt").write_text("a cat")
    images = dict.fromkeys(("image", "output", "reference", "file_name"), pictures)
    rows = {**images, "instruction": ["invert the colors"] * 4, "text": ["a cat"] * 4}
    features = {column: datasets.Image() for column in images} | {
        name: datasets.Value("string") for name in ("instruction", "text")
    }
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(folder / "rows")
    return folder


def test_every_recipe_is_here() -> None:
    assert {path.stem for path in (ROOT / "launch/recipes").glob("*.yaml")} == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_at_full_size(pairs: Pairs, data: Path, tmp_path: Path, run_main: Callable[..., Done], recipe: str) -> None:
    sizes, tokenizers, wanted = RECIPES[recipe]
    model = shutil.copytree(PUBLISHED / sizes, tmp_path / "model")
    for tokenizer in pairs.model(tokenizers).glob("tokenizer*"):
        shutil.copytree(tokenizer, model / tokenizer.name)
    text = (ROOT / f"launch/recipes/{recipe}.yaml").read_text()
    flag = next(flag for flag in DATA if flag in text)
    source = [f"--{flag}", data / DATA[flag]]
    small = ["--train_batch_size", 1, "--gradient_accumulation_steps", 1]
    arguments = ["--config", ROOT / f"launch/recipes/{recipe}.yaml", "--pretrained_model_name_or_path", model]
    done = run_main("train", *arguments, *source, *small, "--output_dir", tmp_path / "out", "--dry_run")
    assert done.status == 0, done.errors
    for words in wanted:
        assert words in done.output, (words, done.output[-3000:])
    assert not (tmp_path / "out").exists()
