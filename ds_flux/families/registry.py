"""The families by the class name that a transformer's config.json carries."""

from ds_flux.families.flux1 import FLUX1
from ds_flux.families.spec import FluxFamily

FAMILIES: dict[str, FluxFamily] = {family.transformer_class.__name__: family for family in (FLUX1,)}
