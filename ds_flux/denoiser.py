"""The one place where the transformer is called: training, validation and sampling all go through it.

B batch, C channels of a patchified latent, H W its height and width, L = H * W tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ds_flux import flow
from ds_flux.families.spec import FluxFamily
from ds_flux.latents import Batch, image_ids, pack, text_ids


def predict_velocity(
    transformer: Callable[..., tuple[Tensor]],
    family: FluxFamily,
    noisy: Tensor,
    sigma: Tensor,
    batch: Batch,
    guidance: Tensor | None,
) -> Tensor:
    """noisy (B, C, H, W) at sigma (B,) -> velocity tokens (B, L, C) of the image being denoised.

    Tokens, ids and timestep as the diffusers pipeline builds them; the transformer itself multiplies the timestep and
    `guidance` (B,) by 1000.  Reference images are further tokens, cut off the prediction.
    """
    axes, device = family.num_position_axes, noisy.device
    images = [(noisy, 0)] + [(ref, (i + 1) * family.reference_t_stride) for i, ref in enumerate(batch.references)]
    text_length = batch.text["encoder_hidden_states"].shape[1]
    velocity = transformer(
        hidden_states=torch.cat([pack(x) for x, _ in images], dim=1),
        img_ids=torch.cat([image_ids(*x.shape[-2:], axes, t) for x, t in images]).to(device),
        txt_ids=text_ids(text_length, axes).to(device),
        timestep=sigma,
        guidance=guidance,
        return_dict=False,
        **batch.text,
    )[0]
    return velocity[:, : noisy.shape[-2] * noisy.shape[-1]]


def denoising_loss(
    transformer: Callable[..., tuple[Tensor]],
    family: FluxFamily,
    batch: Batch,
    sigma: Tensor,
    noise: Tensor,
    guidance: Tensor | None,
) -> Tensor:
    """Flow-matching loss of each sample, (B,), unweighted.  Whoever calls picks sigma (B,) and noise (B, C, H, W).

    The mix is made in fp32 and rounded once, to the dtype of the text features, which is the transformer's.
    """
    dtype = batch.text["encoder_hidden_states"].dtype
    noisy = flow.interpolate(batch.latents, noise, sigma).to(dtype)
    velocity = predict_velocity(transformer, family, noisy, sigma, batch, guidance)
    return flow.flow_matching_loss(velocity, pack(flow.velocity_target(batch.latents, noise)))
