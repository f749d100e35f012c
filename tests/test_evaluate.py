"""Scores of checkpoints and others: those of the reference implementations, on any number of ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import CLIPModel, CLIPProcessor

from ds_flux import UserError, demo, fid, judges, runtime
from ds_flux.consolidate import consolidate
from ds_flux.evaluate_report import NAMES
from ds_flux.sections import DataConfig
from tests import scorers
from tests.conftest import Assets, Done
from tests.distributed import metrics, run_jobs
from tests.pairs import distance
from tests.test_errors import one_line

PROMPTS = ["a handwritten zero", "a handwritten seven", "a handwritten eight"]
PER_PROMPT = 2
FEW = 8  # images to compare with
FEW_STEPS = ["--num_inference_steps", 2]
RunMain = Callable[..., Done]


def words(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On two ranks: a run from scratch with averages, a run of a LoRA, and what is measured of their checkpoints."""
    folder = tmp_path_factory.mktemp("evaluate")
    datasets.load_from_disk(str(assets.digits)).select(range(FEW)).save_to_disk(folder / "few")
    scorers.write_clip(folder / "clip", demo.WORDS)
    scorers.write_inception(folder / "inception.pth", 0)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    common = {"max_train_steps": 2, "learning_rate": 3e-3}
    scratch = {"from_scratch": "true", "transformer_config": assets.model / "transformer/config.json"}
    run = assets.flags(folder / "run", **common, **scratch, ema_decay=0.5, validation_fraction=0.3)
    lora = assets.flags(folder / "lora", **common, rank=4, lora_alpha=8, validation_dataset=folder / "few")
    images = {
        "prompts": folder / "prompts.txt", "num_images_per_prompt": PER_PROMPT, "num_inference_steps": 3,
        "clip_model": folder / "clip", "fid_weights": folder / "inception.pth", "fid_dataset": folder / "few",
        "save_fid_statistics": folder / "digits.safetensors", "evaluate_dir": folder / "two",
    }  # fmt: skip
    measured = [
        ["--config", str(folder / "run/config.yaml"), "--checkpoint", str(folder / "run"), *words(images)],
        ["--config", str(folder / "lora/config.yaml"), "--checkpoint", str(folder / "lora/checkpoint-2")],
    ]
    run_jobs(2, [run, lora, *({"function": "tests.workers:evaluate", "args": [argv]} for argv in measured)], folder)
    return folder


@pytest.fixture(scope="module")
def transformer(folder: Path) -> Path:
    """The run's weights as `ds-flux consolidate` writes them."""
    consolidate(folder / "run/checkpoint-2", folder / "transformer", torch.float32, 10**9)
    return folder / "transformer"


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def shown(folder: Path) -> list[torch.Tensor]:
    """The images of an evaluation, each (3, height, width), uint8."""
    paths = sorted((folder / "images").iterdir())
    return [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths]


def to_compare_with(folder: Path) -> torch.Tensor:
    """(FEW, 3, height, width), uint8."""
    rows = datasets.load_from_disk(str(folder / "few"))
    return torch.stack([torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in rows["image"]])


class AsBefore(CLIPModel):
    """Features as torchmetrics 1.9 expects them of transformers: of version 5 they come inside a record."""

    def get_image_features(self, *arguments: Any) -> torch.Tensor:
        return super().get_image_features(*arguments).pooler_output

    def get_text_features(self, *arguments: Any) -> torch.Tensor:
        return super().get_text_features(*arguments).pooler_output


def test_clip_score_is_that_of_torchmetrics(folder: Path) -> None:
    from torchmetrics.multimodal import CLIPScore

    from ds_flux import clip

    looks = clip.find(str(folder / "clip"))
    models = AsBefore.from_pretrained(folder / "clip"), CLIPProcessor(looks.processor, looks.tokenizer)
    metric = CLIPScore(lambda: models)
    metric.update(shown(folder / "two"), [prompt for prompt in PROMPTS for _ in range(PER_PROMPT)])
    found = read(folder / "two")
    assert found["figures"]["clip_score"] == pytest.approx(float(metric.compute()), rel=1e-5) and metric.compute() > 1
    assert found["clip_score"]["num_prompts_cut"] == 0
    assert looks.num_cut([" ".join(["zero"] * 7), "zero"]) == 1


def test_fid_is_that_of_torchmetrics(folder: Path) -> None:
    """With torch-fidelity's network as it reads its weights."""
    with fid.bare_package("torch_fidelity"):
        from torchmetrics.image.fid import FrechetInceptionDistance

    weights = str(folder / "inception.pth")
    metric = FrechetInceptionDistance(2048, feature_extractor_weights_path=weights, antialias=False)
    metric.update(to_compare_with(folder), real=True)
    metric.update(torch.stack(shown(folder / "two")), real=False)
    found = read(folder / "two")
    assert found["figures"]["fid"] == pytest.approx(float(metric.compute()), rel=1e-4) and metric.compute() > 1
    assert (found["fid"]["num_images"], found["fid"]["num_reference_images"]) == (len(PROMPTS) * PER_PROMPT, FEW)
    with safe_open(folder / "digits.safetensors", "pt") as file:
        mean = metric.real_features_sum / FEW
        products = metric.real_features_cov_sum - FEW * torch.outer(mean, mean)
        assert torch.allclose(file.get_tensor("mean"), mean, rtol=1e-4)
        assert torch.allclose(file.get_tensor("covariance"), products / (FEW - 1), rtol=1e-3, atol=1e-8)


def test_validation_loss_is_that_of_the_run(folder: Path, tmp_path: Path, run_main: RunMain) -> None:
    """Of a run from scratch, of a LoRA on two ranks, and of the averages on one, whose captions are the prompts."""
    config = ["--config", folder / "run/config.yaml", "--checkpoint", folder / "run/checkpoint-2"]
    done = run_main("evaluate", *config, "--weights", "ema", "--clip_model", folder / "clip", *FEW_STEPS)
    assert done.status == 0, done.errors
    here = folder / "run/evaluation/checkpoint-2-ema"
    logged, of_lora = metrics(folder / "run")[-1], metrics(folder / "lora")[-1]
    assert logged["validation_loss_ema"] != pytest.approx(logged["validation_loss"], rel=1e-4)
    two, averages, adapters = (read(path) for path in (folder / "two", here, folder / "lora/evaluation/checkpoint-2"))
    for name, value in two["figures"].items():
        assert name in ("clip_score", "fid") or value == pytest.approx(logged[name], rel=2e-5)
    assert averages["figures"]["validation_loss"] == pytest.approx(logged["validation_loss_ema"], rel=2e-5)
    assert adapters["figures"]["validation_loss"] == pytest.approx(of_lora["validation_loss"], rel=2e-5)
    assert adapters["images"] is None and not (folder / "lora/evaluation/checkpoint-2/grid.png").exists()
    num = averages["validation_loss"]["num_samples"]
    assert averages["images"]["num_images"] == num == len(list((here / "images").iterdir())) > 1
    assert Image.open(here / "images/0000.png").text["prompt"].startswith("a handwritten ")
    scored = [json.loads(line) for line in (folder / "run/logs/scores.jsonl").read_text().splitlines()]
    assert scored[0] == {"step": 2, **{name: two["figures"][name] for name in ("validation_loss", "clip_score", "fid")}}
    assert scored[1] == {"step": 2, **{f"{n}_ema": averages["figures"][n] for n in ("validation_loss", "clip_score")}}


def test_one_rank_finds_what_two_found(folder: Path, transformer: Path, tmp_path: Path, run_main: RunMain) -> None:
    """Of the same weights in another form, beside the statistics that were saved."""
    flags = {
        "config": folder / "run/config.yaml", "transformer": transformer, "prompts": folder / "prompts.txt",
        "num_images_per_prompt": PER_PROMPT, "num_inference_steps": 3, "clip_model": folder / "clip",
        "fid_weights": folder / "inception.pth", "fid_statistics": folder / "digits.safetensors",
        "evaluate_dir": tmp_path / "one",
    }  # fmt: skip
    done = run_main("evaluate", *words(flags))
    assert done.status == 0, done.errors
    one, two = read(tmp_path / "one"), read(folder / "two")
    for ours, theirs in zip(shown(tmp_path / "one"), shown(folder / "two"), strict=True):
        assert distance(*(Image.fromarray(image.permute(1, 2, 0).numpy()) for image in (ours, theirs))) < 0.002
    for name, rel in {"validation_loss": 2e-5, "clip_score": 1e-4, "fid": 1e-4}.items():
        assert one["figures"][name] == pytest.approx(two["figures"][name], rel=rel), name
    assert one["images"] == two["images"]
    assert one["fid"]["num_reference_images"] == FEW
    one_line(run_main("evaluate", *words(flags)), "one exists already: remove it, or name another --evaluate_dir")


def test_what_is_left(folder: Path) -> None:
    """A page for people and nothing of what was only needed meanwhile."""
    here = folder / "two"
    assert sorted(path.name for path in here.iterdir()) == ["evaluation.json", "evaluation.md", "grid.png", "images"]
    page, found = (here / "evaluation.md").read_text(), read(here)
    for name, value in found["figures"].items():
        assert "/" in name or f"| {NAMES[name]} | {value:.5g} |" in page
    assert f"6 images of 3 prompts ({folder / 'prompts.txt'}), 32 x 32, 3 steps, seed 0" in page
    assert "fewer than 10000 images" in page and "](grid.png)" in page
    assert Image.open(here / "grid.png").size == (PER_PROMPT * 32, len(PROMPTS) * 32)
    first = np.asarray(Image.open(here / "grid.png"))[:32, :32]
    assert np.array_equal(first, shown(here)[0].permute(1, 2, 0).numpy())
    assert not (folder / "lora/evaluation/checkpoint-2/weights").exists()


def test_a_folder_of_images_to_compare_with(folder: Path, tmp_path: Path) -> None:
    """Scaled and cropped to the size of the model's, whatever theirs is; one that is damaged is left out, or too much."""
    runtime.init()
    inception, images = fid.load_inception(folder / "inception.pth"), to_compare_with(folder)[:3]
    for number, image in enumerate(images):
        wide = torch.nn.functional.pad(image, (8, 8))  # cropping takes the sides away again
        Image.fromarray(wide.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    (tmp_path / "damaged.png").write_bytes((tmp_path / "0.png").read_bytes()[:100])
    found = judges.look_at_set(inception, str(tmp_path), DataConfig(max_bad_fraction=0.25, dataset_name="x"), (32, 32))
    assert found.num_images == 3
    assert torch.allclose(found.mean, inception.features(images).mean(0), rtol=1e-4)
    with pytest.raises(UserError, match="1 of 4 images of --fid_dataset cannot be used .*damaged.png"):
        judges.look_at_set(inception, str(tmp_path), DataConfig(), (32, 32))


FID = ["--fid_weights", "{inception}", "--prompts", "a"]
SCRATCH = ["--from_scratch", "--transformer_config"]
DIGITS = ["--fid_dataset", "{digits}", "--prompts", "a"]
BAD = {
    "nothing": ([], "there is nothing to measure"),
    "two kinds of weights": (["--checkpoint", "{run}", "--lora", "x"], "--checkpoint says itself which weights it has"),
    "averages of what": (["--weights", "ema"], "--weights ema has no effect without --checkpoint"),
    "no averages": (["--checkpoint", "{lora}", "--weights", "ema", *FID, *DIGITS], "has no EMA weights"),
    "no checkpoint": (["--checkpoint", "{empty}", *FID, *DIGITS], "is no checkpoint of ds_flux and has none in it"),
    "another model": (["--checkpoint", "{run}", *SCRATCH, "{deeper}", *FID, *DIGITS], "is of another model than"),
    "another base": (["--checkpoint", "{lora}", *SCRATCH, "{config}", *FID, *DIGITS], "was trained on other base weights"),
    "a LoRA's file": (["--checkpoint", "{adapters}", *FID, *DIGITS], "is a LoRA's file: give it as --lora"),
    "no prompts": (["--clip_model", "{clip}"], "--prompts is missing"),
    "an empty line": (["--clip_model", "{clip}", "--prompts", "{gap}"], "gap.txt: prompt 2 is empty"),
    "no images asked for": (["--prompts", "a", "--validation_dataset", "{digits}"], "--prompts has no effect without"),
    "no image": (["--clip_model", "{clip}", "--prompts", "a", "--num_images_per_prompt", 0], "must be 1 or more"),
    "size": (["--clip_model", "{clip}", "--prompts", "a", "--height", 33], "must be multiples of 8"),
    "no CLIP": (["--clip_model", "./nowhere", "--prompts", "a"], "--clip_model ./nowhere: no such folder"),
    "half a CLIP": (["--clip_model", "{empty}", "--prompts", "a"], "has no model*.safetensors or pytorch_model*.bin"),
    "another CLIP": (["--clip_model", "{model}/text_encoder_2", "--prompts", "a"], "--clip_model"),
    "FID of what": (FID, "--fid_weights has no effect without --fid_dataset or --fid_statistics"),
    "FID by what": (DIGITS, "FID needs --fid_weights"),
    "FID of two": ([*FID, "--fid_dataset", "x", "--fid_statistics", "y"], "contradict each other"),
    "nothing to save": ([*FID, "--fid_statistics", "x", "--save_fid_statistics", "y"], "has no effect without --fid_dataset"),
    "no weights": ([*DIGITS, "--fid_weights", "nowhere.pth"], "nowhere.pth: no such file"),
    "other weights": ([*DIGITS, "--fid_weights", "{other}"], "does not hold the weights of inception-v3-compat"),
    "code": ([*DIGITS, "--fid_weights", "{code}"], "does not hold the weights of inception-v3-compat"),
    "other statistics": ([*FID, "--fid_statistics", "{statistics}"], "were made by other weights than those of --fid_weights"),
    "no statistics": ([*FID, "--fid_statistics", "{gap}"], "is no file that --save_fid_statistics wrote"),
    "an empty set": ([*FID, "--fid_dataset", "{empty}"], "--fid_dataset: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_flags(assets: Assets, folder: Path, tmp_path: Path, run_main: RunMain, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    torch.save({"fc.bias": torch.zeros(3)}, tmp_path / "other.pth")
    torch.save({"fc.bias": Path("x")}, tmp_path / "code.pth")  # a class that weights are not made of
    places = {
        "run": folder / "run", "lora": folder / "lora", "inception": folder / "inception.pth", "clip": folder / "clip",
        "digits": assets.digits, "model": assets.model, "empty": tmp_path / "empty", "gap": tmp_path / "gap.txt",
        "config": assets.model / "transformer/config.json", "deeper": tmp_path / "deeper.json",
        "adapters": tmp_path / "adapters.safetensors",
        "other": tmp_path / "other.pth", "code": tmp_path / "code.pth", "statistics": folder / "elsewhere.safetensors",
    }  # fmt: skip
    places["adapters"].touch()
    config = json.loads(places["config"].read_text())
    places["deeper"].write_text(json.dumps({**config, "num_layers": 2}))
    if kind == "other statistics":
        nothing = torch.zeros(2048).double()
        fid.Statistics(2, nothing, torch.diag(nothing), "of others", "32 x 32").save(places["statistics"])
    flags, message = BAD[kind]
    flags = [str(word).format(**places) for word in flags]
    model = ["--pretrained_model_name_or_path", assets.model, "--mixed_precision", "no", "--resolution", 32]
    one_line(run_main("evaluate", *model, *flags, "--evaluate_dir", tmp_path / "out"), message)
    assert not (tmp_path / "out").exists()


def test_the_extra_is_missing(assets: Assets, folder: Path, run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = fid.importlib.util.find_spec
    monkeypatch.setattr(fid.importlib.util, "find_spec", lambda name: None if name == "torch_fidelity" else find_spec(name))
    flags = ["--fid_weights", folder / "inception.pth", "--prompts", "a", "--fid_dataset", assets.digits]
    done = run_main("evaluate", "--pretrained_model_name_or_path", assets.model, *flags)
    one_line(done, "FID needs torch-fidelity, which is not installed: pip install")
