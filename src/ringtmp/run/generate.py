"""A text written on by a run's model: prompt in, tokens out as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from torch import nn

from ringtmp.config import TrainingPart
from ringtmp.errors import UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.model.decoder_cells import decoder_cells
from ringtmp.model.decoders import Decoder, GptDecoder, causal_decoder, gpt_layers, is_causal, most_tokens
from ringtmp.model.layers import Model, opened_model
from ringtmp.model.lora import add_adapters, parse_lora
from ringtmp.model.next_token import Choice, Chooser
from ringtmp.model.portable_layer import Layer
from ringtmp.model.text_and_tokens import BYTES, Bytes, Tokenizer, load_tokenizer
from ringtmp.model.zoo import GPT_HEADS
from ringtmp.run.decoding import Cached, DecoderWeights, Reader, Talk, Window, misfit
from ringtmp.run.result import module_of, prepare_as_trained
from ringtmp.runtime.checkpoint import Checkpoint, latest
from ringtmp.runtime.ensemble_members import refuse_members
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory, SavedConfig
from ringtmp.system.resources import give_back_memory

#: Keys and values have room for a multiple of so many tokens, so that one export serves prompts of many lengths.
ROOM = 128
#: What cannot be shown yet: the rest of a character is in the next token.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

Stopped = Literal["eos", "max_new_tokens", "full"]


class Generated(msgspec.Struct, frozen=True):
    """What came of a prompt. `stopped`: the model ended it, there are as many tokens as were asked for, or as it can read."""

    text: str | None  # None: tokens were given, and there is no tokeniser
    tokens: list[int]
    prompt_tokens: int
    stopped: Stopped
    step: int
    nodes: int
    cached: bool  # keys and values were kept on the nodes
    prompt_s: float  # until the first token
    tokens_per_s: float | None  # after the first one
    bytes_per_token: int  # tensors between nodes

    def __str__(self) -> str:
        return self.text if self.text is not None else " ".join(map(str, self.tokens))


@dataclass(frozen=True)
class Prompt:
    """What is asked for. `text`: or token numbers."""

    text: str | Sequence[int]
    max_new_tokens: int = 64
    choice: Choice = field(default_factory=Choice)
    chat: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")


class Writing:
    """A prompt and a run, checked; `write` does it. Everything that can be refused is refused when it is made."""

    def __init__(
        self, run: RunDirectory, prompt: Prompt, model: Model | None, phase: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`model`: what was trained, if it can be had."""
        self._saved = run.read_config()
        index, layers = run.read_layers()
        self._checkpoint, _ = latest(run.checkpoints, index.run)
        refuse_members(self._checkpoint, run.path, "writing text")
        self._prompt = prompt
        talk = Talk.of(index, str(run.path))
        self._tokenizer = _tokenizer(prompt, self._saved, talk)
        self._tokens = _encoded(prompt, self._tokenizer, talk)
        phase("reading the model")
        self.plan = _plan(run, self._saved, (index, layers, self._checkpoint), self._needed, model, phase) or Window(
            run, talk
        )
        if isinstance(self.plan, Window):
            tell("no keys and values can be kept for this model: each token is computed from the whole text")
        if len(self._tokens) >= self.plan.most:
            raise UsageError(
                f"the prompt has {len(self._tokens)} tokens, and the model reads at most {self.plan.most} with what it "
                "writes: give a shorter one"
            )
        if self._needed > self.plan.most:
            tell(
                f"the model reads at most {self.plan.most} tokens: it writes {self.plan.most - len(self._tokens)} at most"
            )
        give_back_memory()

    @property
    def _needed(self) -> int:
        return len(self._tokens) + self._prompt.max_new_tokens

    def write(self, pool: NodePool, show: Callable[[str], None]) -> Generated:
        """`show` gets the text as it comes."""
        shown = _Shown(self._tokenizer, show)
        began = time.monotonic()
        with self.plan.started(self._training, pool) as reader:
            began = time.monotonic()
            times: list[float] = []
            for token in self._written(reader):
                times.append(time.monotonic())
                shown.add(token)
            shown.end()
            after = times[-1] - times[0]
            return Generated(
                text=None if self._tokenizer is None else shown.text, tokens=shown.tokens, prompt_tokens=len(self._tokens),
                stopped=self._stopped(shown.tokens), step=reader.step, nodes=pool.nodes,
                cached=isinstance(self.plan, Cached), prompt_s=times[0] - began,
                tokens_per_s=(len(times) - 1) / after if after > 0 else None, bytes_per_token=reader.bytes_per_token,
            )  # fmt: skip

    @property
    def _training(self) -> TrainingPart:
        return self._saved.config.training

    def _written(self, reader: Reader) -> Iterator[int]:
        choose, unread = Chooser(self._prompt.choice), self._tokens
        for _ in range(min(self._needed, reader.most) - len(self._tokens)):
            token = choose(reader.read(unread))
            yield token
            if self._ends(token):
                return
            unread = [token]

    def _ends(self, token: int) -> bool:
        return self._tokenizer is not None and token in self._tokenizer.ends

    def _stopped(self, tokens: Sequence[int]) -> Stopped:
        if self._ends(tokens[-1]):
            return "eos"
        return "max_new_tokens" if len(tokens) == self._prompt.max_new_tokens else "full"


class _Shown:
    """Text as it comes: a character whose bytes are in several tokens is shown when it is whole."""

    def __init__(self, tokenizer: Tokenizer | None, show: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._shown = 0
        self.tokens: list[int] = []

    @property
    def text(self) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(self.tokens)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if not self.text.endswith(_UNFINISHED):
            self.end()

    def end(self) -> None:
        if rest := self.text[self._shown :]:
            self._show(rest)
            self._shown += len(rest)


# -- before anything starts ---------------------------------------------------------------------------------------------


def _tokenizer(prompt: Prompt, saved: SavedConfig, talk: Talk) -> Tokenizer | None:
    numbers = not isinstance(prompt.text, str)
    given = prompt.tokenizer or saved.config.training.tokenizer  # the one it was trained with, unless told otherwise
    try:
        found = load_tokenizer(saved.config.model.name, given)
    except UsageError:
        if not numbers or prompt.tokenizer is not None:
            raise
        return None
    if found is None and talk.vocabulary == BYTES:
        found = Bytes()
    if found is None and not numbers:
        raise UsageError(
            f"the model {saved.config.model.name} has no tokeniser of its own and a vocabulary of {talk.vocabulary}, so it "
            "does not read bytes: give --tokenizer PATH, or token numbers from Python"
        )
    return found


def _encoded(prompt: Prompt, tokenizer: Tokenizer | None, talk: Talk) -> list[int]:
    if isinstance(prompt.text, str):
        assert tokenizer is not None
        tokens = tokenizer.encode(prompt.text, prompt.chat)
    else:
        tokens = [int(each) for each in prompt.text]
    if not tokens:
        raise UsageError("the prompt is empty: give at least one token to begin with")
    if wrong := [each for each in tokens if not 0 <= each < talk.vocabulary]:
        raise UsageError(
            f"the prompt has token {wrong[0]}, but the model's vocabulary has {talk.vocabulary}: its tokeniser is another one"
        )
    return tokens


def _plan(
    run: RunDirectory, saved: SavedConfig, known: tuple[LayerIndex, list[Layer], Checkpoint], needed: int,
    model: Model | None, phase: Callable[[str], None],
) -> Cached | None:  # fmt: skip
    """None: the model is none for which keys and values are known to be kept, or it cannot be had."""
    index, layers, checkpoint = known
    found = _gpt(saved, layers, needed)
    if found is None and model is not None:
        found = _of_transformers(run, layers, model, needed)
    if found is None:
        return None
    decoder, most = found
    if misfit(decoder, decoder.prefix, index, layers) is not None:
        return None
    try:
        cells = decoder_cells(decoder, phase)
    except UsageError:  # what it cannot be exported as, the run's own graphs are
        return None
    weights = DecoderWeights(checkpoint, index, layers, decoder.prefix, cells.others)
    return Cached(cells, weights, checkpoint.progress.step, most)


def _room(needed: int, most: int | None) -> int:
    rounded = -(-needed // ROOM) * ROOM
    return rounded if most is None else min(rounded, most)


def _gpt(saved: SavedConfig, layers: Sequence[Layer], needed: int) -> tuple[Decoder, int] | None:
    if saved.config.model.name != "gpt":
        return None
    shapes = {layer.full_name(each): each.shape for layer in layers for each in layer.tensors}
    heads = int(saved.config.model.settings.get("heads", GPT_HEADS))
    plain = {name.replace(".base_layer.", "."): shape for name, shape in shapes.items()}
    made = gpt_layers(plain, heads)
    if made is None:
        return None
    most = plain["embed.position"][0]
    decoder = GptDecoder(made, _room(needed, most))
    if saved.config.training.lora is not None:
        add_adapters(decoder, parse_lora(saved.config.training.lora))
    return decoder.eval(), most


def _of_transformers(
    run: RunDirectory, layers: Sequence[Layer], model: Model, needed: int
) -> tuple[Decoder, int] | None:
    own = module_of(model) if isinstance(model, nn.Module) else opened_model(model, 0, run.path).given
    if not isinstance(own, nn.Module) or not is_causal(own):
        return None
    prepare_as_trained(own, run, layers)
    own.eval()
    most = most_tokens(own)
    decoder = causal_decoder(own, _room(needed, most))
    return None if decoder is None else (decoder, most or decoder.length)
