"""What differs between FLUX families, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ds_flux.latents import Positions


@dataclass(frozen=True, kw_only=True)
class TextEncoderSpec:
    """One text encoder of a family, by its place in the model folder."""

    component: str
    """subfolder of the encoder, as the pipeline names it"""
    tokenizer: str
    """subfolder of its tokenizer"""
    architecture: str
    """the class that the encoder's config.json names"""
    model_class: type
    """what is built of it: that class, or the text decoder inside it"""
    tokenizer_class: type
    layers: tuple[int, ...] = ()
    """hidden states that are stacked to features; nothing above the last one is loaded.  Empty: the model's own output"""
    argument: str = "encoder_hidden_states"
    """the transformer argument that its features go to"""
    width_key: str = "joint_attention_dim"
    """the entry of the transformer's config that the width of the features must equal"""
    is_large: bool = True
    """whether it is worth a ZeRO-3 engine of its own"""
    released: dict[int, dict[str, Any]] = field(default_factory=dict)
    """{width: its config's shapes} of the released encoders, to plan with where there is no folder"""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One image to be made by the stock pipeline."""

    text: dict[str, Tensor]
    """{transformer argument: features of the prompt}, batch of one"""
    null_text: dict[str, Tensor]
    """the same of the empty prompt, for classifier-free guidance"""
    references: list[Image.Image]
    height: int | None
    """pixels; None: the pipeline's choice, e.g. the size of the reference"""
    width: int | None
    num_inference_steps: int
    guidance_scale: float | None
    """None: the pipeline's default"""
    is_distilled: bool
    """step-distilled: no classifier-free guidance"""
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True)
class FluxFamily:
    """An architecture generation.  A field differs between two families and is not in the checkpoint's own config.json."""

    name: str
    transformer_class: type
    """diffusers transformer; its forward() argument names are the names used throughout ds_flux"""
    autoencoder_class: type
    text_encoders: tuple[TextEncoderSpec, ...]
    positions: Positions
    reference_arguments: tuple[str, str] = ("hidden_states", "img_ids")
    """transformer arguments that take the references' tokens and their ids; those of the image: further tokens of it"""
    pads_single_reference: bool = False
    """a reference that is the only one is padded to whole tokens; otherwise references are cropped to them"""
    text_window: int | None = None
    """prompts are padded to a multiple of this many tokens; None: to the full text length"""
    lora_layers: tuple[str, ...]
    """layers that are adapted by default: ends of their paths, or patterns with *"""
    lora_loader: type
    """diffusers mixin that reads LoRA files in every spelling known for the family"""
    flavours: dict[str, dict[str, Any]]
    """transformer configs for pre-training, by name"""
    released_autoencoder: dict[str, Any] = field(default_factory=dict)
    """shapes of the released autoencoder beside its class's defaults, to plan with where there is no folder"""
    scheduler_config: dict[str, Any] | None = None
    """of the sampling schedule, where the model folder has none; None: it must have one"""
    text_length: Callable[[dict[str, Any]], int]
    """transformer config -> text tokens the checkpoint was made for"""
    latent_statistics: Callable[[Any], tuple[Tensor, Tensor]]
    """autoencoder -> (mean, std) of patchified latents, each (1, C, 1, 1)"""
    count_tokens: Callable[[dict[str, Any], list[str]], list[int]]
    """(tokenizers, prompts) -> tokens of each prompt in the large encoder, template included, before it is cut or padded"""
    encode_text: Callable[..., dict[str, Tensor]]
    """(encoders, tokenizers, prompts, max_sequence_length, device) -> {transformer argument: tensor}"""
    sampling_mu: Callable[[int, int], float]
    """(image tokens, steps) -> log-SNR shift of the sampling schedule, where the scheduler shifts by resolution"""
    sample: Callable[[dict[str, Any], SampleRequest], Image.Image]
    """({transformer, vae, scheduler}, request) -> an image, by the stock pipeline"""

    @property
    def large_encoder(self) -> TextEncoderSpec:
        """The text encoder that is worth an engine."""
        return next(spec for spec in self.text_encoders if spec.is_large)
