"""DeepSpeed's monitors, for the figures of a run."""

from pathlib import Path

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster


def open_monitors(names: list[str], folder: Path) -> MonitorMaster | None:
    """Those of csv, wandb and comet that are named; None where none is.  Only rank 0 has more than an empty shell.

    Args:
        folder: of the figures, for csv.
    """
    settings = {
        "csv_monitor": {"enabled": "csv" in names, "output_path": str(folder), "job_name": "csv"},
        "wandb": {"enabled": "wandb" in names, "project": "ds_flux"},
        "comet": {"enabled": "comet" in names, "project": "ds_flux"},
    }
    config = get_monitor_config(settings)
    return MonitorMaster(config) if config.enabled else None
