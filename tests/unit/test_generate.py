from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.errors import DataError, ModelError, ModelNotFoundError
from legato.generate import continue_rows, generate_batch, load_for_generation, stream_answer
from legato.models.compile import compile_in_place
from legato.models.load import load_model
from legato.models.lora import attach_lora
from tests.helpers import tiny


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Path) -> tuple[Any, Any]:
    return load_for_generation(tiny_model_dir, dtype=torch.float32)


def answers_of(*what: Any, **options: Any) -> list[str]:
    return [answer.text for answer in generate_batch(*what, **options)]


def greedy(model: Any, tokenizer: Any, text: str, count: int) -> str:
    """The plainest loop: no cache, no batch, no padding."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = len(ids)
    while len(ids) < start + count:
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
        if token == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


TEXTS = ["two mugs", "a", "seven ropes to Kyoto, please", "three lamps to Oslo"]


def test_answers_are_those_of_a_plain_greedy_loop_in_the_order_of_the_prompts(
    pair: tuple[Any, Any],
) -> None:
    expected = [greedy(*pair, text, 12) for text in TEXTS]
    assert len(set(expected)) == len(TEXTS)
    for batch_size in (1, 2, 4):
        found = answers_of(*pair, TEXTS, max_new_tokens=12, batch_size=batch_size)
        assert found == expected


def test_messages_are_rendered_by_the_chat_template(pair: tuple[Any, Any]) -> None:
    message = {"role": "user", "content": "two mugs"}
    rendered = "<|im_start|>user\ntwo mugs<|im_end|>\n<|im_start|>assistant\n"
    [answer] = answers_of(*pair, [[message]], max_new_tokens=10)
    assert answer == greedy(*pair, rendered, 10)


def test_an_answer_ends_at_a_stop_token_of_model_or_tokenizer(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    text = greedy(model, tokenizer, "two mugs", 12)
    stop = tokenizer(text, add_special_tokens=False)["input_ids"][3]
    [cut] = generate_batch(model, tokenizer, ["two mugs"], max_new_tokens=12)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [stop]
    try:
        [answer] = generate_batch(model, tokenizer, ["two mugs"], max_new_tokens=12)
    finally:
        model.generation_config.eos_token_id = before
    assert text.startswith(answer.text)
    assert len(answer.text) < len(text)
    assert (answer.finish_reason, cut.finish_reason) == ("stop", "length")


def test_samples_come_from_the_seed_and_leave_the_random_state_alone(
    pair: tuple[Any, Any],
) -> None:
    def sample(seed: int) -> list[str]:
        return answers_of(*pair, TEXTS, max_new_tokens=8, temperature=1.0, seed=seed)

    before = torch.random.get_rng_state()
    first = sample(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sample(1) == first
    assert sample(2) != first


def test_sampling_settings_of_the_model_dont_change_greedy_answers(folder: Path) -> None:
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 5.0, "top_k": 3, "max_length": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model, tokenizer = load_for_generation(folder)
    assert answers_of(model, tokenizer, TEXTS, max_new_tokens=12) == [
        greedy(model, tokenizer, text, 12) for text in TEXTS
    ]


def test_a_model_in_training_stays_in_training(folder: Path) -> None:
    model, tokenizer = load_for_generation(folder)
    model.train()
    model.model.norm.eval()  # a part that is kept in evaluation mode stays in it
    answers_of(model, tokenizer, ["two"], max_new_tokens=2)
    assert model.training
    assert model.model.layers.training
    assert not model.model.norm.training


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("own_compiler_state")
def test_compiled_blocks_arent_compiled_for_each_new_token(folder: Path) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model, tokenizer = load_for_generation(folder)
    expected = answers_of(model, tokenizer, ["two mugs"], max_new_tokens=8)
    compile_in_place(model, backend=counting, dynamic=False, recompile_limit=2)
    assert answers_of(model, tokenizer, ["two mugs"], max_new_tokens=8) == expected
    assert not graphs
    model(input_ids=torch.tensor([[1, 2, 3]]))  # and afterwards they are compiled as before
    assert graphs


def test_a_prompt_that_doesnt_fit_is_an_error_with_both_numbers(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ModelError, match=r"500 tokens and max_new_tokens is 20: .* 512 positions"):
        answers_of(*pair, ["a" * 500], max_new_tokens=20)


@pytest.mark.parametrize("text", TEXTS)
def test_a_streamed_answer_comes_in_pieces_that_are_the_whole_answer(
    pair: tuple[Any, Any], text: str
) -> None:
    pieces: list[str] = []
    answer = stream_answer(*pair, text, on_text=pieces.append, max_new_tokens=40)
    assert answer.text == greedy(*pair, text, 40)
    assert "".join(pieces) == answer.text
    assert len(pieces) > 1


def test_a_streamed_answer_ends_where_the_positions_end(pair: tuple[Any, Any]) -> None:
    answer = stream_answer(*pair, "a" * 508, on_text=lambda text: None, max_new_tokens=40)
    assert answer.text == greedy(*pair, "a" * 508, 4)
    assert answer.finish_reason == "length"
    with pytest.raises(ModelError, match=r"512 tokens and .* is 1: .* 512 positions"):
        stream_answer(*pair, "a" * 512, on_text=lambda text: None)


def test_what_was_streamed_when_it_is_interrupted_has_been_handed_out(
    pair: tuple[Any, Any],
) -> None:
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    before = torch.random.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        stream_answer(*pair, TEXTS[0], on_text=interrupt, temperature=1.0)
    assert len(pieces) == 3
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_of_tokens_are_continued_greedily_as_far_as_positions_go(
    pair: tuple[Any, Any],
) -> None:
    model, tokenizer = pair
    texts = [*TEXTS, "a" * 508]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = continue_rows(model, tokenizer, rows, max_new_tokens=12, batch_size=2)
    assert found == [greedy(*pair, text, 12 if len(text) < 500 else 4) for text in texts]


def test_no_prompts_no_answers(pair: tuple[Any, Any]) -> None:
    assert answers_of(*pair, []) == []


def test_the_files_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m", dtype=torch.bfloat16)
    assert load_for_generation(folder)[0].dtype == torch.bfloat16
    assert load_for_generation(folder, dtype=torch.float32)[0].dtype == torch.float32


def write_adapter(base: Path, folder: Path) -> Any:
    adapter = attach_lora(
        load_model(base, dtype=torch.float32), lora_rank=2, lora_alpha=64, base_name=base
    )
    folder.mkdir()
    with torch.no_grad():
        for name, parameter in adapter.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    tensors = {
        key: adapter.model.get_parameter(name).detach() for name, key in adapter.keys.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for name, content in adapter.files.items():
        (folder / name).write_bytes(content)
    return adapter.model.eval()


def test_a_template_that_refuses_and_a_token_without_a_row_are_named_errors(
    folder: Path,
) -> None:
    model, tokenizer = load_for_generation(folder)
    tokenizer.chat_template = "{{ raise_exception('the roles must alternate') }}"
    with pytest.raises(DataError, match=r"^prompt 2: .* refuses .*: .*the roles must alternate"):
        generate_batch(model, tokenizer, ["a", [{"role": "user", "content": "two"}]])
    tokenizer.add_tokens([f"<more {i}>" for i in range(20)])
    with pytest.raises(ModelError, match=r"makes the token '<more 19>' .* and the model has 272,"):
        generate_batch(model, tokenizer, ["two <more 19>"])


def test_a_prompt_without_a_token_or_of_no_characters_is_numbered(folder: Path) -> None:
    model, tokenizer = load_for_generation(folder)
    with pytest.raises(DataError, match=r"^prompt 2: the prompt is empty.* Give a text\.$"):
        generate_batch(model, tokenizer, ["a", ""])
    for prompt in ("\ud800", [{"role": "user", "content": "a\udcff"}]):
        with pytest.raises(DataError, match=r"^prompt 1: the text holds what isn't a character"):
            generate_batch(model, tokenizer, [prompt])


def test_a_temperature_near_zero_takes_the_most_probable_token(folder: Path) -> None:
    model, tokenizer = load_for_generation(folder)
    greedy_answers = answers_of(model, tokenizer, TEXTS, max_new_tokens=4)
    near = answers_of(model, tokenizer, TEXTS, max_new_tokens=4, temperature=1e-320)
    assert near == greedy_answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error_and_no_answer(
    folder: Path, temperature: float
) -> None:
    model, tokenizer = load_for_generation(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match=r"logits aren't numbers \(NaN\).* Use another step"):
        generate_batch(model, tokenizer, ["a"], temperature=temperature)
    with pytest.raises(ModelError, match=r"logits aren't numbers \(NaN\)"):
        stream_answer(model, tokenizer, "a", on_text=print, temperature=temperature)


def test_an_adapter_folder_answers_with_its_base(folder: Path, tmp_path: Path) -> None:
    trained = write_adapter(folder, tmp_path / "adapter")
    model, tokenizer = load_for_generation(tmp_path / "adapter")
    answers = answers_of(model, tokenizer, TEXTS, max_new_tokens=6)
    assert answers == [greedy(trained, tokenizer, text, 6) for text in TEXTS]
    plain, _ = load_for_generation(folder)
    assert answers != answers_of(plain, tokenizer, TEXTS, max_new_tokens=6)


def test_an_adapter_on_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    write_adapter(folder, tmp_path / "adapter")
    file = folder / "model.safetensors"
    changed = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    both = f"was trained on another base than the one that is at {folder} now: on {folder} with"
    with pytest.raises(ModelError, match=both):
        load_for_generation(tmp_path / "adapter")


def test_an_adapter_whose_base_is_gone_is_an_error_that_names_it(
    folder: Path, tmp_path: Path
) -> None:
    write_adapter(folder, tmp_path / "adapter")
    folder.rename(tmp_path / "moved")
    with pytest.raises(ModelNotFoundError, match=f"whose base {folder} can't be found"):
        load_for_generation(tmp_path / "adapter")


@pytest.mark.real_model
def test_the_real_model_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    model, tokenizer = load_for_generation(smollm2_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = answers_of(model, tokenizer, [question], max_new_tokens=12)
    assert answer == "The capital of France is Paris."
