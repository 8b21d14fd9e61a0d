"""What a LoRA run trains is what PEFT loads from its step folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from legato.recipes.parts import RunParts
from tests.helpers.runs import RECIPES, assert_same_tensors, legato, tensors, write_config

_, LORA = RECIPES
FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    # The model's head is tied to its embedding.
    "whole": {"lora_modules_to_save": ["embed_tokens", "norm"], "use_rslora": True},
    "whole beside nf4": {"lora_modules_to_save": ["embed_tokens"], "quantize_base": "nf4"},
    "whole in bf16": {"lora_modules_to_save": ["lm_head", "input_layernorm"], "dtype": "bf16"},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_live_model_has_the_logits_of_its_step_folder_in_peft(
    form: str, tmp_path: Path, tiny_model_dir: Path, built: list[RunParts]
) -> None:
    config = write_config(tmp_path, model=tiny_model_dir, recipe=LORA, **FORMS[form])
    assert legato("run", "--config", config) == 0
    (parts,) = built
    ids = torch.arange(3, 40)[None]
    dtype = torch.bfloat16 if "bf16" in form else torch.float32
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=dtype).eval()
    with torch.no_grad():
        live = parts.model.module.eval()(input_ids=ids).logits
        plain = base(input_ids=ids).logits
        folder = tmp_path / "out" / "step_3"
        if "nf4" in form:
            # PEFT's base isn't quantized: as close as the frozen weights are.
            loaded = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()
            found = loaded(input_ids=ids).logits
            assert (found - live).abs().max() < 0.2 * (live - plain).abs().max()
            embedding = loaded.get_input_embeddings().weight
            assert torch.equal(embedding, parts.model.module.get_input_embeddings().weight)
            return
        loaded = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).eval()
        assert torch.equal(loaded(input_ids=ids).logits, live)
    assert (live - plain).abs().max() > 1e-2


def test_modules_that_train_as_a_whole_resume_bit_for_bit_and_are_the_only_ones_stored(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    options = {"lora_modules_to_save": ["embed_tokens", "norm"], "dtype": "bf16"}
    config = write_config(tmp_path, model=tiny_model_dir, recipe=LORA, **options)
    assert legato("run", "--config", config) == 0
    here = tmp_path / "here"
    for stop in ("stop_after_step=1", "stop_after_step=2", "epochs=1"):
        assert legato("run", "--config", config, f"output_dir={here}", stop) == 0
    assert_same_tensors(here / "step_3", tmp_path / "out" / "step_3")

    written = tensors(here / "step_3")
    names = [key.split(":")[1] for key in written if "lora_" not in key]
    whole = "base_model.model.model"
    assert sorted(name for name in names if "/" not in name) == [
        "base_model.model.lm_head.weight",
        f"{whole}.embed_tokens.weight",
        f"{whole}.norm.weight",
    ]
    # The tied head is a second key of the file and nothing else: it has no master of its own.
    assert sorted(name for name in names if name.startswith("master/")) == [
        f"master/{whole}.embed_tokens.modules_to_save.default.weight",
        f"master/{whole}.norm.modules_to_save.default.weight",
    ]
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    key = next(k for k in written if k.endswith(":base_model.model.lm_head.weight"))
    assert torch.equal(written[key], written[key.replace("lm_head", "model.embed_tokens")])
    assert not torch.equal(written[key], base.lm_head.weight)


def test_a_vocabulary_that_was_enlarged_in_the_base_trains_and_merges(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Legato adds no tokens itself: the base's folder has them, and their rows train."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_tokens(["Kyoto", "mugs"])
    before = len(tokenizer) + 20  # larger than the tokenizer, as many models are
    model.resize_token_embeddings(before, mean_resizing=False)
    model.save_pretrained(tmp_path / "larger")
    tokenizer.save_pretrained(tmp_path / "larger")
    options = {"lora_modules_to_save": ["embed_tokens", "lm_head"]}
    config = write_config(tmp_path, model=tmp_path / "larger", recipe=LORA, **options)
    assert legato("run", "--config", config) == 0
    step = tmp_path / "out" / "step_3"
    rows = tensors(step)["adapter_m:base_model.model.model.embed_tokens.weight"]
    assert rows.shape[0] == before
    new = tokenizer.convert_tokens_to_ids(["Kyoto", "mugs"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "larger")
    assert not torch.isclose(rows[new], base.get_input_embeddings().weight[new]).all(-1).any()
    assert legato("merge", step, "--output-dir", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.get_input_embeddings().weight, rows)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
