"""The test that finds a wrong id, shift, scale, layer or timestep.

Every family learns four prompts and four edits by heart, and its *stock* pipeline, given the consolidated weights, shows the
right picture for each prompt and each reference.
"""

import json
from pathlib import Path

import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline
from PIL import Image

from ds_flux.consolidate import consolidate
from ds_flux.demo import save_grid
from ds_flux.families import stock, tiny
from tests import pairs as small
from tests.distributed import run_jobs
from tests.pairs import Pairs

NUM_STEPS = {"kontext": 200, "flux2": 250, "flux2-klein": 250, "flux3": 350}
FAMILIES = list(NUM_STEPS)
# what is distilled into the models that take it; no classifier-free guidance, for nothing was trained without its prompt
GUIDANCE = {"kontext": 3.5, "flux2": 3.5, "flux2-klein": 1.0, "flux3": 1.0}


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def folder(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trained, two processes at stage 2 one after the other; Kontext without references is FLUX.1."""
    folder = tmp_path_factory.mktemp("overfit")
    ds_config = folder / "zero2.json"
    ds_config.write_text('{"zero_optimization": {"stage": 2}}')
    flags = dict(
        train_batch_size=8, learning_rate=3e-3, adam_beta2=0.99, lr_scheduler="cosine", lr_warmup_steps=20,
        weighting_scheme="logit_normal", checkpointing_steps=1000, deepspeed_config=ds_config, shard_text_encoder="false",
        cache_latents="true", center_crop="true",
    )  # fmt: skip
    jobs = [pairs.flags(name, folder / name, max_train_steps=NUM_STEPS[name], **flags) for name in tiny.TINY if name != "flux1"]
    run_jobs(2, jobs, folder, timeout_s=560)
    return folder


@pytest.fixture(scope="module")
def sampled(pairs: Pairs, folder: Path) -> Path:
    """What `ds-flux sample` makes of the consolidated weights, its engines sharded over two processes."""
    jobs = []
    for name in FAMILIES:
        consolidate(folder / name / f"checkpoint-{NUM_STEPS[name]}", folder / f"{name} out", torch.float32, 10**9)
        argv = ["--pretrained_model_name_or_path", pairs.model(name), "--transformer", folder / f"{name} out"]
        argv += ["--mixed_precision", "no", "--max_sequence_length", tiny.TINY[name].text_length]
        argv += ["--height", small.RESOLUTION, "--width", small.RESOLUTION, "--num_inference_steps", 10]
        argv += ["--sample_guidance_scale", GUIDANCE[name]]
        kinds = {"prompts": ["--prompt", json.dumps(pairs.prompts)]}
        for number in (1, 2):
            pairs.references[number].save(folder / f"{number}.png")
            kinds[f"edit {number}"] = ["--prompt", small.EDIT, "--image", folder / f"{number}.png"]
        for kind, more in kinds.items():
            words = [str(word) for word in [*argv, *more, "--sample_dir", folder / f"{name} {kind}"]]
            jobs.append({"function": "tests.workers:sample", "args": [words]})
    run_jobs(2, jobs, folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_stock_pipeline_shows_what_was_learnt(pairs: Pairs, folder: Path, tmp_path: Path, name: str) -> None:
    consolidate(folder / name / f"checkpoint-{NUM_STEPS[name]}", tmp_path / "out", torch.float32, 10**9)
    pipeline = stock.load(pairs.model(name), tmp_path / "out")
    length = tiny.TINY[name].text_length
    inputs = dict(height=small.RESOLUTION, width=small.RESOLUTION, num_inference_steps=10, max_sequence_length=length)
    if isinstance(pipeline, ModularPipeline):
        pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=GUIDANCE[name]))
    else:
        inputs["guidance_scale"] = GUIDANCE[name]
    shown = stock.generate(pipeline, pairs.prompts, noise(), **inputs)
    edited = [stock.generate(pipeline, [small.EDIT], noise(), image=image, **inputs)[0] for image in pairs.references]
    save_grid([*shown, *edited], 4, folder / f"{name}.png", scale=4)
    everything = [*pairs.pictures, *pairs.edits]
    assert [small.nearest(image, everything) for image in (*shown, *edited)] == list(range(8))
    assert max(small.distance(a, b) for a, b in zip([*shown, *edited], everything)) < 0.25


@pytest.mark.timeout(600)
def test_without_references_kontext_is_flux1(pairs: Pairs, sampled: Path) -> None:
    """FLUX.1's own pipeline, with the same weights: the picture of each prompt."""
    pipeline = stock.load(pairs.model("flux1"), sampled / "kontext out")
    inputs = dict(height=small.RESOLUTION, width=small.RESOLUTION, num_inference_steps=10, max_sequence_length=8)
    shown = stock.generate(pipeline, pairs.prompts, noise(), guidance_scale=GUIDANCE["kontext"], **inputs)
    assert [small.nearest(image, [*pairs.pictures, *pairs.edits]) for image in shown] == list(range(4))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_sample_shows_the_same(pairs: Pairs, sampled: Path, name: str) -> None:
    kinds = {"prompts": [0, 1, 2, 3], "edit 1": [5], "edit 2": [6]}
    everything = [*pairs.pictures, *pairs.edits]
    for kind, wanted in kinds.items():
        made = [Image.open(path).convert("RGB") for path in sorted((sampled / f"{name} {kind}").iterdir())]
        assert [small.nearest(image, everything) for image in made] == wanted, kind
