"""ringtmp export"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="A .safetensors, .onnx or .pt2 file, or a folder."
)
@click.option("--merge", is_flag=True, help="Add adapters to the weights beside which they were trained.")
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run: Path, to: Path, merge: bool, force: bool, as_json: bool) -> None:
    """Write the newest checkpoint of RUN to files that are used without ringtmp.

    A .safetensors file has every weight under its name in the model's state_dict. A .onnx file (needs ringtmp[onnx]) and a
    .pt2 file (torch.export) have what the model computes, too, for any number of samples. A folder is laid out as
    transformers has it; of a run with adapters it has those alone, as PEFT has them, or with --merge the whole model. The
    files are read back and compared with what the run predicts.
    """
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp.run.export_run import export_weights
    from ringtmp.cli import show_results

    done = export_weights(run, to, merge, force)
    if as_json:
        show_results.print_json({**dataclasses.asdict(done), "files": [str(each) for each in done.files]})
        return
    largest = "" if done.difference is None else f"; largest difference {done.difference:g}"
    print(f"step {done.step}  {done.tensors} tensors in {', '.join(map(str, done.files))}")
    print(f"compared: {done.compared}{largest}")
