"""The batch of a step; latents <-> tokens; the position ids of each token.  Shared by every family.

B batch, C channels of a patchified latent, H W its height and width, L = H * W tokens, P position axes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How a family numbers its tokens for the rotary embedding."""

    num_axes: int
    """3: (t, h, w); 4: (t, h, w, l), where l counts text tokens"""
    scale: float = 1.0
    """of the h and w coordinates"""
    reference_axis: int = 0
    """the axis that tells reference images apart: t or l"""
    reference_stride: int
    """the i-th reference image sits at (i + 1) * stride on that axis; the image being denoised at 0"""


@dataclass(frozen=True)
class Batch:
    """What a step needs, whichever way it was made."""

    latents: Tensor  # (B, C, H, W), normalised and patchified
    text: dict[str, Tensor]  # {transformer argument: (B, L, D) or (B, D)}
    references: tuple[Tensor, ...] = ()  # conditioning images, each (B, C, h, w); none for text-to-image


@dataclass(frozen=True)
class TokenShard:
    """One rank's share of every segment of a sequence, where several ranks hold it together."""

    rank: int = 0
    size: int = 1

    def __call__(self, tokens: Tensor, dim: int) -> Tensor:
        """The share of (.., L, ..) along `dim`; L is a multiple of the size."""
        return tokens.unflatten(dim, (self.size, -1)).select(dim, self.rank)


WHOLE = TokenShard()


def patchify(latents: Tensor) -> Tensor:
    """(B, c, 2H, 2W) -> (B, 4c, H, W); channel order (c, row, column), as `FluxPipeline._pack_latents`."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> tokens (B, L, C)."""
    return latents.flatten(2).transpose(1, 2)


def image_ids(height: int, width: int, positions: Positions, number: int = 0) -> Tensor:
    """(L, P) ids of one image: number 0 is the image being denoised, 1, 2, ... are its references."""
    ids = torch.zeros(height, width, positions.num_axes)
    ids[..., positions.reference_axis] = number * positions.reference_stride
    ids[..., 1] = torch.arange(height)[:, None] * positions.scale
    ids[..., 2] = torch.arange(width)[None, :] * positions.scale
    return ids.flatten(0, 1)


def text_ids(length: int, positions: Positions) -> Tensor:
    """(L, P): zeros with three axes; the fourth axis counts text tokens."""
    ids = torch.zeros(length, positions.num_axes)
    if positions.num_axes == 4:
        ids[:, 3] = torch.arange(length)
    return ids
