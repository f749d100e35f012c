"""Frozen models in their engines, for whoever trains or samples."""

from typing import Any

from ds_flux import models, runtime
from ds_flux.conditioning import LiveConditioner
from ds_flux.config import Config, LoraConfig
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero import engines


def frozen_ds_config(config: Config, size: zero_config.ModelSize) -> dict[str, Any]:
    """The final DeepSpeed config of a frozen engine over a model of this size."""
    bf16 = config.model.mixed_precision == "bf16"
    return zero_config.inference_config(config.zero.text_encoder_deepspeed_config, bf16, size)


def build_conditioner(config: Config, architecture: models.Architecture) -> LiveConditioner:
    """Frozen encoders: the large one in an engine of its own, the others whole on every rank.  A collective."""
    family = architecture.family
    encoders: dict[str, Any] = {}
    for spec in family.text_encoders:
        ds_config = None
        with runtime.together(f"loading {spec.component}"):
            if spec.is_large and config.model.shard_text_encoder:
                folder = models.component_folder(config.model, spec.component)
                ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.text_encoder_on_meta(spec, folder)))
            encoder = models.build_text_encoder(spec, config.model, ds_config)
        encoders[spec.component] = engines.inference_engine(encoder, ds_config) if ds_config else encoder
    return LiveConditioner(
        family=family,
        encoders=encoders,
        tokenizers=models.build_tokenizers(family, config.model),
        autoencoder=models.build_autoencoder(family, config.model),
        max_sequence_length=config.model.max_sequence_length or architecture.default_sequence_length,
        device=runtime.device(),
    )


def build_frozen_transformer(config: Config, architecture: models.Architecture, lora_config: LoraConfig) -> Any:
    """The transformer for sampling: sharded over the ranks, or whole where there is only one.  A collective."""
    ds_config = None
    with runtime.together("loading the transformer"):
        if runtime.world_size() > 1:
            ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.transformer_on_meta(architecture)))
        transformer = models.build_transformer(architecture, config.model, lora_config, config.run.seed, ds_config)
    if ds_config:
        return engines.inference_engine(transformer, ds_config)
    return transformer.to(models.weight_dtype(config.model)).requires_grad_(False).eval()
