"""What the command line calls an option, Python calls a keyword; errors say it as the caller would write it."""

from __future__ import annotations

import pytest

from ringtmp.config import SETTINGS
from ringtmp.config.options_to_keywords import as_keywords


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("use --nodes 3 or fewer, or a deeper model", "use nodes=3 or fewer, or a deeper model"),
        ("--batch-size 0 must be at least 1", "batch_size=0 must be at least 1"),
        ("--notice 0.5 must be from 1 to 3600", "notice_s=0.5 must be from 1 to 3600"),
        ("use fewer --laps or --nodes, or a deeper model", "use fewer laps= or nodes=, or a deeper model"),
        ("--blocks 'h.*' fits no module", "blocks='h.*' fits no module"),
        ("--adapter missing: no such file", "adapter='missing': no such file"),
        ("give one with --tokenizer PATH, a directory", "give one with tokenizer=PATH, a directory"),
        ("--blocks is empty: give names", "blocks= is empty: give names"),
        ("give --epochs or --steps, not both", "give epochs= or steps=, not both"),
        ("leave it out, or use --schedule 1f1b", "leave it out, or use schedule='1f1b'"),
        ("--microbatches auto works with --strategy ring only", "microbatches='auto' works with strategy='ring' only"),
        ("--route v cannot be combined with --laps", "route='v' cannot be combined with laps="),
        ("Use --all-devices to keep them all", "Use all_devices=True to keep them all"),
        ("or --no-rebalance.", "or rebalance=False."),
        ("--weights /a/b.pt is a pickle", "weights='/a/b.pt' is a pickle"),
        ("--lora on=q_proj fits no module: there", "lora='on=q_proj' fits no module: there"),
        ("--leave-out attention_mask: not all", "leave_out='attention_mask': not all"),
        ("write --strategy ps --with servers=2", "write strategy='ps' settings={'servers': 2}"),
        ("choose some with --train", "choose some with train="),
        ("try a smaller --lr, --clip-norm or a --lr-schedule with warm-up",
         "try a smaller lr, clip_norm= or a lr_schedule= with warm-up"),
        ("use --data text:PATH or pysource", "use train_data='text:PATH' or pysource"),
        ("another --run-dir, or resume it with --resume runs/a", "another run_dir=, or resume it with resume('runs/a')"),
        ("--resume cannot change lr of --opt (it is 0.1)", "resume cannot change lr of optimizer= (it is 0.1)"),
        ("keep.detailed_steps -1 must be at least 0", "detailed_steps= -1 must be at least 0"),
        ("ring.nodes must be a whole number, not text", "nodes= must be a whole number, not text"),
    ],
)  # fmt: skip
def test_an_option_becomes_the_keyword(said: str, told: str) -> None:
    assert as_keywords(said) == told


@pytest.mark.parametrize(
    "said",
    [
        "resume with ringtmp train --resume runs/a",
        "the master makes one with ringtmp train --listen",
        "ringtmp node --join TOKEN --threads 3",
        "--start-with 3 and --frobnicate 4 have no word in Python",
        "a file called my--nodes.toml, model.layers.0 and training of layers",
        "--set depth=3 is for models of the zoo",
    ],
)
def test_nothing_else_is_changed(said: str) -> None:
    assert as_keywords(said) == said


def test_every_option_that_a_call_takes_has_its_keyword() -> None:
    for setting in SETTINGS.values():
        if setting.option and setting.keyword_of:
            assert as_keywords(f"try {setting.option}.").startswith(f"try {setting.keyword}=")
