"""`ds-flux precompute`: fill the caches of a run and end."""

from dataclasses import replace

from ds_flux import UserError, assemble, caching, disks, inputs, runtime, validation
from ds_flux.config import Config


def precompute(config: Config) -> None:
    """Encode all prompts and images that the run with these settings needs; both, unless the flags name one of them.

    Raises:
        UserError: the run encodes from window to window, or its data or model cannot be used.
    """
    if config.data.precomputation_items is not None:
        raise UserError("--precomputation_items encodes while the run trains: there is nothing to do before it")
    if not (config.data.cache_text or config.data.cache_latents):
        both = not config.data.shuffle_tags  # which makes new prompts at every visit
        config = replace(config, data=replace(config.data, cache_text=both, cache_latents=True))
    runtime.init(config.run.timeout_s)
    with runtime.together("looking for the model"):
        architecture = assemble.find_model(config)
    disks.check_cache(caching.cache_folder(config))
    data = inputs.look_at_data(config, architecture)
    conditioner = assemble.build_conditioner(config, architecture)
    validation.prepare(config, architecture, conditioner, data.held_out)
    caching.prepare(config, conditioner, data.samples)
    runtime.log(f"done: {caching.cache_folder(config)}")
