"""The identity of what a run starts from: base weights, text encoders, autoencoder."""

import hashlib
import json
from typing import Any

import torch

from ds_flux.config import ModelConfig
from ds_flux.families.spec import FluxFamily
from ds_flux.models import TRANSFORMER_FILE, TRANSFORMERS_FILE, Architecture, component_folder, weight_dtype
from ds_flux.zero.weights import SafetensorsFolder


def base_fingerprint(architecture: Architecture, config: ModelConfig, seed: int) -> str:
    """The identity of the base weights: names, shapes and the first elements of every tensor, or the seed they grow from."""
    digest = hashlib.blake2b(json.dumps(architecture.config, sort_keys=True, default=list).encode(), digest_size=16)
    if architecture.folder is None:
        digest.update(f"from scratch, seed {seed}".encode())
        return digest.hexdigest()
    update(digest, SafetensorsFolder(architecture.folder, TRANSFORMER_FILE, config.variant))
    return digest.hexdigest()


def update(digest: Any, source: SafetensorsFolder) -> None:
    """Add names, shapes and first elements of every tensor."""
    for name, entry in sorted(source.entries.items()):
        head = torch.empty(min(1024, torch.Size(entry.shape).numel()))
        source.read(name, entry.shape, 0, head)
        digest.update(f"{name} {entry.shape}".encode() + head.numpy().tobytes())


def text_fingerprint(family: FluxFamily, config: ModelConfig) -> str:
    """The identity of all text encoders and their tokenizers."""
    digest = hashlib.blake2b(str(weight_dtype(config)).encode(), digest_size=16)
    for spec in family.text_encoders:
        update(digest, SafetensorsFolder(component_folder(config, spec.component), TRANSFORMERS_FILE, config.variant))
        for path in sorted(component_folder(config, spec.tokenizer).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def autoencoder_fingerprint(config: ModelConfig) -> str:
    """The identity of the autoencoder."""
    folder = component_folder(config, "vae")
    digest = hashlib.blake2b(str(weight_dtype(config)).encode() + (folder / "config.json").read_bytes(), digest_size=16)
    update(digest, SafetensorsFolder(folder, TRANSFORMER_FILE, config.variant))
    return digest.hexdigest()
