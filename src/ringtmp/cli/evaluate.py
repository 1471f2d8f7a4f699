"""ringtmp evaluate"""

from __future__ import annotations

from pathlib import Path

import click

_SCORES = (
    ("accuracy", "accuracy", ".1%"), ("bits_per_byte", "bits per byte", ".3f"), ("perplexity", "perplexity", ".4g"),
)  # fmt: skip


@click.command("evaluate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", help="Data to use instead of the run's own test part.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of nodes that evaluate.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: Path, data: str | None, nodes: int, as_json: bool) -> None:
    """Print the loss and accuracy of the newest checkpoint of RUN on its test part."""
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp import api
    from ringtmp.cli import show_results

    score = api.evaluate(run, data, nodes)
    if as_json:
        show_results.print_json(score)
        return
    rest = "".join(f"  {label} {score[key]:{form}}" for key, label, form in _SCORES if score[key] is not None)
    print(f"step {score['step']}  {score['samples']} samples of {score['data']}  loss {score['loss']:.4f}{rest}")
