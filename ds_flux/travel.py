"""What goes along to the nodes of a run: environment variables, and words that a shell there shall not change.

DeepSpeed's launcher sends python, the working folder and variables whose names begin with PYTHON, NCCL (on CUDA), MLFLOW, UCX
or MV2, and those in `.deepspeed_env`.  `launch/multi_node.sh` gives it such a file with what is below:

    python -m ds_flux.travel variables          # lines NAME=value
    python -m ds_flux.travel words -- WORD ...  # the words as pdsh has to be given them, each ended by a zero byte

Imports nothing but the standard library.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ds_flux import UserError

# secrets stay: DeepSpeed logs its command line with all that is sent (HF_TOKEN: `hf auth login` on each node instead)
TRAVELS = re.compile(
    r"PATH|PYTHON\w+|LD_LIBRARY_PATH|CC|CXX|CUDA_HOME|ROCM_HOME|XDG_CACHE_HOME|TORCH_\w+|PYTORCH_\w+|TRITON_\w+|HF_\w+|TRANSFORMERS_\w+"
    r"|DS_ACCELERATOR|DEEPSPEED_\w+|NCCL_\w+|GLOO_\w+|OMP_\w+|MKL_\w+|TQDM_\w+|\w+_proxy|\w+_PROXY"
)
SECRETS = ("TOKEN", "KEY", "PASSWORD")
ENV_FILE = ".deepspeed_env"
LINE = re.compile(r"[A-Za-z_]\w*=.*")
MPI = {  # ours -> what OpenMPI, MVAPICH and those with PMI (MPICH, Intel) call it
    "RANK": ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
FOR_A_SHELL = str.maketrans({character: f"\\{character}" for character in '\\"$`'})


def variables(environment: Mapping[str, str], folders: list[Path]) -> dict[str, str]:
    """{name: value} of the variables that a node is to have.

    Args:
        folders: those with a `.deepspeed_env`; its lines win, the last folder's most.

    Raises:
        UserError: a line of such a file is malformed; DeepSpeed would end with a traceback, at an empty line as well.
    """
    travels = {name for name, value in environment.items() if TRAVELS.fullmatch(name) and "\n" not in value}
    found = {name: environment[name] for name in sorted(travels) if not name.endswith(SECRETS)}
    for path in (folder / ENV_FILE for folder in folders):
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], 1):
            if not line.strip() or line.startswith("#"):
                continue
            if not LINE.fullmatch(line):
                raise UserError(f"{path} line {number}: expected NAME=value, got `{line}`")
            name, value = line.split("=", 1)
            found[name] = value
    return found


def adopt_mpi(environment: MutableMapping[str, str]) -> None:
    """Take rank and size from MPI where it has started this process, which would train alone otherwise.

    Raises:
        UserError: nobody says where rank 0 is.
    """
    if "RANK" in environment:
        return
    found = {ours: [environment[name] for name in names if name in environment] for ours, names in MPI.items()}
    if not all(found.values()) or found["WORLD_SIZE"] == ["1"]:
        return
    if "MASTER_ADDR" not in environment:
        raise UserError("MPI has started this, and MASTER_ADDR (the first node) is not set: mpirun -x MASTER_ADDR=node1 ...")
    environment.setdefault("MASTER_PORT", "29500")
    environment.update({ours: values[0] for ours, values in found.items()})


def word_for_pdsh(word: str) -> str:
    """A word of `ds-flux train` as DeepSpeed's pdsh launcher has to be given it.

    pdsh replaces %h, %n and %u, and hands the words to a shell on the node.  DeepSpeed puts those with spaces into double
    quotes, and escapes nothing in them but the quotes.
    """
    word = word.replace("%", "%%")
    return word.translate(FOR_A_SHELL).replace('\\"', '"') if " " in word else shlex.quote(word)


def main(argv: list[str]) -> int:
    """Print what the module's docstring says."""
    try:
        if argv[0] == "variables":
            for name, value in variables(os.environ, [Path.home(), Path()]).items():
                print(f"{name}={value.translate(FOR_A_SHELL)}")
        else:
            print(*map(word_for_pdsh, argv[2:]), sep="\0", end="\0")
    except UserError as error:
        print(f"ds-flux: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
