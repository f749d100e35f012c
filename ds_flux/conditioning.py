"""RawBatch -> Batch: what the frozen text encoders and the autoencoder make of a micro batch, or made of it earlier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_flux import runtime
from ds_flux.clock import Clocked, unclocked
from ds_flux.data.cache import TextCache
from ds_flux.data.images import RawBatch
from ds_flux.data.schedule import SampleKey
from ds_flux.families.spec import FluxFamily
from ds_flux.latents import Batch, patchify
from ds_flux.randomness import sample_generator
from ds_flux.zero.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class Conditioner:
    """Encodes every batch as it comes, but for what is cached.

    Calling it is a collective where an encoder is sharded: all ranks, equally often.
    """

    family: FluxFamily
    encoders: dict[str, Callable[..., Any]]  # {text encoder: module or engine}
    tokenizers: dict[str, Any]
    autoencoder: Any  # None once everything is cached
    max_sequence_length: int
    device: torch.device
    offloaded: tuple[nn.Module, ...] = ()
    """modules that are kept in CPU memory between uses"""
    posterior_seed: int | None = None
    """draw latents of images by this seed and the sample's identity; None: take the mean"""
    text_cache: TextCache | None = None
    """features from here instead of the encoders, which are gone"""
    group: SequenceGroup | None = None
    """ranks that are given the same batches, and encode them together"""
    clock: Clocked = unclocked
    """counts what both kinds of encoders take"""

    @torch.no_grad()
    def __call__(self, raw: RawBatch) -> Batch:
        """Latents of images and references in fp32, and the text features of the prompts."""
        num_samples, all_cached = len(raw.keys), raw.are_latents and self.text_cache is not None
        if self.group is None or all_cached or num_samples == 1:
            return self.encode(raw)
        mine = self.encode(raw.part(self.group.samples_of(num_samples)))
        whole = partial(self.group.gathered, num_samples=num_samples)
        text = {name: whole(features) for name, features in mine.text.items()}
        return Batch(whole(mine.latents), text, tuple(map(whole, mine.references)))

    def encode(self, raw: RawBatch) -> Batch:
        """All of a micro batch on this rank."""
        if raw.are_latents:
            (mean, *references), spread = raw.images, raw.spread
        else:
            with self.clock("autoencoder"):
                (mean, spread), *others = self.encode_images(raw.images)
            references = [other for other, _ in others]
        latents = mean if self.posterior_seed is None else drawn(mean, spread, raw.keys, self.posterior_seed)
        on_device = tuple(reference.to(self.device) for reference in references)
        with self.clock("text_engine"):
            text = self.encode_text(raw.prompts)
        return Batch(latents.to(self.device), text, on_device)

    @torch.no_grad()
    def encode_images(self, images: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """Pixels of each image (B, 3, h, w) -> mean and spread of its latents, each (B, C, H, W).  Not a collective."""
        with self.at_hand(self.autoencoder):
            return [encode_images(self.autoencoder, self.family, pixels.to(self.device)) for pixels in images]

    @torch.no_grad()
    def encode_text(self, prompts: dict[str, list[str]]) -> dict[str, Tensor]:
        """{transformer argument: features} of one prompt for each sample and text encoder."""
        if self.text_cache is not None:
            with runtime.together("reading the cached prompts"):  # a damaged record is one rank's, and ends all
                features = self.text_cache.read(prompts)
            return {name: value.to(self.device) for name, value in features.items()}
        with self.at_hand(*self.encoders.values()):
            return self.family.encode_text(self.encoders, self.tokenizers, prompts, self.max_sequence_length, self.device)

    @contextmanager
    def at_hand(self, *frozen: Any) -> Iterator[None]:
        """On the device inside the block, and the offloaded ones in CPU memory outside."""
        moving = [module for module in self.offloaded if any(module is other for other in frozen)]
        for module in moving:
            module.to(self.device)
        yield
        for module in moving:
            module.to("cpu")


def encode_images(autoencoder: Any, family: FluxFamily, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels (B, 3, h, w) in [-1, 1] -> normalised, patchified latents (B, C, H, W), fp32: mean and spread of the posterior."""
    mean, std = (x.to(pixels.device) for x in family.latent_statistics(autoencoder))
    posterior = autoencoder.encode(pixels.to(autoencoder.dtype)).latent_dist
    return (patchify(posterior.mode().float()) - mean) / std, patchify(posterior.std.float()) / std


def drawn(mean: Tensor, spread: Tensor, keys: list[SampleKey], seed: int) -> Tensor:
    """A latent of each sample (B, C, H, W), by its own generator."""
    noise = [torch.randn(mean.shape[1:], generator=sample_generator(seed, *key, "posterior")) for key in keys]
    return mean + spread * torch.stack(noise).to(mean.device)
