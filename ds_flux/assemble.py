"""The parts of a run from its settings: the model, DeepSpeed configs, frozen models in their engines."""

from dataclasses import replace
from typing import Any

from diffusers.optimization import get_scheduler

from ds_flux import UserError, models, runtime
from ds_flux.conditioning import Conditioner
from ds_flux.config import Config, LoraConfig
from ds_flux.data.images import TEXT_ENCODER_DROPOUTS
from ds_flux.zero import ds_config as zero_config
from ds_flux.zero import engines


def find_model(config: Config) -> models.Architecture:
    """The model that the flags name.  Raises UserError where a component is missing or does not fit."""
    architecture = models.find_architecture(config.model)
    check_fits_model(config, architecture)
    for component in models.components(architecture.family):
        models.component_folder(config.model, component)
    return architecture


def with_transformer(config: Config, folder: str) -> Config:
    """The settings with the weights of another transformer, also where the run's own began from scratch."""
    return replace(config, model=replace(config.model, transformer_path=folder, from_scratch=False, transformer_config=None))


def check_fits_model(config: Config, architecture: models.Architecture) -> None:
    """No setting is for something that the model does not have.  Raises UserError."""
    components = {name for spec in architecture.family.text_encoders for name in (spec.component, spec.tokenizer)}
    for encoder, flag in TEXT_ENCODER_DROPOUTS.items():
        if encoder not in components and config.flat()[flag] > 0:
            raise UserError(f"--{flag} has no effect: this model has no {encoder}")
    for component in ("text_encoder_2", "tokenizer_2"):
        if component not in components and config.flat()[f"{component}_path"] is not None:
            raise UserError(f"--{component}_path has no effect: this model has no {component}")
    check_sharing(config.zero.sequence_parallel, architecture)
    if config.flow.guidance_scale is not None and not architecture.has_guidance:
        raise UserError("--guidance_scale has no effect: this model has no guidance embedding; leave it out")


def check_sharing(size: int, architecture: models.Architecture) -> None:
    """So many ranks can share a sequence.  Raises UserError."""
    num_heads, num_ranks = architecture.config["num_attention_heads"], runtime.env_world_size()
    if num_heads % size:
        raise UserError(f"--sequence_parallel {size} does not divide the {num_heads} attention heads of this model")
    if num_ranks > 1 and num_ranks % size:
        raise UserError(f"--sequence_parallel {size} does not divide the {num_ranks} processes")


def lr_schedule(config: Config, last_step: int) -> engines.LRSchedule:
    """diffusers' schedule, counted in optimizer steps: it does not know the number of processes."""
    optim = config.optim
    return lambda optimizer: get_scheduler(
        optim.lr_scheduler,
        optimizer,
        num_warmup_steps=optim.lr_warmup_steps,
        num_training_steps=last_step,
        num_cycles=optim.lr_num_cycles,
        power=optim.lr_power,
    )


def ranks() -> zero_config.Ranks:
    """As the launcher set them."""
    return zero_config.Ranks(runtime.env_world_size(), runtime.env_local_world_size())


def transformer_ds_config(config: Config, size: zero_config.ModelSize) -> dict[str, Any]:
    """The final DeepSpeed config of the training engine."""
    bf16 = config.model.mixed_precision == "bf16"
    return zero_config.train_config(config.zero.deepspeed_config, config.optim, config.train, bf16, ranks(), size)


def frozen_ds_config(config: Config, size: zero_config.ModelSize, planned: zero_config.Ranks | None = None) -> dict[str, Any]:
    """The final DeepSpeed config of a frozen engine over a model of this size.

    Args:
        planned: processes other than those that there are.
    """
    bf16 = config.model.mixed_precision == "bf16"
    return zero_config.inference_config(
        config.zero.text_encoder_deepspeed_config, bf16, size, planned or ranks(), config.model.offload
    )


def build_conditioner(config: Config, architecture: models.Architecture) -> Conditioner:
    """Frozen encoders: the large one in an engine of its own, the others whole on every rank.  A collective."""
    family = architecture.family
    encoders: dict[str, Any] = {}
    whole: list[Any] = []
    for spec in family.text_encoders:
        ds_config = None
        with runtime.together(f"loading {spec.component}"):
            if spec.is_large and config.model.shard_text_encoder:
                folder = models.component_folder(config.model, spec.component)
                ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.text_encoder_on_meta(spec, folder)))
            encoder = models.build_text_encoder(spec, config.model, ds_config)
        encoders[spec.component] = engines.inference_engine(encoder, ds_config) if ds_config else encoder
        whole += [] if ds_config else [encoder]
    with runtime.together("loading the autoencoder"):
        autoencoder = models.build_autoencoder(family, config.model)
    return Conditioner(
        family=family,
        encoders=encoders,
        tokenizers=models.build_tokenizers(family, config.model),
        autoencoder=autoencoder,
        max_sequence_length=models.text_length(config.model, architecture),
        device=runtime.device(),
        posterior_seed=config.run.seed if config.data.vae_encode_mode == "sample" else None,
        offloaded=(*whole, autoencoder) if config.model.offload else (),
    )


def build_frozen_transformer(config: Config, architecture: models.Architecture, lora_config: LoraConfig) -> Any:
    """The transformer for sampling: sharded over the ranks, or whole where there is only one.  A collective."""
    ds_config = None
    with runtime.together("loading the transformer"):
        if runtime.world_size() > 1:
            ds_config = frozen_ds_config(config, zero_config.ModelSize.of(models.transformer_on_meta(architecture)))
        transformer = models.build_transformer(architecture, config.model, lora_config, config.run.seed, ds_config)
    if ds_config:
        return engines.inference_engine(transformer, ds_config).module  # its layers gather themselves as they run
    return transformer.to(models.weight_dtype(config.model)).requires_grad_(False).eval()
