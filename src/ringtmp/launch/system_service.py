"""A device that serves after every start of the machine: a systemd unit of the user's own.

    ~/.config/systemd/user/ringtmp-node.service    runs `ringtmp node --join @TOKEN_FILE`, again whenever it ends
    ~/.config/ringtmp/node-token                   where the master is and who it is; mode 0600

The token may be old: a device that was admitted is known by its key.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ringtmp.errors import UsageError
from ringtmp.launch.join_token import Token, encode
from ringtmp.launch.key_store import config_dir
from ringtmp.system.files import write_atomic

UNIT = "ringtmp-node.service"
_TEXT = """[Unit]
Description=This device as a node of a RingTMP ring
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=always
RestartSec=10
Environment=RINGTMP_CONFIG={config}

[Install]
WantedBy=default.target
"""


def unit_text(command: Sequence[str], config: Path) -> str:
    # In a unit % begins a specifier and $ a variable.
    quoted = shlex.join(command).replace("%", "%%").replace("$", "$$")
    return _TEXT.format(command=quoted, config=shlex.quote(str(config)).replace("%", "%%"))


def unit_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user" / UNIT


def token_path() -> Path:
    return config_dir() / "node-token"


def install(token: Token, options: Sequence[str]) -> list[str]:
    """Returns what to tell. `options`: those of `ringtmp node` besides the token."""
    if sys.platform != "linux":
        raise UsageError("--install writes a systemd unit, which only Linux has: start ringtmp node in your own way")
    command = [sys.executable, "-P", "-m", "ringtmp", "node", "--join", f"@{token_path()}", *options]
    try:
        unit_path().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(token_path(), (encode(token) + "\n").encode(), 0o600)
        write_atomic(unit_path(), unit_text(command, config_dir()).encode(), 0o644)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or unit_path()}: {error.strerror}") from error
    told = [f"wrote {unit_path()}"]
    problem = _systemctl("daemon-reload") or _systemctl("enable", "--now", UNIT)
    if problem:
        told.append(
            f"systemd did not take it ({problem}): run systemctl --user enable --now {UNIT} when you are logged in"
        )
    else:
        told.append(f"it runs now and after every login; its log: journalctl --user -u {UNIT}")
    told.append(f"to start it without a login: sudo loginctl enable-linger {os.environ.get('USER', '$USER')}")
    return told


def uninstall() -> list[str]:
    """This device no longer serves by itself. It stays admitted to the ring."""
    if not unit_path().exists():
        raise UsageError(f"there is no {unit_path()}: nothing is installed here")
    problem = _systemctl("disable", "--now", UNIT)
    unit_path().unlink()
    token_path().unlink(missing_ok=True)
    _systemctl("daemon-reload")
    told = [f"removed {unit_path()}"]
    return [*told, f"systemd did not stop it ({problem})"] if problem else told


def _systemctl(*words: str) -> str:
    """What went wrong; empty if nothing did."""
    if shutil.which("systemctl") is None:
        return "there is no systemctl here"
    try:
        done = subprocess.run(
            ["systemctl", "--user", *words], capture_output=True, text=True, timeout=30, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
