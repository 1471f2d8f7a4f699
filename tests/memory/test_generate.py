"""`ringtmp generate`: on any number of nodes the text of the plain model, for one trip round the ring a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commands import here
from ordinary_models import TiedLanguageModel, tokens
from ringtmp import Generated, Result, Ring, api
from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.next_token import Choice
from ringtmp.model.pretrained import pretrained
from ringtmp.run import decoding
from ringtmp.run.decoding import Cached, Window
from ringtmp.run.generate import Prompt, Writing
from ringtmp.runtime.run_directory import RunDirectory

SAID = "the lazy fox "
CONTEXT = 32


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    here(
        "train", "--model", "gpt", "--data", f"text:{folder / 'words.txt'}", "--set", "depth=2", "--set", "width=16",
        "--set", "heads=2", "--set", f"context={CONTEXT}", "--steps", 12, "--batch-size", 8, "--lr", 0.02, "--nodes", 1,
        "--quiet", "--run-dir", "run", cwd=folder,
    )  # fmt: skip
    return Result(folder / "run")


def written(run: Result, asked: Prompt, nodes: int = 1, **more: Any) -> Generated:
    return api.generate(run.run_dir, asked, nodes, lambda text: None, pool=InMemoryPool(nodes), **more)


def scores(model: nn.Module, text: list[int], length: int = CONTEXT) -> torch.Tensor:
    """The plain model, which was exported for texts of one length."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([text + [0] * (length - len(text))]))[0, : len(text)]
    return found


def best(model: nn.Module, prompt: list[int], count: int, length: int = CONTEXT) -> list[int]:
    """The plain model, asked for one token after another."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(scores(model, text, length)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("nodes", [3, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_gpt_writes_what_the_plain_model_writes(gpt: Result, nodes: int) -> None:
    found = written(gpt, Prompt(SAID, 15), nodes)
    assert found.tokens == best(gpt.model, list(SAID.encode()), 15)
    assert found.text == bytes(found.tokens).decode()
    assert (found.cached, found.prompt_tokens, found.stopped, found.step) == (True, len(SAID), "max_new_tokens", 12)


def test_scores_are_those_of_the_plain_model_whatever_parts_the_prompt_is_read_in(
    gpt: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "PART", 5)
    text = list(b"over the lazy dog.")
    writing = Writing(RunDirectory(gpt.run_dir), Prompt(text, 4), None, print, print)
    assert isinstance(writing.plan, Cached)
    whole = scores(gpt.model, text)
    training = RunDirectory(gpt.run_dir).read_config().config.training
    with writing.plan.started(training, InMemoryPool(2)) as reader:
        torch.testing.assert_close(reader.read(text[:13]), whole[12], rtol=0, atol=1e-4)
        for place in range(13, len(text)):
            torch.testing.assert_close(reader.read(text[place : place + 1]), whole[place], rtol=0, atol=1e-4)


def test_bytes_per_token_are_what_travels(gpt: Result) -> None:
    writing = Writing(RunDirectory(gpt.run_dir), Prompt(SAID, 4), None, print, print)
    training = RunDirectory(gpt.run_dir).read_config().config.training
    with writing.plan.started(training, InMemoryPool(2)) as reader:
        reader.read([1, 2, 3])
        before = reader._master.farewell()  # type: ignore[attr-defined]
        reader.read([4])
        after = reader._master.farewell()  # type: ignore[attr-defined]
    sent, received = after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes
    assert sent + received == reader.bytes_per_token > 0


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_nodes(gpt: Result) -> None:
    one, three = (written(gpt, Prompt(SAID, 12, Choice(1.5, seed=4)), nodes).tokens for nodes in (1, 3))
    assert one == three != written(gpt, Prompt(SAID, 12, Choice(1.5, seed=5))).tokens


def test_the_text_comes_as_it_is_written_and_ends_where_the_model_can_read_no_more(
    gpt: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    came: list[str] = []
    found = Ring(nodes=1).generate(gpt.run_dir, SAID, max_new_tokens=100, on_text=came.append)
    assert "".join(came) == found.text == str(found)
    assert len(came) > 1
    assert (len(found.tokens), found.stopped) == (CONTEXT - len(SAID), "full")
    assert f"it writes {CONTEXT - len(SAID)} at most" in capsys.readouterr().err


def test_the_command_line(gpt: Result, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(SAID)
    plain = here("generate", gpt.run_dir, "--prompt", "@prompt", "--max-new-tokens", 7, cwd=tmp_path)
    said = json.loads(
        here("generate", gpt.run_dir, "--prompt", SAID, "--max-new-tokens", 7, "--json", cwd=tmp_path).stdout
    )
    assert plain.stdout == said["text"] + "\n"
    assert len(said["tokens"]) == 7
    assert said["tokens_per_s"] > 0
    assert said["bytes_per_token"] == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--prompt", "a" * 40), "the prompt has 40 tokens, and the model reads at most 32"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "--chat"), "needs a model with a chat template"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "--tokenizer nowhere: there is no such file"),
        (("--prompt", "@nothing"), "--prompt @nothing cannot be read"),
        (("--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens 0 must be at least 1"),
        (("--prompt", "a", "--top-p", 2), "--top-p 2 must be above 0"),
        (("--prompt", "a", "--nodes", 0), "--nodes 0 must be at least 1"),
        (("--prompt", "a", "--listen", "127.0.0.1"), "leaves no device to wait for"),
    ],
)
def test_wrong_input_ends_before_anything_starts(
    gpt: Result, asked: tuple[object, ...], says: str, tmp_path: Path
) -> None:
    assert says in here("generate", gpt.run_dir, *asked, cwd=tmp_path, code=2).stderr


def test_a_lost_node_ends_it_with_its_name(gpt: Result) -> None:
    pool = InMemoryPool(3)
    with pytest.raises(NodeLost, match="node 2") as lost:
        api.generate(gpt.run_dir, Prompt(SAID, 15), 3, lambda text: pool.kill(2), pool=pool)
    assert lost.value.exit_code == 4


@pytest.mark.long
@pytest.mark.parametrize("frozen_as", ["int8", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_frozen_weights_that_are_kept_small_are_read_as_the_run_reads_them(frozen_as: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    here(
        "train", "--model", "gpt", "--data", "text:words.txt", "--set", "depth=1", "--set", "width=16", "--set", "heads=2",
        "--context", CONTEXT, "--steps", 2, "--batch-size", 4, "--nodes", 1, "--train", "head", "--frozen-as", frozen_as,
        "--quiet", "--run-dir", "run", cwd=tmp_path,
    )  # fmt: skip
    run = Result(tmp_path / "run")
    found = written(run, Prompt(SAID, 6), 2)
    assert (found.tokens, found.cached) == (best(run.model, list(SAID.encode()), 6), True)


# -- models without keys and values -------------------------------------------------------------------------------------


def each_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def trained(model: Any, data: Any, folder: Path, **more: Any) -> Result:
    ring = Ring(nodes=1, progress=False)
    return ring.fit(model, data, steps=1, batch_size=8, microbatches=2, run_dir=folder / "run", **more)


def test_a_module_of_ones_own_reads_the_whole_text_for_every_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    x = tokens(30, 12)(16)
    run = trained(TiedLanguageModel(1, 0.0), (x, x), tmp_path, loss=each_token)
    for nodes in (1, 2):
        found = written(run, Prompt([4, 9, 2], 6), nodes)
        assert found.tokens == best(run.model, [4, 9, 2], 6, 12)
        assert (found.cached, found.text, found.bytes_per_token > 0) == (False, None, nodes > 1)
    assert "each token is computed from the whole text" in capsys.readouterr().err
    with pytest.raises(UsageError, match="vocabulary of 30"):
        written(run, Prompt("text"))
    with pytest.raises(UsageError, match="token 30, but the model's vocabulary has 30"):
        written(run, Prompt([30]))


class LooksAhead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.out = nn.Linear(8, 9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        found: torch.Tensor = self.out(x + x.mean(1, keepdim=True))
        return found


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    x = tokens(9, 6)(16)
    ahead = trained(LooksAhead(), (x, x), tmp_path / "ahead", loss=each_token)
    with pytest.raises(UsageError, match="not causal"):
        written(ahead, Prompt([1, 2]))
    classes = trained(nn.Sequential(nn.Linear(6, 3)), (x.float(), x[:, 0] % 3), tmp_path / "classes")
    with pytest.raises(UsageError, match=r"is no language model.* takes a tensor float32\[samples, 6\]"):
        written(classes, Prompt([1, 2]))


# -- models of transformers ---------------------------------------------------------------------------------------------


def llama(folder: Path) -> str:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=48, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.mark.parametrize(
    ("lora", "frozen_as"),
    [
        (None, "float32"),
        ("r=2,on=q_proj,v_proj", "float32"),
        pytest.param("r=2,on=q_proj,v_proj", "int8", marks=pytest.mark.long),  # quick: the gpt, above
    ],
)
def test_a_llama_writes_what_transformers_writes(lora: str | None, frozen_as: str, tmp_path: Path) -> None:
    name, ids = llama(tmp_path / "base"), tokens(40, 12)(16)
    run = trained(
        name,
        {"input_ids": ids, "labels": ids},
        tmp_path,
        lora=lora,
        frozen_as=frozen_as,
        optimizer=("sgd", {"lr": 0.1}),
    )
    plain: Any = run.model
    prompt = [3, 1, 4, 1, 5]
    wanted = plain.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
    )
    for nodes in (1, 2, 3):
        found = written(run, Prompt(prompt, 20), nodes)
        assert (found.tokens, found.cached) == (wanted[0, 5:].tolist(), True)
    writing = Writing(RunDirectory(run.run_dir), Prompt(prompt, 4), pretrained(name, filled=False), print, print)
    with torch.no_grad():
        whole = plain(torch.tensor([prompt])).logits[0]
    with writing.plan.started(RunDirectory(run.run_dir).read_config().config.training, InMemoryPool(2)) as reader:
        torch.testing.assert_close(reader.read(prompt[:3]), whole[2], rtol=0, atol=1e-4)
        torch.testing.assert_close(reader.read(prompt[3:4]), whole[3], rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"has no tokeniser"):
        written(run, Prompt("text"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["GPT2", "Qwen2", "GPTNeoX", "Gemma2", "Phi3", "Bloom"])
def test_other_models_of_transformers(kind: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    more = {"Gemma2": {"head_dim": 8}}
    torch.manual_seed(2)
    groups = {"num_key_value_heads": 1} if kind in ("Qwen2", "Gemma2", "Phi3") else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **groups, **more.get(kind, {}))
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    ids = tokens(40, 12)(8)
    run = trained(model, {"input_ids": ids, "labels": ids}, tmp_path)
    prompt = [3, 1, 4]
    wanted = run.model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
    )
    found = written(run, Prompt(prompt, 8), 2, model=model)
    assert found.tokens == wanted[0, 3:].tolist()
    assert found.cached is (kind != "Bloom")


def test_a_plan_without_the_model_reads_the_whole_text(gpt: Result) -> None:
    """A run of an unknown module, whose class is not at hand."""
    run = RunDirectory(gpt.run_dir)
    talk = decoding.Talk.of(run.read_layers()[0], "run")
    with Window(run, talk).started(run.read_config().config.training, InMemoryPool(2)) as reader:
        found = reader.read(list(SAID.encode()))
    torch.testing.assert_close(found, scores(gpt.model, list(SAID.encode()))[-1], rtol=0, atol=1e-4)
