"""TRL's SFTTrainer, with the callback that a Trainer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed

from tests.helpers import tiny
from tests.integrations.trainers import every_step, only_step, tensors_of

trl = pytest.importorskip("trl")

ROWS = [{"prompt": f"Say {i} twice: ", "completion": f"{i} {i}"} for i in range(20)]


def train(output_dir: Path, peft_config: LoraConfig | None, **options: Any) -> Any:
    set_seed(3)
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_config(tiny.build_config(attention_dropout=0.1)),
        args=trl.SFTConfig(
            str(output_dir),
            save_strategy="no",
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=7,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tiny.build_tokenizer(),
        peft_config=peft_config,
        callbacks=[every_step()],
    )
    trainer.train(**options)
    return trainer


@pytest.mark.filterwarnings("ignore")  # TRL's own, which change from version to version
@pytest.mark.parametrize(
    "peft_config", [None, LoraConfig(r=2, lora_dropout=0.1)], ids=["whole", "adapter"]
)
def test_trls_trainer_resumes_in_the_middle_of_an_epoch_with_the_same_bits(
    tmp_path: Path, peft_config: LoraConfig | None
) -> None:
    train(tmp_path / "whole", peft_config)
    expected = tensors_of(tmp_path / "whole" / "step_6")
    # 20 rows, 4 a step: 5 steps an epoch.
    step = only_step(tmp_path / "whole", 3, tmp_path / "out")
    assert (step / "adapter_config.json").exists() == (peft_config is not None)
    train(tmp_path / "out", peft_config, resume_from_checkpoint=str(step))
    assert tensors_of(tmp_path / "out" / "step_6") == expected
    assert tensors_of(tmp_path / "out" / "step_3") != expected
