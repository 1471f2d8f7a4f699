"""ringtmp generate"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ringtmp.cli.node_options import nodes_of, where_options
from ringtmp.errors import UsageError


@click.command("generate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, metavar="TEXT|-|@FILE", help="The text to write on; - reads it from stdin.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, metavar="N", help="Tokens to write at most.")
@click.option(
    "--temperature", type=float, metavar="T", help="Draw tokens by chance: 1 as the model says, less is more certain."
)
@click.option("--top-k", type=int, metavar="K", help="Draw from the K best tokens alone.")
@click.option("--top-p", type=float, metavar="P", help="Draw from the fewest tokens whose chances add up to P.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the chance.")
@click.option("--chat", is_flag=True, help="The prompt is what a person says: put it into the model's chat template.")
@click.option(
    "--tokenizer", metavar="PATH", help="Directory, tokenizer.json or .gguf of the tokeniser.  [the model's own]"
)
@where_options("generate")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the text as it comes."
)
def command(
    run: Path, prompt: str, max_new_tokens: int, temperature: float | None, top_k: int | None, top_p: float | None, seed: int,
    chat: bool, tokenizer: str | None, nodes: int | None, listen: str | None, ring_name: str, as_json: bool,
) -> None:  # fmt: skip
    """Write a text on with the newest checkpoint of RUN, a language model.

    The best token is taken each time, unless --temperature, --top-k or --top-p is given. The text is printed as it comes,
    without the prompt. It ends where the model ends it, after --max-new-tokens, or where the model can read no more.
    """
    text = _text(prompt)
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp.run import evaluate_predict_generate
    from ringtmp.cli import show_results
    from ringtmp.model.next_token import Choice
    from ringtmp.run.generate import Prompt

    asked = Prompt(text, max_new_tokens, Choice(temperature, top_k, top_p, seed), chat, tokenizer)
    count, pool = nodes_of(run, nodes, listen, ring_name)
    found = evaluate_predict_generate.generate(run, asked, count, _nothing if as_json else _show, pool=pool)
    if as_json:
        show_results.print_json(found)
    else:
        print(flush=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _nothing(text: str) -> None:
    pass


def _text(prompt: str) -> str:
    try:
        if prompt == "-":
            return sys.stdin.read()
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--prompt {prompt} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt {prompt} is not UTF-8 text (byte {error.start})") from error
    return prompt
