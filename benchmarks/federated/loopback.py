"""A Flower deployment on this machine: certificates, keys, and the processes of a SuperLink and its SuperNodes.

Everything lies in one folder and listens on 127.0.0.1, at ports that were free. When the block ends, however it ends,
every process that was started in it is gone, and so are those that Flower started from them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import flwr
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import halfsilver
from halfsilver.federated.flower import Member, fingerprint

_MARK = "HALFSILVER_LOOPBACK"  # in the environment of each process, so that none is missed at the end
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_PEM = serialization.Encoding.PEM
_INSTALLS_NOTHING = "--disable-runtime-dependency-installation"


@dataclass
class Loopback:
    """The processes of one deployment. `say` is told what happens, with the time since the start."""

    folder: Path
    say: Callable[[str], None]
    env: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the block then ends as by any other error
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark, self.port, self._processes = secrets.token_hex(16), free_port(), dict[str, subprocess.Popen[str]]()
        make_certificates(self.folder)
        home = self._home("cli")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n\n[superlink.loop]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self._processes):
            self.kill(name)
        for pid in marked(self.mark):
            _quietly(os.kill, pid)
        until = time.monotonic() + 10
        while marked(self.mark) and time.monotonic() < until:
            time.sleep(0.1)
        left = marked(self.mark)
        if left:
            raise RuntimeError(f"{len(left)} processes would not end: {left}")

    def start_link(self, database: bool = True) -> None:
        """Without a database the link forgets its nodes when it ends. With one it serves fewer at a time."""
        f = self.folder
        tls = ["--ssl-ca-certfile", f / "ca.crt", "--ssl-certfile", f / "server.pem", "--ssl-keyfile", f / "server.key"]
        state = ["--database", f / "state.db"] if database else []
        where = ["--host", "127.0.0.1", "--port", self.port]
        self._start("link", ["flower-superlink", *where, *tls, "--enable-supernode-auth", _INSTALLS_NOTHING, *state])
        self.wait_for("the SuperLink", lambda: listens(self.port), 60)

    def start_node(self, name: str, *options: Any, config: Mapping[str, Any] | None = None, key: str = "") -> None:
        """A SuperNode with the key of this name, which also signs its replies."""
        path = self.folder / (key or name)
        values = {"signing-key": str(path), **(config or {})}
        secure = ["--root-certificates", self.folder / "ca.crt", "--auth-supernode-private-key", path]
        where = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", free_port()]
        self._start(name, ["flower-supernode", *where, *(options or secure), "--node-config", toml(values)])

    def new_key(self, name: str, users: int = 1) -> Member:
        make_node_key(self.folder / name)
        return Member(name=name, fingerprint=fingerprint((self.folder / f"{name}.pub").read_bytes()), users=users)

    def register(self, *names: str) -> None:
        started = [self.cli("supernode", "register", self.folder / f"{n}.pub", "loop") for n in names]
        for process in started:
            out, _ = process.communicate(timeout=120)
            if process.returncode:
                raise RuntimeError(f"flwr supernode register failed: {out}")

    def run_app(self, app: Path, config: Mapping[str, Any]) -> subprocess.Popen[str]:
        return self.cli("run", app, "loop", "--stream", "--run-config", toml(config))

    def cli(self, *arguments: Any) -> subprocess.Popen[str]:
        return self._popen(["flwr", *arguments], "cli", subprocess.PIPE)

    def kill(self, name: str) -> None:
        """SIGKILL to a process and all that it started."""
        process = self._processes.pop(name)
        _quietly(os.killpg, process.pid)
        process.wait()

    def wait_until_up(self, names: Sequence[str]) -> None:
        """Until each of these nodes is connected."""
        self.wait_for("SuperNodes", lambda: all("SuperNode ID" in self.log_of(name) for name in names), 300)

    def yield_to_the_link(self, name: str) -> None:
        """Let a node, and what it starts from now on, wait for the others.

        Nodes elsewhere would not take the link's processor. Dozens of them here would, and a link that cannot answer
        for a minute takes the running app for dead.
        """
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, pid, 19)

    def pids(self, name: str) -> list[int]:
        """Of a process and its children, which are in its group."""
        return [pid for pid in marked(self.mark) if os.getpgid(pid) == self._processes[name].pid]

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def wait_for(self, what: str, there: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not there():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come within {seconds:g} s")
            time.sleep(0.1)

    def _start(self, name: str, command: Sequence[Any]) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self._processes[name] = self._popen(command, name, log)

    def _popen(self, command: Sequence[Any], name: str, out: Any) -> subprocess.Popen[str]:
        """In a group of its own, with a Flower home of its own.

        Flower's programs may belong to another environment than this process, on which ours stands: they are found
        beside the package, and told where halfsilver and its metadata are.
        """
        binaries = Path(flwr.__file__).parents[4] / "bin"
        package = _joined(Path(halfsilver.__file__).parents[1], str(distribution("halfsilver").locate_file("")))
        own = {"FLWR_HOME": str(self._home(name)), _MARK: self.mark, "OMP_NUM_THREADS": "1"}
        places = {"PATH": str(binaries), "PYTHONPATH": package}
        path = {name: _joined(place, os.environ.get(name)) for name, place in places.items()}
        return subprocess.Popen(
            [str(binaries / command[0]), *map(str, command[1:])],
            env={**os.environ, **_QUIET, **path, **self.env, **own},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.folder,
        )

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home


def toml(values: Mapping[str, Any]) -> str:
    """Settings as Flower's command line takes them.

    >>> toml({"data": Path("a b"), "rounds": 3, "correlated": True})
    'data="a b" rounds=3 correlated=true'
    """
    forms = {k: json.dumps(str(v) if isinstance(v, Path) else v) for k, v in values.items()}
    return " ".join(f"{k}={form}" for k, form in forms.items())


def _joined(first: Path | str, others: str | None) -> str:
    return os.pathsep.join([str(first), *([others] if others else [])])


def marked(mark: str) -> list[int]:
    """Processes, zombies aside, whose environment has the mark."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _quietly(kill: Callable[[int, int], None], pid: int) -> None:
    with suppress(ProcessLookupError):
        kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def make_node_key(path: Path) -> None:
    """`path` and `path`.pub, on the curve that Flower's documentation uses."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = (serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    path.write_bytes(key.private_bytes(_PEM, *form))
    path.chmod(0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def make_certificates(folder: Path) -> None:
    """ca.crt, and server.pem with server.key for localhost, good for a day."""
    ca, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))]
    own = _certificate("halfsilver loopback CA", ca, "halfsilver loopback CA", ca).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    leaf = _certificate("localhost", server, "halfsilver loopback CA", ca)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(names), critical=False)
    (folder / "ca.crt").write_bytes(own.sign(ca, hashes.SHA256()).public_bytes(_PEM))
    (folder / "server.pem").write_bytes(leaf.sign(ca, hashes.SHA256()).public_bytes(_PEM))
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(server.private_bytes(_PEM, *form))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
