"""The training objective of a sample: its identity decides sigma and noise, the flow settings decide the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_flux.config import FlowConfig
from ds_flux.data.schedule import SampleKey
from ds_flux.denoiser import denoising_loss
from ds_flux.families.spec import FluxFamily
from ds_flux.flow import loss_weight, sample_sigma
from ds_flux.latents import WHOLE, Batch, TokenShard
from ds_flux.randomness import key_seed, sample_generator


@dataclass(frozen=True)
class Objective:
    """Pure: the same keys and batch give the same loss on any rank, at any step."""

    family: FluxFamily
    flow: FlowConfig
    seed: int
    mu_of: Callable[[int], float]
    """image tokens -> log-SNR shift of the training sigmas"""
    guidance_scale: float | None
    """distilled guidance; None: the transformer has no embedding for it"""
    is_flow_map: bool
    """whether the transformer also takes the timestep that a sampling step jumps to"""
    shard: TokenShard = WHOLE
    """which of the tokens this rank computes the loss on"""

    def draw(self, keys: list[SampleKey], latents: Tensor) -> tuple[Tensor, Tensor]:
        """sigma (B,) and noise like `latents`, each sample's from its own generators."""
        mu = self.mu_of(latents.shape[-2] * latents.shape[-1])
        settings = self.flow.weighting_scheme, self.flow.logit_mean, self.flow.logit_std, self.flow.mode_scale, mu
        sigma = torch.cat([sample_sigma(sample_generator(self.seed, *key, "sigma"), *settings) for key in keys])
        shape = latents.shape[1:]
        noise = torch.stack([torch.randn(shape, generator=sample_generator(self.seed, *key, "noise")) for key in keys])
        return sigma.to(latents.device), noise.to(latents.device)

    def extra(self, sigma: Tensor) -> dict[str, Tensor]:
        """What the transformer takes beside sigma (B,), by its argument names.

        A flow map is asked for the velocity at sigma itself (a jump of length zero), which is what flow matching regresses.
        """
        guidance = {} if self.guidance_scale is None else {"guidance": torch.full_like(sigma, self.guidance_scale)}
        return guidance | ({"target_timestep": sigma} if self.is_flow_map else {})

    def loss(self, engine: Any, batch: Batch, keys: list[SampleKey]) -> tuple[Tensor, Tensor]:
        """Weighted loss of each sample (B,) on this rank's tokens, and its sigma (B,)."""
        sigma, noise = self.draw(keys, batch.latents)
        # for dropout of adapters, which has no generator; other tokens, another mask
        torch.manual_seed(key_seed("module", self.seed, *keys[0]) + self.shard.rank)
        loss = self.loss_at(engine, batch, sigma, noise)
        return loss * loss_weight(sigma, self.flow.weighting_scheme), sigma

    def loss_at(self, engine: Any, batch: Batch, sigma: Tensor, noise: Tensor) -> Tensor:
        """Unweighted loss of each sample (B,) on this rank's tokens, at given sigma (B,) and noise (B, C, H, W)."""
        return denoising_loss(engine, self.family, batch, sigma, noise, self.extra(sigma), self.shard)
