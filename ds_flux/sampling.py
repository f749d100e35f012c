"""Images from prompts, on all ranks: the model's own schedule, an Euler step for each call of `predict_velocity`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ds_flux.denoiser import predict_velocity
from ds_flux.families.spec import FluxFamily
from ds_flux.flow import euler_step
from ds_flux.latents import Batch


def schedule_mu(scheduler: Any, family: FluxFamily, num_image_tokens: int, num_steps: int) -> float:
    """The log-SNR shift that the pipeline samples with at this size."""
    if scheduler.config.use_dynamic_shifting:
        return family.sampling_mu(num_image_tokens, num_steps)
    return math.log(scheduler.config.shift)


def sampling_sigmas(scheduler: Any, family: FluxFamily, num_image_tokens: int, num_steps: int) -> list[float]:
    """num_steps + 1 sigmas from 1 to 0, as `FluxPipeline` asks its scheduler for them."""
    mu = schedule_mu(scheduler, family, num_image_tokens, num_steps)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    return scheduler.sigmas.tolist()


@torch.no_grad()
def sample_latents(
    transformer: Callable[..., tuple[Tensor]],
    family: FluxFamily,
    text: dict[str, Tensor],
    noise: Tensor,
    sigmas: list[float],
    guidance: Tensor | None,
    progress: bool = False,
) -> Tensor:
    """Noise (B, C, H, W) -> latents (B, C, H, W), fp32.  Every rank must ask for as many steps: the transformer is shared.

    The latents are rounded to the transformer's dtype after each step, as the pipeline does.
    """
    dtype = text["encoder_hidden_states"].dtype
    noisy = noise.to(dtype)
    for sigma, next_sigma in tqdm(list(zip(sigmas, sigmas[1:])), desc="sample", disable=not progress):
        batch = Batch(latents=noisy, text=text)
        # the pipeline divides a timestep in [0, 1000], in the latents' dtype, by 1000
        step_sigma = torch.full((len(noisy),), sigma * 1000, device=noisy.device).to(dtype) / 1000
        tokens = predict_velocity(transformer, family, noisy, step_sigma, batch, guidance)
        velocity = tokens.transpose(1, 2).unflatten(2, noisy.shape[-2:])
        noisy = euler_step(noisy.float(), velocity.float(), sigma, next_sigma).to(dtype)
    return noisy.float()
