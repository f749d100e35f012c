"""The attention backends of diffusers: which of them run here, and choosing one."""

from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from ds_flux import UserError
from ds_flux.flags import check_known


def choose(transformer: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Have the transformer compute attention by `name`.

    Raises:
        UserError: no such backend, or one that does not run here; those that do are listed.
    """
    names = [backend.value for backend in AttentionBackendName]
    check_known([name], names, "--attention_backend")
    trouble = try_out(name, device, dtype)
    if trouble is not None:
        # a hub backend is fetched when it is asked for, so it is not tried unasked
        others = [other for other in names if not other.endswith("_hub") and try_out(other, device, dtype) is None]
        raise UserError(f"--attention_backend {name} does not run here ({trouble}); these do: {', '.join(others)}")
    transformer.set_attention_backend(name)


def try_out(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """What goes wrong with a small forward and backward pass, (B, L, heads, D) = (1, 128, 2, 64); None: nothing does."""
    query, key, value = (torch.randn(1, 128, 2, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    try:
        with attention_backend(name):
            dispatch_attention_fn(query, key, value).sum().backward()
    except Exception as error:  # noqa: BLE001  (each backend has failures of its own)
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None
