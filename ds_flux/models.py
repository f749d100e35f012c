"""The models of a run, from a diffusers-layout folder or hub id: transformer, text encoders, autoencoder, scheduler."""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig

from ds_flux import UserError, attention, lora, runtime
from ds_flux.config import LoraConfig, ModelConfig
from ds_flux.families.registry import FAMILIES, FLAVOURS, families_of
from ds_flux.families.spec import FluxFamily, TextEncoderSpec
from ds_flux.flags import check_known
from ds_flux.randomness import keyed_generator
from ds_flux.zero import blocks
from ds_flux.zero.sequence_parallel import SequenceGroup
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
        """Whether the transformer takes the distilled guidance value."""
        return bool(self.config.get("guidance_embeds"))

    @property
    def is_flow_map(self) -> bool:
        """Whether it is step-distilled to a map between any two timesteps."""
        return bool(self.config.get("flow_map"))


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


def components(family: FluxFamily) -> list[str]:
    """The subfolders a run needs beside the transformer."""
    text = [part for spec in family.text_encoders for part in (spec.component, spec.tokenizer)]
    return [*text, "vae", *(["scheduler"] if family.scheduler_config is None else [])]


def has_files(folder: Path) -> bool:
    """Whether a folder is a component itself and not a folder of components."""
    return any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json", "scheduler_config.json"))


def download(repo_id: str, component: str, config: ModelConfig) -> Path:
    """Fetch one component of a hub id into the cache."""
    weights = f"*.{config.variant}*.safetensors" if config.variant else "*.safetensors"
    patterns = [f"{component}/{pattern}" for pattern in ("*.json", "*.txt", "*.model", "*.jinja", weights)]
    return fetch(repo_id, patterns, config)


def fetch(repo_id: str, patterns: list[str], config: ModelConfig) -> Path:
    """The local copy of a hub id, with these files in it.  Raises UserError."""
    try:
        return Path(snapshot_download(repo_id, revision=config.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{repo_id} is no folder here, and as a hub id it cannot be fetched: {reason}") from error


def find_architecture(config: ModelConfig) -> Architecture:
    """Family and transformer config, from the model folder or, with --from_scratch, perhaps from a flavour or file.

    Raises:
        UserError: a class that no family has, or a transformer that does not fit its text encoders.
    """
    if is_flavour(config):
        architecture = flavour(str(config.transformer_config))
    else:
        path = transformer_config_path(config)
        stored = read_config(path)
        family = find_family(config, str(stored.get("_class_name")), path)
        architecture = Architecture(family, with_defaults(family, stored), None if config.from_scratch else path.parent)
    check_widths(config, architecture.family, architecture.config)
    return architecture


def is_flavour(config: ModelConfig) -> bool:
    """Whether the transformer is one of the known architectures, from scratch."""
    return config.from_scratch and config.transformer_config in FLAVOURS


def flavour(name: str) -> Architecture:
    """A known architecture, from scratch."""
    return Architecture(FLAVOURS[name], with_defaults(FLAVOURS[name], FLAVOURS[name].flavours[name]), None)


def with_defaults(family: FluxFamily, stored: dict[str, Any]) -> dict[str, Any]:
    """A stored transformer config, complete."""
    parameters = inspect.signature(family.transformer_class.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {**defaults, **{key: value for key, value in stored.items() if not key.startswith("_")}}


def transformer_config_path(config: ModelConfig) -> Path:
    """The transformer's config.json."""
    if not config.from_scratch or config.transformer_config is None:
        return component_folder(config, "transformer") / "config.json"
    path = Path(config.transformer_config)
    if not path.is_file():
        check_known([config.transformer_config], FLAVOURS, "--transformer_config (no such file, nor a flavour)")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; UserError where there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def find_family(config: ModelConfig, transformer_class: str, path: Path) -> FluxFamily:
    """The family of a transformer class and the large text encoder beside it."""
    check_known([transformer_class], [f.transformer_class.__name__ for f in FAMILIES], f"transformer class in {path}")
    families = families_of(transformer_class)
    component = next(iter(families.values())).large_encoder.component
    encoder_path = component_folder(config, component) / "config.json"
    (name,) = read_config(encoder_path).get("architectures") or ["none"]
    check_known([name], families, f"text encoder for a {transformer_class}, in {encoder_path}")
    return families[name]


def check_widths(config: ModelConfig, family: FluxFamily, transformer_config: dict[str, Any]) -> None:
    """The features of every text encoder have the width that the transformer takes."""
    for spec in family.text_encoders:
        text_config = read_text_config(component_folder(config, spec.component))
        width, wanted = text_config.hidden_size * max(1, len(spec.layers)), transformer_config[spec.width_key]
        if width != wanted:
            raise UserError(
                f"the transformer does not fit its {spec.component}: it takes features of width {wanted} "
                f"({spec.width_key}), the encoder gives {width}"
            )


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
    architecture: Architecture,
    config: ModelConfig,
    lora_config: LoraConfig,
    seed: int,
    ds_config: dict[str, Any] | None,
    group: SequenceGroup | None = None,
) -> Any:
    """The transformer ready for its engine.  The order matters; see the comments.

    Args:
        ds_config: partition the weights by this config (stage 3); None: whole on this rank.
        group: ranks that share each sequence.
    """
    is_lora = lora_config.rank is not None
    transformer = transformer_on_meta(architecture)
    transformer.requires_grad_(not is_lora)  # before the weights: a partition remembers it
    fill_module(transformer, transformer_weights(architecture, config, seed), weight_dtype(config), ds_config)
    if is_lora:
        lora.inject(transformer, lora_config, architecture.family, seed)
    if config.attention_backend is not None:
        attention.choose(transformer, config.attention_backend, runtime.device(), weight_dtype(config))
    if group is not None:
        group.apply(transformer)
    prepare_blocks(transformer, config)
    return transformer.train()


def prepare_blocks(transformer: Any, config: ModelConfig) -> None:
    """Gradient checkpointing and compilation, as they are asked for."""
    call = blocks.plain_call
    if config.gradient_checkpointing:
        call = blocks.recomputing(transformer, config.gradient_checkpointing_every, config.offload_activations)
    if config.compile:
        call = blocks.compiled(transformer, call)
    if call is not blocks.plain_call:
        blocks.have_called(transformer, call)


def weight_dtype(config: ModelConfig) -> torch.dtype:
    """Of everything the engines and encoders compute in."""
    return torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32


def initial_weight(name: str, tensor: Tensor, seed: int) -> None:
    """Fill one tensor for pre-training.

    adaLN-Zero (Peebles and Xie 2023, section 3.2): modulation and output start at zero, so every block starts as the
    identity; other matrices Xavier uniform, biases zero, norm weights one.
    """
    is_modulation = ".linear." in name and ("norm" in name or "modulation" in name)
    is_zero = name.endswith(".bias") or is_modulation or name.startswith("proj_out.")
    if is_zero:
        tensor.zero_()
    elif tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        nn.init.xavier_uniform_(tensor, generator=keyed_generator("weight", seed, name))


def read_text_config(folder: Path) -> Any:
    """The config of a text encoder, of a model of several kinds of input the part for text."""
    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: {' '.join(str(error).split())}") from None


def text_encoder_on_meta(spec: TextEncoderSpec, folder: Path) -> Any:
    """A text encoder without memory for its weights; of a language model only what the features need."""
    config = read_text_config(folder)
    if spec.layers and config.num_hidden_layers < spec.layers[-1]:
        raise UserError(f"{folder} has {config.num_hidden_layers} layers; features come from up to {spec.layers[-1]}")
    return encoder_on_meta(spec, config)


def encoder_on_meta(spec: TextEncoderSpec, config: Any) -> Any:
    """A text encoder of this config, without memory for its weights."""
    if spec.layers:
        config.num_hidden_layers = spec.layers[-1]
    with torch.device("meta"):
        encoder = spec.model_class(config)
    if spec.layers:
        encoder.norm = nn.Identity()  # the last state is asked for as the layer leaves it
        encoder.rotary_emb = type(encoder.rotary_emb)(config)  # computed, not stored
    encoder.tie_weights()
    return encoder


def build_text_encoder(spec: TextEncoderSpec, config: ModelConfig, ds_config: dict[str, Any] | None) -> nn.Module:
    """A frozen text encoder: partitioned by `ds_config`, or whole."""
    folder = component_folder(config, spec.component)
    if not spec.is_large:
        encoder = spec.model_class.from_pretrained(folder, variant=config.variant, dtype=weight_dtype(config))
        return encoder.to(runtime.device()).requires_grad_(False).eval()
    encoder = text_encoder_on_meta(spec, folder).requires_grad_(False)
    stored = SafetensorsFolder(folder, TRANSFORMERS_FILE, config.variant)
    weights = stored.part([name for name, _ in encoder.named_parameters()]) if spec.layers else stored
    left_out = stored.num_bytes - weights.num_bytes
    if left_out:
        runtime.log(
            f"{spec.component}: {weights.num_bytes / 2**30:.3g} GiB of {stored.num_bytes / 2**30:.3g} are loaded "
            f"({len(encoder.layers)} layers); {left_out / 2**30:.3g} GiB that prompts never touch are left out"
        )
    fill_module(encoder, weights, weight_dtype(config), ds_config)
    return encoder.to(runtime.device()).eval() if ds_config is None else encoder.eval()


def build_tokenizers(family: FluxFamily, config: ModelConfig) -> dict[str, Any]:
    """{text encoder: its tokenizer}.  Raises UserError for one that has more tokens than its encoder."""
    tokenizers = {}
    for spec in family.text_encoders:
        folder = component_folder(config, spec.tokenizer)
        tokenizer = tokenizers[spec.component] = spec.tokenizer_class.from_pretrained(folder)
        known = read_text_config(component_folder(config, spec.component)).vocab_size
        if len(tokenizer) > known:
            raise UserError(f"{folder} does not fit its {spec.component}: it has {len(tokenizer)} tokens, the encoder {known}")
    return tokenizers


def build_autoencoder(family: FluxFamily, config: ModelConfig) -> Any:
    """The frozen autoencoder, whole on every rank."""
    vae, dtype = component_folder(config, "vae"), weight_dtype(config)
    autoencoder = family.autoencoder_class.from_pretrained(vae, variant=config.variant, torch_dtype=dtype)
    return autoencoder.to(runtime.device()).requires_grad_(False).eval()


def text_length(config: ModelConfig, architecture: Architecture) -> int:
    """The most text tokens the transformer sees."""
    return config.max_sequence_length or architecture.family.text_length(architecture.config)


def pixels_per_token(config: ModelConfig) -> int:
    """Side of the square of pixels that one token stands for: 16 for the released autoencoders."""
    channels = read_config(component_folder(config, "vae") / "config.json")["block_out_channels"]
    return 2 * 2 ** (len(channels) - 1)


def is_distilled(architecture: Architecture, config: ModelConfig) -> bool:
    """Whether the model is made to be sampled in few steps without classifier-free guidance."""
    root = Path(str(config.pretrained_model_name_or_path)).expanduser()
    index = (root if root.is_dir() else fetch(str(root), ["model_index.json"], config)) / "model_index.json"
    return architecture.is_flow_map or (index.is_file() and bool(read_config(index).get("is_distilled")))


def build_scheduler(family: FluxFamily, config: ModelConfig) -> FlowMatchEulerDiscreteScheduler:
    """The model's sampling schedule: the folder's own, or what its pipeline makes where a folder has none."""
    root = Path(str(config.pretrained_model_name_or_path)).expanduser()
    if family.scheduler_config is not None and config.scheduler_path is None and not (root / "scheduler").is_dir():
        return FlowMatchEulerDiscreteScheduler(**family.scheduler_config)
    return FlowMatchEulerDiscreteScheduler.from_pretrained(component_folder(config, "scheduler"))
