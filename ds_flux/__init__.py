"""ds_flux: FLUX training with DeepSpeed."""

__version__ = "0.1.0"


class UserError(Exception):
    """Something the user can mend: shown as one line, exit status 2, no traceback."""
