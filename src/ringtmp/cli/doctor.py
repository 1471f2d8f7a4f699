"""ringtmp doctor"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ringtmp.launch.doctor import Finding


@click.command("doctor")
@click.option("--join", metavar="TOKEN|-|@FILE", help="Also try to reach the master of this token (or RINGTMP_TOKEN).")
@click.option(
    "--listen", metavar="ADDRESS[:PORT]", help="Where a master would listen.  [the default route, port 47100]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(join: str | None, listen: str | None, as_json: bool) -> None:
    """Check this device as a ring would see it and, with --join, the connection to a master.

    Changes nothing, joins nothing and uses up no token. The exit code is 1 if a check fails, otherwise 0.
    """
    import msgspec

    from ringtmp.launch import agent_messages, device_facts, doctor, join_token, reach_master

    given = join_token.given(join) if join or os.environ.get("RINGTMP_TOKEN") else None
    findings = doctor.look(device_facts.parse_listen(listen, agent_messages.DEFAULT_PORT) if listen else None)
    if given is not None:
        findings += reach_master.try_joining(given)
    failed = sum(finding.verdict == "fail" for finding in findings)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"ok": not failed, "findings": findings})).decode())
    else:
        _show(findings, failed)
    sys.exit(1 if failed else 0)


def _show(findings: list[Finding], failed: int) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:4}  {finding.name:{width}}  {finding.found}")
        if finding.todo:
            print(f"{'':4}  {'':{width}}  -> {finding.todo}")
    print(f"\n{failed} of {len(findings)} checks failed" if failed else "\nall checks passed")
