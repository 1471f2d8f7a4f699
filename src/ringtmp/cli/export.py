"""ringtmp export"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Path(path_type=Path), help="A .safetensors file, or a folder.")
@click.option("--merge", is_flag=True, help="Add adapters to the weights beside which they were trained.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: Path, to: Path, merge: bool, as_json: bool) -> None:
    """Write the newest checkpoint of RUN to files that are used without ringtmp.

    A .safetensors file has every weight under its name in the model's state_dict. A folder is laid out as transformers has it;
    of a run with adapters it has those alone, as PEFT has them, or with --merge the whole model. The files are read back and
    compared with what the run predicts.
    """
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp.run.export_weights import export_weights
    from ringtmp.cli import show_results

    done = export_weights(run, to, merge)
    if as_json:
        files = [str(each) for each in done.files]
        show_results.print_json(
            {"files": files, "step": done.step, "tensors": done.tensors, "difference": done.difference}
        )
        return
    compared = (
        "not compared: its inputs are nested" if done.difference is None else f"largest difference {done.difference:g}"
    )
    print(f"step {done.step}  {done.tensors} tensors in {', '.join(map(str, done.files))}  {compared}")
