"""The batch of a step; latents <-> tokens; the position ids of each token.  Shared by every family.

B batch, C channels of a patchified latent, H W its height and width, L = H * W tokens, P position axes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What a step needs, whichever way it was made."""

    latents: Tensor  # (B, C, H, W), normalised and patchified
    text: dict[str, Tensor]  # {transformer argument: (B, L, D) or (B, D)}
    references: tuple[Tensor, ...] = ()  # conditioning images, each (B, C, h, w); none for text-to-image


def patchify(latents: Tensor) -> Tensor:
    """(B, c, 2H, 2W) -> (B, 4c, H, W); channel order (c, row, column), as `FluxPipeline._pack_latents`."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def unpatchify(latents: Tensor) -> Tensor:
    """(B, 4c, H, W) -> (B, c, 2H, 2W), the inverse of `patchify`."""
    b, c, h, w = latents.shape
    return latents.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> tokens (B, L, C)."""
    return latents.flatten(2).transpose(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens (B, L, C) -> (B, C, H, W), the inverse of `pack`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def image_ids(height: int, width: int, num_axes: int, t: int = 0) -> Tensor:
    """(L, P) ids (t, h, w, ...) of one image; t = 0 is the image being denoised."""
    ids = torch.zeros(height, width, num_axes)
    ids[..., 0] = t
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None, :]
    return ids.flatten(0, 1)


def text_ids(length: int, num_axes: int) -> Tensor:
    """(L, P): zeros with three axes; the fourth axis counts text tokens."""
    ids = torch.zeros(length, num_axes)
    if num_axes == 4:
        ids[:, 3] = torch.arange(length)
    return ids
