"""Two nodes on one machine: network namespaces on a bridge, each with an address, a name, an sshd and a disk of its own."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    HostName {node2}
    Port 1
Host denied
    HostName {node2}
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
MINE = f"f{os.getpid():x}"  # names of network devices have 15 characters at most; other test runs have their own
NET = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
ADDRESSES = {"node1": f"{NET}.1", "node2": f"{NET}.2", "down": f"{NET}.77"}
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
    (folder / "ssh_config").write_text(SSH.format(folder=folder, node2=ADDRESSES["node2"]))
    for name in ("node1", "node2"):
        (folder / f"sshd_{name}").write_text(SSHD.format(folder=folder, address=ADDRESSES[name]))
    (folder / "hostfile").write_text("# two small ones\nnode1 slots=2\nnode2 slots=2\n")


def make_network() -> None:
    """A bridge with the two nodes on it, and this machine."""
    sh("ip", "link", "add", MINE, "type", "bridge")
    sh("ip", "addr", "add", f"{NET}.254/24", "dev", MINE)
    sh("ip", "link", "set", MINE, "up")
    for name in ("node1", "node2"):
        device = f"{MINE}-{name[-1]}"
        sh("ip", "netns", "add", space(name))
        sh("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", space(name))
        sh("ip", "link", "set", device, "master", MINE, "up")
        sh("ip", "-n", space(name), "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        for inside in ("eth0", "lo"):
            sh("ip", "-n", space(name), "link", "set", inside, "up")


def space(name: str) -> str:
    """A node's network namespace."""
    return f"{MINE}-{name}"


def remove_network() -> None:
    """And whatever still runs on the nodes, which would keep it."""
    for name in ("node1", "node2"):
        left = subprocess.run(["ip", "netns", "pids", space(name)], capture_output=True, text=True).stdout.split()
        for pid in map(int, left):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", space(name)], capture_output=True)
    subprocess.run(["ip", "link", "del", MINE], capture_output=True)


def start(folder: Path, name: str) -> subprocess.Popen:
    """A node's sshd, with mounts and a host name of its own."""
    script = NODE.format(folder=folder, name=name, sshd=shutil.which("sshd", path=PATH))
    log = (folder / f"{name}.log").open("w")
    inside = ["ip", "netns", "exec", space(name), "unshare", "--mount", "--uts", "sh", "-c", script]
    return subprocess.Popen(inside, stdout=log, stderr=log)


def wait_for(nodes: Nodes, name: str, daemon: subprocess.Popen) -> None:
    """Until it lets us in."""
    deadline_s = time.monotonic() + 20
    while nodes.run(["true"], name).returncode:
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            raise NoNodesError(f"sshd of {name}: {(nodes.folder / f'{name}.log').read_text().strip()[-300:]}")
        time.sleep(0.2)
