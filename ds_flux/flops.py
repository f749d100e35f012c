"""Floating-point operations of training steps: what the model needs, whatever is computed twice to save memory."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_flux import lora, models
from ds_flux.activations import measure
from ds_flux.denoiser import denoising_loss
from ds_flux.latents import Batch
from ds_flux.sections import LoraConfig, ModelConfig

Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True)
class ModelFlops:
    """Of the forward and backward passes of a transformer, by the shapes of what it is given."""

    transformer: nn.Module
    """on meta, with its adapters"""
    architecture: models.Architecture
    of_shapes: dict[Shapes, int] = field(default_factory=dict)
    """what has been measured, for one sample"""

    @staticmethod
    def of_model(architecture: models.Architecture, model: ModelConfig, adapters: LoraConfig) -> "ModelFlops":
        """Of a run's transformer, without its weights."""
        transformer = nn.Module.to(models.transformer_on_meta(architecture), models.weight_dtype(model)).train()
        if adapters.rank is not None:
            lora.inject(transformer, replace(adapters, lora_init_from=None), architecture.family, 0)
        return ModelFlops(transformer, architecture)

    def of(self, batch: Batch) -> int:
        """Of a batch; measured on meta, in a fraction of a second, when its shapes are met for the first time.

        Attention counts as fused kernels compute it, which take the product of queries and keys once more in the backward pass.
        """
        one = Batch(
            batch.latents[:1].to("meta"),
            {name: features[:1].to("meta") for name, features in batch.text.items()},
            tuple(reference[:1].to("meta") for reference in batch.references),
        )
        shapes = (one.latents.shape, *(part.shape for part in (*one.text.values(), *one.references)))
        if shapes not in self.of_shapes:
            self.of_shapes[shapes] = measure(
                self.transformer, lambda module: loss_on_meta(module, self.architecture, one)
            ).num_flops
        return self.of_shapes[shapes] * len(batch.latents)


def loss_on_meta(transformer: Any, architecture: models.Architecture, batch: Batch) -> Tensor:
    """The training loss, all of it on meta."""
    sigma = torch.empty(len(batch.latents), device="meta")
    extra = {"guidance": sigma} if architecture.has_guidance else {}
    extra |= {"target_timestep": sigma} if architecture.is_flow_map else {}
    return denoising_loss(transformer, architecture.family, batch, sigma, torch.empty_like(batch.latents), extra).mean()


def num_tokens(batch: Batch) -> int:
    """That the transformer is given for a batch: text, images, references."""
    num_text = batch.text["encoder_hidden_states"].shape[1]
    images = (batch.latents, *batch.references)
    return len(batch.latents) * (num_text + sum(image.shape[-2] * image.shape[-1] for image in images))
