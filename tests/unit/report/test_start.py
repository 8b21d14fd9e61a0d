"""The start block: literal text for literal facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legato.report.start import StartFacts, human_bytes, human_count, human_seconds, start_block

FULL = StartFacts(
    config_name="135M_full_single_device",
    recipe="full_finetune_single_device",
    model="models/smollm2",
    num_parameters=134_515_008,
    num_trainable_parameters=134_515_008,
    dtype="bf16",
    master_weights="fp32",
    device="cpu",
    device_detail="2 threads",
    num_samples=960,
    num_tokens=58_000,
    num_trained_tokens=29_000,
    epochs=1,
    steps_per_epoch=60,
    total_steps=24,
    global_batch_size=16,
    batch_size=16,
    gradient_accumulation_steps=1,
    save_when="every 8 steps",
    checkpoint_bytes=1_880_000_000,
    output_dir="out/demo",
    free_bytes=78_000_000_000,
)


def test_the_block_of_a_fresh_full_run_reads_like_this() -> None:
    assert start_block(FULL) == (
        "run           135M_full_single_device (full_finetune_single_device)\n"
        "model         models/smollm2\n"
        "parameters    135M, all trained\n"
        "precision     bf16, fp32 master weights\n"
        "device        cpu (2 threads)\n"
        "data          960 samples, 58.0k tokens, 50 % of them trained\n"
        "batch         16 sequences a step (16 a micro-batch)\n"
        "length        24 steps (60 an epoch, 1 epoch asked for)\n"
        "checkpoints   1.88 GB each, every 8 steps, and at the end\n"
        "output        out/demo (78.0 GB free)\n"
        "starts from   the model as it is, step 1"
    )


def test_a_quantized_base_is_told_with_what_it_saves_and_what_isnt_shared() -> None:
    facts = replace(
        FULL,
        quantize_base="nf4",
        num_quantized_weights=210,
        quantized_bytes=54_800_000,
        unquantized_bytes=212_000_000,
    )
    line = "base          nf4: 210 weights in 54.8 MB, 157 MB less than in bf16"
    assert start_block(facts).splitlines()[4] == line
    facts = replace(facts, num_whole_weights=30, world_size=5)
    line += "; 30 can't be cut evenly, each rank has them whole"
    assert start_block(facts).splitlines()[4] == line
    assert len(start_block(facts).splitlines()) < 15


def test_the_block_of_a_resumed_lora_run_on_four_gpus_reads_like_this() -> None:
    facts = replace(
        FULL,
        num_trainable_parameters=4_884_480,
        least_bytes_read=67_300_000,
        most_bytes_read=67_400_000,
        master_weights="none",
        device="cuda",
        device_detail="H200",
        world_size=4,
        epochs=None,
        global_batch_size=64,
        batch_size=8,
        gradient_accumulation_steps=2,
        save_when="",
        free_bytes=None,
        resumes_from="out/demo/step_8",
        resume_step=8,
    )
    lines = start_block(facts).splitlines()
    assert len(lines) < 15
    assert lines[2:] == [
        "parameters    135M, 4.88M of them trained (3.6 %); each rank read its part, "
        "67.3 MB to 67.4 MB",
        "precision     bf16, no master weights",
        "device        4 x cuda (H200)",
        "data          960 samples, 58.0k tokens, 50 % of them trained",
        "batch         64 sequences a step (8 a micro-batch x 2 micro-batches x 4 processes)",
        "length        24 steps (60 an epoch, data repeated)",
        "checkpoints   1.88 GB each, at the end",
        "output        out/demo",
        "starts from   step_8 in out/demo, goes on at step 9",
    ]


def test_the_block_of_a_stream_says_what_nobody_knows_yet() -> None:
    facts = replace(
        FULL,
        num_samples=None,
        num_tokens=None,
        num_trained_tokens=None,
        epochs=None,
        steps_per_epoch=None,
    )
    lines = start_block(facts).splitlines()
    assert lines[5] == "data          read while training"
    assert lines[7] == "length        24 steps (the data is repeated where it ends before)"


def test_a_global_batch_that_does_not_come_out_even_says_so() -> None:
    facts = replace(
        FULL, world_size=3, global_batch_size=16, batch_size=2, gradient_accumulation_steps=3
    )
    dealt = "dealt to 3 processes in micro-batches of at most 2"
    assert f"batch         16 sequences a step, {dealt}\n" in start_block(facts)


def test_one_of_a_kind_is_no_plural() -> None:
    facts = replace(
        FULL, num_samples=1, num_packed_rows=1, packing_efficiency=0.5, total_steps=1,
        batch_size=1, global_batch_size=1, steps_per_epoch=1, epochs=1,
    )  # fmt: skip
    lines = start_block(facts).splitlines()
    assert lines[5].startswith("data          1 sample in 1 row (50 % full), ")
    assert lines[6] == "batch         1 sequence a step (1 a micro-batch)"
    assert lines[7] == "length        1 step (1 an epoch, 1 epoch asked for)"


def test_an_fp32_run_has_no_masters_to_speak_of() -> None:
    assert "precision     fp32\n" in start_block(replace(FULL, dtype="fp32"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (84_000_000, "84.0 MB"),
        (999_600_000, "1.00 GB"),
        (1_614_000_000, "1.61 GB"),
        (140_000_000_000_000, "140 TB"),
    ],
)
def test_bytes_have_three_figures(value: int, text: str) -> None:
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(960, "960"), (4_884_480, "4.88M"), (134_515_008, "135M"), (7_000_000_000, "7.00B")],
)
def test_counts_have_three_figures(value: int, text: str) -> None:
    assert human_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.104, "0.10 s"),
        (12.4, "12 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7_530, "2 h 05 min"),
    ],
)
def test_seconds_are_said_as_a_person_would(value: float, text: str) -> None:
    assert human_seconds(value) == text
