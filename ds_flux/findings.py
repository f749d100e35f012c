"""What the answers of the nodes mean: one line for each property, and for each node that is not as it should be.

Pure functions of answers; `ds_flux.doctor` asks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ds_flux.nodes import Answer

Facts = dict[str, dict[str, Any]]  # {node: what ds_flux.probe says}

MAX_SKEW_S = 5.0
MIN_MEMORY_GIB = 1.0  # for each process
MIN_DISK_GIB = 1.0
REASONS = (  # (what ssh says, what to do)
    ("Permission denied", "ssh-copy-id {node}: it must let you in without a password"),
    ("Host key verification failed", "log in once by hand: ssh {node}, and say yes to its key"),
    ("Connection refused", "nothing listens for ssh there: start sshd on {node}, or give --ssh_port"),
    ("resolve", "{node} is no name that is known here: write its address into the hostfile, or add it to /etc/hosts"),
    ("No route", "{node} is down or not in this network: start it, or take it out of the hostfile"),
    ("timed out", "{node} is down, or a firewall drops ssh: start it, or take it out of the hostfile"),
    ("status 124", "{node} is down, or its ssh hangs: start it, or take it out of the hostfile"),
)


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    what: str
    where: str
    is_fine: bool
    words: str
    """the value; or what is wrong, and what to do"""


def table(findings: list[Finding]) -> str:
    """One line for each, in columns."""
    rows = [("ok" if one.is_fine else "FAIL", one.what, one.where, one.words) for one in findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows)


def each(what: str, facts: Facts, wrong: Callable[[str, dict[str, Any]], str | None], words: str) -> list[Finding]:
    """One line that says `words` of all nodes that are fine, and one for each that is not.

    Args:
        wrong: (node, its facts) -> what is wrong with it, if anything is.
    """
    found = {node: wrong(node, of_node) for node, of_node in facts.items()}
    fine = [node for node, reason in found.items() if reason is None]
    lines = [Finding(what, ", ".join(fine), True, words)] if fine else []
    return lines + [Finding(what, node, False, reason) for node, reason in found.items() if reason is not None]


def reached(answers: dict[str, Answer]) -> list[Finding]:
    """Whether there is a way to each node, and whether its clock is right.

    Args:
        answers: of each node (s ahead of here, uncertainty in s).
    """

    def wrong(node: str, of_node: dict[str, Any]) -> str | None:
        if of_node["error"] is None:
            return None
        advice = next(
            (advice for words, advice in REASONS if words.lower() in of_node["error"].lower()), "try: ssh {node} true"
        )
        return f"{of_node['error']}; {advice.format(node=node)}"

    def late(node: str, of_node: dict[str, Any]) -> str | None:
        ahead_s, uncertainty_s = of_node["clock"]
        if abs(ahead_s) - uncertainty_s <= MAX_SKEW_S:
            return None
        direction = "ahead of" if ahead_s > 0 else "behind"
        return f"its clock is {abs(ahead_s):.0f} s {direction} this machine's: set it, or start ntp or chrony there"

    facts = {node: {"clock": answer.value, "error": answer.error} for node, answer in answers.items()}
    up = {node: of_node for node, of_node in facts.items() if of_node["error"] is None}
    offsets = [abs(of_node["clock"][0]) for of_node in up.values()]
    return [
        *each("reachable", facts, wrong, "by ssh, without a password"),
        *each("clock", up, late, f"at most {max(offsets, default=0):.1f} s off"),
    ]


def silent(node: str, error: str | None, python: str) -> Finding:
    """A node that ssh reaches and where the probe does not run."""
    advice = f"this folder with ds_flux in it, and {python}, have to be at the same path there"
    return Finding("python", node, False, f"{error}; {advice}")


def compared(facts: Facts, slots: dict[str, int], output_dir: str, master_port: int) -> list[Finding]:
    """All that one round of questions can tell of nodes that answer.

    Args:
        slots: {node: processes that the hostfile gives it}.
    """
    first, reference = next(iter(facts.items()))
    return [
        *versions(facts, first, reference),
        *code(facts, first, reference),
        *accelerators(facts, slots),
        *memory(facts, slots),
        *disks(facts, output_dir),
        *ports(facts, master_port),
        *compilers(facts),
        *models(facts, first, reference),
    ]


def versions(facts: Facts, first: str, reference: dict[str, Any]) -> Iterator[Finding]:
    """The same python and packages everywhere."""
    for name, expected in reference["versions"].items():

        def wrong(node: str, of_node: dict[str, Any], name: str = name, expected: str | None = expected) -> str | None:
            found = of_node["versions"][name]
            if found is None:
                return f"{name} is not installed: install the same as {first} has, pip install -c launch/constraints.txt -e ."
            if found != expected:
                return f"{found}, and {first} has {expected}: install the same on both"
            return None

        yield from each(name, facts, wrong, str(expected))


def code(facts: Facts, first: str, reference: dict[str, Any]) -> list[Finding]:
    """The same sources of this package everywhere."""
    expected = reference["code"]

    def wrong(_node: str, of_node: dict[str, Any]) -> str | None:
        if of_node["code"]["digest"] == expected["digest"]:
            return None
        where = of_node["code"]["folder"]
        return (
            f"the sources in {where} are not those of {first}: bring both to one commit, or rsync -a {first}:{where}/ {where}/"
        )

    return each("ds_flux", facts, wrong, f"{expected['version']}, sources {expected['digest']}")


def accelerators(facts: Facts, slots: dict[str, int]) -> list[Finding]:
    """As many as the hostfile says, at least."""

    def wrong(node: str, of_node: dict[str, Any]) -> str | None:
        found = of_node["accelerator"]
        if found["error"] is not None:
            return f"DeepSpeed finds none: {found['error']}"
        if slots[node] > found["num"]:
            unit = "cores" if found["name"] == "cpu" else f"{found['name']} devices"
            return f"slots={slots[node]}, and it has {found['num']} {unit}: write slots={found['num']} into the hostfile"
        return None

    return each("accelerators", facts, wrong, words_of_accelerators(facts, slots))


def words_of_accelerators(facts: Facts, slots: dict[str, int]) -> str:
    """What kind, how many, how large."""
    words = []
    for of_node in facts.values():
        found = of_node["accelerator"]
        size = f" of {min(found['memory_gib']):.0f} GiB" if found["memory_gib"] else ""
        words.append(f"{found['num']} {'CPU cores' if found['name'] == 'cpu' else found['name']}{size}")
    num = sum(slots[node] for node in facts)
    return f"{' and '.join(dict.fromkeys(words))} for {num} {'slot' if num == 1 else 'slots'}"


def memory(facts: Facts, slots: dict[str, int]) -> list[Finding]:
    """Free host memory."""

    def wrong(node: str, of_node: dict[str, Any]) -> str | None:
        free, needed = of_node["memory_gib"], MIN_MEMORY_GIB * slots[node]
        if free >= needed:
            return None
        return f"{free:.1f} GiB are free, too little for {slots[node]} processes: end what else runs there"

    return each("memory", facts, wrong, f"{min(of_node['memory_gib'] for of_node in facts.values()):.1f} GiB free")


def disks(facts: Facts, output_dir: str) -> list[Finding]:
    """Room for the run's folder."""

    def wrong(_node: str, of_node: dict[str, Any]) -> str | None:
        found = of_node["disk"]
        if found["error"] is not None:
            return f"--output_dir {output_dir} cannot be written: {found['error']}; give another one, or mend its rights"
        if found["free_gib"] < MIN_DISK_GIB:
            return f"{found['free_gib']:.2g} GiB are free for --output_dir {output_dir}: make room, or give another one"
        return None

    return each("disk", facts, wrong, f"{min(of_node['disk']['free_gib'] for of_node in facts.values()):.1f} GiB free")


def ports(facts: Facts, master_port: int) -> list[Finding]:
    """Where rank 0 will listen: on the first node alone."""
    first = dict([next(iter(facts.items()))])

    def wrong(node: str, of_node: dict[str, Any]) -> str | None:
        if of_node["port"] is None:
            return None
        return f"{master_port}: {of_node['port']}; give deepspeed another --master_port, or end what listens there (ss -ltnp)"

    return each("master port", first, wrong, f"{master_port} is free")


def compilers(facts: Facts) -> list[Finding]:
    """What DeepSpeed's kernels are built with."""

    def wrong(_node: str, of_node: dict[str, Any]) -> str | None:
        lacks = [name for name, path in (("g++", of_node["compiler"]), ("ninja", of_node["ninja"])) if path is None]
        return f"{' and '.join(lacks)} not found: apt install g++, pip install ninja" if lacks else None

    return each("compilers", facts, wrong, "C++ compiler and ninja")


def models(facts: Facts, first: str, reference: dict[str, Any]) -> Iterator[Finding]:
    """The same readable files everywhere, by their sizes, beginnings and ends."""
    for name, expected in reference["models"].items():

        def wrong(node: str, of_node: dict[str, Any], name: str = name, expected: dict | None = expected) -> str | None:
            files = of_node["models"][name]
            if files is None:
                return f"{name} is not there: put it on a shared disk, copy it, or download it: hf download {name}"
            unreadable = [f"{file} {state}" for file, state in files.items() if "cannot be read" in state]
            if unreadable:
                return f"{name}/{unreadable[0]}; mend its rights"
            differs = sorted(file for file in {**files, **(expected or {})} if files.get(file) != (expected or {}).get(file))
            if expected is not None and differs:
                return f"{name}/{differs[0]} is another one than on {first}: rsync -a --delete {first}:{name}/ {name}/"
            return None

        yield from each("model", facts, wrong, f"{name}, {len(expected or {})} files")


def built(answers: dict[str, Answer]) -> list[Finding]:
    """Whether DeepSpeed's kernels build and load.

    Args:
        answers: of each node {kernel: what is wrong with it}.
    """
    names = ", ".join(next((list(answer.value) for answer in answers.values() if answer.value), []))

    def wrong(_node: str, of_node: dict[str, Any]) -> str | None:
        value = of_node["answer"].value
        if value is None:
            advice = "if nothing compiles there, a killed build left a lock: rm $TORCH_EXTENSIONS_DIR/*/lock"
            return f"{of_node['answer'].error}; {advice}"
        broken = [f"{kernel}: {reason}" for kernel, reason in value.items() if reason is not None]
        return f"{broken[0]}; see `ds_report` there" if broken else None

    return each("kernels", {node: {"answer": answer} for node, answer in answers.items()}, wrong, f"{names} built")


def connected(where: str, answer: Answer, num: int, output_dir: str, is_local: bool) -> list[Finding]:
    """What an all-reduce over all processes took; and whether they see the same folder, as they should.

    Args:
        is_local: the DeepSpeed JSON says use_node_local_storage.
    """
    value = answer.value
    if value is None:
        return [Finding("all-reduce", where, False, f"{answer.error}; {advice_on_network(str(answer.error))}")]
    is_fine = value["num"] == num
    words = f"{value['num']} processes, {value['gb_per_s']:.3g} GB/s in and out of each ({1000 * value['seconds']:.0f} ms)"
    reduced = Finding("all-reduce", where, is_fine, words if is_fine else f"{words}, and the hostfile has {num} slots")
    shared = f"{output_dir} is {'shared by all nodes' if value['is_shared'] else 'another folder on each node'}"
    advice = "take use_node_local_storage out of the DeepSpeed JSON" if is_local else (
        'name one on a shared disk, or add {"checkpoint": {"use_node_local_storage": true}} to the DeepSpeed JSON'
    )  # fmt: skip
    is_right = value["is_shared"] != is_local
    return [reduced, Finding("output_dir", where, is_right, shared if is_right else f"{shared}: {advice}")]


def advice_on_network(error: str) -> str:
    """What to do where there was no all-reduce."""
    if "not tried" in error:
        return "mend the lines above first"
    if "pdsh is not" in error:
        return "apt install pdsh"
    return "let the nodes reach one another on all ports, and name their network: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
