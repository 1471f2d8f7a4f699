"""Where text meets its model: which tokeniser reads it, into samples of which length, and whether both fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ringtmp.config import RunConfig, replaced
from ringtmp.data import source_registry
from ringtmp.data.tables_and_streams import Source, text_of
from ringtmp.data.text_samples import DEFAULT_CONTEXT, Reading
from ringtmp.data.tokenizer import FILES, Encoder, has_tokenizer, open_tokenizer
from ringtmp.errors import UsageError
from ringtmp.model.language_model_config import LanguageFacts, facts_named, facts_of
from ringtmp.model.layers import Model
from ringtmp.model.pretrained import is_pretrained, path_named, pretrained

Data = tuple[Source, Source | None]


def named_data(
    config: RunConfig, model: Model | None = None, phase: Callable[[str], None] = lambda text: None
) -> tuple[RunConfig, Data]:
    """The data that the settings name, and the settings with the length of a sample of text filled in: a resumed run, which
    may not have the model, needs the same."""
    training = config.training
    path = _tokenizer_path(config, model)
    if path is None:
        settings = {**config.model.settings, **({"context": training.context} if training.context else {})}
        data = source_registry.load(
            training.data, training.seed, settings, batch_size=training.batch_size, columns=training.columns,
            bad_lines=training.bad_lines,
        )  # fmt: skip
        return config, data
    facts = _facts(config, model)
    phase("reading the tokeniser")
    of_model = f"the tokeniser of --model {config.model.name} (another is given with --tokenizer PATH)"
    encoder = open_tokenizer(path, None if training.tokenizer is not None else of_model)
    context = training.context or usual_context(encoder, facts)
    _refuse_misfit(config.model.name, facts, encoder.name, encoder.vocabulary, context)
    how = Reading(encoder, context, training.attention_mask, phase)
    data = source_registry.load(training.data, training.seed, {}, how)
    return replaced(config, {"context": context}), data


def usual_context(encoder: Encoder, facts: LanguageFacts) -> int:
    return min(DEFAULT_CONTEXT, encoder.longest, facts.longest or DEFAULT_CONTEXT)


def check_text(train: Source, name: str, model: Model) -> Model:
    """The model, which refuses text with numbers beyond its vocabulary, or longer than it takes: at once, or when it is
    built."""
    text = text_of(train)
    if text is None:
        return model

    def check(module: Any) -> None:
        if isinstance(module, nn.Module):
            _refuse_misfit(name, facts_of(module), text.tokenizer, text.vocabulary, train.shape.inputs[0])

    if isinstance(model, nn.Module) or not callable(model):
        check(model)
        return model
    make = model

    def build() -> Any:
        made = make()
        check(made)
        return made

    return build


def _tokenizer_path(config: RunConfig, model: Model | None) -> str | None:
    """None: the data is no text, or is read as bytes."""
    training = config.training
    if not source_registry.is_text(training.data):
        for option, given in (
            ("--tokenizer", training.tokenizer), ("--context", training.context), ("--attention-mask", training.attention_mask),
        ):  # fmt: skip
            if given:
                raise UsageError(f"{option} is for text (--data text:PATH or jsonl:PATH), not for data {training.data}")
        return None
    if training.tokenizer is not None:
        return training.tokenizer
    if training.attention_mask and model is None and not is_pretrained(config.model.name):
        raise UsageError("--attention-mask is for text with a tokeniser: give one with --tokenizer PATH")
    if model is not None or not is_pretrained(config.model.name):
        return None
    pretrained(config.model.name)  # refuses what is no model
    path = path_named(config.model.name)
    place = path.parent if path.suffix == ".json" else path
    if not has_tokenizer(place):
        raise UsageError(
            f"--data {training.data} needs a tokeniser, and there is none in {place} (none of {', '.join(FILES)}): give one "
            "with --tokenizer PATH, a directory with a tokenizer.json or a .gguf file"
        )
    return str(place)


def _facts(config: RunConfig, model: Model | None) -> LanguageFacts:
    if isinstance(model, nn.Module):
        return facts_of(model)
    return facts_named(config.model.name) if model is None and is_pretrained(config.model.name) else LanguageFacts()


def _refuse_misfit(model: str, facts: LanguageFacts, tokenizer: str, vocabulary: int, context: int) -> None:
    if facts.otherwise is not None:
        raise UsageError(
            f"the model {model} is a {facts.otherwise}, which does not learn the next token of a text (it is no causal "
            "language model), so its loss would say nothing: give samples with labels of your own (--data FILE.py:factory)"
        )
    if facts.vocabulary is not None and vocabulary > facts.vocabulary:
        raise UsageError(
            f"the tokeniser {tokenizer} has {vocabulary} tokens, and the model {model} has embeddings for {facts.vocabulary}: "
            "give the tokeniser that belongs to the model"
        )
    if facts.longest is not None and context > facts.longest:
        raise UsageError(
            f"samples of {context} tokens are longer than the {facts.longest} that the model {model} takes: give a smaller "
            "--context"
        )
