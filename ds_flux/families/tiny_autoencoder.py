"""Small autoencoders of every family: latents 4 times smaller than the image, with 4 channels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from PIL import Image
from torch import Tensor

from ds_flux import progress
from ds_flux.latents import patchify

CONFIG = dict(
    block_out_channels=(16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    layers_per_block=1, latent_channels=4, norm_num_groups=8, mid_block_add_attention=False,
)  # fmt: skip


def make(autoencoder_class: type) -> Any:
    """A random autoencoder whose latent statistics are far from 0 and 1, so that leaving them out is noticed."""
    if autoencoder_class is AutoencoderKL:
        own = dict(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611)
        return AutoencoderKL(**CONFIG, **own).eval()
    autoencoder = AutoencoderKLFlux2(**CONFIG).eval()
    autoencoder.bn.running_mean.normal_(std=0.5)
    autoencoder.bn.running_var.uniform_(0.5, 2.0)
    return autoencoder


def set_factors(autoencoder: AutoencoderKL, latents: Tensor) -> None:
    """One mean and one spread for all channels."""
    autoencoder.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


def set_norm(autoencoder: AutoencoderKLFlux2, latents: Tensor) -> None:
    """A mean and a variance for each channel of patchified latents."""
    patches = patchify(latents)
    autoencoder.bn.running_mean.copy_(patches.mean(dim=(0, 2, 3)))
    autoencoder.bn.running_var.copy_(patches.var(dim=(0, 2, 3)))


SET_STATISTICS: dict[type, Callable[[Any, Tensor], None]] = {AutoencoderKL: set_factors, AutoencoderKLFlux2: set_norm}


def train(autoencoder: Any, images: list[Image.Image], num_steps: int, batch_size: int = 32) -> Any:
    """Teach it these images, all of one size, and set the statistics of its latents.  Returns it, frozen."""
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).float() / 127.5 - 1
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=max(num_steps, 1))
    for _ in (bar := progress.bar(range(num_steps), desc="train the autoencoder", unit="step")):
        loss = loss_of(autoencoder, pixels[torch.randint(len(pixels), (batch_size,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    with torch.no_grad():
        SET_STATISTICS[type(autoencoder)](autoencoder, autoencoder.encode(pixels[:256]).latent_dist.mode())
    return autoencoder.eval().requires_grad_(False)


def loss_of(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Reconstruction error, plus a little of the divergence that keeps the latents near a normal distribution."""
    posterior = autoencoder.encode(pixels).latent_dist
    reconstruction = autoencoder.decode(posterior.sample()).sample
    return (reconstruction - pixels).square().mean() + 1e-4 * posterior.kl().mean() / pixels[0].numel()
