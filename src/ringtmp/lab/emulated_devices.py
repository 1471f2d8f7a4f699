"""Emulated devices on this machine: set up on entering, gone on leaving, however one leaves.

Each device has a network namespace, control groups, a host name and a folder of its own. A process started in it dies
with the lab, by the kernel's hand if need be; what a killed lab leaves behind, the next one removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from ringtmp.errors import UsageError
from ringtmp.lab import control_groups, networks
from ringtmp.lab.machine_shares import Share
from ringtmp.metrics import power_of_this_device
from ringtmp.metrics.energy import Watts
from ringtmp.system.end_with_parent import signal_at_parents_end
from ringtmp.transport.slow_link import LATENCY, RATE

STOP_LIMIT_S = 5.0
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNET = 0x40000000


class EmulatedDevices:
    """Use as a context. Starts processes by fork, so the program must have one thread only."""

    def __init__(self, shares: Sequence[Share], scale: float, isolated: bool) -> None:
        self.shares = tuple(shares)
        self._scale = scale
        self._isolated = isolated
        self._lab = os.getpid()
        self._ports = tuple(
            networks.Port(share.device.name, index + 1, share.link_mbps) for index, share in enumerate(shares)
        )
        self._tree = control_groups.this_tree() if isolated else None
        self._groups: list[tuple[Path, ...]] = []
        self._folder: Path | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> EmulatedDevices:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{networks.PREFIX}{self._lab}-"))  # 0700
            for index in range(len(self.shares)):
                (self._folder / str(index) / "tmp").mkdir(parents=True)
            if self._tree is not None:
                for share in self.shares:
                    name, memory_bytes = share.device.name, share.memory_bytes
                    self._groups.append(control_groups.make(self._tree, self._lab, name, share.cpu, memory_bytes))
                networks.build(self._lab, self._ports)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name(self, index: int) -> str:
        return self.shares[index].device.name

    def address(self, index: int) -> str:
        return self._ports[index].address if self._isolated else "127.0.0.1"

    def master_address(self) -> str:
        """Where the master listens. On the shared loopback its usual port may be taken."""
        if self._isolated:
            return self.address(0)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    def lent_memory_mb(self, index: int) -> int | None:
        """The cap a command should know of: what the kernel says is free is the whole machine's."""
        return int(self.shares[index].device.memory_mb) if self._isolated else None

    def memory_kills(self, index: int) -> int:
        return control_groups.memory_kills(self._groups[index]) if self._groups else 0

    def start(
        self, index: int, command: Sequence[str], stdin: int = subprocess.DEVNULL, stdout: int | IO[Any] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a command in a device, with standard error in a pipe. Ctrl-C reaches the lab alone, not the command."""
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                env=self._environment(index),
                start_new_session=True,
                preexec_fn=self._entry(index),
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it could not enter the device"
            raise UsageError(f"{command[0]!r} does not start in {self.name(index)}: {reason}") from error
        self._started.append(process)
        return process

    def close(self) -> None:
        """End every process, then remove groups, namespaces and folder. Signals wait meanwhile; takes at most seconds."""
        waiting = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            self._end_processes()
            if self._tree is not None:
                control_groups.remove(self._tree, self._lab)
                networks.remove(self._lab)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, waiting)

    def _environment(self, index: int) -> dict[str, str]:
        assert self._folder is not None, "not entered"
        home = self._folder / str(index)
        device = self.shares[index].device
        found = {
            "RINGTMP_CONFIG": str(home / "config"),
            "TMPDIR": str(home / "tmp"),
            "RINGTMP_EMULATED": "1",
            "RINGTMP_LAB_SCALE": f"{self._scale:.6g}",
            "RINGTMP_DEVICE": self.name(index),
            "RINGTMP_ADDRESS": self.address(index),
            "RINGTMP_PEERS": " ".join(f"{self.name(each)}={self.address(each)}" for each in range(len(self.shares))),
        }
        if any(share.device.latency_ms for share in self.shares):
            found[LATENCY] = str(device.latency_ms)
        if not self._isolated:  # no tc here: the nodes slow themselves down
            found[RATE] = str(device.link_mbps * self._scale)
        if device.idle_w is not None and device.busy_w is not None:
            watts, share = Watts(device.idle_w, device.busy_w, device.nj_per_byte), self.shares[index].cpu / self._scale
            found[power_of_this_device.WATTS] = power_of_this_device.watts_text(watts, share / device.cpu)
        return os.environ | found

    def _entry(self, index: int) -> Callable[[], None]:
        """What the child does between fork and exec."""
        lab, libc, share = self._lab, self._libc, self.shares[index]
        groups = self._groups[index] if self._groups else ()
        network = networks.FOLDER / networks.namespace(lab, share.device.name)
        name, isolated = share.device.name, self._isolated

        def enter() -> None:
            if sys.platform == "linux":
                signal_at_parents_end(signal.SIGKILL)
                if os.getppid() != lab:  # it died before we asked to follow it
                    os._exit(1)
            if not isolated:
                return
            for group in groups:
                (group / "cgroup.procs").write_text("0")
            os.sched_setaffinity(0, share.processors)
            with network.open() as handle:
                if libc.setns(handle.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                    raise OSError(ctypes.get_errno(), "cannot enter the namespace")
            socket.sethostname(name)

        return enter

    def _end_processes(self) -> None:
        alive = [process for process in self._started if process.poll() is None]
        # Without control groups a list of descendants is all there is; made now, since orphans are not found again.
        family = [] if self._isolated else _descendants(alive)
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
        if self._tree is not None:
            control_groups.remove(self._tree, self._lab)
        for process in alive:
            process.kill()
            process.wait()
        for each in family:
            with contextlib.suppress(psutil.Error):
                each.kill()
        for process in self._started:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def remove_leftovers(isolated: bool) -> list[int]:
    """Remove what labs left that were killed; returns their process ids. Without isolation there are only folders."""
    tree = control_groups.this_tree() if isolated else None
    folders = [path for path in Path(tempfile.gettempdir()).glob(f"{networks.PREFIX}*") if path.is_dir()]
    owners = {path: int(found[1]) for path in folders if (found := re.match(rf"{networks.PREFIX}(\d+)-", path.name))}
    labs = set(owners.values()) | (control_groups.labs(tree) | networks.labs() if tree is not None else set())
    dead = sorted(lab for lab in labs if not _alive(lab))
    for lab in dead:
        if tree is not None:
            control_groups.remove(tree, lab)
            networks.remove(lab)
        for path in [path for path, owner in owners.items() if owner == lab]:
            shutil.rmtree(path, ignore_errors=True)
    return dead


def _alive(process_id: int) -> bool:
    try:
        return bool(psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _descendants(processes: Sequence[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += psutil.Process(process.pid).children(recursive=True)
    return found
