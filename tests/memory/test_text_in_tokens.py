"""`text:` and `jsonl:` with a tokeniser: packed documents, answers alone learned, scores per token and per byte."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ringtmp
from ringtmp import Result, Ring, api
from ringtmp.config import ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import Table
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.text_and_tokens import load_tokenizer
from ringtmp.run.text_settings import check_text, named_data

transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")

TEXT = "The ring goes round, and each of its nodes does a little: ünïcödé and 🎉 too.\n" * 40
TURNS = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "Here, 🎉."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "There."},
]


def tokenizer(template: str | None = TEMPLATE, size: int = 300, end: str | None = "<|end|>") -> Any:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>", "<|user|>", "<|assistant|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    raw.train_from_iterator([TEXT], trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end)
    made.chat_template = template
    return made


def model(vocabulary: int = 300, longest: int = 64) -> Any:
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=longest, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokeniser beside it, as people have them."""
    model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


def lines(path: Path, *items: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in items))
    return path


def settings(folder: Path, data: str, **more: Any) -> RunConfig:
    training = {"data": data, "steps": 3, "batch_size": 4, "microbatches": 2, **more}
    return RunConfig(ModelPart(f"hf:{folder / 'model'}"), TrainingPart(**training), RingPart(nodes=2))


def taken(table: Any) -> Mapping[str, torch.Tensor]:
    assert isinstance(table, Table)
    found: Mapping[str, torch.Tensor] = table.take(torch.arange(table.size))[0]
    return found


# -- documents ----------------------------------------------------------------------------------------------------------


def test_a_text_is_packed_with_the_models_own_tokeniser(folder: Path) -> None:
    config, (train, test) = named_data(settings(folder, f"text:{folder / 'a.txt'}"))
    assert config.training.context == 64, "128, but the model takes 64"
    rows = torch.cat([taken(train)["input_ids"], taken(test)["input_ids"]])
    expected = [*tokenizer()(TEXT).input_ids, 0]
    assert rows.flatten().tolist() == expected[: len(expected) // 64 * 64]
    assert set(taken(train)) == {"input_ids", "labels"}, "nothing is padded, so there is no mask"
    assert torch.equal(taken(train)["labels"], taken(train)["input_ids"])
    assert test is not None
    assert len(taken(test)["labels"]) == max(1, len(rows) // 10)


def test_documents_end_with_the_end_token_and_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, word in (("b.txt", "two"), ("a.txt", "one")):
        (tmp_path / name).write_text(word)
    own = tokenizer()
    train, test = ringtmp.text_data(tmp_path, own, context=2)
    found = torch.cat([taken(train)["input_ids"], taken(test)["input_ids"]]).flatten().tolist()
    expected = [*own("one").input_ids, 0, *own("two").input_ids, 0]
    assert found == expected[: len(expected) // 2 * 2]
    as_lines = lines(tmp_path / "c.jsonl", {"text": "one"}, "", {"text": "two", "source": "kept out"})
    train, test = ringtmp.text_data(as_lines, own, context=2)
    assert torch.cat([taken(train)["input_ids"], taken(test)["input_ids"]]).flatten().tolist() == found


def test_a_long_document_in_pieces_has_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = taken(ringtmp.text_data(folder / "a.txt", tokenizer(), context=8)[0])["input_ids"]
    monkeypatch.setattr("ringtmp.data.text_samples._PIECE", 200)
    said: list[str] = []
    monkeypatch.setattr("ringtmp.data.text_samples._SHOW_S", -1.0)
    data = settings(folder, f"text:{folder / 'a.txt'}", context=8)
    train = named_data(data, phase=said.append)[1][0]
    assert torch.equal(taken(train)["input_ids"], whole)
    assert any(each.startswith("tokenising: ") and each.endswith("KiB") for each in said), said


def test_the_tokens_of_the_test_part_stand_for_its_bytes(folder: Path) -> None:
    _, test = ringtmp.text_data(folder / "a.txt", tokenizer(), context=16)
    assert test.text is not None
    own = tokenizer()
    for row, count in zip(taken(test)["input_ids"], test.text.bytes, strict=True):
        learned = own.decode(row[1:].tolist(), skip_special_tokens=True)
        assert abs(len(learned.encode()) - int(count)) <= 8, "but for characters that are cut in the middle"
    whole = tokenizer()(TEXT, return_offsets_mapping=True)
    every, _ = ringtmp.text_data(folder / "a.txt", tokenizer(), context=len(whole.input_ids) // 2)
    first = every.text.bytes.sum() if every.text else 0  # type: ignore[union-attr]
    assert 0.4 * len(TEXT.encode()) < int(first) < 0.6 * len(TEXT.encode())


# -- answers ------------------------------------------------------------------------------------------------------------


def learned(row: Mapping[str, torch.Tensor], own: Any) -> str:
    labels = row["labels"][0]
    assert torch.equal(labels[labels != -100], row["input_ids"][0][labels != -100])
    return str(own.decode(labels[labels != -100].tolist()))


@pytest.mark.parametrize("template", [TEMPLATE, TURNS, MARKED])
def test_of_a_chat_what_the_assistant_says_is_learned_to_the_end_of_its_turn(template: str, tmp_path: Path) -> None:
    own = tokenizer(template)
    path = lines(tmp_path / "c.jsonl", *[{"messages": CHAT}] * 3)
    train, _ = ringtmp.text_data(path, own, context=120)
    row = {key: value[:1] for key, value in taken(train).items()}
    assert learned(row, own) == "Here, 🎉.<|end|>There.<|end|>"
    said = own.decode(row["input_ids"][0].tolist())
    assert said.startswith("<|user|>Where is it?<|end|>")
    assert train.text is not None
    assert int(train.text.bytes[0]) == len("Here, 🎉.There.".encode())
    assert "attention_mask" not in row


@pytest.mark.parametrize("ask", ["", "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"])
def test_an_answer_is_not_looked_for_in_what_comes_before_it(ask: str, tmp_path: Path) -> None:
    """A template's own system text, or its header, may have the same words."""
    turns = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '<|end|>' }}{% endfor %}"
    own = tokenizer("{{ 'I am an assistant. Yes.<|end|>' }}" + turns + ask)
    said = ("Yes.", "What are you?", "assistant", "Say nothing.", "")
    chat = [{"role": "user" if place % 2 else "assistant", "content": each} for place, each in enumerate(said)]
    train, _ = ringtmp.text_data(lines(tmp_path / "c.jsonl", *[{"messages": chat}] * 2), own, context=120)
    assert learned(taken(train), own) == "Yes.<|end|>assistant<|end|><|end|>"
    first = int((taken(train)["labels"][0] != -100).nonzero()[0])
    assert own.decode(taken(train)["input_ids"][0][:first].tolist()) == "I am an assistant. Yes.<|end|>assistant:\n"


def test_a_template_that_leaves_out_the_answer_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", *[{"messages": CHAT[:2]}] * 2)
    with pytest.raises(UsageError, match="line 1: the chat template does not write the answer in message 2"):
        ringtmp.text_data(path, tokenizer("{{ messages[0]['content'] }}"))


#: As Llama 3.2 has it, with a beginning that jinja strips.
DATED = "\n  {% set day = strftime_now('%d %b %Y') %}\n{{ day }}" + TEMPLATE


def test_a_question_is_asked_as_it_was_learned(tmp_path: Path) -> None:
    own = tokenizer(DATED)
    own.save_pretrained(tmp_path / "own")
    train, _ = ringtmp.text_data(lines(tmp_path / "c.jsonl", *[{"messages": CHAT[:2]}] * 2), own, context=64)
    found = load_tokenizer("mine", str(tmp_path / "own"))
    assert found is not None
    asked = found.encode("Where is it?", chat=True)
    assert asked == taken(train)["input_ids"][0][: len(asked)].tolist()
    assert own.decode(asked).startswith("\n26 Jul 2024<|user|>Where is it?")


def test_a_question_that_a_template_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    tokenizer("{{ raise_exception('no thanks') }}").save_pretrained(tmp_path / "own")
    found = load_tokenizer("mine", str(tmp_path / "own"))
    assert found is not None
    with pytest.raises(UsageError, match="--chat: the chat template refuses the messages: no thanks"):
        found.encode("Where is it?", chat=True)


def test_of_a_prompt_its_completion_and_the_end_are_learned(tmp_path: Path) -> None:
    own = tokenizer()
    path = lines(tmp_path / "c.jsonl", *[{"prompt": "Where is it?", "completion": " Here."}] * 2)
    train, test = ringtmp.text_data(path, own, context=40)
    assert learned(taken(train), own) == " Here.<|end|>"
    padded = taken(test)["input_ids"][0].tolist()
    text = [*own("Where is it? Here.").input_ids, 0]
    assert padded == text + [0] * (40 - len(text))
    _, test = ringtmp.text_data(path, own, context=40, attention_mask=True)
    assert taken(test)["attention_mask"].tolist() == [[1] * len(text) + [0] * (40 - len(text))]
    _, full = ringtmp.text_data(path, own, context=len(text), attention_mask=True)
    assert "attention_mask" not in taken(full), "nothing is padded"


def test_what_is_too_long_is_cut_and_counted_and_what_has_no_answer_left_is_left_out(tmp_path: Path) -> None:
    short, cut = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 50}
    hidden = {"prompt": "a" * 50, "completion": "b"}
    path = lines(tmp_path / "c.jsonl", short, cut, hidden, short)
    train, test = ringtmp.text_data(path, tokenizer(), context=10)
    assert (train.size, test.size) == (2, 1)
    assert train.text is not None
    assert [each.replace(str(path), "F") for each in train.text.remarks] == [
        "2 of 4 samples of jsonl:F were cut at 10 tokens",
        "1 of 4 samples of jsonl:F are left out: nothing of the answer is within 10 tokens",
    ]
    assert bool((taken(train)["labels"][:, 1:] != -100).any(1).all()), "else a loss would be no number"


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("{", "c.jsonl line 3 is not JSON"),
        ("[1]", "line 3 is not a JSON object but a list"),
        ({"txt": "a"}, r"line 3 has 'txt': it needs messages, or prompt and completion, or text"),
        ({"text": "a"}, r"line 3 has text, but .*c.jsonl line 1 has messages: all files of a source have one kind"),
        ({"messages": []}, "line 3: 'messages' must be a list"),
        ({"messages": [{"role": "user"}]}, "line 3: message 1 needs a 'role' and a 'content'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 3: no message has the role 'assistant'"),
        ({"prompt": 1, "completion": "a"}, "line 3: 'prompt' is a int, not text"),
        ({"prompt": "a", "completion": ""}, "line 3: 'completion' is empty"),
        ('{"messages": "\\ud800"}', "line 3 is not JSON"),
    ],
)
def test_a_wrong_line_is_named(last: Any, says: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", {"messages": CHAT}, "", last)
    with pytest.raises(UsageError, match=says):
        ringtmp.text_data(path, tokenizer(), context=64)


def test_a_line_or_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\xff")
    with pytest.raises(UsageError, match=r"a.txt is not UTF-8 text \(byte 4\)"):
        ringtmp.text_data(tmp_path / "a.txt", tokenizer())
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\xff\n')
    with pytest.raises(UsageError, match=r"a.jsonl line 2 is not UTF-8"):
        ringtmp.text_data(tmp_path / "a.jsonl", tokenizer())


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ("", {}, "a.txt is empty"),
        ("few", {}, r"has 4 tokens, too few for two samples of 64 tokens .*: give more text, or a smaller --context"),
        (TEXT, {"context": 65}, "samples of 65 tokens are longer than the 64 that the model .*model takes"),
        (TEXT, {"context": 1}, "--context 1"),
        (None, {}, "a.txt cannot be read: no such file"),
    ],
)
def test_text_that_makes_no_samples_is_refused(folder: Path, text: str | None, more: Any, says: str) -> None:
    path = folder / "a.txt"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UsageError, match=says):
        named_data(settings(folder, f"text:{path}", **more))


def test_a_tokeniser_that_is_missing_too_large_or_needless_is_refused(folder: Path) -> None:
    tokenizer(size=320).save_pretrained(folder / "large")
    data = f"text:{folder / 'a.txt'}"
    with pytest.raises(
        UsageError, match=r"tokeniser .*large has 31[0-9] tokens, and the model .* has embeddings for 300"
    ):
        named_data(settings(folder, data, tokenizer=str(folder / "large")))
    for each in (folder / "model").glob("*token*"):
        each.unlink()
    with pytest.raises(
        UsageError, match="needs a tokeniser, and there is none in .*model .*: give one with --tokenizer"
    ):
        named_data(settings(folder, data))
    with pytest.raises(UsageError, match="has no tokeniser"):
        named_data(settings(folder, data, tokenizer=str(folder / "model")))
    with pytest.raises(UsageError, match="there is no such file"):
        named_data(settings(folder, data, tokenizer="nowhere"))
    with pytest.raises(UsageError, match=r"--tokenizer .*a\.txt is no tokeniser: give a directory"):
        named_data(settings(folder, data, tokenizer=str(folder / "a.txt")))
    with pytest.raises(UsageError, match="--tokenizer is for text .*, not for data digits"):
        named_data(settings(folder, "digits", tokenizer="x"))
    with pytest.raises(UsageError, match=r"data jsonl:x needs a tokeniser: give one with --tokenizer"):
        named_data(RunConfig(training=TrainingPart(data="jsonl:x")))


def test_a_bundled_model_reads_bytes_of_any_length_and_no_tokens(folder: Path) -> None:
    data = TrainingPart(data=f"text:{folder / 'a.txt'}", context=24)
    _, (train, _) = named_data(RunConfig(ModelPart("gpt"), data))
    assert (train.shape.inputs, train.shape.outputs, train.loss) == ((24,), 256, "next_byte")
    tokens, test = ringtmp.text_data(folder / "a.txt", str(folder / "model"), context=24)
    with pytest.raises(UsageError, match="the bundled model gpt does not take tokens"):
        api.named_model(ModelPart("gpt"), tokens)
    with pytest.raises(UsageError, match="write --context N"):
        api.named_model(ModelPart(f"hf:{folder / 'model'}", {"context": 24}), tokens)
    with pytest.raises(UsageError, match="text_data already includes test data"):
        Ring(nodes=1).fit(model(), (tokens, test), test_data=test)


def test_a_factory_with_too_few_embeddings_is_refused_when_it_is_built(folder: Path) -> None:
    train, _ = ringtmp.text_data(folder / "a.txt", tokenizer(), context=16)
    with pytest.raises(UsageError, match="given has 300 tokens, and the model mine has embeddings for 200"):
        check_text(train, "mine", lambda: model(200))()  # type: ignore[operator]
    with pytest.raises(UsageError, match="embeddings for 200"):
        Ring(nodes=1).fit(model(200), (train, None)[0])


def test_a_chat_without_a_template_or_that_it_refuses_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", *[{"messages": CHAT}] * 2)
    with pytest.raises(UsageError, match="line 1 has messages, and the tokeniser given has no chat template"):
        ringtmp.text_data(path, tokenizer(None))
    with pytest.raises(UsageError, match="line 1: the chat template refuses the messages: no thanks"):
        ringtmp.text_data(path, tokenizer("{{ raise_exception('no thanks') }}"))
    moody = TEMPLATE.replace("m['content']", "(m['content'] if loop.last else '')")
    with pytest.raises(UsageError, match="otherwise when more follows, so the answer in message 2 cannot be found"):
        ringtmp.text_data(path, tokenizer(moody))


def masked() -> Any:
    torch.manual_seed(4)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4
        )
    )


def test_a_model_that_does_not_foretell_the_next_token_is_refused(folder: Path) -> None:
    """Its labels are not shifted: each token would be learned from itself."""
    masked().save_pretrained(folder / "model")
    says = r"the model .*model is a BertForMaskedLM, .* the next token.*--data FILE\.py:factory"
    with pytest.raises(UsageError, match=says):
        named_data(settings(folder, f"text:{folder / 'a.txt'}"))
    train, _ = ringtmp.text_data(folder / "a.txt", tokenizer(), context=16)
    with pytest.raises(UsageError, match="the model mine is a BertForMaskedLM"):
        check_text(train, "mine", masked)()  # type: ignore[operator]

    class OfOnesOwn(type(masked())):  # type: ignore[misc]
        """Nobody knows what it learns."""

    check_text(train, "mine", OfOnesOwn(masked().config))


# -- runs ---------------------------------------------------------------------------------------------------------------


def train(config: RunConfig, run: Path, nodes: int) -> Result:
    ring = RingPart(nodes=nodes, strategy=config.ring.strategy)
    return api.start(RunConfig(config.model, config.training, ring), run_dir=run, pool=InMemoryPool(nodes))


def by_hand(trained: Any, test: Any) -> tuple[float, int]:
    """Nats and tokens of the test part, sample by sample."""
    nats, tokens = 0.0, 0
    for ids, labels in zip(taken(test)["input_ids"], taken(test)["labels"], strict=True):
        count = int((labels[1:] != -100).sum())
        with torch.no_grad():
            nats += float(trained(input_ids=ids[None], labels=labels[None]).loss) * count
        tokens += count
    return nats, tokens


@pytest.mark.parametrize("strategy", ["ring", pytest.param("allreduce", marks=pytest.mark.long)])
def test_a_run_tells_perplexity_per_token_and_bits_per_byte(folder: Path, strategy: str) -> None:
    chats = [{"messages": [CHAT[0], {"role": "assistant", "content": "Here." * (1 + n % 7)}]} for n in range(80)]
    path = lines(folder / "c.jsonl", *chats)
    config = settings(folder, f"jsonl:{path}", context=64)
    config = RunConfig(config.model, config.training, RingPart(nodes=2, strategy=strategy))
    done = train(config, folder / "run", 2)
    _, test = named_data(config)[1]
    nats, tokens = by_hand(done.model, test)
    told = done.summary
    assert told.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    size = sum(len(each["messages"][1]["content"]) for each in chats[72:])
    assert told.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    assert abs((told.test_loss or 0.0) - nats / tokens) > 1e-3, "the mean over samples is another"
    assert done.history.epochs[-1].perplexity == told.perplexity
    again = Ring(nodes=1).evaluate(folder / "run")
    assert again["perplexity"] == pytest.approx(told.perplexity, rel=1e-4)


@pytest.mark.long  # quick: tables and bits of any data, and what is read again (tests/memory/test_changes_on_resume.py)
def test_one_node_and_two_have_the_same_bits_and_a_resumed_run_reads_the_same_text(folder: Path) -> None:
    config = settings(folder, f"text:{folder / 'a.txt'}", context=32)
    two, one = train(config, folder / "two", 2), train(config, folder / "one", 1)
    assert two.summary.weights_sha256 == one.summary.weights_sha256
    assert two.summary.perplexity == one.summary.perplexity
    longer = api.resume(folder / "one", {"steps": 5}, pool=InMemoryPool(1)).summary
    assert (longer.steps, longer.exactness, longer.warnings) == (5, "bits", ())
    (folder / "a.txt").write_text(TEXT.replace("ring", "chain"))
    other = api.resume(folder / "one", {"steps": 6}, pool=InMemoryPool(1)).summary
    assert "is not what it was before step 5" in other.warnings[-1]


def test_from_python_a_model_and_a_tokeniser_are_enough(folder: Path) -> None:
    data = ringtmp.text_data(folder / "a.txt", tokenizer(), context=32)
    done = Ring(nodes=1, progress=False).fit(model(), data, steps=2, batch_size=4, run_dir=folder / "run")
    assert done.summary.perplexity is not None


@pytest.mark.long  # quick: each alone, above
def test_a_tokeniser_by_its_path_gives_the_bits_of_the_object(folder: Path) -> None:
    data = ringtmp.text_data(folder / "a.txt", tokenizer(), context=32)
    done = Ring(nodes=1, progress=False).fit(model(), data, steps=2, batch_size=4, run_dir=folder / "run")
    named = Ring(nodes=1, progress=False).fit(
        model(), f"text:{folder / 'a.txt'}", tokenizer=str(folder / "model"), context=32, steps=2, batch_size=4,
        run_dir=folder / "named",
    )  # fmt: skip
    assert named.summary.weights_sha256 == done.summary.weights_sha256


def test_a_run_trained_on_tokens_is_evaluated_on_data_of_a_factory(folder: Path) -> None:
    train(settings(folder, f"text:{folder / 'a.txt'}", context=32, tokenizer=str(folder / "model")), folder / "run", 1)
    own = Ring(nodes=1).evaluate(folder / "run")
    (folder / "mine.py").write_text(
        "from pathlib import Path\nimport ringtmp\n\ndef data():\n    here = Path(__file__).parent\n"
        "    return ringtmp.text_data(here / 'a.txt', str(here / 'model'), context=32)\n"
    )
    found = Ring(nodes=1).evaluate(folder / "run", f"{folder / 'mine.py'}:data")
    assert (found["perplexity"], found["bits_per_byte"]) == (own["perplexity"], own["bits_per_byte"])
    with pytest.raises(UsageError, match="digits lacks 'input_ids'"):
        Ring(nodes=1).evaluate(folder / "run", "digits")
