"""The test that finds a wrong id, shift, scale, layer or timestep.

Every family learns four prompts and four edits by heart, and its *stock* pipeline, given the consolidated weights, shows the
right picture for each prompt and each reference.
"""

from pathlib import Path

import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline

from ds_flux.consolidate import consolidate
from ds_flux.demo import save_grid
from ds_flux.families import stock, tiny
from tests import pairs as small
from tests.distributed import metrics, run_jobs
from tests.pairs import Pairs

NUM_STEPS = {"flux1": 200, "kontext": 200, "flux2": 250, "flux2-klein": 250, "flux3": 350}
# what is distilled into the models that take it; no classifier-free guidance, for nothing was trained without its prompt
GUIDANCE = {"flux1": 3.5, "kontext": 3.5, "flux2": 3.5, "flux2-klein": 1.0}


@pytest.fixture(scope="module")
def folder(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trained, two processes at stage 2 one after the other; FLUX.1 without references is Kontext without them."""
    folder = tmp_path_factory.mktemp("overfit")
    ds_config = folder / "zero2.json"
    ds_config.write_text('{"zero_optimization": {"stage": 2}}')
    flags = dict(
        train_batch_size=8, learning_rate=3e-3, adam_beta2=0.99, lr_scheduler="cosine", lr_warmup_steps=20,
        weighting_scheme="logit_normal", checkpointing_steps=1000, deepspeed_config=ds_config, shard_text_encoder="false",
    )  # fmt: skip
    jobs = [pairs.flags(name, folder / name, max_train_steps=NUM_STEPS[name], **flags) for name in tiny.TINY if name != "flux1"]
    run_jobs(2, jobs, folder, timeout_s=560)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in tiny.TINY if name != "flux1"])
def test_the_stock_pipeline_shows_what_was_learnt(pairs: Pairs, folder: Path, tmp_path: Path, name: str) -> None:
    losses = [row["loss"] for row in metrics(folder / name)]
    print(name, losses[0], sum(losses[-20:]) / 20)
    consolidate(folder / name / f"checkpoint-{NUM_STEPS[name]}", tmp_path / "out", torch.float32, 10**9)
    pipeline = stock.load(pairs.model(name), tmp_path / "out")
    length = tiny.TINY[name].text_length
    inputs = dict(height=small.RESOLUTION, width=small.RESOLUTION, num_inference_steps=10, max_sequence_length=length)
    if isinstance(pipeline, ModularPipeline):
        pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=1.0))
    else:
        inputs["guidance_scale"] = GUIDANCE[name]
    shown = stock.generate(pipeline, pairs.prompts, 0, **inputs)
    edited = [stock.generate(pipeline, [small.EDIT], 0, image=image, **inputs)[0] for image in pairs.references]
    save_grid([*shown, *edited], 4, folder / f"{name}.png", scale=4)
    everything = [*pairs.pictures, *pairs.edits]
    assert [small.nearest(image, everything) for image in (*shown, *edited)] == list(range(8))
    errors = [(small.as_tensor(a) - small.as_tensor(b)).square().mean().sqrt() for a, b in zip([*shown, *edited], everything)]
    print(errors)
