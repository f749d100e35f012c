"""Rectified flow, tokens and ids against diffusers' own arithmetic."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from ds_flux import commands, config, flow, models
from ds_flux.conditioning import Conditioner
from ds_flux.data.images import RawBatch
from ds_flux.denoiser import denoising_loss
from ds_flux.families.flux1 import FLUX1
from ds_flux.latents import Batch, image_ids, pack, patchify, text_ids
from ds_flux.randomness import sample_generator
from ds_flux.run import make_objective
from tests.conftest import Assets


def test_tokens_and_ids_are_the_pipelines() -> None:
    latents = torch.randn(2, 4, 8, 12)
    tokens = pack(patchify(latents))
    assert torch.equal(tokens, FluxPipeline._pack_latents(latents, 2, 4, 8, 12))
    assert torch.equal(image_ids(4, 6, FLUX1.positions), FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32))
    assert torch.equal(text_ids(5, FLUX1.positions), torch.zeros(5, 3))


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"])
def test_sigma_is_drawn_and_weighted_as_in_diffusers_scripts(scheme: str) -> None:
    """Their script draws u, looks up a table of 1,000 sigmas, and weighs with them; ours is that without the rounding."""
    settings = dict(logit_mean=0.5, logit_std=0.7, mode_scale=1.29)
    ours, theirs = [], []
    table = FlowMatchEulerDiscreteScheduler().sigmas
    for sample_id in range(200):
        ours.append(flow.sample_sigma(sample_generator(0, sample_id, 0, "sigma"), scheme, **settings, mu=0.0))
        u = compute_density_for_timestep_sampling(scheme, 1, generator=sample_generator(0, sample_id, 0, "sigma"), **settings)
        theirs.append(table[(u * 1000).long()])
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    assert (ours - theirs).abs().max() <= 1.001e-3
    assert torch.equal(flow.loss_weight(ours, scheme), compute_loss_weighting_for_sd3(scheme, ours))


def test_shift_is_the_schedulers() -> None:
    sigma = torch.linspace(0.05, 1, 20)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    expected = torch.from_numpy(scheduler.time_shift(1.15, 1.0, sigma.numpy()))
    torch.testing.assert_close(flow.shift_sigma(sigma, 1.15), expected)
    assert torch.equal(flow.shift_sigma(sigma, 0.0), sigma)
    static = FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.testing.assert_close(flow.shift_sigma(FlowMatchEulerDiscreteScheduler().sigmas, math.log(3.0)), static.sigmas)


def make_conditioner(pipeline: FluxPipeline) -> Conditioner:
    return Conditioner(
        family=FLUX1,
        encoders={"text_encoder": pipeline.text_encoder, "text_encoder_2": pipeline.text_encoder_2},
        tokenizers={"text_encoder": pipeline.tokenizer, "text_encoder_2": pipeline.tokenizer_2},
        autoencoder=pipeline.vae,
        max_sequence_length=8,
        device=torch.device("cpu"),
    )


def test_one_step_equals_diffusers_arithmetic(assets: Assets) -> None:
    """The loss as diffusers' FLUX script computes it, with the pipeline's own packing, ids, prompts and scheduler."""
    pipeline = FluxPipeline.from_pretrained(assets.model)
    prompts = ["a handwritten seven", "a handwritten two"]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 3, 32, 32, generator=generator) * 2 - 1
    vae, scheduler = pipeline.vae, FlowMatchEulerDiscreteScheduler()
    latents = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=generator)
    timesteps = scheduler.timesteps[[120, 800]]
    sigma = torch.stack([scheduler.sigmas[(scheduler.timesteps == t).nonzero().item()] for t in timesteps])
    noisy = (1 - sigma.view(-1, 1, 1, 1)) * latents + sigma.view(-1, 1, 1, 1) * noise
    embeds, pooled, txt_ids = pipeline.encode_prompt(prompts, None, max_sequence_length=8)
    prediction = pipeline.transformer(
        hidden_states=FluxPipeline._pack_latents(noisy, 2, 4, 8, 8),
        timestep=timesteps / 1000,
        guidance=torch.full((2,), 3.5),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=txt_ids,
        img_ids=FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
        return_dict=False,
    )[0]
    prediction = FluxPipeline._unpack_latents(prediction, 32, 32, pipeline.vae_scale_factor)
    expected = (prediction.float() - (noise - latents).float()).square().reshape(2, -1).mean(1)

    raw = RawBatch((pixels,), {"text_encoder": prompts, "text_encoder_2": prompts}, [(0, 0), (1, 0)])
    batch = make_conditioner(pipeline)(raw)
    ours = denoising_loss(pipeline.transformer, FLUX1, batch, sigma, patchify(noise), {"guidance": torch.full((2,), 3.5)})
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


def test_a_model_without_guidance_takes_none() -> None:
    """schnell: no embedding, so no argument."""
    transformer = FluxTransformer2DModel(**{**FLUX1.flavours["debug"], "guidance_embeds": False, "joint_attention_dim": 32})
    text = {"encoder_hidden_states": torch.randn(1, 4, 32), "pooled_projections": torch.randn(1, 768)}
    batch = Batch(torch.randn(1, 64, 2, 2), text)
    loss = denoising_loss(transformer, FLUX1, batch, torch.tensor([0.5]), torch.randn(1, 64, 2, 2), {})
    loss.mean().backward()
    assert all(parameter.grad is not None for parameter in transformer.parameters())


def test_dropped_prompts_are_the_empty_prompt(assets: Assets) -> None:
    """Independent dropout empties one encoder's prompt and leaves the other's."""
    conditioner = make_conditioner(FluxPipeline.from_pretrained(assets.model))
    both = conditioner.encode_text({"text_encoder": ["a"], "text_encoder_2": ["a"]})
    mixed = conditioner.encode_text({"text_encoder": ["a"], "text_encoder_2": [""]})
    assert torch.equal(both["pooled_projections"], mixed["pooled_projections"])
    assert not torch.equal(both["encoder_hidden_states"], mixed["encoder_hidden_states"])


@pytest.mark.parametrize(
    "shift, mu", [("none", 0.0), ("3", math.log(3)), ("resolution", 0.5 + (1.15 - 0.5) / 3840 * (16 - 256))]
)
def test_timestep_shift(assets: Assets, shift: str, mu: float) -> None:
    """By hand, or as the pipeline shifts at this size: 16 tokens."""
    arguments = ["--pretrained_model_name_or_path", str(assets.model), "--resolution", "32", "--timestep_shift", shift]
    settings, _ = config.load(arguments, "test", commands.TrainCommand)
    objective = make_objective(settings, models.find_architecture(settings.model))
    assert objective.mu_of(16) == pytest.approx(mu)
