"""RawBatch -> Batch: what the frozen text encoders and the autoencoder make of a micro batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_flux.data.images import RawBatch
from ds_flux.families.spec import FluxFamily
from ds_flux.latents import Batch, patchify, unpatchify


@dataclass(frozen=True)
class LiveConditioner:
    """Encodes every batch as it comes.  Calling it is a collective where an encoder is sharded: all ranks, equally often."""

    family: FluxFamily
    encoders: dict[str, Callable[..., Any]]  # {text encoder: module or engine}
    tokenizers: dict[str, Any]
    autoencoder: Any
    max_sequence_length: int
    device: torch.device

    @torch.no_grad()
    def __call__(self, raw: RawBatch) -> Batch:
        """Latents (B, C, H, W) in fp32 and the text features of the prompts."""
        return Batch(encode_images(self.autoencoder, self.family, raw.pixels.to(self.device)), self.encode_text(raw.prompts))

    @torch.no_grad()
    def encode_text(self, prompts: dict[str, list[str]]) -> dict[str, Tensor]:
        """{transformer argument: features} of one prompt for each sample and text encoder."""
        return self.family.encode_text(self.encoders, self.tokenizers, prompts, self.max_sequence_length, self.device)


def encode_images(autoencoder: Any, family: FluxFamily, pixels: Tensor) -> Tensor:
    """Pixels (B, 3, h, w) in [-1, 1] -> normalised, patchified latents (B, C, H, W), fp32; the mode of the posterior."""
    mean, std = (x.to(pixels.device) for x in family.latent_statistics(autoencoder))
    moments = autoencoder.encode(pixels.to(autoencoder.dtype)).latent_dist
    return (patchify(moments.mode().float()) - mean) / std


def decode_latents(autoencoder: Any, family: FluxFamily, latents: Tensor) -> Tensor:
    """The inverse: latents (B, C, H, W) -> pixels (B, 3, h, w) in [0, 1], fp32."""
    mean, std = (x.to(latents.device) for x in family.latent_statistics(autoencoder))
    pixels = autoencoder.decode(unpatchify(latents * std + mean).to(autoencoder.dtype)).sample
    return (pixels.float() / 2 + 0.5).clamp(0, 1)
