"""The models of a run, from a diffusers-layout folder or hub id: transformer, text encoders, autoencoder, scheduler."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn

from ds_flux import UserError, lora, runtime
from ds_flux.config import LoraConfig, ModelConfig
from ds_flux.families.registry import FAMILIES
from ds_flux.families.spec import FluxFamily, TextEncoderSpec
from ds_flux.flags import check_known
from ds_flux.randomness import keyed_generator
from ds_flux.zero.weights import RandomWeights, SafetensorsFolder, WeightSource, fill_module

TRANSFORMER_FILE, TRANSFORMERS_FILE = "diffusion_pytorch_model", "model"


@dataclass(frozen=True)
class Architecture:
    """What the transformer is, before it has weights."""

    family: FluxFamily
    config: dict[str, Any]
    folder: Path | None  # of its weights; None: from scratch

    @property
    def has_guidance(self) -> bool:
        """Whether the transformer takes the distilled guidance value (dev does, schnell does not)."""
        return bool(self.config.get("guidance_embeds"))

    @property
    def default_sequence_length(self) -> int:
        """Text tokens the checkpoint was made for: 512 with guidance embedding (dev), 256 without (schnell)."""
        return 512 if self.has_guidance else 256


def component_folder(config: ModelConfig, component: str) -> Path:
    """Where a component lies: its own flag, else in the model folder, else fetched from the hub id.

    Raises:
        UserError: it is nowhere.
    """
    own = vars(config).get(f"{component}_path")
    root = Path(own or str(config.pretrained_model_name_or_path)).expanduser()
    if own and has_files(root):
        return root
    flag = f"{component}_path" if own else "pretrained_model_name_or_path"
    if root.is_dir():
        if has_files(root / component):
            return root / component
        raise UserError(f"--{flag} {root}: there is no {component} in it")
    if str(root).startswith((".", "/", "~")) or str(root).count("/") != 1:
        raise UserError(f"--{flag} {root}: no such folder")
    return download(str(root), component, config) / component


def has_files(folder: Path) -> bool:
    """Whether a folder is a component itself and not a folder of components."""
    return any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json", "scheduler_config.json"))


def download(repo_id: str, component: str, config: ModelConfig) -> Path:
    """Fetch one component of a hub id into the cache."""
    weights = f"*.{config.variant}*.safetensors" if config.variant else "*.safetensors"
    patterns = [f"{component}/{pattern}" for pattern in ("*.json", "*.txt", "*.model", weights)]
    try:
        return Path(snapshot_download(repo_id, revision=config.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{repo_id} is no folder here, and as a hub id it cannot be fetched: {reason}") from error


def find_architecture(config: ModelConfig) -> Architecture:
    """Family and transformer config, from the model folder or, with --from_scratch, perhaps from a flavour or file."""
    flavours = {name: family for family in FAMILIES.values() for name in family.flavours}
    if config.from_scratch and config.transformer_config in flavours:
        family = flavours[config.transformer_config]
        return Architecture(family, family.flavours[config.transformer_config], None)
    if config.from_scratch and config.transformer_config is not None:
        path = Path(config.transformer_config)
        if not path.is_file():
            check_known([config.transformer_config], flavours, "--transformer_config (no such file, nor a flavour)")
    else:
        path = component_folder(config, "transformer") / "config.json"
    stored = json.loads(path.read_text())
    name = stored.get("_class_name", "")
    check_known([name], FAMILIES, f"transformer class in {path}")
    known = {key: value for key, value in stored.items() if not key.startswith("_")}
    return Architecture(FAMILIES[name], known, None if config.from_scratch else path.parent)


def transformer_on_meta(architecture: Architecture) -> Any:
    """The transformer without memory for its weights."""
    with torch.device("meta"):
        return architecture.family.transformer_class.from_config(architecture.config)


def transformer_weights(architecture: Architecture, config: ModelConfig, seed: int) -> WeightSource:
    """Where its weights come from."""
    if architecture.folder is None:
        return RandomWeights(seed, initial_weight)
    return SafetensorsFolder(architecture.folder, TRANSFORMER_FILE, config.variant)


def build_transformer(
    architecture: Architecture, config: ModelConfig, lora_config: LoraConfig, seed: int, ds_config: dict[str, Any] | None
) -> Any:
    """The transformer ready for its engine.  The order matters; see the comments.

    Args:
        ds_config: partition the weights by this config (stage 3); None: whole on this rank.
    """
    is_lora = lora_config.rank is not None
    transformer = transformer_on_meta(architecture)
    transformer.requires_grad_(not is_lora)  # before the weights: a partition remembers it
    fill_module(transformer, transformer_weights(architecture, config, seed), weight_dtype(config), ds_config)
    if is_lora:
        lora.inject(transformer, lora_config, architecture.family.lora_layers, seed)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    return transformer.train()


def weight_dtype(config: ModelConfig) -> torch.dtype:
    """Of everything the engines and encoders compute in."""
    return torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32


def initial_weight(name: str, tensor: Tensor, seed: int) -> None:
    """Fill one tensor for pre-training.

    adaLN-Zero (Peebles and Xie 2023, section 3.2): modulation and output start at zero, so every block starts as the
    identity; other matrices Xavier uniform, biases zero, norm weights one.
    """
    is_zero = name.endswith(".bias") or (".linear." in name and "norm" in name) or name.startswith("proj_out.")
    if is_zero:
        tensor.zero_()
    elif tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        nn.init.xavier_uniform_(tensor, generator=keyed_generator("weight", seed, name))


def text_encoder_on_meta(spec: TextEncoderSpec, folder: Path) -> Any:
    """A text encoder without memory for its weights."""
    config = spec.model_class.config_class.from_pretrained(folder)
    with torch.device("meta"):
        encoder = spec.model_class(config)
    encoder.tie_weights()
    return encoder


def build_text_encoder(spec: TextEncoderSpec, config: ModelConfig, ds_config: dict[str, Any] | None) -> nn.Module:
    """A frozen text encoder: partitioned by `ds_config`, or whole."""
    folder = component_folder(config, spec.component)
    if not spec.is_large:
        encoder = spec.model_class.from_pretrained(folder, variant=config.variant, dtype=weight_dtype(config)).to(
            runtime.device()
        )
    else:
        encoder = text_encoder_on_meta(spec, folder).requires_grad_(False)
        fill_module(encoder, SafetensorsFolder(folder, TRANSFORMERS_FILE, config.variant), weight_dtype(config), ds_config)
    return encoder.requires_grad_(False).eval()


def build_tokenizers(family: FluxFamily, config: ModelConfig) -> dict[str, Any]:
    """{text encoder: its tokenizer}."""
    return {
        spec.component: spec.tokenizer_class.from_pretrained(component_folder(config, spec.tokenizer))
        for spec in family.text_encoders
    }


def build_autoencoder(family: FluxFamily, config: ModelConfig) -> Any:
    """The frozen autoencoder, whole on every rank."""
    folder = component_folder(config, "vae")
    autoencoder = family.autoencoder_class.from_pretrained(folder, variant=config.variant, torch_dtype=weight_dtype(config))
    return autoencoder.to(runtime.device()).requires_grad_(False).eval()


def pixels_per_token(autoencoder: Any) -> int:
    """Side of the square of pixels that one token stands for: 16 for the released autoencoder."""
    return 2 * 2 ** (len(autoencoder.config.block_out_channels) - 1)


def build_scheduler(config: ModelConfig) -> FlowMatchEulerDiscreteScheduler:
    """The model's sampling schedule."""
    return FlowMatchEulerDiscreteScheduler.from_pretrained(component_folder(config, "scheduler"))


def fingerprint(architecture: Architecture, config: ModelConfig, seed: int) -> str:
    """The identity of the base weights: names, shapes and the first elements of every tensor, or the seed they grow from."""
    digest = hashlib.blake2b(json.dumps(architecture.config, sort_keys=True, default=list).encode(), digest_size=16)
    if architecture.folder is None:
        digest.update(f"from scratch, seed {seed}".encode())
        return digest.hexdigest()
    source = SafetensorsFolder(architecture.folder, TRANSFORMER_FILE, config.variant)
    for name, entry in sorted(source.entries.items()):
        head = torch.empty(min(1024, torch.Size(entry.shape).numel()))
        source.read(name, entry.shape, 0, head)
        digest.update(f"{name} {entry.shape}".encode() + head.numpy().tobytes())
    return digest.hexdigest()
