"""Every family: text features, one step's loss and positions by the pipelines' own arithmetic; what is not loaded; refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Pipeline, Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids as flux3_ids
from diffusers.modular_pipelines.flux3.encoders import Flux3VaeEncoderStep
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from ds_flux import commands, config, models
from ds_flux.conditioning import encode_images
from ds_flux.data.images import ReferenceRules, as_pixels, fit
from ds_flux.denoiser import denoising_loss
from ds_flux.families import stock, tiny
from ds_flux.families.flux3 import FLUX3
from ds_flux.latents import Batch, patchify
from ds_flux.objective import Objective
from ds_flux.randomness import sample_generator
from ds_flux.zero.weights import SafetensorsFolder
from tests.conftest import Done
from tests.distributed import run_jobs
from tests.pairs import WORDS, Pairs, distance
from tests.test_errors import one_line

NAMES = list(tiny.TINY)
flux2_text_ids = Flux2Pipeline._prepare_text_ids
PROMPTS = ["a cat", "", "a dog and a bee that invert the colors of the ant"]


def settings(pairs: Pairs, name: str, *more: str) -> config.Config:
    arguments = ["--pretrained_model_name_or_path", str(pairs.model(name)), "--mixed_precision", "no", *more]
    return config.load(arguments, "test", commands.TrainCommand)[0]


def stock_text(pipeline: Any, name: str, prompt: str) -> dict[str, Tensor]:
    """{transformer argument: features} as the stock pipeline gives them to its transformer."""
    length = tiny.TINY[name].text_length
    if name == "flux3":
        state = pipeline(prompt=prompt, height=32, width=32, num_inference_steps=1, output=["prompt_embeds"])
        return {"encoder_hidden_states": state["prompt_embeds"]}
    if name in ("flux1", "kontext"):
        states, pooled, _ = pipeline.encode_prompt(prompt=prompt, prompt_2=None, max_sequence_length=length)
        return {"encoder_hidden_states": states, "pooled_projections": pooled}
    return {"encoder_hidden_states": pipeline.encode_prompt(prompt=prompt, max_sequence_length=length)[0]}


@pytest.fixture(scope="module")
def features(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sharded text engines of two processes make of the prompts, of every family."""
    folder = tmp_path_factory.mktemp("features")
    ds_config = folder / "zero3.json"
    ds_config.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    jobs = []
    for name in NAMES:
        length = str(tiny.TINY[name].text_length)
        argv = ["--pretrained_model_name_or_path", str(pairs.model(name)), "--max_sequence_length", length]
        argv += ["--text_encoder_deepspeed_config", str(ds_config), "--mixed_precision"]
        for precision in ("no", "bf16"):
            args = [[*argv, precision], PROMPTS, str(folder / f"{name} {precision}.pt")]
            jobs.append({"function": "tests.workers:encode_prompts", "args": args})
    run_jobs(2, jobs, folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_text_features_are_the_pipelines(pairs: Pairs, features: Path, name: str, precision: str) -> None:
    """Bit for bit, from two processes, of an encoder that holds fewer layers."""
    pipeline = stock.load(pairs.model(name), dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    ours = torch.load(features / f"{name} {precision}.pt")
    for prompt, text in zip(PROMPTS, ours, strict=True):
        expected = stock_text(pipeline, name, prompt)
        assert text.keys() == expected.keys()
        for argument, value in expected.items():
            assert torch.equal(text[argument], value), (argument, (text[argument] - value).abs().max())


# ---------------------------------------------------------------------------------------------------------------------
# one step's loss


def pixels_of(*sizes: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Random pixels (2, 3, height, width) in [-1, 1], one for each (height, width)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(2, 3, *size, generator=generator) * 2 - 1 for size in sizes]


def flux1_inputs(pipeline: Any, images: list[Tensor], noise: Tensor, sigma: Tensor) -> tuple[dict[str, Any], Tensor]:
    """FLUX.1 and Kontext: latents scaled and shifted, the reference's ids at t = 1."""

    def tokens(latents: Tensor) -> Tensor:
        return pipeline._pack_latents(latents, *latents.shape)

    encoded = []
    for image in images:
        latents = pipeline.vae.encode(image).latent_dist.mode()
        encoded.append((latents - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor)
    ids = []
    for number, latents in enumerate(encoded):
        own = pipeline._prepare_latent_image_ids(2, latents.shape[2] // 2, latents.shape[3] // 2, "cpu", torch.float32)
        own[..., 0] = number
        ids.append(own)
    target = tokens(noise - encoded[0])
    noisy = tokens((1 - sigma.view(-1, 1, 1, 1)) * encoded[0] + sigma.view(-1, 1, 1, 1) * noise)
    hidden = torch.cat([noisy, *(tokens(latents) for latents in encoded[1:])], dim=1)
    return {"hidden_states": hidden, "img_ids": torch.cat(ids), "guidance": torch.full((2,), 3.5)}, target


def flux2_inputs(pipeline: Any, images: list[Tensor], noise: Tensor, sigma: Tensor) -> tuple[dict[str, Any], Tensor]:
    """FLUX.2: batch-norm statistics, references at t = 10, 20, ..., text counted on the fourth axis."""
    image, *references = [pipeline._encode_vae_image(image, None) for image in images]
    noise = pipeline._patchify_latents(noise)
    noisy = (1 - sigma.view(-1, 1, 1, 1)) * image + sigma.view(-1, 1, 1, 1) * noise
    hidden = [pipeline._pack_latents(latents) for latents in (noisy, *references)]
    ids = [pipeline._prepare_latent_ids(noisy)[0]]
    if references:
        ids.append(pipeline._prepare_image_ids([reference[:1] for reference in references])[0])
    inputs = {"hidden_states": torch.cat(hidden, dim=1), "img_ids": torch.cat(ids)}
    if pipeline.transformer.config.guidance_embeds:
        inputs["guidance"] = torch.full((2,), 3.5)
    return inputs, pipeline._pack_latents(noise - image)


def flux3_inputs(pipeline: Any, images: list[Tensor], noise: Tensor, sigma: Tensor) -> tuple[dict[str, Any], Tensor]:
    """FLUX.3: references as arguments of their own, told apart on the fourth axis; half-sized positions."""
    image, *references = [encode_flux3(pipeline.vae, image) for image in images]
    noise = Flux3VaeEncoderStep._patchify_latents(noise)
    noisy = (1 - sigma.view(-1, 1, 1, 1)) * image + sigma.view(-1, 1, 1, 1) * noise
    inputs = {"hidden_states": noisy.flatten(2).transpose(1, 2), "img_ids": flux3_ids(*noisy.shape[-2:], 0.5)}
    if references:
        inputs["image_cond_hidden_states"] = torch.cat([latents.flatten(2).transpose(1, 2) for latents in references], dim=1)
        ids = [flux3_ids(*latents.shape[-2:], 0.5, l_coord=-1 - k) for k, latents in enumerate(references)]
        inputs["image_cond_ids"] = torch.cat(ids)
    return inputs, (noise - image).flatten(2).transpose(1, 2)


def encode_flux3(autoencoder: Any, image: Tensor) -> Tensor:
    latents = Flux3VaeEncoderStep._patchify_latents(autoencoder.encode(image).latent_dist.mode())
    std = torch.sqrt(autoencoder.bn.running_var.view(1, -1, 1, 1) + autoencoder.config.batch_norm_eps)
    return (latents - autoencoder.bn.running_mean.view(1, -1, 1, 1)) / std


INPUTS = {
    "flux1": flux1_inputs,
    "kontext": flux1_inputs,
    "flux2": flux2_inputs,
    "flux2-klein": flux2_inputs,
    "flux3": flux3_inputs,
}
REFERENCES: dict[str, list[tuple[int, int]]] = {"none": [], "one": [(64, 48)], "two": [(64, 48), (32, 80)]}


@torch.no_grad()
@pytest.mark.parametrize("references", REFERENCES)
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_pipelines_arithmetic(pairs: Pairs, name: str, references: str) -> None:
    """A batch of two, the second not a copy of the first; and each alone gives its own loss."""
    pipeline = stock.load(pairs.model(name))
    architecture = models.find_architecture(settings(pairs, name).model)
    family = architecture.family
    images = pixels_of((32, 32), *REFERENCES[references])
    noise, sigma = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0.3, 0.8])
    texts = [stock_text(pipeline, name, prompt) for prompt in PROMPTS[:2]]
    text = {argument: torch.cat([one[argument] for one in texts]) for argument in texts[0]}
    inputs, target = INPUTS[name](pipeline, images, noise, sigma)
    length = text["encoder_hidden_states"].shape[1]
    txt_ids = torch.zeros(length, 3) if family.positions.num_axes == 3 else flux2_text_ids(text["encoder_hidden_states"])[0]
    velocity = pipeline.transformer(**inputs, **text, txt_ids=txt_ids, timestep=sigma, return_dict=False)[0]
    expected = (velocity[:, : target.shape[1]] - target).square().mean(dim=(1, 2))

    latents = [encode_images(pipeline.vae, family, image)[0] for image in images]
    extra = {"guidance": torch.full((2,), 3.5)} if architecture.has_guidance else {}
    batch = Batch(latents[0], text, tuple(latents[1:]))
    ours = denoising_loss(pipeline.transformer, family, batch, sigma, patchify(noise), extra)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    for row in range(2):
        one = slice(row, row + 1)
        batch = Batch(latents[0][one], {k: v[one] for k, v in text.items()}, tuple(x[one] for x in latents[1:]))
        own = {k: v[one] for k, v in extra.items()}
        alone = denoising_loss(pipeline.transformer, family, batch, sigma[one], patchify(noise)[one], own)
        torch.testing.assert_close(alone[0], ours[row], rtol=1e-5, atol=1e-6)


def test_a_flow_map_is_asked_for_the_velocity_where_it_is() -> None:
    """The step-distilled FLUX.3: a jump of length zero."""
    objective = Objective(FLUX3, config.FlowConfig(), seed=0, mu_of=lambda _: 0.0, guidance_scale=None, is_flow_map=True)
    sigma = torch.tensor([0.3, 0.8])
    assert torch.equal(objective.extra(sigma)["target_timestep"], sigma)
    small_config = {**tiny.TINY["flux3"].transformer, "flow_map": True}
    transformer = Flux3Transformer2DModel(**small_config)
    batch = Batch(torch.randn(2, 16, 4, 4), {"encoder_hidden_states": torch.randn(2, 80, 256)})
    loss = denoising_loss(transformer, FLUX3, batch, sigma, torch.randn(2, 16, 4, 4), objective.extra(sigma))
    loss.mean().backward()
    assert transformer.target_timestep_embedder.linear_1.weight.grad is not None


# ---------------------------------------------------------------------------------------------------------------------
# references


@pytest.mark.parametrize("size", [(100, 70), (64, 64), (1500, 900), (40, 200), (20, 30)])
def test_a_single_reference_is_padded_as_flux3_does(size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 80).convert("RGB")
    rules = ReferenceRules(4 * 1024 * 1024, grid=16, pads_single=True)
    expected = Flux3ImageProcessor().preprocess(image)[0][0]
    if min(size) >= 16:
        assert rules.final(image.size, True) == expected.shape[:0:-1]
    torch.testing.assert_close(as_pixels(fit(image, rules, True)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(100, 70), (64, 64), (1500, 900), (90, 200)])
def test_references_are_cropped_as_flux2_does(size: tuple[int, int]) -> None:
    """Capped by their area, then the centre in whole tokens: never squashed."""
    image = Image.effect_noise(size, 80).convert("RGB")
    processor = Flux2ImageProcessor(vae_scale_factor=16)
    capped = processor._resize_if_exceeds_area(image)
    width, height = (side // 16 * 16 for side in capped.size)
    expected = processor.preprocess(capped, height=height, width=width, resize_mode="crop")[0]
    rules = ReferenceRules(1024 * 1024, grid=16, pads_single=False)
    assert rules.final(image.size, True) == (width, height)
    torch.testing.assert_close(as_pixels(fit(image, rules, True)), expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# sampling, and what is loaded


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_sample_is_the_stock_pipeline(
    pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done], name: str, number: int
) -> None:
    """The same picture from the same noise, with the pipeline's own guidance, without and with references."""
    if number > {"flux1": 0, "kontext": 1}.get(name, 2):
        pytest.skip("its pipeline takes fewer references")
    length, steps = tiny.TINY[name].text_length, 3
    references = [Image.effect_noise(size, 90).convert("RGB") for size in [(96, 64), (64, 80)][:number]]
    paths = [tmp_path / f"{i}.png" for i in range(number)]
    for path, image in zip(paths, references):
        image.save(path)
    arguments = ["--pretrained_model_name_or_path", pairs.model(name), "--mixed_precision", "no", "--prompt", "a cat"]
    arguments += ["--height", 32, "--width", 48, "--num_inference_steps", steps, "--max_sequence_length", max(length, 80)]
    arguments += ["--sample_dir", tmp_path / "samples", *(["--image", ",".join(map(str, paths))] if paths else [])]
    done = run_main("sample", *arguments)
    assert done.status == 0, done.errors
    inputs = dict(height=32, width=48, num_inference_steps=steps, max_sequence_length=max(length, 80))
    if references:
        inputs["image"] = references if number > 1 else references[0]
    (expected,) = stock.generate(stock.load(pairs.model(name)), ["a cat"], sample_generator(0, 0, 0, "noise"), **inputs)
    ours = Image.open(tmp_path / "samples/0000.png")
    assert ours.size == expected.size == (48, 32)
    assert distance(ours, expected) < 2 / 255


@pytest.mark.parametrize("name", ["flux3", "flux2-klein"])
def test_step_distilled_models_are_sampled_without_guidance(tmp_path: Path, run_main: Callable[..., Done], name: str) -> None:
    """FLUX.3's flow map, klein's `is_distilled`."""
    model = tmp_path / "model"
    tiny.write(name, model, None, 0, WORDS, {"flow_map": True} if name == "flux3" else {})
    if name == "flux2-klein":
        index = json.loads((model / "model_index.json").read_text())
        (model / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    arguments = ["--pretrained_model_name_or_path", model, "--mixed_precision", "no", "--prompt", "a cat", "--resolution", 32]
    arguments += ["--max_sequence_length", 80, "--num_inference_steps", 2, "--sample_dir", tmp_path / "samples"]
    done = run_main("sample", *arguments)
    assert done.status == 0, done.errors
    assert Image.open(tmp_path / "samples/0000.png").size == (32, 32)
    one_line(run_main("sample", *arguments, "--sample_guidance_scale", 2), "this model is distilled to sample without")


@pytest.mark.parametrize("name, message", [("kontext", "takes one reference image, got 2"), ("flux2", "Image too small")])
def test_what_a_pipeline_refuses_is_one_line(
    pairs: Pairs, tmp_path: Path, run_main: Callable[..., Done], name: str, message: str
) -> None:
    for number in (0, 1):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{number}.png")
    arguments = ["--pretrained_model_name_or_path", pairs.model(name), "--mixed_precision", "no", "--prompt", "a cat"]
    arguments += ["--image", f"{tmp_path / '0.png'},{tmp_path / '1.png'}", "--max_sequence_length", 48]
    one_line(run_main("sample", *arguments, "--sample_dir", tmp_path / "samples"), message)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_a_language_model_is_found_under_any_prefix(tmp_path: Path, prefix: str) -> None:
    """transformers has stored Mistral-3 and Qwen3-VL under several."""
    inside = {"embed_tokens.weight": 1.0, "layers.0.w.weight": 2.0, "layers.1.w.weight": 3.0, "norm.weight": 4.0}
    tensors = {prefix + name: torch.full((2, 2), value) for name, value in inside.items()}
    others = {"lm_head.weight": torch.zeros(2, 2), "model.visual.layers.0.w.weight": torch.zeros(2, 2)}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    stored = SafetensorsFolder(tmp_path, "model")
    part = stored.part(["embed_tokens.weight", "layers.0.w.weight"])
    assert set(part.shapes()) == {"embed_tokens.weight", "layers.0.w.weight"}
    assert (stored.num_bytes, part.num_bytes) == (6 * 16, 2 * 16)
    out = torch.empty(4)
    part.read("layers.0.w.weight", (2, 2), 0, out)
    assert out.tolist() == [2.0] * 4
