"""The hostfile: which nodes there are, and how many processes each of them runs.

`python -m ds_flux.hostfile PATH` reads one as strictly as the commands do: DeepSpeed's own reader trains on one node alone if
the file is not there, and overlooks what stands behind the number.  Imports nothing but the standard library.
"""

import re
import sys
from pathlib import Path

from ds_flux import UserError

LINE = re.compile(r"(?P<host>[^\s#]\S*)\s+slots=(?P<slots>\d+)\s*(#.*)?")


def read(path: Path) -> dict[str, int]:
    """{host: slots} in the file's order, which is that of the ranks.

    Raises:
        UserError: no such file, a malformed line, a host that comes twice, zero slots, or no host at all.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) else "it is not text"
        raise UserError(f"hostfile {path}: {reason}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.strip().startswith("#"):
            host, num_slots = parsed(f"hostfile {path} line {number}", line.strip())
            if host in slots:
                raise UserError(
                    f"hostfile {path} line {number}: {host} is there already; a node has one line, with all its slots"
                )
            slots[host] = num_slots
    if not slots:
        raise UserError(f"hostfile {path} names no node: write one line for each, such as `node1 slots=8`")
    return slots


def parsed(where: str, line: str) -> tuple[str, int]:
    """Host and slots of a line.  Raises UserError where it says something else."""
    found = LINE.fullmatch(line)
    if found is None:
        raise UserError(f"{where}: expected `NAME slots=NUMBER`, got `{line}`")
    if int(found["slots"]) == 0:
        raise UserError(f"{where}: {found['host']} has no slots; take the line out, or give it as many as it has GPUs")
    return found["host"], int(found["slots"])


def main(argv: list[str]) -> int:
    """Say in one line what is wrong with a hostfile, if anything is."""
    try:
        read(Path(argv[0]))
    except UserError as error:
        print(f"ds-flux: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
