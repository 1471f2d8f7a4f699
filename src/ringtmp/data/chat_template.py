"""Conversations as a tokeniser's own chat template writes them: the same words in training and in answering, on any day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtmp.errors import UsageError

#: A template may write the day into a conversation; the same file must give the same tokens tomorrow. As a macro, because
#: not every transformers lets a function through to a template. The template itself begins on a line of its own.
_ASKS_THE_DAY = "strftime_now"
_DAY = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}\n"


def chat_template(tokenizer: Any) -> str | None:
    """The one that is used without tools."""
    given = getattr(tokenizer, "chat_template", None)
    found = given.get("default") if isinstance(given, dict) else given
    return str(found) if found else None


def rendered(tokenizer: Any, where: str, messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    """Text, unless `more` asks for tokens. The tokeniser has a template. `where`: whose messages, for errors."""
    template = chat_template(tokenizer)
    if template is not None and _ASKS_THE_DAY in template:
        template = _DAY + template
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, **{"tokenize": False, **more}
        )  # fmt: skip
    except ImportError as error:
        raise UsageError(f"{where}: a chat template needs the package jinja2: pip install jinja2") from error
    except Exception as error:  # a template refuses in its own words
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"{where}: the chat template refuses the messages: {reason}") from error
