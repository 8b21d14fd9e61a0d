from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from legato.errors import ModelError, ModelNotFoundError
from legato.models import facts as facts_module
from legato.models.facts import model_facts
from tests.helpers import families


def write_config(folder: Path, **content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_facts_are_those_of_config_json(tiny_model_dir: Path) -> None:
    facts = model_facts(str(tiny_model_dir))
    assert facts is not None
    assert facts.model_type == "llama"
    assert facts.max_positions == 512
    assert facts.vocab_size == 272
    assert facts.dtype == "float32"
    assert facts.unsupported is None


def test_gpt2_names_its_facts_otherwise(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="gpt2", n_positions=1024, torch_dtype="float16")
    facts = model_facts(str(tmp_path))
    assert facts is not None
    assert (facts.max_positions, facts.dtype) == (1024, "float16")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder-decoder"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            r"quantized \(gptq\); take the model they were made from",
        ),
        ({"model_type": "llama", "quantization_config": [4]}, r"are quantized \(quantized\)"),
        ({"text_config": [1], "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "gemma3", "vision_config": {}}, "gemma3 also reads images or sound"),
        ({"model_type": "mixtral"}, "mixtral is a mixture of experts"),
    ],
)
def test_what_cant_be_trained_is_named(tmp_path: Path, config: dict, reason: str) -> None:
    facts = model_facts(str(write_config(tmp_path, **config)))
    assert facts is not None
    assert facts.unsupported is not None
    assert re.search(reason, facts.unsupported)


def test_facts_of_a_text_model_inside_a_larger_one(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 4096, "vocab_size": 1000}
    write_config(tmp_path, model_type="gemma3", text_config=text, vision_config={})
    facts = model_facts(str(tmp_path))
    assert facts is not None
    assert (facts.max_positions, facts.vocab_size) == (4096, 1000)


def test_a_hub_model_that_isnt_here_yet_has_no_facts() -> None:
    assert model_facts("nobody/nothing-of-this-name") is None


def test_a_missing_folder_is_an_error() -> None:
    with pytest.raises(ModelNotFoundError, match=r"\./nowhere: there is no such folder"):
        model_facts("./nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"can't be read as JSON \(Expecting"),
        ("[" * 200_000, r"can't be read as JSON \(maximum recursion"),
        ("[]", "isn't a JSON object"),
    ],
    ids=["cut", "too deep", "a list"],
)
@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "legato_source.json"])
def test_a_broken_file_of_the_folder_is_an_error_that_names_it(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=rf"{name}: {message}"):
        model_facts(str(tmp_path))


def test_a_model_and_an_adapter_in_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert model_facts(str(tmp_path)) is not None
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter upon the model.*move adapter_config\.json out"):
        model_facts(str(tmp_path))


def test_facts_need_no_torch(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from legato.models.facts import model_facts;"
        f"assert model_facts({str(tiny_model_dir)!r}).vocab_size == 272;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_list_of_mixtures_is_the_list_of_tested_ones() -> None:
    # test_load.py asks transformers about each of them.
    assert families.MIXTURES.keys() == facts_module._SPLIT_EXPERTS
