"""Language models that read one token after another: what was read before stays in them, as keys and values.

A decoder is an ordinary module whose keys and values are buffers that a forward pass changes in place. So it is exported and
cut like any model, and every node of a ring holds the keys and values of its own layers. It reads one text; the first
dimension of its inputs counts tokens, as many at a time as there are, and it answers with the scores of what comes next.

    forward(tokens, positions)    (time,), (time,) whole numbers -> (1, vocabulary)
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringtmp.model.zoo import Block, Embed, Vocabulary

#: Tokens a decoder is tried with against the model that reads them at once, and how far their scores may lie apart.
TRIED = 6
CLOSE = 1e-3


class Decoder(nn.Module):
    """`prefix`: what its tensors' names have before the names in the model's `state_dict`."""

    prefix = ""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def seen(self, positions: torch.Tensor) -> torch.Tensor:
        """(time, length): what a token may look at, itself and all before it."""
        return torch.arange(self.length) <= positions.unsqueeze(1)


class Store(nn.Module):
    """Keys and values of one layer: (1, heads, length, size)."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, heads: int, length: int, sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in zip(("keys", "values"), sizes, strict=True):
            self.register_buffer(name, torch.zeros(1, heads, length, size, dtype=dtype), persistent=False)

    def put(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All there are, with those of the tokens at these places; each (1, heads, time, size)."""
        self.keys[:, :, positions] = keys
        self.values[:, :, positions] = values
        return self.keys, self.values


# -- gpt of the zoo -----------------------------------------------------------------------------------------------------


class GptDecoder(Decoder):
    """The zoo's gpt, under the names its layers have."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], length: int) -> None:
        super().__init__(length)
        for name, module in layers:
            self.add_module(name, module)
        self._embed, *self._blocks, self._head = (name for name, _ in layers)
        blocks = [each for _, each in layers if isinstance(each, Block)]
        sizes = [each.merge.in_features // each.heads for each in blocks]
        self.stores = nn.ModuleList(
            Store(each.heads, length, (size, size)) for each, size in zip(blocks, sizes, strict=True)
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embed: Any = self.get_submodule(self._embed)
        x = embed.token(tokens) + embed.position[positions]
        for name, store in zip(self._blocks, self.stores, strict=True):
            x = _block(self.get_submodule(name), x, store, positions, self.seen(positions))
        scores: torch.Tensor = self.get_submodule(self._head)(x[-1:])
        return scores


def _block(block: Any, x: torch.Tensor, store: Any, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    time, width = x.shape
    heads: int = block.heads
    qkv = block.qkv(block.norm1(x)).view(time, 3, heads, width // heads).permute(1, 2, 0, 3)
    keys, values = store.put(qkv[1].unsqueeze(0), qkv[2].unsqueeze(0), positions)
    mixed = F.scaled_dot_product_attention(qkv[0].unsqueeze(0), keys, values, attn_mask=seen)
    x = x + block.merge(mixed.squeeze(0).transpose(0, 1).reshape(time, width))
    y: torch.Tensor = x + block.down(F.gelu(block.up(block.norm2(x))))
    return y


def gpt_layers(shapes: Mapping[str, tuple[int, ...]], heads: int) -> list[tuple[str, nn.Module]] | None:
    """The layers of a gpt of the zoo with tensors of these names and shapes; None where it is none."""
    try:
        vocabulary, width = shapes["embed.token.weight"]
        context, _ = shapes["embed.position"]
    except (KeyError, ValueError):
        return None
    blocks = {int(found[1]) for name in shapes if (found := re.match(r"block(\d+)\.norm1\.weight", name))}
    layers: list[tuple[str, nn.Module]] = [("embed", Embed(vocabulary, context, width, 0.0))]
    layers += [(f"block{index}", Block(width, heads, 0.0)) for index in range(len(blocks))]
    return [*layers, ("head", Vocabulary(width, vocabulary))]


# -- models of transformers ---------------------------------------------------------------------------------------------


class _Asking:
    """Stands for keys and values of transformers: notes the sizes of each layer's."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, tuple[int, int], torch.dtype]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        self.sizes[layer] = keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _Stores:
    """The same for the stores of a decoder, in one forward pass."""

    def __init__(self, stores: Sequence[Any], positions: torch.Tensor) -> None:
        self._stores, self._positions = stores, positions

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Any:
        return self._stores[layer].put(keys, values, self._positions)

    def get_seq_length(self, *_: Any) -> int:
        return 0


class CausalDecoder(Decoder):
    """A language model of transformers, as its own `generate` calls it."""

    prefix = "model."

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__(length)
        self.model = model.eval()
        own: Any = base_of(model)
        self._takes = frozenset(inspect.signature(own.forward).parameters)
        self._adds_mask = own.config._attn_implementation == "eager"
        asking, first = _Asking(), torch.zeros(1, dtype=torch.int64)
        with torch.no_grad():
            self._scores(first, first, asking, torch.ones(1, 1, dtype=torch.bool))
        self.stores = nn.ModuleList(
            Store(heads, length, sizes, dtype) for _, (heads, sizes, dtype) in sorted(asking.sizes.items())
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._scores(tokens, positions, _Stores(list(self.stores), positions), self.seen(positions))

    def _scores(self, tokens: torch.Tensor, positions: torch.Tensor, past: Any, seen: torch.Tensor) -> torch.Tensor:
        mask = seen[None, None]
        if self._adds_mask:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        given = {"position_ids": positions.unsqueeze(0), "attention_mask": mask, "past_key_values": past,
                 "use_cache": True, "logits_to_keep": 1, "cache_position": positions}  # fmt: skip
        given = {name: each for name, each in given.items() if name in self._takes}
        scores: torch.Tensor = self.model(input_ids=tokens.unsqueeze(0), **given).logits
        return scores[0, -1:]


def base_of(model: Any) -> Any:
    """The model of transformers inside one of PEFT, or itself."""
    return model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model


def is_causal(model: Any) -> bool:
    """Whether it is a language model of transformers that writes on from what it has read."""
    own = base_of(model)
    config = getattr(own, "config", None)
    asks = callable(getattr(own, "can_generate", None)) and hasattr(config, "_attn_implementation")
    return asks and bool(own.can_generate()) and not getattr(config, "is_encoder_decoder", False)


def text_config(model: Any) -> Any:
    """Of a model that takes more than text, the part that is about it."""
    config: Any = base_of(model).config
    return config.get_text_config(decoder=True) if callable(getattr(config, "get_text_config", None)) else config


def most_tokens(model: Any) -> int | None:
    """The longest text that a model of transformers is made for; None: it does not say."""
    config = text_config(model)
    found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return found if isinstance(found, int) and found > 0 else None


def causal_decoder(model: Any, length: int) -> CausalDecoder | None:
    """None for a model whose keys and values cannot be kept so: with it each token is computed from all before it."""
    config = text_config(model)
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if any(window and window < length for window in windows):  # its layers look at the last tokens alone
        return None
    with contextlib.suppress(Exception):  # somebody else's code, which may be of any shape
        decoder = CausalDecoder(model, length)
        if decoder.stores and reads_alike(decoder, model):
            return decoder
    return None


def reads_alike(decoder: Decoder, model: Any) -> bool:
    """Whether token after token it gives what the model gives that reads all at once."""
    count = min(TRIED, decoder.length)
    tokens = torch.arange(count) % max(2, _vocabulary(model))
    with torch.no_grad():
        whole = model(input_ids=tokens.unsqueeze(0)).logits[0]
        parts = [tokens[: count // 2], *torch.split(tokens[count // 2 :], 1)]
        read = 0
        for part in parts:
            found = decoder(part, torch.arange(read, read + len(part)))
            read += len(part)
            if float((found[-1] - whole[read - 1]).abs().max()) > CLOSE * (1 + float(whole.abs().max())):
                return False
    for store in decoder.stores.children():  # type: ignore[union-attr]
        for buffer in store.buffers():
            buffer.zero_()
    return True


def _vocabulary(model: Any) -> int:
    found = base_of(model).get_input_embeddings().weight.shape[0]
    return int(found)
