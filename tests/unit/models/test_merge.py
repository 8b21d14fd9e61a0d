from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from legato.errors import ModelError
from legato.models import merge as merge_module
from legato.models.merge import merge_adapter
from tests.helpers import tiny
from tests.helpers.adapters import FORMS, write_adapter
from tests.helpers.faults import no_file_larger_than


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "base", dtype=torch.bfloat16)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensor(folder: Path, key: str) -> torch.Tensor:
    return load_file(folder / "adapter_model.safetensors")[f"base_model.model.{key}"].double()


def by_hand(form: str, weight: torch.Tensor, adapter: Path, layer: str) -> torch.Tensor:
    """W + s B A, and DoRA's m (W + s B A) / ||W + s B A||, in double precision."""
    scale = 8 / 4**0.5 if form == "rslora" else 8 / 4
    low_rank = tensor(adapter, f"{layer}.lora_B.weight") @ tensor(adapter, f"{layer}.lora_A.weight")
    merged = weight.double() + scale * low_rank
    if form == "dora":
        magnitude = tensor(adapter, f"{layer}.lora_magnitude_vector")
        merged = magnitude[:, None] * merged / merged.norm(dim=1, keepdim=True)
    return merged


@pytest.mark.parametrize("form", ["lora", "rslora", "dora"])
def test_each_weight_is_the_formula_rounded_once_and_the_rest_is_the_bases(
    form: str, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", **FORMS[form])
    merge_adapter(adapter, output_dir=tmp_path / "merged")
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    assert after.keys() == before.keys()
    adapted = 0
    for key, value in after.items():
        assert value.dtype == torch.bfloat16
        if not key.endswith("_proj.weight"):
            assert torch.equal(value, before[key]), key
            continue
        expected = by_hand(form, before[key], adapter, key.removesuffix(".weight"))
        # Half a bf16 step, and a little for the fp32 sums before it.
        assert ((value.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all(), key
        assert not torch.equal(value, before[key])
        adapted += 1
    assert adapted == 2 * 7


@pytest.mark.parametrize(("form", "is_tied"), [*((form, True) for form in FORMS), ("head", False)])
def test_transformers_loads_the_folder_with_the_logits_that_peft_gives_the_adapter(
    form: str, is_tied: bool, tmp_path: Path
) -> None:
    options = {"dtype": torch.bfloat16, "tie_word_embeddings": is_tied}
    base = tiny.write_model(tmp_path / "base", **options)
    adapter = write_adapter(base, tmp_path / "adapter", **FORMS[form])
    told = merge_adapter(adapter, output_dir=tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 200, 17]])
    reference: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = reference(input_ids=ids).logits
    reference = PeftModel.from_pretrained(reference, adapter).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.dtype == torch.float32
    assert model.config.use_cache
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    torch.testing.assert_close(
        model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(plain, model(input_ids=ids).logits, atol=1e-2)
    assert told.adapter_effect > 100 * told.rounding_error


def test_neither_the_base_nor_the_adapter_is_touched(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    before = contents(base), contents(adapter)
    merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert (contents(base), contents(adapter)) == before


def test_the_tokenizer_that_trained_comes_along_else_the_bases(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    merge_adapter(adapter, output_dir=tmp_path / "one")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer.chat_template == tiny.CHATML
    tiny.build_tokenizer("{# another #}").save_pretrained(adapter)
    merge_adapter(adapter, output_dir=tmp_path / "two")
    assert AutoTokenizer.from_pretrained(tmp_path / "two").chat_template == "{# another #}"
    assert not [p.name for p in (tmp_path / "two").iterdir() if "adapter" in p.name]


def test_an_adapter_that_rounding_would_lose_is_told(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A command line that ran in this process before keeps the log to itself.
    monkeypatch.setattr(logging.getLogger("legato"), "propagate", True)
    adapter = write_adapter(base, tmp_path / "adapter", noise=2e-5)
    with caplog.at_level(logging.WARNING):
        merge_adapter(adapter, output_dir=tmp_path / "merged")
        assert "much of the adapter is lost in this dtype" in caplog.text
        caplog.clear()
        merge_adapter(adapter, output_dir=tmp_path / "fp32", dtype=torch.float32)
        assert caplog.text == ""


def test_a_dtype_that_cant_hold_a_merged_weight_is_refused(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = 1e5  # fp16 ends at 65504
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(base, tmp_path / "adapter")
    said = r"model\.norm\.weight has values that float16 can't hold\. Merge with bf16 or fp32"
    with pytest.raises(ModelError, match=said):
        merge_adapter(adapter, output_dir=tmp_path / "merged", dtype=torch.float16)
    assert not (tmp_path / "merged").exists()
    merge_adapter(adapter, output_dir=tmp_path / "merged")


def test_a_whole_model_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a whole model already, no adapter: there is nothing"):
        merge_adapter(base, output_dir=tmp_path / "merged")


def test_a_runs_folder_is_refused_with_its_newest_step(tmp_path: Path) -> None:
    (tmp_path / "run" / "step_20").mkdir(parents=True)
    (tmp_path / "run" / "step_3").mkdir()
    with pytest.raises(ModelError, match=r"has no adapter_config.json.*did you mean .*step_20\?"):
        merge_adapter(tmp_path / "run", output_dir=tmp_path / "merged")


def test_a_changed_base_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    weights = load_file(base / "model.safetensors")
    weights = {name: value + 0.01 for name, value in weights.items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"was trained on another base .* now: on {base} with"):
        merge_adapter(adapter, output_dir=tmp_path / "merged")


def test_an_adapter_sent_to_another_base_is_refused_with_both_names(
    base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    other = tiny.write_model(tmp_path / "other", seed=1)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": str(other)}
    file.write_text(json.dumps(config))
    expected = f"{adapter}: was trained on another base .* is at {other} now: on {base} with"
    with pytest.raises(ModelError, match=expected) as caught:
        merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert caught.value.facts["trained_on"] == str(base)
    assert caught.value.facts["base"] == str(other)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("where", ["base", "adapter", "full"])
def test_a_folder_in_use_is_never_written_into(base: Path, tmp_path: Path, where: str) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    before = contents(tmp_path / where)
    with pytest.raises(ModelError, match="is already there and isn't empty"):
        merge_adapter(adapter, output_dir=tmp_path / where)
    assert contents(tmp_path / where) == before


@pytest.mark.parametrize("inside", ["base", "adapter"])
def test_nothing_is_written_inside_of_what_is_read(base: Path, tmp_path: Path, inside: str) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match=rf"lies inside of {tmp_path / inside}, which is read"):
        merge_adapter(adapter, output_dir=tmp_path / inside / "merged")
    assert not (tmp_path / inside / "merged").exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_an_adapter_on_a_tied_embedding_isnt_merged_wrongly(base: Path, tmp_path: Path) -> None:
    options = {"lora_target_modules": ["embed_tokens", "q_proj"]}
    adapter = write_adapter(base, tmp_path / "adapter", **options)
    with pytest.raises(ModelError, match=r"isn't base \+ adapter: its logits differ by"):
        merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_files_that_arent_the_model_leave_nothing_behind(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    sound = merge_module._write

    def damaged(model: Any, folder: Path, **options: Any) -> None:
        sound(model, folder, **options)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][3] += 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(merge_module, "_write", damaged)
    with pytest.raises(ModelError, match=r"1 tensors aren't in the written files .*model.norm"):
        merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_full_disk_is_one_message_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    refused = pytest.raises(ModelError, match=r"merged: can't be written: .*File too large")
    with no_file_larger_than(20_000), refused:
        merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_killed_merge_has_no_name_and_the_next_one_clears_up_behind_it(
    base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    before = contents(base), contents(adapter)

    def killed(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others' threads are no part of a fork
        merge_module._check_files = killed  # all is written, and has no name yet
        try:
            merge_adapter(adapter, output_dir=tmp_path / "merged")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = tmp_path.glob(".merged.*")
    assert (left / "model.safetensors").is_file()
    # In a container the next process may have the same number; and another one's work stays.
    left.rename(tmp_path / f".merged.partial-{os.getpid()}")
    (tmp_path / f".merged.partial-{child}").mkdir()
    others = tmp_path / f".merged.partial-{os.getppid()}"
    others.mkdir()
    merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert list(tmp_path.glob(".merged.*")) == [others]
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert (contents(base), contents(adapter)) == before


def test_an_adapter_of_another_tool_without_our_digest_merges(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    (adapter / "legato_base.json").unlink()
    shutil.move(base, tmp_path / "moved")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "moved")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    merge_adapter(adapter, output_dir=tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()
