"""ringtmp evaluate"""

from __future__ import annotations

from pathlib import Path

import click

from ringtmp.cli.node_options import nodes_of, where_options

_SCORES = (
    ("accuracy", "accuracy", ".1%"), ("bits_per_byte", "bits per byte", ".3f"), ("perplexity", "perplexity", ".4g"),
)  # fmt: skip


@click.command("evaluate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", help="Data to use instead of the run's own test part.")
@where_options("evaluate")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run: Path, data: str | None, nodes: int | None, listen: str | None, ring_name: str, as_json: bool
) -> None:  # fmt: skip
    """Print the loss and accuracy of the newest checkpoint of RUN on its test part."""
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp.run import evaluate_predict_generate
    from ringtmp.cli import show_results

    count, pool = nodes_of(run, nodes, listen, ring_name)
    score = evaluate_predict_generate.evaluate(run, data, count, pool=pool)
    if as_json:
        show_results.print_json(score)
        return
    rest = "".join(f"  {label} {score[key]:{form}}" for key, label, form in _SCORES if score[key] is not None)
    print(f"step {score['step']}  {score['samples']} samples of {score['data']}  loss {score['loss']:.4f}{rest}")
