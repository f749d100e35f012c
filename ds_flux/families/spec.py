"""What differs between FLUX families, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TextEncoderSpec:
    """One text encoder of a family, by its place in the model folder."""

    component: str
    """subfolder of the encoder, as the pipeline names it"""
    tokenizer: str
    """subfolder of its tokenizer"""
    model_class: type
    tokenizer_class: type
    is_large: bool
    """whether it is worth a ZeRO-3 engine of its own"""


@dataclass(frozen=True, kw_only=True)
class FluxFamily:
    """An architecture generation.  A field differs between two families and is not in the checkpoint's own config.json."""

    name: str
    transformer_class: type
    """diffusers transformer; its forward() argument names are the names used throughout ds_flux"""
    autoencoder_class: type
    text_encoders: tuple[TextEncoderSpec, ...]
    num_position_axes: int
    """3: (t, h, w); 4: (t, h, w, l)"""
    reference_t_stride: int
    """the i-th reference image sits at t = (i + 1) * stride"""
    lora_layers: tuple[str, ...]
    """modules that diffusers' LoRA script adapts by default"""
    flavours: dict[str, dict[str, Any]]
    """transformer configs for pre-training, by name"""
    latent_statistics: Callable[[Any], tuple[Tensor, Tensor]]
    """autoencoder -> (mean, std) of patchified latents, each (1, C, 1, 1)"""
    encode_text: Callable[..., dict[str, Tensor]]
    """(encoders, tokenizers, prompts, max_sequence_length) -> {transformer argument: tensor}"""
    sampling_mu: Callable[[int, int], float]
    """(image tokens, steps) -> log-SNR shift of the sampling schedule"""
