"""The one place where the transformer is called: training, validation and sampling all go through it.

B batch, C channels of a patchified latent, H W its height and width, L = H * W tokens.  Where ranks share a sequence, each
segment of it (text, image, each reference) is cut into their shards, and l is the number of tokens of one.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ds_flux import flow
from ds_flux.families.spec import FluxFamily
from ds_flux.latents import WHOLE, Batch, TokenShard, image_ids, pack, text_ids


def predict_velocity(
    transformer: Callable[..., tuple[Tensor]],
    family: FluxFamily,
    noisy: Tensor,
    sigma: Tensor,
    batch: Batch,
    extra: dict[str, Tensor],
    shard: TokenShard = WHOLE,
) -> Tensor:
    """noisy (B, C, H, W) at sigma (B,) -> velocity tokens (B, l, C) of the image being denoised.

    Tokens, ids and timestep as the diffusers pipeline builds them; the transformer itself multiplies the timestep and what
    is in `extra` by 1000.  Reference images follow the image in its own sequence, from which they are cut off again, or
    have arguments of their own.

    Args:
        extra: {transformer argument: (B,)}, `guidance` and the like, for the models that take them.
    """
    device = noisy.device
    arguments: dict[str, list[Tensor]] = defaultdict(list)
    for number, image in enumerate([noisy, *batch.references]):
        tokens, ids = family.reference_arguments if number else ("hidden_states", "img_ids")
        arguments[tokens].append(shard(pack(image), 1).to(noisy.dtype))
        arguments[ids].append(shard(image_ids(*image.shape[-2:], family.positions, number), 0).to(device))
    text_length = batch.text["encoder_hidden_states"].shape[1]
    velocity = transformer(
        txt_ids=shard(text_ids(text_length, family.positions), 0).to(device),
        timestep=sigma,
        return_dict=False,
        **{name: torch.cat(parts, dim=-2) for name, parts in arguments.items()},
        **{name: shard(features, 1) if features.ndim == 3 else features for name, features in batch.text.items()},
        **extra,
    )[0]
    return velocity[:, : noisy.shape[-2] * noisy.shape[-1] // shard.size]


def denoising_loss(
    transformer: Callable[..., tuple[Tensor]],
    family: FluxFamily,
    batch: Batch,
    sigma: Tensor,
    noise: Tensor,
    extra: dict[str, Tensor],
    shard: TokenShard = WHOLE,
) -> Tensor:
    """Flow-matching loss of each sample, (B,), unweighted.  Whoever calls picks sigma (B,) and noise (B, C, H, W).

    Of a shard it is the mean over its tokens: the mean over the ranks that share a sequence is the loss.

    The mix is made in fp32 and rounded once, to the dtype of the text features, which is the transformer's.
    """
    dtype = batch.text["encoder_hidden_states"].dtype
    noisy = flow.interpolate(batch.latents, noise, sigma).to(dtype)
    velocity = predict_velocity(transformer, family, noisy, sigma, batch, extra, shard)
    return flow.flow_matching_loss(velocity, shard(pack(flow.velocity_target(batch.latents, noise)), 1))
