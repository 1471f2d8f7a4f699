#!/bin/sh
# Make .venv and install RingTMP into it with the constraints. Safe to run again. EXTRAS=dev,hf adds transformers.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

case "$(uname -s)" in
    Linux|Darwin) ;;
    *) echo "RingTMP runs on Linux and macOS; on Windows, use WSL 2." >&2; exit 2 ;;
esac
"$PYTHON" - <<'PY' || exit 2
import sys
if sys.version_info < (3, 11):
    sys.exit(f"RingTMP needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make setup PYTHON=python3.11")
PY

# Debian's python3 comes without venv; install it where we may.
if ! "$PYTHON" -c "import ensurepip, venv" 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3-venv
    else
        echo "this Python has no venv module: install python3-venv, then run make setup again" >&2
        exit 2
    fi
fi

# The lab emulates devices with ip and tc (Linux, root); without them its tests are skipped.
if [ "$(uname -s)" = Linux ] && { ! command -v ip >/dev/null || ! command -v tc >/dev/null; }; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq iproute2; } >/dev/null || echo "iproute2 cannot be installed: the lab is skipped" >&2
    else
        echo "ip and tc are missing and we are not root: the lab and its tests are skipped (install iproute2)" >&2
    fi
fi

# Reports are looked at in a real browser; without one those tests are skipped.
if [ "$(uname -s)" = Linux ] && ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null \
    && ! command -v google-chrome >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
        || echo "chromium cannot be installed: tests that open a report are skipped" >&2
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[${EXTRAS:-dev}]"
