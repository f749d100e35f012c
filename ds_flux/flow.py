"""Rectified flow in pure functions: x_sigma = (1 - sigma) * latents + sigma * noise; velocity = noise - latents.

sigma is in [0, 1], 1 is pure noise, and is never quantised to 1000 steps.  B batch.
Liu et al. 2022 (rectified flow); Esser et al. 2024 (arXiv 2403.03206) for the weighting schemes and the shift.
"""

import math

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor


def shift_sigma(sigma: Tensor, mu: float) -> Tensor:
    """Move sigma towards 1 by the log-SNR shift mu; mu = 0 leaves it alone (arXiv 2403.03206, equation 23)."""
    shift = math.exp(mu)
    return shift * sigma / (1 + (shift - 1) * sigma)


def sample_sigma(
    generator: torch.Generator, weighting_scheme: str, logit_mean: float, logit_std: float, mode_scale: float, mu: float
) -> Tensor:
    """One sigma, (1,), fp32, drawn as diffusers' scripts draw it and not rounded to their table.

    Their density u indexes a table of sigmas that falls from 1 to 0, so sigma = 1 - u.
    """
    u = compute_density_for_timestep_sampling(
        weighting_scheme, 1, logit_mean=logit_mean, logit_std=logit_std, mode_scale=mode_scale, generator=generator
    )
    # sigma_sqrt weighs with sigma^-2: keep off the pole, at the smallest sigma of diffusers' table
    return shift_sigma((1 - u).clamp(1e-3, 1.0), mu)


def loss_weight(sigma: Tensor, weighting_scheme: str) -> Tensor:
    """Weight of each sample's loss, (B,), by diffusers' own table of schemes."""
    return compute_loss_weighting_for_sd3(weighting_scheme, sigmas=sigma)


def interpolate(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """The noisy latents at sigma (B,), shaped like `latents` (B, ...)."""
    sigma = sigma.view(-1, *[1] * (latents.ndim - 1))
    return (1 - sigma) * latents + sigma * noise


def velocity_target(latents: Tensor, noise: Tensor) -> Tensor:
    """What the transformer learns to say: the derivative of `interpolate` by sigma."""
    return noise - latents


def flow_matching_loss(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample in fp32, (B,)."""
    return (velocity.float() - target.float()).square().flatten(1).mean(dim=1)
