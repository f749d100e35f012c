"""Two nodes on one machine: network namespaces on a bridge, each with an address, a name, an sshd and a disk of its own."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_flux import UserError, commands, config, run
from tests.distributed import ROOT, environment

NEEDED = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "pdsh": "pdsh",
    "rsync": "rsync",
}
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
SSHD = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
"""
SSH = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
Host refused
    HostName 10.87.213.2
    Port 1
Host denied
    HostName 10.87.213.2
    User nobody
"""
NODE = """
set -e
hostname {name}
mount --make-rprivate /
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs -o size=300m tmpfs {folder}/disk
mount -t tmpfs -o size=1m tmpfs {folder}/full
mkdir -p /run/sshd
exec {sshd} -D -e -f {folder}/sshd_{name}
"""


class NoNodesError(Exception):
    """Why there can be none here."""


@dataclass(frozen=True)
class Nodes:
    """node1 and node2, of 2 slots each."""

    folder: Path

    @property
    def hostfile(self) -> Path:
        """Names them both."""
        return self.folder / "hostfile"

    @property
    def hosts(self) -> tuple[str, str]:
        """Their names."""
        return "node1", "node2"

    @property
    def disk(self) -> Path:
        """A folder that is another one on each node."""
        return self.folder / "disk"

    def run(
        self, command: list[str], node: str = "node1", timeout_s: int = 200, cwd: Path = ROOT, **variables: str
    ) -> subprocess.CompletedProcess:
        """Run a command on a node, in the root of the repository."""
        kept = ("PATH", "PYTHONPATH", "TORCH_EXTENSIONS_DIR", *QUIET)
        values = {name: value for name, value in {**environment(), "PATH": PATH}.items() if name in kept} | variables
        line = f"cd {cwd} && env {shlex.join([f'{name}={value}' for name, value in values.items()])} {shlex.join(command)}"
        ssh = ["ssh", "-F", str(self.folder / "ssh_config"), ADDRESSES[node], line]
        return subprocess.run(ssh, capture_output=True, text=True, timeout=timeout_s)

    def run_jobs(self, jobs: list[Any], folder: Path) -> None:
        """Like tests.distributed.run_jobs, on all four processes."""
        path = folder / "jobs.json"
        path.write_text(json.dumps(jobs))
        launcher = ["deepspeed", "--hostfile", str(self.hostfile), "--module", "tests.distributed", str(path)]
        variables = {name: environment()[name] for name in ("TORCH_EXTENSIONS_DIR", *QUIET)}
        (self.folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        done = self.run(launcher, DS_ENV_FILE=str(self.folder / "deepspeed_env"))
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def refused(argv: list[str], words: str) -> None:
    """A job: `ds-flux train` ends with these words, on every rank."""
    settings, _ = config.load(argv, "ds-flux train", commands.TrainCommand)
    try:
        run.setup(settings)
    except UserError as error:
        assert words in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


QUIET = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "HF_HUB_OFFLINE")
ADDRESSES = {"node1": "10.87.213.1", "node2": "10.87.213.2", "down": "10.87.213.77"}
"""nobody is at the last one"""


def sh(*command: object) -> None:
    """Run a command.  Raises NoNodesError with what it says."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise NoNodesError(f"{shlex.join(map(str, command[:3]))}: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Up inside `with`.  Raises NoNodesError where that is not possible."""
    for program, package in NEEDED.items():
        if shutil.which(program, path=PATH) is None:
            raise NoNodesError(f"{program} is not installed (Debian's {package})")
    if os.getuid():
        raise NoNodesError("network namespaces need root")
    daemons: list[subprocess.Popen] = []
    try:
        write_settings(folder)
        make_network()
        daemons += [start(folder, name) for name in ("node1", "node2")]
        for name, daemon in zip(("node1", "node2"), daemons):
            wait_for(Nodes(folder), name, daemon)
        yield Nodes(folder)
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()
        remove_network()


def write_settings(folder: Path) -> None:
    """Keys, names, and what ssh and sshd read."""
    for name in ("disk", "full"):
        (folder / name).mkdir()
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    hosts = [f"{address} {name}" for name, address in ADDRESSES.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    for name in ("node1", "node2"):
        (folder / f"sshd_{name}").write_text(SSHD.format(folder=folder, address=ADDRESSES[name]))
    (folder / "hostfile").write_text("# two small ones\nnode1 slots=2\nnode2 slots=2\n")


def make_network() -> None:
    """A bridge with the two nodes on it, and this machine."""
    remove_network()
    sh("ip", "link", "add", "dsf", "type", "bridge")
    sh("ip", "addr", "add", "10.87.213.254/24", "dev", "dsf")
    sh("ip", "link", "set", "dsf", "up")
    for name in ("node1", "node2"):
        sh("ip", "netns", "add", f"dsf-{name}")
        sh("ip", "link", "add", f"dsf-{name}", "type", "veth", "peer", "name", "eth0", "netns", f"dsf-{name}")
        sh("ip", "link", "set", f"dsf-{name}", "master", "dsf", "up")
        sh("ip", "-n", f"dsf-{name}", "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            sh("ip", "-n", f"dsf-{name}", "link", "set", device, "up")


def remove_network() -> None:
    """What is left of one, if anything is."""
    for name in ("node1", "node2"):
        subprocess.run(["ip", "netns", "del", f"dsf-{name}"], capture_output=True)
    subprocess.run(["ip", "link", "del", "dsf"], capture_output=True)


def start(folder: Path, name: str) -> subprocess.Popen:
    """A node's sshd, with mounts and a host name of its own."""
    script = NODE.format(folder=folder, name=name, sshd=shutil.which("sshd", path=PATH))
    log = (folder / f"{name}.log").open("w")
    inside = ["ip", "netns", "exec", f"dsf-{name}", "unshare", "--mount", "--uts", "sh", "-c", script]
    return subprocess.Popen(inside, stdout=log, stderr=log)


def wait_for(nodes: Nodes, name: str, daemon: subprocess.Popen) -> None:
    """Until it lets us in."""
    deadline_s = time.monotonic() + 20
    while nodes.run(["true"], name).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            raise NoNodesError(f"sshd of {name}: {(nodes.folder / f'{name}.log').read_text().strip()[-300:]}")
        time.sleep(0.2)
