"""Every setting of a run, declared once: type, default, range, help, whether it changes the bits, who may change it later.

The command line, the environment, settings files, the keywords of `Ring` and `fit`, the error texts and the tables in
docs/ are made from these declarations. The order of the fields is the order in `--help`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ringtmp.config.parse_text import parse_schedule
from ringtmp.config.setting_declaration import Declaration as Is
from ringtmp.model.compute_formats import COMPUTE_IN, PLAIN_COMPUTE
from ringtmp.model.frozen_formats import FROZEN_AS, WHOLE
from ringtmp.plan.node_groups import EXACT_SUMS
from ringtmp.plan.objective import TIME, Objective
from ringtmp.plan.pipeline_schedules import AUTO, ScheduleChoice
from ringtmp.wire.formats import WIRE_FORMATS

DEFAULT_MICROBATCHES = 8
DEFAULT_EPOCHS = 10

Protect = Literal["auto", "memory", "disk", "checkpoint", "off"]
StreamKeep = Literal["memory", "disk", "none"]
Shape = Literal["ring", "v"]
ComputeDevice = Literal["cpu", "cuda", "mps", "auto"]
HomeAlone = Literal["wait", "go-on"]
Recompute = Literal["none", "all", "auto"]
BadLines = Literal["refuse", "skip"]

# Headings in --help.
DATA, TRAINING, NODES, SAFETY = "Model and data", "Training", "Nodes", "Safety"
PIPELINE = "How the ring runs (most people leave these to the plan)"
HOMES = "Two homes (with --home-listen or --home-join)"
GROUPS = (DATA, TRAINING, NODES, PIPELINE, SAFETY, HOMES)
_PLAN = "chosen by the plan"


# fmt: off
class ModelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Is(
        "Model to train: mlp, convnet, resnet, gpt, FILE.py:factory, package.module:factory, or hf:PATH of transformers.",
        DATA, option="model",
        bits=True)] = "mlp"
    settings: Annotated[dict[str, int | float], Is(
        "Settings of the model, such as depth=8.", DATA, option="set", variable="set_",
        bits=True)] = {}


class TrainingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything here decides the bits."""

    data: Annotated[str, Is(
        "Data to train on: digits, random:784x10, idx:DIR, npz:FILE, text:PATH, jsonl:PATH, pysource, parquet:PATH, "
        "arrow:PATH, tar:PATH, - for standard input, or FILE.py:factory.",
        DATA, bits=True, own=True)] = "digits"
    columns: Annotated[str | None, Is(
        "Columns of Parquet or Arrow files: the inputs, and last the target.", DATA, metavar="NAME,…", usual="inputs,targets",
        bits=True)] = None
    bad_lines: Annotated[BadLines, Is(
        "What to do with a line of standard input that is no sample: {choices}.", DATA, bits=True,
        resume=True)] = "refuse"
    tokenizer: Annotated[str | None, Is(
        "Tokeniser that reads text: a directory with a tokenizer.json, or a .gguf file.", DATA, metavar="PATH",
        usual="the one beside --model hf:PATH", bits=True)] = None
    context: Annotated[int | None, Is(
        "Tokens in a sample of text; without a tokeniser, bytes.", DATA, least=2, metavar="N",
        usual="128, or what the model takes if less", bits=True)] = None
    attention_mask: Annotated[bool, Is(
        "Give the model a mask where samples of text are padded.", DATA, bits=True)] = False
    leave_out: Annotated[str | None, Is(
        "Inputs to leave out because all their values are ones, such as attention_mask; several with commas.", DATA,
        metavar="NAME,…", bits=True)] = None
    loss: Annotated[str, Is(
        "Loss function: cross_entropy, mse, next_byte, or model for the loss the model returns.", DATA,
        usual="the one that fits the data", bits=True, own=True)] = ""
    weights: Annotated[str | None, Is(
        "First weights: a safetensors file, or a folder of them with an index.", DATA, metavar="FILE",
        usual="as the model is built", bits=True)] = None
    train: Annotated[str | None, Is(
        "Train only parameters with these names, such as 'head|*.bias'; the others are frozen.", DATA,
        metavar="NAME|…", usual="all that the model trains", bits=True)] = None
    lora: Annotated[str | None, Is(
        "Train low-rank adapters on these linear layers and freeze the rest: r=8,alpha=16,on=q_proj,v_proj.", DATA,
        metavar="r=8,on=…", bits=True)] = None
    adapter: Annotated[str | None, Is(
        "Train an adapter further: a folder as PEFT and ringtmp export write it; instead of --lora.", DATA,
        metavar="FOLDER", bits=True)] = None
    frozen_as: Annotated[str, Is(
        "How frozen weights are kept, to become float32 where they are used: {choices}.", DATA, choices=FROZEN_AS,
        bits=True)] = WHOLE.name
    epochs: Annotated[int | None, Is(
        "Passes over the training data.", TRAINING, least=1, usual=str(DEFAULT_EPOCHS), bits=True, resume=True)] = None
    steps: Annotated[int | None, Is(
        "Number of updates, instead of epochs.", TRAINING, least=1, bits=True, resume=True)] = None
    batch_size: Annotated[int, Is("Samples per update, over all nodes.", TRAINING, least=1, bits=True)] = 32
    microbatches: Annotated[int | Literal["auto"] | None, Is(
        "Slices each batch is cut into; auto picks what the plan finds fastest.", TRAINING, least=1, metavar="N|auto",
        usual=f"{DEFAULT_MICROBATCHES}, or the batch size if smaller", bits=True)] = None
    optimizer: Annotated[str, Is(
        "Optimizer: sgd, adam, adamw, nadam, muon, lion or adagrad.", TRAINING, bits=True, own=True)] = "adam"
    optimizer_settings: Annotated[dict[str, Any], Is(
        "Settings of the optimizer, such as momentum=0.9.", TRAINING, option="opt", bits=True,
        own=True)] = {}
    lr_schedule: Annotated[dict[str, Any], Is(
        "Learning-rate schedule: constant, step:every=N,factor=F or cosine:warmup=N,floor=F.", TRAINING,
        parse=parse_schedule, usual="constant", bits=True, own=True)] = {}
    clip_norm: Annotated[float | None, Is(
        "Clip gradients to this global norm.", TRAINING, above=0, usual="no clipping", bits=True)] = None
    seed: Annotated[int, Is(
        "Random seed for weights, batches and dropout.", TRAINING, least=1 - 2**62, most=2**62 - 1, bits=True)] = 0
    threads: Annotated[int | None, Is(
        "Threads per node, the same on every node.", NODES, least=1, keyword_of="Ring", bits=True,
        usual="1; with --listen the smallest core count among the devices")] = None
    compute: Annotated[str, Is(
        "What is computed in: {choices} (as torch's autocast has it; weights and updates stay float32).", TRAINING,
        choices=COMPUTE_IN, bits=True)] = PLAIN_COMPUTE.name
    compile: Annotated[bool, Is(
        "Train with layers that torch.compile has made faster; the first step takes longer.", TRAINING, bits=True)] = False
    deterministic: Annotated[bool, Is(
        "Use only kernels that give the same bits every time; some of a GPU's are much slower.", TRAINING, bits=True)] = True
    wire: Annotated[str, Is(
        "How numbers travel between nodes: {choices}.", PIPELINE, choices=WIRE_FORMATS, bits=True)] = "float32"
    staleness: Annotated[int, Is(
        "With 1, gradients are taken at the weights one update ago, so that steps overlap.", TRAINING, least=0, most=1,
        split=True, bits=True)] = 0
    sum_tree: Annotated[int, Is(
        "Parts of a batch whose gradients are added up as a tree, so that up to so many workers keep the bits; a power of two.",
        TRAINING, least=1, metavar="PARTS", bits=True)] = 1
    early_stop: Annotated[int | None, Is(
        "Stop after this many epochs without a lower test loss.", TRAINING, least=1, metavar="EPOCHS",
        bits=True)] = None

    @property
    def numeric_mode(self) -> str:
        """What is computed with; bits repeat within one mode."""
        frozen = FROZEN_AS[self.frozen_as].aside
        kernels = "" if self.deterministic else "kernels that may not repeat"
        said = (COMPUTE_IN[self.compute].mode, "compiled layers" if self.compile else "", frozen, kernels)
        return ", ".join(filter(None, said))


class RingPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who works, and how. With the ring nothing here changes the bits but the strategy."""

    nodes: Annotated[int, Is("Number of nodes, the master included.", NODES, least=1)] = 3
    strategy: Annotated[str, Is(
        "Way to train; ringtmp strategies lists them. auto picks the fastest that fits and keeps bits and data at home.", NODES,
        bits=True)] = "ring"
    strategy_settings: Annotated[dict[str, Any], Is(
        "Settings of the strategy; ringtmp strategies lists them.", NODES, option="with", variable="with_",
        keyword="settings", bits=True)] = {}
    share_data: Annotated[bool, Is(
        "With strategy auto: allow ways in which inputs and labels leave the master.", NODES, bits=True)] = False
    any_bits: Annotated[bool, Is(
        "With strategy auto: allow ways with delayed gradients, which give other weights.", NODES, bits=True)] = False
    all_devices: Annotated[bool, Is("Use every device, even one that slows the ring down.", NODES)] = False
    device: Annotated[ComputeDevice, Is(
        "Where the nodes of this machine compute: {choices}. Devices that join say so themselves.", NODES, split=True,
        bits=True, resume=True)] = "cpu"
    cuts: Annotated[str | None, Is(
        "Layers of each visit, such as 0-2,3-5,6-7; '-' for a last visit with the loss alone.", PIPELINE,
        split=True, usual=_PLAN)] = None
    blocks: Annotated[str | None, Is(
        "Cut a module only between its parts with these names, such as model.layers.*; several with commas.", PIPELINE,
        split=True, resume=False, metavar="PATTERN,…", usual="wherever little crosses")] = None
    groups: Annotated[str | None, Is(
        "Nodes per stage between the master's front and tail, such as 2,2; each stage's share a step's microbatches. With auto "
        "the plan chooses.", PIPELINE, split=True, metavar="N,…|auto", usual="one each")] = None
    share_optimizer: Annotated[bool, Is(
        "With groups: each member keeps the optimizer state of some of its stage's parameters and updates those for all.",
        PIPELINE, split=True)] = False
    group_sums: Annotated[str, Is(
        "How members of a group agree: exact, or async:STEPS, where each applies its own sums at once and what comes of the "
        "others at most so many steps late.", PIPELINE, split=True, metavar="exact|async:STEPS", bits=True)] = EXACT_SUMS
    minimise: Annotated[Objective, Is(
        "What the plan makes as small as possible: {choices}.", PIPELINE, option="for", variable="minimise",
        split=True)] = TIME
    window: Annotated[int | None, Is(
        "Microbatches in flight at most.", PIPELINE, split=True, least=1, usual=_PLAN)] = None
    schedule: Annotated[ScheduleChoice, Is(
        "Order of work in a step: {choices}; auto is what the plan finds fastest.", PIPELINE, split=True)] = AUTO
    laps: Annotated[int, Is(
        "Times the activations go round; every node holds that many segments.", PIPELINE, split=True, least=1)] = 1
    route: Annotated[Shape, Is(
        "Path of the activations: ring, or v (out to the last node and back, two segments per node).",
        PIPELINE, split=True)] = "ring"
    recompute: Annotated[Recompute, Is(
        "Which activations to compute again instead of storing them: {choices}.", PIPELINE, split=True)] = "none"
    rebalance: Annotated[bool, Is("Move layers when devices turn out slower or faster than planned.", NODES)] = True
    local_steps: Annotated[int | None, Is(
        "Steps that each home makes by itself between two exchanges; DiLoCo: 500.", HOMES, least=1, most=10**9, split=True,
        bits=True, metavar="STEPS", usual="none: there is one home")] = None
    outer_lr: Annotated[float, Is(
        "Learning rate of the outer step; 1 without momentum is the mean of both.", HOMES, above=0, split=True,
        bits=True)] = 0.7
    outer_momentum: Annotated[float, Is(
        "Nesterov momentum of the outer step.", HOMES, least=0, most=0.999, split=True, bits=True)] = 0.9
    home_alone: Annotated[HomeAlone, Is(
        "What a home does when the other is gone for longer than --home-wait: {choices}.", HOMES, split=True, bits=True,
        resume=True)] = "wait"
    home_wait_s: Annotated[float, Is(
        "Seconds that the other home may be away.", HOMES, least=1, most=604800, option="home-wait",
        variable="home_wait_s", metavar="S", split=True)] = 600.0


class KeepPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept in case something goes wrong. Nothing here changes the bits."""

    checkpoint_every: Annotated[int | None, Is(
        "Steps between checkpoints.", SAFETY, least=1, metavar="STEPS",
        usual="at the end of an epoch, at most every 30 s")] = None
    detailed_steps: Annotated[int, Is("First steps of a run, in which every span is recorded.", least=0)] = 32
    protect: Annotated[Protect, Is(
        "Where the layers of a node are kept in case it is lost: {choices}.", SAFETY)] = "auto"
    notice_s: Annotated[float, Is(  # signs of life come about twice a second
        "Seconds of silence after which a node counts as lost.", SAFETY, least=1, most=3600, option="notice",
        variable="notice_s", metavar="S")] = 3.0
    stream_keep: Annotated[StreamKeep, Is(
        "Where batches of a stream are kept until the next checkpoint: {choices}.", SAFETY)] = "memory"
    test_then_train: Annotated[bool, Is(
        "Predict every batch before it is learned, for the error over time.", TRAINING)] = False
# fmt: on


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelPart = ModelPart()
    training: TrainingPart = TrainingPart()
    ring: RingPart = RingPart()
    keep: KeepPart = KeepPart()
