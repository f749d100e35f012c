"""A run's models as shapes alone, to plan with: from the folder's config files, or, without a folder, as they were released."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_flux import UserError, lora, models
from ds_flux.activations import Pass, measure, measure_whole
from ds_flux.config import Config, ModelConfig
from ds_flux.families.spec import FluxFamily, TextEncoderSpec
from ds_flux.flags import names_of
from ds_flux.flops import loss_on_meta
from ds_flux.latents import Batch
from ds_flux.zero.ds_config import ModelSize
from ds_flux.zero.memory import Weights

CONFIGS = ["*.json", "*/*.json"]
WINDOWS = 6  # of text, where a model takes windows of it and nobody says how long prompts are


@dataclass(frozen=True)
class Outline:
    """Shapes of everything a run computes with."""

    config: Config
    architecture: models.Architecture
    transformer: nn.Module
    """on meta, with its adapters"""
    size: ModelSize
    """of the transformer without adapters"""
    text: Weights | None
    """of the large text encoder; None: not known"""
    autoencoder: nn.Module
    grid: int
    """pixels of the side of a token"""
    small: tuple[int, ...]
    """elements of the frozen models that every rank has whole"""
    notes: tuple[str, ...]
    passes: dict[tuple[int, ...], Pass] = field(default_factory=dict)
    """what has been measured, by side, batch size and, of the transformer, whether blocks are recomputed"""

    @property
    def weights(self) -> Weights:
        """Of the transformer."""
        return Weights.of(self.transformer, models.weight_dtype(self.config.model).itemsize, self.size)

    @property
    def num_text_tokens(self) -> int:
        """Of a prompt."""
        family, longest = self.architecture.family, models.text_length(self.config.model, self.architecture)
        if family.text_window is None or self.config.model.max_sequence_length is not None:
            return longest
        return min(longest, WINDOWS * family.text_window)

    def num_tokens(self, side: int) -> int:
        """Image tokens of a sample whose image is a square of so many pixels, references included."""
        data = self.config.data
        columns = [] if data.cond_image_column is None else names_of(data.cond_image_column)
        reference = int(data.reference_max_pixels**0.5) // self.grid
        return (side // self.grid) ** 2 + len(columns) * reference**2

    def batch_size(self, side: int) -> int:
        """Images of a micro batch."""
        train = self.config.train
        if train.tokens_per_batch is None:
            return train.train_batch_size
        return max(1, train.tokens_per_batch // self.num_tokens(side))

    def batch(self, side: int, batch_size: int) -> Batch:
        """Of images that are squares of so many pixels, and their references; on meta."""
        config, family = self.architecture.config, self.architecture.family
        dtype = models.weight_dtype(self.config.model)
        text = {
            spec.argument: torch.empty(
                *(batch_size, self.num_text_tokens)[: 2 if spec.is_large else 1], config[spec.width_key], dtype=dtype
            )
            for spec in family.text_encoders
        }
        channels, tokens = config["in_channels"], side // self.grid
        left = self.num_tokens(side) - tokens**2
        references = (torch.empty(batch_size, channels, 1, left),) if left else ()
        return Batch(torch.empty(batch_size, channels, tokens, tokens), text, references)

    def loss(self, transformer: nn.Module, side: int, batch_size: int) -> Tensor:
        """The training loss, on meta."""
        with torch.device("meta"):
            batch = self.batch(side, batch_size)
        return loss_on_meta(transformer, self.architecture, batch)

    def measure(self, side: int, batch_size: int, checkpointing: bool) -> Pass:
        """Memory and computation of one micro batch's forward and backward pass.

        Where every n-th block is recomputed it lies between what all and what none would take, in that proportion.
        """
        every = self.config.model.gradient_checkpointing_every
        if checkpointing and every > 1:
            all_of_them, none = (self.measure_alike(side, batch_size, recomputes) for recomputes in (True, False))
            return (all_of_them + none * (every - 1)).shared(every)
        return self.measure_alike(side, batch_size, checkpointing)

    def measure_alike(self, side: int, batch_size: int, checkpointing: bool) -> Pass:
        """The same where all blocks are recomputed or none; measured once."""
        key, transformer = (side, batch_size, checkpointing), cast(Any, self.transformer)
        if key not in self.passes:
            transformer.enable_gradient_checkpointing() if checkpointing else transformer.disable_gradient_checkpointing()
            self.passes[key] = measure(transformer, lambda module: self.loss(module, side, batch_size))
        return self.passes[key]

    def encoding_bytes(self, side: int, batch_size: int) -> int:
        """Memory of the autoencoder while it encodes a micro batch."""
        key = (side, batch_size)
        if key not in self.passes:
            pixels = torch.empty(batch_size, 3, side, side, dtype=models.weight_dtype(self.config.model), device="meta")
            with torch.no_grad():
                self.passes[key] = measure_whole(self.autoencoder, lambda: self.autoencoder.encode(pixels))
        return self.passes[key].peak_bytes


def draw(config: Config) -> Outline:
    """The outline of a run's models.

    Raises:
        UserError: neither a model folder nor the name of a known architecture is given.
    """
    model, notes = config.model, []
    if model.transformer_config is not None and not model.from_scratch:
        raise UserError("--transformer_config needs --from_scratch")
    if model.pretrained_model_name_or_path is None or models.is_flavour(model):
        if not models.is_flavour(model):
            raise UserError(
                "--pretrained_model_name_or_path is missing; without a folder give --from_scratch and --transformer_config "
                f"({', '.join(models.FLAVOURS)})"
            )
        architecture = models.flavour(str(model.transformer_config))
        notes.append("text encoder and autoencoder as they were released: the transformer's shapes come without a folder")
        folder = None
    else:
        folder = with_configs(model)
        architecture = models.find_architecture(folder)
    dtype = models.weight_dtype(model)
    transformer = nn.Module.to(models.transformer_on_meta(architecture), dtype).train()
    size = ModelSize.of(transformer)
    if config.lora.rank is not None:
        lora.inject(transformer, replace(config.lora, lora_init_from=None), architecture.family, 0)
    encoders = {spec.component: encoder_of(spec, architecture, folder) for spec in architecture.family.text_encoders}
    large = encoders.pop(architecture.family.large_encoder.component)
    if large is None:
        notes.append("text encoder not counted: there is no folder, and none was released for this width")
    autoencoder = nn.Module.to(autoencoder_of(architecture.family, folder), dtype)
    whole = [autoencoder, *(encoder for encoder in encoders.values() if encoder is not None)]
    return Outline(
        config=config,
        architecture=architecture,
        transformer=transformer,
        size=size,
        text=None if large is None else Weights.of(large.requires_grad_(False), dtype.itemsize),
        autoencoder=autoencoder,
        grid=2 * 2 ** (len(autoencoder.config.block_out_channels) - 1),
        small=tuple(parameter.numel() for module in whole for parameter in module.parameters()),
        notes=tuple(notes),
    )


def with_configs(model: ModelConfig) -> ModelConfig:
    """Of a hub id only the config files are fetched."""
    root = Path(str(model.pretrained_model_name_or_path)).expanduser()
    if root.is_dir() or str(root).startswith((".", "/")) or str(root).count("/") != 1:
        return model
    return replace(model, pretrained_model_name_or_path=str(models.fetch(str(root), CONFIGS, model)))


def encoder_of(spec: TextEncoderSpec, architecture: models.Architecture, folder: ModelConfig | None) -> Any:
    """A text encoder on meta: the folder's, or the one that was released for this transformer; None: neither."""
    if folder is not None:
        return models.text_encoder_on_meta(spec, models.component_folder(folder, spec.component))
    width = architecture.config[spec.width_key] // max(1, len(spec.layers))
    return (
        models.encoder_on_meta(spec, spec.model_class.config_class(**spec.released[width])) if width in spec.released else None
    )


def autoencoder_of(family: FluxFamily, folder: ModelConfig | None) -> Any:
    """The autoencoder on meta: the folder's, or the one that was released."""
    stored = family.released_autoencoder
    if folder is not None:
        stored = models.read_config(models.component_folder(folder, "vae") / "config.json")
    with torch.device("meta"):
        return family.autoencoder_class.from_config(stored).requires_grad_(False).eval()
