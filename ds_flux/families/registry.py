"""All families, and how the one of a model folder is found."""

from ds_flux.families.flux1 import FLUX1
from ds_flux.families.flux2 import FLUX2, FLUX2_KLEIN
from ds_flux.families.flux3 import FLUX3
from ds_flux.families.spec import FluxFamily

FAMILIES: tuple[FluxFamily, ...] = (FLUX1, FLUX2, FLUX2_KLEIN, FLUX3)
FLAVOURS: dict[str, FluxFamily] = {name: family for family in FAMILIES for name in family.flavours}


def families_of(transformer_class: str) -> dict[str, FluxFamily]:
    """{class of the large text encoder: family} of all families with this transformer."""
    return {f.large_encoder.architecture: f for f in FAMILIES if f.transformer_class.__name__ == transformer_class}
