"""What the libraries say of themselves: warnings that a user can act on; with --verbose, everything.

Loggers and variables are set by name before the libraries are imported, which is when some of them speak.  Variables that the
user has set stay as they are.
"""

import logging
import os
import warnings

from ds_flux import progress

LIBRARIES = ("TRANSFORMERS", "DIFFUSERS", "DATASETS")
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")  # transformers goes by the first as well
NOTHING_TO_ACT_ON = "requires torchvision (not installed); falling back"  # of image encoders, which are not used here
OF_THE_MACHINE = "Setting accelerator to CPU"  # once is enough


def settle(is_verbose: bool) -> None:
    """Decide for this process, before it imports libraries."""
    if is_verbose:
        show_everything()
    else:
        show_warnings()


def show_everything() -> None:
    """Also on ranks above 0, which say where they are."""
    for name in LIBRARIES:
        os.environ.setdefault(f"{name}_VERBOSITY", "info")
    from deepspeed.utils.logging import set_log_level_from_string  # it sets its own level when it is imported

    set_log_level_from_string("info")


def is_everything_shown() -> bool:
    """Whether this process was settled so."""
    return logging.getLogger("DeepSpeed").isEnabledFor(logging.INFO)


def show_warnings() -> None:
    """What all ranks would say of the same model and data, rank 0 says; bars where somebody can see them move."""
    is_first = progress.env_rank() == 0
    if not is_first:
        for name in LIBRARIES:
            os.environ.setdefault(f"{name}_VERBOSITY", "error")
        logging.getLogger("DeepSpeed").addFilter(lambda record: OF_THE_MACHINE not in record.getMessage())
    if not is_first or not progress.is_on_terminal():
        for name in BARS:
            os.environ.setdefault(name, "1")
    logging.getLogger("transformers.utils.import_utils").addFilter(lambda record: NOTHING_TO_ACT_ON not in record.getMessage())
    # DeepSpeed calls collectives by names that torch renamed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
